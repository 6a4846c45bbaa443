"""Fingerprints of functions: what tells that a learning-rate function of the script is not the one it was at the save.

Functions are code of the user, never state: only a digest is kept. It covers what a function does (its bytecode,
constants and names) apart from what it reads (closure cells, defaults, arguments of a partial, plain globals,
attributes of the object it is bound to). Neither line numbers nor module paths nor the hash seed enter it, and of a
library's function only the name does.

A function whose values change while training goes on has state that no checkpoint holds. Which ones do is undecidable;
the rule is made so that constants give no noise. Counted as changing: values seen to differ between two looks; a
function that itself writes to what it captured; and captured dicts, sets, deques, iterators, random generators and
one-element lists or arrays (the common spelling of a mutable cell). Longer lists are tables, and objects count by the
plain attributes that the function names.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import random
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_DEPTH = 12
_TABLE = 4096  # elements of an array that are digested; a larger one counts by its type and shape
_STDLIB = sysconfig.get_paths()["stdlib"].replace("\\", "/") + "/"
_FUNCTIONS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType,
    types.WrapperDescriptorType, types.MethodDescriptorType, functools.partial, type, weakref.ReferenceType,
)  # fmt: skip
_DRAWN = (Iterator, random.Random, torch.Generator)
_WRITES = frozenset({"STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR"})


@dataclass(frozen=True)
class Fingerprint:
    """code: "py3.11-<hex>", comparable within one minor version of Python; values: hex of the plain values it reads;
    varying: why those values count as changing, "" when they don't."""

    code: str
    values: str
    varying: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "values": self.values, "varying": bool(self.varying)}


def is_function(value: object) -> bool:
    """True for callables that carry no state of their own in a `__dict__` (classes and weak references too)."""
    return isinstance(value, _FUNCTIONS)


def fingerprint(function: Callable[..., Any]) -> Fingerprint:
    """Reads only; calls nothing of the user's."""
    look = _Look()
    look.callable("function", function)
    code = f"py{sys.version_info.major}.{sys.version_info.minor}-{look.code.hexdigest()}"
    return Fingerprint(code, look.values.hexdigest(), look.varying)


def difference(saved: Mapping[str, Any], live: Fingerprint) -> str:
    """What changed since `saved` (a `Fingerprint.to_json`), or "" when nothing comparable did."""
    code = str(saved.get("code", ""))
    # Bytecode differs between versions of Python for the same source, so that only equal versions are compared.
    if code.partition("-")[0] == live.code.partition("-")[0] and code != live.code:
        return "its code changed"
    # Values that change while training goes on differ at a resume by nature; their warning came at the save.
    if saved.get("values") != live.values and not saved.get("varying") and not live.varying:
        return "the values it reads changed"
    return ""


class _Look:
    """One walk over a function and what it captures."""

    def __init__(self) -> None:
        self.code = hashlib.blake2b(digest_size=16)
        self.values = hashlib.blake2b(digest_size=16)
        self.varying = ""
        self._seen: set[int] = set()

    def callable(self, label: str, function: Any, depth: int = 0) -> None:
        if id(function) in self._seen or depth > _DEPTH:
            self._code("again")
            return
        self._seen.add(id(function))
        if isinstance(function, functools.partial):
            self._code("partial")
            self.callable(label, function.func, depth + 1)
            for i, value in enumerate(function.args):
                self.value(f"argument {i}", value, (), depth + 1)
            for key in sorted(function.keywords):
                self.value(f"argument {key!r}", function.keywords[key], (), depth + 1)
        elif isinstance(function, weakref.ReferenceType):
            self.callable(label, function(), depth + 1)
        elif isinstance(function, types.MethodType):
            self._code("method")
            self.callable(label, function.__func__, depth + 1)
            code = getattr(function.__func__, "__code__", None)
            if code is not None and not isinstance(function.__self__, type):
                self._object("self", function.__self__, _names(code), depth + 1)
                self._writes(code, "self", bound=True)
        elif isinstance(function, types.FunctionType):
            self._function(function, depth)
        elif isinstance(function, _FUNCTIONS):
            self._code(f"builtin {getattr(function, '__qualname__', type(function).__qualname__)}")
        else:
            # The values of a callable object are its `__dict__`, which the part that holds it captures.
            self._code("object")
            self.callable(label, type(function).__call__, depth + 1)
            wrapped = getattr(function, "__dict__", {}).get("__wrapped__")
            if wrapped is not None:
                self.callable(label, wrapped, depth + 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        library = _is_library(function)
        if library:
            self._code(f"library {function.__qualname__}")  # its new release is no change of the user's code
        else:
            self._code_object(code, function.__doc__)
        names = _names(code)
        for i, value in enumerate(function.__defaults__ or ()):
            self.value(f"default {i}", value, names, depth + 1)
        for key, value in sorted((function.__kwdefaults__ or {}).items()):
            self.value(f"default {key!r}", value, names, depth + 1)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet: a function that closes over a name assigned later
                continue
            self.value(f"closure variable {name!r}", held, names, depth + 1)
        if library:
            return
        for name in sorted(_globals_read(code) & function.__globals__.keys()):
            self.value(f"global {name!r}", function.__globals__[name], names, depth + 1)
        self._writes(code, "what it captured", bound=bool(function.__closure__))

    def _code_object(self, code: types.CodeType, doc: str | None = None) -> None:
        self._code(code.co_code.hex())
        self._code(repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)))
        self._code(repr((code.co_names, code.co_freevars, code.co_cellvars)))
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._code_object(const)
            elif doc is None or const != doc:
                self._code(_canonical(const))

    def value(self, label: str, value: Any, names: Any, depth: int) -> None:
        """Digests what is plain in `value` and notes what is made to change."""
        self._value(label)
        if depth > _DEPTH:
            return
        if isinstance(value, (list, tuple)):
            if isinstance(value, list) and len(value) == 1:
                self._vary(f"{label}, a list of one element")
            for i, item in enumerate(value):
                self.value(str(i), item, names, depth + 1)
        elif isinstance(value, dict):
            self._vary(f"{label}, a dict")
            for key in sorted(value, key=repr):
                self._value(_canonical(key))
                self.value("", value[key], names, depth + 1)
        elif isinstance(value, (set, frozenset, bytearray, deque)):
            if not isinstance(value, frozenset):
                self._vary(f"{label}, a {type(value).__name__}")
            self._value(_canonical(value))
        elif isinstance(value, (type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type)):
            self._value(_canonical(value))
        elif is_function(value):
            self.callable(label, value, depth + 1)
        elif isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
            self._array(label, value)
        elif isinstance(value, _DRAWN) or type(value).__module__.startswith("numpy.random"):
            self._vary(f"{label}, a {type(value).__name__}")
        elif not isinstance(value, types.ModuleType):
            self._object(label, value, names, depth)

    def _array(self, label: str, value: Any) -> None:
        shape = tuple(getattr(value, "shape", ()))
        self._value(f"{type(value).__name__} {shape} {getattr(value, 'dtype', '')}")
        numel = 1
        for size in shape:
            numel *= size
        if numel == 1 and type(value).__name__ in ("Tensor", "ndarray"):
            self._vary(f"{label}, a {type(value).__name__} of one element")
        # Values on an accelerator are left out: reading them would wait for the device at every save.
        on_host = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
        if on_host and numel <= _TABLE and hasattr(value, "tolist"):
            self._value(repr(value.tolist()))

    def _object(self, label: str, value: Any, names: Any, depth: int) -> None:
        self._value(type(value).__qualname__)
        held = getattr(value, "__dict__", {})
        for name in sorted(set(names) & set(held)):
            self.value(f"{label}.{name}", held[name], (), depth + 1)

    def _writes(self, code: types.CodeType, what: str, bound: bool) -> None:
        for name in _written(code, frozenset(code.co_freevars), bound):
            self._vary(f"it writes to {name or what}")

    def _code(self, text: str) -> None:
        self.code.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def _value(self, text: str) -> None:
        self.values.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def _vary(self, why: str) -> None:
        self.varying = self.varying or why


def _canonical(value: object) -> str:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        # A set's own order follows the hash seed of the process.
        return f"set({sorted(_canonical(item) for item in value)})"
    if isinstance(value, tuple):
        return f"tuple({[_canonical(item) for item in value]})"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    return repr(value)


def _is_library(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename.replace("\\", "/")
    if (function.__module__ or "").partition(".")[0] == "torch" or file.startswith("<frozen"):
        return True
    return "/site-packages/" in file or "/dist-packages/" in file or file.startswith(_STDLIB)


def _names(code: types.CodeType) -> frozenset[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return frozenset(names)


def _globals_read(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _globals_read(const)
    return names


def _written(code: types.CodeType, outer: frozenset[str], bound: bool) -> Iterator[str]:
    """Names outside the function that it rebinds; "" for a write into an object it holds."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield f"the global {instruction.argval!r}"
        elif instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in outer:
            yield f"closure variable {instruction.argval!r}"
        elif bound and instruction.opname in _WRITES:
            yield ""
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _written(const, outer, bound)
