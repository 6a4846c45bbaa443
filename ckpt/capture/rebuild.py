"""Values with tensors in them, back from typed JSON and the stored tensors."""

from __future__ import annotations

import base64
import enum
import math
from collections.abc import Callable
from typing import Any

import torch

from ckpt.capture import composite
from ckpt.capture.base import RestorePlan, SavedState, Target
from ckpt.capture.tensors import allocate
from ckpt.errors import CorruptCheckpointError
from ckpt.format import payloads
from ckpt.format.values import Json, decode

ABSENT: Any = object()  # in the place of a tensor that was not read


class PartReference:
    """In a container's tree, the place of a registered object; the object is the part of this name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Rebuild:
    """Makes the values of a plan: first their tensors, which the resume fills, then, with the bytes in, the values.

    Tensors that were one when they were saved are one again, those of other parts included.
    """

    def __init__(self, plan: RestorePlan) -> None:
        self._plan = plan
        self._marked: dict[tuple[int, str], torch.Tensor] = {}

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
        home = here(device)
        held = self._plan.store.find(stored, home)
        if held is None:
            held = allocate(info, home)
            self._plan.store.add(stored, home, held)
            self._plan.targets.append(Target(stored, held))
        return held

    def value(self, node: Json) -> Any:
        """The value of a reserved `node`; its tensors hold their bytes once the resume has read them."""
        return decode(node, lambda tag, payload: _leaf(tag, payload, self._filled))

    def _reserved(self, name: str, device: str) -> torch.Tensor:
        head = self._plan.saved.composites.get(name)
        names = [name] if head is None else [f"{name}/{key}" for key in composite.component_names(head)]
        made = [self.tensor(each, device) for each in names]
        return torch.empty(0) if head is not None or made[0] is None else made[0]

    def _filled(self, name: str, device: str) -> torch.Tensor:
        saved, home = self._plan.saved, here(device)
        found = stored_tensor(saved, _Held(self._plan, home), name)
        mark = saved.marks.get(name, "")
        made = marked(found, mark, name)
        # One tensor under two names stays one object.
        return made if made is found else self._marked.setdefault((id(found), mark), made)


class _Held:
    """The tensors of a plan on one device, by stored name."""

    def __init__(self, plan: RestorePlan, device: torch.device) -> None:
        self._store = plan.store
        self._device = device

    def __getitem__(self, stored: str) -> torch.Tensor:
        return self._store.get(stored, self._device)


def marked(tensor: torch.Tensor, mark: str, name: str) -> torch.Tensor:
    """`tensor` as the leaf it was when it was saved as `name`; the same memory."""
    if mark == "grad":
        return tensor if tensor.requires_grad else _differentiable(tensor, name).detach().requires_grad_()
    if mark in ("parameter", "frozen"):
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        trained = mark == "parameter" and _differentiable(tensor, name) is tensor
        return torch.nn.Parameter(tensor.detach(), requires_grad=trained)
    # The tensor of a part that is filled in place may be a parameter that a value showed without its gradient.
    return tensor.detach() if tensor.requires_grad else tensor


def _differentiable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor
    raise CorruptCheckpointError(f"{name!r} is marked as trained and holds integers.", kind="value", tensor=name)


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
    if tag == "$member" and isinstance(payload, enum.Enum):  # put there by `settle_enums`; no file can hold it
        return payload
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
