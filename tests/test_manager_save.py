"""What `save` promises: the moment, the answer, the failures, and what is durable when."""

from __future__ import annotations

import errno
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import (
    Faults,
    Gate,
    Tiny,
    debris,
    failure,
    faults,
    manager,
    resumed,
    scan,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict, points
from ckpt.errors import (
    CheckpointError,
    RunExistsError,
    StorageUnavailableError,
)  # fmt: skip

pytestmark = pytest.mark.full


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "root") if request.param == "local" else f"memory://t-{uuid.uuid4().hex}"


@pytest.fixture
def fault() -> Iterator[Faults]:
    with faults() as made:
        yield made


# The answer


def test_true_is_started_or_durable_and_false_is_not_due_or_there_already(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CFG-06: the same step reached again is legal and a no-op, also with force, also after a resume."""
    caplog.set_level(logging.INFO, "ckpt")
    with manager(root, save_every_steps=5) as made:
        assert made.save(1) is False and made.save(5) is True
        caplog.clear()
        assert made.save(5) is False and made.save(5, force=True) is False
        assert [r.levelname for r in caplog.records if "saved already" in r.getMessage()] == ["INFO", "INFO"]
        assert made.save(7) is False and made.save(7, force=True) is True
        made.wait()
        assert made.last_save is not None and made.last_save.step == 7 and made.last_save.durable
        assert made.save(7, force=True) is False
        assert made.last_save.step == 7, "skipped saves do not count"
    with manager(root) as made:
        assert made.resume() == 7 and made.save(7, force=True) is False
    assert made.steps() == (5, 7)


def test_a_sync_save_is_durable_when_it_returns(root: str) -> None:
    with manager(root, Tiny(3), async_save=False) as made:
        assert made.save(3) is True
        report = made.last_save
        assert report is not None and report.durable and report.error is None and report.step == 3
        assert report.path == f"{made.root}/step-00000003" and report.bytes > 0
        assert report.stall_s >= report.write_s > 0
        with pytest.raises(AttributeError):
            report.step = 4  # type: ignore[misc]
    assert resumed(root) == 3


def test_step_zero_and_an_empty_state_and_a_save_before_any_resume_are_legal(root: str) -> None:
    with CheckpointManager(root) as made:
        assert made.save(0) is True
    torch.manual_seed(5)
    with CheckpointManager(root) as made:
        assert made.resume(0) == 0 and made.receipt is not None and made.receipt.path is not None
        assert made.receipt.exactness == "bit-exact"


def test_the_report_tells_bytes_of_all_files_and_the_manifest_its_timings(tmp_path: Path) -> None:
    """LIFE-06: the measured save time is in the manifest, for `inspect`."""
    with manager(tmp_path) as made:
        made.save(1)
        made.wait()
        record = scan(tmp_path).steps[0].manifest
        files = [f for f in (tmp_path / "step-00000001").iterdir() if f.name != "manifest.json"]
        assert made.last_save is not None and made.last_save.bytes == sum(f.stat().st_size for f in files)
    assert {"capture_s", "write_s"} <= set(record.timings) and record.timings["write_s"] > 0
    assert record.world["size"] == 1


# Due


@pytest.mark.parametrize(
    ("every", "given", "due"),
    [
        (5, [1, 2, 3, 4, 5, 6, 10], [5, 10]),
        (5, [3, 7, 8, 14, 15, 21], [7, 14, 15, 21]),
        (5, [5], [5]),
        (5, [4], []),
        (1, [1, 2, 3], [1, 2, 3]),
        (None, [3, 9], [3, 9]),
        (10, [0, 5, 10], [0, 10]),
    ],
)
def test_a_save_is_due_when_a_multiple_was_reached_since_the_last_step_given(
    tmp_path: Path, every: int | None, given: list[int], due: list[int]
) -> None:
    with manager(tmp_path, save_every_steps=every, keep_last=None) as made:
        assert [step for step in given if made.save(step)] == due
    assert made.steps() == tuple(due)


def test_after_a_resume_the_interval_counts_from_the_resumed_step(tmp_path: Path) -> None:
    write_steps(tmp_path, 7)
    with manager(tmp_path, save_every_steps=5, keep_last=None) as made:
        assert made.resume() == 7
        assert [step for step in range(8, 16) if made.save(step)] == [10, 15]


def test_minutes_run_since_the_last_started_save_and_either_makes_a_save_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("ckpt.manager.due.time.monotonic", lambda: now[0])
    with manager(tmp_path, save_every_steps=100, save_every_minutes=2, keep_last=None) as made:
        assert made.save(1) is False
        now[0] += 119
        assert made.save(2) is False
        now[0] += 1
        assert made.save(3) is True and made.save(4) is False
        now[0] += 60
        assert made.save(100) is True, "steps"
        now[0] += 119
        assert made.save(101) is False, "the save by steps started the clock anew"
        now[0] += 1
        assert made.save(102) is True


# The moment


def test_what_the_caller_does_after_save_never_reaches_the_checkpoint(tmp_path: Path) -> None:
    """ASYNC-01: tensors and plain objects alike equal a snapshot taken at the call."""
    import numpy as np

    tiny = Tiny(1)
    extra = StateDict(
        array=np.arange(4.0), nested={"list": [1, [2]], "tensor": torch.ones(3), "set": {1}}, text="a", flag=True
    )
    with Gate("write.begin") as gate, CheckpointManager(tmp_path, {**tiny.state, "extra": extra}) as made:
        made.save(1)
        gate.wait()
        tiny.at(2)
        extra["array"] += 100
        extra["nested"]["list"][1].append("late")
        extra["nested"]["tensor"].mul_(0)
        extra["nested"]["set"].add(2)
        extra["flag"] = False
        gate.open.set()
    back, other = Tiny(), StateDict()
    with CheckpointManager(tmp_path, {**back.state, "extra": other}) as made:
        assert made.resume() == 1
    assert back.step() == 1
    assert other["array"].tolist() == [0, 1, 2, 3] and other["flag"] is True and other["text"] == "a"
    assert other["nested"]["list"] == [1, [2]] and other["nested"]["set"] == {1}
    assert other["nested"]["tensor"].tolist() == [1, 1, 1]


def test_under_a_slow_writer_every_checkpoint_is_one_moment(tmp_path: Path) -> None:
    """ASYNC-01 / I10: a step each save, mutated without a pause; no checkpoint holds two steps."""
    tiny = Tiny()
    points.install(lambda name: time.sleep(0.002) if name in ("write.begin", "write.half", "publish.before") else None)
    try:
        with manager(tmp_path, tiny, keep_last=None) as made:
            for step in range(1, 40):
                made.save(step if tiny.at(step) else 0)
    finally:
        points.install(None)
    for step in (1, 2, 20, 38, 39):
        assert resumed(tmp_path, step) == step


def test_a_state_whose_structure_changes_between_saves_is_never_mixed(tmp_path: Path) -> None:
    """The staging plan is reused only for the same names, types and shapes in the same order."""
    changes: list[dict[str, Any]] = [
        {"a": torch.full((3,), 1.0), "b": torch.full((2, 2), 2.0)},
        {"b": torch.full((2, 2), 3.0), "a": torch.full((3,), 4.0)},
        {"a": torch.full((4,), 5.0), "b": torch.full((2, 2), 6.0)},
        {"a": torch.full((3,), 7, dtype=torch.int32), "b": torch.full((2, 2), 8.0)},
        {"a": torch.full((3,), 9.0, dtype=torch.bfloat16), "b": torch.full((1, 4), 10.0)},
        {"a": torch.full((3,), 11.0)},
        {},
        {"a": torch.full((300_000,), 12.0), "c": torch.zeros(0)},
        {"a": torch.full((3,), 13.0), "b": torch.full((2, 2), 14.0).t()},
        {"a": torch.full((3,), 15.0), "b": torch.full((2, 2), 16.0)},
    ]
    live = StateDict()
    with CheckpointManager(tmp_path, {"s": live}, keep_last=None) as made:
        for step, content in enumerate(changes):
            live.clear()
            live.update({key: value.clone() for key, value in content.items()})
            made.save(step)
            for value in live.values():
                value.fill_(-1)
    for step, content in enumerate(changes):
        back = StateDict()
        with CheckpointManager(tmp_path, {"s": back}) as made:
            made.resume(step)
        assert set(back) == set(content)
        for key, value in content.items():
            assert back[key].dtype == value.dtype and torch.equal(back[key], value), (step, key)


def test_a_save_from_inside_a_save_is_refused_and_the_outer_one_is_whole(tmp_path: Path) -> None:
    """LIFE-01: a handler or a hook that saves while the state is being taken would mix two moments."""
    caught: list[CheckpointError] = []

    class Meddler:
        def state_dict(self) -> dict[str, int]:
            for call in (lambda: made.save(2), made.close, made.resume, made.wait):
                caught.append(failure(call))
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    tiny = Tiny(1)
    made = CheckpointManager(tmp_path, {**tiny.state, "meddler": Meddler()})
    made.save(1)
    made.close()
    assert len(caught) == 4 and all("from within a save" in str(error) for error in caught)
    assert made.steps() == (1,)


def test_saves_from_two_threads_go_one_after_the_other(tmp_path: Path) -> None:
    tiny = Tiny()
    lock = threading.Lock()
    count = [0]
    failed: list[BaseException] = []
    made = manager(tmp_path, tiny, keep_last=None)

    def work() -> None:
        try:
            for _ in range(15):
                with lock:  # the caller's own order of changing and saving
                    count[0] += 1
                    made.save(count[0] if tiny.at(count[0]) else 0)
        except BaseException as error:
            failed.append(error)

    def look() -> None:
        while count[0] < 30 and not failed:
            made.steps()
            made.wait()

    threads = [threading.Thread(target=work), threading.Thread(target=work), threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    assert failed == [] and made.steps() == tuple(range(1, 31))
    for step in (1, 15, 30):
        assert resumed(tmp_path, step) == step


# Order of steps


def test_a_lower_step_without_a_resume_is_a_value_error_naming_both(root: str) -> None:
    with manager(root, async_save=False) as made:
        made.save(10)
        with pytest.raises(ValueError, match=r"9.*10"):
            made.save(9)
        assert made.save(11)


def test_a_lower_step_than_one_that_was_only_skipped_is_fine(tmp_path: Path) -> None:
    with manager(tmp_path, save_every_steps=10) as made:
        made.save(10)
        assert made.save(15) is False and made.save(12) is False


def test_a_first_save_without_resume_continues_above_the_newest_and_is_refused_below(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Never a silent second history: one WARNING, or RunExistsError that names both ways out."""
    with manager(root, Tiny(5), async_save=False) as made:
        made.save(5)
    for step in (0, 4, 5):
        with manager(root, Tiny(step)) as made:
            error = failure(lambda made=made, step=step: made.save(step), RunExistsError)
            assert "resume" in str(error) and "another root" in str(error)
    caplog.clear()
    with manager(root, Tiny(6), async_save=False) as made:
        assert made.save(6) and made.save(7)
        assert len(warnings(caplog)) == 1
        assert made.steps() == (5, 6, 7)
    with manager(root) as made:
        assert made.resume() == 7


def test_after_failed_saves_the_same_step_can_be_saved(tmp_path: Path, fault: Faults) -> None:
    tiny = Tiny(1)
    with manager(tmp_path, tiny) as made:
        fault.arm("write_new")
        assert made.save(1) is True
        error = failure(made.wait, StorageUnavailableError)
        assert error.step == 1 and error.errno == errno.EIO and error.stage
        assert made.save(1) is True
        made.wait()
        assert made.last_save is not None and made.last_save.durable
    assert resumed(tmp_path) == 1 and debris(tmp_path) == []
