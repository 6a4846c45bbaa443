"""The storage contract, held by every backend; and what only a local root can go wrong with."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.errors import CorruptCheckpointError, OutOfSpaceError, StorageUnavailableError
from ckpt.storage import rawfile
from ckpt.storage.base import ReadRange, Storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.open import normalise, open_storage

pytestmark = pytest.mark.quick


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield open_storage(tmp_path / "root")
        return
    made = open_storage(f"memory://t-{uuid.uuid4().hex}/root")
    yield made
    made.remove_folder("")


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    made = open_storage(tmp_path / "root")
    assert isinstance(made, LocalStorage)
    made.make_root()
    return made


def folder(storage: Storage, name: str) -> None:
    if storage.abilities.renames_folders:
        storage.make_folder(name)


def read(storage: Storage, path: str, start: int, size: int) -> bytes:
    into = bytearray(size)
    storage.read_ranges(path, [ReadRange(start, (memoryview(into),))])
    return bytes(into)


# The contract


def test_a_root_that_is_not_there_holds_nothing_and_looking_makes_nothing(storage: Storage) -> None:
    assert storage.list() is None
    assert storage.stat("x") is None
    assert storage.read("x/y", 10) is None
    storage.remove_file("x/y")
    storage.remove_folder("x")
    assert storage.list() is None


def test_a_file_written_is_read_back_and_listed_with_its_length(storage: Storage) -> None:
    folder(storage, "a")
    storage.write_new("a/file", b"0123456789")
    assert storage.read("a/file", 10) == b"0123456789"
    entries = storage.list("a")
    assert entries is not None and [(e.name, e.kind, e.bytes) for e in entries] == [("file", "file", 10)]
    found = storage.stat("a/file")
    assert found is not None and (found.name, found.kind, found.bytes) == ("file", "file", 10)
    found = storage.stat("a")
    assert found is not None and found.kind == "folder"
    assert storage.list("a/file") is None, "a file holds no names"


def test_an_empty_file_is_a_file(storage: Storage) -> None:
    folder(storage, "a")
    storage.write_new("a/empty", b"")
    assert storage.read("a/empty", 0) == b""
    found = storage.stat("a/empty")
    assert found is not None and (found.kind, found.bytes) == ("file", 0)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, (4 << 20) + 5, (17 << 20) + 4096, (17 << 20) + 1])
def test_every_size_comes_back_whole_and_progress_ends_at_the_size(storage: Storage, size: int) -> None:
    """Around the limits of pages, direct writes and chunks, from aligned memory as staging gives it."""
    import mmap

    area = mmap.mmap(-1, size)
    pattern = bytes(range(251)) * (size // 251 + 1)
    area[:] = pattern[:size]
    seen: list[int] = []
    folder(storage, "a")
    storage.write_new("a/big", memoryview(area)[:size], progress=seen.append)
    assert storage.read("a/big", size) == pattern[:size]
    assert seen[-1] == size and seen == sorted(seen)


def test_a_file_is_written_once(storage: Storage) -> None:
    """I3: nothing is rewritten in place."""
    folder(storage, "a")
    storage.write_new("a/f", b"old")
    with pytest.raises(StorageUnavailableError):
        storage.write_new("a/f", b"new")
    assert storage.read("a/f", 10) == b"old"


def test_replace_makes_and_replaces_whole(storage: Storage) -> None:
    storage.replace("pins/p.json", b"one")
    storage.replace("pins/p.json", b"two two")
    assert storage.read("pins/p.json", 100) == b"two two"
    entries = storage.list("pins")
    assert entries is not None and [entry.name for entry in entries] == ["p.json"], "no draft is left"


def test_a_replaced_file_has_another_mark(storage: Storage) -> None:
    storage.replace("p/x", b"one")
    first = storage.stat("p/x")
    storage.replace("p/x", b"three")
    second = storage.stat("p/x")
    assert first is not None and second is not None and first.mark and first.mark != second.mark


def test_a_file_over_the_limit_is_refused_before_it_is_read(storage: Storage) -> None:
    storage.replace("p/x", b"0123456789")
    with pytest.raises(CorruptCheckpointError) as caught:
        storage.read("p/x", 9)
    assert caught.value.kind == "length" and caught.value.file == "x"


def test_ranges_land_in_their_buffers_in_any_number(storage: Storage) -> None:
    folder(storage, "a")
    data = os.urandom(100_000)
    storage.write_new("a/f", data)
    parts = [bytearray(n) for n in (1, 0, 999, 50_000)]
    more = bytearray(10)
    storage.read_ranges(
        "a/f", [ReadRange(500, tuple(memoryview(part) for part in parts)), ReadRange(0, (memoryview(more),))]
    )
    assert b"".join(parts) == data[500 : 500 + 51_000] and bytes(more) == data[:10]
    many = [bytearray(7) for _ in range(3000)]
    storage.read_ranges("a/f", [ReadRange(3, tuple(memoryview(part) for part in many))])
    assert b"".join(many) == data[3 : 3 + 21_000], "more buffers than one system call takes"


def test_a_range_behind_the_end_or_of_a_missing_file_is_damage_not_garbage(storage: Storage) -> None:
    folder(storage, "a")
    storage.write_new("a/f", b"0123456789")
    with pytest.raises(CorruptCheckpointError) as caught:
        read(storage, "a/f", 5, 6)
    assert caught.value.kind == "length"
    with pytest.raises(CorruptCheckpointError) as caught:
        read(storage, "a/g", 0, 1)
    assert caught.value.kind == "missing-file" and caught.value.path == f"{storage.url}/a/g"


def test_removal_takes_everything_and_is_fine_twice(storage: Storage) -> None:
    folder(storage, "a")
    half: list[int] = []
    for name in ("one", "two", "three"):
        storage.write_new(f"a/{name}", b"x")
    storage.remove_file("a/one")
    storage.remove_file("a/one")
    storage.remove_folder("a", on_half=lambda: half.append(len(storage.list("a") or ())))
    assert half == [1] and not storage.list("a") and storage.stat("a/two") is None
    storage.remove_folder("a")


def test_remove_folder_takes_a_file_as_well(storage: Storage) -> None:
    """RET-11: debris may have any shape."""
    storage.replace("p/x", b"one")
    storage.remove_folder("p/x")
    assert storage.stat("p/x") is None


def test_a_step_appears_whole_or_not_at_all(storage: Storage) -> None:
    """The one verb by which a step comes to exist, a rename or a conditional put, never replaces."""
    if storage.abilities.renames_folders:
        for name in (".tmp-1", ".tmp-2"):
            storage.make_folder(name)
            storage.write_new(f"{name}/f", name.encode())
        assert storage.publish(".tmp-1", "step") and not storage.publish(".tmp-2", "step")
        assert storage.read("step/f", 10) == b".tmp-1" and storage.read(".tmp-2/f", 10) == b".tmp-2"
    else:
        assert storage.put_new("step/manifest.json", b"1") and not storage.put_new("step/manifest.json", b"2")
        assert storage.read("step/manifest.json", 10) == b"1"


def test_what_a_backend_cannot_do_is_an_error_of_ours(storage: Storage) -> None:
    if storage.abilities.renames_folders:
        with pytest.raises(StorageUnavailableError):
            storage.put_new("x", b"")
    else:
        with pytest.raises(StorageUnavailableError):
            storage.publish("x", "y")
        with pytest.raises(StorageUnavailableError):
            storage.make_folder("x")


def test_of_many_threads_that_publish_one_name_one_wins(storage: Storage) -> None:
    """RACE-07: publishing never replaces what stands."""
    won: list[int] = []
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        if storage.abilities.renames_folders:
            storage.make_folder(f".tmp-{number}")
            storage.write_new(f".tmp-{number}/f", b"x")
            gate.wait()
            done = storage.publish(f".tmp-{number}", "step")
        else:
            gate.wait()
            done = storage.put_new("step/manifest.json", str(number).encode())
        if done:
            won.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


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


# Names of roots


def test_the_normal_form_of_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    here = os.getcwd()
    assert normalise("runs/../runs/x/")[0] == f"{here}/runs/x"
    assert normalise(Path("~/x"))[0] == "/home/someone/x"
    assert normalise("file:///a/b%20c")[0] == "/a/b%20c"
    assert normalise("memory://run")[0] == "memory://run"
    assert normalise("memory:///run/")[0] == "memory://run"


@pytest.mark.parametrize(
    "bad", ["", "  ", "a\0b", "simplecache::memory://x", "filecache://x", "memory://", "file://relative", "zip://a::b"]
)
def test_a_root_that_is_no_place_is_a_value_error(bad: str) -> None:
    with pytest.raises(ValueError):
        normalise(bad)


@pytest.mark.parametrize("bad", [b"bytes", 7, None, object()])
def test_a_root_of_another_type_is_a_type_error(bad: object) -> None:
    with pytest.raises(TypeError):
        normalise(bad)


def test_an_object_with_fs_and_path_is_taken_by_them() -> None:
    import fsspec

    class Place:
        fs = fsspec.filesystem("memory")
        path = "/somewhere/run"

    assert normalise(Place())[0] == "memory://somewhere/run"

    class Local:
        fs = fsspec.filesystem("file")
        path = "/data/run"

    assert normalise(Local()) == ("/data/run", None)
