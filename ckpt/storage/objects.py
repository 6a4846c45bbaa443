"""A root behind fsspec, in the order of object stores: whole objects, no folders, no rename, one conditional put.

Data objects are put under names unique to the attempt; a step comes to exist by `put_new` of its manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from ckpt import points
from ckpt.errors import CorruptCheckpointError, StorageUnavailableError, translate_os_error
from ckpt.storage.base import Abilities, Entry, ReadRange, Storage

_put_lock = threading.Lock()  # memory:// has no conditional put of its own


class ObjectStorage(Storage):
    """`path` below the file system `fs`; `url` is what users see."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self.fs = fs
        self.root = path.rstrip("/")
        self.url = url
        self.abilities = Abilities(renames_folders=False)

    def _key(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    @contextmanager
    def _translated(self, stage: str, path: str, needed: int | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translate_os_error(error, stage=stage, path=f"{self.url}/{path}", needed=needed) from error

    def list(self, folder: str = "") -> tuple[Entry, ...] | None:
        with self._translated("list", folder):
            try:
                found = self.fs.ls(self._key(folder), detail=True, refresh=True)
            except (FileNotFoundError, NotADirectoryError):
                return None
            if any(info["name"].rstrip("/") == self._key(folder) for info in found):
                return None  # a file: fsspec lists it as if it stood in itself
            return tuple(sorted((_entry(info) for info in found), key=lambda entry: entry.name))

    def stat(self, path: str) -> Entry | None:
        with self._translated("stat", path):
            try:
                return _entry(self.fs.info(self._key(path)))
            except FileNotFoundError:
                return None

    def read(self, path: str, limit: int) -> bytes | None:
        with self._translated("read", path):
            try:
                if self.fs.info(self._key(path))["size"] > limit:
                    raise self._damaged(path, "length", f"is larger than the limit of {limit:,} bytes")
                return self.fs.cat_file(self._key(path))
            except (FileNotFoundError, IsADirectoryError):
                return None

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        with self._translated("read", path):
            for item in ranges:
                position = item.start
                for view in item.into:
                    try:
                        data = self.fs.cat_file(self._key(path), position, position + len(view))
                    except FileNotFoundError:
                        raise self._damaged(path, "missing-file", "is missing") from None
                    if len(data) != len(view):
                        raise self._damaged(path, "length", f"ends before byte {position + len(view):,}")
                    view[:] = data
                    position += len(view)

    def _damaged(self, path: str, kind: str, why: str) -> CorruptCheckpointError:
        where = f"{self.url}/{path}"
        return CorruptCheckpointError(f"{where} {why}.", kind=kind, file=path.rpartition("/")[2], path=where)

    def make_folder(self, folder: str) -> None:
        raise StorageUnavailableError("An object store has no folders.", path=self.url)

    def write_new(self, path: str, data: memoryview | bytes, *, progress: Callable[[int], None] | None = None) -> None:
        with self._translated("write", path, needed=len(data)):
            # A copy: the staging buffer is filled again while a store in memory still holds the object.
            self.fs.pipe_file(self._key(path), bytes(data), mode="create")
        if progress is not None:
            progress(len(data))
        points.reach("write.data")

    def replace(self, path: str, data: bytes) -> None:
        with self._translated("write", path, needed=len(data)):
            self.fs.pipe_file(self._key(path), bytes(data))

    def sync_folder(self, folder: str = "") -> None:
        """Nothing to do: an object is there for good once its put was answered."""

    def publish(self, source: str, target: str) -> bool:
        raise StorageUnavailableError("An object store cannot rename.", path=self.url)

    def put_new(self, path: str, data: bytes) -> bool:
        with self._translated("put", path, needed=len(data)), _put_lock:
            try:
                self.fs.pipe_file(self._key(path), bytes(data), mode="create")
            except FileExistsError:
                return False
        return True

    def remove_file(self, path: str) -> None:
        with self._translated("remove", path):
            try:
                self.fs.rm_file(self._key(path))
            except FileNotFoundError:
                return

    def remove_folder(self, folder: str, *, on_half: Callable[[], None] | None = None) -> None:
        listed = self.list(folder)
        if listed is None:
            self.remove_file(folder)
            return
        for number, entry in enumerate(listed):
            if entry.kind == "folder":
                self.remove_folder(f"{folder}/{entry.name}")
            else:
                self.remove_file(f"{folder}/{entry.name}")
            if number == 0 and on_half is not None:
                on_half()
        with self._translated("remove", folder):
            try:
                self.fs.rmdir(self._key(folder))
            except OSError:
                # Most stores have no folders that could be left; one that has keeps an empty one.
                return

    def free_bytes(self) -> int | None:
        return None


def _entry(info: dict[str, Any]) -> Entry:
    name = info["name"].rstrip("/").rpartition("/")[2]
    if info["type"] == "directory":
        return Entry(name, "folder")
    created = info.get("created")
    # A datetime, or seconds, by the version of fsspec; without either a replaced object could not be told from the old.
    seconds = created.timestamp() if isinstance(created, datetime) else created
    mark = (int(seconds * 1_000_000), info["size"] or 0) if isinstance(seconds, (int, float)) else ()
    return Entry(name, "file", info["size"] or 0, mark)
