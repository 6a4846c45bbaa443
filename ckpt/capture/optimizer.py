"""Optimizers: state by parameter name and group, put back in place, bit for bit.

`Optimizer.load_state_dict` is never used: it casts state to the dtype of the parameter, maps by position, checks no
shape and shares memory with its input. `state` and `param_groups` are read and written directly, so that no hook fires
and nothing steps (I7). Absence of state is state: a parameter that had none has none afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ckpt.capture import groups as g
from ckpt.capture.base import CollectorLike, Phase, RestorePlan, TensorInfo
from ckpt.capture.composite import is_flattenable
from ckpt.capture.enums import settle_enums
from ckpt.capture.module import escaped
from ckpt.capture.options import capture_options, kept, plan_options
from ckpt.capture.placing import Placer, live_tensors
from ckpt.capture.rebuild import here
from ckpt.capture.tensors import dim_order_of
from ckpt.errors import UnsupportedStateError
from ckpt.format.names import escape
from ckpt.format.values import Json, check_text, members, refuse

_escaped_key = functools.lru_cache(1024)(escape)  # a handful of keys, each met once a parameter
_ON_HOST = frozenset({"step", "mu_product"})  # torch keeps these on the CPU unless a group is capturable or fused

_HOST = torch.device("cpu")

Options = Callable[[], dict[str, Any]]


def is_own(obj: object) -> bool:
    """True for an optimizer whose state is read here. One that overrides `state_dict` or `load_state_dict` is asked
    through its own pair instead.
    """
    return isinstance(obj, Optimizer) and all(
        getattr(type(obj), method) is getattr(Optimizer, method) for method in ("state_dict", "load_state_dict")
    )


@dataclass
class _Restore:
    """What the action sets. It holds the objects themselves, so that running it again changes nothing more.

    groups: in saved order, each with the order of its parameters and names; states: None for no state.
    """

    groups: list[tuple[dict[str, Any], list[torch.Tensor], list[str], Options]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, Options | None]] = field(default_factory=list)
    shared: Options = dict
    stepped: bool = False


class OptimizerPart:
    """names: id(parameter) -> "<registered name>/<fqn>" over all registered modules, asked at each capture and plan;
    empty without any.
    """

    kind = "optimizer"

    def __init__(self, name: str, optimizer: Optimizer, names: Callable[[], Mapping[int, str]]) -> None:
        self.name = name
        self.obj = optimizer
        self._names = names

    def capture(self, into: CollectorLike) -> None:
        """Raises UnsupportedStateError for parameters that no registered module holds while one is registered."""
        how, keys = g.parameter_keys(self.name, self.obj, self._names())
        check_text((key for names in keys for key in names), (self.name,))
        check_text((str(key) for key in self.obj.defaults), (self.name, "defaults"))
        groups: list[dict[str, Json]] = []
        entries: dict[str, Json] = {}
        for i, (group, names) in enumerate(zip(self.obj.param_groups, keys, strict=True)):
            groups.append({"names": names, **capture_options(group, (self.name, "groups", i), into)})
            if how != g.BY_MODULE:
                groups[i]["layouts"] = [g.layout_of(p, dim_order_of(p)) for p in group["params"]]
            for key, p in zip(names, group["params"], strict=True):
                # State of tensors in no group can reach no step any more, so that only parameters are asked.
                state = self.obj.state.get(p)
                if state is not None:
                    self._capture_state(key, state, into, entries)
            device = next((p.device.type for p in group["params"]), "cpu")
            if device != "cpu":
                groups[i] |= {"device": device, "host": self._host_keys(group)}
        shared = self._shared()
        into.parts[self.name] = {"kind": self.kind}
        into.values[self.name] = {
            "keys": how,
            "defaults": sorted(map(str, self.obj.defaults)),
            # Set by the first step under a scheduler; without it torch warns at the next scheduler.step().
            "stepped": bool(getattr(self.obj, "_opt_called", False)),
            "groups": groups,
            "state": members(entries),
            **({"shared": into.encode(shared, (self.name, "shared"))} if shared else {}),
        }

    def _capture_state(self, key: str, state: Mapping[Any, Any], into: CollectorLike, entries: dict[str, Json]) -> None:
        prefix = f"{self.name}/state/{escaped(key)}/"
        rest: dict[str, Json] = {}
        for name, value in state.items():
            if type(name) is not str:
                raise refuse(name, (self.name, "state", key, str(name)), " as a key of an optimizer's state")
            if isinstance(value, torch.Tensor):
                into.tensor(prefix + _escaped_key(name), value)
            else:
                rest[name] = into.encode(value, (self.name, "state", key, name))
        if rest or not state:
            entries[key] = members(rest)

    def _host_keys(self, group: Mapping[str, Any]) -> list[str]:
        states = (self.obj.state.get(p, {}) for p in group["params"] if p.device.type != "cpu")
        found = {key for state in states for key, value in state.items() if _on_cpu(value)}
        check_text(found, (self.name, "state"))
        return sorted(found)

    def _shared(self) -> dict[Any, Any]:
        return {key: value for key, value in self.obj.state.items() if not isinstance(key, torch.Tensor)}

    def plan(self, plan: RestorePlan) -> None:
        stored = g.saved_groups(plan.saved, self.name)
        try:
            how, keys = g.parameter_keys(self.name, self.obj, self._names())
        except UnsupportedStateError as error:
            plan.problems.append(str(error))
            return
        if (how == g.BY_POSITION) != (stored.keys == g.BY_POSITION):
            sides = ("the script", "the checkpoint") if how == g.BY_POSITION else ("the checkpoint", "the script")
            plan.problems.append(
                f"{self.name}: {sides[1]} knows its parameters by name, {sides[0]} by position only; register the "
                "module they belong to in both"
            )
            return
        saved = [group.names for group in stored.groups]
        live = g.saved_keys(plan.saved, {name for names in saved for name in names}, keys)
        pairs = g.match(saved, live)
        table = g.direct_tensors(plan.saved, self.name)
        self._report(
            plan,
            stored,
            g.differences(self.name, pairs, saved, live),
            live,
            {key for names in table.values() for key in names},
        )
        restore = _Restore(stepped=stored.stepped)
        placer = Placer(plan)

        def held(key: str) -> tuple[Mapping[str, str], Json]:
            return table.get(key, {}), stored.state.get(key)

        for s, i in pairs:
            if i is None:
                continue
            group = self.obj.param_groups[i]
            if s is None:
                restore.groups.append((group, list(group["params"]), list(group.get("param_names", ())), dict))
            else:
                self._plan_group(plan, placer, restore, (s, stored.groups[s]), (group, live[i]), held)
        node = plan.saved.values[self.name].get("shared", {})
        placer.reserve(node, dict(live_tensors(self._shared(), (self.name, "shared"))))
        restore.shared = lambda: placer.value(node)
        plan.later(Phase.OPTIMIZERS, lambda: self._apply(restore))

    def _report(
        self,
        plan: RestorePlan,
        stored: g.SavedGroups,
        texts: list[str],
        live: list[list[str]],
        saved_keys: set[str],
    ) -> None:
        settled = plan.problems if plan.strict else plan.changes
        if texts:
            there = {name for group in stored.groups for name in group.names}
            now = {name for names in live for name in names}
            plan.missing += [f"{self.name}/{escape(n)}" for names in live for n in names if n not in there]
            plan.unexpected += [f"{self.name}/{escape(n)}" for x in stored.groups for n in x.names if n not in now]
            settled += texts
        same_torch = plan.saved.environment.get("torch", torch.__version__) == torch.__version__
        for sentence, is_sure in g.another_kind(stored, self.obj, saved_keys):
            # A new release of torch may bring an option; which one, nothing here can tell.
            (settled if is_sure or same_torch else plan.changes).append(f"{self.name}: {sentence}")
        options = {key for group in self.obj.param_groups for key in group}
        unknown = [key for key in plan.override.get(self.name, ()) if key not in options]
        if unknown:
            plan.problems.append(f"{self.name}: override names {', '.join(map(repr, unknown))}, which no group has")
        if "lr" in kept(plan, self.name) and any("initial_lr" in group.options for group in stored.groups):
            plan.notes.append(
                f"{self.name}: lr is the script's, but a scheduler goes on from its saved base_lrs; keep those too "
                "(override={'<scheduler>': ['base_lrs']}) where the new lr is to last"
            )

    def _plan_group(
        self,
        plan: RestorePlan,
        placer: Placer,
        restore: _Restore,
        saved: tuple[int, g.SavedGroup],
        live: tuple[dict[str, Any], list[str]],
        held: Callable[[str], tuple[Mapping[str, str], Json]],
    ) -> None:
        index, stored = saved
        group, keys = live
        position = {key: j for j, key in enumerate(keys)}
        common = [j for key in stored.names if (j := position.get(key)) is not None]
        order = common + sorted(set(range(len(keys))) - set(common))
        options = plan_options(plan, placer, self.name, group, stored, index)
        named = group.get("param_names", ())
        restore.groups.append((
            group, [group["params"][j] for j in order], [named[j] for j in order] if named else [], options,
        ))  # fmt: skip
        keep = kept(plan, self.name)
        accelerated = any(
            group.get(option) if option in keep else stored.options.get(option) for option in ("capturable", "fused")
        )
        layouts = dict(zip(stored.names, stored.layouts or (), strict=False))
        for j in common:
            p = group["params"][j]
            layout = layouts.get(keys[j])
            if layout is not None and layout.shape != tuple(p.shape):
                plan.shape.append((f"{self.name}/{escape(keys[j])}", str(list(layout.shape)), str(list(p.shape))))
                continue
            home = Home(p, stored, accelerated, layout)
            restore.states.append((p, self._plan_state(plan, placer, keys[j], home, *held(keys[j]))))

    def _plan_state(
        self, plan: RestorePlan, placer: Placer, key: str, home: Home, names: Mapping[str, str], node: Json
    ) -> Options | None:
        if not names and node is None:
            return None
        live = self.obj.state.get(home.param, {})
        for name, full in names.items():
            self._plan_tensor(plan, placer, full, live.get(name), home.of(name))
        if node:
            path = (self.name, "state", key)
            node = settle_enums(plan, node, lambda: live, path)
            placer.reserve(node, dict(live_tensors(live, path)), home.beside)

        def make() -> dict[str, Any]:
            tensors = {name: home.laid_out(placer.filled(full), plan.saved.info(full)) for name, full in names.items()}
            return {**tensors, **(placer.value(node) if node else {})}

        return make

    def _plan_tensor(self, plan: RestorePlan, placer: Placer, full: str, live: Any, device: torch.device) -> None:
        head = plan.saved.composites.get(full)
        if head is None:
            placer.place(full, live, device)
        elif head.get("kind") != "flatten":
            placer.reserve({"$tensor": full}, {}, lambda _: device)
        elif isinstance(live, torch.Tensor) and is_flattenable(live):
            plan.fill(full, live)
            placer.keep(full, live)
        else:
            plan.problems.append(
                f"{full} was saved as a tensor of a class of its own, which is only filled in place, and the live "
                "optimizer has none there: let it make its state before resume"
            )

    def _apply(self, restore: _Restore) -> None:
        optimizer = self.obj
        for group, params, names, options in restore.groups:
            group.update(options())
            # In place: LBFGS and others hold the list itself.
            group["params"][:] = params
            if names:
                group["param_names"][:] = names
        for p, make in restore.states:
            if make is None:
                optimizer.state.pop(p, None)
                continue
            fresh = make()
            held = optimizer.state.setdefault(p, fresh)
            if held is not fresh:
                held.clear()
                held.update(fresh)
        for key in self._shared():
            del optimizer.state[key]
        for key, value in restore.shared().items():
            optimizer.state[key] = value  # type: ignore[index]
        # Schedulers index the groups by position, so that the saved order matters to them.
        optimizer.param_groups[:] = [group for group, *_ in restore.groups]
        if any("fused" in group for group in optimizer.param_groups):
            # GradScaler asks it whether the step unscales by itself, which only fused steps do.
            fused = any(group.get("fused") for group in optimizer.param_groups)
            optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        if restore.stepped:
            optimizer._opt_called = True  # type: ignore[attr-defined]


class Home(NamedTuple):
    """Where state of one parameter belongs. layout: the parameter's when saved, if no registered module tells it."""

    param: torch.Tensor
    stored: g.SavedGroup
    accelerated: bool
    layout: TensorInfo | None

    def of(self, key: str) -> torch.device:
        """The device of the state tensor `key`."""
        if key in _ON_HOST and self.accelerated:
            return self.param.device
        hosted = key in (_ON_HOST if self.stored.device == "cpu" else self.stored.host)
        return _HOST if hosted else self.param.device

    def beside(self, saved: str) -> torch.device:
        """The device of a tensor inside nested state that was saved on `saved`."""
        return here(saved) if saved == "cpu" and self.stored.device != "cpu" else self.param.device

    def laid_out(self, filled: torch.Tensor, info: TensorInfo | None) -> torch.Tensor:
        """`filled`, laid out like the parameter if it was so when saved.

        A registered module gets its saved layout back, and so does the state. Without one the script's layout stays,
        and fused kernels, which walk parameter and moments in memory order, go wrong when only one of them follows.
        """
        layout, p = self.layout, self.param
        if layout is None or info is None or info.shape != layout.shape or info.dim_order != layout.dim_order:
            return filled
        if dim_order_of(p) == info.dim_order or not (p.is_contiguous() or dim_order_of(p) is not None):
            return filled
        with torch.no_grad():
            return torch.empty_strided(p.shape, p.stride(), dtype=filled.dtype, device=filled.device).copy_(filled)


def _on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
