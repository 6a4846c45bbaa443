"""Enums: stored by their plain values, and put back as members of the class that the live object holds there.

No class is named in a checkpoint, so that the script's own object tells which one is meant: by the live value in the
same place, or where there is none yet, by its neighbours in the same list or mapping, if they are of one class.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt.capture.base import RestorePlan
from ckpt.capture.rebuild import decode_with
from ckpt.format.values import Json, spell

_ABSENT: Any = object()
_PAIRS = ("$dict", "$odict", "$counter")
_ITEMS = ("$tuple", "$set", "$frozenset", "$slice")


def settle_enums(plan: RestorePlan, node: Json, live: Callable[[], Any], path: tuple[object, ...]) -> Json:
    """`node` with members in the place of enum values. live: gives the live value of `path`; asked only if needed.

    A value that is no member of the live class any more is a problem; one whose class nothing tells stays a plain
    value, and is listed in `plan.changes`.
    """
    return _Settling(plan).walk(node, live(), path) if _holds_enum(node) else node


def _holds_enum(node: Json) -> bool:
    if type(node) is dict:
        return "$enum" in node or any(map(_holds_enum, node.values()))
    return type(node) is list and any(map(_holds_enum, node))


class _Settling:
    def __init__(self, plan: RestorePlan) -> None:
        self._plan = plan

    def walk(self, node: Json, live: Any, path: tuple[object, ...]) -> Json:
        if type(node) is list:
            return self._items(node, live, path)
        if type(node) is not dict:
            return node
        tag = next(iter(node), "")
        payload = node.get(tag)
        if tag == "$enum":
            return self._member(node, live, path)
        if not tag.startswith("$"):
            held = _mapping(live)
            other = _neighbour(held.values())
            return {key: self.walk(item, held.get(key, other), (*path, key)) for key, item in node.items()}
        # What is malformed is left to the decoder, which says so.
        if tag in _PAIRS and type(payload) is list:
            return {tag: self._pairs(payload, live, path)}
        if tag in _ITEMS and type(payload) is list:
            return {tag: self._items(payload, live, path)}
        if tag in ("$defaultdict", "$deque") and type(payload) is list and len(payload) == 2:
            inner = self._pairs if tag == "$defaultdict" else self._items
            return {tag: [payload[0], inner(payload[1], live, path)]} if type(payload[1]) is list else node
        return node

    def _items(self, nodes: list[Json], live: Any, path: tuple[object, ...]) -> list[Json]:
        held = list(live) if isinstance(live, (list, tuple, deque, set, frozenset)) else []
        other = _neighbour(held)
        in_order = not isinstance(live, (set, frozenset))
        return [
            self.walk(item, held[i] if in_order and i < len(held) else other, (*path, i))
            for i, item in enumerate(nodes)
        ]

    def _pairs(self, rows: list[Json], live: Any, path: tuple[object, ...]) -> list[Json]:
        held = _mapping(live)
        keys, values = _neighbour(held), _neighbour(held.values())
        made: list[Json] = []
        for row in rows:
            if type(row) is not list or len(row) != 2:
                return rows
            key = self.walk(row[0], keys, (*path, "key"))
            found = key["$member"] if type(key) is dict and "$member" in key else _plain_key(row[0])
            made.append([key, self.walk(row[1], held.get(found, values), (*path, found))])
        return made

    def _member(self, node: Json, live: Any, path: tuple[object, ...]) -> Json:
        kind = type(live)
        if not issubclass(kind, enum.Enum):
            self._plan.changes.append(
                f"{spell(path)} was a member of an enum, which the live object does not hold there: it is a plain value"
            )
            return node
        value = decode_with(node["$enum"], lambda name, device: None)
        try:
            return {"$member": kind(value)}
        except ValueError:
            self._plan.problems.append(f"{spell(path)} was saved as {value!r}, which is no {kind.__name__} now")
            return node


def _mapping(live: Any) -> Mapping[Any, Any]:
    return live if isinstance(live, Mapping) else {}


def _neighbour(values: Iterable[Any]) -> Any:
    """One that stands for a value that is not there yet; `_ABSENT` when there is none, or they are of several kinds."""
    held = list(values)
    return held[0] if len({type(value) for value in held}) == 1 else _ABSENT


def _plain_key(node: Json) -> Any:
    """A stored key that can be looked up: text and numbers, which are what keys are."""
    return node if type(node) in (str, int, float, bool) or node is None else _ABSENT
