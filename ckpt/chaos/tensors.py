"""Comparing trees of live tensors bit by bit, for end artefacts that are no checkpoints of ours. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.chaos.record import same


def tree_differences(one: Any, two: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, what differs) for every leaf that is not the same in both: tensors by their bits, NaN equal to itself."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        text = tensor_difference(one, two)
        if text:
            yield path or "tensor", text
    elif isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in dict.fromkeys((*one, *two)):
            inner = f"{path}/{key}" if path else str(key)
            if key not in one or key not in two:
                yield inner, f"only the {'first' if key in one else 'second'} has it"
            else:
                yield from tree_differences(one[key], two[key], inner)
    elif isinstance(one, list | tuple) and type(one) is type(two) and len(one) == len(two):
        for number, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from tree_differences(left, right, f"{path}/{number}" if path else str(number))
    elif type(one) is not type(two) or not same(one, two):
        yield path or "value", f"{one!r:.60} and {two!r:.60}"


def tensor_difference(one: Any, two: Any) -> str:
    """How two tensors differ, in words; "" when dtype, shape and every bit are the same."""
    import torch

    if one.dtype != two.dtype or one.shape != two.shape or one.layout != two.layout:
        return f"{one.dtype} {list(one.shape)} and {two.dtype} {list(two.shape)}"
    if one.layout is not torch.strided:
        one, two = one.to_dense(), two.to_dense()
    # A 0-d tensor has no view of another item size; one of one dimension has.
    left = one.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    right = two.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    count = int((left != right).sum())
    return f"{count:,} of {left.numel():,} bytes are others ({one.dtype})" if count else ""
