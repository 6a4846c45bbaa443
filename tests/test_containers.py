"""Registering, nested containers, and objects with a state of their own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from capture_support import Pair, bits, registry, resume, save, save_registry
from torch import nn

from ckpt.capture.base import Phase
from ckpt.capture.state import Registry, plan_restore
from ckpt.data.statedict import StateDict
from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


class HalfPair:
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "x" * 129, "a\n"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        Registry().register(name, StateDict())


@pytest.mark.parametrize("name", ["rng", "step"])
def test_reserved_and_taken_names_are_refused(name: str) -> None:
    made = registry(model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="reserved"):
        made.register(name, StateDict())
    with pytest.raises(ValueError, match="registered already"):
        made.register("model", StateDict())
    with pytest.raises(TypeError, match="a registered name is a str, not int"):
        made.register(3, StateDict())  # type: ignore[arg-type]
    assert list(made.parts) == ["model"]


@pytest.mark.parametrize(
    ("obj", "kind"),
    [(torch.zeros(1), "Tensor"), (3, "int"), (None, "NoneType"), (nn.Linear, "Linear"), (HalfPair(), "HalfPair"),
     ("text", "str"), (lambda: 1, "function"), ((1, 2), "tuple"), (np.zeros(2), "ndarray"), (Pair, "Pair")],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_at_registration_and_the_way_out_is_named(obj: Any, kind: str) -> None:
    """PY-02: class objects too."""
    made = Registry()
    with pytest.raises(UnsupportedStateError, match="StateDict") as caught:
        made.register("x", obj)
    assert (caught.value.name, caught.value.type) == ("x", kind)
    assert not made.parts


def test_half_a_pair_is_told_as_such() -> None:
    with pytest.raises(UnsupportedStateError, match="it has state_dict without the other of the pair"):
        Registry().register("x", HalfPair())


def test_a_plain_loader_is_refused_and_told_of_one_that_resumes() -> None:
    with pytest.raises(UnsupportedStateError, match="ResumableLoader"):
        Registry().register("loader", torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]


def test_an_object_deep_in_a_container_is_refused_by_its_path() -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        Registry().register("bag", {"a/b": [nn.Linear(1, 1), {"lock": threading.Lock()}]})
    assert caught.value.name == "bag/a%2Fb/1/lock"
    with pytest.raises(UnsupportedStateError, match="the keys of a registered mapping are str or int"):
        Registry().register("bag", {(1, 2): nn.Linear(1, 1)})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match="holds itself"):
        Registry().register("bag", loop)


def test_registered_containers_bring_every_object_back_by_its_path() -> None:
    def bag() -> dict[Any, Any]:
        nets = {"g": nn.Linear(2, 2), 0: nn.Linear(1, 1), "0": nn.Linear(1, 1)}
        return {"nets": nets, "opts": [torch.optim.SGD(nets["g"].parameters(), lr=0.1)], "epoch": [StateDict(n=1)]}

    saved, live = bag(), bag()
    saved["epoch"][0]["n"] = 5
    saved["opts"][0].param_groups[0]["lr"] = 0.5
    nets = dict(live["nets"])
    resume(save(bag=saved), bag=live)
    assert live["nets"] == nets
    for key, net in nets.items():
        assert torch.equal(net.weight, saved["nets"][key].weight)
    assert live["epoch"][0]["n"] == 5 and live["opts"][0].param_groups[0]["lr"] == 0.5


def test_plain_values_of_a_registered_container_are_replaced_in_place_and_not_merged() -> None:
    """KEYS-03: growing lists, [] against [{..}], {} against {..}, None against a tensor."""
    saved: dict[str, Any] = {"list": [], "dict": {"new": {}}, "none": torch.ones(2), "loss": [0.5, 0.25], "gone": None}
    live: dict[str, Any] = {"list": [{"a": 1}], "dict": {"old": 1}, "none": None, "loss": [9.0], "extra": 3}
    loss, inner = live["loss"], live["dict"]
    resume(save(bag=saved), bag=live)
    assert bits(live) == bits(saved)
    assert live["loss"] is loss and live["dict"] is inner


def test_a_value_that_turns_unsupported_later_is_refused_by_its_path_at_the_save() -> None:
    log: list[Any] = []
    made = registry(log=log, state=StateDict())
    log.append({"when": threading.Lock()})
    with pytest.raises(UnsupportedStateError) as caught:
        save_registry(made)
    assert caught.value.name == "log/0/when"


def test_a_container_with_other_objects_lists_the_difference() -> None:
    stored = save(bag={"a": StateDict(x=1), "b": StateDict(x=2)})
    live = {"a": StateDict(), "c": StateDict(keep=1)}
    with pytest.raises(StateMismatchError) as caught:
        resume(stored, bag=live)
    assert caught.value.missing == ("bag/c",) and caught.value.unexpected == ("bag/b",)
    assert dict(live["a"]) == {}
    resume(stored, strict=False, bag=live)
    assert dict(live["a"]) == {"x": 1} and dict(live["c"]) == {"keep": 1} and set(live) == {"a", "c"}


def test_registered_names_must_equal_saved_ones_or_are_listed() -> None:
    stored = save(a=StateDict(x=1), b=StateDict())
    with pytest.raises(StateMismatchError) as caught:
        resume(stored, a=StateDict(), c=StateDict())
    assert caught.value.missing == ("c",) and caught.value.unexpected == ("b",)
    live = StateDict()
    plan = resume(stored, strict=False, a=live, c=StateDict())
    assert dict(live) == {"x": 1} and plan.changes


def test_one_object_under_two_names_is_stored_once() -> None:
    model = nn.Linear(3, 3)
    stored = save(a=model, b=model, bag=[model])
    assert set(stored.data) == {"a/weight", "a/bias"}
    live = nn.Linear(3, 3)
    resume(stored, a=live, b=live, bag=[live])
    assert torch.equal(live.weight, model.weight)


def test_what_a_saved_name_is_now_must_be_of_its_kind() -> None:
    with pytest.raises(StateMismatchError, match="x was saved as 'object' and is registered as 'module' now"):
        resume(save(x=StateDict()), x=nn.Linear(1, 1))


def test_an_average_class_of_ones_own_keeps_its_counter() -> None:
    """AUX-04, AUX-07: plain python values in a registered object's state are captured."""

    class EMA:
        def __init__(self) -> None:
            self.shadow, self.updates, self.warm = {"w": torch.zeros(2)}, 0, False

        def state_dict(self) -> dict[str, Any]:
            return dict(self.__dict__)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)

    ema, live = EMA(), EMA()
    ema.updates, ema.warm = 41, True
    ema.shadow["w"] += 3
    resume(save(ema=ema), ema=live)
    assert (live.updates, live.warm, live.shadow["w"].tolist()) == (41, True, [3.0, 3.0])


def test_an_objects_own_refusal_becomes_our_error() -> None:
    class Picky(Pair):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("scale")

    with pytest.raises(StateMismatchError, match="x did not take the state saved at step 1: KeyError: 'scale'"):
        resume(save(x=Pair({})), x=Picky())


def test_positions_of_loaders_are_put_back_after_everything_but_rng() -> None:
    """I8: modules, schedulers, optimizers, others, data position, RNG."""

    class Stream(Pair):
        def __iter__(self) -> Any:
            return iter(())

    objects = {"stream": Stream({}), "g": torch.Generator(), "x": Pair({}), "m": nn.Linear(1, 1)}
    made = registry(**objects)
    plan = plan_restore(made, save(**objects).saved())
    phases = [phase for phase, _ in sorted(plan.actions, key=lambda item: item[0])]
    assert phases[0] is Phase.OTHERS and phases[1] is Phase.DATA and set(phases[2:]) == {Phase.RNG}
    ran: list[str] = []
    plan.actions = [(Phase.RNG, lambda: ran.append("rng")), (Phase.DATA, lambda: ran.append("data"))]
    plan.apply(set(Phase) - {Phase.RNG})
    assert ran == ["data"]
    plan.apply({Phase.RNG})
    plan.apply({Phase.RNG})
    assert ran == ["data", "rng", "rng"]
