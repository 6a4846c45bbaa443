"""The judge outside the process: after each death, what a fresh reader finds against what was acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.chaos.events import Process, keep
from ckpt.chaos.runs import roots_of
from ckpt.commit.line import line_of, manifest
from ckpt.commit.roster import Scanner, StepFolder
from ckpt.commit.stored import check_all, check_headers, open_stored
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.format import names
from ckpt.storage.local import LocalStorage

_REMOVALS = ("remove.unpublish.before",)


@dataclass(frozen=True)
class Finding:
    """What must never be: an acknowledged step that is lost, a torn step that is visible, bytes that changed."""

    kind: str  # "lost", "torn", "damaged", "unreadable"
    root: str
    step: int
    text: str


@dataclass
class Oracle:
    """Watches the roots of one run from one death to the next. `records` keeps the manifests and indexes of every step
    that was committed at a death or acknowledged."""

    records: Path
    findings: list[Finding] = field(default_factory=list)
    checked: int = 0  # steps whose every byte was read and compared with its digest
    _checked: set[str] = field(default_factory=set)
    _gone: set[str] = field(default_factory=set)

    def look(self, starts: Sequence[Sequence[Process]]) -> dict[str, int]:
        """Checks every root that the processes of `starts` used; root -> its newest sound step, 0 for none."""
        processes = [process for start in starts for process in start]
        newest = {}
        for root, at in roots_of(processes).items():
            newest[root] = self._root(root, at, processes)
        return newest

    def _root(self, root: str, at: str, processes: Sequence[Process]) -> int:
        storage = LocalStorage(at)
        try:
            roster = Scanner(storage).scan()
        except CheckpointError as error:
            self.findings.append(Finding("unreadable", root, 0, str(error)))
            return 0
        for folder in roster.damaged:
            text = f"step {folder.step} is visible and not complete: {folder.problem}"
            self.findings.append(Finding("torn", root, folder.step, text))
        sound = [folder for folder in roster.steps if self._sound(storage, root, folder)]
        for folder in sound:
            self._keep(at, folder)
        line = line_of(roster)
        good = [folder for folder in line.steps if folder in sound]
        self._acknowledged(root, good, {manifest(folder).save for folder in roster.steps}, processes)
        return good[-1].step if good else 0

    def _sound(self, storage: LocalStorage, root: str, folder: StepFolder) -> bool:
        save = manifest(folder).save
        if save in self._checked:
            return True
        try:
            stored = open_stored(storage, folder)
            check_headers(stored)
            check_all(stored)
        except CorruptCheckpointError as error:
            self.findings.append(Finding("damaged", root, folder.step, str(error)))
            return False
        self._checked.add(save)
        self.checked += 1
        return True

    def _acknowledged(
        self, root: str, good: Sequence[StepFolder], present: set[str], processes: Sequence[Process]
    ) -> None:
        acks = [event for process in processes for event in process.of("ack") if event["root"] == root]
        if not acks:
            return
        last = acks[-1]
        top = manifest(good[-1]).order if good else (-1, -1)
        if top < (last["incarnation"], last["step"]):
            there = f"step {good[-1].step}" if good else "none"
            text = f"step {last['step']} was acknowledged and the newest sound step is {there}"
            self.findings.append(Finding("lost", root, last["step"], text))
        vanished = {event["save"]: event["step"] for event in acks if event["save"] not in present}
        removals = sum(
            event.kind == "point" and event["name"] in _REMOVALS for process in processes for event in process.events
        )
        if len(vanished) > removals and len(vanished) > len(self._gone):
            steps = sorted(step for save, step in vanished.items() if save not in self._gone)
            text = f"acknowledged steps {steps} are gone, and retention began to remove only {removals}"
            self.findings.append(Finding("lost", root, steps[-1], text))
        self._gone |= set(vanished)

    def _keep(self, at: str, folder: StepFolder) -> None:
        kept = self.records / manifest(folder).save
        kept.mkdir(parents=True, exist_ok=True)
        for name in (names.MANIFEST, *(entry.name for entry in manifest(folder).files)):
            if name.endswith(".json"):
                keep(Path(at, folder.name, name), kept / name)
