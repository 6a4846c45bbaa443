"""Averaged weights: what torch's AveragedModel and an EMA of one's own count goes on with the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture_support import Net, optimizer_bits, parameter_bits, resume, save, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pytestmark = pytest.mark.quick


class Ema:
    """An average with a warm-up: the weight of a step depends on a plain counter."""

    def __init__(self, model: Net) -> None:
        self.updates = 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: Net) -> None:
        self.updates += 1
        decay = min(0.9, self.updates / (10 + self.updates))
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.shadow = state["updates"], state["shadow"]


def build(kind: str) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net()
    averages = {
        "swa": lambda: AveragedModel(model),
        "ema": lambda: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        "own": lambda: Ema(model),
    }
    return model, torch.optim.Adam(model.parameters(), lr=0.1), averages[kind]()


def advance(model: Net, optimizer: torch.optim.Optimizer, average: Any, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        train(model, optimizer, range(step, step + 1))
        if isinstance(average, Ema):
            average.update(model)
            seen.append((average.updates, {name: p.numpy().tobytes() for name, p in average.shadow.items()}))
        else:
            average.update_parameters(model)
            seen.append(parameter_bits(average))
    return seen


@pytest.mark.parametrize("kind", ["swa", "ema", "own"])
@pytest.mark.parametrize("steps", [0, 3])
def test_an_average_and_its_counter_go_on(kind: str, steps: int) -> None:
    """AUX-07"""
    model, optimizer, average = build(kind)
    advance(model, optimizer, average, range(steps))
    stored = save(model=model, optimizer=optimizer, average=average)
    assert not any("average" in name for name in stored.data if name.startswith("optimizer/"))
    other = build(kind)
    advance(*other, range(30, 32))
    resume(stored, model=other[0], optimizer=other[1], average=other[2])
    assert optimizer_bits(other[1]) == optimizer_bits(optimizer)
    assert advance(*other, range(steps, steps + 5)) == advance(model, optimizer, average, range(steps, steps + 5))


def test_a_counter_that_is_not_in_the_state_shows_in_the_comparison() -> None:
    """AUX-07: the oracle of this file fails an EMA that keeps its counter back."""

    class Forgetful(Ema):
        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    model, optimizer, _ = build("own")
    average = Forgetful(model)
    advance(model, optimizer, average, range(3))
    stored = save(model=model, optimizer=optimizer, average=average)
    again, fresh, _ = build("own")
    other = Forgetful(again)
    resume(stored, model=again, optimizer=fresh, average=other)
    assert advance(again, fresh, other, range(3, 6)) != advance(model, optimizer, average, range(3, 6))
