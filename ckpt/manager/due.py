"""When a save is due."""

from __future__ import annotations

import time

from ckpt.manager.options import Options


class Schedule:
    """Steps: due when a multiple of N lies in (previous, step]. Minutes: on the monotonic clock since the last started
    save, resume or construction. With neither, every step is due."""

    def __init__(self, options: Options) -> None:
        self._steps = options.save_every_steps
        self._seconds = None if options.save_every_minutes is None else options.save_every_minutes * 60
        self._previous: int | None = None
        self._since = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether `step` is due; it becomes the previous step."""
        previous, self._previous = self._previous, step
        if self._steps is None and self._seconds is None:
            return True
        if self._steps is not None:
            if previous is None and step % self._steps == 0:
                return True
            if previous is not None and step // self._steps > previous // self._steps:
                return True
        return self._seconds is not None and time.monotonic() - self._since >= self._seconds

    def started(self) -> None:
        self._since = time.monotonic()

    def resumed(self, step: int) -> None:
        self._previous = step
        self._since = time.monotonic()
