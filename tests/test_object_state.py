"""What objects give as their state comes back with exact types, bit for bit, or is refused by its path."""

from __future__ import annotations

import enum
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from capture_support import Pair, bits, resume, save
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UnsupportedStateError

pytestmark = pytest.mark.quick


class Getter:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def back(value: Any) -> Any:
    live = Pair("before")
    resume(save(x=Pair(value)), x=live)
    return live.state


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

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    json.loads(text, parse_constant=refuse).keys()
