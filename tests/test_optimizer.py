"""Optimizers: state by name, put back in place, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from capture_support import (
    Net,
    bits,
    optimizer_bits,
    parameter_bits,
    registry,
    resume,
    save,
    save_registry,
    train,
    two_groups,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


def mixed_precision(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Gives the optimizer moments of another dtype than its parameters, with bits a cast would lose."""
    for i, p in enumerate(model.parameters()):
        draw = torch.Generator().manual_seed(i)
        optimizer.state[p] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.randn(p.shape, generator=draw).to(dtype),
            "exp_avg_sq": torch.rand(p.shape, generator=draw).to(dtype),
            "max_exp_avg_sq": torch.rand(p.shape, generator=draw).to(dtype),
        }


def test_fp32_moments_of_bf16_parameters_come_back_bit_for_bit() -> None:
    """OPT-01"""
    model = Net(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    mixed_precision(model, optimizer, torch.float32)
    stored = save(model=model, optimizer=optimizer)
    again = Net(torch.bfloat16)
    fresh = torch.optim.Adam(again.parameters(), amsgrad=True)
    resume(stored, model=again, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)
    assert all(s["exp_avg"].dtype == torch.float32 for s in fresh.state.values())


def test_torchs_own_load_would_have_failed_that_test() -> None:
    """OPT-01: the oracle sees the cast of `Optimizer.load_state_dict`."""
    model = Net(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    mixed_precision(model, optimizer, torch.float32)
    mutant = torch.optim.Adam(Net(torch.bfloat16).parameters(), amsgrad=True)
    mutant.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer_bits(mutant) != optimizer_bits(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_narrow_moments_of_fp32_parameters_stay_narrow(dtype: torch.dtype) -> None:
    """OPT-02"""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    mixed_precision(model, optimizer, dtype)
    again = Net()
    fresh = torch.optim.Adam(again.parameters(), amsgrad=True)
    train(again, fresh, range(2))  # live fp32 state of the same names is no reason to widen
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)
    assert all(s["exp_avg"].dtype == dtype for s in fresh.state.values())


def test_an_integer_counter_beyond_bf16_is_exact() -> None:
    model = Net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p]["count"] = torch.tensor(1_000_001)
    again = Net(torch.bfloat16)
    fresh = torch.optim.SGD(again.parameters(), lr=0.1)
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert {int(s["count"]) for s in fresh.state.values()} == {1_000_001}


def test_a_nan_in_a_moment_keeps_its_payload() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(1))
    odd = torch.full((5, 6), 0x7FC01234, dtype=torch.int32).view(torch.float32)
    optimizer.state[model.first.weight]["momentum_buffer"] = odd
    again = Net()
    fresh = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert bits(fresh.state[again.first.weight]["momentum_buffer"]) == bits(odd)


def test_absence_of_state_is_restored_as_absence() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    del optimizer.state[model.second.weight]
    optimizer.state[model.second.bias] = {}
    fresh = torch.optim.Adam(again.parameters())
    train(again, fresh, range(5))
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert again.second.weight not in fresh.state
    assert fresh.state[again.second.bias] == {}
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_a_save_before_the_first_step_restores_an_optimizer_without_state() -> None:
    model, again = Net(), Net()
    stored = save(model=model, optimizer=torch.optim.Adam(model.parameters()))
    fresh = torch.optim.Adam(again.parameters())
    train(again, fresh, range(1))
    resume(stored, model=again, optimizer=fresh)
    assert len(fresh.state) == 0


def test_live_state_that_fits_is_filled_in_place_and_no_object_is_replaced() -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(again.parameters())
    train(model, optimizer, range(3))
    train(again, fresh, range(1))
    state = fresh.state[again.first.weight]
    held = {key: (id(value), value.data_ptr()) for key, value in state.items()}
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert fresh.state[again.first.weight] is state
    assert {key: (id(value), value.data_ptr()) for key, value in state.items()} == held
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_nothing_restored_shares_memory_with_the_checkpoint_or_another_resume() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    stored = save(model=model, optimizer=optimizer)
    one, two = Net(), Net()
    first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters())
    resume(stored, model=one, optimizer=first)
    train(one, first, range(2, 4))
    resume(stored, model=two, optimizer=second)
    assert optimizer_bits(second) == optimizer_bits(optimizer)


def test_state_tensors_that_were_two_and_are_one_now_come_apart() -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(again.parameters())
    train(model, optimizer, range(2))
    train(again, fresh, range(1))
    state = fresh.state[again.first.weight]
    state["exp_avg"] = state["exp_avg_sq"]
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_state_tensors_that_were_one_are_one_again() -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(again.parameters(), lr=0.1)
    shared = torch.randn(3)
    optimizer.state[model.first.weight] = {"a": shared, "b": [shared, 1]}
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    state = fresh.state[again.first.weight]
    assert state["a"] is state["b"][0]
    assert bits(state["a"]) == bits(shared)


def test_nested_lists_none_and_plain_numbers_in_state_round_trip() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=200, line_search_fn="strong_wolfe")
    fresh = torch.optim.LBFGS(again.parameters(), history_size=200, line_search_fn="strong_wolfe")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def step(net: nn.Module, opt: torch.optim.LBFGS) -> None:
        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        opt.step(closure)

    for _ in range(2):
        step(model, optimizer)
    assert None in optimizer.state[model.first.weight]["al"]
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)
    for _ in range(3):
        step(model, optimizer)
        step(again, fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)
    assert parameter_bits(again) == parameter_bits(model)


def test_state_kept_under_a_key_that_is_no_parameter_round_trips() -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(again.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 3, "mean": torch.tensor([1.5])}  # type: ignore[index]
    fresh.state["stale"] = 1  # type: ignore[index]
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert bits(dict(fresh.state)) == bits(dict(optimizer.state))


def test_a_state_value_that_cannot_be_stored_is_refused_by_its_path() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.first.weight]["thing"] = object()
    with pytest.raises(UnsupportedStateError, match="optimizer/state/first.weight/thing"):
        save(model=model, optimizer=optimizer)


def test_moments_of_a_channels_last_filter_come_back_channels_last() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3, 5, 5)).square().mean().backward()
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    again, fresh = build()
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert fresh.state[next(again.parameters())]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        step(model, optimizer)
        step(again, fresh)
    assert parameter_bits(again) == parameter_bits(model)


def test_without_a_module_moments_follow_the_layout_the_script_gives_the_parameter() -> None:
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([p], fused=True)
    p.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    q = nn.Parameter(p.detach().clone().to(memory_format=torch.channels_last))
    fresh = torch.optim.AdamW([q], fused=True)
    resume(save(optimizer=optimizer), optimizer=fresh)
    assert fresh.state[q]["exp_avg"].stride() == q.stride()
    for step in range(3):
        p.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        q.grad = p.grad.clone().to(memory_format=torch.channels_last)
        optimizer.step()
        fresh.step()
    assert torch.equal(p, q)


def test_capture_and_resume_call_no_step_no_hook_and_no_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT-10"""
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(again.parameters())
    train(model, optimizer, range(2))
    called: list[str] = []

    def spy(name: str) -> Callable[..., None]:
        return lambda *_, **__: called.append(name)

    handle = register_optimizer_step_pre_hook(spy("global step hook"))
    for opt in (optimizer, fresh):
        opt.register_step_pre_hook(spy("step"))
        opt.register_state_dict_pre_hook(spy("state_dict"))
        opt.register_load_state_dict_pre_hook(spy("load_state_dict"))
    for net in (model, again):
        net.register_forward_pre_hook(spy("forward"))
        for p in net.parameters():
            p.register_hook(spy("gradient"))
    for method in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        monkeypatch.setattr(torch.optim.Adam if method == "step" else torch.optim.Optimizer, method, spy(method))
    before = torch.get_rng_state()
    stored = save(model=model, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    resume(stored, model=again, optimizer=fresh)
    handle.remove()
    assert called == []
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_capture_changes_nothing_and_creates_no_state() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    save(model=model, optimizer=optimizer)
    assert len(optimizer.state) == 0


def test_a_refused_resume_changes_nothing() -> None:
    model, again = Net(), Net()
    stored = save(model=model, optimizer=torch.optim.Adam(two_groups(model, False), lr=0.5))
    fresh = torch.optim.Adam(two_groups(again, True)[:1], lr=0.1)
    train(again, fresh, range(2))
    before = (optimizer_bits(fresh), parameter_bits(again))
    with pytest.raises(StateMismatchError):
        resume(stored, model=again, optimizer=fresh)
    assert (optimizer_bits(fresh), parameter_bits(again)) == before


def test_the_restore_can_run_again() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.Adam(two_groups(model, False))
    train(model, optimizer, range(2))
    fresh = torch.optim.Adam(two_groups(again, True))
    plan = resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    plan.apply()
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_a_swap_of_two_moments_of_one_shape_is_seen() -> None:
    """The oracle of these tests fails a restore that confuses two parameters."""
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(again.parameters())
    train(model, optimizer, range(2))
    stored = save_registry(registry(model=model, optimizer=optimizer))
    a, b = "optimizer/state/first.bias/exp_avg", "optimizer/state/second.bias/exp_avg"
    stored.data[a], stored.data[b] = stored.data[b], stored.data[a]
    resume(stored, model=again, optimizer=fresh)
    assert optimizer_bits(fresh) != optimizer_bits(optimizer)
