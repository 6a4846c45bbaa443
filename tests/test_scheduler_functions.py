"""What a scheduler's functions may be and hold: state of callable objects is kept, references are not followed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_support import Net, bits, optimizer_bits, resume, save, train
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

pytestmark = pytest.mark.quick


def run(function: Callable[[Net, torch.optim.Optimizer], Any]) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, lrs.LambdaLR(optimizer, function(model, optimizer))


def advance(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
        seen.append(bits(optimizer.param_groups[0]["lr"]))
    return seen


def seam(function: Callable[[Net, torch.optim.Optimizer], Any]) -> tuple[Any, Any, str]:
    """(scheduler before, scheduler after, what was stored), once both have gone on alike."""
    model, optimizer, scheduler = run(function)
    advance(model, optimizer, scheduler, range(3))
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    other = run(function)
    plan = resume(stored, model=other[0], optimizer=other[1], scheduler=other[2])
    assert plan.changes == []
    assert optimizer_bits(other[1]) == optimizer_bits(optimizer)
    assert advance(*other, range(3, 8)) == advance(model, optimizer, scheduler, range(3, 8))
    return scheduler, other[2], json.dumps(json.loads(stored.text)["values"]["scheduler"])


class Decay:
    """Counts its calls, and refers to whatever it is given."""

    def __init__(self, **held: Any) -> None:
        self.calls = 0
        vars(self).update(held)

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


def test_models_and_optimizers_are_references_and_stay_untouched() -> None:
    before, after, text = seam(lambda model, optimizer: Decay(model=model, optimizer=optimizer))
    own = after.lr_lambdas[0]
    assert isinstance(own.model, Net) and own.model is not before.lr_lambdas[0].model
    assert own.optimizer is after.optimizer
    assert "weight" not in text
    assert own.calls == before.lr_lambdas[0].calls


def test_an_object_that_refers_to_its_scheduler_ends() -> None:
    def function(model: Net, optimizer: torch.optim.Optimizer) -> Decay:
        return Decay()

    model, optimizer, scheduler = run(function)
    scheduler.lr_lambdas[0].scheduler = scheduler
    scheduler.lr_lambdas[0].me = scheduler.lr_lambdas[0]
    advance(model, optimizer, scheduler, range(3))
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    other = run(function)
    other[2].lr_lambdas[0].scheduler = other[2]
    other[2].lr_lambdas[0].me = other[2].lr_lambdas[0]
    resume(stored, model=other[0], optimizer=other[1], scheduler=other[2])
    assert other[2].lr_lambdas[0].scheduler is other[2]
    assert advance(*other, range(3, 6)) == advance(model, optimizer, scheduler, range(3, 6))


def test_objects_inside_a_callable_objects_containers_are_filled_in_place() -> None:
    def function(model: Net, optimizer: torch.optim.Optimizer) -> Decay:
        inner = Decay()
        return Decay(parts=[inner, 5, {"inner": Decay(at=2), "shape": abs}], history=[1.0], mean=torch.tensor(2.0))

    before, after, _ = seam(function)
    then, now = before.lr_lambdas[0], after.lr_lambdas[0]
    assert isinstance(now.parts[0], Decay) and now.parts[2]["shape"] is abs
    assert (now.parts[0].calls, now.parts[2]["inner"].at, now.history) == (0, 2, [1.0])
    assert bits(now.mean) == bits(then.mean)


def test_names_that_a_decorator_copies_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    class Counted:
        def __init__(self, function: Callable[[int], float]) -> None:
            functools.update_wrapper(self, function)
            self.function, self.calls = function, 0

        def __call__(self, step: int) -> float:
            self.calls += 1
            return self.function(step) / self.calls

    def slow(step: int) -> float:
        return 0.9**step

    before, after, text = seam(lambda *_: Counted(slow))
    assert after.lr_lambdas[0].calls == before.lr_lambdas[0].calls == 9
    assert __name__ not in text and "slow" not in text
    seam(lambda *_: functools.lru_cache(slow))
    assert caplog.records == []


def test_an_object_whose_values_are_in_slots_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Slotted:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, step: int) -> float:
            self.calls += 1
            return 1.0

    model, optimizer, scheduler = run(lambda *_: Slotted())
    save(model=model, optimizer=optimizer, scheduler=scheduler)
    assert "lr function is not captured (lr_lambdas/0: its attribute of type Slotted has no stored form)" in caplog.text


def test_a_scheduler_that_holds_the_model_neither_stores_nor_replaces_it() -> None:
    class Watching(lrs.ExponentialLR):
        def __init__(self, optimizer: torch.optim.Optimizer, model: Net) -> None:
            self.model = model
            super().__init__(optimizer, 0.9)

    model, again = Net(), Net()
    scheduler = Watching(torch.optim.SGD(model.parameters(), lr=0.1), model)
    other = Watching(torch.optim.SGD(again.parameters(), lr=0.1), again)
    stored = save(model=model, optimizer=scheduler.optimizer, scheduler=scheduler)
    assert not any(name.startswith("scheduler/") for name in stored.data)
    resume(stored, model=again, optimizer=other.optimizer, scheduler=other)
    assert other.model is again


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (
            lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.7, cycle_momentum=False),
            lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2", gamma=0.7, cycle_momentum=False),
        ),
        (
            lambda o: SWALR(o, 0.05, anneal_epochs=6, anneal_strategy="linear"),
            lambda o: SWALR(o, 0.05, anneal_epochs=6, anneal_strategy="cos"),
        ),
    ],
)
def test_a_function_chosen_by_a_name_follows_the_saved_name(then: Any, now: Any) -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(again.parameters(), lr=0.1)
    scheduler, other = then(optimizer), now(fresh)
    advance(model, optimizer, scheduler, range(3))
    plan = resume(save(m=model, o=optimizer, s=scheduler), m=again, o=fresh, s=other)
    assert plan.changes == []
    assert advance(again, fresh, other, range(3, 9)) == advance(model, optimizer, scheduler, range(3, 9))
