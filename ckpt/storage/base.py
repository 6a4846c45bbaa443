"""The few verbs through which every byte enters and leaves a root, and what a backend must say about itself.

Paths are relative to the root, of at most two segments ("step-00000500/manifest.json"), never absolute and never
through a link. Every error that leaves a backend is one of `ckpt.errors`; "not there" is a None, never an error, and
"could not look" is StorageUnavailableError, never a None. A backend holds no open handle between calls, so nothing of
it crosses a fork.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a folder. `bytes` is a file's length, 0 for others. `mark` differs when the file was replaced."""

    name: str
    kind: Literal["file", "folder", "other"]
    bytes: int = 0
    mark: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a backend can do, declared or probed, never inferred from a platform.

    renames_folders: `publish` moves a whole folder at once and refuses to replace one; without it a step is committed
    by `put_new` of its manifest.
    """

    renames_folders: bool


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Bytes of a file from `start`, to be landed one after another in `into` (writable, C-contiguous, 1-d bytes)."""

    start: int
    into: tuple[memoryview, ...]


class Storage(ABC):
    """One root. All methods may be called from any thread."""

    url: str  # the root in its normal form, as users see it
    abilities: Abilities

    @abstractmethod
    def list(self, folder: str = "") -> tuple[Entry, ...] | None:
        """The names in `folder`, sorted; None when it is not there."""

    @abstractmethod
    def stat(self, path: str) -> Entry | None:
        """What stands at `path`, links not followed; None when nothing does."""

    @abstractmethod
    def read(self, path: str, limit: int) -> bytes | None:
        """The whole file; None when it is not there. A file of more than `limit` bytes is CorruptCheckpointError
        (kind "length"), raised before its bytes are read."""

    @abstractmethod
    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Fills every range, in parallel. CorruptCheckpointError (kind "missing-file" or "length") when the file is not
        there or ends before a range does; the buffers then hold garbage."""

    @abstractmethod
    def make_folder(self, folder: str) -> None:
        """Makes `folder`, which must not be there, below the root, which is made when missing."""

    @abstractmethod
    def write_new(self, path: str, data: memoryview | bytes, *, progress: Callable[[int], None] | None = None) -> None:
        """Makes the file, which must not be there, with all of `data`, durable on return as far as the file itself
        goes (its name needs `sync_folder`). `progress` is told the bytes written so far, from any thread.

        `data` may be followed in memory by up to 4095 bytes of padding (see `transfer`); they are never part of the
        file. On error the file may be left partly written and must be given up, never retried in place (I3).
        """

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Makes or replaces a small file atomically and durably (pins, the lock's owner note)."""

    @abstractmethod
    def sync_folder(self, folder: str = "") -> None:
        """Makes the names in `folder` durable."""

    @abstractmethod
    def publish(self, source: str, target: str) -> bool:
        """Renames a folder; False when something non-empty stands at `target` already. Needs `renames_folders`."""

    @abstractmethod
    def put_new(self, path: str, data: bytes) -> bool:
        """Makes the file whole or not at all; False when it is there already, with other bytes or the same."""

    @abstractmethod
    def remove_file(self, path: str) -> None:
        """Removes a file, link or the like; fine when it is gone already."""

    @abstractmethod
    def remove_folder(self, folder: str, *, on_half: Callable[[], None] | None = None) -> None:
        """Removes `folder` and all below it, whatever its shape, links not followed; fine when it is gone already."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Room left for a writer; None when it cannot be told."""
