"""Saving changes nothing in the training: not one bit of it, and not one draw of any random generator (I7)."""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manager_support import Faults, Tiny, faults, manager, resumed

from ckpt import CheckpointManager, ResumableLoader
from ckpt.errors import CheckpointError

pytestmark = pytest.mark.full


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from all three global generators, as augmentation does."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return torch.full((1, 6, 6), index / 20) + noise / 10


class Run:
    """A small training with everything that reads randomness or keeps state: dropout, batch norm, AdamW, cosine."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        np.random.seed(12)
        random.seed(13)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Dropout(0.3),
            torch.nn.Flatten(), torch.nn.Linear(64, 3),
        ).to(memory_format=torch.channels_last)  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.loader = ResumableLoader(Augmented(), 4, seed=3)
        self.fired: list[str] = []
        self.model.register_forward_hook(lambda *_: self.fired.append("forward"))
        self.optimizer.register_step_pre_hook(lambda *_: self.fired.append("step"))
        self.optimizer.register_state_dict_pre_hook(lambda *_: self.fired.append("state_dict"))
        self.feed = iter(())

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader
        }  # fmt: skip

    def step(self) -> None:
        batch = next(self.feed, None)
        if batch is None:
            self.feed = iter(self.loader)
            batch = next(self.feed)
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def dump(self, hooks: bool = True) -> list[Any]:
        rows: list[Any] = [bits(t) for t in self.model.state_dict().values()]
        rows += [bits(p.grad) for p in self.model.parameters() if p.grad is not None]
        rows += [bits(v) for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        rows += [self.scheduler.get_last_lr(), self.loader.state_dict(), *everything_random()]
        rows += [list(self.fired)] if hooks else []
        rows += [(p.requires_grad, p.stride(), p.grad_fn) for p in self.model.parameters()]
        return rows


def everything_random() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), kind, np.asarray(keys).tobytes(), rest, bits(torch.get_rng_state())]


PLANS: dict[str, dict[str, Any]] = {
    "eager": dict(async_save=False),
    "async": dict(),
    "every second step": dict(save_every_steps=2),
    "skip": dict(when_busy="skip"),
    "into memory": dict(async_save=False),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("first", [False, True])
def test_training_with_and_without_saves_is_bit_identical(tmp_path: Path, plan: str, first: bool) -> None:
    """I7: saving in each way, and once before the first step: no hook fires, no state is made, nothing is drawn."""
    alone = Run()
    for _ in range(12):
        alone.step()
    run = Run()
    root = f"memory://t-{uuid.uuid4().hex}" if plan == "into memory" else tmp_path
    with CheckpointManager(root, run.state, **PLANS[plan]) as made:
        assert made.resume() == 0
        if first:
            before = run.dump()
            made.save(0, force=True)
            assert run.dump() == before and not run.optimizer.state
        for step in range(1, 13):
            run.step()
            before = run.dump()
            made.save(step, metrics={"loss": 1.0})
            assert run.dump() == before
    assert run.dump() == alone.dump()


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The seam: twelve steps in one go, and in three processes' worth of objects."""
    alone = Run()
    for _ in range(12):
        alone.step()
    end = alone.dump(hooks=False)
    run = Run()
    for stop in (3, 7, 12):
        run = Run()
        with CheckpointManager(tmp_path, run.state, async_save=False) as made:
            start = made.resume()
            if start:
                run.feed = iter(run.loader)
                made.restore_rng()
            for step in range(start + 1, stop + 1):
                run.step()
                made.save(step)
    assert run.dump(hooks=False) == end


VERBS = [verb for verb in Faults.VERBS if verb != "free_bytes"]


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("verb", VERBS)
def test_no_global_generator_moves_around_saves_loads_and_retention_under_any_fault(
    tmp_path: Path, place: str, verb: str
) -> None:
    """I7: no random draw in any thread, by us or a library of ours, whatever fails."""
    root = str(tmp_path) if place == "local" else f"memory://t-{uuid.uuid4().hex}"
    tiny = Tiny()
    with faults() as fault:
        for nth in (0, 1, 3):
            made = manager(root, tiny, keep_last=1, keep_best=1, monitor="m")
            before = everything_random()
            try:
                start = made.resume()
                random.setstate(before[0])
                np.random.seed(5)
                torch.manual_seed(5)
                before = everything_random()
                fault.arm(verb, nth)
                for step in range(start + 1, start + 4):
                    try:
                        made.save(step if tiny.at(step) else 0, metrics={"m": float(step)})
                        made.wait()
                        made.pin(step, "x")
                        made.unpin(step)
                        made.steps()
                    except CheckpointError:
                        continue
                assert everything_random() == before
            finally:
                fault.off()
                made.close()
            assert everything_random() == before


def test_no_global_generator_moves_while_a_resume_falls_back(tmp_path: Path) -> None:
    """A resume that finds nothing sound leaves every generator where it was."""
    tiny = Tiny()
    with manager(tmp_path, tiny, async_save=False) as made:
        made.save(1)
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = everything_random()
    with manager(tmp_path, tiny) as made:
        with pytest.raises(CheckpointError):
            made.resume()
    assert everything_random() == before


def test_train_and_eval_mode_and_frozen_flags_are_not_touched_by_a_save(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    model[0].weight.requires_grad_(False)
    model[0].eval()
    with CheckpointManager(tmp_path, {"m": model}) as made:
        made.save(1)
    assert not model[0].training and model[1].training and not model[0].weight.requires_grad


def test_the_graph_of_a_backward_pass_survives_a_save_in_its_middle(tmp_path: Path) -> None:
    """A save between forward and backward must not count as a change of the weights."""
    model = torch.nn.Linear(3, 1)
    with CheckpointManager(tmp_path, {"m": model}) as made:
        loss = model(torch.ones(2, 3)).pow(2).sum()
        made.save(1)
        loss.backward()
    assert model.weight.grad is not None


def test_no_process_wide_state_is_adopted(tmp_path: Path) -> None:
    """No handler, no seed, no environment, no working folder, no default of torch."""
    import os
    import signal

    def look() -> list[Any]:
        return [
            {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)},
            dict(os.environ), os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), os.umask(0o22),
        ]  # fmt: skip

    os.umask(0o22)
    before = look()
    with manager(tmp_path, Tiny(1)) as made:
        made.resume()
        made.save(1)
        assert look() == before
    assert look() == before and resumed(tmp_path) == 1
