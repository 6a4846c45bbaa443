"""Which steps stay and why (pure), and how a step ends: it stops being committed first, then its data goes (I4)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt import points
from ckpt.commit.line import Line, best_of, manifest
from ckpt.commit.roster import Pin, StepFolder
from ckpt.errors import CheckpointError, StorageUnavailableError
from ckpt.format import names
from ckpt.format.values import Json
from ckpt.storage.base import Storage

log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class Policy:
    """keep_last: number of newest steps, None for all; keep_every: steps divisible by it stay; keep_best: number of
    best ones by `monitor`."""

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: int = 0
    monitor: str | None = None
    mode: str = "min"

    def recorded(self) -> dict[str, Json]:
        """What a manifest tells of it, to whoever lists or prunes without the script; keep_last is theirs to say."""
        found: dict[str, Json] = {}
        if self.monitor is not None:
            found.update(monitor=self.monitor, mode=self.mode)
        # No step is above MAX_STEP: beyond it neither number means anything else.
        if self.keep_best:
            found["keep_best"] = min(self.keep_best, names.MAX_STEP)
        if self.keep_every is not None:
            found["keep_every"] = min(self.keep_every, names.MAX_STEP)
        return found

    @staticmethod
    def of(record: Mapping[str, Json], keep_last: int | None) -> Policy:
        """The policy that `recorded` gave, with another `keep_last`."""
        return Policy(
            keep_last,
            record.get("keep_every"),
            record.get("keep_best", 0),
            record.get("monitor"),
            record.get("mode", "min"),
        )


@dataclass(frozen=True)
class Choice:
    """keep: step folder's name -> reasons; remove: what may go, oldest first."""

    keep: Mapping[str, tuple[str, ...]]
    remove: tuple[StepFolder, ...]


def choose(
    line: Line,
    policy: Policy,
    pins: Mapping[int, Pin],
    *,
    damaged: Collection[str] = (),
    unknown: Collection[str] = (),
    protected: Collection[str] = (),
) -> Choice:
    """The union of all reasons to keep; none counts against another (I5). A folder that bears another name than a save
    gives it was named by a person, and stays.

    All three are keys of steps. damaged, unknown: those known to be damaged, or whose commit could not be confirmed:
    they count for nothing but stay themselves until `keep_last` newer ones exist. protected: those that stay whatever
    the policy says (just committed, resumed from). Steps of other runs are in no list: retention never touches them. A
    step whose files another one takes from it stays as long as that
    one is there, whether that one is to go or not: were it removed first, a kill would leave the other one damaged.
    """
    doubted = {
        **dict.fromkeys(unknown, "not known to be durable"),
        **dict.fromkeys(damaged, "damaged, kept for a look"),
    }
    good = [folder for folder in line.steps if folder.key not in doubted]
    reasons: dict[str, list[str]] = {}

    def keep(folder: StepFolder, why: str) -> None:
        reasons.setdefault(folder.name, []).append(why)

    count = len(good) if policy.keep_last is None else policy.keep_last
    for folder in good[-count:] if count else ():
        keep(folder, "last")
    if policy.keep_best and policy.monitor is not None:
        for folder in best_of(good, policy.monitor, policy.mode)[: policy.keep_best]:
            keep(folder, "best")
    floor = good[-count].step if count and len(good) >= count else None
    for folder in line.steps:
        if policy.keep_every and folder.step % policy.keep_every == 0 and folder.key not in doubted:
            keep(folder, "every")
        if folder.step in pins:
            keep(folder, "pinned")
        if folder.key in protected:
            keep(folder, "in use")
        if _by_hand(folder):
            keep(folder, "renamed")
        if folder.key in doubted and (policy.keep_last is None or floor is None or folder.step >= floor):
            keep(folder, doubted[folder.key])
    remove = [folder for folder in line.steps if folder.name not in reasons]
    for folder in line.off:
        # Abandoned steps are the way back from a mistaken rollback until the new line stands on its own feet. Counted
        # over all newer incarnations: a run that is preempted often never gives one of them keep_last commits.
        newer = [f for f in good if manifest(f).incarnation > manifest(folder).incarnation]
        if folder.step in pins:
            keep(folder, "pinned")
        elif _by_hand(folder):
            keep(folder, "renamed")
        elif policy.keep_last is None or len(newer) < policy.keep_last:
            keep(folder, "abandoned, until the new line has enough")
        else:
            remove.append(folder)
    lent = sources(line)
    for folder in remove:
        if folder.name in lent:
            keep(folder, f"holds files of step {lent[folder.name]}")
    remove = [folder for folder in remove if folder.name not in lent]
    return Choice({name: tuple(why) for name, why in reasons.items()}, tuple(remove))


def sources(line: Line, damaged: Collection[StepFolder] = ()) -> dict[str, int]:
    """Name of each folder that another step's files lie in -> the highest of those steps."""
    found: dict[str, int] = {}
    for folder in (*line.steps, *line.off, *line.others, *damaged):
        for entry in folder.manifest.files if folder.manifest is not None else ():
            if entry.source is not None and entry.source[0] != folder.name:
                found[entry.source[0]] = max(folder.step, found.get(entry.source[0], 0))
    return found


def _by_hand(folder: StepFolder) -> bool:
    """Somebody renamed the step, or copied it and the original is gone: a folder with a name of its own is kept."""
    return folder.name != names.step_name(folder.step)


def outdated(damaged: Sequence[StepFolder], line: Line, policy: Policy, pins: Mapping[int, Pin]) -> list[StepFolder]:
    """Damaged, uncommitted steps of the line's run whose manifest is whole, once `keep_last` newer good ones exist and
    no other step's files lie in them."""
    if policy.keep_last is None:
        return []
    lent = sources(line, damaged)
    return [
        folder
        for folder in damaged
        if folder.manifest is not None
        and folder.manifest.run == line.run
        and folder.step not in pins
        and not _by_hand(folder)
        and folder.name not in lent
        and sum(manifest(good).order > folder.manifest.order for good in line.steps) >= policy.keep_last
    ]


def remove_step(storage: Storage, folder: str, *, spare: Collection[str] = ()) -> None:
    """Ends one step. After the first change a scan no longer sees it; a kill in between leaves debris at most.

    spare: names in it that stay, where folders are not renamed: those of an attempt that is to take the step's place.
    Raises CheckpointError; the step may then be gone as far as a scan can tell, with debris left.
    """
    points.reach("remove.unpublish.before")
    if storage.abilities.renames_folders:
        trash = f"{names.TRASH_PREFIX}{folder}-{os.urandom(8).hex()}"
        try:
            storage.publish(folder, trash)
        except StorageUnavailableError:
            if storage.stat(folder) is None:
                return  # gone already: somebody else removed it
            raise
        # Without it a power cut could bring back a step whose files are gone.
        storage.sync_folder()
    else:
        trash = folder
        storage.remove_file(f"{folder}/{names.MANIFEST}")
    points.reach("remove.unpublish.after")
    if spare:
        for entry in storage.list(trash) or ():
            if entry.name not in spare:
                storage.remove_file(f"{trash}/{entry.name}")
    else:
        storage.remove_folder(trash, on_half=lambda: points.reach("remove.half"))
    points.reach("remove.done")


def retire(storage: Storage, choice: Choice, reread: Callable[[], Mapping[int, Pin]]) -> list[str]:
    """Removes what `choice` lets go; a failure is a warning, tried again after the next save. Returns the names gone.

    reread: the pins as they are now; they can be set beside a live run, so they are read again before each removal.
    """
    gone: list[str] = []
    if not choice.remove:
        return gone
    points.reach("retention.begin")
    for folder in choice.remove:
        if folder.step in reread():
            continue
        try:
            remove_step(storage, folder.name)
            gone.append(folder.name)
        except CheckpointError as error:
            log.warning("could not remove %s, will try again after the next save: %s", folder.name, error)
    return gone


def sweep(storage: Storage, debris: Collection[str], *, spare: Collection[str] = ()) -> list[str]:
    """Removes remains of dead attempts and removals, of any shape. Only for the owner of the root's lock: another
    writer's attempt looks the same. A failure is a warning. Returns the names gone."""
    gone: list[str] = []
    for name in debris:
        if name in spare:
            continue
        try:
            storage.remove_folder(name)
            gone.append(name)
        except CheckpointError as error:
            log.warning("could not remove %s, will try again after the next save: %s", name, error)
    return gone
