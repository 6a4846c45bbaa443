"""How a manager ends: closed, left by an exception, collected, forked, or with the interpreter."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import (
    Gate, Tiny, debris, failure, faults, folders, in_child, manager, resumed, wait_for, write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict, points
from ckpt.errors import CheckpointError, ClosedError, DeadlineError, ForkedError, StorageUnavailableError

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
        assert time.monotonic() - began < 5 and error.step == 2 and "abandoned" in str(error)
        assert [r.levelname for r in caplog.records if "step 2 is abandoned" in r.getMessage()] == ["ERROR"]
        other = manager(tmp_path, Tiny(3), async_save=False)
        assert other.resume() == 1, "the lock is free"
        other.save(3)
        gate.open.set()
        made._writer.idle(30)
    assert other.steps() == (1, 3) and debris(tmp_path) == []
    other.close()


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


# Fork


def test_a_forked_child_is_told_both_pids_and_never_hangs(tmp_path: Path) -> None:
    """REMOTE-06 for local roots; also while the writer thread is at work and the lock of calls is held."""
    with Gate("write.half") as gate, manager(tmp_path, Tiny(1)) as made:
        made.save(1)
        gate.wait()
        parent = os.getpid()

        def child() -> None:
            for call in (
                lambda: made.save(2), made.resume, made.wait, made.close, lambda: made.loop(3), made.steps,
                lambda: made.latest_step, lambda: made.pin(1), lambda: made.register("x", StateDict()),
                made.restore_rng, made.__enter__,
            ):  # fmt: skip
                error = failure(call, ForkedError)
                assert isinstance(error, ForkedError)
                assert (error.owner_pid, error.pid) == (parent, os.getpid()) and str(parent) in str(error)
            assert made.receipt is None and made.should_stop is False

        assert in_child(child, timeout=30) == 0
        gate.open.set()
    assert resumed(tmp_path) == 1


def test_a_forked_child_that_leaves_the_with_body_by_an_exception_leaves_the_parents_save_alone(
    tmp_path: Path,
) -> None:
    """ASYNC-04: fork right after an async save."""
    with Gate("write.half") as gate:
        with manager(tmp_path, Tiny(1)) as made:
            made.save(1)
            gate.wait()

            def child() -> None:
                try:
                    with made:
                        pass
                except ForkedError:
                    pass
                began = time.monotonic()
                made.__exit__(KeyError, KeyError("x"), None)
                assert time.monotonic() - began < 5

            assert in_child(child, timeout=30) == 0
            gate.open.set()
    assert resumed(tmp_path) == 1


def test_a_child_that_collects_its_copy_of_a_manager_keeps_its_own_memory(tmp_path: Path) -> None:
    """A DataLoader worker drops the parent's objects; the staging memory's place may hold the worker's own by then."""
    made = manager(tmp_path, Tiny(1))
    made.save(1)
    made.wait()
    image = made._saver.staging._buffer.bytes(4096)
    address, kept = image.data_ptr(), image[:64].tolist()
    assert any(kept)
    del image

    def child() -> None:
        nonlocal made
        mine = [line.split()[0] for line in open("/proc/self/maps")]
        inside = [r for r in mine if int(r.split("-")[0], 16) <= address < int(r.split("-")[1], 16)]
        assert inside, "an address range that is free here could be given to somebody else and unmapped by us"
        del made
        gc.collect()
        own = [torch.zeros(1 << 19) for _ in range(8)]
        assert all(t.sum().item() == 0 for t in own)

    assert in_child(child) == 0
    made.close()


def test_data_loader_workers_and_saves_do_not_disturb_each_other(tmp_path: Path) -> None:
    """REMOTE-06: forked workers while saves are in flight; a checkpoint opened inside a worker."""
    write_steps(tmp_path / "other", 7)

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            return resumed(tmp_path / "other", lock_timeout=20) + index

    tiny = Tiny()
    with manager(tmp_path / "run", tiny) as made:
        made.resume()
        step = 0
        for _ in range(2):
            loader = torch.utils.data.DataLoader(Data(), batch_size=3, num_workers=2, multiprocessing_context="fork")
            for batch in made.batches(loader):
                assert all(7 <= value < 19 for value in batch.tolist())
                step += 1
                made.save(step if tiny.at(step) else 0)
    assert resumed(tmp_path / "run") == 8


# The interpreter's end

SCRIPT = '''
import json, os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from manager_support import Gate, Tiny, manager
from ckpt import points
base, results = sys.argv[1], {}
NAMES = ["return", "sys.exit", "exception", "os._exit", "hung", "thread", "atexit", "failed", "many", "closed"]
pids = {}
for name in NAMES:
    pid = os.fork()
    if pid == 0:
        break
    pids[name] = pid
else:
    for name, pid in pids.items():
        results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(results))
    sys.exit(0)
# In the child: what follows is the script of a user, ended in every way, with a real interpreter exit.
root = os.path.join(base, name)
os.makedirs(root)
os.dup2(os.open(os.path.join(base, name + ".err"), os.O_WRONLY | os.O_CREAT), 2)
tiny = Tiny(5)
made = manager(root, tiny, exit_timeout=0.2 if name == "hung" else 60)
slow = lambda point: time.sleep(0.3 if name != "hung" else 30) if point == "write.half" else None
points.install(slow)
made.save(5)
if name == "failed":
    points.install(None)
    made.wait()
    from manager_support import Faults, faults
    holder = faults()
    holder.__enter__().arm("publish", sticky=True)
    made.save(6)
tiny.at(99)
if name == "sys.exit":
    sys.exit(3)
if name == "exception":
    raise RuntimeError("the body")
if name == "os._exit":
    os._exit(4)
if name == "thread":
    def last():
        time.sleep(0.2)
    threading.Thread(target=last).start()
if name == "atexit":
    import atexit
    atexit.register(lambda: (tiny.at(6), made.save(6), tiny.at(98)))
if name == "many":
    more = [manager(os.path.join(base, f"many{i}"), Tiny(i)) for i in range(3)]
    for i, one in enumerate(more):
        one.save(i)
if name == "closed":
    made.close()
'''


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    base = tmp_path_factory.mktemp("exits")
    (base / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", base / "script.py", base, Path(__file__).parent],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return base, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "code", "step"),
    [("return", 0, 5), ("sys.exit", 3, 5), ("exception", 1, 5), ("thread", 0, 5), ("many", 0, 5), ("closed", 0, 5)],
)
def test_every_way_to_end_the_interpreter_finishes_the_save_in_flight(
    exits: tuple[Path, dict[str, int]], name: str, code: int, step: int
) -> None:
    """ASYNC-04: exit(0), sys.exit, raise right after an async save; the exit code is unchanged."""
    base, codes = exits
    assert codes[name] == code, (base / f"{name}.err").read_text()
    assert resumed(base / name) == step and debris(base / name) == []
    text = (base / f"{name}.err").read_text()
    assert ("RuntimeError: the body" in text) if name == "exception" else text == ""
    if name == "many":
        assert [resumed(base / f"many{i}") for i in range(3)] == [0, 1, 2]


def test_a_hung_save_is_abandoned_at_exit_with_one_error_line_that_names_the_step(
    exits: tuple[Path, dict[str, int]],
) -> None:
    """ASYNC-04: the drain at exit has a bound; what is unfinished is plainly debris."""
    base, codes = exits
    assert codes["hung"] == 0
    assert (base / "hung.err").read_text().splitlines() == ["step 5 is abandoned: its save was not finished within 0.2 s"]
    assert len(debris(base / "hung")) == 1 and resumed(base / "hung") == 0


def test_os_exit_does_nothing_and_leaves_plain_debris(exits: tuple[Path, dict[str, int]]) -> None:
    """ASYNC-04: os._exit."""
    base, codes = exits
    assert codes["os._exit"] == 4 and (base / "os._exit.err").read_text() == ""
    assert resumed(base / "os._exit") == 0
    assert all(name.startswith(".tmp-") for name in folders(base / "os._exit"))


def test_a_failure_nobody_asked_about_is_an_error_line_at_exit(exits: tuple[Path, dict[str, int]]) -> None:
    base, codes = exits
    assert codes["failed"] == 0
    lines = (base / "failed.err").read_text().splitlines()
    assert len(lines) == 1 and "nobody asked" in lines[0] and "EIO" in lines[0]
    assert resumed(base / "failed") == 5


def test_a_save_made_while_the_interpreter_ends_is_durable(exits: tuple[Path, dict[str, int]]) -> None:
    base, codes = exits
    assert codes["atexit"] == 0, (base / "atexit.err").read_text()
    assert resumed(base / "atexit") == 6


def test_a_killed_process_leaves_what_was_durable(tmp_path: Path) -> None:
    """ASYNC-03 / TORN-13: killed 0.1 s after an async save returned, keep=1."""
    for wait in (0.0, 0.01, 0.05, 0.1):
        root = tmp_path / str(wait)
        write_steps(root, 1, keep_last=1)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            tiny = Tiny()
            made = manager(root, tiny, keep_last=1)
            made.resume()
            made.save(2 if tiny.at(2) else 0)
            os.write(write, b"x")
            time.sleep(60)
        os.read(read, 1)
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
        wait_for(pid)
        assert resumed(root) in (1, 2)


def test_a_use_after_a_failure_in_every_call_keeps_the_manager_usable(tmp_path: Path) -> None:
    tiny = Tiny()
    made = manager(tmp_path, tiny)
    with faults() as fault:
        for verb in ("list", "make_folder", "write_new", "sync_folder", "publish"):
            for nth in range(2):
                fault.arm(verb, nth)
                step = made._completed + 1
                try:
                    made.save(step if tiny.at(step) else 0)
                    made.wait()
                except CheckpointError:
                    pass
                fault.off()
    step = made._completed + 1
    assert made.save(step if tiny.at(step) else 0)
    made.close()
    assert resumed(tmp_path) == step and debris(tmp_path) == []


