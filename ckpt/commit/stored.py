"""One committed checkpoint opened for reading: its manifest, the indexes of its ranks, and the check of its digests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ckpt.commit.roster import StepFolder
from ckpt.errors import CorruptCheckpointError
from ckpt.format import coverage, names
from ckpt.format.digest import Streaming, digest
from ckpt.format.index import RankIndex
from ckpt.format.manifest import FileEntry, Manifest
from ckpt.plan.planner import Source, sources
from ckpt.storage.base import ReadRange, Storage

_SLICE = 8 << 20  # bytes of one read while a file is verified


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose manifest and indexes were read and found whole; its tensor bytes were not read yet."""

    storage: Storage
    folder: str
    manifest: Manifest
    indexes: tuple[RankIndex, ...]

    def path(self, file: str) -> str:
        """Where a listed file lies, below the root: in the step's folder, or in that of an earlier step."""
        entry = self.manifest.file(file)
        if entry is not None and entry.source is not None:
            return entry.path(self.folder)
        return f"{self.folder}/{file}" if self.folder else file

    @cached_property
    def sources(self) -> dict[int, list[Source]]:
        return sources(self.indexes)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Tensor name -> its number in the manifest's table; aliases lead to the tensor they share."""
        table = self.manifest.tensors
        numbers = {name: number for number, name in enumerate(table.names)}
        numbers.update({alias: numbers[target] for alias, target in table.aliases.items()})
        return numbers


def open_stored(storage: Storage, folder: StepFolder) -> Stored:
    """Reads and checks the indexes of a committed step.

    Raises CorruptCheckpointError when one is missing, or its bytes are not what the manifest says.
    """
    manifest = folder.manifest
    if manifest is None or folder.problem is not None:
        raise CorruptCheckpointError(
            f"{storage.url}/{folder.name} is damaged: {folder.problem}.",
            kind=folder.kind or "manifest",
            step=folder.step,
            path=f"{storage.url}/{folder.name}",
        )
    prefix = f"{folder.name}/" if folder.name else ""
    indexes: list[RankIndex] = []
    for entry in manifest.files:
        if entry.name.endswith(".json"):
            data = storage.read(prefix + entry.name, names.MAX_INDEX)
            if data is None or len(data) != entry.bytes or digest(data) != entry.xxh3_128:
                why = "is missing" if data is None else "does not match the manifest's digest"
                raise _damaged(storage, prefix + entry.name, entry, why, "missing-file" if data is None else "digest")
            indexes.append(RankIndex.parse(data, manifest, f"{storage.url}/{prefix}{entry.name}"))
    indexes.sort(key=lambda index: index.rank)
    coverage.check_ranks(manifest, indexes, f"{storage.url}/{folder.name}")
    return Stored(storage, folder.name, manifest, tuple(indexes))


def check_headers(stored: Stored) -> None:
    """Reads the header of every data file and compares it with its digest: with it, and the pieces checked as they
    land, every byte of a data file is covered. Raises CorruptCheckpointError (kind "header")."""
    for index in stored.indexes:
        for file in index.files:
            buffer = bytearray(file.header_bytes)
            stored.storage.read_ranges(stored.path(file.name), [ReadRange(0, (memoryview(buffer),))])
            if digest(buffer) != file.header_xxh3_128:
                entry = stored.manifest.file(file.name)
                assert entry is not None
                raise _damaged(stored.storage, stored.path(file.name), entry, "has a damaged header", "header")


def check_file(
    storage: Storage, path: str, entry: FileEntry, progress: Callable[[int], None] | None = None
) -> CorruptCheckpointError | None:
    """Reads one listed file whole, in bounded memory, and compares its digest; the finding, or None when it is right.

    Raises StorageUnavailableError when it could not be read.
    """
    whole = Streaming()
    buffer = memoryview(bytearray(min(_SLICE, max(entry.bytes, 1))))
    try:
        for start in range(0, entry.bytes, len(buffer)):
            view = buffer[: min(len(buffer), entry.bytes - start)]
            storage.read_ranges(path, [ReadRange(start, (view,))])
            whole.update(view)
            if progress is not None:
                progress(len(view))
    except CorruptCheckpointError as error:
        return error
    if whole.hexdigest() != entry.xxh3_128:
        return _damaged(storage, path, entry, "does not have the bytes that were saved", "digest")
    return None


def check_all(stored: Stored, progress: Callable[[int], None] | None = None) -> None:
    """Reads every file of the step; raises the first CorruptCheckpointError."""
    for entry in stored.manifest.files:
        finding = check_file(stored.storage, stored.path(entry.name), entry, progress)
        if finding is not None:
            raise finding


def _damaged(storage: Storage, path: str, entry: FileEntry, why: str, kind: str) -> CorruptCheckpointError:
    where = f"{storage.url}/{path}"
    return CorruptCheckpointError(f"{where} {why}.", kind=kind, file=entry.name, path=where, stage="read")
