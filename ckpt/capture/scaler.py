"""GradScaler: its scale and counters, whether it was ever used, and where each optimizer stands between its steps.

All four combinations of enabled and disabled, used and never used work: a scaler makes its tensors at the first use,
and a resume may meet it before or after.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from ckpt.capture.base import CollectorLike, Phase, RestorePlan
from ckpt.capture.placing import Placer
from ckpt.capture.rebuild import here
from ckpt.errors import CorruptCheckpointError

logger = logging.getLogger("ckpt")

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


def is_own(obj: object) -> bool:
    """True for a scaler whose state is read here; one that overrides `state_dict` is asked through its own pair."""
    return isinstance(obj, GradScaler) and all(
        getattr(type(obj), method) is getattr(GradScaler, method) for method in ("state_dict", "load_state_dict")
    )


class ScalerPart:
    """values: {} when disabled, else torch's own keys, "used", and "per_optimizer" for a save between two of its calls.

    The scale is a number in the values and not a tensor, so that a look at a checkpoint shows it; reading it waits for
    the device. optimizers: id(optimizer) -> registered name.
    """

    kind = "scaler"

    def __init__(self, name: str, scaler: GradScaler, optimizers: Callable[[], Mapping[int, str]] = dict) -> None:
        self.name = name
        self.obj = scaler
        self._optimizers = optimizers
        self._warned = False

    def capture(self, into: CollectorLike) -> None:
        scaler = self.obj
        into.parts[self.name] = {"kind": self.kind}
        if not scaler.is_enabled():
            into.values[self.name] = {}
            return
        values = {
            "scale": float(scaler.get_scale()),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": int(scaler._get_growth_tracker()),
            "used": scaler._scale is not None,
        }
        stages = self._stages()
        if stages:
            values["per_optimizer"] = stages
        into.values[self.name] = into.encode(values, (self.name,))

    def _stages(self) -> dict[str, Any]:
        names = self._optimizers()
        stages: dict[str, Any] = {}
        for key, state in self.obj._per_optimizer_states.items():
            if state["stage"] is OptState.READY and not state["found_inf_per_device"]:
                continue
            if key in names:
                stages[names[key]] = {
                    "stage": state["stage"].value,
                    "found_inf": [
                        [str(device), float(found)] for device, found in state["found_inf_per_device"].items()
                    ],
                }
            elif not self._warned:
                self._warned = True
                logger.warning(
                    "%s: saved between scaler.unscale_ or step and scaler.update, for an optimizer that is not "
                    "registered; where it stands is not captured. Save after update, or register it.",
                    self.name,
                )
        return stages

    def plan(self, plan: RestorePlan) -> None:
        node = plan.saved.values.get(self.name)
        if not isinstance(node, Mapping):
            plan.problems.append(f"{self.name}: the checkpoint holds no scaler under this name")
            return
        saved = Placer(plan).reserve(node, {})
        self._check(plan, saved)
        enabled = self.obj.is_enabled()
        if bool(saved) != enabled:
            then, now = ("disabled", "enabled") if enabled else ("enabled", "disabled")
            text = f"{self.name} was {then} when it was saved and is {now} now"
            plan.changes.append(text)
            plan.notes.append(
                f"{text}; it starts from the script's scale" if enabled else f"{text}; its state is unused"
            )
        if not enabled or not saved:
            return
        keep = frozenset(plan.override.get(self.name, ()))
        unknown = sorted(keep - {*_SETTINGS, "scale"})
        if unknown:
            plan.problems.append(f"{self.name}: override names {', '.join(map(repr, unknown))}, which it has not")
        for key in _SETTINGS:
            live = getattr(self.obj, f"_{key}")
            if key in keep and live != saved[key]:
                plan.changes.append(f"{key} of {self.name} is the script's")
            elif live != saved[key]:
                plan.notes.append(
                    f"{self.name}: {key} is {saved[key]!r} in the checkpoint and {live!r} in the script; the "
                    f"checkpoint's is used (override={{{self.name!r}: [{key!r}]}} of resume keeps the script's)"
                )
        if "scale" in keep and self.obj.get_scale() != saved["scale"]:
            plan.changes.append(f"the scale of {self.name} is the script's")
        plan.later(Phase.OTHERS, lambda: self._apply(saved, keep))

    def _check(self, plan: RestorePlan, saved: Mapping[str, Any]) -> None:
        wanted = {"scale": float, "growth_factor": (float, int), "backoff_factor": (float, int)}
        wanted |= {"growth_interval": int, "_growth_tracker": int, "used": bool}
        if saved and not all(isinstance(saved.get(key), kind) for key, kind in wanted.items()):
            raise CorruptCheckpointError(
                f"What step {plan.saved.step} holds for {self.name!r} is not the state of a scaler.",
                kind="value",
                step=plan.saved.step,
            )

    def _apply(self, saved: Mapping[str, Any], keep: frozenset[str]) -> None:
        scaler = self.obj
        for key in _SETTINGS:
            if key not in keep:
                setattr(scaler, f"_{key}", saved[key])
        if "scale" not in keep:
            # A scaler that was never used makes its tensors from these at its first use.
            scaler._init_scale = saved["scale"]
            scaler._init_growth_tracker = saved["_growth_tracker"]
            if not saved["used"]:
                scaler._scale = None
                scaler._growth_tracker = None
            elif scaler._scale is not None and scaler._growth_tracker is not None:
                scaler._scale.fill_(saved["scale"])
                scaler._growth_tracker.fill_(saved["_growth_tracker"])
        self._restore_stages(saved.get("per_optimizer", {}))

    def _restore_stages(self, stages: Mapping[str, Any]) -> None:
        states = defaultdict(_refresh_per_optimizer_state)
        for key, name in self._optimizers().items():
            if name in stages:
                found = {
                    here(device): torch.tensor(value, dtype=torch.float32, device=here(device))
                    for device, value in stages[name]["found_inf"]
                }
                states[key] = {"stage": OptState(stages[name]["stage"]), "found_inf_per_device": found}
                if found and self.obj._scale is None:
                    # The next call is `update`, which needs the tensors that `scale` would have made.
                    self.obj._lazy_init_scale_growth_tracker(next(iter(found)))
        self.obj._per_optimizer_states = states
