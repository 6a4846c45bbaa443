"""Python values as JSON with typed tags, and back. No pickle, no class names: reading can only make plain values.

JSON's own null, true, false, strings, arrays and numbers stand for None, bool, str, list, int and finite float (a
number with "." or an exponent is a float). An object whose first key starts with "$" is a tag; everything else in the
closed set has a tag, listed in docs/format.md. What the core does not know (tensors, dtypes) goes through `leaf`.
"""

from __future__ import annotations

import base64
import enum
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from ckpt.format.names import MAX_DEPTH, MAX_INT, PART_DEPTH, escape

_HEX = re.compile(r"-?0x[0-9a-f]+\Z")
_DOUBLE = re.compile(r"[0-9a-f]{16}\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")

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
        hint="Keep plain values, tensors and arrays in the state, or give the object a state_dict and load_state_dict.",
    )


def check_text(listed: Iterable[str], path: Path) -> None:
    """Raises UnsupportedStateError, naming it, for a name that holds a lone surrogate: it stands in a list or as a key
    where the format has no other spelling for it."""
    listed = list(listed)
    if "".join(listed).isascii():
        return
    for name in listed:
        if not _is_text(name):
            full = spell((*path, name))
            raise UnsupportedStateError(
                f"{full} cannot be saved: its name holds a lone surrogate, which is no character.",
                name=full,
                type="str",
                stage="capture",
                hint="Give it another name.",
            )


def members(nodes: Mapping[str, Json]) -> Json:
    """The dict whose values are spelled by `nodes` already: one whose keys a user chose may not be put there raw, or
    its first key could read as a tag."""
    if all(not key.startswith("$") and _is_text(key) for key in nodes):
        return dict(nodes)
    return {"$dict": [[encode(key), node] for key, node in nodes.items()]}


def members_of(node: Json) -> dict[str, Json]:
    """The values of a stored dict with text keys, still spelled; the inverse of `members`.

    Raises CorruptCheckpointError for what is no such dict.
    """
    if type(node) is dict and not next(iter(node), "").startswith("$"):
        return node
    rows = node.get("$dict") if type(node) is dict and len(node) == 1 else None
    if type(rows) is list and all(type(row) is list and len(row) == 2 for row in rows):
        found = {decode(key): item for key, item in rows}
        if len(found) == len(rows) and all(type(key) is str for key in found):
            return found
    raise CorruptCheckpointError("A stored value is no dict with text keys.", kind="value")


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
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if _is_text(value) else {"$str": _b64(value.encode("utf-8", "surrogatepass"))}
    if kind is int:
        return value if -MAX_INT <= value <= MAX_INT else {"$int": hex(value)}
    if kind is float:
        return encode_float(value)
    if depth > MAX_DEPTH:
        raise refuse(value, path[:8], f": it is nested more than {MAX_DEPTH} levels deep, or holds itself")
    encoder = _ENCODERS.get(kind)
    try:
        if encoder is not None:
            return encoder(value, path, leaf, depth + 1)
        if isinstance(value, enum.Enum):
            return {"$enum": encode(value.value, path, leaf, depth + 1)}
    except RecursionError:
        raise refuse(value, path[:8], ": it is nested deeper than the stack of this thread bears") from None
    if leaf is not None:
        return leaf(value, path)
    raise refuse(value, path)


def _is_text(value: str) -> bool:
    """False for a str with a lone surrogate, which no strict JSON reader takes."""
    return value.isascii() or _SURROGATE.search(value) is None


def _items(value: Any, path: Path, leaf: EncodeLeaf | None, depth: int) -> list[Json]:
    return [encode(item, (*path, i), leaf, depth) for i, item in enumerate(value)]


def _pairs(value: Any, path: Path, leaf: EncodeLeaf | None, depth: int) -> list[Json]:
    return [
        [encode(key, (*path, "key"), leaf, depth), encode(item, (*path, key), leaf, depth)]
        for key, item in value.items()
    ]


def _encode_dict(value: dict[Any, Any], path: Path, leaf: EncodeLeaf | None, depth: int) -> Json:
    if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
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
    if depth > MAX_DEPTH + PART_DEPTH:
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
    except RecursionError:
        raise CorruptCheckpointError("A stored value is nested too deep.", kind="value") from None
    # Not RuntimeError: a leaf that finds no memory for a tensor is no damage, and no older step would help.
    except (
        ValueError, TypeError, LookupError, AttributeError, OverflowError, SyntaxError, struct.error,
    ) as error:  # fmt: skip
        raise CorruptCheckpointError(f"A stored value of tag {tag!r} is malformed: {error}.", kind="value") from error
    raise CorruptCheckpointError(f"A stored value has the unknown tag {tag[:80]!r}.", kind="value")


_Sub = Callable[[Json], Any]


def _decode_int(payload: Json, _: _Sub) -> int:
    if not _HEX.match(payload):
        raise ValueError("it is no hexadecimal integer")
    return int(payload, 16)


def _decode_float(payload: Json, _: _Sub) -> float:
    if payload in ("inf", "-inf"):
        return float(payload)
    value = struct.unpack(">d", bytes.fromhex(payload))[0] if _DOUBLE.match(payload) else 0.0
    if not math.isnan(value):
        raise ValueError("only NaN is spelled by its bits")
    return value


def _decode_items(payload: Json, sub: _Sub, length: int | None = None) -> list[Any]:
    if type(payload) is not list or (length is not None and len(payload) != length):
        raise ValueError("it is not a list of the length it must have")
    return [sub(item) for item in payload]


def _decode_pairs(payload: Json, sub: _Sub) -> list[tuple[Any, Any]]:
    if type(payload) is not list or any(type(pair) is not list for pair in payload):
        raise ValueError("it is not a list of pairs")
    return [(sub(key), sub(item)) for key, item in payload]


def _decode_dict(payload: Json, sub: _Sub) -> dict[Any, Any]:
    pairs = _decode_pairs(payload, sub)
    return _complete(dict(pairs), len(pairs))


def _complete(result: Any, length: int) -> Any:
    if len(result) != length:
        raise ValueError("an item stands twice")
    return result


def _decode_defaultdict(payload: Json, sub: _Sub) -> Any:
    name, pairs = payload
    return defaultdict(_FACTORIES[name], _decode_dict(pairs, sub))


def _decode_deque(payload: Json, sub: _Sub) -> deque[Any]:
    maxlen, items = payload
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(items)):
        raise ValueError("its length is impossible")
    return deque(_decode_items(items, sub), maxlen=maxlen)


def _decode_bytes(payload: Json, _: _Sub = lambda _: None) -> bytes:
    if type(payload) is not str:
        raise ValueError("it is no base64 text")
    return base64.b64decode(payload, validate=True)


_DECODERS: dict[str, Callable[[Json, _Sub], Any]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$str": lambda v, sub: _decode_bytes(v).decode("utf-8", "surrogatepass"),
    "$dict": _decode_dict,
    "$tuple": lambda v, sub: tuple(_decode_items(v, sub)),
    "$odict": lambda v, sub: OrderedDict(_decode_dict(v, sub)),
    "$counter": lambda v, sub: Counter(_decode_dict(v, sub)),
    "$defaultdict": _decode_defaultdict,
    "$deque": _decode_deque,
    "$set": lambda v, sub: _complete(set(_decode_items(v, sub)), len(v)),
    "$frozenset": lambda v, sub: _complete(frozenset(_decode_items(v, sub)), len(v)),
    "$bytes": _decode_bytes,
    "$bytearray": lambda v, sub: bytearray(_decode_bytes(v)),
    "$complex": lambda v, sub: complex(*_decode_items(v, sub, 2)),
    "$slice": lambda v, sub: slice(*_decode_items(v, sub, 3)),
    "$range": lambda v, sub: range(*_decode_items(v, sub, 3)),
    "$enum": lambda v, sub: sub(v),
}
