"""What a save that fails tells, and to whom; what may stand in its way; and what goes on afterwards."""

from __future__ import annotations

import errno
import logging
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manager_support import (
    Faults,
    Gate,
    Tiny,
    debris,
    failure,
    faults,
    manager,
    resumed,
    warnings,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict
from ckpt.commit.lock import RootLock
from ckpt.errors import (
    CheckpointError,
    CommitUnknown,
    DeadlineError,
    LockedError,
    OutOfSpaceError,
    StorageUnavailableError,
    UnsupportedStateError,
)  # fmt: skip

pytestmark = pytest.mark.full


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "root") if request.param == "local" else f"memory://t-{uuid.uuid4().hex}"


@pytest.fixture
def fault() -> Iterator[Faults]:
    with faults() as made:
        yield made


# Failures of a save in the background


def test_a_background_failure_is_raised_once_at_the_next_save_which_starts_nothing(
    tmp_path: Path, fault: Faults
) -> None:
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
        assert len(told) == 2 and "2 skipped so far" in told[1] and made.skipped_saves == 2
        with pytest.raises(AttributeError):
            made.skipped_saves = 0  # type: ignore[misc]
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


def test_a_run_that_another_one_has_overtaken_is_told_so_even_where_failures_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the lock are always raised: the run would go on for good without a checkpoint."""
    monkeypatch.setattr(RootLock, "acquire", lambda self, timeout: None)
    tinies = Tiny(1), Tiny(1)
    old, new = manager(tmp_path, tinies[0], on_failure="warn"), manager(tmp_path, tinies[1], async_save=False)
    old.save(1)
    old.wait()
    new.resume()
    new.save(2 if tinies[1].at(2) else 0)
    for step in (3, 4):
        assert old.save(step if tinies[0].at(step) else 0)
        assert failure(old.wait, LockedError).step == 2
        assert old.last_save is not None and isinstance(old.last_save.error, LockedError)
    old.save(5 if tinies[0].at(5) else 0)
    failure(old.close, LockedError)
    new.close()
    assert resumed(tmp_path) == 2
