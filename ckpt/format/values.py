"""Python values as JSON with typed tags, and back. No pickle, no class names: reading can only make plain values.

JSON's own null, true, false, strings, arrays and numbers stand for None, bool, str, list, int and finite float (a
number with "." or an exponent is a float). An object whose first key starts with "$" is a tag; everything else in the
closed set has a tag, listed in docs/format.md. What the core does not know (tensors, dtypes) goes through `leaf`.
"""

from __future__ import annotations

import base64
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from ckpt.format.names import MAX_DEPTH, MAX_INT, escape

Json = Any
Path = tuple[object, ...]
EncodeLeaf = Callable[[Any, Path], Json]
DecodeLeaf = Callable[[str, Json], Any]

_FACTORIES: dict[str, Any] = {
    "none": None, "int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "set": set,
    "tuple": tuple, "bytes": bytes,
}  # fmt: skip
_FACTORY_NAMES = {value: name for name, value in _FACTORIES.items()}


def spell(path: Path) -> str:
    """A path as a person and a pattern read it: segments joined by "/"."""
    return "/".join(escape(key) if isinstance(key, (str, int)) else f"%{key!r}".replace("/", "%2F") for key in path)


def refuse(value: object, path: Path, why: str = "") -> UnsupportedStateError:
    name = spell(path)
    kind = type(value).__name__
    return UnsupportedStateError(
        f"{name or 'value'} is of type {kind}, which a checkpoint cannot hold{why}.",
        name=name,
        type=kind,
        stage="capture",
        hint="Keep plain values, tensors and arrays in the state, or give the object a state_dict / load_state_dict pair.",
    )


def encode_float(value: float) -> Json:
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"$float": "inf" if value > 0 else "-inf"}
    return {"$float": struct.pack(">d", value).hex()}


def encode(value: Any, path: Path = (), leaf: EncodeLeaf | None = None, depth: int = 0) -> Json:
    """`value` as JSON. Raises UnsupportedStateError, naming the path, for anything outside the closed set.

    `leaf(value, path)` is asked for every value that is not of an exact built-in type; it returns JSON or raises.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -MAX_INT <= value <= MAX_INT else {"$int": hex(value)}
    if kind is float:
        return encode_float(value)
    if depth > MAX_DEPTH:
        raise refuse(value, path[:8], f": it is nested more than {MAX_DEPTH} levels deep, or holds itself")
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, path, leaf, depth + 1)
    if isinstance(value, enum.Enum):
        return {"$enum": encode(value.value, path, leaf, depth + 1)}
    if leaf is not None:
        return leaf(value, path)
    raise refuse(value, path)


def _items(value: Any, path: Path, leaf: EncodeLeaf | None, depth: int) -> list[Json]:
    return [encode(item, (*path, i), leaf, depth) for i, item in enumerate(value)]


def _pairs(value: Any, path: Path, leaf: EncodeLeaf | None, depth: int) -> list[Json]:
    return [
        [encode(key, (*path, "key"), leaf, depth), encode(item, (*path, key), leaf, depth)]
        for key, item in value.items()
    ]


def _encode_dict(value: dict[Any, Any], path: Path, leaf: EncodeLeaf | None, depth: int) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, (*path, key), leaf, depth) for key, item in value.items()}
    return {"$dict": _pairs(value, path, leaf, depth)}


def _encode_set(value: Any, path: Path, leaf: EncodeLeaf | None, depth: int) -> list[Json]:
    import json

    # A set has no order of its own: without the sort the same state would give different bytes.
    return sorted((encode(item, (*path, "item"), leaf, depth) for item in value), key=lambda node: json.dumps(node))


def _encode_defaultdict(value: Any, path: Path, leaf: EncodeLeaf | None, depth: int) -> Json:
    name = _FACTORY_NAMES.get(value.default_factory) if _hashable(value.default_factory) else None
    if name is None:
        raise refuse(value, path, " because its default factory is not a plain type")
    return {"$defaultdict": [name, _pairs(value, path, leaf, depth)]}


def _hashable(value: object) -> bool:
    return value is None or isinstance(value, type)


def _b64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


_ENCODERS: dict[type, Callable[[Any, Path, EncodeLeaf | None, int], Json]] = {
    list: _items,
    dict: _encode_dict,
    tuple: lambda v, p, leaf, d: {"$tuple": _items(v, p, leaf, d)},
    OrderedDict: lambda v, p, leaf, d: {"$odict": _pairs(v, p, leaf, d)},
    Counter: lambda v, p, leaf, d: {"$counter": _pairs(v, p, leaf, d)},
    defaultdict: _encode_defaultdict,
    deque: lambda v, p, leaf, d: {"$deque": [v.maxlen, _items(v, p, leaf, d)]},
    set: lambda v, p, leaf, d: {"$set": _encode_set(v, p, leaf, d)},
    frozenset: lambda v, p, leaf, d: {"$frozenset": _encode_set(v, p, leaf, d)},
    bytes: lambda v, p, leaf, d: {"$bytes": _b64(v)},
    bytearray: lambda v, p, leaf, d: {"$bytearray": _b64(v)},
    complex: lambda v, p, leaf, d: {"$complex": [encode_float(v.real), encode_float(v.imag)]},
    slice: lambda v, p, leaf, d: {"$slice": _items((v.start, v.stop, v.step), p, leaf, d)},
    range: lambda v, p, leaf, d: {"$range": _items((v.start, v.stop, v.step), p, leaf, d)},
}


def decode(node: Json, leaf: DecodeLeaf | None = None, depth: int = 0) -> Any:
    """The value that `encode` spelled as `node`; an enum comes back as its plain value.

    `leaf(tag, payload)` is asked for every tag the core does not know. Raises CorruptCheckpointError for a node that no
    encoder can have written.
    """
    if node is None or isinstance(node, (str, bool, int, float)):
        return node
    if depth > MAX_DEPTH + 1:
        raise CorruptCheckpointError("A stored value is nested too deep.", kind="value")
    if isinstance(node, list):
        return [decode(item, leaf, depth + 1) for item in node]
    if not isinstance(node, dict):
        raise CorruptCheckpointError(f"A stored value has the impossible type {type(node).__name__}.", kind="value")
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: decode(item, leaf, depth + 1) for key, item in node.items()}
    if len(node) != 1:
        raise CorruptCheckpointError(f"A stored value has keys beside its tag {tag!r}.", kind="value")
    decoder = _DECODERS.get(tag)
    try:
        if decoder is not None:
            return decoder(node[tag], lambda item: decode(item, leaf, depth + 1))
        if leaf is not None:
            return leaf(tag, node[tag])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error) as error:
        raise CorruptCheckpointError(f"A stored value of tag {tag!r} is malformed: {error}.", kind="value") from error
    raise CorruptCheckpointError(f"A stored value has the unknown tag {tag!r}.", kind="value")


def _decode_float(payload: Json, _: Callable[[Json], Any]) -> float:
    if payload in ("inf", "-inf"):
        return float(payload)
    value = struct.unpack(">d", bytes.fromhex(payload))[0]
    if not math.isnan(value):
        raise ValueError("only NaN is spelled by its bits")
    return value


def _decode_pairs(payload: Json, sub: Callable[[Json], Any]) -> list[tuple[Any, Any]]:
    return [(sub(key), sub(item)) for key, item in payload]


_DECODERS: dict[str, Callable[[Json, Callable[[Json], Any]], Any]] = {
    "$int": lambda v, sub: int(v, 16),
    "$float": _decode_float,
    "$dict": lambda v, sub: dict(_decode_pairs(v, sub)),
    "$tuple": lambda v, sub: tuple(sub(item) for item in v),
    "$odict": lambda v, sub: OrderedDict(_decode_pairs(v, sub)),
    "$counter": lambda v, sub: Counter(dict(_decode_pairs(v, sub))),
    "$defaultdict": lambda v, sub: defaultdict(_FACTORIES[v[0]], _decode_pairs(v[1], sub)),
    "$deque": lambda v, sub: deque((sub(item) for item in v[1]), maxlen=v[0]),
    "$set": lambda v, sub: {sub(item) for item in v},
    "$frozenset": lambda v, sub: frozenset(sub(item) for item in v),
    "$bytes": lambda v, sub: base64.b64decode(v, validate=True),
    "$bytearray": lambda v, sub: bytearray(base64.b64decode(v, validate=True)),
    "$complex": lambda v, sub: complex(sub(v[0]), sub(v[1])),
    "$slice": lambda v, sub: slice(*(sub(item) for item in v)),
    "$range": lambda v, sub: range(*(sub(item) for item in v)),
    "$enum": lambda v, sub: sub(v),
}
