"""A small training that has everything a resume must bring back, and campaigns over it in forked children."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt import CheckpointManager, ResumableLoader, StateDict
from ckpt.chaos.campaign import Campaign, Settings
from ckpt.chaos.launch import ForkLauncher
from ckpt.chaos.outcome import Outcome
from ckpt.chaos.runs import Run


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """`length` samples, each with noise from all three global generators."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return torch.full((6,), index / self.length) + torch.rand(6) * 0.1 + noise * 0.01


class Momentum(torch.optim.Optimizer):
    """SGD with momentum kept in float32 whatever the parameters are."""

    def __init__(self, params: Any, lr: float) -> None:
        # Optimizer.load_state_dict adds "differentiable" to the defaults of an optimizer that lacks it.
        super().__init__(params, {"lr": lr, "differentiable": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros(p.shape, dtype=torch.float32))
                average.mul_(0.9).add_(p.grad.float())
                p.add_(average.to(p.dtype), alpha=-group["lr"])


class Training:
    """Called, it trains `steps` optimizer steps of 4 samples, saving after every `every`-th, and resumes what is there.

    An epoch has five batches, so that kills and saves fall into the middle of epochs. `before` is called first, in the
    process that trains.
    """

    def __init__(
        self, steps: int = 16, every: int = 2, *, root: str = "runs/small", before: Callable[[], None] | None = None,
        workers: int = 0, **manager: Any,
    ) -> None:  # fmt: skip
        self.steps, self.every, self.root, self.before, self.workers = steps, every, root, before, workers
        self.manager = manager

    def state(self) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        model = nn.Sequential(first, nn.Dropout(0.2), second, nn.BatchNorm1d(6))
        half = nn.Linear(6, 1).to(torch.bfloat16)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        momentum = Momentum(half.parameters(), lr=1e-2)
        return {
            "model": model,
            "half": half,
            "adam": adam,
            "momentum": momentum,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=30),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
            "loader": ResumableLoader(Noisy(), 4, seed=5, num_workers=self.workers),
            "best": StateDict(loss=float("inf"), count=0),
        }

    def __call__(self) -> None:
        if self.before is not None:
            self.before()
        torch.set_num_threads(1)
        state = self.state()
        with CheckpointManager(self.root, state, save_every_steps=self.every, **self.manager) as manager:
            for _step, batch in manager.loop(self.steps, state["loader"]):
                train_step(state, batch)


def train_step(state: dict[str, Any], batch: torch.Tensor) -> None:
    noise = random.random() + float(np.random.rand())
    hidden = state["model"](batch) * (1 + 0.1 * noise)
    loss = state["half"](hidden.to(torch.bfloat16)).float().square().mean() + hidden.square().mean()
    for optimizer in (state["adam"], state["momentum"]):
        optimizer.zero_grad()
    scaler = state["scaler"]
    scaler.scale(loss).backward()
    # Visible in the weights: what the scale was when this step was taken.
    state["adam"].param_groups[0]["weight_decay"] = 1e-6 * scaler.get_scale()
    scaler.step(state["adam"])
    scaler.step(state["momentum"])
    scaler.update()
    state["scheduler"].step()
    state["best"]["loss"] = min(state["best"]["loss"], loss.item())
    state["best"]["count"] += 1


def warm_up() -> None:
    """Imports all that a training imports only when it runs, once and for all forked children."""
    with folder() as work:
        Training(2, root=str(work))()


@contextmanager
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: a SIGKILL loses nothing that was written, so disks only cost time."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="ckpt-test-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def campaign(train: Callable[[], object], work: Path, **settings: Any) -> Outcome:
    return Campaign(ForkLauncher(train), Settings(**{"seed": 1, "timeout": 120.0, **settings}), work).run()


def run_of(train: Callable[[], object], path: Path) -> Run:
    return Run(ForkLauncher(train), path, threading.Event())
