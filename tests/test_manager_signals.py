"""Signals that ask a run to stop: what is finished, what is saved, and who decides the exit code."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from manager_support import (
    Gate,
    Tiny,
    at_point,
    die,
    in_child,
    manager,
    resumed,
    wait_for,
    warnings,
    write_steps,
)  # fmt: skip

import ckpt
from ckpt import points

pytestmark = pytest.mark.full


# Signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in watched]
    yield
    assert [signal.getsignal(number) for number in watched] == before, "a handler was left behind"


def test_no_handler_is_ever_set_without_on_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with manager(tmp_path) as made:
        for _ in made.loop(2):
            assert signal.getsignal(signal.SIGTERM) is before and made.should_stop is False
            assert made.should_stop_at(1) is False


def test_a_signal_ends_the_loop_after_the_body_with_a_durable_save(tmp_path: Path) -> None:
    tiny, seen = Tiny(), []
    with manager(tmp_path, tiny, on_signal=("SIGTERM",), save_every_steps=100) as made:
        for step in made.loop(50):
            tiny.at(step)
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                assert made.should_stop and made.should_stop_at(step)
            seen.append(step)
        assert seen == [1, 2, 3] and made.steps() == (3,) and made.should_stop, "it stays True"
        assert list(made.loop(50)) == []
    assert resumed(tmp_path) == 3


def test_a_signal_in_any_moment_of_a_step_or_a_save_never_stores_a_half_step(tmp_path: Path) -> None:
    """LIFE-01: SIGTERM 200 times at random moments, during the body, during a save, during collection."""
    import gc

    done = threading.Event()
    sent = [0]

    def shoot() -> None:
        while sent[0] < 200 and not done.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            sent[0] += 1
            time.sleep(0.001)

    tiny, hits = Tiny(), [0]
    signal.signal(signal.SIGUSR1, lambda *_: hits.__setitem__(0, hits[0] + 1))
    last = 0
    thread = threading.Thread(target=shoot)
    thread.start()
    while thread.is_alive():
        with manager(tmp_path, tiny, on_signal=("SIGUSR1",), keep_last=2) as made:
            for step in made.loop(last + 50):
                tiny.at(step)
                gc.collect(0)
                last = step
        assert resumed(tmp_path) == last, "the newest is the step whose body was completed last"
    done.set()
    thread.join()
    assert sent[0] == 200
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_signal_that_comes_twice_does_not_end_the_save_it_asked_for(tmp_path: Path) -> None:
    """LIFE-06: a scheduler signals the whole group and the launcher passes it on: one process gets it twice."""

    def work() -> None:
        tiny = Tiny()
        with manager(tmp_path, tiny, on_signal=("SIGTERM", "SIGUSR1"), save_every_steps=100) as made:
            for step in made.loop(50):
                tiny.at(step)
                if step == 3:
                    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
                        os.kill(os.getpid(), number)

    assert in_child(work) == 0
    assert resumed(tmp_path) == 3


def test_a_person_who_insists_with_sigint_is_obeyed(tmp_path: Path) -> None:
    with manager(tmp_path, on_signal=("SIGTERM", "SIGINT")) as made:
        made.resume()
        os.kill(os.getpid(), signal.SIGINT)
        assert made.should_stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_from_another_thread_signals_are_not_watched_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        with manager(tmp_path, on_signal=("SIGTERM",)) as made:
            assert list(made.loop(2)) == [1, 2]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(warnings(caplog)) == 1 and "main thread" in warnings(caplog)[0]


def test_handlers_of_a_collected_manager_are_put_back(tmp_path: Path) -> None:
    import gc

    before = signal.getsignal(signal.SIGTERM)
    made = manager(tmp_path, on_signal=("SIGTERM",))
    made.resume()
    assert signal.getsignal(signal.SIGTERM) != before
    del made
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == before


def slurm_job(root: Path, ready: int, total: int = 10_000) -> int:
    """A script under a scheduler: its exit code is its own to choose, from `should_stop`."""
    tiny = Tiny()
    with manager(root, tiny, on_signal=("SIGTERM", "SIGUSR1"), save_every_steps=1000) as made:
        for step in made.loop(total):
            tiny.at(step)
            if step % 10 == 0:
                os.write(ready, b"x")
                time.sleep(0.002)
        return 75 if made.should_stop else 0


def test_a_preempted_job_exits_as_the_script_says_and_its_restart_takes_the_preempt_checkpoint(tmp_path: Path) -> None:
    """LIFE-03: signal, exit code, restart: the newest checkpoint is the one made on preemption."""
    last = 0
    for _ in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os._exit(slurm_job(tmp_path, write))
        os.read(read, 1)
        os.kill(pid, signal.SIGTERM)
        status = wait_for(pid)
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 75
        newest = resumed(tmp_path)
        assert newest > last and newest % 1000 != 0
        last = newest
        os.close(read)
        os.close(write)
    assert in_child(lambda: slurm_job(tmp_path, os.open(os.devnull, os.O_WRONLY), last + 5)) == 0
    assert resumed(tmp_path) == last + 5


@pytest.mark.parametrize("point", ["save.begin", "write.half", "publish.before", "publish.after", "remove.half"])
def test_a_grace_period_that_ends_inside_the_save_leaves_the_previous_checkpoint(tmp_path: Path, point: str) -> None:
    """LIFE-06: SIGKILL after SIGTERM, at every stage of the save it caused."""
    write_steps(tmp_path, 1, keep_last=1)

    def work() -> None:
        tiny = Tiny()
        with manager(tmp_path, tiny, on_signal=("SIGTERM",), keep_last=1) as made:
            for step in made.loop(10):
                tiny.at(step)
                points.install(at_point(point, die))
                os.kill(os.getpid(), signal.SIGTERM)

    in_child(work, killed=True)
    assert resumed(tmp_path) in (1, 2)
    assert resumed(tmp_path) == (2 if point in ("publish.after", "remove.half") else 1)


def test_a_gate_in_the_writer_does_not_stop_the_body(tmp_path: Path) -> None:
    tiny = Tiny()
    with Gate("write.half") as gate, manager(tmp_path, tiny, save_every_steps=2) as made:
        for step in made.loop(4):
            tiny.at(step)
            if step == 3:
                gate.wait()
                assert made.steps() == ()
                gate.open.set()
    assert made.steps() == (2, 4)


def test_a_manager_collected_on_another_thread_leaves_signals_to_whom_they_belonged(tmp_path: Path) -> None:
    """Only the main thread can take a handler away: ours stays until a signal comes and stands for the one before."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        made = manager(tmp_path, on_signal=("SIGUSR1",))
        made.resume()
        ending = made._ending
        helper = threading.Thread(target=ending.finalise)
        helper.start()
        helper.join()
        made._end.detach()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1] and not made.should_stop
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(got) == 2
        assert not made._session.lock.held
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_right_after_a_step_boundary_saves_the_step_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LIFE-01: between the look at the flag and the next body."""
    made = ckpt.CheckpointManager(tmp_path, {"s": ckpt.StateDict(a=1)}, on_signal=("SIGTERM",), save_every_steps=1000)
    after = made._after_body

    def late(step: int, last: bool) -> None:
        after(step, last)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(made, "_after_body", late)
    with made:
        assert list(made.loop(10)) == [1, 2, 3, 4] and made.latest_step == 4
