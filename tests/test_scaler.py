"""GradScaler: scale and counters go on, whether it was used or not, enabled or not."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from capture_support import Net, Stored, bits, parameter_bits, resume, save
from torch.amp import GradScaler

from ckpt.capture.scaler import is_own
from ckpt.errors import CorruptCheckpointError, StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


def scaler(enabled: bool = True, **options: Any) -> GradScaler:
    return GradScaler("cpu", enabled=enabled, init_scale=1024.0, **{"growth_interval": 3, **options})


def run() -> tuple[Net, torch.optim.Optimizer, GradScaler]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), scaler()


def advance(model: Net, optimizer: torch.optim.Optimizer, with_scaler: GradScaler, steps: range) -> list[Any]:
    """Overflows at steps 1 and 2: the scale is halved twice, and grows after three good steps."""
    seen = []
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with_scaler.scale(loss * float("inf") if step in (1, 2) else loss).backward()
        with_scaler.step(optimizer)
        with_scaler.update()
        seen.append((with_scaler.get_scale(), with_scaler._get_growth_tracker(), parameter_bits(model)))
    return seen


def internals(one: GradScaler) -> Any:
    left_out = ("_per_optimizer_states", "_init_scale", "_init_growth_tracker")
    return {key: bits(value) for key, value in vars(one).items() if key not in left_out}


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("live_used", [False, True])
def test_scale_and_growth_go_on_after_overflows(steps: int, live_used: bool) -> None:
    """AUX-01, AUX-03"""
    model, optimizer, one = run()
    advance(model, optimizer, one, range(steps))
    stored = save(model=model, optimizer=optimizer, scaler=one)
    again, fresh, other = run()
    if live_used:
        advance(again, fresh, other, range(20, 25))
    resume(stored, model=again, optimizer=fresh, scaler=other)
    assert other.get_scale() == one.get_scale()
    if steps > 2:
        assert one.get_scale() <= 512.0
    more = range(steps, steps + 7)
    assert advance(again, fresh, other, more) == advance(model, optimizer, one, more)
    assert internals(other) == internals(one)


def test_the_scale_is_a_plain_number_in_the_values() -> None:
    """AUX-01"""
    model, optimizer, one = run()
    advance(model, optimizer, one, range(3))
    stored = save(model=model, optimizer=optimizer, scaler=one)
    values: Any = stored.saved().values["scaler"]
    assert (values["scale"], values["_growth_tracker"], values["used"]) == (256.0, 0, True)
    assert not any(name.startswith("scaler/") for name in stored.data)


def test_a_resume_into_a_used_scaler_fills_its_tensors() -> None:
    """AUX-03"""
    model, optimizer, one = run()
    advance(model, optimizer, one, range(3))
    again, fresh, other = run()
    advance(again, fresh, other, range(20, 21))
    held = other._scale
    resume(save(model=model, optimizer=optimizer, scaler=one), model=again, optimizer=fresh, scaler=other)
    assert other._scale is held and held is not None and float(held) == 256.0


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_enabled_and_disabled_in_all_four_combinations(then: bool, now: bool) -> None:
    """AUX-03"""
    model, optimizer, _ = run()
    one, other = scaler(then), scaler(now)
    advance(model, optimizer, one, range(4))
    stored = save(model=model, optimizer=optimizer, scaler=one)
    again, fresh, _ = run()
    plan = resume(stored, model=again, optimizer=fresh, scaler=other)
    assert other.is_enabled() == now
    words = {True: "enabled", False: "disabled"}
    told = [f"scaler was {words[then]} when it was saved and is {words[now]} now"]
    assert plan.changes == ([] if then == now else told)
    if then and now:
        assert other.get_scale() == 256.0
    elif now:
        assert other.get_scale() == 1024.0
    advance(again, fresh, other, range(4, 8))  # neither unscale nor an assertion fails


def test_the_checkpoints_settings_win_unless_the_script_keeps_its_own() -> None:
    model, optimizer, one = run()
    stored = save(model=model, optimizer=optimizer, scaler=one)
    other = scaler(growth_interval=500)
    plan = resume(stored, model=model, optimizer=optimizer, scaler=other)
    assert other.get_growth_interval() == 3
    assert ["growth_interval is 3 in the checkpoint and 500 in the script" in note for note in plan.notes] == [True]
    other = scaler(growth_interval=500)
    kept = {"scaler": ("growth_interval",)}
    plan = resume(stored, override=kept, model=model, optimizer=optimizer, scaler=other)
    assert (other.get_growth_interval(), plan.notes) == (500, [])
    assert plan.changes == ["growth_interval of scaler is the script's"]
    with pytest.raises(StateMismatchError, match="override names 'growth'"):
        resume(stored, override={"scaler": ("growth",)}, model=model, optimizer=optimizer, scaler=other)


@pytest.mark.parametrize("live_used", [False, True])
def test_a_save_between_step_and_update_restores_where_each_optimizer_stands(live_used: bool) -> None:
    model, optimizer, one = run()
    advance(model, optimizer, one, range(4))
    one.scale(model(torch.ones(1, 6)).sum() * float("inf")).backward()
    one.step(optimizer)
    stored = save(model=model, optimizer=optimizer, scaler=one)
    again, fresh, other = run()
    if live_used:
        advance(again, fresh, other, range(20, 22))
    resume(stored, model=again, optimizer=fresh, scaler=other)
    one.update()
    other.update()
    assert other.get_scale() == one.get_scale() == 128.0
    assert advance(again, fresh, other, range(5, 9)) == advance(model, optimizer, one, range(5, 9))


def test_an_unregistered_optimizer_between_two_calls_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, one = run()
    one.scale(model(torch.ones(1, 6)).sum()).backward()
    one.unscale_(optimizer)
    with caplog.at_level(logging.WARNING):
        save(model=model, scaler=one)
    assert "where it stands is not captured" in caplog.text


class Custom:
    """A loss scaler of one's own: three counters, `exported` of them in its state."""

    def __init__(self, exported: int) -> None:
        self.scale, self.good, self.since_overflow = 64.0, 0, 0
        self.exported = exported

    def update(self, overflow: bool) -> float:
        self.good = 0 if overflow else self.good + 1
        self.since_overflow = 0 if overflow else self.since_overflow + 1
        if overflow:
            self.scale /= 2
        elif self.good % 4 == 0 and self.since_overflow > 2:
            self.scale *= 2
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("scale", "good", "since_overflow")[: self.exported]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("exported", [3, 1])
def test_a_scaler_of_ones_own_goes_on_exactly_if_it_exports_all_it_counts(exported: int) -> None:
    """AUX-04: the comparison of the runs shows the counters that were kept back."""
    one, other = Custom(exported), Custom(exported)
    for step in range(7):
        one.update(step == 4)
    resume(save(scaler=one), scaler=other)
    assert other.scale == one.scale
    assert ([one.update(False) for _ in range(6)] == [other.update(False) for _ in range(6)]) == (exported == 3)


class Half:
    def state_dict(self) -> dict[str, Any]:
        return {}


def test_half_a_pair_is_refused() -> None:
    """AUX-04"""
    with pytest.raises(UnsupportedStateError, match="scaler"):
        save(scaler=Half())


class Mine(GradScaler):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 1}


def test_a_subclass_with_a_state_dict_of_its_own_is_asked_through_it() -> None:
    assert is_own(scaler()) and not is_own(Mine("cpu"))
    stored = save(scaler=Mine("cpu", init_scale=8.0))
    values: Any = stored.saved().values["scaler"]
    assert (values["mine"], values["scale"]) == (1, 8.0)


def test_values_no_save_can_have_written_are_damage() -> None:
    stored = save(scaler=scaler())
    tree = json.loads(stored.text)
    tree["values"]["scaler"]["scale"] = "big"
    with pytest.raises(CorruptCheckpointError, match="not the state of a scaler"):
        resume(Stored(json.dumps(tree), stored.data), scaler=scaler())
