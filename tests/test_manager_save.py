"""What `save` promises: the moment, the answer, the failures, and what is durable when."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import (
    Faults, Gate, Tiny, at_point, debris, failure, faults, folders, make_manifest, manager, plant, resumed, scan,
    warnings, write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict, points
from ckpt.errors import (
    CheckpointError, ClosedError, CommitUnknown, DeadlineError, LockedError, OutOfSpaceError, RunExistsError,
    StorageUnavailableError, UnsupportedStateError,
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
    assert len(caught) == 4 and all("taking the state" in str(error) for error in caught)
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


# Failures of a save in the background


def test_a_background_failure_is_raised_once_at_the_next_save_which_starts_nothing(tmp_path: Path, fault: Faults) -> None:
    """ASYNC-05: raised at the next step hook."""
    tiny = Tiny(1)
    with manager(tmp_path, tiny) as made:
        fault.arm("write_new", code=errno.ENOSPC)
        assert made.save(1) is True
        made._writer.idle(30)
        assert made.last_save is not None and made.last_save.durable is False
        assert isinstance(made.last_save.error, OutOfSpaceError)
        error = failure(lambda: made.save(2 if tiny.at(2) else 0), OutOfSpaceError)
        assert error is made.last_save.error and error.step == 1
        assert made.steps() == () and made.save(2) is True
        made.wait()
    assert resumed(tmp_path) == 2


@pytest.mark.parametrize("call", ["wait", "close", "resume"])
def test_a_background_failure_is_raised_by_wait_close_and_resume_too(tmp_path: Path, fault: Faults, call: str) -> None:
    made = manager(tmp_path)
    fault.arm("publish")
    made.save(1)
    assert failure(getattr(made, call), StorageUnavailableError).step == 1
    made.close()


def test_two_failures_are_raised_as_one_with_the_second_as_context(tmp_path: Path, fault: Faults) -> None:
    made = manager(tmp_path)
    fault.arm("write_new", sticky=True)
    made.save(1)
    made._writer.idle(30)
    made._session.errors.append(second := CheckpointError("a second one"))
    error = failure(made.wait)
    assert error.step == 1 and error.__context__ is second
    made.wait()
    made.close()


def test_with_warn_a_failure_is_one_warning_record_and_nothing_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Faults
) -> None:
    """ASYNC-05 / DUR-01: 'warn' lets the training go on."""
    with manager(tmp_path, on_failure="warn") as made:
        for step, verb in enumerate(["write_new", "publish", "make_folder", "list"], start=1):
            fault.arm(verb)
            caplog.clear()
            assert made.save(step) is (verb != "list" or step > 1)
            made.wait()
            assert fault.hits == 1 and len(warnings(caplog)) == 1, verb
            assert made.last_save is not None and made.last_save.step == step and made.last_save.error is not None
        assert made.save(9)
    assert made.steps() == (9,)


def test_with_warn_a_root_that_cannot_be_looked_at_at_the_first_save_is_a_warning_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Faults
) -> None:
    with manager(tmp_path, on_failure="warn") as made:
        fault.arm("list")
        assert made.save(1) is False
        assert made.last_save is not None and made.last_save.error is not None and len(warnings(caplog)) == 1
        assert made.save(1) is True
    with manager(tmp_path, on_failure="raise") as made:
        fault.arm("list")
        assert failure(lambda: made.save(2), StorageUnavailableError).errno == errno.EIO


def test_a_sync_save_that_failed_under_warn_is_not_true(tmp_path: Path, fault: Faults) -> None:
    """DUR-04: save never says success unless the commit record was read back."""
    with manager(tmp_path, on_failure="warn", async_save=False) as made:
        fault.arm("publish")
        assert made.save(1) is False
        fault.off()
        assert made.save(1) is True


def test_errors_of_arguments_lock_and_unsupported_state_raise_under_warn(tmp_path: Path) -> None:
    live = StateDict(x=1)
    with CheckpointManager(tmp_path, {"s": live}, on_failure="warn") as made:
        made.save(1)
        with pytest.raises(TypeError):
            made.save("2")  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            made.save(0)
        with pytest.raises(LockedError):
            manager(tmp_path, on_failure="warn").save(2)
        live["x"] = {"deep": [object()]}
        error = failure(lambda: made.save(2), UnsupportedStateError)
        assert "deep" in str(error)


def test_a_value_that_turned_unsupported_is_refused_before_any_write(tmp_path: Path, fault: Faults) -> None:
    live = StateDict(x=1)
    with CheckpointManager(tmp_path, {"s": live}) as made:
        made.save(1)
        made.wait()
        live["x"] = lambda: None
        fault.calls.clear()
        error = failure(lambda: made.save(2), UnsupportedStateError)
        assert isinstance(error, UnsupportedStateError) and error.name and error.name.startswith("s/x")
        assert not {"make_folder", "write_new", "publish"} & set(fault.calls)
        live["x"] = 2
        assert made.save(2)


def test_a_state_dict_that_raises_leaves_the_manager_usable(tmp_path: Path) -> None:
    class Moody:
        fail = False

        def state_dict(self) -> dict[str, int]:
            if self.fail:
                raise RuntimeError("not now")
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    moody = Moody()
    with CheckpointManager(tmp_path, {"moody": moody}) as made:
        moody.fail = True
        with pytest.raises(RuntimeError, match="not now"):
            made.save(1)
        moody.fail = False
        assert made.save(1)
    assert made.steps() == (1,)


def test_too_old_a_durable_step_raises_in_any_policy_once(tmp_path: Path, fault: Faults, monkeypatch: Any) -> None:
    now = [1000.0]
    monkeypatch.setattr("ckpt.manager.saving.time.monotonic", lambda: now[0])
    monkeypatch.setattr("ckpt.manager.session.time.monotonic", lambda: now[0])
    with manager(tmp_path, on_failure="warn", max_durable_age=60) as made:
        assert made.save(1)
        made.wait()
        fault.arm("write_new", sticky=True)
        now[0] += 59
        assert made.save(2)
        made.wait()
        now[0] += 2
        error = failure(lambda: made.save(3))
        assert "max_durable_age" in str(error) and "61 s" in str(error)
        fault.off()
        assert made.save(3), "one who goes on can make the next step durable"
        made.wait()
        now[0] += 50
        assert made.save(4)
    assert made.steps() == (1, 3, 4)


# Commit unknown


def test_a_commit_that_could_not_be_confirmed_is_commit_unknown_and_the_next_resume_tells(
    tmp_path: Path, fault: Faults
) -> None:
    """DUR-05: a failed fsync of the root fails the save, and is not tried again in place."""
    tiny = Tiny(1)
    with manager(tmp_path, tiny, async_save=False) as made:
        made.save(1)
        fault.arm("sync_folder", 1)
        error = failure(lambda: made.save(2 if tiny.at(2) else 0), CommitUnknown)
        assert error.step == 2 and made.last_save is not None and made.last_save.durable is False
        assert made.save(3 if tiny.at(3) else 0)
        assert made.steps() == (1, 2, 3)
    assert resumed(tmp_path, 2) == 2


def test_a_step_whose_commit_was_unknown_can_be_saved_again(tmp_path: Path, fault: Faults) -> None:
    tiny = Tiny(1)
    with manager(tmp_path, tiny, async_save=False) as made:
        fault.arm("sync_folder", 1)
        failure(lambda: made.save(1), CommitUnknown)
        assert made.save(1) is True and made.steps() == (1,)
    assert resumed(tmp_path) == 1 and debris(tmp_path) == []


# Busy


def test_a_save_that_is_due_while_one_is_written_waits(tmp_path: Path) -> None:
    tiny = Tiny(1)
    with Gate("write.half") as gate, manager(tmp_path, tiny) as made:
        made.save(1)
        gate.wait()
        timer = threading.Timer(0.05, gate.open.set)
        timer.start()
        assert made.save(2 if tiny.at(2) else 0) is True
        assert made.steps() == (1,), "the first was durable before the second was taken"
        timer.join()
        made.wait()
        assert made.last_save is not None and made.last_save.stall_s >= 0.03, "busy waiting is part of the stall"
    assert made.steps() == (1, 2)


def test_with_skip_a_busy_save_is_skipped_and_counted_and_force_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    with Gate("write.half") as gate, manager(tmp_path, when_busy="skip") as made:
        assert made.save(1) is True
        gate.wait()
        caplog.clear()
        assert made.save(2) is False and made.save(3) is False
        told = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
        assert len(told) == 2 and "2 skipped so far" in told[1]
        threading.Timer(0.05, gate.open.set).start()
        assert made.save(4, force=True) is True
    assert made.steps() == (1, 4)


def test_a_save_that_waits_too_long_is_a_deadline_error_and_the_one_in_flight_goes_on(tmp_path: Path) -> None:
    with Gate("write.half") as gate, manager(tmp_path, deadline_s=0.1) as made:
        made.save(1)
        gate.wait()
        for call in (lambda: made.save(2), made.wait, lambda: made.wait(0.01), made.resume):
            error = failure(call, DeadlineError)
            assert isinstance(error, TimeoutError) and error.step == 1
        gate.open.set()
        made._writer.idle(30)
        assert made.save(2)
    assert made.steps() == (1, 2)


# What stands in the way


@pytest.mark.parametrize("shape", ["file", "link", "dangling", "folder with a thesis", "another run", "pinned"])
def test_what_is_not_ours_in_the_way_is_never_touched_and_told(tmp_path: Path, shape: str) -> None:
    write_steps(tmp_path, 1, 5)
    with manager(tmp_path) as made:
        made.resume(1)
        (tmp_path / "keep").mkdir()
        place = tmp_path / "step-00000007"
        if shape == "file":
            place.write_text("mine")
        elif shape == "link":
            place.symlink_to("keep")
        elif shape == "dangling":
            place.symlink_to("nowhere")
        elif shape == "folder with a thesis":
            place.mkdir()
            (place / "thesis.tex").write_text("mine")
        elif shape == "another run":
            plant(tmp_path, make_manifest(step=7, incarnation=0, run="c" * 32))
        else:
            made.pin(5)
            place = tmp_path / "step-00000005"
        before = sorted(str(p) for p in tmp_path.rglob("*") if not p.name.startswith("."))
        step = 5 if shape == "pinned" else 7
        made.save(step)
        error = failure(made.wait, StorageUnavailableError)
        assert error.path == str(place) and error.errno == errno.EEXIST and error.hint
        assert sorted(str(p) for p in tmp_path.rglob("*") if not p.name.startswith(".")) == before
        assert made.save(8)
        made.wait()


@pytest.mark.parametrize("shape", ["empty folder", "torn remains", "damaged manifest", "cut file"])
def test_remains_of_ours_in_the_way_are_removed(tmp_path: Path, shape: str) -> None:
    """TORN-07: each save is a new generation, whole; what was torn before is gone."""
    write_steps(tmp_path, 1, 5)
    place = tmp_path / "step-00000005"
    if shape == "empty folder":
        for file in place.iterdir():
            file.unlink()
    elif shape == "torn remains":
        (place / "manifest.json").unlink()
    elif shape == "damaged manifest":
        (place / "manifest.json").write_bytes(b"\0" * 100)
    else:
        (place / "rank-00000.safetensors").write_bytes(b"")
    tiny = Tiny(-1)
    with manager(tmp_path, tiny, async_save=False) as made:
        assert made.resume() == 1
        assert made.save(5 if tiny.at(5) else 0)
    assert resumed(tmp_path) == 5 and debris(tmp_path) == []


# No room


def test_need_and_free_are_compared_before_anything_is_written(tmp_path: Path, fault: Faults, monkeypatch: Any) -> None:
    """DUR-02: pre-flight need-versus-free check."""
    from ckpt.storage.local import LocalStorage

    with manager(tmp_path) as made:
        made.save(1)
        made.wait()
        monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1000)
        fault.calls.clear()
        made.save(2)
        error = failure(made.wait, OutOfSpaceError)
        assert error.free == 1000 and error.needed and error.needed > 1000 and error.errno == errno.ENOSPC
        assert "1,000" in str(error) and not {"make_folder", "write_new"} & set(fault.calls)
        monkeypatch.undo()
        assert made.save(3)


def test_debris_that_fills_the_disk_is_swept_before_a_save_gives_up(tmp_path: Path, monkeypatch: Any) -> None:
    from ckpt.storage.local import LocalStorage

    with manager(tmp_path) as made:
        made.save(1)
        made.wait()
        (tmp_path / ".trash-step-00000000-x").mkdir()
        free = lambda self: 0 if debris(tmp_path) else 1 << 40  # noqa: E731
        monkeypatch.setattr(LocalStorage, "free_bytes", free)
        assert made.save(2)
        made.wait()
    assert folders(tmp_path) == ["step-00000001", "step-00000002"]


def test_monitor_missing_from_metrics_is_one_warning_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path, monitor="loss", keep_best=1, async_save=False) as made:
        made.save(1)
        made.save(2, metrics={"other": 1.0})
        made.save(3, metrics={"loss": 2.0})
        assert len(warnings(caplog)) == 1 and "loss" in warnings(caplog)[0]
        assert made.best_step == 3
        made.save(4, metrics={"loss": math.nan})
        assert made.best_step == 3


def test_monitor_without_keep_best_tells_the_best_and_keeps_nothing_more(tmp_path: Path) -> None:
    with manager(tmp_path, monitor="acc", mode="max", keep_last=2, async_save=False) as made:
        for step, value in enumerate([0.9, 0.1, 0.5, 0.2], start=1):
            made.save(step, metrics={"acc": value})
        assert made.best_step == 3 and made.steps() == (3, 4)


def test_after_close_save_is_refused(root: str) -> None:
    made = manager(root)
    made.save(1)
    made.close()
    for call in (lambda: made.save(2), made.resume, made.wait, lambda: made.loop(3), lambda: made.pin(1)):
        failure(call, ClosedError)
    assert made.steps() == (1,) and made.latest_step == 1 and made.last_save is not None and made.receipt is None


def test_a_save_is_logged_with_bytes_and_both_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    with manager(tmp_path) as made:
        made.save(1)
    assert any("step 1 is durable" in r.getMessage() and "training waited" in r.getMessage() for r in caplog.records)
    assert at_point is not None
