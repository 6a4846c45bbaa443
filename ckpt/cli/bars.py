"""A progress bar for what takes long, drawn on stderr and only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.edges.progress import Progress

_PATIENCE = 0.5  # seconds without a bar: what is over by then needs none


@contextmanager
def bar(title: str) -> Iterator[Progress | None]:
    """A callback that draws `title` with bytes, rate and time left; None where there is no terminal to draw on."""
    if not sys.stderr.isatty():
        yield None
        return
    drawing = _Drawing(title)
    try:
        yield drawing.tell
    finally:
        drawing.stop()


class _Drawing:
    def __init__(self, title: str) -> None:
        self._title = title
        self._began = time.monotonic()
        self._bars = None
        self._task = None

    def tell(self, done: int, total: int) -> None:
        if self._bars is None:
            if time.monotonic() - self._began < _PATIENCE:
                return
            self._bars = _rich_bars()
            self._task = self._bars.add_task(self._title, total=total)
            self._bars.start()
        assert self._task is not None
        self._bars.update(self._task, completed=done, total=total)

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()


def _rich_bars():  # noqa: ANN202  (its type would import rich)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
