"""How parameters are keyed: by registered module, by the optimizer's names, by position; and what is stored."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from capture_support import (
    Net,
    optimizer_bits,
    resume,
    save,
    train,
)
from torch import nn

from ckpt.capture.optimizer import is_own
from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


def test_no_object_and_no_class_name_is_stored() -> None:
    """OPT-14"""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    text = json.loads(save(model=model, optimizer=optimizer).text)
    rest = json.dumps([text["parts"], {key: text["values"][key] for key in ("model", "optimizer")}])
    assert "AdamW" not in rest and "torch" not in rest


def test_named_parameters_key_the_state_when_no_module_is_registered() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.Adam(model.named_parameters())
    train(model, optimizer, range(2))
    stored = save(optimizer=optimizer)
    assert "optimizer/state/first.weight/exp_avg" in stored.data
    fresh = torch.optim.Adam(reversed(list(again.named_parameters())))
    resume(stored, optimizer=fresh)
    assert fresh.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]
    assert fresh.param_groups[0]["params"][0] is again.first.weight
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_without_names_parameters_are_keyed_by_position_with_shapes() -> None:
    model, again = Net(), Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    stored = save(optimizer=optimizer)
    assert stored.saved().values["optimizer"]["keys"] == "position"  # type: ignore[index,call-overload]
    assert "optimizer/state/0.1/exp_avg" in stored.data
    fresh = torch.optim.Adam(again.parameters())
    resume(stored, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)
    first, *rest = again.parameters()
    swapped = torch.optim.Adam([rest[3], *rest[:3], first, rest[4]])
    with pytest.raises(StateMismatchError, match=r"shape of optimizer/0\.0: saved \[5, 6\], live \[2, 5\]"):
        resume(stored, optimizer=swapped)


def test_a_position_is_never_taken_for_a_name() -> None:
    model = Net()
    stored = save(optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(StateMismatchError, match="by position only"):
        resume(stored, optimizer=torch.optim.Adam(model.named_parameters()))


def test_parameters_in_no_registered_module_are_an_error_that_says_why() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(UnsupportedStateError) as caught:
        save(model=model, optimizer=optimizer)
    text = str(caught.value)
    assert "6 of the optimizer's 6 parameters are in no registered module: group 0 parameter 0 of shape [5, 6]" in text
    assert "fully_shard or to_empty" in text and "assign=True" in text
    some = torch.optim.Adam([model.first.weight, nn.Parameter(torch.zeros(3))])
    with pytest.raises(UnsupportedStateError, match=r"1 of the optimizer's 2 .* group 0 parameter 1 of shape \[3\]"):
        save(model=model, optimizer=some)
    with pytest.raises(StateMismatchError, match="in no registered module"):
        resume(save(model=model, optimizer=torch.optim.Adam(model.parameters())), model=model, optimizer=optimizer)


class Tied(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            setattr(self, name, nn.Linear(3, 3, bias=False))
        getattr(self, second).weight = getattr(self, first).weight


def test_a_tied_parameter_is_keyed_by_its_first_path_and_matched_by_any() -> None:
    model, again = Tied("zeta", "alpha"), Tied("alpha", "zeta")
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(again.parameters(), lr=1.0)
    optimizer.state[next(model.parameters())]["momentum_buffer"] = torch.randn(3, 3)
    stored = save(model=model, optimizer=optimizer)
    assert "optimizer/state/alpha.weight/momentum_buffer" in stored.data
    resume(stored, model=again, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)

    class Zeta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zeta = nn.Linear(3, 3, bias=False)

    alone = Zeta()  # one path of the two is left
    only = torch.optim.SGD(alone.parameters(), lr=1.0)
    resume(stored, strict=False, model=alone, optimizer=only)
    assert optimizer_bits(only) == optimizer_bits(optimizer)


def test_one_optimizer_may_span_modules_that_use_the_same_names() -> None:
    def build() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        left, right = Net(), Net()
        return left, right, torch.optim.Adam([*left.parameters(), *right.parameters()])

    left, right, optimizer = build()
    for net, base in ((left, 1), (right, 100)):
        train(net, optimizer, range(base, base + 2))
    stored = save(left=left, right=right, optimizer=optimizer)
    assert "optimizer/state/right.first.weight/exp_avg" in stored.data
    one, two, fresh = build()
    resume(stored, left=one, right=two, optimizer=fresh)
    assert optimizer_bits(fresh) == optimizer_bits(optimizer)


def test_two_optimizers_of_one_model_keep_their_own_state() -> None:
    def build() -> tuple[Net, dict[str, Any]]:
        model = Net()
        return model, {
            "muon": torch.optim.Muon([model.first.weight, model.second.weight, model.third.weight]),
            "adam": torch.optim.Adam([model.first.bias, model.second.bias, model.third.bias]),
        }

    model, optimizers = build()
    for optimizer in optimizers.values():
        train(model, optimizer, range(2))
    again, fresh = build()
    resume(save(model=model, **optimizers), model=again, **fresh)
    for name, optimizer in optimizers.items():
        assert optimizer_bits(fresh[name]) == optimizer_bits(optimizer)


class Wrapped(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 3}


def test_an_optimizer_that_overrides_state_dict_is_asked_through_it() -> None:
    assert not is_own(Wrapped(Net().parameters(), lr=0.1))
    assert is_own(torch.optim.AdamW(Net().parameters()))
    model, again = Net(), Net()
    optimizer, fresh = Wrapped(model.parameters(), lr=0.1), Wrapped(again.parameters(), lr=0.2)
    stored = save(model=model, optimizer=optimizer)
    assert stored.saved().values["optimizer"]["mine"] == 3  # type: ignore[index,call-overload]
    resume(stored, model=again, optimizer=fresh)
    assert fresh.param_groups[0]["lr"] == 0.1
