"""What a checkpoint holds of an optimizer, without a live one: as plain values, or as groups to build one with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.capture.base import SavedState
from ckpt.capture.groups import SavedGroup, direct_tensors, saved_groups
from ckpt.capture.rebuild import decode_with, here
from ckpt.format.values import Json


def optimizer_tree(saved: SavedState, part: str, decode: Callable[[Json], Any]) -> dict[str, Any]:
    """{"state": {key: {...}}, "param_groups": [{"params": [key, ...], ...}]} with plain values, for reading back.

    decode: makes a value of typed JSON, `{"$tensor": <full name>}` included.
    """
    stored = saved_groups(saved, part)
    table = direct_tensors(saved, part)
    values: Mapping[str, Json] = saved.values[part]["state"]
    state = {}
    for key in (key for group in stored.groups for key in group.names):
        if key in table or key in values:
            tensors = {name: decode({"$tensor": full}) for name, full in table.get(key, {}).items()}
            state[key] = {**tensors, **decode(values.get(key, {}))}
    rows = [{"params": list(x.names), **{k: decode(node) for k, node in x.options.items()}} for x in stored.groups]
    return {"state": state, "param_groups": rows}


def saved_param_groups(saved: SavedState, part: str, params: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The saved groups over live parameters, to construct an optimizer with: [{"params": [...], "lr": ..., ...}].

    params: every name of a live parameter, aliases too -> the parameter. Options that are tensors come as zeros until
    a resume fills them. Raises KeyError naming the parameters that are not in `params`.
    """
    stored = saved_groups(saved, part)
    lacking = [key for group in stored.groups for key in group.names if key not in params]
    if lacking:
        raise KeyError(f"parameters of the saved {part!r} that the model lacks: {', '.join(lacking[:20])}")
    return [_live_group(saved, group, params) for group in stored.groups]


def _live_group(saved: SavedState, group: SavedGroup, params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    def zeros(name: str, device: str) -> torch.Tensor:
        info = saved.info(name)
        return torch.zeros(
            info.shape if info else (), dtype=getattr(torch, info.dtype) if info else None, device=here(device)
        )

    options = {key: decode_with(node, zeros) for key, node in group.options.items()}
    return {"params": [params[key] for key in group.names], **options}
