"""Every byte of every step read back and compared with its digests; what differs is named, never raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.commit.roster import LOOKS, Scanner, StepFolder, stands
from ckpt.commit.stored import check_file
from ckpt.edges.opening import Place, nothing_committed, path_of, place_of
from ckpt.edges.progress import Progress, Told, counted
from ckpt.edges.spans import Span, SpanChecker
from ckpt.errors import CheckpointError, CorruptCheckpointError, NotCommittedError, StorageUnavailableError
from ckpt.format import coverage, names, payloads
from ckpt.format.datafile import header_bytes, parse_header
from ckpt.format.digest import Streaming, digest
from ckpt.format.index import DataFile, Piece, RankIndex
from ckpt.format.manifest import FileEntry, Manifest
from ckpt.storage.base import ReadRange, Storage

SLICE = 8 << 20  # bytes in memory at a time


class Finding(NamedTuple):
    """One thing that is wrong. file: in the step's folder; tensor: whose bytes they are, None where it is no tensor's;
    kind: "missing-file", "missing-manifest", "length", "digest", "header", "manifest", "index", "coverage",
    "value", "unreadable", ...; "unsupported-format" is no damage: a later version of ckpt wrote the step."""

    step: int
    file: str
    tensor: str | None
    kind: str


@dataclass(frozen=True)
class StepVerdict:
    """reasons: a sentence for each of `findings`. bytes: how many were there to be read."""

    step: int
    path: str
    ok: bool
    bytes: int
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        told = zip(self.findings, self.reasons, strict=True)
        found = [{**finding._asdict(), "message": reason} for finding, reason in told]
        return {"step": self.step, "path": self.path, "ok": self.ok, "bytes": self.bytes, "findings": found}


@dataclass(frozen=True)
class VerifyReport:
    """True when it has findings, so that `if ckpt.verify(path): ...` handles damage. steps: oldest first."""

    path: str
    steps: tuple[StepVerdict, ...]

    @property
    def ok(self) -> bool:
        return all(step.ok for step in self.steps)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for step in self.steps for finding in step.findings)

    def __bool__(self) -> bool:
        return not self.ok

    def to_dict(self) -> dict[str, Any]:
        """What `ckpt verify --json` prints."""
        return {"schema": 1, "path": self.path, "ok": self.ok, "steps": [step.to_dict() for step in self.steps]}


def verify(path: Any, *, step: int | None = None, progress: Progress | None = None) -> VerifyReport:
    """Reads all of a step, or of every step of a root (those off the line too), and compares every digest.

    step: only that one of a root. Headers and values are decoded as well. Needs as much memory as the largest index or
    header, and no torch. progress: told the bytes read and those to read.

    Damage is in the report and never raised, and a step that a live run removes meanwhile is left out. Raises
    NotCommittedError when there is no step at all, and StorageUnavailableError when the root could not be listed or a
    manifest not be read.
    """
    url, verdicts = "", []
    for _ in range(LOOKS):
        place = place_of(path)
        url = path_of(place.storage, place.folder) if place.folder is not None else place.storage.url
        folders = _folders(place, step)
        told = counted(progress, sum(folder.manifest.bytes for folder in folders if folder.manifest is not None))
        for folder in folders:
            verdict = check_step(place.storage, folder, told)
            if verdict.ok or stands(place.storage, folder):
                verdicts.append(verdict)
        if verdicts:
            return VerifyReport(url, tuple(verdicts))
    raise NotCommittedError(f"Every step of {url} was removed while it was read.", step=step, path=url)


def _folders(place: Place, step: int | None) -> Sequence[StepFolder]:
    scanner = Scanner(place.storage, tables=False)
    if place.folder is not None:
        found = scanner.look(place.folder) or StepFolder(
            place.folder, None, "its manifest is missing", "missing-manifest"
        )
        if step is not None and found.step != step:
            where = path_of(place.storage, place.folder)
            raise NotCommittedError(f"{where} is step {found.step}, not {step}.", step=step, path=where)
        return [found]
    roster = scanner.scan()
    if not roster.steps and not roster.damaged:
        raise nothing_committed(place.storage, roster)
    found = [folder for folder in (*roster.steps, *roster.damaged) if step is None or folder.step == step]
    if not found:
        raise NotCommittedError(f"There is no step {step} in {place.storage.url}.", step=step, path=place.storage.url)
    return sorted(found, key=_order)


def _order(folder: StepFolder) -> tuple[int, int, str]:
    incarnation = folder.manifest.incarnation if folder.manifest is not None else 0
    return folder.step, incarnation, folder.name


class _Notes:
    def __init__(self, step: int) -> None:
        self.step = step
        self.findings: list[Finding] = []
        self.reasons: list[str] = []

    def add(self, file: str, kind: str, reason: str, tensor: str | None = None) -> None:
        self.findings.append(Finding(self.step, file, tensor, kind))
        self.reasons.append(reason)

    def take(self, error: CheckpointError, file: str) -> None:
        kind = error.kind if isinstance(error, CorruptCheckpointError) else "unreadable"
        tensor = error.tensor if isinstance(error, CorruptCheckpointError) else None
        self.add(file, kind, str(error), tensor)


def check_step(storage: Storage, folder: StepFolder, told: Told | None = None) -> StepVerdict:
    """All that is wrong with one step. Raises nothing but for bugs."""
    notes = _Notes(folder.step)
    record = folder.manifest
    if record is not None:
        # The folder was found by the head of its manifest; the tables are needed to name what is damaged.
        again = Scanner(storage).look(folder.name)
        folder, record = (again, again.manifest) if again is not None else (folder, None)
    if record is None:
        notes.add(names.MANIFEST, folder.kind or "manifest", folder.problem or "it is gone")
    else:
        _check_files(storage, folder.name, record, notes, told)
    return StepVerdict(
        step=folder.step,
        path=path_of(storage, folder.name),
        ok=not notes.findings,
        bytes=record.bytes if record is not None else 0,
        findings=tuple(notes.findings),
        reasons=tuple(notes.reasons),
    )


def _check_files(storage: Storage, folder: str, record: Manifest, notes: _Notes, told: Told | None) -> None:
    there = [entry for entry in record.files if _is_there(storage, folder, entry, notes)]
    named = {
        entry.name: index
        for entry in there
        if entry.name.endswith(".json") and (index := _index(storage, folder, entry, record, notes, told)) is not None
    }
    indexes = list(named.values())
    described: dict[str, list[tuple[DataFile, RankIndex, int]]] = {}
    for index in indexes:
        for number, file in enumerate(index.files):
            described.setdefault(file.name, []).append((file, index, number))
    # An index that could not be read is a finding already, and all that it alone describes would be a second one.
    if len(indexes) == sum(entry.name.endswith(".json") for entry in record.files):
        try:
            coverage.check(record, indexes)
        except CorruptCheckpointError as error:
            notes.take(error, names.MANIFEST)
    for name, index in named.items():
        try:
            payloads.check_values(index.values, record)
        except CorruptCheckpointError as error:
            notes.take(error, name)
    for entry in there:
        if entry.name.endswith(".json"):
            continue
        path = file_path(folder, entry)
        found = described.get(entry.name, [])
        try:
            if all(file.shared for file, _, _ in found):
                # Without its index, or with bytes of others in it, a file is only checked as a whole.
                error = check_file(storage, path, entry, told)
                if error is not None:
                    notes.take(error, entry.name)
            for file, index, number in found:
                pieces = [piece for piece in index.pieces if piece.file == number]
                _check_data(storage, path, entry, file, pieces, record.tensors.names, notes, told)
        except StorageUnavailableError as error:
            notes.take(error, entry.name)


def file_path(folder: str, entry: FileEntry) -> str:
    return entry.path(folder) if folder or entry.source is not None else entry.name


def _is_there(storage: Storage, folder: str, entry: FileEntry, notes: _Notes) -> bool:
    found = storage.stat(file_path(folder, entry))
    if found is None or found.kind != "file":
        notes.add(entry.name, "missing-file", "is missing" if found is None else "is not a regular file")
        return False
    if found.bytes != entry.bytes:
        notes.add(entry.name, "length", f"has {found.bytes:,} bytes instead of {entry.bytes:,}")
        return False
    return True


def _index(
    storage: Storage, folder: str, entry: FileEntry, record: Manifest, notes: _Notes, told: Told | None
) -> RankIndex | None:
    path = file_path(folder, entry)
    try:
        data = storage.read(path, names.MAX_INDEX)
        if told is not None:
            told(entry.bytes)
        if data is None or digest(data) != entry.xxh3_128:
            notes.add(entry.name, "digest", "does not hold the bytes that were saved")
            return None
        return RankIndex.parse(data, record, path_of(storage, path))
    except CheckpointError as error:
        notes.take(error, entry.name)
        return None


def _check_data(
    storage: Storage,
    path: str,
    entry: FileEntry,
    file: DataFile,
    pieces: Sequence[Piece],
    tensors: Sequence[str],
    notes: _Notes,
    told: Told | None,
) -> None:
    """One walk over a data file with all its digests: of the whole, of each block, of the header and each piece."""
    spans = [Span(0, file.header_bytes, file.header_xxh3_128, -1)]
    spans += [Span(p.start, p.start + p.bytes, p.xxh3_128, p.tensor) for p in sorted(pieces, key=lambda p: p.start)]
    blocks = [
        Span(i * file.block, min((i + 1) * file.block, entry.bytes), xxh3_128, i)
        for i, xxh3_128 in enumerate(file.blocks)
    ]
    parts, whole, header = SpanChecker(spans), Streaming(), bytearray()
    grid = SpanChecker(blocks)
    buffer = memoryview(bytearray(min(SLICE, max(entry.bytes, 1))))
    try:
        for start in range(0, entry.bytes, len(buffer)):
            view = buffer[: min(len(buffer), entry.bytes - start)]
            storage.read_ranges(path, [ReadRange(start, (view,))])
            for checker in (parts, grid):
                checker.feed(start, view)
            whole.update(view)
            header += view[: max(file.header_bytes - start, 0)]
            if told is not None and not file.shared:
                told(len(view))
    except CorruptCheckpointError as error:
        notes.take(error, entry.name)
        return
    parts.finish()
    grid.finish()
    for label in parts.wrong:
        if label < 0:
            notes.add(entry.name, "header", "its header is not what was saved")
        else:
            tensor = tensors[label]
            notes.add(entry.name, "digest", f"the bytes of {tensor} are not those that were saved", tensor)
    if not any(label < 0 for label in parts.wrong):
        _check_header(bytes(header), path_of(storage, path), entry, notes)
    if not parts.wrong and (grid.wrong or (whole.hexdigest() != entry.xxh3_128 and not file.shared)):
        notes.add(entry.name, "digest", "does not hold the bytes that were saved")


def _check_header(header: bytes, where: str, entry: FileEntry, notes: _Notes) -> None:
    """That the header, whose bytes are those that were saved, opens in other tools."""
    try:
        parse_header(header, entry.bytes, where)
        if header_bytes(header, entry.bytes, where) != len(header):
            notes.add(entry.name, "header", f"its header does not end where the index says, at {len(header):,}")
    except CorruptCheckpointError as error:
        notes.take(error, entry.name)
