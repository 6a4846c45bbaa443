"""One writer a root (I6), on one machine: advisory. Across machines the line decides, not the lock."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from typing import Any

from ckpt.errors import CheckpointError, LockedError, StorageUnavailableError, translate_os_error
from ckpt.format import names
from ckpt.storage.base import Storage
from ckpt.storage.local import LocalStorage

log = logging.getLogger("ckpt")

_OWNER = f"{names.LOCK}.owner"
_in_process: dict[str, tuple[int, float]] = {}  # roots that live in this process only: url -> (id of the lock, since)
_guard = threading.Condition()


class RootLock:
    """The lock of one root. The operating system frees it when its owner dies, so there is no stale lock."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._file: Any = None
        self._held = False

    @property
    def held(self) -> bool:
        return self._held

    def acquire(self, timeout: float) -> None:
        """Waits at most `timeout` seconds; LockedError then, naming the owner. No-op when held already."""
        if self._held:
            return
        if isinstance(self.storage, LocalStorage):
            self._acquire_file(self.storage, timeout)
        else:
            self._acquire_in_process(timeout)
        self._held = True

    def _acquire_file(self, storage: LocalStorage, timeout: float) -> None:
        from filelock import FileLock, Timeout

        try:
            storage.make_root()
            path = os.path.join(storage.root, names.LOCK)
            # Made by us: a mode given to FileLock is set past the umask.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))
            # thread_local=False: the writer's thread and the caller's share one lock.
            self._file = FileLock(path, thread_local=False)
            try:
                self._file.acquire(timeout=0)
            except Timeout:
                self._tell_wait(self._owner(), timeout)
                self._file.acquire(timeout=min(timeout, threading.TIMEOUT_MAX), poll_interval=0.05)
        except Timeout:
            raise self._locked(self._owner()) from None
        except (OSError, NotImplementedError) as error:
            where = os.path.join(storage.root, names.LOCK)
            if isinstance(error, OSError):
                raise translate_os_error(error, stage="lock", path=where) from error
            raise StorageUnavailableError(f"{where} cannot be locked: {error}", stage="lock", path=where) from error
        note = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        # The note only makes the other side's message better; a full disk must not keep a run from resuming. An old one
        # would name the wrong process.
        try:
            storage.replace(_OWNER, json.dumps(note).encode("ascii"))
        except CheckpointError:
            with contextlib.suppress(CheckpointError):
                storage.remove_file(_OWNER)

    def _acquire_in_process(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with _guard:
            if self.storage.url in _in_process:
                self._tell_wait({"pid": os.getpid()}, timeout)
            while self.storage.url in _in_process:
                left = deadline - time.monotonic()
                if left <= 0:
                    _, since = _in_process[self.storage.url]
                    raise self._locked({"host": socket.gethostname(), "pid": os.getpid(), "since": since})
                _guard.wait(min(left, threading.TIMEOUT_MAX))
            _in_process[self.storage.url] = (id(self), time.time())

    def _tell_wait(self, owner: dict[str, Any], timeout: float) -> None:
        if timeout > 0:
            pid = owner.get("pid")
            log.info(
                "waiting up to %g s for the lock of %s, held by process %s",
                timeout, self.storage.url, "?" if pid is None else pid,
            )  # fmt: skip

    def _owner(self) -> dict[str, Any]:
        try:
            note = json.loads(self.storage.read(_OWNER, 4096) or b"{}")
        except (ValueError, RecursionError, CheckpointError):
            return {}
        return note if isinstance(note, dict) else {}

    def _locked(self, owner: dict[str, Any]) -> LockedError:
        host, pid, since = owner.get("host"), owner.get("pid"), owner.get("since")
        if isinstance(since, (int, float)):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        else:
            since, when = None, "an unknown time"
        return LockedError(
            f"{self.storage.url} is being written by process {pid if pid is not None else '?'} on "
            f"{host or 'an unknown host'} since {when}.",
            owner_host=host,
            owner_pid=pid,
            since=since,
            path=self.storage.url,
            stage="lock",
            hint="Wait for it to end, stop it, or choose another root.",
        )

    def release(self) -> None:
        """Frees the lock; fine when it is not held."""
        if not self._held:
            return
        self._held = False
        if self._file is not None:
            self._file.release()
            self._file = None
        else:
            with _guard:
                if _in_process.get(self.storage.url, (0, 0.0))[0] == id(self):
                    del _in_process[self.storage.url]
                _guard.notify_all()
