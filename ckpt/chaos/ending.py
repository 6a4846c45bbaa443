"""Comparing two runs: every step that both saved, the bytes at the end, the batches, and a file the user names."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ckpt.chaos.record import DATA, METRIC, RNG, TENSOR, Difference, Key, Record, byte_differences, differences, same
from ckpt.chaos.runs import Run, roots_of
from ckpt.chaos.stitch import Stitched, batch_differences, stitch
from ckpt.commit.line import Line, line_of
from ckpt.commit.roster import Scanner
from ckpt.storage.local import LocalStorage


@dataclass
class Compared:
    """How much was compared: tensors, rng (streams and their parts) and values of the newest checkpoint, batches of the
    whole run, steps by digest, bytes at the end."""

    tensors: int = 0
    rng: int = 0
    batches: int = 0
    steps: int = 0
    bytes: int = 0


@dataclass
class Ending:
    """A finished run, read once: root -> step -> record, root -> batches, root -> line at the end."""

    run: Run
    artefact: Path | None = None
    roots: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.roots = roots_of(self.run.processes)

    @cached_property
    def records(self) -> dict[str, dict[int, list[Record]]]:
        """Every committed save of the run by root and step; a step saved again after a kill has several."""
        saves = {
            event["save"]: event["root"]
            for process in self.run.processes
            for event in process.events
            if event.kind == "staged"
        }
        found: dict[str, dict[int, list[Record]]] = {root: {} for root in self.roots}
        for folder in sorted(self.run.records.iterdir()):
            record = Record.load(folder)
            if record is not None and folder.name in saves:
                found[saves[folder.name]].setdefault(record.manifest.step, []).append(record)
        return found

    @cached_property
    def batches(self) -> dict[str, Stitched]:
        return {root: stitch(self.run.processes, root) for root in self.roots}

    @cached_property
    def lines(self) -> dict[str, Line]:
        return {root: line_of(Scanner(LocalStorage(at)).scan()) for root, at in self.roots.items()}

    def varying(self, other: Ending) -> frozenset[Key]:
        """What differs between two runs without faults, although no tensor, value or batch does: metrics that are
        clocks or rates, and random streams that nobody seeded and nobody draws from."""
        found: set[Key] = set()
        still = self.still()
        for root, steps in self.records.items():
            for step, (record, *_) in steps.items():
                for twin in other.records.get(root, {}).get(step, ()):
                    for item in differences(record, twin):
                        key = (item.kind, item.name)
                        if item.kind != METRIC and not (item.kind == RNG and key in still):
                            return frozenset()
                        found.add(key)
        return frozenset(found)

    def still(self, only: frozenset[Key] | None = None) -> frozenset[Key]:
        """Facts that are the same at every step of the run (of `only`, where given)."""
        first: dict[tuple[str, Key], Any] = {}
        moved: set[Key] = set()
        for root, steps in self.records.items():
            for record in (record for records in steps.values() for record in records):
                for key in only if only is not None else record.facts:
                    # A start that found nothing to resume begins a run of its own.
                    value = record.facts.get(key)
                    if not same(first.setdefault((root + record.manifest.run, key), value), value):
                        moved.add(key)
        return (only if only is not None else frozenset(key for _, key in first)) - moved


def compare(clean: Ending, other: Ending, ignored: frozenset[Key], compared: Compared) -> list[Difference]:
    """All differences, those of the earliest step first; within a step batches, tensors, RNG, the rest."""
    found: list[Difference] = []
    if set(clean.roots) != set(other.roots):
        text = f"{sorted(clean.roots)} and {sorted(other.roots)}"
        return [Difference(None, "step", "roots", text)]
    for root, at in clean.roots.items():
        found += _by_digest(clean.records[root], other.records[root], ignored, compared)
        found += _at_end(root, at, clean, other, compared)
        found += _moved(other, ignored)
        found += batch_differences(clean.batches[root], other.batches[root])
        compared.batches += len(other.batches[root].batches)
    found += _artefacts(clean.artefact, other.artefact)
    rank = ("step", "batch", TENSOR, RNG, DATA)
    unique = {(item.step, item.kind, item.name): item for item in found}
    return sorted(
        unique.values(),
        key=lambda item: (
            item.step if item.step is not None else 1 << 62,
            rank.index(item.kind) if item.kind in rank else len(rank),
        ),
    )


def _moved(other: Ending, ignored: frozenset[Key]) -> list[Difference]:
    """Streams that stand still without faults must do so with them, whatever they stand at."""
    streams = frozenset(key for key in ignored if key[0] == RNG)
    return [
        Difference(None, kind, name, "it was left alone, and other bits came back after a resume")
        for kind, name in sorted(streams - other.still(streams))
    ]


def _by_digest(
    clean: Mapping[int, list[Record]], other: Mapping[int, list[Record]], ignored: frozenset[Key], compared: Compared
) -> list[Difference]:
    found = []
    for step in sorted(set(clean) & set(other)):
        for record in other[step]:
            found += differences(clean[step][0], record, ignored)
            compared.steps += 1
    return found


def _at_end(root: str, at: str, clean: Ending, other: Ending, compared: Compared) -> list[Difference]:
    line, twin = clean.lines[root], other.lines[root]
    newest = line.newest.step if line.newest is not None else None
    reached = twin.newest.step if twin.newest is not None else None
    if newest != reached:
        return [Difference(newest, "step", "newest", f"it is {newest} and {reached}")]
    found = []
    for folder in line.steps:
        match = twin.at(folder.step)
        if match is not None:
            different, count = byte_differences(at, folder, other.roots[root], match)
            found += different
            compared.bytes += count
    if newest is not None and newest in other.records[root]:
        kinds = [kind for kind, _ in other.records[root][newest][-1].facts]
        compared.tensors += kinds.count(TENSOR)
        compared.rng += kinds.count(RNG)
    return found


def refuse_existing(name: str | None) -> None:
    """ValueError when the file to compare is there already: the runs would overwrite it."""
    if name is not None and Path(name).exists():
        raise ValueError(f"{name} exists already and the runs would overwrite it; move it away first")


def take_artefact(run: Run, name: str, working: Path) -> Path | None:
    """Moves the file the user named from where the run has left it into the run's folder; None when there is none.

    A name that is not absolute is looked for in the sandbox first, then from the working directory.
    """
    for folder in (run.sandbox, working):
        path = folder / name
        if path.is_file():
            target = run.folder / f"artefact{path.suffix}"
            shutil.move(path, target)
            return target
    return None


def _artefacts(one: Path | None, two: Path | None) -> list[Difference]:
    if one is None and two is None:
        return []
    if one is None or two is None:
        which = "first" if two is None else "second"
        return [Difference(None, "artefact", "file", f"only the {which} run has made it")]
    if one.read_bytes() == two.read_bytes():
        return []
    if one.suffix in (".pt", ".pth", ".bin"):
        different = _torch_files(one, two)
        if different is not None:
            return different
    return [Difference(None, "artefact", one.name, "other bytes")]


def _torch_files(one: Path, two: Path) -> list[Difference] | None:
    """Differences of what two files of torch.save hold; None when they can't be read without running code.

    The container's own bytes (names of the archive, order of records) need not be equal.
    """
    import torch

    from ckpt.chaos.tensors import tree_differences

    try:
        left = torch.load(one, map_location="cpu", weights_only=True)
        right = torch.load(two, map_location="cpu", weights_only=True)
    except (torch.serialization.pickle.UnpicklingError, RuntimeError, EOFError):
        return None
    return [Difference(None, "artefact", path, text) for path, text in tree_differences(left, right)]
