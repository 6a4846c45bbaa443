"""`CheckpointManager`, the object a training loop holds."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt.coordination.ranks import this_process
from ckpt.errors import CheckpointError, DeadlineError
from ckpt.manager import options, resuming
from ckpt.manager.base import ManagerBase
from ckpt.manager.looping import Batches, epoch, remembers
from ckpt.manager.restoring import check_override

log = logging.getLogger("ckpt")


class _Body(NamedTuple):
    """A body of `loop` that was begun: its step, and what it was given."""

    step: int
    loader: Iterable[Any] | None
    batch: Any


class CheckpointManager(ManagerBase):
    """Saves and resumes the state of one training run under `root`.

    root: a path, `file://` or `memory://` URL, or an object with `.fs` and `.path`; made by the first save.
    state: registered name -> object, as by `register`.
    keep_last: number of newest steps kept, None for all. keep_every: steps divisible by it stay. keep_best: number of
    best steps kept, by the metric `monitor`, "min" or "max" by `mode`. These and pinned steps are a union.
    save_every_steps, save_every_minutes: when a save is due; with neither, every call of `save` saves.
    async_save: False makes `save` return when the step is durable. when_busy: a save due while one is being written
    waits, or with "skip" is skipped. on_failure: "raise" at the next `save`, `wait` or `close`, or "warn".
    max_durable_age: seconds without a durable step after which `save` raises, whatever on_failure says.
    on_signal: names of signals after which `loop` saves and ends; without it no handler is ever set.
    strict: missing and unexpected names at resume are errors. verify_first: live state is untouched until all saved
    bytes were checked. lock_timeout, deadline_s, exit_timeout: seconds to wait for the root's lock, for a save in
    flight, and for it at interpreter exit.

    Construction reads and makes nothing. Raises ValueError and TypeError for wrong arguments, UnsupportedStateError for
    an object that cannot be registered. Methods may be called from any thread, one after the other.
    """

    def __init__(
        self,
        root: Any,
        state: Mapping[str, Any] | None = None,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: str = "min",
        save_every_steps: int | None = None,
        save_every_minutes: float | None = None,
        async_save: bool = True,
        when_busy: str = "wait",
        on_failure: str = "raise",
        max_durable_age: float | None = None,
        on_signal: Sequence[str] | None = None,
        on_world_change: str = "elastic",
        strict: bool = True,
        verify_first: bool = False,
        replicated: Sequence[str] = (),
        per_rank: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        lock_timeout: float = 10,
        capture: str = "eager",
        reuse: bool = True,
        deadline_s: float = 1800,
        exit_timeout: float = 60,
    ) -> None:
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(
                f'state must be a mapping of names to objects, as {{"model": model}}, not {type(state).__name__}'
            )
        given = {name: value for name, value in locals().items() if name not in ("self", "root", "state", "__class__")}
        super().__init__(root, options.check(**given), storage_options)
        for name, obj in (state or {}).items():
            self._registry.register(name, obj)
        self._restorer.watched = state
        self._body: _Body | None = None  # the body that was begun and not completed

    def register(self, name: str, obj: Any) -> None:
        """Adds an object to the state, before any `resume` and the first `save` (else CheckpointError).

        Raises ValueError for a name in use, reserved or not of [A-Za-z0-9_.-]{1,128}; UnsupportedStateError for an
        object that a checkpoint cannot hold.
        """
        with self._entered():
            if self._entered_root:
                raise CheckpointError(
                    f"{name!r} was registered after the first resume or save; the next resume would miss it.",
                    stage="register",
                    hint="Register everything first, so that the first run fails and not the first resume.",
                )
            self._registry.register(name, obj)

    def save(self, step: int, *, metrics: Mapping[str, Any] | None = None, force: bool = False) -> bool:
        """Saves the state as it is now, as `step`: the number of optimizer steps done.

        Returns True when a save was started (with async_save=False: when it is durable), False when none is due, the
        step is saved or in flight already, or `when_busy="skip"` skipped it. When it returns, nothing the caller does
        to any object reaches the checkpoint. Only reads: no hook fires, no random number is drawn.

        Raises what an earlier save in the background failed with, once, and starts nothing then; ValueError for a step
        below the newest of this run; LockedError, RunExistsError, UnsupportedStateError (before any write).
        """
        began = time.monotonic()
        number = options.step_number(step)
        values = options.metric_values(metrics)
        with self._entered():
            with self._moment():
                self._enter_root()
                self._restorer.check_before_save(number)
                started = self._saver.save(number, values, force, self._restorer.receipt is not None, began)
            self._completed = max(self._completed, number)
            return started

    def resume(
        self, step: int | str = "auto", *, from_: Any = None, override: Mapping[str, Sequence[str]] | None = None
    ) -> int:
        """Brings the live objects to a saved step and returns it; 0 when "auto" finds nothing.

        step: "auto" and "latest" (which must exist) take the newest sound step and pass over damaged ones; "best" or a
        number must exist and be sound. from_: another root to start from, where nothing is changed; with "auto" it is
        used only while this manager's own root holds no step. override: registered name -> hyper-parameters of which
        the script's values stay.

        Values and RNG are applied only after all bytes were found good. Raises NotCommittedError,
        CorruptCheckpointError (none is sound: never a silent fresh start), StateMismatchError and
        UnsupportedFormatError (nothing changed; only where the bytes are refused by an object's own load, which comes
        last, others hold the step already, and nothing is saved before the next resume), StorageUnavailableError,
        LockedError; ValueError and TypeError for wrong arguments.
        """
        request = resuming.check_request(step, self._options)
        keep = check_override(override)
        with self._entered(), self._moment():
            self._enter_root()
            self._saver.settle(self._options.deadline_s)
            self._saver.raise_failures()
            number = self._restorer.resume(self._session, request, from_, keep)
            self._saver.resumed(number)
            self._completed, self._body = number, None
            return number

    def restore_rng(self) -> None:
        """Puts the random numbers back to the resumed step's once more, for loops that make their iterator by hand:
        call it after `iter(loader)`. No-op when nothing was resumed."""
        with self._entered(), self._moment():
            self._restorer.restore_rng()

    def loop(self, total: int, loader: Iterable[Any] | None = None) -> Iterator[Any]:
        """Yields the steps still to do, up to `total`; with a loader (step, batch), through as many epochs as it takes.

        Resumes first when that was not done. After each body: saves when due, and always at `total`; on a signal of
        on_signal saves, waits for it and ends. Returns when the last save is durable. A break, return or exception in
        the body saves nothing more; the body's step counts as done only if the body called `save` with it before.
        Otherwise the next `loop` yields that step again, with the same batch where the loader is one that remembers its
        position.
        """
        last = options.step_number(total)
        with self._entered():
            if self._restorer.receipt is None:
                self.resume("auto")
            self._restorer.check_loader(loader)
        return self._loop(last, loader)

    def _loop(self, total: int, loader: Iterable[Any] | None) -> Iterator[Any]:
        step = self._completed
        if step >= total:
            log.info("nothing left to do: step %d of total=%d is done in %s", step, total, self._storage.url)
            return
        feed = None if loader is None else Batches(loader, self._restore_rng_once)
        if feed is None:
            # Whoever seeds or makes an iterator between `resume` and the loop must not undo the restore.
            self._restore_rng_once()
        left = self._left_open()
        stop = self.should_stop
        while step < total and not stop:
            if left is not None and left.loader is loader and remembers(loader):
                # The loader stands behind this batch already: a new one would leave it out.
                batch = left.batch
            else:
                batch = next(feed) if feed is not None else None
            left = None
            step += 1
            self._body = _Body(step, loader, batch)
            yield step if feed is None else (step, batch)
            self._completed, self._body = step, None
            # Looked at once a step: a signal between two looks would end the loop with its last step unsaved.
            stop = self.should_stop
            self._after_body(step, stop or step == total)
        self.wait()

    def _left_open(self) -> _Body | None:
        """The body that was left by a break, a return or an exception before its step was done."""
        return self._body if self._body is not None and self._body.step > self._completed else None

    def _restore_rng_once(self) -> None:
        with self._moment():
            self._restorer.restore_rng_once()

    def _after_body(self, step: int, last: bool) -> None:
        if step not in self._session.known:
            self.save(step, force=last)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """One epoch of any loader, with the late restore that makes a resume exact: the iterator is made, which may
        draw random numbers, and then they are put back."""
        with self._entered():
            self._restorer.check_loader(loader)
        return epoch(loader, self._restore_rng_once)

    @property
    def should_stop(self) -> bool:
        """True once a signal of on_signal arrived; always False without on_signal."""
        return self._signals.received is not None

    def should_stop_at(self, step: int) -> bool:
        """Whether to stop after `step`: the answer that all ranks share."""
        options.step_number(step)
        return this_process().decide(lambda: self.should_stop)

    def wait(self, timeout: float | None = None) -> None:
        """Returns when everything handed to `save` is durable; raises each failure once.

        DeadlineError after `timeout` seconds (by default deadline_s), also when it is another thread's call that takes
        so long; the save goes on then.
        """
        began, limit = time.monotonic(), options.seconds(timeout, self._options.deadline_s)
        with self._entered_within(limit):
            self._check_open()
            self._saver.settle(limit, began)
            self._saver.raise_failures()

    def close(self, timeout: float | None = None, save_last: bool = False) -> None:
        """Finishes the save in flight, frees the lock, ends the threads, then raises what failed. Twice is fine.

        save_last: first saves the last completed step, if that was not done. When a body of `loop` was left in the
        middle, the state is that of no completed step: unless the last one is saved already, CheckpointError is raised
        and nothing more saved. Call `save` in the body, before the break, once its step is done.

        DeadlineError when the save in flight is not finished after `timeout` seconds (by default deadline_s): it goes
        on, and the root stays locked until it ends. When another thread's call takes so long, the manager stays open.
        """
        began, limit = time.monotonic(), options.seconds(timeout, self._options.deadline_s)
        with self._entered_within(limit):
            if self._closed:
                return
            earlier = None
            try:
                if save_last:
                    earlier = self._save_last(limit, began)
            except BaseException as error:
                _put_behind(error, self._finish(limit, began))
                raise
            failure = self._finish(limit, began)
            if earlier is not None:
                _put_behind(earlier, failure)
                raise earlier
            if failure is not None:
                raise failure

    def _save_last(self, timeout: float, began: float) -> CheckpointError | None:
        """Saves the last completed step if it is not durable. An earlier save's failure is returned: raised at the
        entry of `save` it would take the last save's place."""
        if not self._entered_root or self._restorer.broken is not None:
            return None
        self._saver.settle(timeout, began)
        earlier = self._saver.failure()
        if self._completed not in self._session.known:
            try:
                self._check_no_body()
                self.save(self._completed, force=True)
            except BaseException as error:
                _put_behind(error, earlier)
                raise
        return earlier

    def _check_no_body(self) -> None:
        body = self._left_open()
        if body is not None:
            raise CheckpointError(
                f"Step {self._completed} cannot be saved any more: the loop was left in the body of step {body.step}, "
                "which may have changed the state and has taken its batch.",
                step=self._completed,
                path=self._storage.url,
                stage="close",
                hint=f"Call save({body.step}, force=True) in the body, before the break, once its step is done.",
            )

    def _finish(self, timeout: float, began: float) -> CheckpointError | None:
        """Ends everything, `timeout` seconds after `began` at the latest; the failure to raise, if any."""
        self._closed, self._body = True, None
        self._end.detach()
        finished = self._ending.close(max(0.0, timeout - (time.monotonic() - began)))
        failure = self._saver.failure()
        if finished:
            self._saver.release()
            return failure
        abandoned = DeadlineError(
            f"The save of step {self._session.in_flight} into {self._storage.url} was not finished within {timeout:g} "
            "s. It goes on as long as the process lives, and the root stays locked until it ends.",
            step=self._session.in_flight,
            path=self._storage.url,
            stage="close",
        )
        _put_behind(abandoned, failure)
        return abandoned

    def __enter__(self) -> CheckpointManager:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        if os.getpid() != self._pid:
            # A forked child that leaves the body by an exception: the writer and the lock are its parent's.
            return
        began, limit = time.monotonic(), self._options.exit_timeout
        try:
            with self._entered_within(limit):
                failure = None if self._closed else self._finish(limit, began)
        except DeadlineError as late:
            failure = late
        # The body's exception is the one to see; what the save failed with stands behind it.
        _put_behind(error, failure)


def _put_behind(error: BaseException, failure: BaseException | None) -> None:
    """Adds `failure` at the end of the contexts of `error`."""
    if failure is None:
        return
    last = error
    while last.__context__ is not None and last is not failure:
        last = last.__context__
    if last is not failure:
        last.__context__ = failure
