"""The background thread that carries one save at a time from the host buffer to a durable step."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writer:
    """Runs one job at a time on a daemon thread of its own, made by the first job: an executor could not be used any
    more while the interpreter ends."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._busy = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._at_end: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        return self._busy

    def submit(self, job: Callable[[], None]) -> None:
        """Hands over `job`, which never raises; the writer must be idle. Where no thread can be started (the
        interpreter is ending, or the process may have no more), the job is done before this returns."""
        with self._change:
            assert not self._busy, "one save in flight"
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ckpt-writer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    job()
                    return
                self._thread = thread
            self._busy = True
            self._job = job
            self._change.notify_all()

    def idle(self, timeout: float | None) -> bool:
        """Waits until nothing is in flight; False when `timeout` seconds passed first."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with self._change:
            return self._change.wait_for(lambda: not self._busy, timeout)

    def is_this_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def stop(self, timeout: float | None = None, at_end: Callable[[], None] | None = None) -> None:
        """Ends the thread after the job in flight, waiting for it at most `timeout` seconds. No-op when there is none.
        `at_end` is the last thing the thread does."""
        with self._change:
            if at_end is not None:
                self._at_end.append(at_end)
            self._stopping = True
            self._change.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._job is not None or self._stopping)
                job, self._job = self._job, None
                if job is None:
                    break
            try:
                job()
            finally:
                # The job holds the staged image: kept here it would outlive the next one's.
                del job
                with self._change:
                    self._busy = False
                    self._change.notify_all()
        for action in self._at_end:
            action()
