"""Typed values and path segments: one spelling each, back as they were, and damage told as such."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed import kind_of, only_ours

from ckpt.errors import UnsupportedStateError
from ckpt.format import jsontext, names
from ckpt.format.values import decode, encode

pytestmark = pytest.mark.quick

VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (0, 0),
    (-(2**53) + 1, -(2**53) + 1),
    (2**53, {"$int": "0x20000000000000"}),
    (-(2**64), {"$int": "-0x10000000000000000"}),
    (1.0, 1.0),
    (math.inf, {"$float": "inf"}),
    (-math.inf, {"$float": "-inf"}),
    ("a\u00e9", "a\u00e9"),
    ("\udcff", {"$str": "7bO/"}),
    ([1, [2]], [1, [2]]),
    ({"a": 1}, {"a": 1}),
    ({}, {}),
    ({1: "a", "1": "b"}, {"$dict": [[1, "a"], ["1", "b"]]}),
    ({"$x": 1}, {"$dict": [["$x", 1]]}),
    ({"\ud800": 1}, {"$dict": [[{"$str": "7aCA"}, 1]]}),
    ((1, (2,)), {"$tuple": [1, {"$tuple": [2]}]}),
    (OrderedDict(b=1, a=2), {"$odict": [["b", 1], ["a", 2]]}),
    (Counter({5: 2}), {"$counter": [[5, 2]]}),
    (defaultdict(list, {"a": [1]}), {"$defaultdict": ["list", [["a", [1]]]]}),
    (defaultdict(None, {}), {"$defaultdict": ["none", []]}),
    (deque([1, 2], maxlen=3), {"$deque": [3, [1, 2]]}),
    (deque([1]), {"$deque": [None, [1]]}),
    ({3, 1, 2}, {"$set": [1, 2, 3]}),
    (frozenset({"b", "a"}), {"$frozenset": ["a", "b"]}),
    (b"\x00\xff", {"$bytes": "AP8="}),
    (bytearray(b"ab"), {"$bytearray": "YWI="}),
    (complex(1, math.inf), {"$complex": [1.0, {"$float": "inf"}]}),
    (slice(1, None, 2), {"$slice": [1, None, 2]}),
    (range(0, 10, 3), {"$range": [0, 10, 3]}),
]


@pytest.mark.parametrize(("value", "node"), VALUES, ids=lambda v: repr(sorted(v) if isinstance(v, frozenset) else v))
def test_each_value_has_one_spelling_and_comes_back(value: Any, node: Any) -> None:
    assert encode(value) == node
    back = decode(json.loads(jsontext.dump(node)))
    assert back == value and type(back) is type(value)
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen
    if isinstance(value, (OrderedDict, dict)):
        assert list(back) == list(value)


def test_nan_keeps_its_bits_and_minus_zero_its_sign() -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0]
    assert encode(odd) == {"$float": "fff8000000000abc"}
    assert struct.pack(">d", decode(encode(odd))).hex() == "fff8000000000abc"
    assert math.copysign(1, decode(json.loads(jsontext.dump(encode(-0.0))))) == -1


def test_the_same_set_gives_the_same_bytes_whatever_its_order() -> None:
    one = jsontext.dump(encode({f"k{i}" for i in range(50)}))
    other = jsontext.dump(encode({f"k{i}" for i in reversed(range(50))}))
    assert one == other


def test_a_value_that_holds_itself_or_is_too_deep_is_refused_by_its_path() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match="0/0/0"):
        encode(loop)
    deep: Any = 1
    for _ in range(names.MAX_DEPTH):
        deep = {"$": deep}
    assert decode(encode(deep)) == deep


KEYS = [
    "a", "a/b", "a%2Fb", "a%b", "", "%-", "0", 0, -7, "-7", "007", "-0", "\u00e9", "\U0001f600", "\udcff", "%uDCFF",
    "9" * 2000, "x" * 10_000, "a.b_c", "a_b.c",
]  # fmt: skip


def test_segments_are_reversible_without_slashes_and_never_collide() -> None:
    """KEYS-04, FS-12: 'a.b_c' and 'a_b.c', 0 and '0', '', 'a/b', emoji, 10 kB stay apart and come back as they were."""
    spelled = [names.escape(key) for key in KEYS]
    assert len(set(spelled)) == len(KEYS) and not any("/" in text for text in spelled)
    back = [names.unescape(text) for text in spelled]
    assert back == KEYS and [type(key) for key in back] == [type(key) for key in KEYS]
    for text in spelled:
        jsontext.dump(text)
    assert names.escape("a.b_c") == "a.b_c" and names.escape("a_b.c") == "a_b.c"


@given(st.text() | st.integers())
def test_any_segment_comes_back(key: str | int) -> None:
    assert names.unescape(names.escape(key)) == key


def test_step_and_file_names() -> None:
    """FS-09: names hold [A-Za-z0-9._-] only."""
    assert names.step_name(500) == "step-00000500" and names.parse_step_name("step-00000500") == 500
    assert names.step_name(10**12) == "step-1000000000000" and names.parse_step_name("step-1000000000000") == 10**12
    for wrong in ("step-500", "step-0000050x", "step-00000500.tmp", ".tmp-step-00000500", "step-\u0665" + "0" * 8):
        assert names.parse_step_name(wrong) is None
    assert names.index_name(3) == "rank-00003.json"
    assert names.data_name(3) == "rank-00003.safetensors" and names.data_name(3, 1) == "rank-00003-1.safetensors"


# --- damage ---------------------------------------------------------------------------------------------------------

NODES: list[Any] = [
    {"$int": 5}, {"$int": "0x"}, {"$int": " 0x1"}, {"$int": "0x_1"}, {"$int": None}, {"$float": "nan"},
    {"$float": "3ff0000000000000"}, {"$float": "7ff8"}, {"$float": "z" * 16}, {"$float": 1.0}, {"$str": "7bO"},
    {"$str": "/w=="}, {"$str": 5}, {"$dict": {"a": 1}}, {"$dict": [[1]]}, {"$dict": [[1, 2, 3]]}, {"$dict": ["ab"]},
    {"$dict": [[[1], 2]]}, {"$dict": [[1, 2], [1, 3]]}, {"$tuple": "abc"}, {"$tuple": {"a": 1}}, {"$tuple": None},
    {"$odict": [[1, 1], [1, 1]]}, {"$counter": 1}, {"$defaultdict": ["os.system", []]}, {"$defaultdict": ["list"]},
    {"$defaultdict": [["list"], []]}, {"$defaultdict": []}, {"$deque": [1, [1, 2]]}, {"$deque": [-1, []]},
    {"$deque": [10**30, []]}, {"$deque": [True, []]}, {"$deque": [None]}, {"$deque": [None, 5]}, {"$set": [[1]]},
    {"$set": [1, 1]}, {"$frozenset": [{}]}, {"$bytes": "a"}, {"$bytes": "*"}, {"$bytes": ["a"]}, {"$bytearray": 3},
    {"$complex": [1]}, {"$complex": ["1", 2]}, {"$complex": [10**400, 0]}, {"$slice": [1, 2]}, {"$slice": 5},
    {"$range": [0, 1, 0]}, {"$range": [0.5, 1, 1]}, {"$range": ["a", 1, 1]}, {"$enum": {"$int": 1}}, {"$": 1},
    {"$no": 1}, {"$tuple": [], "x": 1}, {"$" + "x" * 5000: 1}, {"$tensor": "model/w"},
]  # fmt: skip


@pytest.mark.parametrize("node", NODES, ids=lambda node: str(node)[:40])
def test_a_value_no_encoder_writes_is_damage(node: Any) -> None:
    assert kind_of(decode, node) == "value"
    assert kind_of(decode, [{"a": node}]) == "value"


WRAPS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x],
    "dict": lambda x: {"a": x},
    "tuple": lambda x: {"$tuple": [x]},
    "pairs": lambda x: {"$dict": [[1, x]]},
    "enum": lambda x: {"$enum": x},
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_value_nested_too_deep_is_damage_and_no_recursion_error(wrap: Callable[[Any], Any]) -> None:
    node: Any = 1
    for _ in range(20_000):
        node = wrap(node)
    assert kind_of(decode, node) == "value"


def test_a_deep_value_met_on_a_deep_stack_is_still_our_error() -> None:
    node: Any = 1
    for _ in range(names.MAX_DEPTH):
        node = {"$dict": [[1, node]]}

    def deeper(n: int) -> None:
        if n:
            deeper(n - 1)
        else:
            only_ours({"value"}, decode, node)

    deeper(700)


@pytest.mark.parametrize("error", [SyntaxError, OverflowError, LookupError, RecursionError])
def test_what_a_library_raises_at_a_payload_of_its_own_tags_is_damage(error: type[Exception]) -> None:
    def leaf(tag: str, payload: Any) -> Any:
        raise error(f"{tag} {payload}")

    assert kind_of(decode, [{"$device": "nowhere:-1"}], leaf) == "value"


def test_a_leaf_that_finds_no_memory_is_not_called_damage() -> None:
    def leaf(tag: str, payload: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        decode({"$tensor": "model/w"}, leaf)
