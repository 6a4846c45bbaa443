"""Values with tensors in them, back from typed JSON and the stored tensors."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import torch

from ckpt.capture import composite
from ckpt.capture.base import RestorePlan, SavedState, Target
from ckpt.capture.tensors import allocate
from ckpt.format import payloads
from ckpt.format.values import Json, decode

ABSENT: Any = object()  # in the place of a tensor that was not read


class PartReference:
    """In a container's tree, the place of a registered object; the object is the part of this name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Rebuild:
    """Makes the values of a plan: first their tensors, which the resume fills, then, with the bytes in, the values.

    Tensors that were one when they were saved are one again.
    """

    def __init__(self, plan: RestorePlan) -> None:
        self._plan = plan
        self._made: dict[str, torch.Tensor] = {}

    def reserve(self, node: Json) -> None:
        """Allocates every tensor `node` refers to and plans that it is filled; an unknown name is missing."""
        decode(node, lambda tag, payload: _leaf(tag, payload, self._reserved))

    def tensor(self, name: str, device: str = "cpu") -> torch.Tensor | None:
        """A fresh tensor that the resume fills with what was saved as `name`; None, and listed, if nothing was."""
        stored = self._plan.saved.aliases.get(name, name)
        info = self._plan.saved.tensors.get(stored)
        if info is None:
            self._plan.missing.append(name)
            return None
        if stored not in self._made:
            self._made[stored] = allocate(info, here(device))
            self._plan.targets.append(Target(stored, self._made[stored]))
        return self._made[stored]

    def value(self, node: Json) -> Any:
        """The value of a reserved `node`; its tensors hold their bytes once the resume has read them."""
        return decode(node, lambda tag, payload: _leaf(tag, payload, self._filled))

    def _reserved(self, name: str, device: str) -> torch.Tensor:
        head = self._plan.saved.composites.get(name)
        names = [name] if head is None else [f"{name}/{key}" for key in composite.component_names(head)]
        for each in names:
            self.tensor(each, device)
        return torch.empty(0) if head is not None or self._lacks(name) else self._made[self._stored(name)]

    def _filled(self, name: str, device: str) -> torch.Tensor:
        return stored_tensor(self._plan.saved, self._made, name)

    def _stored(self, name: str) -> str:
        return self._plan.saved.aliases.get(name, name)

    def _lacks(self, name: str) -> bool:
        return self._stored(name) not in self._made


def stored_tensor(saved: SavedState, tensors: Any, name: str) -> Any:
    """The tensor saved as `name`, out of `tensors` by stored name. A flattened subclass is a dict of its components.

    Raises KeyError when `tensors` lacks it.
    """
    head = saved.composites.get(name)
    if head is None:
        return tensors[saved.aliases.get(name, name)]
    if head.get("kind") == "flatten":
        inner = [full for full in (*saved.tensors, *saved.aliases, *saved.composites) if full.startswith(f"{name}/")]
        keys = dict.fromkeys(full[len(name) + 1 :].split("/", 1)[0] for full in inner)
        return {key: stored_tensor(saved, tensors, f"{name}/{key}") for key in keys}
    parts = {key: stored_tensor(saved, tensors, f"{name}/{key}") for key in composite.component_names(head)}
    return composite.join(head, parts)


def decode_with(node: Json, tensor_of: Callable[[str, str], Any]) -> Any:
    """The value of `node`, its tensors taken from `tensor_of(name, device)`."""
    return decode(node, lambda tag, payload: _leaf(tag, payload, tensor_of))


def here(device: str) -> torch.device:
    """The place of a saved device on this machine: its index where that exists, its current device where the kind
    does, else the CPU.
    """
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return wanted
    room = getattr(torch, wanted.type, None)
    count = room.device_count() if room is not None and hasattr(room, "device_count") else 0
    if count == 0:
        return torch.device("cpu")
    return wanted if (wanted.index or 0) < count else torch.device(wanted.type)


def _leaf(tag: str, payload: Json, tensor_of: Callable[[str, str], Any]) -> Any:
    payloads.check(tag, payload)
    if tag == "$tensor":
        name, device = (payload, "cpu") if isinstance(payload, str) else payload
        return tensor_of(name, device)
    if tag == "$ndarray":
        return _array(payload, tensor_of)
    if tag == "$dtype":
        return _torch_dtype(payload)
    if tag == "$size":
        return torch.Size(payload)
    if tag == "$device":
        return _torch_device(payload)
    if tag == "$u8":
        return unpack_bytes(payload)
    if tag == "$part":
        return PartReference(payload)
    import numpy

    if tag == "$npdtype":
        return numpy.dtype(payload)
    kind = numpy.dtype(payload[0])
    if kind.itemsize == 0:
        return kind.type()
    return numpy.frombuffer(base64.b64decode(payload[1], validate=True), kind.newbyteorder("<"))[0].astype(kind)


def _torch_device(text: Json) -> torch.device:
    try:
        return torch.device(str(text))
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _array(payload: Json, tensor_of: Callable[[str, str], Any]) -> Any:
    if isinstance(payload, str):
        tensor = tensor_of(payload, "cpu")
        return tensor if tensor is ABSENT else tensor.numpy()
    import numpy

    name, kind, shape = payload
    dtype = numpy.dtype(kind)
    tensor = tensor_of(name, "cpu")
    if tensor is ABSENT:
        return tensor
    raw = tensor.numpy()
    # Before `numpy.empty`: a shape that lies about an empty tensor would ask for any amount of memory.
    if raw.dtype != numpy.uint8 or raw.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{raw.nbytes} bytes are no array of shape {shape}")
    return raw.view(dtype).reshape(shape) if raw.size else numpy.empty(shape, dtype)


def pack_bytes(tensor: torch.Tensor) -> Json:
    """A CPU uint8 tensor as a value of its own, apart from the data file: RNG states are never placed on a device."""
    return {"$u8": base64.b64encode(bytes(tensor.tolist())).decode("ascii")}


def unpack_bytes(payload: Json) -> torch.Tensor:
    raw = base64.b64decode(payload, validate=True)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
