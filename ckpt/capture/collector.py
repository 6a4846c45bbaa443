"""Where the parts of a state put what they hold at the moment of a save.

A collector keeps the live tensors themselves: nothing is copied here, staging copies them right afterwards. Values are
encoded at once. Tensors of one memory are kept once; every further name is an alias.
"""

from __future__ import annotations

import base64
import sys
from itertools import pairwise
from typing import Any

import torch

from ckpt.capture import composite
from ckpt.capture.rebuild import PartReference
from ckpt.capture.tensors import DTYPE_NAMES, order_of_strides
from ckpt.errors import UnsupportedStateError
from ckpt.format.names import MAX_NAME
from ckpt.format.values import Json, Path, encode, refuse, spell

_REAL = frozenset(dtype for dtype in DTYPE_NAMES if not dtype.is_complex)
_STRIDED = torch.strided


class Collector:
    """tensors: stored name -> live tensor, in the order of capture; aliases: name -> stored name of the same memory;
    dim_orders: stored name -> order, for tensors that are dense and not row-major; composites: name -> what describes
    a quantised, sparse or flattened tensor whose components are in `tensors`; marks: of tensors inside values that are
    more than their elements ("grad": a leaf that requires gradients, "parameter", "frozen": a parameter that is not
    trained); values, parts: by registered name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.dim_orders: dict[str, tuple[int, ...]] = {}
        self.aliases: dict[str, str] = {}
        self.composites: dict[str, dict[str, Json]] = {}
        self.marks: dict[str, str] = {}
        self.parts: dict[str, dict[str, Json]] = {}
        self.values: dict[str, Json] = {}
        # Both maps name tensors that `tensors` or `_split` keep alive: an address or id of a temporary is no identity.
        self._by_address: dict[int, str] = {}
        self._same_address: dict[int, list[str]] = {}  # every stored name, where views of several kinds start alike
        self._by_id: dict[int, str] = {}
        self._split: dict[int, tuple[torch.Tensor, dict[str, Json], composite.Components]] = {}
        self._falling: set[tuple[int, ...]] = set()

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a live tensor under its full name.

        The same memory seen in the same way under two names is kept once. Raises UnsupportedStateError, naming the
        tensor, for meta, fake, uninitialised and sharded tensors, unknown subclasses and layouts, and a name in use.
        """
        # Tens of thousands of tensors come through here while training waits: no call and no attribute too many.
        if (
            type(tensor) not in composite.PLAIN
            or tensor.dtype not in _REAL
            or tensor.layout is not _STRIDED
            or tensor.is_neg()
        ):
            self._uncommon(name, tensor)
        else:
            self._strided(name, tensor)

    def _strided(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_nested:
            raise composite.refusal(tensor, name, "a nested tensor has no one shape")
        if name in self.tensors:
            raise composite.refusal(tensor, name, "another value of the state has the same name")
        address = tensor.data_ptr()
        if address == 0:
            if self._seen_empty(name, tensor):
                return
        elif self._by_address.setdefault(address, name) is not name and self._seen(name, tensor, address):
            return
        self.tensors[name] = tensor
        strides = tensor.stride()
        if strides not in self._falling:
            self._note_order(name, tensor, strides)

    def _note_order(self, name: str, tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
        # Strides that only fall are row-major or a view with holes, whatever the shape.
        if all(a >= b for a, b in pairwise(strides)):
            self._falling.add(strides)
            return
        order = order_of_strides(tensor.shape, strides)
        if order is not None:
            self.dim_orders[name] = order

    def _seen(self, name: str, tensor: torch.Tensor, address: int) -> bool:
        others = self._same_address.setdefault(address, [self._by_address[address]])
        for first in others:
            other = self.tensors[first]
            if other is tensor or (
                other.dtype == tensor.dtype
                and other.shape == tensor.shape
                and other.stride() == tensor.stride()
                and other.device == tensor.device
            ):
                self.aliases[name] = first
                return True
        others.append(name)
        return False

    def _seen_empty(self, name: str, tensor: torch.Tensor) -> bool:
        why = composite.why_not(tensor)
        if why is None and tensor.numel() > 0:
            why = "its storage has been freed"
        if why is not None:
            raise composite.refusal(tensor, name, why)
        first = self._by_id.setdefault(id(tensor), name)
        if first != name:
            self.aliases[name] = first
        return first != name

    def _uncommon(self, name: str, tensor: torch.Tensor) -> None:
        why = composite.why_not(tensor)
        if why is not None:
            raise composite.refusal(tensor, name, why)
        if not composite.is_composite(tensor):
            if tensor.is_conj() or tensor.is_neg():
                # The memory of such a view holds other bits than its elements, so that it must tie with nothing.
                tensor = tensor.detach().resolve_conj().resolve_neg()
            self._strided(name, tensor)
            return
        # Components may be made anew at each access: one tensor under two names must give the same ones to be tied.
        if id(tensor) not in self._split:
            self._split[id(tensor)] = (tensor, *composite.split(tensor, name))
        _, head, parts = self._split[id(tensor)]
        self.composites[name] = head
        for key, part in parts.items():
            self.tensor(f"{name}/{key}", part)

    def encode(self, value: Any, path: Path) -> Json:
        """`value` as typed JSON. Tensors and arrays inside are added under their path and referred to by name.

        Raises UnsupportedStateError naming the path of what a checkpoint cannot hold.
        """
        return encode(value, path, self._leaf)

    def _leaf(self, value: Any, path: Path) -> Json:
        if isinstance(value, torch.Tensor):
            return self._tensor_leaf(value, path)
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        # An array can only be here if somebody imported numpy already.
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if type(value) is numpy.ndarray:
                return self._array_leaf(numpy, value, path)
            if isinstance(value, numpy.generic):
                return _scalar_leaf(numpy, value, path)
            if isinstance(value, numpy.dtype) and not _foreign(value):
                return {"$npdtype": value.str}
        if type(value) is PartReference:
            return {"$part": value.name}
        raise refuse(value, path)

    def _tensor_leaf(self, value: torch.Tensor, path: Path) -> Json:
        name = self._free_name(path)
        if composite.is_flattenable(value) and composite.why_not(value) is None:
            raise composite.refusal(value, name, "its class can only be filled inside a live module or optimizer")
        self.tensor(name, value)
        if type(value) is torch.nn.Parameter:
            self.marks[name] = "parameter" if value.requires_grad else "frozen"
        elif value.requires_grad and value.is_leaf:
            self.marks[name] = "grad"  # what was computed from it has a history, which is no state
        # Elsewhere than on the CPU the place is part of the value: nothing live tells it on resume.
        return {"$tensor": name if value.device.type == "cpu" else [name, str(value.device)]}

    def _array_leaf(self, numpy: Any, value: Any, path: Path) -> Json:
        name = self._free_name(path)
        kind = value.dtype
        if _foreign(kind):
            raise refuse(value, path, f" because of its element type {kind}")
        simple = kind.isnative and (kind.name in _ARRAY_TYPES)
        # torch takes neither read-only memory nor negative strides.
        if not simple or not value.flags.writeable or any(stride < 0 for stride in value.strides):
            value = numpy.array(value, copy=True, order="C")
        if simple:
            self.tensor(name, torch.from_numpy(value))
            return {"$ndarray": name}
        self.tensor(name, torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else _empty())
        return {"$ndarray": [name, kind.str, list(value.shape)]}

    def _free_name(self, path: Path) -> str:
        """The path as a name. Keys that are spelled alike (1.5 and a str that looks like it) get a number."""
        name = base = spell(path)
        if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME:
            raise UnsupportedStateError(
                f"The path {name[:100]!r}... is longer than {MAX_NAME} bytes.",
                name=name,
                stage="capture",
                hint="Shorten the keys.",
            )
        number = 1
        while name in self.tensors or name in self.aliases or name in self.composites:
            number += 1
            name = f"{base}%{number}"
        return name


_ARRAY_TYPES = frozenset(name for name in DTYPE_NAMES.values() if not name.startswith(("float8", "float4", "bf")))


def _foreign(kind: Any) -> bool:
    """Element types without a size and meaning of their own on every machine: objects, records, long doubles."""
    return kind.hasobject or kind.names is not None or kind.kind == "V" or kind.char in "gG"


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _scalar_leaf(numpy: Any, value: Any, path: Path) -> Json:
    kind = value.dtype
    if _foreign(kind):
        raise refuse(value, path, f" because of its element type {kind}")
    name = kind.str if kind.kind in "US" else kind.name
    # An empty text has no bytes, but as an array those of one character.
    raw = numpy.asarray(value).astype(kind.newbyteorder("<")).tobytes() if kind.itemsize else b""
    return {"$npscalar": [name, base64.b64encode(raw).decode("ascii")]}
