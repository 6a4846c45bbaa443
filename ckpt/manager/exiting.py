"""The end of a manager that was not closed: collected, or the interpreter exits."""

from __future__ import annotations

import logging
import os

from ckpt.capture.staging import Staging
from ckpt.manager.session import Session
from ckpt.manager.signals import Signals
from ckpt.manager.writer import Writer

log = logging.getLogger("ckpt")


def end(session: Session, writer: Writer, staging: Staging, signals: Signals, timeout: float, pid: int) -> None:
    """Finishes the save in flight within `timeout` seconds, ends the thread and frees the lock; starts nothing new.

    Does nothing in a forked child, to which none of it belongs. Never raises: an exit code stays what it was.
    """
    if os.getpid() != pid:
        return
    signals.remove()
    staging.settle()
    if writer.is_this_thread():
        # The collector may run on any thread, the writer's too, which cannot wait for itself.
        writer.stop(at_end=session.lock.release)
        return
    if writer.idle(timeout):
        writer.stop(5.0)
        for error in session.errors if session.options.on_failure == "raise" else ():
            log.error("a save failed and nobody asked: %s", error)
    else:
        log.error("step %s is abandoned: its save was not finished within %g s", session.in_flight, timeout)
        writer.stop(0.0)
    session.lock.release()
