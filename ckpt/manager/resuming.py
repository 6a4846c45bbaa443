"""Which step a resume takes, and the way of its bytes back into the live objects."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt import points
from ckpt.capture.base import RestorePlan, SavedState, TensorInfo
from ckpt.capture.state import Registry, plan_restore
from ckpt.commit.landing import land
from ckpt.commit.line import Line, best_of, check_newest, line_of
from ckpt.commit.roster import Roster, Scanner, StepFolder, stands
from ckpt.commit.stored import Stored, check_all, check_headers, open_stored
from ckpt.coordination.ranks import this_process
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StateMismatchError,
    StorageUnavailableError,
)
from ckpt.manager.options import Options, step_number
from ckpt.storage.base import Storage

log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class Candidates:
    """The steps that a request means. steps: those to try, best first; skipped: newer ones known to be damaged already;
    fallback: whether damage leads to the next one."""

    steps: tuple[StepFolder, ...]
    skipped: tuple[tuple[int, str], ...]
    line: Line
    fallback: bool


@dataclass(frozen=True)
class Resumed:
    """A checkpoint whose bytes are in the live objects, values not yet applied."""

    stored: Stored
    folder: StepFolder
    plan: RestorePlan
    skipped: tuple[tuple[int, str], ...]
    damaged: frozenset[str]  # keys of the steps that were tried and found damaged


def check_request(step: object, options: Options) -> str | int:
    """ValueError or TypeError for a `step` that `resume` does not take."""
    if isinstance(step, str):
        if step not in ("auto", "latest", "best"):
            raise ValueError(f'step must be "auto", "latest", "best" or a number, not {step!r}')
        if step == "best" and options.monitor is None:
            raise ValueError('resume("best") needs monitor, the metric that tells which step is best')
        return step
    return step_number(step)


def choose(roster: Roster, request: str | int, options: Options, url: str) -> Candidates | None:
    """The steps to try; None when "auto" finds nothing at all and the run starts fresh.

    Raises NotCommittedError, CorruptCheckpointError (the step asked for, or every step there is, is damaged) and
    UnsupportedFormatError (the newest is of an unknown format: going back silently would lose work).
    """
    line = line_of(roster)
    if isinstance(request, int):
        return Candidates((_exactly(roster, line, request, url),), (), line, False)
    newest = line.newest
    check_newest(roster, newest)
    if request == "best":
        assert options.monitor is not None
        ranked = best_of(line.steps, options.monitor, options.mode)
        if not ranked:
            raise NotCommittedError(f"No committed step of {url} has the metric {options.monitor!r}.", path=url)
        return Candidates((ranked[0],), (), line, False)
    newer = [folder for folder in roster.broken if newest is None or _newer(folder, newest)]
    skipped = tuple((folder.step, folder.problem or "damaged") for folder in sorted(newer, key=lambda f: -f.step))
    if newest is None:
        if skipped:
            raise _all_damaged(url, skipped)
        if request == "latest":
            raise NotCommittedError(f"Nothing is committed in {url}.", path=url, hint='resume("auto") starts fresh.')
        return None
    return Candidates(tuple(reversed(line.steps)), skipped, line, True)


def _newer(damaged: StepFolder, newest: StepFolder) -> bool:
    """Whether a damaged step would have been taken before `newest`, were it sound: of whatever run, or the step of an
    older run would be taken without a word. Without a manifest its name has to tell."""
    assert newest.manifest is not None
    if damaged.manifest is None:
        return damaged.step > newest.step
    return damaged.manifest.order > newest.manifest.order


def _exactly(roster: Roster, line: Line, step: int, url: str) -> StepFolder:
    found = line.at(step) or next((folder for folder in reversed(line.off) if folder.step == step), None)
    if found is not None:
        return found
    for folder in roster.damaged:
        if folder.step == step:
            if folder.unsupported is not None:
                raise folder.unsupported
            raise CorruptCheckpointError(
                f"Step {step} in {url} is damaged: {folder.problem}.",
                kind=folder.kind,
                step=step,
                path=f"{url}/{folder.name}",
                hint='resume("auto") takes the newest sound step.',
            )
    there = ", ".join(str(folder.step) for folder in line.steps[-8:]) or "none"
    raise NotCommittedError(f"Step {step} is not committed in {url} (newest: {there}).", step=step, path=url)


def _all_damaged(url: str, attempts: Sequence[tuple[int, str]]) -> CorruptCheckpointError:
    lines = "\n  ".join(f"step {step}: {reason}" for step, reason in attempts)
    return CorruptCheckpointError(
        f"{url} holds checkpoints, but none is sound:\n  {lines}\n",
        attempts=attempts,
        path=url,
        stage="resume",
        hint="Look with `ckpt verify`; to start over on purpose, choose an empty root.",
    )


def bring_back(
    storage: Storage,
    choice: Candidates,
    registry: Registry,
    options: Options,
    override: Mapping[str, tuple[str, ...]],
    touched: list[bool],
) -> Resumed | None:
    """Loads the first sound candidate into the registered objects' tensors; None when one was removed while it was
    read: another run writes there, has a newer step, and the choice is to be made anew.

    Only damage leads to the next one: CorruptCheckpointError, and files that cannot be read, tried twice, while those
    of an older step can. Everything else raises at once. `touched[0]` becomes True as soon as live bytes may have
    changed.
    """
    attempts = list(choice.skipped)
    damaged: set[str] = set()
    unread: StorageUnavailableError | None = None
    for folder in choice.steps:
        try:
            try:
                stored, plan = _load(storage, folder, registry, options, override, touched)
            except StorageUnavailableError as error:
                log.info("step %d in %s could not be read, trying once more: %s", folder.step, storage.url, error)
                stored, plan = _load(storage, folder, registry, options, override, touched)
        except (CorruptCheckpointError, StorageUnavailableError) as error:
            if not stands(storage, folder):
                return None
            if not choice.fallback:
                raise
            if isinstance(error, StorageUnavailableError):
                unread = unread or error
            attempts.append((folder.step, str(error)))
            damaged.add(folder.key)
            continue
        _tell_skipped(storage.url, attempts)
        return Resumed(stored, folder, plan, tuple(attempts), frozenset(damaged))
    if unread is not None:
        # Nothing reads well: storage is away, and that is not the same as damage.
        raise unread
    _tell_skipped(storage.url, attempts)
    raise _all_damaged(storage.url, attempts)


def _tell_skipped(url: str, attempts: Sequence[tuple[int, str]]) -> None:
    for step, reason in attempts:
        log.warning("step %d in %s is damaged and passed over: %s", step, url, reason)


def _load(
    storage: Storage,
    folder: StepFolder,
    registry: Registry,
    options: Options,
    override: Mapping[str, tuple[str, ...]],
    touched: list[bool],
) -> tuple[Stored, RestorePlan]:
    """Structure first, then the bytes (I8)."""
    stored = open_stored(storage, folder)
    check_headers(stored)
    plan = plan_restore(registry, saved_state(stored), options.strict, override)
    plan.check()
    _check_world(stored, options)
    if options.verify_first:
        check_all(stored)
    points.reach("resume.chosen")
    touched[0] = True
    plan.prepare()
    land(stored, plan.targets)
    points.reach("resume.tensors")
    return stored, plan


def _check_world(stored: Stored, options: Options) -> None:
    then, now = stored.manifest.world_size, this_process().world_size
    if then != now and options.on_world_change == "refuse":
        raise StateMismatchError(
            f"Step {stored.manifest.step} was saved by {then} ranks and this run has {now}.",
            step=stored.manifest.step,
            stage="resume",
            hint='Start with as many ranks, or pass on_world_change="elastic".',
        )


def saved_state(stored: Stored, rank: int = 0) -> SavedState:
    """What the checkpoint holds for `rank`, as capture takes it."""
    record = stored.manifest
    table = record.tensors
    orders = {piece.tensor: piece.dim_order for index in stored.indexes for piece in index.pieces}
    tensors = {
        name: TensorInfo(dtype, shape, orders.get(number))
        for number, (name, dtype, shape) in enumerate(zip(table.names, table.dtypes, table.shapes, strict=True))
    }
    values = stored.indexes[rank].values
    return SavedState(record.step, record.parts, values, tensors, table.aliases, record.environment)


def find(
    storage: Storage, scanner: Scanner, request: str | int, options: Options, *, alone: bool = False
) -> Candidates | None:
    """See `choose`. alone: the place was named by the caller, so it may be one step's folder, and holds something."""
    try:
        roster = scanner.scan()
        if alone and not (roster.steps or roster.damaged):
            step = scanner.look("", False)
            if step is None:
                raise NotCommittedError(f"{storage.url} is no checkpoint and holds none.", path=storage.url)
            roster = Roster(True, *(((step,), ()) if step.committed else ((), (step,))))
        return choose(roster, request, options, storage.url)
    except CheckpointError as error:
        error.stage = error.stage or "resume"
        raise
