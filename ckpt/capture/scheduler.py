"""Learning-rate schedulers: their whole state, and fingerprints of the functions they were given.

A scheduler's state is its attributes, those of nested schedulers, and the attributes of callable objects it was given;
functions are the script's. All of it is put back before the optimizers are, so that each group's live LR ends as the
saved one (I8). Nothing steps, and none of torch's warnings is set off.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt.capture.base import CollectorLike, Phase, RestorePlan
from ckpt.capture.functions import Fingerprint, difference, fingerprint, is_function
from ckpt.capture.options import brief, differs, show
from ckpt.capture.placing import Placer, live_tensors
from ckpt.errors import UnsupportedStateError
from ckpt.format.values import Json, Path, encode, members_of, spell

logger = logging.getLogger("ckpt")

_HELD = frozenset(
    {"optimizer", "_scale_fn_ref", "anneal_func"}
)  # a reference, and functions chosen by a name in the state
_REFERENCES = (Optimizer, torch.nn.Module)  # whoever needs their state registers them


def is_own(scheduler: object) -> bool:
    """True when the state is read from the attributes: no class outside torch has a `state_dict` of its own."""
    return isinstance(scheduler, LRScheduler) and all(
        getattr(getattr(type(scheduler), method), "__module__", "").partition(".")[0] == "torch"
        for method in ("state_dict", "load_state_dict")
    )


class SchedulerPart:
    """values: what `state_dict` would give, with None for functions; their fingerprints are in the part's entry."""

    kind = "scheduler"

    def __init__(self, name: str, scheduler: LRScheduler) -> None:
        self.name = name
        self.obj = scheduler
        self._warned: set[str] = set()
        # The first look: a value that has moved by the time of the first save is known to be one that moves.
        self._values = {spell(path): look.values for path, look in self._look()[1].items()}

    def _look(self) -> tuple[dict[str, Any], dict[Path, Fingerprint]]:
        reader = _Reader(self._lost)
        return reader.scheduler(self.obj, ()), reader.functions

    def capture(self, into: CollectorLike) -> None:
        """Logs one WARNING for each function whose values change and are in no registered object."""
        tree, functions = self._look()
        stored: dict[str, Json] = {}
        for path, look in functions.items():
            key = spell(path)
            moved = self._values.setdefault(key, look.values) != look.values
            self._values[key] = look.values
            why = look.varying or ("values it reads have changed" if moved or key in self._warned else "")
            stored[key] = {**look.to_json(), "varying": bool(why)}
            if why:
                self._warn(key, why)
        into.parts[self.name] = {"kind": self.kind, **({"functions": stored} if stored else {})}
        into.values[self.name] = into.encode(tree, (self.name,))

    def _lost(self, path: Path, value: object) -> None:
        self._warn(spell(path), f"its attribute of type {type(value).__name__} has no stored form")

    def _warn(self, key: str, why: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(
                "%s: lr function is not captured (%s: %s); register() the object that holds the value, or the "
                "schedule may differ after a resume.",
                self.name,
                key,
                why,
            )

    def plan(self, plan: RestorePlan) -> None:
        node = plan.saved.values.get(self.name)
        live, functions = self._look()
        if not isinstance(node, Mapping):
            plan.problems.append(f"{self.name}: the checkpoint holds no scheduler under this name")
            return
        keep = frozenset(plan.override.get(self.name, ()))
        unknown = sorted(keep - _all_keys(live))
        if unknown:
            plan.problems.append(f"{self.name}: override names {', '.join(map(repr, unknown))}, which it has not")
        self._compare_keys(plan, node, live, (self.name,))
        self._compare_settings(plan, self.obj, node, live, keep, (self.name,))
        changed = self._compare_functions(plan, functions)
        plan.changes += [f"{key} of {self.name} is the script's" for key in sorted(keep) if _sets(live, node, key)]
        placer = Placer(plan)
        placer.reserve(node, dict(live_tensors(live, (self.name,))))

        def action() -> None:
            for text in changed:
                logger.warning("%s", text)
            _load(self.obj, placer.value(node), keep)

        plan.later(Phase.SCHEDULERS, action)

    def _compare_keys(self, plan: RestorePlan, node: Mapping[str, Json], live: Mapping[str, Any], path: Path) -> None:
        node = members_of(node)
        # Private names come and go with releases of torch; another kind of scheduler differs in public ones.
        for key in live.keys() - node.keys():
            if not key.startswith("_"):
                plan.missing.append(spell((*path, key)))
        for key in node.keys() - live.keys():
            if not key.startswith(("_", "$")) and key != "verbose":
                plan.unexpected.append(spell((*path, key)))
        saved, own = node.get("_schedulers"), live.get("_schedulers")
        if not isinstance(saved, list) or not isinstance(own, list):
            return
        if len(saved) != len(own):
            plan.problems.append(f"{spell(path)}: {len(saved)} nested schedulers were saved, the script has {len(own)}")
            return
        for i, (there, here) in enumerate(zip(saved, own, strict=True)):
            self._compare_keys(plan, there, here, (*path, "_schedulers", i))

    def _compare_settings(
        self, plan: RestorePlan, scheduler: Any, node: Any, live: Any, keep: frozenset[str], path: Path
    ) -> None:
        """Notes what the script sets otherwise: arguments of the constructor that the scheduler keeps by their name."""
        node = members_of(node)
        arguments = inspect.signature(type(scheduler).__init__).parameters
        for key in arguments.keys() - {"self", "optimizer", "last_epoch"}:
            if key in live and key in node and key not in keep and not _is_live(getattr(scheduler, key, None)):
                if differs(live[key], node[key]):
                    plan.notes.append(
                        f"{spell((*path, key))} is {show(node[key])} in the checkpoint and {brief(live[key])} in the "
                        f"script; the checkpoint's is used (override={{{self.name!r}: [{key!r}]}} of resume keeps the "
                        "script's)"
                    )
        nested = (getattr(scheduler, "_schedulers", ()), node.get("_schedulers", ()), live.get("_schedulers", ()))
        for i, (own, there, here) in enumerate(zip(*nested, strict=False)):
            self._compare_settings(plan, own, there, here, keep, (*path, "_schedulers", i))

    def _compare_functions(self, plan: RestorePlan, live: Mapping[Path, Fingerprint]) -> list[str]:
        saved = plan.saved.parts.get(self.name, {}).get("functions", {})
        texts = []
        for path, look in live.items():
            key = spell(path)
            changed = difference(saved[key], look) if key in saved else "it was no function then"
            if changed:
                text = f"{self.name}: the function {key} is not the one it was at the save: {changed}"
                texts.append(text)
                plan.notes.append(text)
                plan.changes.append(f"the function {key} of {self.name} changed")
        return texts


class _Reader:
    """One walk over a scheduler's state as it is stored. Functions become None and are noted in `functions`; nested
    schedulers and callable objects become their attributes; models and optimizers are references, not state.
    """

    def __init__(self, lost: Callable[[Path, object], None]) -> None:
        self.functions: dict[Path, Fingerprint] = {}
        self._lost = lost
        self._inside: set[int] = set()

    def scheduler(self, scheduler: LRScheduler, path: Path) -> dict[str, Any]:
        state = vars(scheduler) if is_own(scheduler) else scheduler.state_dict()
        self._inside.add(id(scheduler))
        tree = {key: self.value(value, (*path, key)) for key, value in state.items() if key not in _HELD}
        self._inside.discard(id(scheduler))
        return tree

    def value(self, value: Any, path: Path) -> Any:
        if isinstance(value, _REFERENCES) or id(value) in self._inside:
            return None
        if isinstance(value, LRScheduler):
            return self.scheduler(value, path)
        if is_function(value):
            self.functions[path] = fingerprint(value)
            return None
        if type(value) in (list, tuple) and _holds_live(value):
            items = [self.value(item, (*path, i)) for i, item in enumerate(value)]
            return items if type(value) is list else tuple(items)
        if type(value) is dict and _holds_live(value):
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        return self._callable(value, path) if callable(value) else value

    def _callable(self, value: Any, path: Path) -> dict[str, Any] | None:
        self.functions[path] = fingerprint(value)
        held = getattr(value, "__dict__", None)
        if held is None:
            if any(getattr(kind, "__slots__", ()) for kind in type(value).__mro__):
                self._lost(path, value)
            return None
        self._inside.add(id(value))
        tree = {}
        for key, item in held.items():
            if _is_state(key):
                found = self.value(item, (*path, key))
                if _can_be_stored(found):
                    tree[key] = found
                else:
                    # A callable object may refer to anything; what has no stored form is left to the script, and told.
                    self._lost((*path, key), item)
        self._inside.discard(id(value))
        return tree


def _is_state(key: str) -> bool:
    """False for what `functools.wraps` copies onto an object: names and modules are no state."""
    return not (key.startswith("__") and key.endswith("__"))


def _can_be_stored(value: object) -> bool:
    try:
        encode(value, (), _small)
    except UnsupportedStateError:
        return False
    return True


def _small(value: object, path: Path) -> Json:
    if isinstance(value, (torch.Tensor, torch.dtype, torch.device)) or type(value).__module__ == "numpy":
        return None
    raise UnsupportedStateError(f"{spell(path)} has no stored form.", name=spell(path))


def _is_live(value: object) -> bool:
    """True for what is not a plain value but holds some: it stays in its place and is filled."""
    return isinstance(value, _REFERENCES) or callable(value) or isinstance(value, LRScheduler) or _holds_live(value)


def _holds_live(value: object) -> bool:
    if type(value) is dict:
        return any(map(_is_live, value.values()))
    return type(value) in (list, tuple) and any(map(_is_live, value))  # type: ignore[arg-type]


def _assign(scheduler: LRScheduler, tree: Mapping[str, Any], keep: frozenset[str]) -> None:
    held = vars(scheduler)
    for key, value in tree.items():
        if key not in keep and key not in _HELD:
            held[key] = _merge(held.get(key), value, keep)
    # The function that belongs to the restored name; torch's own load_state_dict does the same.
    if isinstance(scheduler, torch.optim.lr_scheduler.CyclicLR):
        scheduler._init_scale_fn()
    elif isinstance(scheduler, torch.optim.swa_utils.SWALR) and "_anneal_strategy" in held:
        scheduler._set_anneal_func(held["_anneal_strategy"])


def _load(scheduler: LRScheduler, tree: Mapping[str, Any], keep: frozenset[str]) -> None:
    if is_own(scheduler):
        _assign(scheduler, tree, keep)
        return
    state = scheduler.state_dict()
    merged = {key: _merge(state.get(key), value, keep) for key, value in tree.items() if key not in keep}
    scheduler.load_state_dict({**state, **merged})


def _merge(live: Any, saved: Any, keep: frozenset[str]) -> Any:
    """What stands where `live` stood: the saved value, or `live` itself filled where it is no plain value."""
    if isinstance(live, LRScheduler):
        if isinstance(saved, Mapping):
            _load(live, saved, keep)
        return live
    if isinstance(live, _REFERENCES) or is_function(live):
        return live
    if isinstance(live, (list, tuple)) and _holds_live(live) and isinstance(saved, (list, tuple)):
        return _merge_items(live, saved, keep)
    if isinstance(live, dict) and _holds_live(live) and isinstance(saved, Mapping):
        live.update({key: _merge(live.get(key), value, keep) for key, value in saved.items()})
        return live
    if callable(live):
        held = getattr(live, "__dict__", None)
        if held is not None and isinstance(saved, Mapping):
            held.update({key: _merge(held.get(key), value, keep) for key, value in saved.items()})
        return live
    if isinstance(live, Enum) and not isinstance(saved, Enum):
        return type(live)(saved)
    return saved


def _merge_items(live: Any, saved: Any, keep: frozenset[str]) -> Any:
    items = [_merge(a, b, keep) for a, b in zip(live, saved, strict=False)]
    if isinstance(live, list):
        live[: len(items)] = items
        return live
    return tuple(items)


def _sets(live: Any, node: Json, key: str) -> bool:
    """True when the script has another value than the checkpoint under `key`, at any depth."""
    if isinstance(live, Mapping) and isinstance(node, Mapping):
        if key in live and key in node and differs(live[key], node[key]):
            return True
        return any(_sets(live[name], node[name], key) for name in live.keys() & node.keys())
    if isinstance(live, list) and isinstance(node, list):
        return any(_sets(a, b, key) for a, b in zip(live, node, strict=False))
    return False


def _all_keys(tree: Any) -> frozenset[str]:
    if isinstance(tree, Mapping):
        return frozenset(map(str, tree)).union(*(_all_keys(value) for value in tree.values()))
    if isinstance(tree, (list, tuple)):
        return frozenset().union(*(_all_keys(item) for item in tree))
    return frozenset()
