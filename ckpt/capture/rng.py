"""Random state: python, numpy, torch, accelerators, and generators that were registered. Values only, no pickle.

A state is plain integers and bytes, so that it reads the same under any version of numpy, and is never placed on a
device. What a process has not set up is not set up by looking: numpy only where somebody imported it, an accelerator
only where it is in use. Absence is recorded (None), so that a component that is gone is seen.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from ckpt.capture.base import CollectorLike, Phase, RestorePlan
from ckpt.capture.rebuild import decode_with, pack_bytes
from ckpt.errors import CorruptCheckpointError
from ckpt.format.values import Json, encode

COMPONENTS = ("python", "numpy", "torch", "cuda", "xpu", "mps")
_WORDS = 625
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError)


def capture_rng() -> dict[str, Json]:
    """The state of every global generator this process uses. Draws from none and initialises none."""
    numpy = sys.modules.get("numpy")
    return {
        "python": encode(python_state(random.getstate())),
        "numpy": None if numpy is None else encode(numpy_state(numpy.random.get_state(legacy=False))),
        "torch": pack_bytes(torch.get_rng_state()),
        "cuda": _device_states("cuda"),
        "xpu": _device_states("xpu"),
        "mps": [pack_bytes(torch.mps.get_rng_state())] if torch.backends.mps.is_available() else None,
    }


def _device_states(kind: str) -> list[Json] | None:
    room = getattr(torch, kind)
    if not room.is_initialized():
        return None
    return [pack_bytes(room.get_rng_state(index)) for index in range(room.device_count())]


def python_state(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": b"".join(word.to_bytes(4, "little") for word in words), "gauss": gauss}


def _python_tuple(state: dict[str, Any]) -> tuple[Any, ...]:
    raw = state["words"]
    words = tuple(int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4))
    if len(words) != _WORDS:
        raise ValueError(f"a state of {len(words)} words")
    return (state["version"], words, state["gauss"])


def numpy_state(state: Any) -> Any:
    """A bit generator's state with its arrays as bytes of little-endian words."""
    if isinstance(state, dict):
        return {str(key): numpy_state(value) for key, value in state.items()}
    if hasattr(state, "dtype") and hasattr(state, "tobytes"):
        if getattr(state, "shape", ()) == ():
            return state.item()
        kind = state.dtype.newbyteorder("<")
        return {"words": kind.str, "bytes": state.astype(kind).tobytes()}
    return state


def _numpy_dict(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if set(state) == {"words", "bytes"}:
        import numpy

        kind = numpy.dtype(state["words"])
        return numpy.frombuffer(state["bytes"], kind).astype(kind.newbyteorder("="))
    return {key: _numpy_dict(value) for key, value in state.items()}


def plan_rng(plan: RestorePlan) -> None:
    """Plans that the global generators become what was saved, in `Phase.RNG`.

    Each state is tried on a generator of its own first, so that a damaged one is found before anything changes: it and
    a missing one raise CorruptCheckpointError. With strict=False, or where `override["rng"]` names the component, it is
    left as it is and listed in `plan.changes`. A stream of a device this machine lacks is a problem in the same way.
    """
    saved = plan.saved.values.get("rng") or {}
    waived = set(plan.override.get("rng", ()))
    for component in COMPONENTS:
        if component in waived:
            plan.changes.append(f"RNG of {component} was left as the script has it")
            continue
        try:
            if component not in saved:
                raise CorruptCheckpointError(
                    f"Step {plan.saved.step} holds no RNG state of {component}.", kind="rng", step=plan.saved.step
                )
            node = saved[component]
            if node is not None:
                _plan_component(component, node, plan)
        except CorruptCheckpointError as error:
            if plan.strict:
                raise
            plan.changes.append(f"RNG of {component} was not restored: {error}")


def _plan_component(component: str, node: Json, plan: RestorePlan) -> None:
    if component not in ("python", "numpy", "torch"):
        _plan_device(component, node, plan)
        return
    apply = _checked(component, plan, lambda: _BUILD[component](node))
    if apply is not None:
        plan.later(Phase.RNG, apply)


def _checked(name: str, plan: RestorePlan, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except _VersionError as error:
        plan.problems.append(f"RNG of {name}: {error}")
        return None
    except (*_DAMAGED, CorruptCheckpointError) as error:
        raise CorruptCheckpointError(
            f"The RNG state of {name} in step {plan.saved.step} is damaged: {error}.",
            kind="rng",
            step=plan.saved.step,
        ) from error


class _VersionError(Exception):
    """A sound state that this version of a library does not know."""


def _plain(node: Json) -> Any:
    return decode_with(node, lambda name, device: None)


def _python(node: Json) -> Callable[[], None]:
    state = _plain(node)
    if state["version"] != random.Random.VERSION:
        raise _VersionError(f"its version {state['version']} is not this Python's ({random.Random.VERSION})")
    restored = _python_tuple(state)
    random.Random(0).setstate(restored)
    return lambda: random.setstate(restored)


def _numpy(node: Json) -> Callable[[], None]:
    import numpy

    state = _numpy_dict(_plain(node))
    kind = state["bit_generator"]
    if not isinstance(kind, str):
        raise ValueError("its bit generator has no name")
    if kind != numpy.random.get_state(legacy=False)["bit_generator"]:
        raise _VersionError(f"it is a {kind}, which is not the global bit generator now")
    numpy.random.RandomState(getattr(numpy.random, kind)(0)).set_state(state)
    return lambda: numpy.random.set_state(state)


def _torch(node: Json) -> Callable[[], None]:
    state = _plain(node)
    torch.Generator().set_state(state)
    return lambda: torch.set_rng_state(state)


_BUILD: dict[str, Callable[[Json], Callable[[], None]]] = {"python": _python, "numpy": _numpy, "torch": _torch}


def _plan_device(kind: str, nodes: Json, plan: RestorePlan) -> None:
    room = getattr(torch, kind)
    count = room.device_count() if kind != "mps" else int(torch.backends.mps.is_available())
    states = _checked(kind, plan, lambda: [_device_bytes(node) for node in nodes])
    if len(states) > count:
        text = f"RNG of {kind}: {len(states)} device streams were saved and {count} devices are here"
        if plan.strict:
            plan.problems.append(f'{text}; override={{"rng": ["{kind}"]}} or strict=False goes on without them')
            return
        plan.changes.append(f"{text}; streams {list(range(count, len(states)))} were not restored")

    def put_back() -> None:
        for index, state in enumerate(states[:count]):
            # Before the first use of a device torch itself keeps the call for later.
            room.set_rng_state(state) if kind == "mps" else room.set_rng_state(state, index)

    plan.later(Phase.RNG, put_back)


def _device_bytes(node: Json) -> torch.Tensor:
    state = _plain(node)
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.numel() == 0:
        raise ValueError("no bytes")
    return state


class GeneratorPart:
    """A registered generator: torch.Generator, numpy.random.Generator or RandomState, random.Random."""

    kind = "generator"

    def __init__(self, name: str, generator: Any) -> None:
        self.name = name
        self._live = generator
        self._family = family(generator)

    def capture(self, into: CollectorLike) -> None:
        state = _give(self._family, self._live)
        into.parts[self.name] = {"kind": self.kind, "family": self._family}
        into.values[self.name] = state

    def plan(self, plan: RestorePlan) -> None:
        """Put back in `Phase.RNG` like the global generators: a loader's iterator may draw from it when it is made."""
        family_then = plan.saved.parts[self.name].get("family")
        if family_then != self._family:
            plan.problems.append(f"{self.name} was saved as a {family_then} generator and is a {self._family} one now")
            return
        node = plan.saved.values.get(self.name)
        apply = _checked(self.name, plan, lambda: _take(self._family, self._live, _plain(node)))
        if apply is not None:
            plan.later(Phase.RNG, apply)


def family(generator: Any) -> str | None:
    """Which library a generator is of, with its device or bit generator; None for what is none."""
    if isinstance(generator, torch.Generator):
        return f"torch:{generator.device.type}"
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else "python"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        return f"numpy:{generator.bit_generator.state['bit_generator']}"
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return f"numpy-legacy:{generator.get_state(legacy=False)['bit_generator']}"
    return None


def _give(kind: str | None, live: Any) -> Json:
    if kind == "python":
        return encode(python_state(live.getstate()))
    if kind is not None and kind.startswith("torch"):
        return pack_bytes(live.get_state())
    legacy = kind is not None and kind.startswith("numpy-legacy")
    return encode(numpy_state(live.get_state(legacy=False) if legacy else live.bit_generator.state))


def _take(kind: str | None, live: Any, state: Any) -> Callable[[], None]:
    if kind == "python":
        if state["version"] != random.Random.VERSION:
            raise _VersionError(f"its version {state['version']} is not this Python's ({random.Random.VERSION})")
        words = _python_tuple(state)
        random.Random(0).setstate(words)
        return lambda: live.setstate(words)
    if kind is not None and kind.startswith("torch"):
        torch.Generator(live.device).set_state(state)
        return lambda: live.set_state(state)
    import numpy

    full = _numpy_dict(state)
    bits = getattr(numpy.random, full["bit_generator"])(0)
    if kind is not None and kind.startswith("numpy-legacy"):
        numpy.random.RandomState(bits).set_state(full)
        return lambda: live.set_state(full)
    bits.state = full
    return lambda: setattr(live.bit_generator, "state", full)
