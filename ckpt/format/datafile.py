"""The image of a data file: a valid safetensors file whose layout is known before any byte is copied.

8 bytes of header length (little-endian), the header padded with spaces so that the data starts at a multiple of 4096,
then the pieces: by item size descending, then by name, without holes. Item sizes are powers of two, so every piece
starts at a multiple of its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.errors import CorruptCheckpointError
from ckpt.format import jsontext, names
from ckpt.format.dtypes import ITEMSIZE, header_entry


@dataclass(frozen=True, slots=True)
class PieceSpec:
    """A box of one tensor to be laid out: `key` is its name in the header, `sizes` the box's sizes."""

    key: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything of a data file lies. `order[i]` is the number, in the given list, of the i-th piece in the
    file, and `spans[i]` its (start, end) in bytes from the file's first byte."""

    header: bytes
    order: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    bytes: int

    @property
    def data_start(self) -> int:
        return len(self.header)


def lay_out(pieces: Iterable[PieceSpec]) -> Layout:
    """The layout of a file that holds `pieces`, whose keys are unique. Pure: the same pieces give the same bytes."""
    specs = list(pieces)
    order = sorted(range(len(specs)), key=lambda i: (-ITEMSIZE[specs[i].dtype], specs[i].key))
    entries: dict[str, object] = {}
    position = 0
    ends: list[int] = []
    for i in order:
        spec = specs[i]
        dtype, shape = header_entry(spec.dtype, spec.sizes)
        end = position + spec.bytes
        entries[spec.key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        ends.append(end)
        position = end
    text = jsontext.dump(entries)
    padded = -(-(8 + len(text)) // names.ALIGN) * names.ALIGN - 8
    if padded > names.MAX_HEADER:
        raise ValueError(f"the header of {len(specs):,} tensors has {padded:,} bytes, over {names.MAX_HEADER:,}")
    header = struct.pack("<Q", padded) + text.ljust(padded, b" ")
    base = len(header)
    starts = [0, *ends[:-1]] if ends else []
    spans = tuple((base + start, base + end) for start, end in zip(starts, ends, strict=True))
    return Layout(header, tuple(order), spans, base + position)


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor as a safetensors header tells it; `start` and `end` from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(first: bytes, file_bytes: int, path: str | None = None) -> int:
    """Bytes of length field and header together, from a file's first 8 bytes.

    Raises CorruptCheckpointError (kind "header") when that cannot be: the check comes before any memory is taken.
    """
    if len(first) < 8:
        raise _corrupt("it is shorter than the 8 bytes of its header's length", path)
    (length,) = struct.unpack("<Q", first[:8])
    if length > names.MAX_HEADER or 8 + length > file_bytes:
        raise _corrupt(f"its header claims {length:,} bytes", path)
    return 8 + length


def parse_header(header: bytes, file_bytes: int, path: str | None = None) -> dict[str, HeaderEntry]:
    """The entries of a complete header (length field included), checked: spans without holes or overlaps up to the
    file's last byte. Raises CorruptCheckpointError (kind "header")."""
    size = header_bytes(header[:8], file_bytes, path)
    what = "safetensors header"
    value = jsontext.load(header[8:size], what=what, kind="header", limit=names.MAX_HEADER, path=path)
    value.pop("__metadata__", None)
    if len(value) > names.MAX_TENSORS:
        raise _corrupt(f"it lists {len(value):,} tensors", path)
    result: dict[str, HeaderEntry] = {}
    for key, item in value.items():
        entry = jsontext.Fields(item, what=what, kind="header", path=path)
        offsets, shape = entry.column("data_offsets", 2), entry.column("shape")
        if any(type(n) is not int or n < 0 for n in (*offsets, *shape)) or offsets[0] > offsets[1]:
            raise _corrupt(f"the entry {key[:80]!r} has impossible offsets or sizes", path)
        result[key] = HeaderEntry(entry.get("dtype", str), tuple(shape), size + offsets[0], size + offsets[1])
    position = size
    for start, end in sorted((entry.start, entry.end) for entry in result.values()):
        if start != position:
            raise _corrupt("its tensors overlap or leave a hole", path)
        position = end
    if position != file_bytes:
        raise _corrupt(f"its tensors end at {position:,} and the file at {file_bytes:,}", path)
    return result


def _corrupt(why: str, path: str | None) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"The data file is damaged: {why}.", kind="header", path=path, stage="read")
