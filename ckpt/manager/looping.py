"""Iterating a training loop: which batch comes next, and the random numbers as they were."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

log = logging.getLogger("ckpt")


class Batches:
    """Batches of `loader`, epoch after epoch. `restore` is called after each iterator was made: making one draws from
    the global RNG, so the state that was saved is put back only then."""

    def __init__(self, loader: Iterable[Any], restore: Callable[[], None]) -> None:
        self._loader = loader
        self._restore = restore
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Any:
        """The next batch; goes through epochs. ValueError when two whole epochs in a row hold no batch: one may, when
        the loader was saved at an epoch's end."""
        empty = 0
        while empty < 2:
            whole = self._iterator is None
            if self._iterator is None:
                self._iterator = iter(self._loader)
                self._restore()
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
                empty += whole
        raise ValueError("the loader gave no batch in two epochs: its dataset is empty, or smaller than one batch")


def epoch(loader: Iterable[Any], restore: Callable[[], None]) -> Iterator[Any]:
    """One pass over `loader`."""
    iterator = iter(loader)
    restore()
    yield from iterator


def remembers(loader: Any) -> bool:
    """True for a loader that can tell and take its position."""
    pairs = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
    return any(all(callable(getattr(loader, name, None)) for name in pair) for pair in pairs)
