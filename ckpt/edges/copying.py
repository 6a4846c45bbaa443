"""One step carried to another root, checked on the way: the manifest last, as a save does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckpt.commit.attempt import FolderAttempt
from ckpt.commit.lock import RootLock
from ckpt.commit.roster import Scanner
from ckpt.edges.opening import Found, path_of, use
from ckpt.edges.progress import Progress, Told, counted
from ckpt.edges.verifying import check_step, file_path
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.format import names
from ckpt.format.digest import digest
from ckpt.format.manifest import FileEntry
from ckpt.storage.base import ReadRange, Storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.open import normalise, open_storage

_PATIENCE = 10.0


@dataclass(frozen=True)
class CopyReport:
    """copied: False when the same step was there already, with the same bytes."""

    step: int
    source: str
    path: str
    bytes: int
    copied: bool

    def to_dict(self) -> dict[str, Any]:
        """What `ckpt cp --json` prints."""
        return {"schema": 1, **vars(self)}


def copy(source: Any, target: Any, *, step: int | None = None, progress: Progress | None = None) -> CopyReport:
    """Copies one committed step (of a root: its newest, or `step`) from one local root to another.

    target: a root, made when missing, where the step gets its usual name; or a folder whose own name is a step's
    ("backup/step-00000500"). It appears there whole and durable, or not at all, every byte checked against its digest.
    Takes the lock of the target's root. Needs memory for the largest file.

    Raises CorruptCheckpointError when the source is damaged, CheckpointError when another step, or a damaged copy of
    this one, is in the way, LockedError, NotCommittedError, StorageUnavailableError.
    """
    return use(source, step, lambda found: _copy(found, target, progress))


def _copy(found: Found, target: Any, progress: Progress | None) -> CopyReport:
    full = Scanner(found.storage).look(found.folder.name)
    if full is None or full.manifest is None:
        raise CheckpointError(f"{found.path} is gone.", path=found.path, stage="copy")
    storage, name = _target(target, full.step)
    if not isinstance(storage, LocalStorage) or not isinstance(found.storage, LocalStorage):
        raise ValueError("cp copies between local folders; this version has no other")
    manifest = found.storage.read(
        f"{found.folder.name}/{names.MANIFEST}" if found.folder.name else names.MANIFEST, names.MAX_MANIFEST
    )
    if manifest is None:
        raise CheckpointError(f"{found.path} is gone.", path=found.path, stage="copy")
    record = full.manifest
    if any(entry.source is not None for entry in record.files):
        # What an earlier step's folder holds comes along, so that the copy stands on its own.
        manifest = replace(record, files=tuple(replace(entry, source=None) for entry in record.files)).encode()
    report = CopyReport(record.step, found.path, path_of(storage, name), record.bytes, True)
    if storage.stat(name) is not None:
        _same_or_raise(storage, name, manifest, record.step)
        return CopyReport(record.step, found.path, report.path, record.bytes, False)
    lock = RootLock(storage)
    lock.acquire(_PATIENCE)
    try:
        attempt = FolderAttempt(storage, record.step, record.save)
        attempt.target = name
        try:
            attempt.begin()
            told = counted(progress, record.bytes)
            for entry in record.files:
                attempt.write(entry.name, _checked(found, entry, told))
            attempt.commit(manifest)
        except BaseException:
            attempt.abandon()
            raise
    finally:
        lock.release()
    return report


def _target(target: Any, step: int) -> tuple[Storage, str]:
    place, _ = normalise(target)
    above, _, last = place.rstrip("/").rpartition("/")
    if names.parse_step_name(last) is not None and above:
        return open_storage(above), last
    return open_storage(target), names.step_name(step)


def _same_or_raise(storage: Storage, name: str, manifest: bytes, step: int) -> None:
    where = path_of(storage, name)
    there = Scanner(storage).look(name)
    same = there is not None and there.committed and storage.read(f"{name}/{names.MANIFEST}", len(manifest)) == manifest
    if not same or there is None:
        raise CheckpointError(
            f"{where} is there already and is not this checkpoint.",
            step=step,
            path=where,
            stage="copy",
            hint="Choose another target, or move it away.",
        )
    verdict = check_step(storage, there)
    if not verdict.ok:
        raise CheckpointError(
            f"{where} is a damaged copy of this checkpoint: {verdict.findings[0].file} {verdict.reasons[0]}.",
            step=step,
            path=where,
            stage="copy",
            hint="Remove it and copy again.",
        )


def _checked(found: Found, entry: FileEntry, told: Told | None) -> memoryview:
    path = file_path(found.folder.name, entry)
    buffer = memoryview(bytearray(entry.bytes))
    if entry.bytes:
        found.storage.read_ranges(path, [ReadRange(0, (buffer,))])
    if digest(buffer) != entry.xxh3_128:
        raise CorruptCheckpointError(
            f"{path_of(found.storage, path)} does not hold the bytes that were saved; nothing was copied.",
            kind="digest",
            file=entry.name,
            step=found.folder.step,
            path=path_of(found.storage, path),
            stage="copy",
        )
    if told is not None:
        told(entry.bytes)
    return buffer
