"""Objects that load in their own way are compared twice: before a byte lands, and after they took their state.

Before: what a module's `state_dict` gives now has the names, shapes and dtypes that were saved. Names are left to a
module that reads its state in its own way: it may know how to take older ones. After: the object is asked again. A
tensor of a module or an optimizer that came out in another shape or dtype is an error, since bits were lost where
nobody would look; other bits in the same shape, names that are gone and names that came from nowhere are the object's
own doing, and stand in `plan.changes`. Of other objects all three do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckpt.capture import composite
from ckpt.capture.base import RestorePlan
from ckpt.capture.module import unwrap
from ckpt.capture.placing import live_tensors
from ckpt.capture.tensors import as_bytes
from ckpt.errors import StateMismatchError

log = logging.getLogger("ckpt")


def compare_given(plan: RestorePlan, name: str, module: nn.Module, state: Any) -> None:
    """Lists what a module, asked as a whole, gives otherwise than it was saved."""
    live = dict(live_tensors(state, (name,)))
    saved = {full for full in plan.saved.names.get(name.partition("/")[0], ()) if full.startswith(f"{name}/")}
    if not loads_freely(module):
        plan.missing.extend(full for full in live if full not in saved)
        plan.unexpected.extend(full for full in saved if full not in live)
    for full, tensor in live.items():
        compare_tensor(plan, full, tensor)


def compare_tensor(plan: RestorePlan, full: str, live: Any) -> None:
    """Lists another shape or dtype of a tensor that both sides have and somebody else's load fills."""
    info = plan.saved.info(full)
    if info is not None and isinstance(live, torch.Tensor) and not composite.is_composite(live):
        plan.compare(full, live, info)


def loads_freely(module: nn.Module) -> bool:
    """True when a module inside reads its state_dict in its own way, so that names may rightly differ."""
    for inner in module.modules():
        inner = unwrap(inner)
        kind = type(inner)
        loads = next(base for base in kind.__mro__ if "_load_from_state_dict" in base.__dict__)
        own = not loads.__module__.startswith("torch.nn.modules.")
        if own or inner._load_state_dict_pre_hooks or kind.load_state_dict is not nn.Module.load_state_dict:
            return True
        if "load_state_dict" in inner.__dict__:
            return True
    return False


def list_incompatible(plan: RestorePlan, result: Any, names: Mapping[str, str]) -> None:
    """Lists what `load_state_dict` said it missed. names: key of a state_dict the module gives -> full name; a class
    that saves a part of itself on purpose misses the rest at each load."""
    missed = [names[key] for key in getattr(result, "missing_keys", ()) if key in names]
    missed = [full for full in missed if full not in plan.missing]
    if missed:
        plan.missing += missed
        plan.changes.append(f"{len(missed)} names were missing in what a module loads in its own way")


def compare_loaded(
    plan: RestorePlan, what: str, want: Mapping[str, Any], got: Mapping[str, Any], *, refuse: bool, whole: bool
) -> None:
    """Compares the tensors an object gives after its load with those it was given, by full name.

    refuse: another shape or dtype raises StateMismatchError; else it is listed as a change. whole: a name that only
    the object gives is listed too.
    """
    shape: list[tuple[str, str, str]] = []
    dtype: list[tuple[str, str, str]] = []
    other: list[str] = []
    for full, then in want.items():
        now = got.get(full)
        if now is then or not _comparable(then):
            continue
        if not isinstance(now, torch.Tensor):
            other.append(full)
        elif now.shape != then.shape:
            shape.append((full, str(list(then.shape)), str(list(now.shape))))
        elif now.dtype is not then.dtype:
            if not plan.casting:
                dtype.append((full, _name(then), _name(now)))
        elif _comparable(now) and not torch.equal(as_bytes(now), as_bytes(then)):
            other.append(full)
    if refuse and (shape or dtype):
        raise _refused(plan, what, shape, dtype)
    other += [full for full, _, _ in (*shape, *dtype)]
    if whole:
        other += [full for full in got if full not in want and full not in plan.missing]
    if other:
        shown = ", ".join(other[:10]) + (f" and {len(other) - 10} more" if len(other) > 10 else "")
        plan.changes.append(f"the own load of {what} made other tensors of what was saved: {shown}")
        log.warning("%s gives other tensors after its own load than were saved: %s", what, shown)


def _refused(
    plan: RestorePlan, what: str, shape: list[tuple[str, str, str]], dtype: list[tuple[str, str, str]]
) -> StateMismatchError:
    lines = [f"shape of {n}: saved {a}, {b} after the load" for n, a, b in shape[:20]]
    lines += [f"dtype of {n}: saved {a}, {b} after the load" for n, a, b in dtype[:20]]
    return StateMismatchError(
        f"{what} took the state saved at step {plan.saved.step} and made other tensors of it:\n  " + "\n  ".join(lines),
        shape=shape,
        dtype=dtype,
        step=plan.saved.step,
        stage="resume",
        hint="Its own load must keep shapes and dtypes: torch's Optimizer.load_state_dict casts state to the dtype of "
        "the parameter. Without a state_dict and load_state_dict of its own, an optimizer is restored bit for bit.",
    )


def _comparable(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or composite.is_composite(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
