"""The options of a parameter group (lr, betas, ...): the checkpoint's win over the script's, differences are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.capture.base import CollectorLike, RestorePlan
from ckpt.capture.enums import settle_enums
from ckpt.capture.functions import difference, fingerprint, is_function
from ckpt.capture.groups import SavedGroup
from ckpt.capture.placing import Placer, live_tensors
from ckpt.errors import UnsupportedStateError
from ckpt.format.values import Json, Path, encode, members

_NOT_OPTIONS = ("params", "param_names")
# A scheduler moves these options while training goes on, and leaves the key beside them: a difference is no news.
_DRIVEN = {"lr": ("initial_lr", "swa_lr"), "momentum": ("max_momentum",), "betas": ("max_momentum",)}


def capture_options(group: Mapping[str, Any], path: Path, into: CollectorLike) -> dict[str, Json]:
    """{"options": ..., "functions": ...}: functions are no state, so that only their fingerprints are kept."""
    options: dict[str, Json] = {}
    functions: dict[str, Json] = {}
    for key, value in group.items():
        if key in _NOT_OPTIONS:
            continue
        if is_function(value):
            functions[key] = fingerprint(value).to_json()
        else:
            options[key] = into.encode(value, (*path, key))
    return {"options": members(options), **({"functions": members(functions)} if functions else {})}


def kept(plan: RestorePlan, part: str) -> frozenset[str]:
    """Options whose value the script keeps. The base that a scheduler multiplies belongs to an lr that is kept."""
    names = frozenset(plan.override.get(part, ()))
    return names | {"initial_lr"} if "lr" in names else names


def plan_options(
    plan: RestorePlan, placer: Placer, part: str, group: Mapping[str, Any], stored: SavedGroup, index: int
) -> Callable[[], dict[str, Any]]:
    """Plans the tensors among the options; the result gives the options to set, once the bytes are in.

    index: the group's position in the checkpoint, which the names of its tensors hold.
    """
    keep = kept(plan, part)
    path = (part, "groups", index)
    chosen = {key: node for key, node in stored.options.items() if key not in keep or key not in group}
    for key in stored.options.keys() - chosen.keys():
        if differs(group[key], stored.options[key]):
            plan.changes.append(f"{key} of group {index} of {part} is the script's")
    settled: dict[str, Json] = {}
    for key, node in chosen.items():
        live = group.get(key)
        settled[key] = settle_enums(plan, node, lambda live=live: live, (*path, key))
        placer.reserve(node, dict(live_tensors(live, (*path, key))))
        driven = any(mark in stored.options for mark in _DRIVEN.get(key, ()))
        if key in group and not driven and differs(live, node):
            plan.notes.append(
                f"{part}: {key} of group {index} is {show(node)} in the checkpoint and {brief(live)} in the script; "
                f"the checkpoint's is used (override={{{part!r}: [{key!r}]}} of resume keeps the script's)"
            )
    for key, value in group.items():
        if key in stored.functions and is_function(value):
            _compare(plan, f"{part}: the function {key!r} of group {index}", stored.functions[key], value)
        elif key not in stored.options and key not in _NOT_OPTIONS and key != "initial_lr":
            plan.notes.append(
                f"{part}: {key} of group {index} is not in the checkpoint; the script's {brief(value)} is kept"
            )
    return lambda: {key: placer.value(node) for key, node in settled.items()}


def _compare(plan: RestorePlan, what: str, saved: Mapping[str, Json], value: Callable[..., Any]) -> None:
    changed = difference(saved, fingerprint(value))
    if changed:
        plan.notes.append(f"{what} is not the one it was at the save: {changed}")
        plan.changes.append(f"{what} changed")


def differs(live: object, node: Json) -> bool:
    """True when `live` is another value than the stored one. Tensors are not compared: their bytes are not read yet."""
    return _spelled(live) != _plain(node)


def _spelled(value: object) -> Json:
    try:
        return encode(value, (), _leaf)
    except UnsupportedStateError:
        return None


def _leaf(value: object, path: Path) -> Json:
    if isinstance(value, torch.Tensor):
        return {"$tensor": None}
    return {"$other": str(value)}


def _plain(node: Json) -> Json:
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if tag == "$tensor":
        return {"$tensor": None}
    if tag == "$dtype":
        return {"$other": f"torch.{node[tag]}"}
    if tag == "$device":
        return {"$other": str(node[tag])}
    return {key: _plain(item) for key, item in node.items()}


def show(node: Json) -> str:
    if isinstance(node, dict) and "$tuple" in node:
        return f"({', '.join(show(item) for item in node['$tuple'])})"
    if isinstance(node, dict) and "$tensor" in node:
        return "a tensor"
    return repr(node)[:200]


def brief(value: object) -> str:
    return repr(value)[:200]
