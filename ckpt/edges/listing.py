"""What a root holds, step by step, from the heads of its manifests alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckpt.commit.line import best_of, line_of, manifest
from ckpt.commit.retention import Policy
from ckpt.commit.roster import Pin, Scanner, StepFolder
from ckpt.edges.opening import nothing_committed, path_of, place_of
from ckpt.errors import NotCommittedError
from ckpt.format.values import encode_float
from ckpt.storage.base import Storage


@dataclass(frozen=True)
class ListedStep:
    """state: "line", "abandoned" (off the line after a rollback), "other run", "newer format" (a later version of ckpt
    wrote it) or "damaged" (`problem` says how; what cannot be read is None). time: unix seconds. best: best by the
    metric that was asked for, or that the run monitors."""

    step: int
    path: str
    run: str | None = None
    incarnation: int | None = None
    time: float | None = None
    bytes: int | None = None
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    pinned: bool = False
    note: str = ""
    newest: bool = False
    best: bool = False
    state: str = "line"
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "metrics": {key: encode_float(value) for key, value in self.metrics.items()}}


@dataclass(frozen=True)
class Listing:
    """steps: those of the line, oldest first; with the rest of what was asked for behind them. abandoned, other_runs,
    damaged: how many of each the root holds, listed or not. debris, foreign: names."""

    root: str
    steps: tuple[ListedStep, ...]
    debris: tuple[str, ...]
    foreign: tuple[str, ...]
    abandoned: int = 0
    other_runs: int = 0
    damaged: int = 0

    def to_dict(self) -> dict[str, Any]:
        """What `ckpt ls --json` prints."""
        return {
            "schema": 1,
            "root": self.root,
            "steps": [step.to_dict() for step in self.steps],
            "debris": list(self.debris),
            "foreign": list(self.foreign),
            "abandoned": self.abandoned,
            "other_runs": self.other_runs,
            "damaged": self.damaged,
        }


def listing(root: Any, *, everything: bool = False, monitor: str | None = None, mode: str = "min") -> Listing:
    """The steps under `root`: those of the newest run's line and those of a newer format, with `everything` also
    abandoned, damaged and other runs' ones. Below one of a newer format no step is marked as the newest or the best.
    monitor, mode: which metric, and "min" or "max" of it, makes a step the best; without monitor those of the run, as
    its newest step tells them.

    Reads the manifests only. Raises NotCommittedError when `root` is a step's folder or holds no committed step,
    StorageUnavailableError when one could not look.
    """
    place = place_of(root)
    if place.folder is not None:
        where = path_of(place.storage, place.folder)
        raise NotCommittedError(
            f"{where} is one step's folder, not a run's root.", path=where, hint="Look inside it with `ckpt inspect`."
        )
    storage = place.storage
    roster = Scanner(storage, tables=False).scan()
    line = line_of(roster)
    if not roster.steps and not roster.later and not (everything and roster.damaged):
        raise nothing_committed(storage, roster)
    newest = line.newest
    if monitor is None and newest is not None:
        policy = Policy.of(manifest(newest).policy, None)
        monitor, mode = policy.monitor, policy.mode
    ranked = best_of(line.steps, monitor, mode) if monitor is not None else []
    best = ranked[0] if ranked else None
    if newest is not None and any(folder.step > newest.step for folder in roster.later):
        newest = best = None
    steps = [_listed(storage, f, roster.pins, "line", newest=f is newest, best=f is best) for f in line.steps]
    steps += [_listed(storage, folder, roster.pins, "newer format") for folder in roster.later]
    if everything:
        steps += [_listed(storage, folder, roster.pins, "abandoned") for folder in line.off]
        steps += [_listed(storage, folder, {}, "other run") for folder in line.others]
        steps += [_listed(storage, folder, roster.pins, "damaged") for folder in roster.broken]
    return Listing(
        root=storage.url,
        steps=tuple(steps),
        debris=roster.debris,
        foreign=roster.foreign,
        abandoned=len(line.off),
        other_runs=len(line.others),
        damaged=len(roster.broken),
    )


def _listed(
    storage: Storage,
    folder: StepFolder,
    pins: Mapping[int, Pin],
    state: str,
    *,
    newest: bool = False,
    best: bool = False,
) -> ListedStep:
    path = path_of(storage, folder.name)
    pin = pins.get(folder.step)
    pinned, note = pin is not None, pin.note if pin is not None else ""
    if folder.manifest is None:
        return ListedStep(folder.step, path, pinned=pinned, note=note, state=state, problem=folder.problem)
    record = manifest(folder)
    return ListedStep(
        step=record.step,
        path=path,
        run=record.run,
        incarnation=record.incarnation,
        time=record.time,
        bytes=record.bytes,
        world_size=record.world_size,
        metrics=MappingProxyType(dict(record.metrics)),
        pinned=pinned,
        note=note,
        newest=newest,
        best=best,
        state=state,
        problem=folder.problem,
    )
