"""The end of a manager that was not closed: collected, or the interpreter exits."""

from __future__ import annotations

import logging
import os

from ckpt.capture.staging import Staging
from ckpt.manager.session import Session
from ckpt.manager.writer import Writer

log = logging.getLogger("ckpt")


def end(session: Session, writer: Writer, staging: Staging, timeout: float, pid: int) -> None:
    """Finishes the save in flight within `timeout` seconds, ends the thread and frees the lock; starts nothing new.

    Does nothing in a forked child, to which none of it belongs. Never raises: an exit code stays what it was.
    """
    if os.getpid() != pid:
        return
    staging.settle()
    if writer.idle(timeout):
        writer.stop(5.0)
        for error in session.errors:
            log.error("a save failed and nobody asked: %s", error)
    else:
        log.error("step %s is abandoned: its save was not finished within %g s", session.in_flight, timeout)
    session.lock.release()
