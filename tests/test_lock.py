"""One writer a root (I6): who waits, who is told, and when the lock is free again."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from manager_support import (
    Tiny,
    die,
    failure,
    folders,
    in_child,
    make_manifest,
    manager,
    plant,
    resumed,
    scan,
    wait_for,
    write_steps,
)  # fmt: skip

from ckpt.commit.lock import RootLock
from ckpt.errors import CheckpointError, LockedError, StorageUnavailableError
from ckpt.storage.open import open_storage

pytestmark = pytest.mark.full


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "root") if request.param == "local" else f"memory://t-{uuid.uuid4().hex}"


def test_a_second_manager_in_the_same_process_is_told_who_holds_the_root(root: str) -> None:
    """RACE-08: the second fails fast, with who, where and since when."""
    first, second = manager(root), manager(root)
    began = time.time()
    first.resume()
    for call in (second.resume, lambda: second.save(1), lambda: second.loop(3)):
        error = failure(call, LockedError)
        assert isinstance(error, LockedError)
        assert error.owner_pid == os.getpid() and error.owner_host == socket.gethostname()
        assert error.since is not None and began - 1 <= error.since <= time.time()
        assert str(os.getpid()) in str(error) and error.hint
    first.close()
    assert second.resume() == 0
    second.close()


def test_reading_and_pinning_never_take_the_lock(root: str) -> None:
    with manager(root, async_save=False) as first:
        first.save(1)
        other = manager(root)
        assert other.steps() == (1,) and other.latest_step == 1 and other.best_step is None
        other.pin(1, "note")
        other.unpin(1)
        other.close()
        assert first.save(2)


def test_the_lock_is_waited_for_and_taken_when_it_comes_free(root: str) -> None:
    import threading

    first, second = manager(root), manager(root, lock_timeout=30)
    first.resume()
    timer = threading.Timer(0.2, first.close)
    timer.start()
    assert second.resume() == 0
    second.close()
    timer.join()


def test_a_manager_that_was_only_made_locks_and_makes_nothing(tmp_path: Path) -> None:
    first = manager(tmp_path / "root")
    assert first.steps() == () and first.latest_step is None
    assert not (tmp_path / "root").exists()
    first.close()
    assert not (tmp_path / "root").exists()


def test_a_dead_owners_lock_is_free_at_once(tmp_path: Path) -> None:
    """RACE-08: a stale lock of a dead owner is taken over safely."""

    def work() -> None:
        held = manager(tmp_path)
        held.resume()
        die()

    in_child(work, killed=True)
    began = time.monotonic()
    with manager(tmp_path, lock_timeout=5) as made:
        assert made.resume() == 0
    assert time.monotonic() - began < 4


def test_a_dead_owners_lock_is_free_though_its_forked_worker_lives_on(tmp_path: Path) -> None:
    """A DataLoader worker inherits every handle of its parent; ours may not keep the lock."""
    read, write = os.pipe()

    def work() -> None:
        held = manager(tmp_path)
        held.resume()
        worker = os.fork()
        if worker == 0:
            os.read(read, 1)
            os._exit(0)
        os.write(write, str(worker).encode() + b"\n")
        die()

    in_child(work, killed=True)
    time_left = time.monotonic() + 30
    text = b""
    while b"\n" not in text and time.monotonic() < time_left:
        text += os.read(read, 100)
    try:
        with manager(tmp_path, lock_timeout=5) as made:
            assert made.resume() == 0
    finally:
        os.write(write, b"x")


def test_a_forked_child_that_drops_its_copy_does_not_free_the_parents_lock(tmp_path: Path) -> None:
    made = manager(tmp_path)
    made.resume()

    def work() -> None:
        nonlocal made
        del made
        gc.collect()

    assert in_child(work) == 0
    error = failure(manager(tmp_path).resume, LockedError)
    assert isinstance(error, LockedError) and error.owner_pid == os.getpid()
    made.close()


def test_two_processes_that_both_believe_they_are_first_do_not_mix(tmp_path: Path) -> None:
    """RACE-07: the second writer is refused by the run's lock; unique staging for each attempt."""
    ready, go = os.pipe(), os.pipe()

    def work() -> int:
        made = manager(tmp_path, Tiny(1))
        made.resume()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        made.save(1)
        made.close()
        return 0

    pid = os.fork()
    if pid == 0:
        os._exit(work())
    os.read(ready[0], 1)
    mine = manager(tmp_path, Tiny(2))
    error = failure(lambda: mine.save(2), LockedError)
    assert isinstance(error, LockedError) and error.owner_pid == pid
    os.write(go[1], b"x")
    assert wait_for(pid) == 0
    assert mine.resume() == 1
    mine.close()
    assert folders(tmp_path) == ["step-00000001"]


def test_a_lock_held_by_a_stopped_process_names_it(tmp_path: Path) -> None:
    ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = manager(tmp_path)
        held.resume()
        os.write(ready[1], b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready[0], 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        error = failure(manager(tmp_path).resume, LockedError)
        assert isinstance(error, LockedError) and error.owner_pid == pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_collected_manager_finishes_its_save_and_frees_the_lock(root: str) -> None:
    made = manager(root, Tiny(4))
    made.save(4)
    del made
    gc.collect()
    assert resumed(root) == 4


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_locks_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with manager(tmp_path / "root") as made:
            made.resume()
            for name in (".lock", ".lock.owner"):
                assert stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) == 0o666 & ~umask
    finally:
        os.umask(before)


@pytest.mark.parametrize("shape", ["folder", "dangling link", "link"])
def test_something_else_under_the_locks_name_is_an_error_of_ours(tmp_path: Path, shape: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "precious").write_text("mine")
    if shape == "folder":
        (root / ".lock").mkdir()
    else:
        (root / ".lock").symlink_to(tmp_path / ("precious" if shape == "link" else "nowhere"))
    error = failure(manager(root).resume, StorageUnavailableError)
    assert error.path == str(root / ".lock") and error.stage == "lock"
    assert (tmp_path / "precious").read_text() == "mine" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("note", [b"", b"[1]", b"not json", b"\xff\xfe", b'{"pid":"x","since":"y"}', b"{" * 5000, None])
def test_an_owner_note_that_cannot_be_read_does_not_hide_that_the_root_is_locked(
    tmp_path: Path, note: bytes | None
) -> None:
    with manager(tmp_path) as made:
        made.resume()
        path = tmp_path / ".lock.owner"
        path.unlink()
        if note is None:
            os.mkfifo(path)
        else:
            path.write_bytes(note)
        failure(manager(tmp_path).resume, LockedError)


def test_a_disk_too_full_for_the_note_does_not_keep_a_run_from_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from manager_support import faults

    write_steps(tmp_path, 3)
    with faults() as fault:
        fault.arm("replace", sticky=True, code=errno.ENOSPC)
        made = manager(tmp_path)
        assert made.resume() == 3 and fault.hits == 1
    error = failure(manager(tmp_path).resume, LockedError)
    assert isinstance(error, LockedError) and error.owner_pid is None, "no note rather than an old one"
    made.close()


def test_a_file_system_without_locks_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    def refuse(self: object, **_: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert failure(manager(tmp_path).resume, StorageUnavailableError).stage == "lock"


def test_a_root_reached_by_another_name_is_the_same_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    first, second = manager(tmp_path / "real"), manager(tmp_path / "alias")
    first.resume()
    failure(second.resume, LockedError)
    first.close()


def test_releasing_twice_or_unheld_is_fine_and_frees_nobody_elses(root: str) -> None:
    first, second = RootLock(open_storage(root)), RootLock(open_storage(root))
    first.acquire(0)
    second.release()
    with pytest.raises(LockedError):
        second.acquire(0)
    first.acquire(0)
    first.release()
    first.release()
    second.acquire(0)
    second.release()


def test_a_writer_that_finds_a_newer_incarnation_stops_with_locked_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RACE-08: two hosts, where no lock reaches: the one that was overtaken stops, whatever the clocks say."""
    write_steps(tmp_path, 1)
    old_tiny, new_tiny = Tiny(), Tiny()
    old, new = manager(tmp_path, old_tiny, async_save=False), manager(tmp_path, new_tiny, async_save=False)
    monkeypatch.setattr(RootLock, "acquire", lambda self, timeout: None)
    old.resume()
    assert old.save(2 if old_tiny.at(2) else 0)
    new.resume()
    with monkeypatch.context() as behind:
        behind.setattr(time, "time", lambda: 1000.0)
        assert new.save(3 if new_tiny.at(3) else 0)
    error = failure(lambda: old.save(4 if old_tiny.at(4) else 0), LockedError)
    assert error.step == 3 and "incarnation 3" in str(error)
    assert folders(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert [f.manifest.incarnation for f in scan(tmp_path).steps] == [1, 2, 3]
    assert new.save(5 if new_tiny.at(5) else 0) and resumed(tmp_path) == 5
    assert isinstance(error, CheckpointError)
    old.close()
    new.close()


def test_a_run_that_another_process_began_beside_ours_stops_us_at_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fresh runs in one empty root, where no lock reaches: the one acknowledged first stays the newest."""
    monkeypatch.setattr(RootLock, "acquire", lambda self, timeout: None)
    tinies = Tiny(10), Tiny(5)
    late, first = (manager(tmp_path, tiny, async_save=False) for tiny in tinies)
    late.resume()
    first.resume()
    late._session.begin(10, True)
    assert first.save(5)
    error = failure(lambda: late.save(10), LockedError)
    assert error.step == 5 and "begun another run" in str(error)
    assert first.save(6 if tinies[1].at(6) else 0) and first.steps() == (5, 6)
    assert resumed(tmp_path) == 6
    late.close()
    first.close()


def test_steps_of_other_runs_that_were_there_before_ours_do_not_stop_us(tmp_path: Path) -> None:
    write_steps(tmp_path, 71)
    plant(tmp_path, make_manifest(step=70, incarnation=0, run="c" * 32), "theirs")
    write_steps(tmp_path, 72, 73)
    assert resumed(tmp_path) == 73
