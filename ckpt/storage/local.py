"""A root on a local file system: every path is opened below the root's own handle, no link is ever followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_module
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ckpt import points
from ckpt.errors import CorruptCheckpointError, StorageUnavailableError, translate_os_error
from ckpt.storage import rawfile
from ckpt.storage.base import Abilities, Entry, ReadRange, Storage

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
_LISTINGS = 10  # of a folder in which names go while they are looked at
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})  # what opening a link, and a socket, says
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


class LocalStorage(Storage):
    """The folder `root`, an absolute path. It is made by the first write, not before."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.url = root
        self.abilities = Abilities(renames_folders=True)

    @contextmanager
    def _translated(self, stage: str, path: str, needed: int | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = self.free_bytes() if needed is not None else None
            where = os.path.join(self.root, path) if path else self.root
            raise translate_os_error(error, stage=stage, path=where, needed=needed, free=free) from error

    @contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        """A handle of `folder` ("" is the root; the root itself may be reached through links, nothing below it)."""
        fd = os.open(self.root, _FOLDER)
        try:
            for segment in folder.split("/") if folder else ():
                below = os.open(segment, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        folder, _, name = path.rpartition("/")
        with self._folder(folder) as parent:
            # O_NONBLOCK: a FIFO left under a file's name must not hang whoever looks at it.
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=parent)
        try:
            yield fd
        finally:
            os.close(fd)

    def list(self, folder: str = "") -> tuple[Entry, ...] | None:
        with self._translated("list", folder):
            try:
                with self._folder(folder) as fd:
                    entries: list[Entry | None] = []
                    for _ in range(_LISTINGS):
                        entries = [_entry(name, fd) for name in sorted(os.listdir(fd))]
                        if None not in entries:
                            break
                        # Without another go the answer could lack what went and what came in its place: no moment's.
                    return tuple(entry for entry in entries if entry is not None)
            except OSError as error:
                # A root that is a file is an error; a root that is not there holds nothing.
                if error.errno == errno.ENOENT or (error.errno in (errno.ENOTDIR, errno.ELOOP) and folder):
                    return None
                raise

    def stat(self, path: str) -> Entry | None:
        folder, _, name = path.rpartition("/")
        with self._translated("stat", path):
            try:
                with self._folder(folder) as fd:
                    return _entry(name, fd)
            except OSError as error:
                if error.errno in _GONE or error.errno == errno.ELOOP:
                    return None
                raise

    def read(self, path: str, limit: int) -> bytes | None:
        with self._translated("read", path):
            try:
                with self._open(path, os.O_RDONLY) as fd:
                    self._regular(fd, path)
                    if os.fstat(fd).st_size > limit:
                        raise self._damaged(path, "length", f"is larger than the limit of {limit:,} bytes")
                    return rawfile.read_all(fd)
            except OSError as error:
                if error.errno in _GONE:
                    return None
                if error.errno in _NO_FILE:
                    raise self._damaged(path, "not-a-file", "is not a regular file") from error
                raise

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        with self._translated("read", path):
            try:
                with self._open(path, os.O_RDONLY) as fd:
                    self._regular(fd, path)
                    short = rawfile.read_ranges(fd, ranges)
            except OSError as error:
                if error.errno in _GONE | _NO_FILE:
                    raise self._damaged(path, "missing-file", "is missing") from error
                raise
        if short is not None:
            raise self._damaged(path, "length", f"ends before byte {short:,}")

    def _regular(self, fd: int, path: str) -> None:
        if not stat_module.S_ISREG(os.fstat(fd).st_mode):
            raise self._damaged(path, "not-a-file", "is not a regular file")

    def _damaged(self, path: str, kind: str, why: str) -> CorruptCheckpointError:
        where = os.path.join(self.root, path)
        return CorruptCheckpointError(f"{where} {why}.", kind=kind, file=path.rpartition("/")[2], path=where)

    def make_folder(self, folder: str) -> None:
        with self._translated("make folder", folder):
            self.make_root()
            parent, _, name = folder.rpartition("/")
            with self._folder(parent) as fd:
                os.mkdir(name, dir_fd=fd)

    def make_root(self) -> None:
        """Makes the root and its missing parents, durably; fine when they are there."""
        missing: list[str] = []
        path = self.root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            # Without it a power cut after the first acknowledged save could take the whole root away.
            _sync_path(os.path.dirname(path))

    def write_new(self, path: str, data: memoryview | bytes, *, progress: Callable[[int], None] | None = None) -> None:
        size = len(data)
        folder, _, name = path.rpartition("/")
        point = "fsync.manifest" if name == "manifest.json" else "fsync.file"
        with self._translated("write", path, needed=size), self._folder(folder) as parent:
            fd = rawfile.create(name, parent, size)
            try:
                rawfile.write_all(fd, memoryview(data), progress)
                points.reach("write.manifest" if point == "fsync.manifest" else "write.data")
                points.reach(f"{point}.before")
                os.fsync(fd)
                points.reach(f"{point}.after")
            finally:
                os.close(fd)

    def replace(self, path: str, data: bytes) -> None:
        folder, _, name = path.rpartition("/")
        with self._translated("write", path, needed=len(data)):
            self.make_root()
            if folder:
                with contextlib.suppress(FileExistsError), self._folder("") as root:
                    os.mkdir(folder, dir_fd=root)
                    _sync_fd(root)
            with self._folder(folder) as parent:
                draft = f".tmp-{name}-{os.urandom(8).hex()}"
                fd = rawfile.create(draft, parent, 0)
                try:
                    try:
                        rawfile.write_all(fd, memoryview(data), None)
                        os.fsync(fd)
                    finally:
                        os.close(fd)
                    os.replace(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.unlink(draft, dir_fd=parent)
                    raise
                _sync_fd(parent)

    def sync_folder(self, folder: str = "") -> None:
        point = "fsync.folder" if folder else "fsync.parent"
        with self._translated("fsync", folder), self._folder(folder) as fd:
            points.reach(f"{point}.before")
            _sync_fd(fd)
            points.reach(f"{point}.after")

    def publish(self, source: str, target: str) -> bool:
        with self._translated("rename", target), self._folder("") as fd:
            try:
                rawfile.rename_new(source, target, fd)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    return False
                raise
        return True

    def supersede(self, source: str, target: str) -> None:
        """Renames a file over whatever file stands at `target`; for files of other tools, never for a checkpoint's."""
        with self._translated("rename", target), self._folder("") as fd:
            os.replace(source, target, src_dir_fd=fd, dst_dir_fd=fd)

    def put_new(self, path: str, data: bytes) -> bool:
        raise StorageUnavailableError("A local root commits by renaming a folder.", path=self.root)

    def remove_file(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        with self._translated("remove", path):
            try:
                with self._folder(folder) as fd:
                    os.unlink(name, dir_fd=fd)
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    def remove_folder(self, folder: str, *, on_half: Callable[[], None] | None = None) -> None:
        parent, _, name = folder.rpartition("/")
        with self._translated("remove", folder):
            try:
                with self._folder(parent) as fd:
                    rawfile.remove_tree(name, fd, on_half)
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    def free_bytes(self) -> int | None:
        path = self.root
        while path != os.path.dirname(path) and not os.path.isdir(path):
            path = os.path.dirname(path)
        try:
            info = os.statvfs(path)
        except OSError:
            return None
        return info.f_bavail * info.f_frsize


def _entry(name: str, parent: int) -> Entry | None:
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        # Gone between listing and looking: a writer beside us removed it.
        if error.errno in _GONE:
            return None
        raise
    mark = (info.st_ino, info.st_mtime_ns, info.st_size)
    if stat_module.S_ISREG(info.st_mode):
        return Entry(name, "file", info.st_size, mark)
    return Entry(name, "folder" if stat_module.S_ISDIR(info.st_mode) else "other", 0, mark)


def _sync_fd(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        # File systems without folder fsync (some network and FUSE ones) say so by these; a real failure says EIO.
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _sync_path(path: str) -> None:
    fd = os.open(path, _FOLDER)
    try:
        _sync_fd(fd)
    finally:
        os.close(fd)
