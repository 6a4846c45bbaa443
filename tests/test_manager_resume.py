"""What `resume` takes, what it falls back from, what it tells, and what it leaves alone."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manager_support import (
    Gate,
    Tiny,
    at_point,
    contents,
    failure,
    faults,
    folders,
    manager,
    resumed,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, points
from ckpt.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    StateMismatchError,
    StorageUnavailableError,
    UnsupportedFormatError,
)  # fmt: skip

pytestmark = pytest.mark.full


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "root") if request.param == "local" else f"memory://t-{uuid.uuid4().hex}"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# Nothing there


@pytest.mark.parametrize("place", ["missing", "empty", "debris", "foreign"])
def test_auto_starts_fresh_with_one_info_line_and_latest_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """TORN-04 / CFG-05: 'nothing there' starts fresh and is said so; 'must' raises; scripts need one command line."""
    root = tmp_path / "root"
    if place != "missing":
        root.mkdir()
    if place == "debris":
        (root / ".tmp-step-00000001-x").mkdir()
        (root / ".trash-step-00000001-x").mkdir()
    if place == "foreign":
        (root / "notes").mkdir()
        (root / "readme.md").write_text("mine")
    caplog.set_level(logging.INFO, "ckpt")
    tiny = Tiny(7)
    with manager(root, tiny) as made:
        assert made.resume() == 0
        assert made.receipt is not None and made.receipt.path is None and made.receipt.exactness == "fresh start"
        assert made.receipt.step == 0 and made.receipt.world_size_then is None and made.receipt.skipped == ()
        assert [r.levelname for r in caplog.records] == ["INFO"] and "fresh start" in caplog.text
        for request in ("latest", 0, 3):
            assert failure(lambda r=request: made.resume(r), NotCommittedError).path == str(root)
    assert tiny.step() == 7, "the live state is the script's"


def test_a_root_that_could_not_be_looked_at_is_never_nothing_there(tmp_path: Path) -> None:
    """TORN-04: 'could not look' is its own error, for auto too."""
    write_steps(tmp_path, 1)
    with faults() as fault:
        for verb in ("list", "stat", "read"):
            with manager(tmp_path) as made:
                fault.only = lambda path: ".lock" not in path
                fault.arm(verb, sticky=True)
                failure(made.resume, StorageUnavailableError)
                if verb == "list":
                    failure(made.steps, StorageUnavailableError)
                    failure(lambda: made.latest_step, StorageUnavailableError)
                fault.off()
                assert made.resume() == 1


# What is taken


def test_auto_latest_and_numbers(root: str) -> None:
    write_steps(root, 0, 10, 20, 30)
    assert resumed(root) == 30 and resumed(root, "latest") == 30
    for step in (0, 10, np.int64(20), torch.tensor(30)):
        assert resumed(root, step) == int(step)
    with manager(root) as made:
        error = failure(lambda: made.resume(15), NotCommittedError)
        assert error.step == 15 and "30" in str(error)


def test_best_is_the_best_of_the_line_and_needs_one(root: str) -> None:
    write_steps(root, 1, 2, 3, metrics=lambda s: {"loss": {1: 3.0, 2: 1.0, 3: 2.0}[s]})
    assert resumed(root, "best", monitor="loss") == 2
    assert resumed(root, "best", monitor="loss", mode="max") == 1
    with manager(root, monitor="acc") as made:
        failure(lambda: made.resume("best"), NotCommittedError)


def test_every_kept_step_resumes_whole_also_the_best_one(tmp_path: Path) -> None:
    """OPT-16 / CFG-04: a best step holds all that a resume needs; there are no weights-only steps."""
    model = torch.nn.Linear(2, 2)
    opt = torch.optim.Adam(model.parameters())
    with CheckpointManager(
        tmp_path, {"m": model, "o": opt}, keep_last=1, keep_best=1, monitor="loss", async_save=False
    ) as made:
        for step in (1, 2, 3):
            model(torch.ones(1, 2)).sum().backward()
            opt.step()
            made.save(step, metrics={"loss": step})
    fresh = torch.nn.Linear(2, 2)
    other = torch.optim.Adam(fresh.parameters())
    with CheckpointManager(tmp_path, {"m": fresh, "o": other}, monitor="loss") as made:
        assert made.resume("best") == 1
    assert {state["step"].item() for state in other.state.values()} == {1.0}


def test_newer_damage_is_passed_over_with_one_warning_and_told_in_the_receipt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(tmp_path, 10, 20)
    (tmp_path / "step-00000020" / "rank-00000.safetensors").unlink()
    tiny = Tiny(-1)
    with manager(tmp_path, tiny) as made:
        caplog.clear()
        assert made.resume() == 10 and tiny.step() == 10
        assert len(warnings(caplog)) == 1
        assert "20" in warnings(caplog)[0] and "rank-00000.safetensors is missing" in warnings(caplog)[0]
        assert made.receipt is not None and made.receipt.skipped[0][0] == 20
        assert "missing" in made.receipt.skipped[0][1]
        error = failure(lambda: made.resume(20), CorruptCheckpointError)
        assert error.step == 20
        assert made.resume("latest") == 10


def test_all_damaged_is_an_error_with_every_attempt_never_a_fresh_start(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    flip(tmp_path / "step-00000002" / "rank-00000.safetensors")
    flip(tmp_path / "step-00000001" / "rank-00000.json", 40)
    for request in ("auto", "latest"):
        with manager(tmp_path) as made:
            error = failure(lambda r=request: made.resume(r), CorruptCheckpointError)
            assert isinstance(error, CorruptCheckpointError)
            assert [step for step, _ in error.attempts] == [3, 2, 1] and all(reason for _, reason in error.attempts)


def test_a_damaged_best_is_an_error_and_no_second_best_is_taken(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3, metrics=lambda s: {"loss": float(s)})
    flip(tmp_path / "step-00000001" / "rank-00000.safetensors")
    with manager(tmp_path, monitor="loss") as made:
        failure(lambda: made.resume("best"), CorruptCheckpointError)


def test_after_bytes_of_a_damaged_step_had_landed_all_comes_from_the_older_one(tmp_path: Path) -> None:
    """I8 / I10: what the first attempt overwrote is overwritten again; one moment in the end."""
    write_steps(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002" / "rank-00000.safetensors")
    tiny = Tiny(-1)
    with manager(tmp_path, tiny, async_save=False) as made:
        assert made.resume() == 1 and tiny.step() == 1
        assert made.save(3 if tiny.at(3) else 0)


def test_state_left_half_overwritten_is_refused_by_save_until_a_sound_resume(tmp_path: Path) -> None:
    """I8: if there is no older sound step the manager refuses to save."""
    write_steps(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "rank-00000.safetensors")
    made = manager(tmp_path)
    failure(made.resume, CorruptCheckpointError)
    error = failure(lambda: made.save(2))
    assert "overwritten" in str(error) and isinstance(error.__cause__, CorruptCheckpointError)
    made.close(save_last=True)
    assert folders(tmp_path) == ["step-00000001"]


def test_a_resume_that_a_person_interrupts_half_way_is_refused_by_save_too(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    made = manager(tmp_path)
    points.install(at_point("resume.tensors", interrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            made.resume()
    finally:
        points.install(None)
    failure(lambda: made.save(2))
    assert made.resume() == 1 and made.save(2)
    made.close()


def test_an_object_whose_load_raises_leaves_the_manager_refusing_to_save(tmp_path: Path) -> None:
    class Moody:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise RuntimeError("not this one")

    moody = Moody()
    with CheckpointManager(tmp_path, {"moody": moody}) as made:
        made.save(1)
    made = CheckpointManager(tmp_path, {"moody": moody})
    assert "not this one" in str(failure(made.resume, StateMismatchError))
    failure(lambda: made.save(2))
    made.close()


def test_with_verify_first_nothing_live_changes_before_all_bytes_were_checked(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "rank-00000.safetensors")
    tiny = Tiny(7)
    with manager(tmp_path, tiny, verify_first=True, async_save=False) as made:
        failure(made.resume, CorruptCheckpointError)
        assert tiny.step() == 7


@pytest.mark.parametrize("where", ["shape", "missing", "unexpected", "names"])
def test_a_mismatch_raises_at_once_on_the_newest_and_changes_nothing(tmp_path: Path, where: str) -> None:
    write_steps(tmp_path, 1, 2)
    live: dict[str, Any] = Tiny(7).state
    if where == "shape":
        live["weights"] = torch.nn.Linear(4, 2)
    elif where == "missing":
        live["weights"] = torch.nn.Sequential(torch.nn.Linear(3, 2))
    elif where == "unexpected":
        live["weights"] = torch.nn.Linear(3, 2, bias=False)
    else:
        live["more"] = live.pop("weights")
    module = live.get("weights") or live["more"]
    before = [p.detach().clone() for p in module.parameters()]
    rng = torch.get_rng_state()
    with CheckpointManager(tmp_path, live) as made:
        error = failure(made.resume, StateMismatchError)
        assert isinstance(error, StateMismatchError) and error.step == 2
        assert error.shape or error.missing or error.unexpected
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert live["values"]["n"] == 7 and torch.equal(rng, torch.get_rng_state())


def test_an_unknown_format_of_the_newest_raises_at_once(tmp_path: Path) -> None:
    from ckpt.format.manifest import seal

    write_steps(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / "manifest.json"
    body = path.read_bytes()[: -len(seal(b""))].replace(b'{"format":1,', b'{"format":9,')
    path.write_bytes(seal(body))
    for request in ("auto", "latest", 2):
        with manager(tmp_path) as made:
            error = failure(lambda r=request: made.resume(r), UnsupportedFormatError)
            assert isinstance(error, UnsupportedFormatError) and error.version == 9 and error.hint
    assert resumed(tmp_path, 1) == 1


def test_damage_off_the_line_or_older_than_the_newest_is_no_reason_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(tmp_path, 100, 200, 300)
    tiny = Tiny()
    with manager(tmp_path, tiny, keep_last=None, async_save=False) as made:
        made.resume(100)
        made.save(150 if tiny.at(150) else 0)
    (tmp_path / "step-00000300" / "rank-00000.safetensors").unlink()
    (tmp_path / "step-00000100" / "rank-00000.safetensors").unlink()
    caplog.clear()
    assert resumed(tmp_path) == 150 and warnings(caplog) == []


# What resume leaves alone


def test_resume_deletes_nothing_and_writes_nothing_but_the_lock(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002" / "rank-00000.safetensors")
    (tmp_path / ".tmp-step-00000003-x").mkdir()
    (tmp_path / "step-00000009").mkdir()
    before = contents(tmp_path)
    with manager(tmp_path, keep_last=1) as made:
        assert made.resume() == 1
        assert contents(tmp_path) == before
    assert contents(tmp_path) == before


def test_resume_twice_is_legal_and_loads_again(root: str) -> None:
    write_steps(root, 1, 2)
    tiny = Tiny(-1)
    with manager(root, tiny, async_save=False, keep_last=None) as made:
        assert made.resume() == 2
        tiny.at(99)
        assert made.resume() == 2 and tiny.step() == 2
        assert made.resume(1) == 1 and tiny.step() == 1
        assert made.save(2 if tiny.at(2) else 0) is True, "step 2 was abandoned by going back to 1"
        assert made.steps() == (1, 2)
    assert resumed(root) == 2


def test_resume_first_finishes_this_managers_own_pending_save(tmp_path: Path) -> None:
    """ASYNC-04: a load right after an async save finds it."""
    tiny = Tiny(5)
    with Gate("write.half") as gate, manager(tmp_path, tiny) as made:
        made.save(5)
        gate.wait()
        import threading

        threading.Timer(0.05, gate.open.set).start()
        tiny.at(6)
        assert made.resume() == 5 and tiny.step() == 5


def test_resume_0_is_step_zero_and_not_a_fresh_start(root: str) -> None:
    write_steps(root, 0, 3)
    assert resumed(root, 0) == 0


def test_a_resume_between_forward_and_backward_makes_the_backward_pass_raise(tmp_path: Path) -> None:
    """TENSOR-13: gradients of weights that have changed under the graph would be wrong without a word."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    with CheckpointManager(tmp_path, {"m": model}, async_save=False) as made:
        made.save(1)
        loss = model(torch.ones(1, 3)).sum()
        made.resume()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(torch.ones(1, 3)).sum().backward()
