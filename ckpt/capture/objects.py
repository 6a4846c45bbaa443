"""Objects that give and take their own state.

What comes back is what was saved: content is replaced as a whole, never merged with what the live object held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.capture.base import CollectorLike, Phase, RestorePlan
from ckpt.capture.checking import compare_given, compare_loaded, list_incompatible
from ckpt.capture.enums import settle_enums
from ckpt.capture.placing import live_tensors
from ckpt.capture.rebuild import Rebuild
from ckpt.errors import StateMismatchError

# What a class's own load method raises when it does not like the state. Errors of ours pass unchanged.
LOAD_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class ObjectPart:
    """An object that gives and takes its own state, by `state_dict`/`load_state_dict` or `get_state`/`set_state`.

    What it gives is stored whole, and what it takes is that, with fresh tensors; a state of tensors on the CPU comes
    back on the CPU, any other on the device it was on where this machine has it. A module is compared before anything
    changes, and whatever holds tensors is asked again after its load: see `checking`. A loader is not: looking at one
    between its load and its first batch may start its workers.
    """

    def __init__(self, name: str, obj: Any, pair: tuple[str, str], phase: Phase = Phase.OTHERS) -> None:
        self.name = name
        self.kind = "loader" if phase is Phase.DATA else "object"
        self.obj = obj
        self.phase = phase
        self._pair = pair

    def give(self) -> Any:
        """The state as the object tells it."""
        # Looked up at each call: a wrapper may put its own method in its place after registration.
        return getattr(self.obj, self._pair[0])()

    def _take(self, state: Any, strict: bool) -> Any:
        method = getattr(self.obj, self._pair[1])
        if not strict and getattr(type(self.obj), self._pair[1], None) is torch.nn.Module.load_state_dict:
            return method(state, strict=False)
        return method(state)

    def capture(self, into: CollectorLike) -> None:
        into.parts[self.name] = {"kind": self.kind}
        into.values[self.name] = into.encode(_plain(self.give()), (self.name,))

    def plan(self, plan: RestorePlan) -> None:
        node = settle_enums(plan, plan.saved.values.get(self.name), self.give, (self.name,))
        if self.phase is Phase.MODULES:
            compare_given(plan, self.name, self.obj, self.give())
        rebuild = Rebuild(plan)
        rebuild.reserve(node)
        if self.phase is Phase.DATA:
            self._ask_loader(plan, lambda: rebuild.value(node))
        plan.later(self.phase, lambda: self.put(plan, rebuild.value(node)))

    def _ask_loader(self, plan: RestorePlan, state: Callable[[], Any]) -> None:
        check = getattr(self.obj, "check_state_dict", None)
        if not callable(check) or plan.saved.names.get(self.name):
            return
        try:
            check(state())
        except (StateMismatchError, *LOAD_ERRORS) as error:
            plan.problems.append(f"{self.name} would not take its state: {error}")

    def put(self, plan: RestorePlan, state: Any) -> None:
        """The object takes `state`. Raises StateMismatchError when it refuses it, or turns its tensors into others."""
        # The object may keep and change what it is given; only the tensors are asked for afterwards.
        want = dict(live_tensors(state, (self.name,)))
        result: list[Any] = []
        load(self.name, plan, lambda: result.append(self._take(state, plan.strict)))
        if self.phase is Phase.DATA:
            notes = getattr(self.obj, "resume_notes", ())
            plan.changes += [f"{self.name}: {note}" for note in notes if isinstance(note, str)]
        elif want:
            got = dict(live_tensors(self.give(), (self.name,)))
            own = self.phase in (Phase.MODULES, Phase.OPTIMIZERS)
            if self.phase is Phase.MODULES:
                list_incompatible(plan, result[0], {key[len(self.name) + 1 :]: key for key in got})
            compare_loaded(plan, self.name, want, got, refuse=own, whole=self.phase is Phase.MODULES)


def _plain(state: Any) -> Any:
    # An object may hand out a mapping of a class of its own; only its content is state.
    return dict(state) if isinstance(state, Mapping) and type(state).__module__ != "collections" else state


def load(name: str, plan: RestorePlan, action: Callable[[], Any]) -> None:
    """Runs `action`, a load method that is not ours; what it raises becomes a StateMismatchError naming the part."""
    try:
        action()
    except LOAD_ERRORS as error:
        raise StateMismatchError(
            f"{name} did not take the state saved at step {plan.saved.step}: {type(error).__name__}: {error}",
            unexpected=(name,),
            step=plan.saved.step,
            stage="resume",
            hint="Rebuild it as it was when the step was saved.",
        ) from error
