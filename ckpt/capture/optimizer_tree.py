"""What a checkpoint holds of an optimizer, without a live one: as plain values, or as groups to build one with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.capture.base import SavedState
from ckpt.capture.groups import SavedGroup, direct_tensors, saved_groups
from ckpt.capture.module import parameters_of
from ckpt.capture.rebuild import decode_with, here
from ckpt.errors import StateMismatchError
from ckpt.format.names import escape
from ckpt.format.values import Json


def optimizer_tree(saved: SavedState, part: str, decode: Callable[[Json], Any]) -> dict[str, Any]:
    """{"state": {key: {...}}, "param_groups": [{"params": [key, ...], ...}]} with plain values, for reading back.

    decode: makes a value of typed JSON, `{"$tensor": <full name>}` included.
    """
    stored = saved_groups(saved, part)
    table = direct_tensors(saved, part)
    values = stored.state
    state = {}
    for key in (key for group in stored.groups for key in group.names):
        if key in table or key in values:
            tensors = {name: decode({"$tensor": full}) for name, full in table.get(key, {}).items()}
            state[key] = {**tensors, **decode(values.get(key, {}))}
    rows = [{"params": list(x.names), **{k: decode(node) for k, node in x.options.items()}} for x in stored.groups]
    return {"state": state, "param_groups": rows}


def saved_param_groups(saved: SavedState, part: str, modules: Mapping[str, torch.nn.Module]) -> list[dict[str, Any]]:
    """The saved groups over live parameters, to construct an optimizer with: [{"params": [...], "lr": ..., ...}].

    modules: registered name -> live module, wrapped or not. Options that are tensors come as zeros until a resume
    fills them. Raises StateMismatchError listing the parameters that the modules lack.
    """
    stored = saved_groups(saved, part)
    params = _by_key(modules)
    lacking = [key for group in stored.groups for key in group.names if key not in params]
    if lacking:
        raise StateMismatchError(
            f"{part}: {len(lacking)} parameters of its saved groups are not in the model: {', '.join(lacking[:20])}.",
            unexpected=[f"{part}/{escape(key)}" for key in lacking],
            step=saved.step,
            stage="resume",
            hint="Build the model as it was when the step was saved, and pass every module that the optimizer spans.",
        )
    return [_live_group(saved, group, params) for group in stored.groups]


def _by_key(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every key that `parameter_keys` may give one of the parameters, for all its paths."""
    found: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        for fqn, parameter in parameters_of(module):
            found.setdefault(fqn, parameter)
            found[f"{name.replace('/', '.')}.{fqn}"] = parameter
    return found


def _live_group(saved: SavedState, group: SavedGroup, params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    def zeros(name: str, device: str) -> torch.Tensor:
        info = saved.info(name)
        return torch.zeros(
            info.shape if info else (), dtype=getattr(torch, info.dtype) if info else None, device=here(device)
        )

    options = {key: decode_with(node, zeros) for key, node in group.options.items()}
    return {"params": [params[key] for key in group.names], **options}
