"""Strided memory: element types, dimension orders, and the bytes of a tensor.

A dim order lists a dense tensor's dimensions from the slowest to the fastest varying one: (0, 1, 2, 3) is row-major,
(0, 2, 3, 1) channels_last. It is kept apart from `shape`, which is always the logical one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ckpt.format.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from ckpt.capture.base import TensorInfo

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dense_strides(shape: Sequence[int], dim_order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides, in elements, of a tensor without holes whose dimensions lie in memory in `dim_order`."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(range(len(shape)) if dim_order is None else dim_order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@functools.lru_cache(4096)
def saved_strides(info: TensorInfo) -> tuple[int, ...]:
    """The strides a saved tensor had; few layouts, each met by many tensors."""
    return dense_strides(info.shape, info.dim_order)


def order_of_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The dim order of a dense layout, or None when it is row-major or has holes or overlaps.

    Dimensions of size 1 take part: kernels choose by their strides, so a channels_last 1x1 filter is not a row-major
    one although torch calls both contiguous.
    """
    if len(shape) < 2:
        return None
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
    if order == tuple(range(len(shape))):
        return None
    dense = dense_strides(shape, order)
    fits = all(size == 1 or a == b for size, a, b in zip(shape, dense, strides, strict=True))
    return order if fits else None


def dim_order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dim order of a strided tensor; None for row-major, and for views that are not dense."""
    return order_of_strides(tensor.shape, tensor.stride())


def allocate(info: TensorInfo, device: torch.device | str = "cpu") -> torch.Tensor:
    """An uninitialised tensor of the saved dtype, shape and dim order."""
    return torch.empty_strided(info.shape, saved_strides(info), dtype=DTYPES[info.dtype], device=device)


def has_zero_strides(tensor: torch.Tensor) -> bool:
    """True when several elements are one memory location (`expand`), so that it cannot be written elementwise."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def owns_storage(tensor: torch.Tensor) -> bool:
    """True when the tensor's elements are its storage's, all of them: no view of it or by it shows a part."""
    return (
        tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and not has_zero_strides(tensor)
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical row-major order as a 1-d uint8 CPU tensor: a view where that is possible, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _flat_bytes(plain)


def _flat_bytes(plain: torch.Tensor) -> torch.Tensor:
    if plain.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    # The strides are spelled out because a contiguous tensor may carry odd ones in dimensions of size 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
