"""From the PATH a person gives to one committed step: a run's root, or a step's folder under whatever name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from ckpt.commit.line import Line, check_newest, line_of
from ckpt.commit.roster import LOOKS, Pin, Roster, Scanner, StepFolder, stands
from ckpt.commit.stored import Stored, open_stored
from ckpt.errors import CheckpointError, CorruptCheckpointError, NotCommittedError, StorageUnavailableError
from ckpt.format import names
from ckpt.storage.base import Storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.open import open_storage

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where PATH leads. folder: the step's folder below the root that `storage` is, "" when the step has no root of
    its own around it; None when PATH is a root."""

    storage: Storage
    folder: str | None


@dataclass(frozen=True)
class Found:
    """One committed step. `folder.manifest` holds no tensor table when it was found for a listing. roster: of the root,
    None when PATH was the step's own folder."""

    storage: Storage
    folder: StepFolder
    roster: Roster | None
    pins: Mapping[int, Pin]

    @property
    def path(self) -> str:
        return path_of(self.storage, self.folder.name)

    @cached_property
    def line(self) -> Line | None:
        return None if self.roster is None else line_of(self.roster)

    def stored(self) -> Stored:
        """The step with its indexes read and checked. Raises CorruptCheckpointError."""
        full = Scanner(self.storage).look(self.folder.name)
        if full is None or full.manifest is None:
            raise _damaged(self.storage, full or replace(self.folder, problem="it is gone"))
        return open_stored(self.storage, full)


def rank_view(stored: Stored, rank: int = 0) -> Stored:
    """The step as one rank sees it: of a tensor that each rank keeps for itself, only that rank's piece."""
    table, groups = stored.manifest.tensors, stored.manifest.groups
    own = {number for number, group in enumerate(table.groups) if groups[group].kind == "per-rank"}
    if not own:
        return stored
    view = replace(stored)
    mine = {
        number: [source for source in found if number not in own or source.rank == rank] or found
        for number, found in stored.sources.items()
    }
    vars(view)["sources"] = mine  # in the place of the cached property
    return view


def path_of(storage: Storage, folder: str) -> str:
    return f"{storage.url}/{folder}" if folder else storage.url


def place_of(path: Any, *, writes: bool = False) -> Place:
    """Where `path` (str, PathLike or an object with .fs and .path) leads. writes: the caller may change what is there.

    Raises NotCommittedError when nothing is there or it is a file, StorageUnavailableError when one could not look,
    ValueError and TypeError for what is no path.
    """
    storage = open_storage(path, writes=writes)
    if isinstance(storage, LocalStorage):
        # A step reached through a link (runs/latest -> step-...) is known by the folder it is.
        storage = LocalStorage(os.path.realpath(storage.root))
    parent, name = parent_of(storage)
    if name.startswith((names.TMP_PREFIX, names.TRASH_PREFIX)):
        raise NotCommittedError(
            f"{storage.url} is what a save or a removal left behind, not a checkpoint.",
            path=storage.url,
            hint="Give the run's root, or one of its step folders.",
        )
    try:
        listed = storage.list()
    except StorageUnavailableError as error:
        if error.errno != errno.ENOTDIR:
            raise
        raise NotCommittedError(f"{storage.url} is a file, not a checkpoint.", path=storage.url) from error
    if listed is None:
        raise NotCommittedError(f"There is no {storage.url}.", path=storage.url)
    holds = {entry.name for entry in listed}
    steps_inside = any(names.parse_step_name(entry) is not None for entry in holds)
    if names.MANIFEST in holds or (names.parse_step_name(name) is not None and not steps_inside):
        return Place(storage, "") if parent is None else Place(parent, name)
    return Place(storage, None)


def parent_of(storage: Storage) -> tuple[Storage | None, str]:
    """The storage one folder up, None where there is none, and the name of the folder in it."""
    if isinstance(storage, LocalStorage):
        above, name = os.path.split(storage.root)
        return (LocalStorage(above), name) if name else (None, "")
    from ckpt.storage.objects import ObjectStorage

    assert isinstance(storage, ObjectStorage)
    above, _, name = storage.root.rpartition("/")
    url = storage.url.rpartition("/")[0]
    return (ObjectStorage(storage.fs, above, url), name) if above.strip("/") else (None, name)


def locate(path: Any, *, step: int | None = None) -> Found:
    """The committed step that `path` means: its own for a step's folder, else `step` of the root, by default the
    newest of the line. Its manifest is read without the tensor table.

    Raises NotCommittedError when there is none, CorruptCheckpointError when the step asked for is damaged,
    UnsupportedFormatError when it, or one above the newest, is of a later version, StorageUnavailableError.
    """
    place = place_of(path)
    if place.folder is not None:
        return _folder(place.storage, place.folder, step)
    roster = Scanner(place.storage, tables=False).scan()
    line = line_of(roster)
    if step is None:
        check_newest(roster, line.newest)
        if line.newest is None:
            raise nothing_committed(place.storage, roster)
        return Found(place.storage, line.newest, roster, roster.pins)
    return Found(place.storage, _numbered(place.storage, roster, line, step), roster, roster.pins)


def use(path: Any, step: int | None, using: Callable[[Found], T]) -> T:
    """`using` of the step that `path` means, see `locate`; what it did so far has to bear being done again.

    Where a live run's retention removed the step meanwhile, it is located anew: for a root that gives a newer one, for
    a step's folder or a number NotCommittedError.
    """
    for _ in range(LOOKS - 1):
        found = locate(path, step=step)
        try:
            return using(found)
        except CheckpointError:
            if stands(found.storage, found.folder):
                raise
    return using(locate(path, step=step))


def _folder(storage: Storage, name: str, step: int | None) -> Found:
    scanner = Scanner(storage, tables=False)
    folder = scanner.look(name)
    if folder is None or not folder.committed:
        if not stands(storage, folder or StepFolder(name)):
            raise NotCommittedError(f"There is no {path_of(storage, name)}.", path=path_of(storage, name))
        raise _damaged(storage, folder or StepFolder(name, None, "its manifest is missing", "missing-manifest"))
    if step is not None and folder.step != step:
        raise NotCommittedError(
            f"{path_of(storage, name)} is step {folder.step}, not {step}.", step=step, path=path_of(storage, name)
        )
    return Found(storage, folder, None, scanner.pins() if name else {})


def _numbered(storage: Storage, roster: Roster, line: Line, step: int) -> StepFolder:
    """Step `step` of the line, or the newest abandoned one of that number."""
    found = line.at(step) or next((folder for folder in reversed(line.off) if folder.step == step), None)
    if found is not None:
        return found
    damaged = next((folder for folder in roster.damaged if folder.step == step), None)
    if damaged is not None:
        raise _damaged(storage, damaged)
    there = ", ".join(str(folder.step) for folder in line.steps[-8:])
    newest = f"newest: {there}" if there else "nothing is"
    raise NotCommittedError(
        f"Step {step} is not committed in {storage.url} ({newest}).",
        step=step,
        path=storage.url,
    )


def nothing_committed(storage: Storage, roster: Roster) -> NotCommittedError:
    there = []
    if roster.broken:
        there.append(f"{len(roster.broken)} damaged")
    if roster.debris:
        there.append(f"{len(roster.debris)} left by saves that never finished")
    besides = f" ({', '.join(there)})" if there else ""
    return NotCommittedError(
        f"Nothing is committed in {storage.url}{besides}.",
        path=storage.url,
        hint="Look at what is damaged with `ckpt verify`." if roster.broken else None,
    )


def _damaged(storage: Storage, folder: StepFolder) -> Exception:
    if folder.unsupported is not None:
        return folder.unsupported
    where = path_of(storage, folder.name)
    return CorruptCheckpointError(
        f"{where} is damaged: {(folder.problem or 'it cannot be read').rstrip('.')}.",
        kind=folder.kind or "damaged",
        step=folder.step,
        path=where,
        stage="read",
        hint="`ckpt verify` names all that is wrong.",
    )
