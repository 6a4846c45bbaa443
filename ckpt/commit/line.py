"""The line of a run: which committed steps lie on the history that goes on, and which were abandoned.

Every resume starts a new incarnation, a number that only grows, and each manifest names its own and the save it came
from. Once incarnation j has committed, steps of older incarnations above j's start are off the line. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.commit.roster import Roster, StepFolder
from ckpt.format.manifest import Manifest


@dataclass(frozen=True)
class Line:
    """run: the run's id (None in a root without steps); steps: on the line, by step number; off: abandoned steps of the
    run, by (incarnation, step); others: committed steps of other runs."""

    run: str | None = None
    steps: tuple[StepFolder, ...] = ()
    off: tuple[StepFolder, ...] = ()
    others: tuple[StepFolder, ...] = ()

    @property
    def newest(self) -> StepFolder | None:
        return self.steps[-1] if self.steps else None

    def at(self, step: int) -> StepFolder | None:
        return next((folder for folder in self.steps if folder.step == step), None)


def manifest(folder: StepFolder) -> Manifest:
    assert folder.manifest is not None, "a committed step has a manifest"
    return folder.manifest


def line_of(roster: Roster, run: str | None = None) -> Line:
    """The line of `run`; by default of the run that wrote the newest step, highest (incarnation, step)."""
    if not roster.steps:
        return Line(run)
    if run is None:
        run = manifest(max(roster.steps, key=lambda folder: manifest(folder).order)).run
    mine = [folder for folder in roster.steps if manifest(folder).run == run]
    others = tuple(folder for folder in roster.steps if manifest(folder).run != run)
    on, off = _split(mine)
    return Line(run, tuple(on), tuple(off), others)


def _split(mine: Sequence[StepFolder]) -> tuple[list[StepFolder], list[StepFolder]]:
    starts: dict[int, int] = {}
    for folder in mine:
        record = manifest(folder)
        # An incarnation that resumed from nothing starts before step 0: nothing older is on its line.
        start = -1 if record.parent is None else record.parent.step
        starts[record.incarnation] = max(start, starts.get(record.incarnation, start))
    on: list[StepFolder] = []
    off: list[StepFolder] = []
    for folder in sorted(mine, key=lambda folder: manifest(folder).order):
        incarnation, step = manifest(folder).order
        ceiling = min((start for other, start in starts.items() if other > incarnation), default=step)
        (on if step <= ceiling else off).append(folder)
    # Two folders of one step can only be copies that were resumed apart: the newer incarnation is the line's.
    by_step = {folder.step: folder for folder in on}
    off += [folder for folder in on if by_step[folder.step] is not folder]
    return sorted(by_step.values(), key=lambda folder: folder.step), off


def check_newest(roster: Roster, newest: StepFolder | None) -> None:
    """For all who are asked for the newest or the best step, `newest` being the newest that this version can read.

    Raises UnsupportedFormatError when a step folder numbered above it is of a later format version: taking an older
    step in its place would lose work without a word.
    """
    for folder in roster.later:
        if newest is None or folder.step > newest.step:
            assert folder.unsupported is not None
            raise folder.unsupported


def next_incarnation(roster: Roster) -> int:
    """One more than the highest in the root, whatever run it belongs to."""
    return 1 + max((manifest(folder).incarnation for folder in roster.steps), default=0)


def best_of(steps: Sequence[StepFolder], monitor: str, mode: str) -> list[StepFolder]:
    """`steps` that have the metric, best first; ties keep the earlier step first; NaN is never best."""
    scored = [folder for folder in steps if _score(folder, monitor) is not None]
    sign = 1.0 if mode == "min" else -1.0
    return sorted(scored, key=lambda folder: (sign * (_score(folder, monitor) or 0.0), folder.step))


def _score(folder: StepFolder, monitor: str) -> float | None:
    value = manifest(folder).metrics.get(monitor)
    return None if value is None or value != value else value
