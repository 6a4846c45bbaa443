"""What capture hands to the rooms above it, and what a part of the state must be able to do.

Saving: each registered object is a `Part`; `part.capture(collector)` adds its tensors (live, not copied) and its plain
values (encoded at once, so that nothing mutable is kept). Staging copies the tensors afterwards, in the same call of
`save`. Resuming: `part.plan(saved, plan)` only compares and collects: which live tensors are to be filled from which
saved names (`Target`), and which actions follow once all bytes have landed and been found good. Nothing live changes
before `RestorePlan.check` has passed (I8).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from ckpt.capture import composite
from ckpt.capture.store import Store
from ckpt.capture.tensors import DTYPES
from ckpt.errors import StateMismatchError
from ckpt.format.values import Json, Path


class Phase(enum.IntEnum):
    """The order in which values are put back (I8): data position after optimizers, RNG last of all."""

    MODULES = 0
    SCHEDULERS = 1
    OPTIMIZERS = 2
    OTHERS = 3
    DATA = 4
    RNG = 5


class TensorInfo(NamedTuple):
    """A saved tensor: `dtype` is torch's name without "torch."; `dim_order` None means row-major strides."""

    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds, before any tensor byte was read. Names are full: "model/layers.0.weight".

    parts: registered name -> {"kind": ..., ...}; values: registered name -> typed JSON; tensors: every name that has
    bytes of its own; aliases: name -> the name its bytes are stored under; environment: of the save, where it is known.
    """

    step: int
    parts: Mapping[str, Mapping[str, Json]]
    values: Mapping[str, Json]
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Json] = field(default_factory=dict)

    def info(self, name: str) -> TensorInfo | None:
        return self.tensors.get(self.aliases.get(name, name))

    @cached_property
    def composites(self) -> Mapping[str, Mapping[str, Json]]:
        """What describes the quantised, sparse and flattened tensors, whose components are in `tensors`, by name."""
        return {name: head for part in self.parts.values() for name, head in part.get("composites", {}).items()}

    @cached_property
    def marks(self) -> Mapping[str, str]:
        """Tensors inside values that are more than their elements, by full name: "grad", "parameter", "frozen"."""
        return {name: mark for part in self.parts.values() for name, mark in part.get("marks", {}).items()}

    @cached_property
    def names(self) -> Mapping[str, list[str]]:
        """Every tensor a part holds (composites as one, aliases too), by the part's registered name."""
        grouped: dict[str, list[str]] = {name: [] for name in self.parts}
        inner = tuple(f"{name}/" for name in self.composites)
        for name in (*self.tensors, *self.aliases, *self.composites):
            if not (inner and name.startswith(inner)):
                grouped.setdefault(name.split("/", 1)[0], []).append(name)
        return grouped


@dataclass(slots=True)
class Target:
    """Bytes of the saved tensor `name` (its stored name, aliases resolved) go into `tensor`, element by element."""

    name: str
    tensor: torch.Tensor


@dataclass
class RestorePlan:
    """What a resume will do, collected before it does anything.

    Parts append to the lists; `check` raises one StateMismatchError that lists everything. `strict=False` turns missing
    and unexpected names into receipt entries; shapes and dtypes that differ are errors always.
    """

    saved: SavedState
    strict: bool = True
    override: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shape: list[tuple[str, str, str]] = field(default_factory=list)
    dtype: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # other reasons to refuse, as sentences
    changes: list[str] = field(default_factory=list)  # reasons why the run is not bit-exact, for receipt.exactness
    notes: list[str] = field(default_factory=list)  # differences that were settled (hyper-parameters), logged once
    actions: list[tuple[Phase, Callable[[], None]]] = field(default_factory=list)
    preparations: list[Callable[[], None]] = field(default_factory=list)  # see `prepare`
    store: Store = field(default_factory=Store)
    casting: bool = False  # a live dtype may be another one than the saved: whoever loads casts

    def fill(self, name: str, live: torch.Tensor) -> bool:
        """Plans that `live` gets the bytes saved as `name`; False (and a list entry) when it cannot."""
        if name in self.saved.composites or composite.is_composite(live):
            return composite.fill(self, name, live)
        stored = self.saved.aliases.get(name, name)
        info = self.saved.tensors.get(stored)
        if info is None:
            self.missing.append(name)
            return False
        fits = self.compare(name, live, info)
        if fits:
            self.targets.append(Target(stored, live))
            self.store.put(stored, live)
        return fits

    def compare(self, name: str, live: torch.Tensor, info: TensorInfo) -> bool:
        """Whether `live` has the saved shape and dtype; a difference is listed."""
        fits = live.shape == info.shape
        if not fits:
            self.shape.append((name, str(list(info.shape)), str(list(live.shape))))
        if DTYPES.get(info.dtype) is live.dtype:
            return fits
        self.dtype.append((name, info.dtype, str(live.dtype).removeprefix("torch.")))
        return False

    def later(self, phase: Phase, action: Callable[[], None]) -> None:
        """`action` runs in `phase`, after every tensor has its bytes and all digests were right."""
        self.actions.append((phase, action))

    def check(self) -> None:
        """Raises StateMismatchError listing every difference. Nothing live has changed when it does."""
        names = bool(self.missing or self.unexpected) and self.strict
        if not (names or self.shape or self.dtype or self.problems):
            return
        lines = list(self.problems)
        lines += [f"missing in the checkpoint: {_some(self.missing)}"] if self.missing else []
        lines += [f"unexpected in the checkpoint: {_some(self.unexpected)}"] if self.unexpected else []
        lines += [f"shape of {n}: saved {a}, live {b}" for n, a, b in self.shape[:20]]
        lines += [f"dtype of {n}: saved {a}, live {b}" for n, a, b in self.dtype[:20]]
        hint = "Rebuild the objects as they were when the step was saved"
        hint += ", or pass strict=False to restore what fits." if names and not (self.shape or self.dtype) else "."
        raise StateMismatchError(
            f"Step {self.saved.step} does not fit the registered objects; nothing was changed.\n  "
            + "\n  ".join(lines),
            missing=self.missing,
            unexpected=self.unexpected,
            shape=self.shape,
            dtype=self.dtype,
            step=self.saved.step,
            stage="resume",
            hint=hint,
        )

    def prepare(self) -> None:
        """Gives live tensors the memory layout that was saved. Runs after `check`, before the first byte lands."""
        for step in self.preparations:
            step()

    def apply(self, phases: Container[Phase] = frozenset(Phase)) -> None:
        """Runs the actions of `phases`, in the order of their phases and within one in the order they were planned.

        Each action can be run again: RNG is put back once more after a loader's iterator has been made.
        """
        for phase, action in sorted(self.actions, key=lambda item: item[0]):
            if phase in phases:
                action()


def _some(names: list[str], most: int = 20) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names) - most} more)"


class CollectorLike(Protocol):
    """Where a part puts what it captures (`ckpt.capture.collector.Collector`)."""

    parts: dict[str, dict[str, Json]]
    values: dict[str, Json]

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a live tensor under its full name; ties become aliases; meta tensors are refused by name."""
        ...

    def encode(self, value: Any, path: Path) -> Json:
        """`value` as typed JSON; tensors and arrays inside are added and referred to by name."""
        ...


class Part(Protocol):
    """One registered object."""

    name: str  # as registered
    kind: str  # "module", "optimizer", "scheduler", "scaler", "object", "generator", "container", ...

    def capture(self, into: CollectorLike) -> None:
        """Adds the state as it is now. Only reads: no hook of training fires and no global RNG is drawn (I7)."""
        ...

    def plan(self, plan: RestorePlan) -> None:
        """Compares `plan.saved` with the live object and plans its restore; changes nothing."""
        ...
