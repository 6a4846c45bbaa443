"""The one way a thread of this package comes to run."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start(work: Callable[[], None], name: str) -> threading.Thread | None:
    """A daemon thread that runs `work`; None where none can be started: the interpreter is ending, the process may have
    no more of them, or there is no memory for its stack. The caller then does without, or does the work itself."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread
