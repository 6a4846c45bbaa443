"""Where saved tensors land that hang on no module: in the live tensor of their place when it fits, else in a new one.

A live tensor is filled in place only when nothing about it would differ afterwards: dtype, shape, device, strides. All
else gets new memory, which its owner attaches once every digest was right. So a resume never casts, and no object that
the script still holds is replaced without need (a captured graph or a scheduler may refer to it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckpt.capture import composite
from ckpt.capture.base import RestorePlan, Target, TensorInfo
from ckpt.capture.rebuild import decode_with, here, marked, stored_tensor
from ckpt.capture.tensors import DTYPES, allocate, saved_strides
from ckpt.errors import CorruptCheckpointError
from ckpt.format.values import Json, spell

Where = Callable[[str], torch.device]


class Placer:
    """Plans the tensors of one part (`place`, `reserve`) and gives their values once the bytes are in (`value`)."""

    def __init__(self, plan: RestorePlan) -> None:
        self._plan = plan
        self._live: dict[str, torch.Tensor] = {}
        self._homes: dict[str, torch.device] = {}
        self._used: set[tuple[torch.device, int]] = set()
        self._kept: dict[str, torch.Tensor] = {}

    def place(self, name: str, live: object, device: torch.device) -> torch.Tensor:
        """The tensor that will hold the bytes saved as `name`: `live` when it fits, else a new one on `device`.

        Tensors saved as one come back as one.
        """
        plan = self._plan
        stored = plan.saved.aliases.get(name, name)
        info = plan.saved.tensors.get(stored)
        if info is None:
            raise CorruptCheckpointError(
                f"A value of step {plan.saved.step} refers to the tensor {name!r}, which the step does not hold.",
                kind="value",
                tensor=name,
                step=plan.saved.step,
            )
        home = self._homes.setdefault(stored, device)
        target = plan.store.find(stored, home)
        if target is not None:
            return target
        if isinstance(live, torch.Tensor) and self._fits(live, info, device):
            target = self._live[stored] = live
        else:
            target = allocate(info, device)
        address = target.data_ptr() if target.layout is torch.strided else 0
        if address:
            self._used.add((target.device, address))
        plan.store.add(stored, home, target)
        plan.targets.append(Target(stored, target))
        return target

    def _fits(self, live: torch.Tensor, info: TensorInfo, device: torch.device) -> bool:
        if type(live) not in composite.PLAIN or live.layout is not torch.strided:
            return False
        if live.shape != info.shape or live.dtype is not DTYPES.get(info.dtype):
            return False
        home = live.device
        if home != device and (home.type != device.type or device.index is not None):
            return False
        if info.shape:
            strides = saved_strides(info)
            if live.stride() != strides and not _same_order(info.shape, live.stride(), strides):
                return False
        if live.is_conj() or live.is_neg():
            return False
        # Two names that share memory now and did not when saved would overwrite each other.
        return (home, live.data_ptr()) not in self._used

    def reserve(self, node: Json, live: Mapping[str, torch.Tensor], where: Where = here) -> Any:
        """Plans every tensor inside `node`; the value is good for comparing only, its tensors have no bytes yet.

        live: full name -> the live tensor of that place, whose device is kept. where: saved device -> the device for
        those that have none.
        """

        def tensor_of(name: str, device: str) -> torch.Tensor:
            head = self._plan.saved.composites.get(name)
            held = live.get(name)
            home = where(device) if held is None else held.device
            if head is None:
                return self.place(name, held, home)
            for component in composite.component_names(head):
                self.place(f"{name}/{component}", None, home)
            return torch.empty(0)

        return decode_with(node, tensor_of)

    def value(self, node: Json) -> Any:
        """The value of a reserved `node`. Call it after every tensor has its bytes."""
        return decode_with(node, lambda name, _: self.filled(name))

    def filled(self, name: str) -> torch.Tensor:
        """The tensor planned as `name`, composites joined. Call it after every tensor has its bytes."""
        if name in self._kept:
            return self._kept[name]
        found = stored_tensor(self._plan.saved, self, name)
        # A tensor of the script that took the bytes in its place stays what it is.
        return (
            found
            if found is self._live.get(self._plan.saved.aliases.get(name, name))
            else marked(found, self._plan.saved.marks.get(name, ""), name)
        )

    def __getitem__(self, stored: str) -> torch.Tensor:
        return self._plan.store.get(stored, self._homes[stored])

    def keep(self, name: str, live: torch.Tensor) -> None:
        """`live` stays the tensor of `name`; its components are planned elsewhere."""
        self._kept[name] = live


def _same_order(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(size == 1 or x == y for size, x, y in zip(shape, a, b, strict=True))


def live_tensors(value: Any, path: tuple[object, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """(full name, tensor) of each tensor inside nested dicts, lists and tuples, named as a Collector names them."""
    if isinstance(value, torch.Tensor):
        yield spell(path), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from live_tensors(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from live_tensors(item, (*path, i))
