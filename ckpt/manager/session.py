"""One run's hold on a root: its place on the line, and the way of one save from a staged image to a committed step.

Nothing here refers to the manager, so that a manager nobody holds any more can be collected while a save goes on.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckpt import points
from ckpt.capture.staging import Staged
from ckpt.commit import retention
from ckpt.commit.attempt import Attempt, attempt_for
from ckpt.commit.line import Line, line_of, manifest, next_incarnation
from ckpt.commit.lock import RootLock
from ckpt.commit.roster import Roster, Scanner, StepFolder, looks_ours
from ckpt.commit.transfer import Digests, send
from ckpt.errors import (
    CheckpointError,
    CommitUnknown,
    LockedError,
    OutOfSpaceError,
    RunExistsError,
    StorageUnavailableError,
)
from ckpt.format import names
from ckpt.format.digest import digest
from ckpt.format.index import DataFile, Piece, RankIndex
from ckpt.format.manifest import FileEntry, Manifest, Parent, PlacementGroup, TensorTable
from ckpt.format.values import Json
from ckpt.manager.options import Options
from ckpt.manager.reports import SaveReport, environment
from ckpt.plan.planner import assign
from ckpt.storage.base import Storage

log = logging.getLogger("ckpt")


@dataclass
class Job:
    """One save, complete in memory: nothing in it is shared with live objects."""

    step: int
    metrics: Mapping[str, float]
    staged: Staged
    dim_orders: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    parts: Mapping[str, Mapping[str, Json]]
    values: Mapping[str, Json]
    capture_s: float
    stall_s: float = 0.0
    save: str = field(default_factory=lambda: os.urandom(16).hex())


class Session:
    """The line this process writes. `begin` is called once for each incarnation, before its first save."""

    def __init__(self, storage: Storage, options: Options) -> None:
        self.storage = storage
        self.options = options
        self.lock = RootLock(storage)
        self.scanner = Scanner(storage, tables=False)
        self.run: str | None = None
        self.parent: Parent | None = None
        self.incarnation: int | None = None  # None until the first save of this incarnation
        self.damaged: set[str] = set()
        self.spare: set[str] = set()  # the step resumed from and the damaged ones it was chosen over
        self.in_flight: int | None = None
        self.known: set[int] = set()  # steps of the line that are committed or in flight
        self.commits = 0
        self.last: SaveReport | None = None
        self.errors: list[CheckpointError] = []
        self.durable_at = time.monotonic()
        self._writer_id = os.urandom(16).hex()

    def adopt(self, run: str | None, source: StepFolder | None, line: Line) -> None:
        """The place on the line after a resume: from `source` on, or a new run when there was nothing."""
        self.run = run
        self.incarnation = None
        self.commits = 0
        if source is None:
            self.parent, self.known = None, set()
            return
        record = manifest(source)
        self.parent = Parent(record.step, record.incarnation, record.save)
        self.known = {folder.step for folder in line.steps if folder.step <= record.step} if run is not None else set()

    def begin(self, step: int, resumed: bool) -> None:
        """Takes the next incarnation, on the caller's thread.

        Raises RunExistsError for a first save without a resume into a root that holds steps, unless `step` is above the
        newest: then that line goes on, with one warning.
        """
        roster = self.scanner.scan()
        line = line_of(roster, self.run)
        if self.run is None and line.newest is not None:
            newest = line.newest
            if step <= newest.step or resumed:
                raise RunExistsError(
                    f"{self.storage.url} holds a run up to step {newest.step}; saving step {step} would start a second "
                    "history in it.",
                    step=step,
                    path=self.storage.url,
                    stage="save",
                    hint="Call resume() first to go on from there, or choose another root.",
                )
            log.warning(
                "saving step %d without a resume into %s, which holds steps up to %d: that line goes on",
                step, self.storage.url, newest.step,
            )  # fmt: skip
            self.adopt(line.run, newest, line)
        if self.run is None:
            self.run = os.urandom(16).hex()
        self.incarnation = next_incarnation(roster)
        retention.sweep(self.storage, roster.debris)

    def write(self, job: Job) -> None:
        """Carries `job` to a durable step; never raises: what failed is in `errors` and `last`. Writer's thread."""
        started = time.monotonic()
        path = f"{self.storage.url}/{names.step_name(job.step)}"
        size = job.staged.layout.bytes
        error: CheckpointError | None = None
        try:
            size = self._commit(job, started)
        except CheckpointError as failure:
            error = failure
        except Exception as failure:
            error = CheckpointError(f"Saving step {job.step} failed: {failure!r}.", path=path, stage="save")
            error.__cause__ = failure
        write_s = time.monotonic() - started
        if error is not None:
            self.failed(job.step, error, size, job.stall_s, write_s)
            return
        self.commits += 1
        self.durable_at = time.monotonic()
        self.last = SaveReport(job.step, path, size, job.stall_s, write_s, True)
        rate = size / max(write_s, 1e-9) / 1e9
        log.info(
            "step %d is durable: %s bytes in %.3f s (%.2f GB/s), training waited %.3f s",
            job.step, f"{size:,}", write_s, rate, job.stall_s,
        )  # fmt: skip
        self._retire()

    def failed(
        self, step: int, error: CheckpointError, size: int = 0, stall_s: float = 0.0, write_s: float = 0.0
    ) -> None:
        """Takes down that the save of `step` failed; the log is told when nobody will be raised at (I9)."""
        error.step = step if error.step is None else error.step
        path = f"{self.storage.url}/{names.step_name(step)}"
        self.known.discard(step)
        self.last = SaveReport(step, path, size, stall_s, write_s, False, error)
        if self.options.on_failure == "warn":
            log.warning("step %d was not saved: %s", step, error)
        else:
            self.errors.append(error)

    def count_stall(self, seconds: float) -> None:
        """A save that the caller waited for: the whole of it held training up."""
        if self.last is not None:
            self.last = replace(self.last, stall_s=seconds)

    def _commit(self, job: Job, started: float) -> int:
        points.reach("write.begin")
        self._room_for(job)
        attempt = attempt_for(self.storage, job.step, job.save)
        try:
            attempt.begin()
            data_name = attempt.file_name(names.data_name(0))
            digests = send(attempt, data_name, job.staged.image, job.staged.layout)
            index_name = attempt.file_name(names.index_name(0))
            table = _table(job)
            index = _index(job, data_name, digests, table)
            attempt.write(index_name, index)
            record = self._manifest(job, attempt, digests, index, table, time.monotonic() - started)
            self._make_way(job.step, attempt)
            attempt.commit(record.encode())
        except CommitUnknown:
            raise
        except BaseException:
            attempt.abandon()
            raise
        points.reach("commit.acknowledged")
        return record.bytes

    def _room_for(self, job: Job) -> None:
        free = self.storage.free_bytes()
        needed = job.staged.layout.bytes + (1 << 16)
        if free is not None and free < needed:
            # What an earlier failure could not remove may be what fills the disk.
            self._tidy()
            free = self.storage.free_bytes()
        if free is not None and free < needed:
            raise OutOfSpaceError(
                f"Step {job.step} needs {needed:,} bytes and {self.storage.url} has {free:,} free.",
                step=job.step,
                path=self.storage.url,
                stage="write",
                errno=errno.ENOSPC,
                needed=needed,
                free=free,
                hint="Free some room (`ckpt prune ROOT --keep-last N`); earlier checkpoints are intact.",
            )

    def _manifest(
        self, job: Job, attempt: Attempt, digests: Digests, index: bytes, table: TensorTable, write_s: float
    ) -> Manifest:
        assert self.run is not None and self.incarnation is not None
        files = (
            FileEntry(attempt.file_name(names.index_name(0)), len(index), digest(index)),
            FileEntry(attempt.file_name(names.data_name(0)), job.staged.layout.bytes, digests.whole),
        )
        return Manifest(
            run=self.run,
            save=job.save,
            incarnation=self.incarnation,
            parent=self.parent,
            step=job.step,
            time=time.time(),
            metrics=job.metrics,
            world={"size": 1, "writer": self._writer_id},
            parts=job.parts,
            tensors=table,
            groups=(PlacementGroup("whole", (0,)),),
            files=files,
            timings={"capture_s": job.capture_s, "stall_s": job.stall_s, "write_s": write_s},
            environment=environment(),
        )

    def _make_way(self, step: int, attempt: Attempt) -> None:
        """Checks that the line is still ours, and removes what we may remove from under the step's name."""
        roster = self.scanner.scan()
        self._still_ours(roster)
        name = names.step_name(step)
        if self.storage.stat(name) is None:
            return
        folder = self.scanner.look(name) if self.storage.list(name) is not None else None
        if folder is not None and folder.manifest is not None:
            # A damaged or abandoned step of an older incarnation of this run, or one of this process whose commit ended
            # unknown; a newer one is another writer's.
            older = folder.manifest.incarnation < (self.incarnation or 0)
            mine = folder.manifest.world.get("writer") == self._writer_id
            ours = folder.manifest.run == self.run and (older or mine)
        else:
            uncommitted = folder is not None and folder.unsupported is None
            ours = uncommitted and looks_ours(self.storage, name)
        if not ours or step in roster.pins:
            why = "is pinned" if ours else "is not of this run"
            raise StorageUnavailableError(
                f"Step {step} cannot be saved: what stands at {self.storage.url}/{name} {why}.",
                step=step,
                path=f"{self.storage.url}/{name}",
                stage="commit",
                errno=errno.EEXIST,
                hint=f"{'Unpin it (`ckpt unpin`)' if ours else 'Move it away'}, or choose another root.",
            )
        if self.storage.abilities.renames_folders or (folder is not None and folder.manifest is not None):
            retention.remove_step(self.storage, name, spare=attempt.in_place)

    def _still_ours(self, roster: Roster) -> None:
        for folder in roster.steps:
            record = manifest(folder)
            other = record.world.get("writer") != self._writer_id
            if record.run == self.run and record.incarnation >= (self.incarnation or 0) and other:
                raise LockedError(
                    f"Another process has resumed this run and saved step {record.step} as incarnation "
                    f"{record.incarnation}; this one is incarnation {self.incarnation} and stops saving.",
                    step=record.step,
                    path=f"{self.storage.url}/{folder.name}",
                    stage="commit",
                    since=record.time,
                    hint="Stop one of the two, and resume the one that is to go on.",
                )

    def _retire(self) -> None:
        """Retention after a durable commit (I5); its failure is a warning."""
        try:
            self._tidy()
        except Exception as error:  # noqa: BLE001 - a bug here must not end the training
            log.warning("retention in %s failed, will try again after the next save: %r", self.storage.url, error)

    def _tidy(self) -> None:
        try:
            roster = self.scanner.scan()
            retention.sweep(self.storage, roster.debris)
            if not self.commits:
                return
            line = line_of(roster, self.run)
            spare = {line.newest.name} if line.newest is not None else set()
            if self.options.keep_last is not None and self.commits < self.options.keep_last:
                spare |= self.spare
            choice = retention.choose(line, self.options.policy, roster.pins, damaged=self.damaged, protected=spare)
            old = retention.outdated(roster.damaged, line, self.options.policy, roster.pins)
            choice = replace(choice, remove=(*choice.remove, *old))
            retention.retire(self.storage, choice, self.scanner.pins, spare=spare)
        except CheckpointError as error:
            log.warning("retention in %s failed, will try again after the next save: %s", self.storage.url, error)


def _table(job: Job) -> TensorTable:
    listed, dtypes, shapes = zip(*job.staged.signature, strict=True) if job.staged.signature else ((), (), ())
    return TensorTable(listed, dtypes, shapes, (0,) * len(listed), job.aliases)


def _index(job: Job, data_name: str, digests: Digests, table: TensorTable) -> bytes:
    layout = job.staged.layout
    number = {name: i for i, name in enumerate(table.names)}
    boxes = [assigned.box for assigned in assign(table.shapes, 1)]
    pieces = tuple(
        Piece(number[name], 0, start, end - start, boxes[number[name]], job.dim_orders.get(name), piece_digest)
        for name, (start, end), piece_digest in zip(job.staged.names, layout.spans, digests.pieces, strict=True)
    )
    file = DataFile(data_name, layout.bytes, layout.data_start, digests.header, names.BLOCK, digests.blocks)
    return RankIndex(job.save, 0, job.values, (file,), pieces).encode(table.shapes)
