"""What every method of a manager rests on: who may call it, what it holds, and reading back what is committed."""

from __future__ import annotations

import os
import pkgutil
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckpt.capture.state import Registry
from ckpt.commit.line import Line, best_of, line_of
from ckpt.commit.roster import Scanner, remove_pin, set_pin
from ckpt.coordination.ranks import this_process
from ckpt.errors import CheckpointError, ClosedError, DeadlineError, ForkedError
from ckpt.format.names import parse_step_name
from ckpt.manager.exiting import Ending
from ckpt.manager.options import Options, step_number
from ckpt.manager.reports import Receipt, SaveReport
from ckpt.manager.restoring import Restorer
from ckpt.manager.saving import Saver
from ckpt.manager.session import Session
from ckpt.manager.signals import Signals
from ckpt.manager.writer import Writer
from ckpt.storage.open import normalise, open_storage


class ManagerBase:
    """Holds the pieces of a manager, guards them, and answers what needs no lock."""

    def __init__(self, root: Any, options: Options, storage_options: Mapping[str, Any] | None) -> None:
        self._options = options
        self._name, _ = normalise(root)
        self._storage = open_storage(root, dict(storage_options or {}))
        self._pid = os.getpid()
        self._calls = threading.RLock()
        self._busy: set[int] = set()  # threads that are inside a save or a resume
        self._registry = Registry()
        self._session = Session(self._storage, options)
        self._writer = Writer()
        self._saver = Saver(self._registry, self._session, self._writer, options)
        self._restorer = Restorer(self._registry, options)
        self._signals = Signals(options.on_signal)
        self._entered_root = False
        self._closed = False
        self._completed = 0  # the last step whose body was completed, or that was resumed
        if "CKPT_CHAOS" in os.environ:
            # By name: chaos is an edge, which this room must not import; a run without a campaign never loads it.
            pkgutil.resolve_name("ckpt.chaos.agent:attach")(self)
        # At exit and when nobody holds the manager any more: finishes the save in flight and frees the lock.
        self._ending = Ending(self._session, self._writer, self._saver.staging, self._signals, options.exit_timeout)
        self._end = weakref.finalize(self, self._ending.finalise)

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"This manager belongs to process {self._pid} and was used in its forked child {os.getpid()}.",
                owner_pid=self._pid,
                pid=os.getpid(),
                stage="fork",
                hint="Save and resume in the process that made it.",
            )

    def _check_call(self) -> None:
        self._check_pid()
        if threading.get_ident() in self._busy:
            raise CheckpointError(
                "The manager was used from within a save or a resume of its own, by a signal handler or by a hook of "
                "the state; a checkpoint would hold two moments.",
                path=self._storage.url,
                stage="save",
                hint="Set a flag there and act on it between two steps; on_signal does that.",
            )

    def _check_open(self) -> None:
        self._check_call()
        if self._closed:
            raise ClosedError("The manager is closed.", path=self._storage.url, hint="Make a new one to go on.")

    def _entered(self) -> threading.RLock:
        # The pid first: a lock that another thread held at the fork is never freed in the child.
        self._check_open()
        return self._calls

    @contextmanager
    def _entered_within(self, timeout: float) -> Iterator[None]:
        """As `_entered`, but on a closed manager too, and DeadlineError when another thread's call outlasts `timeout`
        seconds."""
        self._check_call()
        if not self._calls.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise DeadlineError(
                f"Another thread's call on the manager of {self._storage.url} was not finished within {timeout:g} s.",
                step=self._session.in_flight,
                path=self._storage.url,
                stage="wait",
            )
        try:
            yield
        finally:
            self._calls.release()

    @contextmanager
    def _moment(self) -> Iterator[None]:
        """While live state is read or written as a whole (I10): who comes back on this thread meanwhile is refused."""
        here = threading.get_ident()
        try:
            self._busy.add(here)
            yield
        finally:
            self._busy.discard(here)

    def _enter_root(self) -> None:
        """What the first resume, save or loop does: one process, the lock (I6), the signals."""
        this_process()
        if not self._entered_root:
            self._refuse_step_folder()
        self._session.lock.acquire(self._options.lock_timeout)
        self._signals.install()
        self._entered_root = True

    def _refuse_step_folder(self) -> None:
        """A step's folder as root would look like an empty one, and the run would write inside a committed step."""
        name = self._storage.url.rstrip("/").rpartition("/")[2]
        folder = Scanner(self._storage, tables=False).look("", parse_step_name(name) is not None)
        if folder is not None:
            raise CheckpointError(
                f"{self._storage.url} is one step's folder, not a run's root.",
                step=folder.step or None,
                path=self._storage.url,
                stage="resume",
                hint="Give the folder it lies in, and its number to resume(); another root starts from it by from_.",
            )

    @property
    def root(self) -> str:
        """The root in its normal form: an absolute path or a URL."""
        return self._name

    def _line(self) -> Line:
        self._check_pid()
        return line_of(Scanner(self._storage, tables=False).scan(), self._session.run)

    def steps(self) -> tuple[int, ...]:
        """Committed steps of the run's line, oldest first, read from storage now; () when there is no root.

        Raises StorageUnavailableError when it could not be read. Takes no lock; works on a closed manager.
        """
        return tuple(folder.step for folder in self._line().steps)

    @property
    def latest_step(self) -> int | None:
        """The newest of `steps()`; None when there is none."""
        return max(self.steps(), default=None)

    @property
    def best_step(self) -> int | None:
        """The step of the line that is best by `monitor` and `mode`; None without one, or without monitor."""
        if self._options.monitor is None:
            return None
        ranked = best_of(self._line().steps, self._options.monitor, self._options.mode)
        return ranked[0].step if ranked else None

    @property
    def last_save(self) -> SaveReport | None:
        """Report of the newest finished save; None before one. Skipped saves don't count."""
        return self._session.last

    @property
    def skipped_saves(self) -> int:
        """How many saves that were due `when_busy="skip"` has skipped so far."""
        return self._saver.skipped

    @property
    def receipt(self) -> Receipt | None:
        """Report of the last resume; None before one."""
        return self._restorer.receipt

    def pin(self, step: int, note: str = "") -> None:
        """Keeps a committed step from ever being removed; again: the note is replaced. Durable on return, no lock.

        Raises NotCommittedError when the step is not committed, ValueError for a note of more than 1 KiB.
        """
        self._check_open()
        set_pin(self._storage, step_number(step), note)

    def unpin(self, step: int) -> None:
        """Takes the pin away; fine when there is none."""
        self._check_open()
        remove_pin(self._storage, step_number(step))
