"""The line of a run: which committed steps lie on the history that goes on, and which were abandoned.

Every resume starts a new incarnation, a number that only grows, and each manifest names its own and the save it came
from. The line is what the newest commit descends from. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.commit.roster import Roster, StepFolder
from ckpt.format.manifest import Manifest, Parent


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
    if not mine:
        return [], []
    on = descent(mine, max(mine, key=_rank))
    there = {id(folder) for folder in on}
    return on, sorted((folder for folder in mine if id(folder) not in there), key=_rank)


def descent(mine: Sequence[StepFolder], last: StepFolder) -> list[StepFolder]:
    """The steps that `last` descends from and `last` itself, by step number; `mine` are the committed steps of its run.

    From each incarnation those up to where the next one began, following parents: what an incarnation saved after that,
    and incarnations that none of these resumed from, were abandoned. Where nothing of a parent's incarnation is left,
    the newest older one that has such a step stands in for it.
    """
    members: dict[int, list[StepFolder]] = {}
    parents: dict[int, Parent | None] = {}
    for folder in mine:
        record = manifest(folder)
        members.setdefault(record.incarnation, []).append(folder)
        parents[record.incarnation] = max(record.parent, parents.get(record.incarnation), key=_start)
    incarnation: int | None
    incarnation, ceiling = manifest(last).order
    by_step: dict[int, StepFolder] = {}
    while incarnation is not None:
        for folder in sorted(members[incarnation], key=_rank, reverse=True):
            # Two folders of one step can only be copies that were resumed apart: the newer incarnation is the line's.
            if folder.step <= ceiling:
                by_step.setdefault(folder.step, folder)
        parent = parents[incarnation]
        if parent is None:
            break  # it resumed from nothing: nothing older is its past
        ceiling = min(ceiling, parent.step)
        incarnation = _past(members, incarnation, parent.incarnation, ceiling)
    return [by_step[step] for step in sorted(by_step)]


def _past(members: Mapping[int, Sequence[StepFolder]], child: int, parent: int, ceiling: int) -> int | None:
    """Incarnation `parent` if any of it is left, else the newest one below with a step up to `ceiling`."""
    if parent < child and parent in members:
        return parent
    below = min(parent, child)
    older = (i for i, held in members.items() if i < below and any(folder.step <= ceiling for folder in held))
    return max(older, default=None)


def _start(parent: Parent | None) -> tuple[int, int]:
    return (-1, -1) if parent is None else (parent.step, parent.incarnation)


def _rank(folder: StepFolder) -> tuple[int, int, str]:
    return (*manifest(folder).order, folder.name)


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
