"""The storage contract, held by every backend; and what only a local root can go wrong with."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.errors import CorruptCheckpointError, StorageUnavailableError
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
