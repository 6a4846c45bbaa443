"""What a manager says to a person: each sentence names the next thing to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import Tiny, manager, write_steps

import ckpt
from ckpt import ResumableLoader, StateDict

pytestmark = pytest.mark.quick


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_an_unregistered_loader_is_warned_of_once_at_the_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ResumableLoader(list(range(6)), 2)
    with manager(tmp_path) as made:
        for last in (1, 2):
            list(made.loop(last, loader))
        (warning,) = said(caplog, logging.WARNING)
        assert 'register it: state["loader"] = loader' in warning
        assert made.receipt is not None and made.receipt.exactness == "fresh start"


def test_a_plain_loader_is_told_what_can_be_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]
    with manager(tmp_path) as made:
        list(made.loop(1, loader))
    (warning,) = said(caplog, logging.WARNING)
    assert "a DataLoader cannot be resumed" in warning and "ckpt.ResumableLoader" in warning


def test_a_registered_loader_or_sampler_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = ResumableLoader(list(range(6)), 2)
    sampler = ckpt.ResumableSampler(6)
    for name, given, state in (
        ("a", loader, {"loader": loader}),
        ("b", torch.utils.data.DataLoader(list(range(6)), sampler=sampler), {"sampler": sampler}),  # type: ignore
    ):
        with ckpt.CheckpointManager(tmp_path / name, state) as made:
            list(made.loop(1, given))
    assert said(caplog, logging.WARNING) == []


def test_a_missing_metric_and_a_finished_run_say_what_they_are_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    with manager(tmp_path, monitor="loss") as made:
        list(made.loop(5))
        (warning,) = said(caplog, logging.WARNING)
        assert "manager.save(step, metrics={'loss': ...})" in warning
        caplog.clear()
        assert list(made.loop(3)) == []
    (line,) = said(caplog, logging.INFO)
    assert line == f"nothing left to do: step 5 of total=3 is done in {tmp_path}"


@pytest.mark.parametrize("state", [[1], "model", torch.nn.Linear(1, 1)])
def test_a_state_that_is_no_mapping_is_a_type_error_that_says_so(tmp_path: Path, state: Any) -> None:
    with pytest.raises(TypeError, match=f"state must be a mapping .*, not {type(state).__name__}"):
        ckpt.CheckpointManager(tmp_path, state)


def test_attributes_of_a_state_dict_are_answered_with_its_items() -> None:
    progress = StateDict(epoch=1)
    with pytest.raises(AttributeError, match=r'write state\["epoch"\] = \.\.\.'):
        progress.epoch = 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r'read state\["epoch"\]'):
        _ = progress.epoch  # type: ignore[attr-defined]


def test_reports_are_one_line_as_text_and_whole_as_repr(tmp_path: Path) -> None:
    write_steps(tmp_path, 7)
    with manager(tmp_path) as made:
        made.resume()
        where = tmp_path / "step-00000007"
        assert str(made.receipt) == f"resumed step 7 of {where}: bit-exact, 2 objects"
        assert repr(made.receipt).startswith("Receipt(step=7, ") and "environment_now" in repr(made.receipt)
        made.save(8)
        made.wait()
        assert str(made.last_save).startswith(f"saved step 8 as {tmp_path / 'step-00000008'}: ")
    with manager(tmp_path / "new") as made:
        made.resume()
        assert str(made.receipt) == "fresh start"
    failed = ckpt.SaveReport(9, "x", 0, 0.0, 0.0, False, ckpt.CheckpointError("no room"))
    assert str(failed) == "step 9 was not saved: no room"


@pytest.mark.parametrize("root", ["{}/root", "memory://{}/root"])
def test_a_lock_that_is_waited_for_is_told_once_and_the_error_stands_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, root: str
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    root = root.format(tmp_path)
    with manager(root) as first:
        first.resume()
        caplog.clear()
        with manager(root, Tiny(), lock_timeout=0.2) as second, pytest.raises(ckpt.LockedError) as caught:
            second.resume()
        assert caught.value.__cause__ is None and (
            caught.value.__suppress_context__ or caught.value.__context__ is None
        )
        (line,) = said(caplog, logging.INFO)
        assert line.startswith("waiting up to 0.2 s for the lock of ") and f"process {first._pid}" in line
        caplog.clear()
        with manager(root, lock_timeout=0) as third, pytest.raises(ckpt.LockedError):
            third.resume()
        assert said(caplog, logging.INFO) == []
