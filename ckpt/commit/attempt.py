"""How one step comes to exist: files first, each durable, then the manifest, then the name (I1, I2, I3).

Two orders with one face. `FolderAttempt` writes under a dotted name and renames the folder; `ObjectAttempt` puts
objects under names unique to the save and then the manifest, conditionally. Whatever raises, the attempt is over: the
caller abandons it and nothing of it is tried again in place.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from ckpt import points
from ckpt.errors import CheckpointError, CommitUnknown, LockedError, StorageUnavailableError
from ckpt.format import names
from ckpt.format.manifest import Manifest
from ckpt.storage.base import Storage

log = logging.getLogger("ckpt")


class Attempt(ABC):
    """One attempt to commit `step` under `save`. All methods run on the writer's thread."""

    def __init__(self, storage: Storage, step: int, save: str) -> None:
        self.storage = storage
        self.step = step
        self.save = save
        self.target = names.step_name(step)
        self._bytes: dict[str, int] = {}  # file -> bytes handed to storage

    @property
    def in_place(self) -> Collection[str]:
        """Files of this attempt that lie already in the folder of the step."""
        return ()

    @abstractmethod
    def begin(self) -> None:
        """Makes the place that the files go to."""

    @abstractmethod
    def file_name(self, name: str) -> str:
        """The name under which file `name` of this attempt is stored, as the manifest has to list it."""

    @abstractmethod
    def write(self, name: str, data: memoryview | bytes, progress: Callable[[int], None] | None = None) -> None:
        """Writes a file of the checkpoint under a name from `file_name`; its bytes are durable on return."""

    @abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Makes the step exist, durably. All files it lists are written.

        Raises LockedError when another writer's step has the name, CommitUnknown when the step may exist but its
        durability could not be confirmed, any other CheckpointError when the step does not exist.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Removes what the attempt left, as far as that can be done; never raises."""

    def _check_lengths(self, folder: str) -> None:
        """I1: what storage says it holds is compared with what it was given, while the step can still be given up."""
        found = {entry.name: entry.bytes for entry in self.storage.list(folder) or () if entry.kind == "file"}
        for name, size in self._bytes.items():
            if found.get(name) != size:
                there = "is not there" if name not in found else f"has {found[name]:,} bytes"
                raise StorageUnavailableError(
                    f"{self.storage.url}/{folder}/{name} {there} after {size:,} bytes were written and fsynced.",
                    step=self.step,
                    path=f"{self.storage.url}/{folder}/{name}",
                    stage="commit",
                    hint="The storage loses data without an error; nothing was committed.",
                )

    def _check_record(self, record: bytes) -> None:
        """A save is a success once its commit record was read back."""
        path = f"{self.target}/{names.MANIFEST}"
        try:
            found = self.storage.read(path, names.MAX_MANIFEST)
        except CheckpointError as error:
            raise self._unknown(f"its manifest could not be read back: {error}", error.errno) from error
        if found != record:
            raise self._unknown("its manifest does not read back as it was written", None)

    def _unknown(self, why: str, errno: int | None) -> CommitUnknown:
        return CommitUnknown(
            f"{self.target} is in place in {self.storage.url}, but {why}",
            step=self.step,
            path=f"{self.storage.url}/{self.target}",
            stage="commit",
            errno=errno,
            hint="The next resume tells whether it survived; an earlier step is safe in either case.",
        )

    def _taken(self) -> LockedError:
        return LockedError(
            f"Another writer has committed {self.target} in {self.storage.url} meanwhile; this save is given up.",
            step=self.step,
            path=f"{self.storage.url}/{self.target}",
            stage="commit",
            hint="Let one process write a root, and resume the one that is to go on.",
        )


class FolderAttempt(Attempt):
    def __init__(self, storage: Storage, step: int, save: str) -> None:
        super().__init__(storage, step, save)
        self.folder = f"{names.TMP_PREFIX}{self.target}-{save}"

    def begin(self) -> None:
        self.storage.make_folder(self.folder)

    def file_name(self, name: str) -> str:
        return name

    def write(self, name: str, data: memoryview | bytes, progress: Callable[[int], None] | None = None) -> None:
        self.storage.write_new(f"{self.folder}/{name}", data, progress=progress)
        self._bytes[name] = len(data)

    def commit(self, manifest: bytes) -> None:
        self.write(names.MANIFEST, manifest)
        self._check_lengths(self.folder)
        # I1: the names inside must outlast a power cut before the folder's own name does.
        self.storage.sync_folder(self.folder)
        points.reach("publish.before")
        if not self.storage.publish(self.folder, self.target):
            raise self._taken()
        points.reach("publish.after")
        try:
            self.storage.sync_folder()
        except CheckpointError as error:
            raise self._unknown(f"the folder could not be fsynced: {error}", error.errno) from error
        self._check_record(manifest)

    def abandon(self) -> None:
        try:
            self.storage.remove_folder(self.folder)
        except CheckpointError as error:
            log.warning("could not remove %s, the next save will: %s", self.folder, error)


class ObjectAttempt(Attempt):
    def __init__(self, storage: Storage, step: int, save: str) -> None:
        super().__init__(storage, step, save)
        self._written: list[str] = []

    @property
    def in_place(self) -> Collection[str]:
        return tuple(self._bytes)

    def begin(self) -> None:
        """Nothing: objects need no folder."""

    def file_name(self, name: str) -> str:
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}-{self.save}{dot}{suffix}"

    def write(self, name: str, data: memoryview | bytes, progress: Callable[[int], None] | None = None) -> None:
        path = f"{self.target}/{name}"
        self._written.append(path)
        self.storage.write_new(path, data, progress=progress)
        self._bytes[name] = len(data)

    def commit(self, manifest: bytes) -> None:
        path = f"{self.target}/{names.MANIFEST}"
        self._check_lengths(self.target)
        points.reach("publish.before")
        placed = self.storage.put_new(path, manifest)
        points.reach("publish.after")
        found = self.storage.read(path, names.MAX_MANIFEST)
        if found == manifest:
            return
        # A refused put may still be ours (its first answer was lost): the save id in the store decides.
        if found is not None and (placed or Manifest.parse(found, path).save != self.save):
            raise self._taken()
        raise CommitUnknown(
            f"The manifest of {self.target} was put but could not be read back.",
            step=self.step,
            path=f"{self.storage.url}/{path}",
            stage="commit",
            hint="The next resume tells whether it is there; an earlier step is safe in either case.",
        )

    def abandon(self) -> None:
        for path in self._written:
            try:
                self.storage.remove_file(path)
            except CheckpointError as error:
                log.warning("could not remove %s: %s", path, error)


def attempt_for(storage: Storage, step: int, save: str) -> Attempt:
    kind = FolderAttempt if storage.abilities.renames_folders else ObjectAttempt
    return kind(storage, step, save)
