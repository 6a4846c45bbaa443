"""xxh3-128 digests: one for each block of a data file, each piece, and each whole file.

Spelled as 32 lower-case hex digits of the canonical (big-endian) form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from ckpt.format.names import BLOCK

Buffer = Any  # bytes, bytearray or a C-contiguous memoryview


def digest(data: Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Streaming:
    """A digest of bytes that come in parts."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._state.update(data)

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def block_digests(image: memoryview) -> tuple[str, ...]:
    """The digests of `image` in blocks of 1 MiB from its first byte; the last block may be short."""
    return tuple(xxhash.xxh3_128_hexdigest(image[i : i + BLOCK]) for i in range(0, len(image), BLOCK))


def piece_digests(image: memoryview, spans: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """The digest of each (start, end) span of bytes."""
    hexdigest = xxhash.xxh3_128_hexdigest
    return tuple([hexdigest(image[start:end]) for start, end in spans])
