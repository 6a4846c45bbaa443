"""The payloads of tags that only torch or numpy can make into values, checked without either of them.

`verify` holds every value of a checkpoint against them; whoever makes the values does so first, so that both call the
same thing damage.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import Any

from ckpt.format.manifest import Manifest
from ckpt.format.values import Json, decode

_UNIT = r"(?:\[[0-9]*(?:generic|Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_NAMED = re.compile(rf"(?:u?int(8|16|32|64)|float(16|32|64)|complex(64|128)|bool|(?:datetime|timedelta)64{_UNIT})\Z")
_CODED = re.compile(rf"[<>|](?:(b1|[iu][1248]|f[248]|c8|c16)|([SU])([0-9]{{1,9}})|[mM]8{_UNIT})\Z")
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(?::(?:0|[1-9][0-9]*))?\Z")
_DTYPE = re.compile(r"[a-z][a-z0-9_]*\Z")


def itemsize_of(kind: Json) -> int:
    """Bytes of one element of a numpy type, spelled by name or as in the array interface.

    Raises ValueError for object, record, void and long double types, and for what is no type.
    """
    if type(kind) is str:
        named = _NAMED.match(kind)
        if named is not None:
            bits = named.group(1) or named.group(2) or named.group(3) or ("8" if kind == "bool" else "64")
            return int(bits) // 8
        coded = _CODED.match(kind)
        if coded is not None:
            simple, text, count = coded.groups()
            return int(simple[1:]) if simple else int(count) * (4 if text == "U" else 1) if text else 8
    raise ValueError(f"{str(kind)[:80]!r} is no numpy type that a checkpoint can hold")


def check(tag: str, payload: Json) -> None:
    """Raises ValueError for a payload that no encoder can have written, and for an unknown tag."""
    if tag not in _CHECKS:
        raise ValueError("the tag is unknown")
    _CHECKS[tag](payload)


def check_values(values: Mapping[str, Json], manifest: Manifest) -> None:
    """Decodes all values of an index as far as that needs neither torch nor numpy; names in them have to exist.

    Raises CorruptCheckpointError (kind "value").
    """
    table = manifest.tensors
    number = {name: i for i, name in enumerate(table.names)}
    number |= {alias: number[target] for alias, target in table.aliases.items()}
    composites = {name for part in manifest.parts.values() for name in part.get("composites", ())}

    def leaf(tag: str, payload: Json) -> _Stand:
        check(tag, payload)
        if tag in ("$tensor", "$ndarray"):
            name = payload if type(payload) is str else payload[0]
            if name not in number and not (tag == "$tensor" and name in composites):
                raise ValueError(f"there is no tensor {name[:200]!r}")
            if tag == "$ndarray" and type(payload) is list:
                i = number[name]
                size = math.prod(payload[2]) * itemsize_of(payload[1])
                if table.dtypes[i] != "uint8" or table.shapes[i] != (size,):
                    raise ValueError(f"the bytes of {name[:200]!r} are not those of such an array")
        return _Stand()

    for node in values.values():
        decode(node, leaf)


class _Stand:
    """In the place of a value that was not made; equal to no other, as keys and members of a set have to be."""


def _text(payload: Json) -> None:
    if type(payload) is not str:
        raise ValueError("it is no text")


def _matching(pattern: re.Pattern[str]) -> Any:
    def look(payload: Json) -> None:
        if type(payload) is not str or not pattern.match(payload):
            raise ValueError(f"{str(payload)[:80]!r} is not spelled so")

    return look


def _list(payload: Json, length: int) -> list[Any]:
    if type(payload) is not list or len(payload) != length:
        raise ValueError(f"it is no list of {length}")
    return payload


def _integers(payload: Json, least: int | None = None) -> None:
    ok = type(payload) is list and all(type(n) is int and (least is None or n >= least) for n in payload)
    if not ok:
        raise ValueError("it is no list of such integers")


def _tensor(payload: Json) -> None:
    if type(payload) is not str:
        name, device = _list(payload, 2)
        _text(name)
        _matching(_DEVICE)(device)


def _array(payload: Json) -> None:
    if type(payload) is not str:
        name, kind, shape = _list(payload, 3)
        _text(name)
        itemsize_of(kind)
        _integers(shape, 0)


def _scalar(payload: Json) -> None:
    kind, raw = _list(payload, 2)
    if len(_base64(raw)) != itemsize_of(kind):
        raise ValueError("its bytes are not those of its type")


def _base64(payload: Json) -> bytes:
    _text(payload)
    return base64.b64decode(payload, validate=True)


_CHECKS: dict[str, Any] = {
    "$tensor": _tensor,
    "$ndarray": _array,
    "$npscalar": _scalar,
    "$npdtype": itemsize_of,
    "$dtype": _matching(_DTYPE),
    "$size": _integers,
    "$device": _matching(_DEVICE),
    "$u8": _base64,
    "$part": _text,
}
