"""One save, from the call in the training loop to the hand-over to the writer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ckpt import points
from ckpt.capture.staging import Signature, Staging
from ckpt.capture.state import Registry, capture
from ckpt.errors import CheckpointError, DeadlineError, StorageUnavailableError
from ckpt.format import jsontext
from ckpt.manager import encoding
from ckpt.manager.due import Schedule
from ckpt.manager.encoding import Job
from ckpt.manager.options import Options
from ckpt.manager.reports import environment
from ckpt.manager.session import Session
from ckpt.manager.writer import Writer

log = logging.getLogger("ckpt")


class Saver:
    """Decides whether a save starts, takes the moment (I10), and hands it over. Used under the manager's lock."""

    def __init__(self, registry: Registry, session: Session, writer: Writer, options: Options) -> None:
        self._registry = registry
        self._session = session
        self._writer = writer
        self._options = options
        self.staging = Staging()
        self._prepared = False
        self._monitor_missed = False
        self.schedule = Schedule(options)
        self.skipped = 0
        self._fitting: Signature = ()  # of tensors that were found within the limits
        self._old_told: float | None = None

    def save(self, number: int, metrics: Mapping[str, float], force: bool, resumed: bool, began: float) -> bool:
        """See CheckpointManager.save. `began`: monotonic time at which the call came."""
        self.raise_failures()
        self._check_age()
        if not self._wanted(number, metrics, force):
            return False
        session = self._session
        if session.incarnation is None and not self._begin(number, resumed):
            return False
        job = self._stage(number, metrics)
        job.stall_s = time.monotonic() - began
        self._hand_over(job)
        self.schedule.started()
        if not self._options.async_save:
            self.settle(self._options.deadline_s)
            session.count_stall(time.monotonic() - began)
            self.raise_failures()
            return session.last is not None and session.last.durable
        return True

    def _begin(self, number: int, resumed: bool) -> bool:
        try:
            self._session.begin(number, resumed)
        except StorageUnavailableError as error:
            if self._options.on_failure == "raise":
                raise
            self._session.failed(number, error)
            return False
        return True

    def _wanted(self, number: int, metrics: Mapping[str, float], force: bool) -> bool:
        session = self._session
        due = self.schedule.due(number)
        if number in session.known:
            log.info("step %d is saved already", number)
            return False
        newest = max(session.known, default=-1)
        if number < newest:
            raise ValueError(
                f"step {number} is below step {newest}, the newest of this run; to go back, resume({number}) first"
            )
        if not (due or force):
            self.prepare()
            return False
        monitor = self._options.monitor
        if monitor is not None and monitor not in metrics and not self._monitor_missed:
            self._monitor_missed = True
            log.warning(
                "metrics lack %r: step %d is no candidate for best; call manager.save(step, metrics={%r: ...}) in the "
                "body of the loop",
                monitor, number, monitor,
            )  # fmt: skip
        if self._writer.busy:
            if self._options.when_busy == "skip" and not force:
                self.skipped += 1
                log.info("step %d was skipped: a save is being written (%d skipped so far)", number, self.skipped)
                return False
            self.settle(self._options.deadline_s)
            self.raise_failures()
        return True

    def _stage(self, number: int, metrics: Mapping[str, float]) -> Job:
        """The state as it is now. Raises UnsupportedStateError for one that a checkpoint cannot hold."""
        if self._writer.busy:
            # The buffer is being written to disk: filled now, the step in flight would hold two moments (I10).
            raise CheckpointError(f"Step {self._session.in_flight} is still being written.", stage="save")
        points.reach("save.begin")
        began = time.monotonic()
        snapshot = capture(self._registry)
        staged = self.staging.stage(snapshot.tensors)
        if staged.signature is not self._fitting:
            encoding.check_tensors(staged.signature)
            self._fitting = staged.signature
        job = Job(
            step=number,
            metrics=metrics,
            staged=staged,
            dim_orders=snapshot.dim_orders,
            aliases=snapshot.aliases,
            parts=snapshot.parts,
            values=jsontext.dump(snapshot.values),
            environment=environment(),
            capture_s=time.monotonic() - began,
        )
        encoding.check_texts(job)
        points.reach("save.staged")
        return job

    def _hand_over(self, job: Job) -> None:
        session, begun = self._session, self._writer.begun
        try:
            session.known.add(job.step)
            session.in_flight = job.step
            self._writer.submit(lambda: session.write(job))
        except BaseException:
            if not self._writer.busy and self._writer.begun == begun:
                # Interrupted before it was handed over: the step is not saved, and may be tried again.
                session.known.discard(job.step)
                session.in_flight = None
            raise

    def prepare(self) -> None:
        """Makes the staging memory ready in the background, once, as soon as the state has its full size."""
        if self._prepared or self._writer.busy:
            return
        self._prepared = True
        try:
            self.staging.prepare(capture(self._registry).tensors)
        except (CheckpointError, MemoryError) as error:
            # Raised by the save, if it is still so then; this call only makes that save quicker.
            log.debug("staging memory was not prepared: %s", error)

    def resumed(self, number: int) -> None:
        """The manager stands at `number` now; the age of the newest durable step counts from here."""
        self.schedule.resumed(number)
        self._session.durable_at = time.monotonic()
        if number:
            self.prepare()

    def _check_age(self) -> None:
        limit = self._options.max_durable_age
        since = self._session.durable_at
        age = time.monotonic() - since
        if limit is not None and age > limit and self._old_told != since:
            # Once, as every failure: a caller that goes on must be able to make the next step durable.
            self._old_told = since
            raise CheckpointError(
                f"No step has become durable for {age:.0f} s; max_durable_age is {limit:g} s.",
                path=self._session.storage.url,
                stage="durability",
                hint="Look at the log for failed saves; save more often, or raise max_durable_age.",
            )

    def settle(self, timeout: float, since: float | None = None) -> None:
        """Waits for the save in flight; DeadlineError `timeout` seconds after the monotonic time `since` (by default
        now), and it goes on."""
        spent = 0.0 if since is None else time.monotonic() - since
        if not self._writer.idle(max(0.0, timeout - spent)):
            raise DeadlineError(
                f"The save in flight into {self._session.storage.url} was not finished within {timeout:g} s and goes "
                "on.",
                step=self._session.in_flight,
                path=self._session.storage.url,
                stage="wait",
            )

    def raise_failures(self) -> None:
        """Raises what failed since it was last told; with on_failure="warn" it was told already."""
        failure = self.failure()
        if failure is not None:
            raise failure

    def failure(self) -> CheckpointError | None:
        """The oldest failure not told yet, a later one as its context; they count as told now."""
        errors, self._session.errors = self._session.errors, []
        if not errors:
            return None
        for error, later in zip(errors, errors[1:], strict=False):
            error.__context__ = later
        return errors[0]

    def release(self) -> None:
        """Lets the staging memory go; nothing may be in flight."""
        self.staging.release()
