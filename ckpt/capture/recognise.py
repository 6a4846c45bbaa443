"""Which kind of part an object is; the one place where a registered object is told from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from ckpt.capture import optimizer, scaler, scheduler
from ckpt.capture.base import Part, Phase
from ckpt.capture.collector import Collector
from ckpt.capture.containers import ContainerPart, is_container
from ckpt.capture.module import ModulePart, overrides_state_dict, unwrap
from ckpt.capture.objects import ObjectPart
from ckpt.capture.rng import GeneratorPart, family
from ckpt.errors import UnsupportedStateError


@dataclass(frozen=True)
class Directory:
    """What parts ask about the other registered objects, at each save and resume, when all are registered.

    parameters: id(parameter) -> "<registered name>/<fqn>"; optimizers: id(optimizer) -> registered name.
    """

    parameters: Callable[[], Mapping[int, str]] = dict
    optimizers: Callable[[], Mapping[int, str]] = dict


ALONE = Directory()


def make_part(name: str, obj: Any, directory: Directory = ALONE) -> Part:
    """The part for `obj`. Raises UnsupportedStateError(name, type) for what a checkpoint cannot hold."""
    part = _known(name, obj, directory) or _pair(name, obj)
    if part is not None:
        return part
    if is_container(obj) and not isinstance(obj, tuple):
        return ContainerPart(name, obj, lambda path, inner: _inner(path, inner, directory))
    raise unsupported(name, obj)


def unsupported(name: str, obj: Any) -> UnsupportedStateError:
    kind = f"the class {obj.__name__} itself" if isinstance(obj, type) else f"of type {type(obj).__name__}"
    half = [method for method in ("state_dict", "load_state_dict", "get_state", "set_state") if _has(obj, method)]
    hint = "Put plain values and tensors into a ckpt.StateDict(...), or give the object a state_dict / load_state_dict "
    hint += "pair."
    if isinstance(obj, (DataLoader, Sampler)):
        hint = "Use ckpt.ResumableLoader or a loader with a state_dict of its own. " + hint
    return UnsupportedStateError(
        f"{name!r} is {kind}, which cannot be registered"
        + (f": it has {' and '.join(half)} without the other of the pair." if half else "."),
        name=name,
        type=obj.__name__ if isinstance(obj, type) else type(obj).__name__,
        stage="register",
        hint=hint,
    )


def _known(name: str, obj: Any, directory: Directory) -> Part | None:
    if isinstance(obj, type):
        raise unsupported(name, obj)
    if isinstance(obj, nn.Module):
        return _module(name, obj)
    if optimizer.is_own(obj):
        return optimizer.OptimizerPart(name, obj, directory.parameters)
    if isinstance(obj, scheduler.LRScheduler):  # one with a pair of its own may still hold functions there
        return scheduler.SchedulerPart(name, obj)
    if scaler.is_own(obj):
        return scaler.ScalerPart(name, obj, directory.optimizers)
    return GeneratorPart(name, obj) if family(obj) is not None else None


def _module(name: str, module: nn.Module) -> Part:
    inner = unwrap(module)
    own = inner.__dict__
    if overrides_state_dict(type(inner)) or "state_dict" in own or "load_state_dict" in own:
        if not isinstance(inner, torch.jit.ScriptModule):
            # What such a class stores is its own choice (adapters only, another naming): it is asked as it is.
            return ObjectPart(name, inner, ("state_dict", "load_state_dict"), Phase.MODULES)
    return ModulePart(name, module)


def _has(obj: Any, method: str) -> bool:
    return callable(getattr(obj, method, None))


def _pair(name: str, obj: Any) -> Part | None:
    for give, take in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if _has(obj, give) and _has(obj, take):
            return ObjectPart(name, obj, (give, take), _phase(obj))
    return None


def _phase(obj: Any) -> Phase:
    if isinstance(obj, torch.optim.Optimizer):
        return Phase.OPTIMIZERS
    if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        return Phase.SCHEDULERS
    return Phase.DATA if _is_stream(obj) else Phase.OTHERS


def _is_stream(obj: Any) -> bool:
    """A loader, sampler or stream: its position goes in after everything else, right before RNG."""
    return isinstance(obj, (DataLoader, Sampler)) or (hasattr(type(obj), "__iter__") and not isinstance(obj, Mapping))


def _inner(path: str, obj: Any, directory: Directory) -> Part | None:
    """The part for an object inside a container; None for a plain value, which is checked here."""
    part = _known(path, obj, directory) or _pair(path, obj)
    if part is not None:
        return part
    try:
        Collector().encode(obj, ())
    except UnsupportedStateError as error:
        inner = f"{path}/{error.name}" if error.name else path
        raise UnsupportedStateError(
            f"{inner!r} is of type {error.type}, which cannot be registered.",
            name=inner,
            type=error.type,
            stage="register",
            hint="Give the object a state_dict / load_state_dict pair, or keep plain values, tensors and arrays.",
        ) from error
    return None
