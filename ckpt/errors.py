"""Every error that leaves the package, as one tree.

    CheckpointError
    ├── NotCommittedError          a named step, or any step, is not there
    ├── CorruptCheckpointError     it is there and its bytes are not what was saved
    ├── UnsupportedFormatError     written by a version of the format this one cannot read
    ├── StateMismatchError         sound, but not the state the live objects ask for
    ├── UnsupportedStateError      an object or value that a checkpoint cannot hold
    ├── StorageUnavailableError    could not look, or could not read or write
    │   └── OutOfSpaceError        the write needs more room than there is
    ├── CommitUnknown              the commit may or may not be durable; the next resume tells
    ├── LockedError                another writer owns the root
    ├── RunExistsError             the root holds another run's steps
    ├── CoordinationError          ranks could not agree
    │   └── DeadlineError          a wait ran out (also a TimeoutError)
    ├── ReplicaDivergence          tensors declared equal on all ranks are not
    ├── ForkedError                used in a forked child
    └── ClosedError                used after close

Arguments that are wrong in themselves raise ValueError or TypeError instead.
`translate_os_error` is the one place where an OSError becomes one of these.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Sequence
from typing import Any


class CheckpointError(Exception):
    """Base of all errors of this package. Fields that do not apply are None.

    step: the step concerned; path: the file or folder; stage: what was being done ("write", "commit", ...);
    errno: of the system call; needed, free: bytes; hint: the next thing to do, in words.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        path: str | None = None,
        stage: str | None = None,
        errno: int | None = None,
        needed: int | None = None,
        free: int | None = None,
        hint: str | None = None,
    ) -> None:
        if hint is not None and hint not in message:
            message = message.rstrip() + ("" if message.rstrip()[-1:] in ".!?:" else ".") + f" {hint}"
        super().__init__(message)
        self.step = step
        self.path = path
        self.stage = stage
        self.errno = errno
        self.needed = needed
        self.free = free
        self.hint = hint


class NotCommittedError(CheckpointError):
    """A step that was asked for is not committed, or nothing is."""


class CorruptCheckpointError(CheckpointError):
    """Bytes differ from what was saved, or files are missing.

    attempts: ((step, reason), ...) of every step that was tried when all were damaged; kind: a short word for the
    damage ("missing-file", "length", "digest", "manifest", "index", "header", ...); file, tensor: where.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "damaged",
        file: str | None = None,
        tensor: str | None = None,
        attempts: Sequence[tuple[int, str]] = (),
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.kind = kind
        self.file = file
        self.tensor = tensor
        self.attempts = tuple(attempts)


class UnsupportedFormatError(CheckpointError):
    """The manifest names a format version that this version of the package does not know. version: what it said."""

    def __init__(self, message: str, *, version: object = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.version = version


class StateMismatchError(CheckpointError):
    """The checkpoint is sound but does not fit the live objects.

    missing: live names the checkpoint lacks; unexpected: saved names nothing live asks for;
    shape, dtype: ((name, saved, live), ...) as texts.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shape: Sequence[tuple[str, str, str]] = (),
        dtype: Sequence[tuple[str, str, str]] = (),
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.shape = tuple(shape)
        self.dtype = tuple(dtype)


class UnsupportedStateError(CheckpointError):
    """An object or value that a checkpoint cannot hold. name: its path in the state; type: its type's name."""

    def __init__(self, message: str, *, name: str | None = None, type: str | None = None, **fields: Any) -> None:
        fields.setdefault("path", name)
        super().__init__(message, **fields)
        self.name = name
        self.type = type


class StorageUnavailableError(CheckpointError):
    """Storage could not be listed, read or written. Never means "nothing there"."""


class OutOfSpaceError(StorageUnavailableError):
    """The device or quota is full; `needed` and `free` say by how much."""


class CommitUnknown(CheckpointError):
    """The commit was made visible but its durability could not be confirmed. The next `resume` tells."""


class LockedError(CheckpointError):
    """Another writer owns the root, or a newer incarnation of this run has committed.

    owner_host, owner_pid: who; since: unix seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        owner_host: str | None = None,
        owner_pid: int | None = None,
        since: float | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.owner_host = owner_host
        self.owner_pid = owner_pid
        self.since = since


class RunExistsError(CheckpointError):
    """A first save without a resume would start a second history in a root that holds one."""


class CoordinationError(CheckpointError):
    """Ranks could not agree. ranks: the ranks that are missing or failed."""

    def __init__(self, message: str, *, ranks: Sequence[int] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.ranks = tuple(ranks)


class DeadlineError(CoordinationError, TimeoutError):
    """A wait ran out of its deadline. What was awaited goes on."""


class ReplicaDivergence(CheckpointError):
    """Tensors that were declared equal on all ranks are not. tensors: their names."""

    def __init__(self, message: str, *, tensors: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.tensors = tuple(tensors)


class ForkedError(CheckpointError):
    """A manager was used in a forked child. owner_pid: the process that made it; pid: the one that used it."""

    def __init__(self, message: str, *, owner_pid: int, pid: int, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.owner_pid = owner_pid
        self.pid = pid


class ClosedError(CheckpointError):
    """The manager is closed."""


_FULL = frozenset({_errno.ENOSPC, _errno.EDQUOT, _errno.EFBIG})


def translate_os_error(
    error: OSError,
    *,
    stage: str,
    path: str | None = None,
    step: int | None = None,
    needed: int | None = None,
    free: int | None = None,
) -> StorageUnavailableError:
    """The error of ours for `error`, raised while doing `stage`; chain it with `raise ... from error`."""
    where = path or (os.fsdecode(error.filename) if error.filename else None)
    text = f"{stage} failed at {where}: {error.strerror or error}"
    if error.errno is not None:
        text += f" [{_errno.errorcode.get(error.errno, error.errno)}]"
    kind: type[StorageUnavailableError] = StorageUnavailableError
    hint = None
    if error.errno in _FULL:
        kind = OutOfSpaceError
        if needed is not None:
            text += f"; {needed:,} bytes are needed"
        if free is not None:
            text += f", {free:,} are free"
        text += "."
        hint = (
            "Free some room (`ckpt prune ROOT --keep-last N`) or choose another root; earlier checkpoints are intact."
        )
    return kind(text, stage=stage, path=where, step=step, errno=error.errno, needed=needed, free=free, hint=hint)
