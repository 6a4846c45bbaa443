"""One run's hold on a root: its place on the line, and the way of one save from a staged image to a committed step.

Nothing here refers to the manager, so that a manager nobody holds any more can be collected while a save goes on.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import replace

from ckpt import points
from ckpt.commit import retention
from ckpt.commit.attempt import Attempt, attempt_for
from ckpt.commit.line import Line, descent, line_of, manifest, next_incarnation
from ckpt.commit.lock import RootLock
from ckpt.commit.roster import Roster, Scanner, StepFolder, looks_ours
from ckpt.commit.transfer import send
from ckpt.errors import (
    CheckpointError,
    CommitUnknown,
    LockedError,
    OutOfSpaceError,
    RunExistsError,
    StateMismatchError,
    StorageUnavailableError,
    UnsupportedStateError,
)
from ckpt.format import names
from ckpt.format.manifest import Manifest, Parent
from ckpt.manager import encoding
from ckpt.manager.encoding import Job, Place
from ckpt.manager.options import Options
from ckpt.manager.reports import SaveReport
from ckpt.storage.base import Storage

log = logging.getLogger("ckpt")


# What on_failure="warn" never makes a warning of: the run would go on for good without a checkpoint.
_ALWAYS_RAISED = (LockedError, RunExistsError, UnsupportedStateError, StateMismatchError)


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
        # Keys of steps: known to be damaged; of a commit that could not be confirmed; the one resumed from and the
        # damaged ones it was chosen over; and the saves that were there when this incarnation began.
        self.damaged: set[str] = set()
        self.unknown: set[str] = set()
        self.protected: set[str] = set()
        self._seen: frozenset[str] = frozenset()
        self._debris: tuple[str, ...] = ()  # found at the beginning, to be swept before the first write
        self._in_doubt = False  # the last commit could not be confirmed
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
        self.known = {folder.step for folder in descent((*line.steps, *line.off), source)} if run is not None else set()

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
        self._seen = frozenset(folder.key for folder in (*roster.steps, *roster.damaged))
        self._debris = roster.debris

    def write(self, job: Job) -> None:
        """Carries `job` to a durable step; what failed is in `errors` and `last`. On the writer's thread; where it runs
        on the caller's, what interrupts that one is raised."""
        started = time.monotonic()
        path = f"{self.storage.url}/{names.step_name(job.step)}"
        size = job.staged.layout.bytes
        error: CheckpointError | None = None
        roster: Roster | None = None
        try:
            size, roster = self._commit(job, started)
        except CheckpointError as failure:
            error = failure
        except Exception as failure:
            error = CheckpointError(f"Saving step {job.step} failed: {failure!r}.", path=path, stage="save")
            error.__cause__ = failure
        except BaseException:
            self.known.discard(job.step)
            raise
        write_s = time.monotonic() - started
        if error is not None:
            self.failed(job.step, error, size, job.stall_s, write_s)
            return
        assert roster is not None
        self.commits += 1
        self.durable_at = time.monotonic()
        self.last = SaveReport(job.step, path, size, job.stall_s, write_s, True)
        rate = size / max(write_s, 1e-9) / 1e9
        log.info(
            "step %d is durable: %s bytes in %.3f s (%.2f GB/s), training waited %.3f s",
            job.step, f"{size:,}", write_s, rate, job.stall_s,
        )  # fmt: skip
        self._retire(roster)

    def failed(
        self, step: int, error: CheckpointError, size: int = 0, stall_s: float = 0.0, write_s: float = 0.0
    ) -> None:
        """Takes down that the save of `step` failed; the log is told when nobody will be raised at (I9)."""
        error.step = step if error.step is None else error.step
        path = f"{self.storage.url}/{names.step_name(step)}"
        self.known.discard(step)
        self.last = SaveReport(step, path, size, stall_s, write_s, False, error)
        if self.options.on_failure == "warn" and not isinstance(error, _ALWAYS_RAISED):
            log.warning("step %d was not saved: %s", step, error)
        else:
            self.errors.append(error)

    def count_stall(self, seconds: float) -> None:
        """A save that the caller waited for: the whole of it held training up."""
        if self.last is not None:
            self.last = replace(self.last, stall_s=seconds)

    def _commit(self, job: Job, started: float) -> tuple[int, Roster]:
        """Bytes written, and the root as it is with the new step."""
        points.reach("write.begin")
        retention.sweep(self.storage, self._debris)
        self._debris = ()
        self._room_for(job)
        attempt = attempt_for(self.storage, job.step, job.save)
        try:
            attempt.begin()
            data_name = attempt.file_name(names.data_name(0))
            digests = send(attempt, data_name, job.staged.image, job.staged.layout)
            index_name = attempt.file_name(names.index_name(0))
            table = encoding.table_of(job)
            index = encoding.index_of(job, data_name, digests, table)
            attempt.write(index_name, index)
            took = time.monotonic() - started
            record = encoding.manifest_of(
                job, self._place(), table, (index_name, index), (data_name, digests.whole), took
            )
            roster = self._make_way(job.step, attempt)
            attempt.commit(record.encode())
        except CommitUnknown:
            self.unknown.add(job.save)
            self._in_doubt = True
            raise
        except BaseException:
            attempt.abandon()
            raise
        self._in_doubt = False
        points.reach("commit.acknowledged")
        return record.bytes, self._with(roster, record)

    def _place(self) -> Place:
        assert self.run is not None and self.incarnation is not None
        return Place(self.run, self.incarnation, self.parent, self._writer_id, self.options.policy.recorded())

    def _with(self, roster: Roster, record: Manifest) -> Roster:
        """`roster`, taken just before the commit of `record`, as it is after it: a second scan would tell no more."""
        roster = roster.with_step(StepFolder(names.step_name(record.step), record))
        return replace(roster, debris=tuple(name for name in roster.debris if not name.endswith(record.save)))

    def _room_for(self, job: Job) -> None:
        free = self.storage.free_bytes()
        needed = job.staged.layout.bytes + (1 << 16)
        if free is not None and free < needed:
            # What an earlier failure could not remove may be what fills the disk.
            self._retire(None)
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

    def _make_way(self, step: int, attempt: Attempt) -> Roster:
        """Checks that the line is still ours, and removes what we may remove from under the step's name. The root as it
        was before that."""
        roster = self.scanner.scan()
        self._still_ours(roster)
        name = names.step_name(step)
        if self.storage.stat(name) is None:
            return roster
        folder = self.scanner.look(name) if self.storage.list(name) is not None else None
        if folder is not None and folder.manifest is not None:
            # A damaged or abandoned step of an older incarnation of this run, or one of this process whose commit ended
            # unknown; a newer one is another writer's.
            older = folder.manifest.incarnation < (self.incarnation or 0)
            mine = folder.manifest.world.get("writer") == self._writer_id
            ours = folder.manifest.run == self.run and (older or mine)
        else:
            known = folder is None or folder.unsupported is None
            ours = known and looks_ours(self.storage, name)
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
        return roster

    def _still_ours(self, roster: Roster) -> None:
        """Raises LockedError when another writer has committed since this incarnation began (I6): its steps and ours
        would take each other's place as the newest."""
        for folder in roster.steps:
            record = manifest(folder)
            if record.world.get("writer") == self._writer_id:
                continue
            if record.run == self.run and record.incarnation >= (self.incarnation or 0):
                what = "resumed this run"
            elif record.run != self.run and record.save not in self._seen:
                what = "begun another run here"
            else:
                continue
            raise LockedError(
                f"Another process has {what} and saved step {record.step} as incarnation {record.incarnation}; this "
                f"one is incarnation {self.incarnation} and stops saving.",
                step=record.step,
                path=f"{self.storage.url}/{folder.name}",
                stage="commit",
                since=record.time,
                hint="Stop one of the two, and resume the one that is to go on.",
            )

    def _retire(self, roster: Roster | None) -> None:
        """Retention after a durable commit (I5), `roster` being the root after it; its failure is a warning. None: to
        make room, by a look of its own, and no step goes while the last commit is in doubt."""
        try:
            found = self.scanner.scan() if roster is None else roster
            retention.sweep(self.storage, found.debris)
            if not self.commits or self._in_doubt:
                return
            line = line_of(found, self.run)
            policy = self.options.policy
            protected = {line.newest.key} if line.newest is not None else set()
            if policy.keep_last is not None and self.commits < policy.keep_last:
                protected |= self.protected
            choice = retention.choose(
                line, policy, found.pins, damaged=self.damaged, unknown=self.unknown, protected=protected
            )
            old = retention.outdated(found.damaged, line, policy, found.pins)
            retention.retire(self.storage, replace(choice, remove=(*choice.remove, *old)), self.scanner.pins)
        except Exception as error:  # noqa: BLE001 - neither storage nor a bug here may end the training
            log.warning("retention in %s failed, will try again after the next save: %r", self.storage.url, error)
