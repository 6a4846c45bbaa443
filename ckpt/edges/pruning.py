"""Old steps removed by hand, by the same rule that a run's retention follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt.commit import retention
from ckpt.commit.line import line_of, manifest
from ckpt.commit.lock import RootLock
from ckpt.commit.retention import Choice, Policy
from ckpt.commit.roster import Roster, Scanner
from ckpt.edges.opening import nothing_committed, path_of, place_of
from ckpt.errors import NotCommittedError
from ckpt.storage.base import Storage

_PATIENCE = 0.25  # seconds to wait for the lock: a live run holds it for hours


@dataclass(frozen=True)
class PrunedStep:
    """reasons: why it stays; () for one that goes."""

    step: int
    path: str
    bytes: int
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        found = dict(vars(self))
        found["reasons"] = list(self.reasons)
        return found


@dataclass(frozen=True)
class PruneReport:
    """remove: what was removed, or with dry_run would be; failed: what was to go and is still there (see the log);
    debris: remains of unfinished saves that were swept, too."""

    root: str
    keep: tuple[PrunedStep, ...]
    remove: tuple[PrunedStep, ...]
    failed: tuple[PrunedStep, ...]
    debris: tuple[str, ...]
    dry_run: bool

    def to_dict(self) -> dict[str, Any]:
        """What `ckpt prune --json` prints."""
        return {
            "schema": 1,
            "root": self.root,
            "keep": [step.to_dict() for step in self.keep],
            "remove": [step.to_dict() for step in self.remove],
            "failed": [step.to_dict() for step in self.failed],
            "debris": list(self.debris),
            "dry_run": self.dry_run,
        }


def prune(root: Any, keep_last: int, *, dry_run: bool = False) -> PruneReport:
    """Removes all steps of the run but the newest `keep_last`, the pinned ones and those that the newest step's policy
    keeps (`keep_best`, `keep_every` of the manager that saved it), and what unfinished saves left.

    Takes the root's lock: LockedError when a run is writing it. With dry_run nothing is changed and no lock taken.
    Raises NotCommittedError when nothing is committed there, ValueError for keep_last below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be 1 or more, not {keep_last}")
    place = place_of(root, writes=True)
    if place.folder is not None:
        where = path_of(place.storage, place.folder)
        raise NotCommittedError(f"{where} is one step's folder, not a run's root.", path=where)
    storage = place.storage
    if dry_run:
        roster = _scanned(storage)
        return _report(storage, roster, _chosen(roster, keep_last), None, roster.debris)
    lock = RootLock(storage)
    _scanned(storage)  # a folder that holds no run of ours gets no lock file
    lock.acquire(_PATIENCE)
    try:
        roster = _scanned(storage)
        choice = _chosen(roster, keep_last)
        gone = retention.retire(storage, choice, Scanner(storage, tables=False).pins)
        return _report(storage, roster, choice, gone, tuple(retention.sweep(storage, roster.debris)))
    finally:
        lock.release()


def _scanned(storage: Storage) -> Roster:
    roster = Scanner(storage, tables=False).scan()
    if not roster.steps:
        raise nothing_committed(storage, roster)
    return roster


def _chosen(roster: Roster, keep_last: int) -> Choice:
    line = line_of(roster)
    newest = line.newest
    policy = Policy.of(manifest(newest).policy if newest is not None else {}, keep_last)
    protected = {newest.key} if newest is not None else set()
    return retention.choose(line, policy, roster.pins, protected=protected)


def _report(
    storage: Storage, roster: Roster, choice: Choice, gone: list[str] | None, debris: tuple[str, ...]
) -> PruneReport:
    def told(name: str, reasons: tuple[str, ...] = ()) -> PrunedStep:
        folder = next(folder for folder in roster.steps if folder.name == name)
        size = folder.manifest.bytes if folder.manifest is not None else 0
        return PrunedStep(folder.step, path_of(storage, name), size, reasons)

    going = [folder.name for folder in choice.remove]
    removed = going if gone is None else [name for name in going if name in gone]
    keep = [told(folder.name, choice.keep[folder.name]) for folder in roster.steps if folder.name in choice.keep]
    return PruneReport(
        root=storage.url,
        keep=tuple(sorted(keep, key=lambda step: step.step)),
        remove=tuple(told(name) for name in removed),
        failed=tuple(told(name) for name in going if name not in removed),
        debris=debris,
        dry_run=gone is None,
    )
