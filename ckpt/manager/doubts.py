"""Signs that the state that was restored is not the state the run goes on with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.capture.base import Part
from ckpt.capture.objects import ObjectPart
from ckpt.capture.state import Registry
from ckpt.data.loader import ResumableLoader


def watch(registry: Registry, state: Mapping[str, Any] | None) -> Callable[[], list[str]]:
    """Call right after a restore. What it returns is called at the first save after it, and gives a sentence for each
    doubt: objects replaced in the caller's own mapping, scalers that were not updated since, a reseeded generator."""
    scalers = {name: _scale(obj) for name, obj in registry.objects.items() if _is_scaler(obj)}
    seed = torch.initial_seed()

    def look() -> list[str]:
        found = [
            f"{name!r} was replaced by another object after the resume; the registered one is saved, not the new one"
            for name, obj in registry.objects.items()
            if state is not None and name in state and state[name] is not obj
        ]
        found += [
            f"the scaler {name!r} was not updated since the resume; if a new one was made, the restored scale is lost"
            for name, before in scalers.items()
            if before is not None and _scale(registry.objects[name]) == before
        ]
        if torch.initial_seed() != seed:
            found.append(
                "torch was seeded after the resume: the random numbers that were restored are not the ones in use; "
                "seed before the resume"
            )
        return found

    return look


def draws_when_iterated(part: Part) -> bool:
    """True for a registered loader or stream whose iterator may draw from the global RNG as it is made."""
    return isinstance(part, ObjectPart) and part.kind == "loader" and not isinstance(part.obj, ResumableLoader)


def _is_scaler(obj: Any) -> bool:
    return isinstance(obj, torch.amp.GradScaler)


def _scale(scaler: Any) -> tuple[float, int] | None:
    """What every update changes: the scale, or the number of steps since it last changed. None when disabled."""
    state = scaler.state_dict()
    return (state["scale"], state["_growth_tracker"]) if state else None
