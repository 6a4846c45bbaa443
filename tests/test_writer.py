"""The writer's thread and its end: threads that do not start, interrupts, managers that go while it is writing."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from manager_support import Gate, Tiny, failure, manager, resumed, write_steps

from ckpt import CheckpointManager, StateDict, points
from ckpt.commit import transfer
from ckpt.errors import CheckpointError, DeadlineError
from ckpt.manager.writer import Writer

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    yield
    points.install(None)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


# Threads that cannot be started


@pytest.mark.parametrize("size", [1, 3000])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_where_no_thread_can_be_started_saves_and_resumes_are_done_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, error: type[Exception]
) -> None:
    """Large states are written and read by several threads, small ones are not; the next call is as good as any."""
    live = StateDict(w=torch.ones(size, size))
    with CheckpointManager(tmp_path, {"s": live}) as made:
        made.save(1)

    def refuse(self: threading.Thread) -> None:
        raise error("can't start new thread")

    live["w"] = torch.zeros(size, size)
    made = CheckpointManager(tmp_path, {"s": live})
    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", refuse)
        assert made.resume() == 1 and bool((live["w"] == 1).all())
        live["w"].fill_(2)
        assert made.save(2) is True
        made.wait()
        assert made.steps() == (1, 2)
    live["w"].fill_(3)
    assert made.save(3)
    made.close()
    with CheckpointManager(tmp_path, {"s": live}) as made:
        assert made.resume() == 3 and bool((live["w"] == 3).all())


def test_a_job_done_on_the_callers_thread_keeps_nobody_elses_deadline_from_running() -> None:
    writer = Writer()
    begun, go = threading.Event(), threading.Event()
    writer.stop(lambda: None)  # from now on no thread is started

    def job() -> None:
        begun.set()
        assert go.wait(30)

    caller = threading.Thread(target=lambda: writer.submit(job))
    caller.start()
    assert begun.wait(30)
    began = time.monotonic()
    assert not writer.idle(0.05) and time.monotonic() - began < 20
    ended: list[bool] = []
    writer.stop(lambda: ended.append(writer.busy))
    assert ended == []
    go.set()
    caller.join()
    assert ended == [False] and writer.idle(0)


# Interrupts


def test_a_save_interrupted_before_it_was_handed_over_is_not_taken_for_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name != "ckpt-writer":
            return start(self)
        raise KeyboardInterrupt

    made = manager(tmp_path, Tiny(1))
    with monkeypatch.context() as once:
        once.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.save(1)
    assert made.steps() == () and made.save(1) is True
    made.close()
    assert resumed(tmp_path) == 1


def test_a_save_interrupted_after_it_was_handed_over_goes_on_and_is_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager(tmp_path, Tiny(1))
    submit = Writer.submit

    def interrupted(self: Writer, job: Callable[[], None]) -> None:
        submit(self, job)
        raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(Writer, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.save(1)
    made.wait()
    assert made.save(1, force=True) is False and made.steps() == (1,)
    made.close()


def test_an_interrupt_inside_a_save_on_the_callers_thread_leaves_the_step_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager(tmp_path, Tiny(1))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def strike(name: str) -> None:
        if name == "publish.before":
            points.install(None)
            raise KeyboardInterrupt

    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", refuse)
        points.install(strike)
        with pytest.raises(KeyboardInterrupt):
            made.save(1)
        assert made.steps() == ()
        assert made.save(1) is True
    made.close()
    assert resumed(tmp_path) == 1


# One moment (I10)


@pytest.mark.parametrize("point", points.RESUME_POINTS)
def test_a_handler_that_saves_within_a_resume_is_refused_and_commits_no_mixture(tmp_path: Path, point: str) -> None:
    write_steps(tmp_path, 1, 2, 3)
    tiny = Tiny(3)
    caught: list[CheckpointError] = []
    with manager(tmp_path, tiny, keep_last=None) as made:

        def handler(name: str) -> None:
            if name == point:
                for call in (lambda: made.save(4), made.resume, made.close, lambda: next(made.loop(9))):
                    caught.append(failure(call))

        points.install(handler)
        assert made.resume(1) == 1 and tiny.step() == 1
        points.install(None)
        assert len(caught) == 4 and all("from within" in str(error) for error in caught)
        assert made.steps() == (1, 2, 3)
        assert made.save(4 if tiny.at(4) else 0)
    assert resumed(tmp_path) == 4


@pytest.mark.parametrize("where", ["lock", "begin", "prepare"])
def test_a_handler_that_saves_within_a_save_is_refused_wherever_it_strikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tiny = Tiny(5)
    made = manager(tmp_path, tiny, save_every_steps=5)
    caught: list[CheckpointError] = []
    owner, name = {
        "lock": (made._session.lock, "acquire"),
        "begin": (made._session.scanner, "scan"),
        "prepare": (made._saver, "prepare"),
    }[where]
    real = getattr(owner, name)

    def struck(*args: object) -> object:
        if not caught:
            caught.append(failure(lambda: made.save(5)))
        return real(*args)

    monkeypatch.setattr(owner, name, struck)
    assert made.save(4 if where == "prepare" else 5, force=where != "prepare") is (where != "prepare")
    made.save(5)
    made.close()
    assert len(caught) == 1 and made.steps() == (5,) and resumed(tmp_path) == 5


def test_nothing_is_staged_while_the_buffer_is_being_written(tmp_path: Path) -> None:
    with Gate("write.half") as gate, manager(tmp_path, Tiny(1)) as made:
        made.save(1)
        gate.wait()
        error = failure(lambda: made._saver._stage(2, {}))
        assert "still being written" in str(error)
        gate.open.set()
    assert resumed(tmp_path) == 1


# Ends


@pytest.mark.parametrize("helper", ["ckpt-digest", "ckpt-writer"])
def test_a_manager_collected_on_a_thread_that_its_writer_waits_for_does_not_wait_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str
) -> None:
    gc.disable()
    try:
        tiny = Tiny(1)
        made = manager(tmp_path, tiny, exit_timeout=60)
        made.cycle = made  # type: ignore[attr-defined]
        lock, hold, took = made._session.lock, threading.Event(), []
        digest_image = transfer.digest_image

        def collect() -> None:
            if threading.current_thread().name == helper:
                assert hold.wait(30)
                began = time.monotonic()
                gc.collect()
                took.append(time.monotonic() - began)

        def digested(*args: object) -> object:
            collect()
            return digest_image(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(transfer, "digest_image", digested)
        points.install(lambda name: collect() if name == "write.begin" else None)
        made.save(1)
        del made
        hold.set()
        until(lambda: not lock.held)
        assert len(took) == 1 and took[0] < 30
    finally:
        gc.enable()
    assert resumed(tmp_path) == 1


def test_a_wait_ends_at_its_own_deadline_while_another_thread_sits_in_a_save(tmp_path: Path) -> None:
    tiny = Tiny(1)
    with Gate("write.begin") as gate, manager(tmp_path, tiny) as made:
        made.save(1)
        gate.wait()
        other = threading.Thread(target=lambda: made.save(2))
        other.start()
        until(lambda: not made._calls.acquire(blocking=False) or made._calls.release() is not None)
        for call in (lambda: made.wait(timeout=0.1), lambda: made.close(timeout=0.1)):
            began = time.monotonic()
            error = failure(call, DeadlineError)
            assert time.monotonic() - began < 20 and "Another thread" in str(error)
        gate.open.set()
        other.join()
        made.wait()
        assert made.steps() == (1, 2), "it was not closed"


@pytest.mark.parametrize(
    ("timeout", "kind"), [(float("nan"), ValueError), (-1, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, timeout: object, kind: type[Exception]) -> None:
    with manager(tmp_path) as made:
        for call in (made.wait, made.close):
            with pytest.raises(kind):
                call(timeout)  # type: ignore[arg-type]


def test_a_resume_does_not_fail_for_want_of_memory_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt.capture import staging

    write_steps(tmp_path, 1)
    tiny = Tiny(-1)

    def none(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with manager(tmp_path, tiny) as made:
        with monkeypatch.context() as short:
            short.setattr(staging.mmap, "mmap", none)
            assert made.resume() == 1 and tiny.step() == 1
            assert made.receipt is not None and made.receipt.exactness == "bit-exact"
            error = failure(lambda: made.save(2 if tiny.at(2) else 0))
            assert error.needed and error.stage == "stage"
        assert made.save(2)
    assert resumed(tmp_path) == 2
