"""Integer boxes of a global tensor and their overlaps.

A box is `offsets` and `sizes`, one number a dimension, of a tensor of a global `shape`. A 0-d tensor has the one box
`((), ())` of one element. All sizes are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `offsets[d] <= i < offsets[d] + sizes[d]` in every dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """True when this is a box of a tensor of `shape`."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """The elements in both, or None when there is none."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        sizes = tuple(
            min(a + n, b + m) - o
            for a, n, b, m, o in zip(self.offsets, self.sizes, other.offsets, other.sizes, offsets, strict=True)
        )
        return Box(offsets, sizes) if all(s > 0 for s in sizes) else None


def covers(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """True when `boxes` are disjoint and together hold every element of a tensor of `shape` once."""
    parts = [box for box in boxes if box.numel]
    if any(not box.fits(shape) for box in parts) or sum(box.numel for box in parts) != math.prod(shape):
        return False
    if len(parts) <= 1:
        return True
    parts.sort(key=lambda box: box.offsets)
    for i, box in enumerate(parts):
        for other in parts[i + 1 :]:
            # Sorted by the first offset: nothing behind this one can start inside the box any more.
            if other.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if box.overlap(other) is not None:
                return False
    return True
