"""System calls on open handles: creating, writing in large aligned pieces, reading in parallel, renaming, removing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence

from ckpt import threads
from ckpt.storage.base import ReadRange

ALIGN = 4096
CHUNK = 8 << 20  # bytes a write call hands over: large enough for the device, small enough to share among threads
DIRECT_FROM = 4 << 20  # below it one buffered write and its fsync are quicker than setting up direct ones
WRITERS = 2
READERS = 2
MAX_DEPTH = 64  # folders below each other that are removed; ours hold none, each level takes a handle
MAX_VECTORS = 512  # buffers in one preadv; the kernel takes 1024 at most
_RENAME_NOREPLACE = 1

_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def create(name: str, parent: int, size: int) -> int:
    """Opens a new file; directly (past the page cache) when it is large and the file system lets us."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Mode 666: umask decides, as for every file a user makes. mkstemp's 600 would lock colleagues out.
    fd = os.open(name, flags, 0o666, dir_fd=parent)
    try:
        if size:
            _preallocate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _preallocate(fd: int, size: int) -> None:
    # A full disk shows here, before any byte is written; and writes inside the size need no lock of the whole file.
    if not hasattr(_libc, "fallocate"):
        return
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED and code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _set_direct(fd: int, on: bool) -> bool:
    """Turns O_DIRECT of an open file on or off; False where it cannot be."""
    import fcntl

    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError:
        return False
    return True


def _address(view: memoryview) -> int:
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def write_all(fd: int, data: memoryview, progress: Callable[[int], None] | None) -> None:
    """Writes all of `data` from offset 0. Large page-aligned data goes directly and by several threads.

    Raises the first OSError of any thread; the file is then not to be used again.
    """
    size = len(data)
    body = data[: size - size % ALIGN]
    written = 0
    if size >= DIRECT_FROM and not data.readonly and _address(data) % ALIGN == 0 and _set_direct(fd, True):
        try:
            written = _write_chunks(fd, body, progress)
        finally:
            _set_direct(fd, False)
    if written == 0 and size > CHUNK:
        written = _write_chunks(fd, body, progress)
    while written < size:
        # A write may be short (a signal, a nearly full disk): only the loop makes it whole.
        written += os.pwrite(fd, data[written:], written)
    if progress is not None:
        progress(size)


def _write_chunks(fd: int, data: memoryview, progress: Callable[[int], None] | None) -> int:
    """Writes `data` by several threads; returns the bytes written, 0 when the first write says EINVAL (direct writes
    refused), so that the caller writes the plain way."""
    size = len(data)
    try:
        first = os.pwrite(fd, data[:CHUNK], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise
    if first < min(CHUNK, size):
        return first - first % ALIGN
    done = _Progress(first, progress)
    starts = iter(range(first, size, CHUNK))
    failed: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            while not failed:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                end = min(start + CHUNK, size)
                while start < end:
                    count = os.pwrite(fd, data[start:end], start)
                    # Direct writes restart only at aligned offsets; the rest of the block is written again.
                    count = count if start + count == end else count - count % ALIGN
                    if count == 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    start += count
                    done.add(count)
        except BaseException as error:
            failed.append(error)

    _run(work, min(WRITERS, -(-(size - first) // CHUNK)))
    if failed:
        raise failed[0]
    return size


class _Progress:
    def __init__(self, done: int, report: Callable[[int], None] | None) -> None:
        self._done, self._report, self._lock = done, report, threading.Lock()
        if report is not None:
            report(done)

    def add(self, count: int) -> None:
        if self._report is not None:
            with self._lock:
                self._done += count
                self._report(self._done)


def _run(work: Callable[[], None], count: int) -> None:
    """Runs `work` in this thread and `count - 1` more, or in as many as can be started."""
    helpers = [threads.start(work, "ckpt-io") for _ in range(count - 1)]
    work()
    for helper in helpers:
        if helper is not None:
            helper.join()


def read_all(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(fd, 1 << 24):
        parts.append(part)
    return b"".join(parts)


def read_ranges(fd: int, ranges: Sequence[ReadRange]) -> int | None:
    """Fills every range; the first offset that lies behind the file's end, or None when all is well."""
    jobs = iter(_jobs(ranges))
    lock = threading.Lock()
    short: list[int] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not (short or failed):
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                missing = _read_vector(fd, *job)
                if missing is not None:
                    short.append(missing)
        except BaseException as error:
            failed.append(error)

    total = sum(len(view) for item in ranges for view in item.into)
    _run(work, READERS if total > CHUNK else 1)
    if failed:
        raise failed[0]
    return min(short) if short else None


def _jobs(ranges: Sequence[ReadRange]) -> list[tuple[int, list[memoryview]]]:
    """Ranges cut and gathered into reads of about CHUNK bytes each."""
    jobs: list[tuple[int, list[memoryview]]] = []
    for item in ranges:
        position, start, views, count = item.start, item.start, [], 0
        for whole in item.into:
            for cut in range(0, len(whole), CHUNK):
                view = whole[cut : cut + CHUNK]
                views.append(view)
                count += len(view)
                position += len(view)
                if count >= CHUNK or len(views) == MAX_VECTORS:
                    jobs.append((start, views))
                    start, views, count = position, [], 0
        if views:
            jobs.append((start, views))
    return jobs


def _read_vector(fd: int, start: int, views: list[memoryview]) -> int | None:
    while views:
        count = os.preadv(fd, views, start)
        if count == 0:
            return start
        start += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views and count:
            views[0] = views[0][count:]
    return None


def rename_new(source: str, target: str, parent: int) -> None:
    """Renames a folder without ever replacing one that holds anything."""
    result = -1
    code = errno.ENOSYS
    if hasattr(_libc, "renameat2"):
        result = _libc.renameat2(parent, os.fsencode(source), parent, os.fsencode(target), _RENAME_NOREPLACE)
        code = ctypes.get_errno()
    if result == 0:
        return
    if code == errno.EEXIST:
        # An empty folder left under the name holds nothing that could be lost.
        with contextlib.suppress(OSError):
            os.rmdir(target, dir_fd=parent)
            os.rename(source, target, src_dir_fd=parent, dst_dir_fd=parent)
            return
    elif code in _UNSUPPORTED:
        # A plain rename refuses a folder that holds anything, by POSIX; a file in the way it refuses too.
        os.rename(source, target, src_dir_fd=parent, dst_dir_fd=parent)
        return
    raise OSError(code, os.strerror(code), target)


def remove_tree(name: str, parent: int, on_half: Callable[[], None] | None = None, depth: int = 0) -> None:
    """Removes whatever stands at `name`: links themselves, never what they lead to.

    What cannot be removed does not keep the rest: the first error is raised at the end.
    """
    if depth > MAX_DEPTH:
        raise OSError(errno.ELOOP, "folders are nested too deeply", name)
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    first: OSError | None = None
    try:
        for number, child in enumerate(sorted(os.listdir(fd))):
            try:
                remove_tree(child, fd, depth=depth + 1)
            except FileNotFoundError:
                continue
            except OSError as error:
                first = first or error
            if number == 0 and on_half is not None:
                on_half()
    finally:
        os.close(fd)
    if first is not None:
        raise first
    os.rmdir(name, dir_fd=parent)
