"""The global generators of python, numpy and torch (CPU) as functions of (seed, epoch, position).

Datasets draw augmentation from these three without being asked, in whichever process a batch is fetched. Seeding
them for each sample makes the draw independent of the worker, of the prefetch and of every sample before it.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import torch

from ckpt.data.order import DOMAIN_BATCH, DOMAIN_SAMPLE, DOMAIN_WORKER, GOLDEN, absorb, fold, mix

try:
    import numpy
except ImportError:
    numpy = None

_MASK = (1 << 64) - 1


def seed_globals(base: int) -> None:
    """Seeds python's, numpy's and torch's global CPU generators from the 64-bit `base`, each from its own word."""
    random.seed(mix((base + GOLDEN) & _MASK))
    if numpy is not None:
        numpy.random.seed(mix((base + 2 * GOLDEN) & _MASK) >> 32)
    # Not torch.manual_seed: that queues a seed for every accelerator as well, and costs ten times as much.
    torch.default_generator.manual_seed(mix((base + 3 * GOLDEN) & _MASK))


class Seeds:
    """The seed words of one (seed, epoch)."""

    __slots__ = ("_batch", "_sample", "worker")

    def __init__(self, seed: int, epoch: int) -> None:
        self._sample = fold(DOMAIN_SAMPLE, seed, epoch)
        self._batch = fold(DOMAIN_BATCH, seed, epoch)
        # torch adds the worker's number to it and takes the sum as a signed 64-bit seed.
        self.worker = fold(DOMAIN_WORKER, seed, epoch) >> 2

    def sample(self, position: int) -> int:
        """The base word of the sample at `position` of the epoch."""
        return absorb(self._sample, position)

    def batch(self, position: int) -> int:
        """The base word of what is done once for a whole batch whose first sample is at `position`."""
        return absorb(self._batch, position)


class GlobalGenerators:
    """A context that puts the three global generators back, whatever the body drew or raised.

    For fetches in the training process: without it the model's dropout would go on from a sample's seed.
    """

    __slots__ = ("_numpy", "_python", "_torch")

    def __enter__(self) -> GlobalGenerators:
        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state(legacy=False) if numpy is not None else None
        self._torch = torch.default_generator.get_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        random.setstate(self._python)
        if numpy is not None:
            numpy.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
