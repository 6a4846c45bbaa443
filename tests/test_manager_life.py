"""How a manager ends: closed, left by an exception, collected, forked, or with the interpreter."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from manager_support import (
    Gate,
    Tiny,
    debris,
    failure,
    faults,
    manager,
    resumed,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict, points
from ckpt.errors import ClosedError, DeadlineError, LockedError, StorageUnavailableError

pytestmark = pytest.mark.full


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    end = time.monotonic() + 10
    while threads_of_ours() and time.monotonic() < end:
        time.sleep(0.01)
    assert threads_of_ours() == []


# close


def test_close_finishes_ends_threads_frees_the_lock_and_is_fine_twice(tmp_path: Path) -> None:
    made = manager(tmp_path, Tiny(1))
    made.save(1)
    made.close()
    assert threads_of_ours() == [] and made.steps() == (1,)
    made.close()
    made.close(save_last=True)
    with manager(tmp_path) as other:
        assert other.resume() == 1


def test_a_manager_never_used_closes(tmp_path: Path) -> None:
    made = manager(tmp_path / "root")
    made.close(save_last=True)
    assert not (tmp_path / "root").exists()
    failure(lambda: made.save(1), ClosedError)


def test_save_last_saves_the_last_step_given_when_it_was_not_due(tmp_path: Path) -> None:
    """LIFE-07: the final save happens once."""
    tiny = Tiny()
    made = manager(tmp_path, tiny, save_every_steps=10)
    start = made.resume()
    for step in range(start + 1, 14):
        made.save(step if tiny.at(step) else 0)
    made.close(save_last=True)
    assert made.steps() == (10, 13) and resumed(tmp_path) == 13
    made = manager(tmp_path, tiny, save_every_steps=10)
    assert made.resume() == 13
    made.close(save_last=True)
    assert made.steps() == (10, 13)


def test_save_last_is_not_lost_when_an_earlier_save_had_failed(tmp_path: Path) -> None:
    """I9: the earlier failure is raised, after the last step has become durable."""
    tiny = Tiny(1)
    with faults() as fault:
        made = manager(tmp_path, tiny, save_every_steps=2)
        made.save(2 if tiny.at(2) else 0)
        made.wait()
        fault.arm("write_new")
        made.save(4 if tiny.at(4) else 0)
        made._writer.idle(30)
        assert fault.hits == 1
        made._saver.schedule.due(5)
        made._completed = 5
        tiny.at(5)
        error = failure(lambda: made.close(save_last=True), StorageUnavailableError)
        assert error.step == 4
    assert resumed(tmp_path) == 5


@pytest.mark.parametrize("save_last", [False, True])
def test_close_that_raises_has_closed_all_the_same(tmp_path: Path, save_last: bool) -> None:
    tiny = Tiny(1)
    with faults() as fault:
        made = manager(tmp_path, tiny, save_every_steps=1 if not save_last else 100)
        fault.arm("write_new", sticky=True)
        made.save(1)
        failure(lambda: made.close(save_last=save_last), StorageUnavailableError)
        fault.off()
    assert threads_of_ours() == []
    made.close()
    failure(lambda: made.save(2), ClosedError)
    with manager(tmp_path) as other:
        assert other.resume() == 0
    assert debris(tmp_path) == []


def test_close_whose_last_save_is_unsupported_frees_everything(tmp_path: Path) -> None:
    live = StateDict(x=1)
    made = CheckpointManager(tmp_path, {"s": live}, save_every_steps=100)
    made.save(1)
    live["x"] = object()
    failure(lambda: made.close(save_last=True))
    with manager(tmp_path) as other:
        assert other.resume() == 0


def test_close_with_a_hung_writer_ends_at_its_deadline_and_what_comes_late_is_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(tmp_path, 1)
    tiny = Tiny()
    with Gate("write.half") as gate:
        made = manager(tmp_path, tiny)
        made.resume()
        made.save(2 if tiny.at(2) else 0)
        gate.wait()
        began = time.monotonic()
        error = failure(lambda: made.close(timeout=0.1), DeadlineError)
        assert time.monotonic() - began < 5 and error.step == 2 and "not finished within 0.1 s" in str(error)
        assert [r.getMessage() for r in caplog.records if "within" in r.getMessage()] == [], "it is raised, not logged"
        other = manager(tmp_path, Tiny(3), async_save=False)
        failure(other.resume, LockedError)
        gate.open.set()
        made._writer.idle(30)
    other = manager(tmp_path, Tiny(3), async_save=False, lock_timeout=30)
    assert other.resume() == 2, "what came late is the run's newest step, and nobody wrote beside it"
    other.save(3)
    assert other.steps() == (1, 2, 3) and debris(tmp_path) == []
    other.close()


def test_a_save_that_fails_after_its_manager_was_closed_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """I9: nobody is left to be raised at."""
    with faults() as fault, Gate("write.half") as gate:
        made = manager(tmp_path)
        made.save(2)
        gate.wait()
        failure(lambda: made.close(timeout=0), DeadlineError)
        fault.arm("publish")
        gate.open.set()
        with manager(tmp_path, lock_timeout=30) as other:
            assert other.resume() == 0
    assert [r.levelname for r in caplog.records if "nobody asked" in r.getMessage()] == ["ERROR"]


# with


def test_leaving_on_an_exception_finishes_what_is_in_flight_and_starts_nothing(tmp_path: Path) -> None:
    tiny = Tiny(1)
    with pytest.raises(ZeroDivisionError) as caught:
        with manager(tmp_path, tiny) as made:
            made.save(1)
            tiny.at(2)
            _ = 1 / 0
    assert caught.value.__context__ is None
    assert made.steps() == (1,) and threads_of_ours() == []
    failure(lambda: made.save(2), ClosedError)


def test_a_save_failure_stands_behind_the_bodys_exception_and_never_takes_its_place(tmp_path: Path) -> None:
    with faults() as fault:
        fault.arm("publish")
        with pytest.raises(KeyError) as caught:
            with manager(tmp_path) as made:
                made.save(1)
                try:
                    raise OSError("first")
                except OSError:
                    raise KeyError("second")  # noqa: B904
    first = caught.value.__context__
    assert isinstance(first, OSError) and isinstance(first.__context__, StorageUnavailableError)


def test_leaving_without_an_exception_raises_what_failed(tmp_path: Path) -> None:
    with faults() as fault:
        fault.arm("publish")
        with pytest.raises(StorageUnavailableError):
            with manager(tmp_path) as made:
                made.save(1)


def test_leaving_on_an_exception_with_a_hung_writer_ends_in_bounds(tmp_path: Path) -> None:
    with Gate("write.half") as gate:
        with pytest.raises(ZeroDivisionError) as caught:
            with manager(tmp_path, exit_timeout=0.1) as made:
                made.save(1)
                gate.wait()
                _ = 1 / 0
        assert isinstance(caught.value.__context__, DeadlineError)
        gate.open.set()
        made._writer.idle(30)


# Collected


def test_a_manager_in_a_cycle_that_is_collected_on_the_writers_own_thread_does_not_hang(tmp_path: Path) -> None:
    """The collector runs on whichever thread allocates; the writer cannot wait for itself."""
    gc.disable()
    try:
        tiny = Tiny(1)
        made = manager(tmp_path, tiny)
        made.cycle = made  # type: ignore[attr-defined]
        gone = weakref.ref(made)
        lock = made._session.lock
        writer = made._writer
        points.install(lambda name: gc.collect() if name == "write.half" else None)
        with Gate("never"):
            pass
        hold = threading.Event()

        def hook(name: str) -> None:
            if name == "write.half":
                assert hold.wait(30)
                gc.collect()

        points.install(hook)
        made.save(1)
        del made
        began = time.monotonic()
        hold.set()
        assert writer.idle(30)
        assert gone() is None
        while lock.held and time.monotonic() - began < 30:
            time.sleep(0.005)
        assert not lock.held and time.monotonic() - began < 20
    finally:
        points.install(None)
        gc.enable()
    assert resumed(tmp_path) == 1


def test_no_thread_can_be_started_and_the_save_is_done_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny(1)
    with manager(tmp_path, tiny) as made:

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert made.save(1) is True and made.steps() == (1,)
        monkeypatch.undo()
        assert made.save(2 if tiny.at(2) else 0)
    assert resumed(tmp_path) == 2
