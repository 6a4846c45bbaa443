"""The background thread that carries one save at a time from the host buffer to a durable step."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt import threads


class Writer:
    """Runs one job at a time on a daemon thread of its own, made by the first job: an executor could not be used any
    more while the interpreter ends."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._job: Callable[[], None] | None = None  # handed over, not begun
        self._running = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._at_end: list[Callable[[], None]] = []
        self.begun = 0  # jobs begun so far

    @property
    def busy(self) -> bool:
        return self._running or self._job is not None

    def submit(self, job: Callable[[], None]) -> None:
        """Hands over `job`, which never raises; the writer must be idle. Where no thread can be started, the job is
        done before this returns. Interrupted, it has handed the job over if `busy` or `begun` says so."""
        with self._change:
            if self._thread is None or not self._thread.is_alive():
                self._thread = None if self._stopping else threads.start(self._run, "ckpt-writer")
            if self._thread is not None:
                self._job = job
                self._change.notify_all()
                return
        # Not under the condition: whoever waits for this job elsewhere has a deadline.
        self._carry(job)

    def idle(self, timeout: float | None) -> bool:
        """Waits until nothing is in flight; False when `timeout` seconds passed first."""
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with self._change:
            return self._change.wait_for(lambda: not self.busy, timeout)

    def stop(self, at_end: Callable[[], None], wait: float = 0.0) -> None:
        """Ends the thread after the job in flight, and waits for that at most `wait` seconds. `at_end` is called once
        nothing is in flight any more: now, or as the last thing the thread does."""
        with self._change:
            self._at_end.append(at_end)
            self._stopping = True
            self._change.notify_all()
            thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            self._finish()
        elif wait and thread is not threading.current_thread():
            thread.join(wait)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._job is not None or self._stopping)
                if self._job is None:
                    break
                # Begun before it is no more in hand: `busy` never says no in between.
                self._running = True
                job, self._job = self._job, None
            self._carry(job)
            # The job holds the staged image: kept here it would outlive the next one's.
            del job
        self._finish()

    def _carry(self, job: Callable[[], None]) -> None:
        try:
            with self._change:
                self._running = True
                self.begun += 1
            job()
        finally:
            with self._change:
                self._running = False
                self._change.notify_all()
            if self._stopping and self._thread is None:
                self._finish()

    def _finish(self) -> None:
        with self._change:
            if self.busy:
                return
            actions, self._at_end = self._at_end, []
        for action in actions:
            action()
