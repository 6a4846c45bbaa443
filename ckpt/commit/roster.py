"""What a root holds: committed steps, damaged ones, debris and what is not ours. resume, ls, retention, verify and
chaos all ask `scan`, so that "committed" has one meaning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckpt.errors import CorruptCheckpointError, NotCommittedError, UnsupportedFormatError
from ckpt.format import names
from ckpt.format.manifest import Manifest
from ckpt.storage.base import Entry, Storage

LOOKS = 10  # at a root whose writer removes what was just listed


@dataclass(frozen=True)
class StepFolder:
    """A folder that holds, or should hold, one checkpoint.

    name: the folder's name; manifest: None when there is none or it is damaged; problem: why the step is not committed
    (None when it is); unsupported: the manifest is of a format version this package does not know.
    """

    name: str
    manifest: Manifest | None = None
    problem: str | None = None
    kind: str = ""
    unsupported: UnsupportedFormatError | None = None

    @property
    def committed(self) -> bool:
        return self.manifest is not None and self.problem is None

    @property
    def step(self) -> int:
        """From the manifest where there is one; else what the name says."""
        if self.manifest is not None:
            return self.manifest.step
        return names.parse_step_name(self.name) or 0

    @property
    def key(self) -> str:
        """Which checkpoint it is: a name is used again once the step under it was abandoned or found damaged."""
        return self.manifest.save if self.manifest is not None else self.name


@dataclass(frozen=True)
class Pin:
    step: int
    note: str


@dataclass(frozen=True)
class Roster:
    """A root at one moment. `exists`: the root is there at all. Steps are sorted by (incarnation, step). damaged: step
    folders that are not committed, those of a later format version too."""

    exists: bool
    steps: tuple[StepFolder, ...] = ()
    damaged: tuple[StepFolder, ...] = ()
    debris: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    pins: dict[int, Pin] = field(default_factory=dict)

    @property
    def later(self) -> tuple[StepFolder, ...]:
        """Steps of a later format version, by the number in their folder's name: not committed, and no damage."""
        return tuple(folder for folder in self.damaged if folder.unsupported is not None)

    @property
    def broken(self) -> tuple[StepFolder, ...]:
        """What is damaged in earnest."""
        return tuple(folder for folder in self.damaged if folder.unsupported is None)

    def with_step(self, folder: StepFolder) -> Roster:
        """The root once `folder` was committed, in the place of whatever had its name."""
        return replace(
            self,
            steps=tuple(sorted((*(f for f in self.steps if f.name != folder.name), folder), key=_by_order)),
            damaged=tuple(f for f in self.damaged if f.name != folder.name),
        )

    def manifest_of(self, name: str) -> Manifest | None:
        return next((folder.manifest for folder in self.steps if folder.name == name), None)


class Scanner:
    """Scans one root, keeping what it parsed for as long as the manifests' files stay the same.

    tables=False leaves the tensor tables of the manifests undecoded, for those who only list steps.
    """

    def __init__(self, storage: Storage, *, tables: bool = True) -> None:
        self.storage = storage
        self._tables = tables
        self._parsed: dict[str, tuple[tuple[int, ...], Manifest]] = {}

    def scan(self) -> Roster:
        """Raises StorageUnavailableError when the root could not be listed or a manifest could not be read.

        Beside a live writer, too, whose retention takes away what was just listed: what is not right counts only when
        the next look finds it wrong in the same way, and so does a root without a step (I5).
        """
        before: frozenset[tuple[object, ...]] | None = None
        roster = Roster(False)
        for _ in range(LOOKS):
            listed = self.storage.list()
            if listed is None:
                self._parsed.clear()
                return Roster(False)
            roster = self._read(listed)
            doubts = _doubts(listed, roster)
            if not doubts or (before is not None and doubts <= before):
                break
            before = doubts
        return roster

    def _read(self, listed: Sequence[Entry]) -> Roster:
        # A run that saves for weeks would otherwise hold the table of every step that was ever there.
        for gone in self._parsed.keys() - {entry.name for entry in listed} - {""}:
            del self._parsed[gone]
        steps: list[StepFolder] = []
        damaged: list[StepFolder] = []
        debris: list[str] = []
        foreign: list[str] = []
        pins: dict[int, Pin] = {}
        for entry in listed:
            if names.is_debris(entry.name):
                debris.append(entry.name)
            elif entry.name == names.PINS and entry.kind == "folder":
                pins = self.pins()
            elif not entry.name.startswith("."):
                folder = self._folder(entry)
                if folder is None:
                    foreign.append(entry.name)
                else:
                    (steps if folder.committed else damaged).append(folder)
        steps.sort(key=_by_order)
        damaged.sort(key=lambda folder: folder.step)
        return Roster(True, tuple(_distinct(steps)), tuple(damaged), tuple(debris), tuple(foreign), pins)

    def _folder(self, entry: Entry) -> StepFolder | None:
        """The step in `entry`, or None for what is not ours."""
        return self.look(entry.name, names.parse_step_name(entry.name) is not None) if entry.kind == "folder" else None

    def look(self, name: str, named: bool = True) -> StepFolder | None:
        """The checkpoint in folder `name`; None when there is none and the name (`named`) does not promise one."""
        prefix = f"{name}/" if name else ""
        path = f"{prefix}{names.MANIFEST}"
        stat = self.storage.stat(path)
        if stat is None:
            return self._without_manifest(name) if named else None
        cached = self._parsed.get(name)
        if cached is not None and stat.mark and cached[0] == stat.mark:
            manifest = cached[1]
        else:
            try:
                data = self.storage.read(path, names.MAX_MANIFEST)
                if data is None:
                    return self._without_manifest(name) if named else None
                manifest = Manifest.parse(data, f"{self.storage.url}/{path}", tables=self._tables)
            except UnsupportedFormatError as error:
                return StepFolder(name, None, str(error), "unsupported-format", error)
            except CorruptCheckpointError as error:
                return StepFolder(name, None, str(error), error.kind) if named else None
            self._parsed[name] = (stat.mark, manifest)
        return self._with_files(name, manifest)

    def _without_manifest(self, name: str) -> StepFolder | None:
        """A remainder of a checkpoint, or None for somebody else's folder or an empty one, which is no checkpoint's:
        a run must start beside whatever else stands in its root."""
        if not any(_is_data(entry) for entry in self.storage.list(name) or ()):
            return None
        return StepFolder(name, None, "its manifest is missing", "missing-manifest")

    def _with_files(self, name: str, manifest: Manifest) -> StepFolder:
        found = {entry.name: entry for entry in self.storage.list(name) or ()}
        for listed in manifest.files:
            entry = found.get(listed.name) if listed.source is None else self.storage.stat(listed.path(name))
            if entry is None or entry.kind != "file":
                return StepFolder(name, manifest, f"its file {listed.name} is missing", "missing-file")
            if entry.bytes != listed.bytes:
                why = f"its file {listed.name} has {entry.bytes:,} bytes instead of {listed.bytes:,}"
                return StepFolder(name, manifest, why, "length")
        return StepFolder(name, manifest)

    def pins(self) -> dict[int, Pin]:
        """The root's pins, by step."""
        pins: dict[int, Pin] = {}
        for entry in self.storage.list(names.PINS) or ():
            step = names.parse_step_name(entry.name.removesuffix(".json"))
            if step is None or not entry.name.endswith(".json") or entry.name.startswith("."):
                continue
            note = ""
            try:
                data = self.storage.read(f"{names.PINS}/{entry.name}", names.MAX_PIN) if entry.kind == "file" else None
                note = str(json.loads(data or b"{}").get("note", ""))
            except (ValueError, AttributeError, RecursionError, CorruptCheckpointError):
                # A pin that cannot be read still pins: keeping too much is the safe side.
                note = "(unreadable note)"
            pins[step] = Pin(step, note)
        return pins


def _doubts(listed: Sequence[Entry], roster: Roster) -> frozenset[tuple[object, ...]]:
    """What of a scan could come of a step that was removed while it was looked at."""
    committed = {folder.name for folder in roster.steps}
    wrong = {folder.name: (folder.key, folder.kind) for folder in roster.damaged}
    found: set[tuple[object, ...]] = {
        (entry.name, entry.mark, *wrong.get(entry.name, ()))
        for entry in listed
        if entry.name in wrong
        or (entry.kind == "folder" and entry.name not in committed and names.parse_step_name(entry.name) is not None)
    }
    if not roster.steps and listed:
        found.add(tuple((entry.name, entry.mark) for entry in listed))
    return frozenset(found)


def stands(storage: Storage, folder: StepFolder) -> bool:
    """False when the checkpoint was removed, or another took its place, since it was found: what went wrong with it
    meanwhile is no damage."""
    prefix = f"{folder.name}/" if folder.name else ""
    if storage.abilities.renames_folders:
        if (storage.stat(folder.name) if folder.name else storage.list()) is None:
            return False
    elif storage.stat(f"{prefix}{names.MANIFEST}") is None:
        return False
    now = Scanner(storage, tables=False).look(folder.name)
    return now is None or now.manifest is None or folder.manifest is None or now.key == folder.key


def _by_order(folder: StepFolder) -> tuple[int, int, str]:
    assert folder.manifest is not None
    return (*folder.manifest.order, folder.name)


def _distinct(steps: Sequence[StepFolder]) -> list[StepFolder]:
    """One folder a save: a copy under another name beside the original is the same checkpoint."""
    best: dict[str, StepFolder] = {}
    for folder in steps:
        assert folder.manifest is not None
        known = best.get(folder.manifest.save)
        if known is None or folder.name == names.step_name(folder.step):
            best[folder.manifest.save] = folder
    return sorted(best.values(), key=_by_order)


def looks_ours(storage: Storage, folder: str) -> bool:
    """True when `folder` holds nothing but files a checkpoint is made of, so that an uncommitted remainder of ours can
    be told from somebody else's folder."""
    listed = storage.list(folder)
    if listed is None:
        return False
    return all(_is_data(entry) or (entry.kind == "file" and entry.name == names.MANIFEST) for entry in listed)


def _is_data(entry: Entry) -> bool:
    return entry.kind == "file" and entry.name.startswith("rank-") and entry.name.endswith((".json", ".safetensors"))


def set_pin(storage: Storage, step: int, note: str) -> None:
    """Pins a committed step, durably; a second call replaces the note. Takes no lock.

    Raises NotCommittedError for a step that is not committed, or was removed meanwhile, ValueError for a note of more
    than 1 KiB.
    """
    if not isinstance(note, str):
        raise TypeError(f"a pin's note is a str, not {type(note).__name__}")
    if len(note.encode("utf-8", "surrogatepass")) > 1024:
        raise ValueError("a pin's note holds at most 1 KiB")
    scanner = Scanner(storage, tables=False)
    _check_committed(scanner, step)
    data = json.dumps({"step": step, "note": note}).encode("ascii")
    storage.replace(f"{names.PINS}/{names.step_name(step)}.json", data)
    try:
        # Retention that looked for pins before this one was there may have taken the step away.
        _check_committed(scanner, step)
    except NotCommittedError:
        remove_pin(storage, step)
        raise


def _check_committed(scanner: Scanner, step: int) -> None:
    if not any(folder.step == step for folder in scanner.scan().steps):
        url = scanner.storage.url
        raise NotCommittedError(f"Step {step} is not committed in {url}.", step=step, path=url)


def remove_pin(storage: Storage, step: int) -> None:
    """Takes a step's pin away; fine when there is none."""
    storage.remove_file(f"{names.PINS}/{names.step_name(step)}.json")
