"""Fingerprints of functions: the same for the same function wherever it stands, another for any other."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt.capture.functions import difference, fingerprint, is_function

pytestmark = pytest.mark.quick


def made(source: str, name: str = "f", module: str = "first", lines: int = 0, **scope: Any) -> Any:
    """The function `name` of a module of its own."""
    space: dict[str, Any] = {"__name__": module, **scope}
    exec(compile("\n" * lines + source, f"/somewhere/{module}.py", "exec"), space)
    return space[name]


def test_module_file_line_and_docstring_do_not_matter() -> None:
    text = "def f(step, a=2):\n    {doc}\n    return [a ** (step + k) for k in {{3, 4}}]\n"
    one = fingerprint(made(text.format(doc="'''one'''")))
    two = fingerprint(made(text.format(doc="'''another'''"), module="second", lines=40))
    assert one == two
    assert difference(one.to_json(), two) == ""


CHANGES = {
    "constant": ("def f(step):\n    return 0.9 ** step", "def f(step):\n    return 0.8 ** step", "its code changed"),
    "operation": ("def f(step):\n    return 2 * step", "def f(step):\n    return 2 + step", "its code changed"),
    "nested": (
        "def f(step):\n    return (lambda x: x + 1)(step)",
        "def f(step):\n    return (lambda x: x + 2)(step)",
        "its code changed",
    ),
    "global constant": (
        "W = 10\ndef f(step):\n    return step / W",
        "W = 20\ndef f(step):\n    return step / W",
        "the values it reads changed",
    ),
    "default": ("def f(step, a=1):\n    return a", "def f(step, a=2):\n    return a", "the values it reads changed"),
    "helper": (
        "def g(x):\n    return x\ndef f(step):\n    return g(step)",
        "def g(x):\n    return -x\ndef f(step):\n    return g(step)",
        "its code changed",
    ),
    "table": (
        "T = [1, 2, 3]\ndef f(step):\n    return T[step]",
        "T = [1, 2, 4]\ndef f(step):\n    return T[step]",
        "the values it reads changed",
    ),
    "attribute": (
        "import types\nc = types.SimpleNamespace(w=1)\ndef f(step):\n    return c.w",
        "import types\nc = types.SimpleNamespace(w=2)\ndef f(step):\n    return c.w",
        "the values it reads changed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_function_does_and_what_it_reads_are_told_apart(name: str) -> None:
    before, after, expected = CHANGES[name]
    saved, live = fingerprint(made(before)), fingerprint(made(after))
    assert difference(saved.to_json(), live) == expected
    assert difference(saved.to_json(), fingerprint(made(before))) == ""
    assert not saved.varying


def test_bytecode_of_another_python_is_not_compared() -> None:
    saved = {**fingerprint(made("def f(step):\n    return 1")).to_json(), "code": "py3.9-00"}
    assert difference(saved, fingerprint(made("def f(step):\n    return 2"))) == ""


def test_arguments_of_a_partial_count_in_any_order_of_keywords() -> None:
    def f(step: int, a: int, b: int) -> int:
        return step + a * b

    one = fingerprint(functools.partial(f, a=1, b=2))
    assert one == fingerprint(functools.partial(f, b=2, a=1))
    assert difference(one.to_json(), fingerprint(functools.partial(f, a=1, b=3))) == "the values it reads changed"


def cells() -> dict[str, tuple[Callable[..., Any], bool]]:
    """name -> (function, whether what it reads counts as changing)"""
    number, text, table, one, config = 3, "cos", [30, 60, 90], [1.0], {"w": 1}
    frozen, namespace = frozenset({1, 2}), types.SimpleNamespace(w=1)
    counter, source, drawn = itertools.count(), random.Random(1), torch.Generator()
    row, scalar, queue = torch.arange(4), torch.tensor(1.0), collections.deque([1])
    calls = 0

    def counting(step: int) -> int:
        nonlocal calls
        calls += 1
        return calls

    def writing(step: int) -> None:
        namespace.w = step

    return {
        "number": (lambda s: number * s, False),
        "text": (lambda s: text, False),
        "table": (lambda s: table[s], False),
        "frozen set": (lambda s: s in frozen, False),
        "namespace": (lambda s: namespace.w, False),
        "row": (lambda s: row[s], False),
        "class": (lambda s: fractions(s), False),
        "one element": (lambda s: one[0], True),
        "dict": (lambda s: config["w"], True),
        "deque": (lambda s: queue[0], True),
        "iterator": (lambda s: next(counter), True),
        "python generator": (lambda s: source.random(), True),
        "torch generator": (lambda s: torch.rand(1, generator=drawn), True),
        "scalar tensor": (lambda s: scalar * s, True),
        "nonlocal": (counting, True),
        "writes an attribute": (writing, True),
    }


def fractions(step: int) -> float:
    return step / 3


@pytest.mark.parametrize("name", list(cells()))
def test_constants_give_no_noise_and_cells_that_change_are_known(name: str) -> None:
    function, changing = cells()[name]
    assert bool(fingerprint(function).varying) == changing


def test_a_value_that_moves_shows_in_the_values_and_not_in_the_code() -> None:
    scale = 1.0
    function = lambda step: scale * step  # noqa: E731
    before = fingerprint(function)
    scale = 0.5
    after = fingerprint(function)
    assert before.code == after.code and before.values != after.values


def test_a_fingerprint_calls_nothing_of_the_user() -> None:
    class Loud:
        def __call__(self, step: int) -> int:
            raise AssertionError("called")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    loud = Loud()
    fingerprint(loud)
    fingerprint(lambda step: loud(step))
    fingerprint(loud.__call__)


def test_a_function_that_refers_to_itself_ends() -> None:
    def f(step: int) -> int:
        return 1 if step == 0 else f(step - 1)

    assert fingerprint(f) == fingerprint(f)


def test_callable_objects_are_no_functions_and_classes_are() -> None:
    class Object:
        def __call__(self) -> None: ...

    assert [is_function(x) for x in (len, Object, functools.partial(len), Object().__call__)] == [True] * 4
    assert not is_function(Object())
