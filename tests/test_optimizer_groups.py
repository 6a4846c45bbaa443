"""Parameter groups: matched by their sets of names, options from the checkpoint, every difference told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_support import (
    Net,
    Stored,
    bits,
    grown,
    optimizer_bits,
    parameter_bits,
    resume,
    save,
    train,
    two_groups,
)
from torch import nn

from ckpt.capture import optimizer_tree as tree
from ckpt.capture.rebuild import decode_with, stored_tensor
from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


def test_saved_hyper_parameters_win_and_each_difference_is_noted() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99))
    fresh = torch.optim.AdamW(again.parameters(), lr=0.3, betas=(0.9, 0.99), weight_decay=0.01)
    plan = resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)
    assert len(plan.notes) == 2
    assert "lr of group 0 is 0.1 in the checkpoint and 0.3 in the script" in plan.notes[0]
    assert "betas of group 0 is (0.8, 0.99) in the checkpoint and (0.9, 0.99) in the script" in plan.notes[1]


def test_override_keeps_the_scripts_value_and_nothing_else() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    fresh = torch.optim.SGD(again.parameters(), lr=0.3, momentum=0.9)
    stored = save(model=model, optimizer=optimizer)
    plan = resume(stored, override={"optimizer": ("lr",)}, model=again, optimizer=fresh)
    assert plan.changes == ["lr of group 0 of optimizer is the script's"]
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["momentum"]) == (0.3, 0.5)
    with pytest.raises(StateMismatchError, match="override names 'lrr'"):
        resume(stored, override={"optimizer": ("lrr",)}, model=again, optimizer=fresh)


def test_a_tensor_lr_stays_the_same_tensor_and_gets_the_saved_bits() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), capturable=False, foreach=False)
    fresh = torch.optim.Adam(again.parameters(), lr=torch.tensor(0.3), foreach=False)
    held = fresh.param_groups[0]["lr"]
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert fresh.param_groups[0]["lr"] is held
    assert bits(held) == bits(torch.tensor(0.1))


def test_a_number_for_lr_replaces_the_scripts_tensor_and_a_tensor_its_number() -> None:
    for then, now in ((0.1, torch.tensor(0.3)), (torch.tensor(0.1), 0.3)):
        model, again = Net(), Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=then, foreach=False)
        fresh = torch.optim.SGD(again.parameters(), lr=now, foreach=False)
        resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
        assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_an_option_that_is_a_function_is_the_scripts() -> None:
    def build(decay: Callable[[int], int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.SGD([{"params": model.parameters(), "decay": decay}], lr=0.1)

    model, optimizer = build(lambda k: k + 1)
    stored = save(model=model, optimizer=optimizer)
    again, fresh = build(lambda k: k + 1)
    assert resume(stored, model=again, optimizer=fresh).changes == []
    again, fresh = build(lambda k: k + 2)
    plan = resume(stored, model=again, optimizer=fresh)
    assert plan.changes == ["optimizer: the function 'decay' of group 0 changed"]
    assert fresh.param_groups[0]["decay"](1) == 3


def test_a_fused_flag_that_comes_back_tells_grad_scaler_as_well() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, range(1))
    fresh = torch.optim.AdamW(again.parameters())
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert fresh._step_supports_amp_scaling is True  # type: ignore[attr-defined]
    train(model, optimizer, range(1, 4))
    train(again, fresh, range(1, 4))
    assert parameter_bits(again) == parameter_bits(model)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_in_another_order_are_matched_by_their_names_and_put_into_the_saved_order(kind: Any) -> None:
    """OPT-04"""
    model, again = Net(), Net()
    optimizer, fresh = kind(two_groups(model, False), lr=0.1), kind(two_groups(again, True), lr=0.1)
    train(model, optimizer, range(3))
    groups = list(fresh.param_groups)
    lists = [id(group["params"]) for group in groups]
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert fresh.param_groups == [groups[1], groups[0]]
    assert [id(group["params"]) for group in groups] == lists
    assert fresh.param_groups[0]["params"][0] is again.first.weight
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_a_group_added_in_training_is_named_when_the_script_lacks_it() -> None:
    """OPT-06"""
    model, optimizer = grown()
    again = Net()
    fresh = torch.optim.AdamW(again.first.parameters(), lr=0.1)
    with pytest.raises(StateMismatchError) as caught:
        resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    text = str(caught.value)
    assert "group 1 of the checkpoint ('second.weight', 'second.bias') is missing in the script" in text
    assert "ckpt.param_groups(path, model, name='optimizer')" in text
    assert set(caught.value.unexpected) == {"optimizer/second.weight", "optimizer/second.bias"}
    assert len(fresh.state) == 0 and len(fresh.param_groups) == 1


def test_groups_rebuilt_from_the_saved_names_take_the_checkpoint() -> None:
    """OPT-06"""
    model, optimizer = grown()
    stored = save(model=model, optimizer=optimizer)
    again = Net()
    groups = tree.saved_param_groups(stored.saved(), "optimizer", {"model": again})
    assert [group["lr"] for group in groups] == [0.1, 0.01]
    fresh = torch.optim.AdamW(groups)
    plan = resume(stored, model=again, optimizer=fresh)
    assert plan.notes == []
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)
    with pytest.raises(StateMismatchError, match=r"second\.weight, second\.bias"):
        tree.saved_param_groups(stored.saved(), "optimizer", {"model": nn.ModuleDict({"first": again.first})})


def test_a_group_added_twice_is_told_as_such() -> None:
    """OPT-08"""
    model, optimizer = grown()
    optimizer.param_groups.append({**optimizer.param_groups[1], "params": list(model.second.parameters())})
    with pytest.raises(UnsupportedStateError) as caught:
        save(model=model, optimizer=optimizer)
    assert "'second.weight' in groups 1, 2" in str(caught.value)
    assert "call add_param_group before resume only" in str(caught.value)


def test_adding_a_restored_group_again_is_refused_and_leaves_what_was_restored() -> None:
    """OPT-08"""
    model, optimizer = grown()
    stored = save(model=model, optimizer=optimizer)
    again = Net()
    fresh = torch.optim.AdamW(tree.saved_param_groups(stored.saved(), "optimizer", {"model": again}))
    resume(stored, model=again, optimizer=fresh)
    with pytest.raises(ValueError, match="more than one parameter group"):
        fresh.add_param_group({"params": list(again.second.parameters())})
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_a_mismatch_names_added_and_removed_parameters_of_each_group() -> None:
    """OPT-13"""
    model = Net()
    stored = save(model=model, optimizer=torch.optim.Adam(two_groups(model, False)))
    again = Net()
    rows = two_groups(again, False)
    del rows[0]["params"][1]
    rows[0]["params"].append(rows[1]["params"].pop())
    fresh = torch.optim.Adam(rows)
    with pytest.raises(StateMismatchError) as caught:
        resume(stored, model=again, optimizer=fresh)
    text = str(caught.value)
    assert "group 0 differs from the checkpoint: added 'third.bias'; removed 'second.weight'" in text
    assert "group 1 differs from the checkpoint: removed 'third.bias'" in text


def test_a_frozen_parameter_left_out_of_the_groups_is_named() -> None:
    """OPT-13"""
    model, again = Net(), Net()
    stored = save(model=model, optimizer=torch.optim.Adam(model.parameters()))
    again.second.requires_grad_(False)
    fresh = torch.optim.Adam([p for p in again.parameters() if p.requires_grad])
    with pytest.raises(StateMismatchError, match=r"removed 'second\.weight', 'second\.bias'"):
        resume(stored, model=again, optimizer=fresh)


def test_not_strict_restores_what_fits_and_lists_the_rest() -> None:
    model, optimizer = grown()
    again = Net()
    fresh = torch.optim.AdamW([*again.first.parameters(), *again.third.parameters()], lr=0.3)
    plan = resume(save(model=model, optimizer=optimizer), strict=False, model=again, optimizer=fresh)
    assert set(plan.missing) == {"optimizer/third.weight", "optimizer/third.bias"}
    assert set(plan.unexpected) == {"optimizer/second.weight", "optimizer/second.bias"}
    then, now = optimizer.state[model.first.weight], fresh.state[again.first.weight]
    assert bits(now) == bits(then)
    assert again.third.weight not in fresh.state
    assert fresh.param_groups[0]["lr"] == 0.1


def test_another_kind_of_optimizer_is_refused() -> None:
    model, again = Net(), Net()
    stored = save(model=model, optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(StateMismatchError, match=r"'betas'.*SGD lacks"):
        resume(stored, model=again, optimizer=torch.optim.SGD(again.parameters(), lr=0.1))


def test_options_a_newer_torch_has_keep_the_scripts_value() -> None:
    """OPT-14: a checkpoint that lacks options and attributes of this torch resumes."""
    model, again = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    stored = save(model=model, optimizer=optimizer)
    old = json.loads(stored.text)
    for key in ("decoupled_weight_decay", "fused", "capturable"):
        del old["values"]["optimizer"]["groups"][0]["options"][key]
        old["values"]["optimizer"]["defaults"].remove(key)
    fresh = torch.optim.AdamW(again.parameters(), lr=0.1)
    plan = resume(Stored(json.dumps(old), stored.data, {"torch": "2.5.0"}), model=again, optimizer=fresh)
    assert len(plan.notes) == 3 and len(plan.changes) == 1
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_reading_back_gives_state_by_name_and_groups_with_names() -> None:
    model, optimizer = grown()
    stored = save(model=model, optimizer=optimizer)
    saved = stored.saved()
    data = {
        name: torch.frombuffer(bytearray(raw), dtype=getattr(torch, saved.tensors[name].dtype)).view(
            saved.tensors[name].shape
        )
        for name, raw in stored.data.items()
    }
    got = tree.optimizer_tree(
        saved, "optimizer", lambda node: decode_with(node, lambda name, _: stored_tensor(saved, data, name))
    )
    assert list(got["state"]) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert torch.equal(got["state"]["first.weight"]["exp_avg"], optimizer.state[model.first.weight]["exp_avg"])
    assert [group["params"] for group in got["param_groups"]] == [
        ["first.weight", "first.bias"],
        ["second.weight", "second.bias"],
    ]
    assert [group["lr"] for group in got["param_groups"]] == [0.1, 0.01]
    assert got["param_groups"][0]["betas"] == (0.9, 0.999)
