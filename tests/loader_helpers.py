"""Data sets, runs and the oracle that the loader's tests share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ckpt.data.loader import ResumableLoader


class Noisy:
    """Row i is i and what six draws from the three global generators gave."""

    def __init__(self, length: int = 13) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        python = [random.random(), random.gauss(0, 1)]
        return torch.tensor([index, *python, np.random.rand(), np.random.randn(), *torch.randn(2).tolist()]).double()


class Blocks(Noisy):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        noise = torch.rand(())
        return [torch.stack([torch.tensor(float(i)), noise]) for i in indices]


def ids(batch: torch.Tensor) -> list[int]:
    return (batch if batch.ndim == 1 else batch[:, 0]).long().tolist()


def run(loader: ResumableLoader, epochs: int) -> list[tuple[int, bytes]]:
    """(epoch, bytes) of every batch until epoch `epochs - 1` is over, by the loop over epochs that people write."""
    seen = []
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            seen.append((epoch, batch.numpy().tobytes()))
    return seen


def global_rng() -> tuple:
    state: Any = np.random.get_state()
    return (
        random.getstate(),
        state[1].tobytes(),
        state[2:],
        torch.get_rng_state().numpy().tobytes(),
        torch.initial_seed(),
    )


def check_resume_everywhere(make: Callable[[], ResumableLoader], epochs: int = 2) -> None:
    """The oracle: stopped after any number of batches, a fresh loader goes on with exactly the batches that follow."""
    reference = run(make(), epochs)
    for stop in range(len(reference) + 1):
        loader = make()
        seen: list[tuple[int, bytes]] = []
        while len(seen) < stop:
            epoch = loader.epoch
            for batch in loader:
                seen.append((epoch, batch.numpy().tobytes()))
                if len(seen) == stop:
                    break
        assert seen == reference[:stop], "the batches before the stop"
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert run(resumed, epochs) == reference[stop:], f"the batches after stopping at {stop}"
