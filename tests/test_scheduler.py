"""Schedulers: their whole state goes back, functions stay the script's, and the live LR is the saved one."""

from __future__ import annotations

import functools
import json
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_support import Net, bits, optimizer_bits, registry, resume, save, save_registry, train
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from ckpt.errors import StateMismatchError

pytestmark = pytest.mark.quick

Build = Callable[[torch.optim.Optimizer], Any]


def run(build: Build, **options: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    return model, optimizer, build(optimizer)


def advance(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
        seen.append(bits([group["lr"] for group in optimizer.param_groups]))
    return seen


def both(build: Build, steps: int, again: Build | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """(plan, LRs of the uninterrupted run, LRs of the resumed one) for the eight steps after a save."""
    model, optimizer, scheduler = run(build, **options)
    advance(model, optimizer, scheduler, range(steps))
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    other = run(again or build, **options)
    plan = resume(stored, model=other[0], optimizer=other[1], scheduler=other[2])
    assert optimizer_bits(other[1]) == optimizer_bits(optimizer)
    more = range(steps, steps + 8)
    return plan, advance(model, optimizer, scheduler, more), advance(*other, more)


def nested(optimizer: torch.optim.Optimizer) -> Any:
    phases = [lrs.ConstantLR(optimizer, 0.5, 2), lrs.LinearLR(optimizer, 0.1, total_iters=3), lrs.StepLR(optimizer, 2)]
    return lrs.ChainedScheduler([lrs.SequentialLR(optimizer, phases, [2, 5]), lrs.ExponentialLR(optimizer, 0.9)])


@pytest.mark.parametrize("steps", range(9))
def test_nested_phases_resume_in_the_right_phase_at_every_step(steps: int) -> None:
    """SCHED-03"""
    _, expected, got = both(nested, steps)
    assert got == expected


@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_a_chain_of_schedulers_resumes_exactly(steps: int) -> None:
    """SCHED-03"""

    def build(optimizer: torch.optim.Optimizer) -> Any:
        return lrs.ChainedScheduler([lrs.ConstantLR(optimizer, 0.1, 3), lrs.StepLR(optimizer, 2, 0.5)], optimizer)

    _, expected, got = both(build, steps)
    assert got == expected


class Warmup:
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls = 0
        self.shape = math.sqrt  # a function among its attributes is the script's too

    def __call__(self, step: float) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / self.steps) / (1 + self.calls)

    def method(self, step: int) -> float:
        return 1 / (step + self.steps)


def plain(step: int, base: float = 0.9) -> float:
    return base**step


def closure(gamma: float) -> Callable[[int], float]:
    return lambda step: gamma**step


FUNCTIONS: dict[str, Build] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "closure": lambda o: lrs.LambdaLR(o, closure(0.8)),
    "function": lambda o: lrs.LambdaLR(o, plain),
    "builtin": lambda o: lrs.LambdaLR(o, math.atan),
    "partial": lambda o: lrs.LambdaLR(o, functools.partial(plain, base=0.7)),
    "bound method": lambda o: lrs.LambdaLR(o, Warmup(3).method),
    "callable object": lambda o: lrs.LambdaLR(o, Warmup(3)),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.5**x, scale_mode="iterations"),
    "cyclic of a callable object": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Warmup(2)),
    "cyclic by name": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, closure(0.97)),
    "annealed by name": lambda o: SWALR(o, 0.05, anneal_epochs=4, anneal_strategy="linear"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_every_kind_are_saved_past_and_the_schedule_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SCHED-04"""
    plan, expected, got = both(FUNCTIONS[name], 4)
    assert got == expected
    assert plan.changes == [] and plan.notes == []
    assert caplog.records == []


def test_a_callable_objects_values_are_state() -> None:
    """SCHED-04"""
    model, optimizer, scheduler = run(lambda o: lrs.LambdaLR(o, Warmup(3)))
    advance(model, optimizer, scheduler, range(5))
    other = run(lambda o: lrs.LambdaLR(o, Warmup(3)))
    held = other[2].lr_lambdas[0]
    resume(save(model=model, optimizer=optimizer, s=scheduler), model=other[0], optimizer=other[1], s=other[2])
    assert other[2].lr_lambdas[0] is held
    assert held.calls == scheduler.lr_lambdas[0].calls == 6


def test_a_changed_function_is_a_warning_and_a_reason_why_the_run_is_not_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SCHED-04"""
    plan, *_ = both(
        lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
        3,
        again=lambda o: lrs.LambdaLR(o, lambda step: 0.9 ** (step + 1)),
    )
    assert plan.changes == ["the function lr_lambdas/0 of scheduler changed"]
    assert "its code changed" in plan.notes[-1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    plan, *_ = both(lambda o: lrs.LambdaLR(o, closure(0.8)), 3, again=lambda o: lrs.LambdaLR(o, closure(0.7)))
    assert "the values it reads changed" in plan.notes[-1]


def test_a_closure_over_a_changing_value_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """SCHED-05"""
    held = {"scale": 1.0}
    model, optimizer, scheduler = run(lambda o: lrs.LambdaLR(o, lambda step: held["scale"]))
    made = registry(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in range(3):
        held["scale"] *= 0.9
        advance(model, optimizer, scheduler, range(step, step + 1))
        save_registry(made)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "lr function is not captured (lr_lambdas/0: closure variable 'held', a dict)" in texts[0]
    assert "register()" in texts[0]


def test_a_value_that_was_seen_to_move_is_told_though_it_looks_constant(caplog: pytest.LogCaptureFixture) -> None:
    """SCHED-05"""
    scale = 1.0
    model, optimizer, scheduler = run(lambda o: lrs.LambdaLR(o, lambda step: scale))
    made = registry(model=model, optimizer=optimizer, scheduler=scheduler)
    save_registry(made)
    assert caplog.records == []
    scale = 0.5
    save_registry(made)
    assert "values it reads have changed" in caplog.text


def test_a_callable_object_holding_what_cannot_be_stored_saves_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """SCHED-05"""

    class Drawn(Warmup):
        def __init__(self) -> None:
            super().__init__(3)
            self.source = iter([1.0, 2.0])

    _, expected, got = both(lambda o: lrs.LambdaLR(o, Drawn()), 2)
    assert "lr_lambdas/0/source: its attribute of type list_iterator has no stored form" in caplog.text
    assert got == expected


def test_a_cosine_restart_keeps_its_inner_counters() -> None:
    """SCHED-07"""
    model, optimizer, scheduler = run(lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2))
    advance(model, optimizer, scheduler, range(5))
    scheduler._step_count = 41
    other = run(lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2))
    resume(save(model=model, o=optimizer, s=scheduler), model=other[0], o=other[1], s=other[2])
    own, there = (
        {key: bits(value) for key, value in vars(s).items() if key != "optimizer"} for s in (other[2], scheduler)
    )
    assert own == there
    assert (own["_step_count"], own["T_cur"], own["T_i"]) == (("int", 41), ("int", 2), ("int", 6))


def test_a_longer_schedule_of_the_script_is_told_and_can_be_kept() -> None:
    """SCHED-08"""
    model, optimizer, scheduler = run(lambda o: lrs.CosineAnnealingLR(o, 9))
    advance(model, optimizer, scheduler, range(5))
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    other = run(lambda o: lrs.CosineAnnealingLR(o, 15))
    objects = {"model": other[0], "optimizer": other[1], "scheduler": other[2]}
    plan = resume(stored, **objects)
    assert other[2].T_max == 9
    assert ["scheduler/T_max is 9 in the checkpoint and 15 in the script" in note for note in plan.notes] == [True]
    other = run(lambda o: lrs.CosineAnnealingLR(o, 15))
    objects = {"model": other[0], "optimizer": other[1], "scheduler": other[2]}
    plan = resume(stored, override={"scheduler": ("T_max",)}, **objects)
    assert (other[2].T_max, other[2].last_epoch, plan.notes) == (15, 5, [])
    assert plan.changes == ["T_max of scheduler is the script's"]
    with pytest.raises(StateMismatchError, match="override names 'T_maxx'"):
        resume(stored, override={"scheduler": ("T_maxx",)}, **objects)


def test_a_tensor_lr_is_restored_bit_for_bit_and_stays_the_same_tensor() -> None:
    model, optimizer, scheduler = run(lambda o: lrs.ExponentialLR(o, 0.9), lr=torch.tensor(0.1), foreach=False)
    advance(model, optimizer, scheduler, range(4))
    other = run(lambda o: lrs.ExponentialLR(o, 0.9), lr=torch.tensor(0.1), foreach=False)
    held = other[1].param_groups[0]["lr"]
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    resume(stored, model=other[0], optimizer=other[1], scheduler=other[2])
    assert other[1].param_groups[0]["lr"] is held
    assert bits(held) == bits(optimizer.param_groups[0]["lr"])
    assert advance(*other, range(4, 8)) == advance(model, optimizer, scheduler, range(4, 8))


def test_no_warning_of_torch_follows_a_resume_before_the_first_scheduler_step() -> None:
    model, optimizer, scheduler = run(lambda o: lrs.StepLR(o, 2))
    train(model, optimizer, range(3))  # the scheduler steps once an epoch, and the save is inside the first
    other = run(lambda o: lrs.StepLR(o, 2))
    resume(save(m=model, o=optimizer, s=scheduler), m=other[0], o=other[1], s=other[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other[2].step()


def test_no_scheduler_steps_during_a_save_or_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, scheduler = run(nested)
    advance(model, optimizer, scheduler, range(4))
    other = run(nested)
    monkeypatch.setattr(lrs.LRScheduler, "step", lambda *_: pytest.fail("a scheduler was stepped"))
    monkeypatch.setattr(lrs.SequentialLR, "step", lambda *_: pytest.fail("a scheduler was stepped"))
    resume(save(m=model, o=optimizer, s=scheduler), m=other[0], o=other[1], s=other[2])
    assert optimizer_bits(other[1]) == optimizer_bits(optimizer)


def test_another_kind_of_scheduler_is_refused_by_its_names() -> None:
    model, optimizer, scheduler = run(lambda o: lrs.StepLR(o, 3))
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    other = run(lambda o: lrs.CosineAnnealingLR(o, 9))
    with pytest.raises(StateMismatchError) as caught:
        resume(stored, model=other[0], optimizer=other[1], scheduler=other[2])
    assert set(caught.value.missing) == {"scheduler/T_max", "scheduler/eta_min"}
    assert set(caught.value.unexpected) == {"scheduler/step_size", "scheduler/gamma"}


class Own(lrs.ExponentialLR):
    """A scheduler that overrides its pair and keeps a function in its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 0.9)
        self.loads = 0
        self.shape = lambda x: x

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.last_epoch, "steps": self._step_count, "last": self._last_lr, "shape": self.shape}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads += 1
        self.last_epoch, self._step_count = state_dict["epoch"], state_dict["steps"]
        self._last_lr, self.shape = state_dict["last"], state_dict["shape"]


def test_a_scheduler_that_overrides_its_pair_is_asked_through_it() -> None:
    model, optimizer, scheduler = run(Own)
    advance(model, optimizer, scheduler, range(3))
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    assert json.loads(stored.text)["values"]["scheduler"]["shape"] is None
    other = run(Own)
    shape = other[2].shape
    resume(stored, model=other[0], optimizer=other[1], scheduler=other[2])
    assert (other[2].loads, other[2].last_epoch) == (1, 3)
    assert other[2].shape is shape
    assert advance(*other, range(3, 7)) == advance(model, optimizer, scheduler, range(3, 7))


def test_plateau_counts_and_its_best_value_go_on() -> None:
    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
        return optimizer, lrs.ReduceLROnPlateau(optimizer, patience=2, cooldown=1)

    losses = [1.0, 0.9, 0.95, 0.97, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99]
    optimizer, scheduler = build()
    for loss in losses[:4]:
        scheduler.step(loss)
    other, again = build()
    resume(save(o=optimizer, s=scheduler), o=other, s=again)
    for loss in losses[4:]:
        scheduler.step(loss)
        again.step(loss)
        assert bits(vars(again)["best"]) == bits(vars(scheduler)["best"])
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_a_schedule_one_step_off_is_seen() -> None:
    """The oracle of these tests fails a scheduler that is off by one."""
    model, optimizer, scheduler = run(nested)
    advance(model, optimizer, scheduler, range(4))
    stored = save(model=model, optimizer=optimizer, scheduler=scheduler)
    tree = json.loads(stored.text)
    tree["values"]["scheduler"]["_schedulers"][0]["last_epoch"] -= 1
    stored.text = json.dumps(tree)
    other = run(nested)
    resume(stored, model=other[0], optimizer=other[1], scheduler=other[2])
    assert advance(*other, range(4, 12)) != advance(model, optimizer, scheduler, range(4, 12))


def test_logging_goes_to_the_packages_logger_only(caplog: pytest.LogCaptureFixture) -> None:
    cell = [1.0]
    model, optimizer, scheduler = run(lambda o: lrs.LambdaLR(o, lambda step: cell[0]))
    with caplog.at_level(logging.DEBUG):
        save(model=model, optimizer=optimizer, scheduler=scheduler)
    assert {record.name for record in caplog.records} == {"ckpt"}
