"""The order of samples: a keyed permutation of [0, n) that answers for one position without building a list.

Normative text with test vectors: docs/data-order.md. The numbers are part of what a checkpoint means: any change
here makes every saved position point at other samples, so ORDER_VERSION would have to move with it.
"""

from __future__ import annotations

import math
from typing import Any

ORDER_VERSION = 1
ROUNDS = 12
MAX_LENGTH = 1 << 62

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_C1 = 0xBF58476D1CE4E5B9
_C2 = 0x94D049BB133111EB

# Domains keep the streams apart: without them the order of one seed would be the sample seeds of another.
DOMAIN_ORDER = 0x6F72646572  # "order"
DOMAIN_SAMPLE = 0x73616D706C65  # "sample"
DOMAIN_BATCH = 0x6261746368  # "batch"
DOMAIN_WORKER = 0x776F726B6572  # "worker"

# Below this many positions the scalar loop is faster than numpy's call overhead.
_VECTOR_FROM = 24


def mix(z: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit unsigned integers."""
    z = ((z ^ (z >> 30)) * _C1) & _MASK
    z = ((z ^ (z >> 27)) * _C2) & _MASK
    return z ^ (z >> 31)


def absorb(state: int, word: int) -> int:
    """`state` with the 64-bit `word` hashed in; for a fixed state no two words give the same result."""
    return mix(((state + GOLDEN) & _MASK) ^ word)


def fold(*words: int) -> int:
    """The 64-bit hash of a sequence of 64-bit unsigned words, by `absorb` from state 0."""
    state = 0
    for word in words:
        state = absorb(state, word)
    return state


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


class Order:
    """The order of one epoch: position -> index, both in [0, length), a permutation for each (seed, epoch).

    `shuffle=False` is the identity. Positions at or beyond `length` wrap around (the padding of an epoch's end).
    Cost: O(1) per position and per object; nothing grows with `length`. Immutable; safe in any thread and process.
    """

    __slots__ = ("_a", "_b", "_keys", "length", "shuffle")

    def __init__(self, length: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length must be in [0, 2**62], got {length}")
        self.length = length
        self.shuffle = shuffle
        # Smallest near-square grid that covers [0, length): it overshoots by less than a row, so a walk is rare.
        self._a = math.isqrt(length - 1) + 1 if length else 1
        self._b = -(-length // self._a) if length else 1
        self._keys = tuple(fold(DOMAIN_ORDER, seed, epoch, i) for i in range(ROUNDS)) if shuffle else ()

    def index(self, position: int) -> int:
        """The sample index at `position` (>= 0). IndexError when the order is empty."""
        if not self.length:
            raise IndexError("an empty order has no positions")
        x = position % self.length
        if not self.shuffle:
            return x
        x = self._permute(x)
        while x >= self.length:
            x = self._permute(x)
        return x

    def indices(self, positions: range) -> list[int]:
        """The sample indices at `positions`, in that order, as plain ints; the same numbers as `index` gives."""
        if not self.shuffle or len(positions) < _VECTOR_FROM:
            return [self.index(p) for p in positions]
        np = _numpy()
        if np is None:
            return [self.index(p) for p in positions]
        return self._vector(np, positions).tolist()

    def _permute(self, x: int) -> int:
        a, b = self._a, self._b
        left, right = divmod(x, b)
        for i, key in enumerate(self._keys):
            if i & 1:
                right += ((mix(key ^ left) >> 32) * b) >> 32
                if right >= b:
                    right -= b
            else:
                left += ((mix(key ^ right) >> 32) * a) >> 32
                if left >= a:
                    left -= a
        return left * b + right

    def _vector(self, np: Any, positions: range) -> Any:
        x = np.arange(positions.start, positions.stop, positions.step, dtype=np.uint64) % np.uint64(self.length)
        x = self._permute_vector(np, x)
        outside = np.flatnonzero(x >= self.length)
        while outside.size:
            x[outside] = self._permute_vector(np, x[outside])
            outside = outside[x[outside] >= self.length]
        return x

    def _permute_vector(self, np: Any, x: Any) -> Any:
        u = np.uint64
        a, b = u(self._a), u(self._b)
        left = x // b
        right = x - left * b
        for i, key in enumerate(self._keys):
            to, other, size = (right, left, b) if i & 1 else (left, right, a)
            to += ((_mix_vector(u, other ^ u(key)) >> u(32)) * size) >> u(32)
            np.subtract(to, size, out=to, where=to >= size)
        return left * b + right


def _mix_vector(u: Any, z: Any) -> Any:
    z ^= z >> u(30)
    z *= u(_C1)
    z ^= z >> u(27)
    z *= u(_C2)
    z ^= z >> u(31)
    return z
