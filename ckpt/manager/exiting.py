"""The end of a manager: closed, collected, or left to the interpreter's exit. It starts nothing new.

In every case the root stays locked for as long as the writer is writing it (I6): a save that outlives its manager could
otherwise commit into the midst of another run.
"""

from __future__ import annotations

import logging
import os
import threading

from ckpt.capture.staging import Staging
from ckpt.manager.session import Session
from ckpt.manager.signals import Signals
from ckpt.manager.writer import Writer

log = logging.getLogger("ckpt")
_JOIN = 5.0  # seconds for a thread that has nothing left to do


class Ending:
    """What has to be done when a manager goes. Holds no reference to it."""

    def __init__(self, session: Session, writer: Writer, staging: Staging, signals: Signals, timeout: float) -> None:
        self._session, self._writer, self._staging, self._signals = session, writer, staging, signals
        self._timeout = timeout
        self._pid = os.getpid()

    def close(self, timeout: float) -> bool:
        """Whether the save in flight was finished within `timeout` seconds: then the thread has ended and the lock is
        free. Else both follow when the save ends, and the log is told how it ended."""
        self._signals.remove()
        self._staging.settle()
        finished = self._writer.idle(timeout)
        self._writer.stop(self._session.lock.release if finished else self._let_go, _JOIN if finished else 0.0)
        return finished

    def finalise(self) -> None:
        """Nobody holds the manager any more, or the interpreter exits: the save in flight is waited for. Does nothing
        in a forked child, to which none of it belongs. Never raises: an exit code stays what it was."""
        if os.getpid() != self._pid:
            return
        self._signals.remove()
        if threading.current_thread() is not threading.main_thread():
            # The collector runs on whichever thread allocates: a wait on one that the writer waits for would never end.
            self._staging.settle(wait=False)
            self._writer.stop(self._let_go)
            return
        self._staging.settle()
        finished = self._writer.idle(self._timeout)
        if not finished:
            step, limit = self._session.in_flight, self._timeout
            log.error("step %s is abandoned: its save was not finished within %g s", step, limit)
        self._writer.stop(self._let_go, _JOIN if finished else 0.0)

    def _let_go(self) -> None:
        errors, self._session.errors = self._session.errors, []
        for error in errors:
            log.error("a save failed and nobody asked: %s", error)
        self._session.lock.release()
