"""No room: on a real small file system, at a limit of the process, and at each stage of a save."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import (
    Faults,
    Tiny,
    debris,
    failure,
    faults,
    folders,
    in_child,
    manager,
    resumed,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, StateDict
from ckpt.errors import CheckpointError, CommitUnknown, OutOfSpaceError
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.full

MB = 1 << 20


def state(megabytes: int, step: int) -> dict[str, Any]:
    return {"s": StateDict(big=torch.full((megabytes * MB,), step % 128, dtype=torch.uint8), step=step)}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 50 MB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", place], capture_output=True, check=False
    )  # fmt: skip
    if done.returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def check(root: Path, megabytes: int, step: int) -> None:
    back = state(megabytes, -1)
    with CheckpointManager(root, back) as made:
        assert made.resume() == step
    assert back["s"]["step"] == step and bool((back["s"]["big"] == step % 128).all())


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("preflight", [True, False])
def test_a_save_larger_than_the_disk_is_an_error_with_the_figures_and_the_run_goes_on(
    small: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool, preflight: bool
) -> None:
    """DUR-01: 200 MB into 50 MB: a normal exception; old checkpoints intact; temporary files gone."""
    root = small / "run"
    live = state(20, 1)
    with CheckpointManager(root, live, async_save=async_save) as made:
        made.save(1)
        made.wait()
        if not preflight:
            monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: None)
        live["s"]["big"] = torch.zeros(200 * MB, dtype=torch.uint8)

        def save() -> None:
            made.save(2)
            made.wait()

        error = failure(save, OutOfSpaceError)
        assert error.errno == errno.ENOSPC and error.step == 2 and error.path and str(root) in error.path
        assert error.needed is not None and error.needed > 200 * MB
        if preflight:
            assert error.free is not None and error.free < 50 * MB and f"{error.free:,}" in str(error)
        assert folders(root) == ["step-00000001"] and "offset" not in str(error)
        live["s"]["big"] = torch.full((20 * MB,), 3, dtype=torch.uint8)
        live["s"]["step"] = 3
        assert made.save(3)
    check(root, 20, 3)


@pytest.mark.parametrize("percent", [10, 60, 99])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_fills_part_way_is_called_full_and_everything_older_is_intact(
    small: Path, monkeypatch: pytest.MonkeyPatch, percent: int, async_save: bool
) -> None:
    """DUR-02: the quota is reached at 10, 60 and 99 % of the write; sync and async."""
    root = small / "run"
    live = state(16, 1)
    with CheckpointManager(root, live, async_save=async_save) as made:
        made.save(1)
        made.wait()
        info = os.statvfs(small)
        leave = 16 * MB * percent // 100
        with open(small / "ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, info.f_bavail * info.f_frsize - leave)
        monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: None)
        monkeypatch.setattr("ckpt.storage.rawfile._preallocate", lambda fd, size: None)

        def save() -> None:
            made.save(2)
            made.wait()

        error = failure(save, OutOfSpaceError)
        assert error.errno == errno.ENOSPC and "No space left" in str(error)
        assert folders(root) == ["step-00000001"]
        os.unlink(small / "ballast")
        assert made.save(3)
        live["s"]["step"] = 3
    assert folders(root) == ["step-00000001", "step-00000003"]
    check_first = state(16, -1)
    with CheckpointManager(root, check_first) as made:
        assert made.resume(1) == 1
    assert bool((check_first["s"]["big"] == 1).all())


def test_keep_one_never_needs_to_remove_the_old_step_first(small: Path) -> None:
    """RET-05 on a disk that holds two: the old goes after the new is durable."""
    root = small / "run"
    live = state(20, 1)
    with CheckpointManager(root, live, keep_last=1, async_save=False) as made:
        for step in range(1, 5):
            live["s"]["big"].fill_(step)
            live["s"]["step"] = step
            assert made.save(step)
            assert folders(root) == [f"step-{step:08d}"]
    check(root, 20, 4)


def test_a_file_size_limit_of_the_process_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """RLIMIT_FSIZE sends SIGXFSZ: the run must get an exception instead."""

    def work() -> None:
        live = state(1, 1)
        made = CheckpointManager(tmp_path, live)
        made.save(1)
        made.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MB, 2 * MB))
        live["s"]["big"] = torch.zeros(30 * MB, dtype=torch.uint8)
        made.save(2)
        error = failure(made.wait, OutOfSpaceError)
        assert error.errno == errno.EFBIG
        live["s"]["big"] = torch.zeros(MB, dtype=torch.uint8)
        assert made.save(3)
        made.close()

    assert in_child(work) == 0
    assert folders(tmp_path) == ["step-00000001", "step-00000003"]


def test_no_handle_left_is_an_error_and_no_handle_is_leaked(tmp_path: Path) -> None:
    """EMFILE at any open: told, and the next save works."""

    def work() -> None:
        tiny = Tiny(1)
        made = manager(tmp_path, tiny)
        made.save(1)
        made.wait()
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        before = len(os.listdir("/proc/self/fd"))
        for room in range(4):
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + room, hard))
            kept = []
            try:
                while True:
                    kept.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                for fd in kept[:room]:
                    os.close(fd)
            try:
                made.save(10 + room if tiny.at(10 + room) else 0)
                made.wait()
            except CheckpointError as error:
                assert error.errno == errno.EMFILE, error
            for fd in kept[room:]:
                os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 4096 else 4096, hard))
        assert len(os.listdir("/proc/self/fd")) == before
        assert made.save(20 if tiny.at(20) else 0)
        made.close()

    assert in_child(work) == 0
    assert resumed(tmp_path) == 20 and debris(tmp_path) == []


# ENOSPC at each stage


STAGES = [
    ("make_folder", 0, False), ("write_new", 0, False), ("write_new", 1, False), ("write_new", 2, False),
    ("sync_folder", 0, False), ("publish", 0, False), ("sync_folder", 1, True), ("list", 0, False),
]  # fmt: skip


@pytest.fixture
def fault() -> Iterator[Faults]:
    with faults() as made:
        yield made


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("verb", "nth", "unknown"), STAGES)
def test_no_space_at_each_stage_of_a_save_is_told_truly(
    tmp_path: Path, fault: Faults, verb: str, nth: int, unknown: bool, code: int
) -> None:
    """DUR-02: data, index, manifest, folder, name: committed, not committed, or unknown, and never something else."""
    write_steps(tmp_path, 1)
    tiny = Tiny()
    with manager(tmp_path, tiny, async_save=False) as made:
        made.resume()
        made.save(2 if tiny.at(2) else 0)
        fault.only = lambda path: not path.startswith((".lock", "pins"))
        fault.arm(verb, nth, code=code)
        error = failure(lambda: made.save(3 if tiny.at(3) else 0))
        assert fault.hits == 1 and error.errno == code
        assert isinstance(error, CommitUnknown if unknown else OutOfSpaceError)
        assert made.steps() == ((1, 2, 3) if unknown else (1, 2)) and debris(tmp_path) == []
        assert made.save(4 if tiny.at(4) else 0)
    assert resumed(tmp_path) == 4


def fill(folder: Path, name: str) -> None:
    info = os.statvfs(folder)
    if info.f_bavail:
        with open(folder / name, "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, info.f_bavail * info.f_frsize)


def test_no_space_for_a_pin_or_the_owner_note_leaves_no_draft(
    small: Path, fault: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    root = small / "run"
    write_steps(root, 1)
    fill(small, "ballast")
    with manager(root) as made:
        assert made.resume() == 1
        fill(small, "more")  # taking the lock removed the note of the owner before
        error = failure(lambda: made.pin(1, "x" * 500), OutOfSpaceError)
        assert error.errno == errno.ENOSPC
    assert os.listdir(root / "pins") == [] if (root / "pins").exists() else True
    assert not [name for name in os.listdir(root) if name.startswith(".tmp-")] and warnings(caplog) == []


def test_a_device_that_is_always_full_is_never_a_success(tmp_path: Path) -> None:
    """DUR-01: /dev/full: every write says ENOSPC."""
    from ckpt.storage import rawfile

    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError) as caught:
            rawfile.write_all(fd, memoryview(b"x" * 100), None)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError):
            rawfile.write_all(fd, memoryview(bytearray(9 * MB)), None)
    finally:
        os.close(fd)
