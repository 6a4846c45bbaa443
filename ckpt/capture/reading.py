"""A checkpoint as one tree of plain tensors and values, without any live object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckpt.capture.base import SavedState
from ckpt.capture.optimizer_tree import optimizer_tree
from ckpt.capture.rebuild import ABSENT, PartReference, decode_with, stored_tensor
from ckpt.format.names import unescape
from ckpt.format.values import Json, members_of, spell

Keep = Callable[[str], bool]


def build_tree(saved: SavedState, tensors: Mapping[str, torch.Tensor], keep: Keep | None = None) -> dict[str, Any]:
    """The state by registered name: ["model"][fqn], ["optimizer"] = {"state": {fqn: {...}}, "param_groups": [...]},
    ["rng"]["python" | "numpy" | "torch" | ...], others as their state_dict gave them.

    tensors: by stored name; tied names share one. Leaves whose tensors are not there are left out, and with `keep`
    those for whose path ("model/layers.0.weight") it is false. A flattened subclass is a dict of its components.
    """
    tree = _tree(saved, tensors)
    kept = _pruned(tree, (), keep)
    return kept if isinstance(kept, dict) else {}


def leaf_paths(saved: SavedState) -> list[str]:
    """The path of every leaf of the tree, as patterns are matched against; a tensor's is its full name."""
    return [spell(path) for path in _leaves(_tree(saved, {}), ())]


def _tree(saved: SavedState, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    tree = {name: _part(name, saved, tensors) for name in saved.parts if "/" not in name}
    rng = saved.values.get("rng")
    if rng is not None:
        tree["rng"] = {key: _decoded(node, saved, tensors) for key, node in rng.items()}
    return tree


def _find(saved: SavedState, tensors: Mapping[str, torch.Tensor], name: str) -> Any:
    try:
        return stored_tensor(saved, tensors, name)
    except KeyError:
        if saved.info(name) is None and name not in saved.composites:
            raise  # not one that was left out: the checkpoint has none of this name
        return ABSENT


def _decoded(node: Json, saved: SavedState, tensors: Mapping[str, torch.Tensor]) -> Any:
    return decode_with(node, lambda name, _: _find(saved, tensors, name))


def _part(name: str, saved: SavedState, tensors: Mapping[str, torch.Tensor]) -> Any:
    kind = saved.parts[name].get("kind")
    if kind == "module":
        return _module(name, saved, tensors)
    if kind == "optimizer":
        return optimizer_tree(saved, name, lambda node: _decoded(node, saved, tensors))
    value = _decoded(saved.values.get(name), saved, tensors)
    return _with_parts(value, saved, tensors) if kind == "container" else value


def _module(name: str, saved: SavedState, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    values = saved.values.get(name) or {}
    extra = members_of(values.get("extra", {}))
    start = len(name) + 1
    # Tensors inside extra state lie one level deeper than those of parameters and buffers.
    full_names = saved.names.get(name.split("/", 1)[0], ())
    direct = [full for full in full_names if full.startswith(f"{name}/") and "/" not in full[start:]]
    found = {str(unescape(full[start:])): _find(saved, tensors, full) for full in direct}
    return {**found, **{fqn: _decoded(node, saved, tensors) for fqn, node in extra.items()}}


def _with_parts(value: Any, saved: SavedState, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, PartReference):
        return _part(value.name, saved, tensors)
    if isinstance(value, dict):
        return type(value)((key, _with_parts(item, saved, tensors)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_with_parts(item, saved, tensors) for item in value)
    return value


def _pruned(node: Any, path: tuple[object, ...], keep: Keep | None) -> Any:
    """`node` without the leaves that are absent or not kept, and without containers that became empty so."""
    if type(node) is dict and node:
        kept = {key: _pruned(item, (*path, key), keep) for key, item in node.items()}
        kept = {key: item for key, item in kept.items() if item is not ABSENT}
        return kept or ABSENT
    if type(node) in (list, tuple) and len(node) > 0:
        items = [_pruned(item, (*path, i), keep) for i, item in enumerate(node)]
        items = [item for item in items if item is not ABSENT]
        return type(node)(items) if items else ABSENT
    return ABSENT if keep is not None and not keep(spell(path)) else node


def _leaves(node: Any, path: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    if type(node) is dict and node:
        for key, item in node.items():
            yield from _leaves(item, (*path, key))
    elif type(node) in (list, tuple) and len(node) > 0:
        for i, item in enumerate(node):
            yield from _leaves(item, (*path, i))
    else:
        yield path
