"""Stored values without torch: every leaf of a part by the path a reader sees, and the facts people ask for first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.errors import CorruptCheckpointError
from ckpt.format import jsontext
from ckpt.format.names import escape
from ckpt.format.values import Json, decode, members, members_of

_MAPPINGS = ("$dict", "$odict", "$counter")
_SEQUENCES = ("$tuple",)


class Opaque:
    """Stands for a value that only torch or numpy can make; `text` is how a person reads it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def plain(node: Json) -> Any:
    """The value of `node`, an `Opaque` in the place of each tensor, array and the like. Raises nothing for damage: a
    node that no save can have written is shown as such."""
    try:
        return decode(node, _opaque)
    except CorruptCheckpointError:
        return Opaque("(unreadable)")


def _opaque(tag: str, payload: Json) -> Opaque:
    if tag == "$tensor":
        return Opaque(f"tensor {payload if isinstance(payload, str) else payload[0]}")
    if tag == "$ndarray":
        return Opaque(f"array {payload if isinstance(payload, str) else payload[0]}")
    if tag == "$u8":
        return Opaque(f"{len(payload) * 3 // 4} bytes")
    if tag == "$npscalar":
        return Opaque(f"numpy {payload[0]}")
    return Opaque(f"{tag[1:]} {payload}" if isinstance(payload, str) else tag[1:])


def leaves(
    values: Mapping[str, Json], parts: Mapping[str, Mapping[str, Json]], kinds: dict[str, str] | None = None
) -> dict[str, Json]:
    """Every stored value that is no tensor, as typed JSON by its path: "optimizer/param_groups/0/lr".

    kinds: gets what stands at each path, tensors, registered objects and inner nodes included, as a text that is the
    same for the same only: a leaf's JSON, of an inner node its type.
    """
    found: dict[str, Json] = {}
    kinds = {} if kinds is None else kinds
    for name, node in values.items():
        if parts.get(name, {}).get("kind") == "optimizer" and type(node) is dict and type(node.get("groups")) is list:
            rest = {key: item for key, item in node.items() if key != "groups"}
            for i, group in enumerate(node["groups"]):
                options = {key: item for key, item in group.items() if key not in ("options", "names")}
                options = {**members_of(group.get("options", {})), **options, "params": group.get("names")}
                _walk(members(options), f"{name}/param_groups/{i}", found, kinds)
            _walk(rest, name, found, kinds)
        else:
            _walk(node, name, found, kinds)
    return found


def _walk(node: Json, path: str, found: dict[str, Json], kinds: dict[str, str]) -> None:
    children = list(_children(node)) if type(node) in (dict, list) else []
    if not children:
        kinds[path] = jsontext.dump(node).decode("ascii")
        if not (type(node) is dict and next(iter(node), "") in ("$tensor", "$ndarray", "$part")):
            found[path] = node
        return
    kinds[path] = _inner_kind(node)
    for key, child in children:
        _walk(child, f"{path}/{key}", found, kinds)


def _inner_kind(node: Json) -> str:
    if type(node) is list:
        return "list"
    tag = next(iter(node))
    # A dict has a tag only where its keys need one.
    return tag if tag.startswith("$") and tag != "$dict" else "dict"


def _children(node: Json) -> Iterator[tuple[str, Json]]:
    if type(node) is list:
        yield from ((str(i), item) for i, item in enumerate(node))
        return
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        yield from ((escape(key), item) for key, item in node.items())
    elif tag in _SEQUENCES and type(node[tag]) is list:
        yield from ((str(i), item) for i, item in enumerate(node[tag]))
    elif tag in _MAPPINGS and type(node[tag]) is list and all(type(p) is list and len(p) == 2 for p in node[tag]):
        for key, item in node[tag]:
            shown = plain(key)
            yield escape(shown) if isinstance(shown, (str, int)) else f"%{shown!r}".replace("/", "%2F"), item


def facts(kind: str, node: Json) -> dict[str, Any]:
    """What is worth showing of one part's values, as plain JSON: the learning rate of each group, the scheduler's last
    epoch, the scale, the position in the data. Empty when there is nothing to say."""
    if type(node) is not dict:
        return {}
    if kind == "optimizer":
        return _optimizer(node)
    if kind == "scaler":
        return {"enabled": False} if not node else _named(node, scale="scale", growth_tracker="_growth_tracker")
    if kind == "scheduler":
        return _named(node, last_epoch="last_epoch", last_lr="_last_lr", best="best", bad_epochs="num_bad_epochs")
    if kind == "loader":
        return _loader(node)
    if kind == "object":
        return _object(node)
    return {}


def _named(node: Mapping[str, Json], **keys: str) -> dict[str, Any]:
    found = {}
    for shown, key in keys.items():
        value = node.get(key)
        if value is not None and _is_simple(value):
            found[shown] = value
    return found


def _is_simple(node: Json) -> bool:
    """True for numbers, texts and short lists of them, non-finite floats included."""
    if type(node) is list:
        return len(node) <= 64 and all(_is_simple(item) and type(item) is not list for item in node)
    if type(node) is dict:
        return list(node) == ["$float"]
    return node is None or type(node) in (int, float, str, bool)


def _optimizer(node: Mapping[str, Json]) -> dict[str, Any]:
    groups = []
    for group in node.get("groups") or ():
        options = members_of(group.get("options", {}))
        row: dict[str, Any] = {"params": len(group.get("names", ()))}
        for key in ("lr", "weight_decay", "momentum"):
            if key in options:
                row[key] = options[key] if _is_simple(options[key]) else None
        if type(options.get("betas")) is dict and type(options["betas"].get("$tuple")) is list:
            row["betas"] = options["betas"]["$tuple"]
        groups.append(row)
    return {"groups": groups}


def _loader(node: Mapping[str, Json]) -> dict[str, Any]:
    found = _named(node, epoch="epoch", samples="samples", length="length", batch_size="batch_size", seed="seed")
    length, samples = found.get("length"), found.get("samples")
    if type(length) is int and type(samples) is int and length > 0:
        found["fraction"] = min(samples / length, 1.0)
    return found


def _object(node: Mapping[str, Json]) -> dict[str, Any]:
    if next(iter(node), "").startswith("$"):
        return {}
    return {key: value for key, value in node.items() if _is_simple(value) and type(value) is not list}
