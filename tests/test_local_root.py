"""What only a root on a local file system can go wrong with: links, modes, short writes, what is no file."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import CorruptCheckpointError, OutOfSpaceError, StorageUnavailableError
from ckpt.storage import rawfile
from ckpt.storage.base import ReadRange, Storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.open import open_storage

pytestmark = pytest.mark.quick


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    made = open_storage(tmp_path / "root")
    assert isinstance(made, LocalStorage)
    made.make_root()
    return made


def read(storage: Storage, path: str, start: int, size: int) -> bytes:
    into = bytearray(size)
    storage.read_ranges(path, [ReadRange(start, (memoryview(into),))])
    return bytes(into)


# A local root


def test_a_root_that_is_a_file_could_not_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a folder")
    storage = open_storage(tmp_path / "root")
    for call in (storage.list, lambda: storage.make_folder("x")):
        with pytest.raises(StorageUnavailableError) as caught:
            call()
        assert caught.value.path is not None and caught.value.errno == errno.ENOTDIR


def test_missing_parents_of_a_root_are_made_by_the_first_write(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "a" / "b" / "root")
    assert not (tmp_path / "a").exists()
    storage.make_folder(".tmp-x")
    assert (tmp_path / "a" / "b" / "root" / ".tmp-x").is_dir()


def _link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is at most 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("make", [_link, _dangling, os.mkfifo, _socket, os.mkdir])
def test_what_is_no_regular_file_is_damage_and_never_hangs_or_leads_away(
    local: LocalStorage, make: Callable[[Path], None]
) -> None:
    local.make_folder("step")
    make(Path(local.root) / "step" / "manifest.json")
    with pytest.raises(CorruptCheckpointError):
        local.read("step/manifest.json", 1000)
    with pytest.raises(CorruptCheckpointError):
        read(local, "step/manifest.json", 0, 1)
    entries = local.list("step")
    assert entries is not None and entries[0].kind != "file"


def test_a_folder_that_is_a_link_is_not_followed(local: LocalStorage, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text("precious")
    (Path(local.root) / "step").symlink_to(other)
    assert local.list("step") is None and local.stat("step/f") is None and local.read("step/f", 100) is None
    with pytest.raises(StorageUnavailableError):
        local.write_new("step/g", b"x")
    local.remove_folder("step")
    assert (other / "f").read_text() == "precious" and not (Path(local.root) / "step").is_symlink()


def test_a_link_inside_a_folder_is_removed_and_what_it_leads_to_stays(local: LocalStorage, tmp_path: Path) -> None:
    """RET-11: links of every kind, a FIFO, folders inside folders, empty ones."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text("precious")
    root = Path(local.root) / ".tmp-x"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "link").symlink_to(other)
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    (root / "deep" / "er" / "file").write_text("x")
    local.remove_folder(".tmp-x")
    assert not root.exists() and (other / "f").read_text() == "precious"


def test_folders_nested_without_end_are_an_error_and_no_crash(local: LocalStorage) -> None:
    fd = os.open(local.root, os.O_RDONLY)
    os.mkdir("deep", dir_fd=fd)
    for _ in range(200):
        below = os.open("deep", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        os.mkdir("deep", dir_fd=below)
        fd = below
    os.close(fd)
    with pytest.raises(StorageUnavailableError):
        local.remove_folder("deep")
    import subprocess

    subprocess.run(["rm", "-rf", local.root + "/deep"], check=True)


def test_one_child_that_cannot_be_removed_does_not_keep_the_others(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RET-09: NFS keeps a file that is open as .nfs..., and refuses to remove the folder."""
    local.make_folder("t")
    for name in ("a", "b", "c"):
        local.write_new(f"t/{name}", b"x")
    real = os.unlink

    def unlink(path: str, **kwargs: int) -> None:
        if path == "a":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        real(path, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(StorageUnavailableError) as caught:
        local.remove_folder("t")
    assert caught.value.errno == errno.EBUSY
    assert sorted(os.listdir(local.root + "/t")) == ["a"]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_modes_follow_the_umask(local: LocalStorage, umask: int) -> None:
    before = os.umask(umask)
    try:
        local.make_folder("step")
        local.write_new("step/f", b"x" * (5 << 20))
        local.replace("pins/p.json", b"{}")
    finally:
        os.umask(before)
    root = Path(local.root)
    assert stat.S_IMODE((root / "step").stat().st_mode) == 0o777 & ~umask
    assert stat.S_IMODE((root / "step" / "f").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((root / "pins" / "p.json").stat().st_mode) == 0o666 & ~umask


def test_a_publish_over_an_empty_folder_takes_its_place_and_over_anything_else_does_not(local: LocalStorage) -> None:
    root = Path(local.root)
    for number, make in enumerate((os.mkdir, lambda p: p.write_text("x"), _dangling, os.mkfifo)):
        local.make_folder(f".tmp-{number}")
        make(root / f"step-{number}")  # type: ignore[operator]
        assert local.publish(f".tmp-{number}", f"step-{number}") is (number == 0)
        assert (root / f".tmp-{number}").exists() is (number != 0)


def test_a_publish_where_the_kernel_has_no_exclusive_rename_still_never_replaces(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        def renameat2(self, *_: object) -> int:
            import ctypes

            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(rawfile, "_libc", Old())
    local.make_folder(".tmp-1")
    (Path(local.root) / "step").mkdir()
    (Path(local.root) / "step" / "f").write_text("x")
    assert not local.publish(".tmp-1", "step")
    assert local.publish(".tmp-1", "step-2")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_its_own_error_with_bytes_needed_and_free(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """DUR-02: the error keeps the errno, the path, and bytes needed and free."""

    def full(fd: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(rawfile, "_preallocate", full)
    local.make_folder("a")
    with pytest.raises(OutOfSpaceError) as caught:
        local.write_new("a/f", b"x" * 5000)
    error = caught.value
    assert error.errno == code and error.needed == 5000 and error.free and error.path == f"{local.root}/a/f"
    assert "5,000" in str(error) and error.hint


def test_where_the_library_has_no_fallocate_files_are_written_without(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare:
        """A C library with nothing beyond POSIX."""

    monkeypatch.setattr(rawfile, "_libc", Bare())
    local.make_folder("a")
    local.write_new("a/f", b"x" * 5000)
    assert local.read("a/f", 9000) == b"x" * 5000
    assert local.publish("a", "b")


def test_an_fsync_that_fails_fails_the_write(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """DUR-05: a failed fsync is an error, and is not tried again."""
    calls: list[int] = []

    def fsync(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    local.make_folder("a")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageUnavailableError) as caught:
        local.write_new("a/f", b"x")
    assert caught.value.errno == errno.EIO and len(calls) == 1
    with pytest.raises(StorageUnavailableError):
        local.sync_folder("a")


def test_a_folder_fsync_that_the_file_system_does_not_know_is_no_failure(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    local.sync_folder()


@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_are_made_whole(local: LocalStorage, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """A signal or a nearly full disk makes a write short without an error."""
    import mmap

    size = (9 << 20) + 17
    area = mmap.mmap(-1, size)
    area[:] = os.urandom(1 << 20) * 9 + bytes(17)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 1_000_003 if len(data) > 4096 else 7], at))
    if not direct:
        monkeypatch.setattr(rawfile, "_set_direct", lambda fd, on: False)
    local.make_folder("a")
    # Direct writes of odd lengths are refused by the kernel: then only the plain way is left.
    local.write_new("a/f", memoryview(area)[:size])
    assert local.read("a/f", size) == area[:]


def test_a_listing_beside_a_removal_never_fails(local: LocalStorage) -> None:
    """`steps()` while a removal is under way: names that go between listing and looking are no error."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def look() -> None:
        try:
            while not stop.is_set():
                for entry in local.list() or ():
                    local.list(entry.name)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(150):
        local.make_folder(f"s{number}")
        local.write_new(f"s{number}/f", b"x")
        local.remove_folder(f"s{number}")
    stop.set()
    thread.join()
    assert failed == []
