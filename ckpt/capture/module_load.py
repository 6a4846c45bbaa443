"""How a module is put back: what is compared before anything changes, and what follows once the bytes are there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.capture import composite
from ckpt.capture.base import Phase, RestorePlan
from ckpt.capture.checking import compare_loaded, compare_tensor, list_incompatible, loads_freely
from ckpt.capture.enums import settle_enums
from ckpt.capture.functions import difference, fingerprint
from ckpt.capture.layout import match_layout
from ckpt.capture.module import Custom, Walk, ask, averaging, escaped, is_parameter, walk
from ckpt.capture.objects import load
from ckpt.capture.rebuild import Rebuild
from ckpt.format.names import unescape
from ckpt.format.values import Json, members_of


def plan_module(name: str, module: nn.Module, plan: RestorePlan) -> None:
    """Plans that `module` becomes what was saved as `name`; its tensors stay the same objects, filled in place."""
    values: Mapping[str, Json] = plan.saved.values.get(name) or {}
    extra = members_of(values.get("extra", {}))
    if _refuse_unfillable(name, module, plan):
        return
    found = walk(module)
    known: set[str] = set()
    for fqn, tensor in found.tensors:
        full = f"{name}/{escaped(fqn)}"
        known.add(full)
        plan.fill(full, tensor)
    for fqn, owner in found.extra:
        known.add(f"{name}/{fqn}")
        if fqn not in extra:
            plan.missing.append(f"{name}/{fqn}")
            continue
        node = settle_enums(plan, extra[fqn], owner.get_extra_state, (name, fqn))
        _plan_extra(f"{name}/{fqn}", owner.set_extra_state, node, plan)
    for custom in found.custom:
        known |= _plan_custom(name, custom, values, plan)
    saved_names = [*plan.saved.names.get(name, ()), *(f"{name}/{fqn}" for fqn in extra)]
    owned = (*(f"{name}/{fqn}/" for fqn, _ in found.extra), *(f"{name}/{c.prefix}" for c in found.custom if c.prefix))
    plan.unexpected.extend(full for full in saved_names if full not in known and not full.startswith(owned))
    _compare_averages(name, found, values, plan)
    _plan_frozen(name, found, set(values.get("frozen", ())), plan)


def _refuse_unfillable(name: str, module: nn.Module, plan: RestorePlan) -> bool:
    """Transient buffers count too: a module with one tensor left on meta does not run."""
    found = False
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for fqn, tensor in tensors:
        lazy = torch.nn.parameter.is_lazy(tensor)
        if lazy or tensor.is_meta or type(tensor).__name__ == "FakeTensor":
            found = True
            todo = "run one forward pass" if lazy else "materialise it (to_empty, or build it on a device)"
            plan.problems.append(f"{name}/{escaped(fqn)} holds no data yet: {todo} before resume")
    return found


def _compare_averages(name: str, found: Walk, values: Mapping[str, Json], plan: RestorePlan) -> None:
    """The functions an AveragedModel was given are the script's; one that is not as it was averages otherwise."""
    rows = values.get("averages")
    saved = {row[0]: row[1] for row in rows if _is_row(row)} if isinstance(rows, list) else {}
    for fqn, module in found.averages:
        then, now = saved.get(fqn, {}), averaging(module)
        for key in sorted({*then, *now}):
            if key in then and key in now:
                changed = difference(then[key], fingerprint(getattr(module, key)))
            else:
                changed = f"it was {'given' if key in then else 'not given'} then"
            if changed:
                what = f"the function {key} of {name}" + (f"/{fqn}" if fqn else "")
                plan.notes.append(f"{what} is not the one it was at the save: {changed}")
                plan.changes.append(f"{what} changed")


def _is_row(row: Json) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], dict)


def _plan_extra(name: str, setter: Callable[[Any], None], node: Json, plan: RestorePlan) -> None:
    rebuild = Rebuild(plan)
    rebuild.reserve(node)
    plan.later(Phase.MODULES, lambda: load(name, plan, lambda: setter(rebuild.value(node))))


def _plan_frozen(name: str, found: Walk, frozen: set[str], plan: RestorePlan) -> None:
    entries = list(found.tensors)
    for custom in found.custom:
        entries += [(custom.prefix + key, value) for key, value in custom.state.items()]
    changed: list[tuple[str, nn.Parameter]] = []
    for fqn, value in entries:
        if isinstance(value, torch.Tensor) and value.requires_grad == (fqn in frozen) and is_parameter(value):
            if plan.saved.info(f"{name}/{escaped(fqn)}") is not None:
                changed.append((fqn, value))  # pyright: ignore[reportArgumentType]
    if not changed:
        return
    shown = ", ".join(f"{fqn} ({'frozen' if fqn in frozen else 'trained'})" for fqn, _ in changed[:10])
    more = f" and {len(changed) - 10} more" if len(changed) > 10 else ""
    plan.notes.append(f"{name}: requires_grad is set as it was saved: {shown}{more}")

    def set_flags() -> None:
        for fqn, parameter in changed:
            parameter.requires_grad_(fqn not in frozen)

    plan.later(Phase.MODULES, set_flags)


def _plan_custom(name: str, custom: Custom, values: Mapping[str, Json], plan: RestorePlan) -> set[str]:
    """Plans one load_state_dict call; returns the full names it stands for.

    Names are compared here only where the module cannot change them as it loads; else its own load does.
    """
    extra = members_of(values.get("extra", {}))
    start = f"{name}/"
    live = {f"{start}{escaped(custom.prefix + key)}": key for key in custom.state}
    nodes: dict[str, Json] = {}
    inner = tuple(f"{start}{fqn}/" for fqn in extra)
    for full in plan.saved.names.get(name, ()):
        fqn = str(unescape(full[len(start) :]))
        if fqn.startswith(custom.prefix) and not (inner and full.startswith(inner)):
            nodes[full] = {"$tensor": full}
    nodes.update({f"{start}{escaped(fqn)}": node for fqn, node in extra.items() if fqn.startswith(custom.prefix)})
    if not loads_freely(custom.module):
        plan.missing.extend(full for full in live if full not in nodes)
        plan.unexpected.extend(full for full in nodes if full not in live)
    for full, key in live.items():
        compare_tensor(plan, full, custom.state[key])
        if isinstance(custom.state[key], torch.Tensor) and not composite.is_composite(custom.state[key]):
            match_layout(plan, full, custom.state[key])
    rebuild = Rebuild(plan)
    kept: dict[str, torch.Tensor] = {}
    for full, node in nodes.items():
        value = custom.state.get(live.get(full, ""))
        if plan.saved.composites.get(full, {}).get("kind") == "flatten" and isinstance(value, torch.Tensor):
            # A subclass can only be filled inside the live tensor, which load_state_dict then copies onto itself.
            if plan.fill(full, value):
                kept[full] = value
            continue
        nodes[full] = node = settle_enums(plan, node, lambda value=value: value, (full,))
        rebuild.reserve(node)
    metadata = members_of(values.get("metadata", {})).get(custom.prefix)

    result: list[Any] = []

    def put_back() -> None:
        state: OrderedDict[str, Any] = OrderedDict()
        for full, node in nodes.items():
            key = str(unescape(full[len(start) :]))[len(custom.prefix) :]
            state[custom.raw_keys.get(key, key)] = kept[full] if full in kept else rebuild.value(node)
        if metadata is not None:
            state._metadata = rebuild.value(metadata)  # type: ignore[attr-defined]
        result[:] = [custom.module.load_state_dict(state, strict=plan.strict)]

    where = f"{name}/{custom.prefix}".rstrip("./")

    def put_back_and_compare() -> None:
        load(where, plan, put_back)
        again = ask(custom.module, custom.prefix)
        list_incompatible(
            plan, result[0], {again.raw_keys[key]: full for full, key in live.items() if key in again.state}
        )
        want = {full: rebuild.value(node) for full, node in nodes.items() if full not in kept}
        got = {f"{start}{escaped(custom.prefix + key)}": value for key, value in again.state.items()}
        got = {full: value for full, value in got.items() if isinstance(value, torch.Tensor) and full not in kept}
        compare_loaded(plan, where, want, got, refuse=True, whole=True)

    plan.later(Phase.MODULES, put_back_and_compare)
    return set(live) | set(nodes)
