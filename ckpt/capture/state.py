"""The registered objects as a whole: what they hold at the moment of a save, and how a checkpoint goes back in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt.capture.base import Part, RestorePlan, SavedState
from ckpt.capture.collector import Collector
from ckpt.capture.containers import ContainerPart
from ckpt.capture.layout import settle_targets
from ckpt.capture.module import parameter_names
from ckpt.capture.recognise import Directory, make_part
from ckpt.capture.rng import COMPONENTS, capture_rng, plan_rng
from ckpt.format.names import RESERVED_PARTS, is_part_name
from ckpt.format.values import Json

_KEEPS_OPTIONS = ("optimizer", "scheduler", "scaler")


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment (I10), not yet copied: staging must copy `tensors` before the caller goes on.

    tensors: stored name -> live tensor, in the order of capture; dim_orders: of those that are dense and not row-major;
    aliases: name -> stored name; parts, values: by registered name, `values["rng"]` included. All but `tensors` is
    already independent of every live object.
    """

    tensors: dict[str, torch.Tensor]
    dim_orders: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    parts: dict[str, dict[str, Json]]
    values: dict[str, Json]


class Registry:
    """The registered objects, in the order of registration."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.parts: dict[str, Part] = {}
        self._names: dict[int, str] | None = None
        self._directory = Directory(self._parameter_names, self._optimizer_names)

    def register(self, name: str, obj: Any) -> None:
        """Adds `obj` as `name`.

        Raises TypeError or ValueError for a bad, reserved or taken name, and UnsupportedStateError(name, type) for an
        object that a checkpoint cannot hold; the registry is unchanged then.
        """
        if not isinstance(name, str):
            raise TypeError(f"a registered name is a str, not {type(name).__name__}")
        if not is_part_name(name):
            raise ValueError(f"{name!r} is no name: use 1 to 128 of letters, digits, '_', '.', '-'")
        if name in RESERVED_PARTS:
            raise ValueError(f"the name {name!r} is reserved")
        if name in self.parts:
            raise ValueError(f"{name!r} is registered already")
        self.parts[name] = make_part(name, obj, self._directory)
        self.objects[name] = obj

    def all_parts(self) -> dict[str, Part]:
        """The parts of the registered objects, those inside containers too, by full name."""
        found = dict(self.parts)
        for part in self.parts.values():
            if isinstance(part, ContainerPart):
                found.update(part.parts())
        return found

    def all_objects(self) -> dict[str, Any]:
        """The registered objects, those inside containers too, by full name."""
        found = dict(self.objects)
        for part in self.parts.values():
            if isinstance(part, ContainerPart):
                found.update(part.objects())
        return found

    def modules(self) -> dict[str, nn.Module]:
        return {name: obj for name, obj in self.all_objects().items() if isinstance(obj, nn.Module)}

    def _optimizer_names(self) -> Mapping[int, str]:
        found = self.all_objects()
        return {id(obj): name for name, obj in found.items() if isinstance(obj, torch.optim.Optimizer)}

    def _parameter_names(self) -> Mapping[int, str]:
        return parameter_names(self.modules()) if self._names is None else self._names

    def __enter__(self) -> Registry:
        # Each optimizer asks for the names; the modules are walked once for all of them.
        self._names = parameter_names(self.modules())
        return self

    def __exit__(self, *_: object) -> None:
        self._names = None


def capture(registry: Registry) -> Snapshot:
    """Reads the state of every registered object and of the global RNG, on the calling thread.

    Only reads (I7): no training hook fires, no RNG is drawn, no tensor is copied. Raises UnsupportedStateError naming
    the path of what a checkpoint cannot hold.
    """
    into = Collector()
    with registry:
        for part in registry.parts.values():
            part.capture(into)
    into.values["rng"] = capture_rng()
    for name, head in into.composites.items():
        into.parts[name.split("/", 1)[0]].setdefault("composites", {})[name] = head
    for name, mark in into.marks.items():
        into.parts[name.split("/", 1)[0]].setdefault("marks", {})[name] = mark
    return Snapshot(into.tensors, into.dim_orders, into.aliases, into.parts, into.values)


def plan_restore(
    registry: Registry,
    saved: SavedState,
    strict: bool = True,
    override: Mapping[str, tuple[str, ...]] | None = None,
) -> RestorePlan:
    """Compares `saved` with the registered objects and plans their restore; changes nothing.

    Registered and saved names must be equal, or are listed as missing and unexpected. `plan.check()` has still to be
    called: it raises what was found. Raises CorruptCheckpointError at once for values no save can have written.
    """
    plan = RestorePlan(saved, strict, override or {})
    parts = registry.all_parts()
    _check_override(parts, plan)
    top = {name for name in saved.parts if "/" not in name}
    plan.missing.extend(name for name in registry.parts if name not in top)
    plan.unexpected.extend(name for name in saved.parts if name in top and name not in registry.parts)
    with registry:
        for name, part in registry.parts.items():
            if name in top and _same_kind(part, plan):
                part.plan(plan)
    plan_rng(plan)
    settle_targets(plan)
    if not strict and (plan.missing or plan.unexpected):
        plan.changes.append(f"{len(plan.missing)} names were missing and {len(plan.unexpected)} not taken")
    return plan


def _check_override(parts: Mapping[str, Part], plan: RestorePlan) -> None:
    for name, keys in plan.override.items():
        if name == "rng":
            unknown = [key for key in keys if key not in COMPONENTS]
            if unknown:
                plan.problems.append(f"rng: override names {', '.join(map(repr, unknown))}, which is no component")
        elif name not in parts:
            raise ValueError(f"override names {name!r}, which is not registered")
        elif keys and parts[name].kind not in _KEEPS_OPTIONS:
            plan.problems.append(
                f"{name}: override keeps options of optimizers, schedulers and scalers, and {name!r} is registered as "
                f"{parts[name].kind!r}, which comes back as a whole"
            )


def _same_kind(part: Part, plan: RestorePlan) -> bool:
    kind = plan.saved.parts[part.name].get("kind")
    if kind == part.kind:
        return True
    plan.problems.append(f"{part.name} was saved as {kind!r} and is registered as {part.kind!r} now")
    return False
