"""Registering, nested containers, and objects with a state of their own."""

from __future__ import annotations

import enum
import json
import math
import os
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from capture_support import bits, registry, resume, save, save_registry
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpt.capture.base import Phase
from ckpt.capture.state import Registry, plan_restore
from ckpt.data.statedict import StateDict
from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


class Pair:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Getter:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


class HalfPair:
    def state_dict(self) -> dict[str, int]:
        return {}


def back(value: Any) -> Any:
    live = Pair("before")
    resume(save(x=Pair(value)), x=live)
    return live.state


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
    assert dict(live) == {"x": 1} and plan.restored == ["a"] and plan.changes


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


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        {"best": math.inf, "nan": math.nan, "big": 2**70, "none": None, "flag": True},
        {1: "int", "1": "str", (1, "a"): "tuple", None: 0, 1.5: 1, False: 2} | {"": {}, "a/b": [], "a.b": ()},
        [np.float64(0.1), np.int64(7), np.bool_(True), np.float32(1e-45)]
        + [np.datetime64("2020-01-02", "D"), np.str_("é"), np.str_("")],
        {"size": torch.Size([2, 3]), "dtype": torch.float8_e4m3fn, "device": torch.device("cuda", 3)},
        {"np": np.dtype(">i4"), "set": {3, 1}, "frozen": frozenset({"a"}), "bytes": b"\x00", "c": 1 + 2j},
        OrderedDict(b=1, a=deque([1, 2], maxlen=3)),
        defaultdict(list, {"x": [slice(1, None), range(3)]}),
        [torch.tensor(3.0), {"deep": (torch.arange(3), torch.zeros(0))}],
    ],
    ids=["scalars", "keys", "numpy", "torch", "mixed", "ordered", "default", "tensors"],
)  # fmt: skip
def test_values_come_back_with_their_exact_types(value: Any) -> None:
    """PY-02, KEYS-03, KEYS-04"""
    assert bits(back(value)) == bits(value)
    live = Getter()
    resume(save(x=Getter(value)), x=live)
    assert bits(live.state) == bits(value)


def test_an_enum_comes_back_as_its_value() -> None:
    assert back({"c": Color.RED}) == {"c": "red"}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3), np.arange(6, dtype="f4").reshape(2, 3).T, np.array(3.5), np.zeros((0, 4), "i2"),
        np.arange(8)[::-2], np.array([1, 2], ">f8"), np.array(["a", "bcd"]), np.array([b"x", b"yz"]),
        np.array(["2020-01-01"], "M8[s]"), np.array([1, 2], "u8"), np.array([1 + 2j]), np.array([True, False]),
        np.broadcast_to(np.arange(3), (2, 3)), np.array([], "U3"),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)  # fmt: skip
def test_arrays_come_back_with_dtype_and_elements(array: np.ndarray) -> None:
    """PY-02: byte order, text and dates included; read-only and reversed views as their elements."""
    made = back({"a": array})["a"]
    assert type(made) is np.ndarray and made.dtype == array.dtype and made.shape == array.shape
    assert made.tobytes() == array.tobytes()
    assert made.flags.writeable


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.zeros(1, [("a", "i4")]), np.longdouble(1), np.ma.masked_array([1]), Color, object()],
    ids=lambda v: type(v).__name__,
)
def test_values_outside_the_closed_set_are_refused_by_path(value: Any) -> None:
    """PY-02, TENSOR-15: never pickled."""
    with pytest.raises(UnsupportedStateError) as caught:
        save(x=Pair({"deep": [value]}))
    assert caught.value.name == "x/deep/0"


NAMES = st.one_of(
    st.text(max_size=5), st.integers(-3, 30), st.sampled_from(["0", "-1", "", "a/b", "a.b", "%", "🦊", "$a"])
)


@given(st.recursive(st.integers(0, 9), lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=12))
def test_tensors_under_any_keys_come_back_in_their_places(tree: Any) -> None:
    """KEYS-04: 'a.b' against nesting, 0 against '0', '', 'a/b', emoji."""

    def planted(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: planted(item) for key, item in node.items()}
        return torch.tensor([node])

    value = {"root": planted(tree)}
    assert bits(back(value)) == bits(value)


def test_keys_that_are_spelled_alike_keep_their_tensors_apart() -> None:
    """KEYS-04: tuple, bool, float and None keys beside strings; a key of 10,000 characters."""
    keys: list[Any] = [True, "True", 1.5, "1.5", None, "None", (1, 2), "(1, 2)", "k" * 10_000]
    value = {key: torch.tensor(float(i)) for i, key in enumerate(keys)}
    assert bits(back(value)) == bits(value)


def test_a_key_too_long_for_the_format_is_refused_at_save() -> None:
    """KEYS-04"""
    with pytest.raises(UnsupportedStateError, match="is longer than"):
        save(x=Pair({"k" * 70_000: torch.zeros(1)}))


def test_what_is_restored_is_shared_with_nothing() -> None:
    value = {"list": [1], "tensor": torch.zeros(2), "array": np.zeros(2)}
    stored = save(x=Pair(value))
    value["list"].append(2)
    first, second = Pair(), Pair()
    resume(stored, x=first)
    resume(stored, x=second)
    assert first.state["list"] == [1]
    first.state["tensor"][0] = first.state["array"][0] = 1
    assert second.state["tensor"][0] == 0 and second.state["array"][0] == 0


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


SAME = """
import hashlib, json, torch
from capture_support import save
from ckpt.data.statedict import StateDict
model = torch.nn.Linear(2, 2)
with torch.no_grad():
    model.weight.fill_(1), model.bias.fill_(2)
letters = {letter for letter in "abcdefghijklmnopqrstuvwxyz"}
stored = save(m=model, s=StateDict(names=letters, more=[frozenset(letters), {"k": torch.ones(1)}]))
tree = json.loads(stored.text)
tree["values"].pop("rng")
digest = hashlib.sha256(json.dumps([tree, {k: v.hex() for k, v in stored.data.items()}]).encode()).hexdigest()
"""


def test_two_processes_spell_the_same_state_the_same_way() -> None:
    """PY-04: no address, hash seed or order of a set reaches a checkpoint."""
    here: dict[str, Any] = {}
    exec(SAME, here)
    path = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
    seed = str(1 + int(os.environ.get("PYTHONHASHSEED", "0").replace("random", "0")))
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    there = subprocess.run([sys.executable, "-c", SAME + "print(digest)"], env=env, capture_output=True, text=True)
    assert there.stdout.strip() == here["digest"], there.stderr


def test_everything_captured_is_json() -> None:
    text = save(x=Pair({"nan": math.nan, "inf": -math.inf, "s": "\ud800"})).text
    assert "NaN" not in text and "Infinity" not in text
    json.loads(text).keys()
