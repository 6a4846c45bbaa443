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
from json.encoder import encode_basestring_ascii as _quote
from typing import Any, NamedTuple

from ckpt.errors import CorruptCheckpointError
from ckpt.format import jsontext, names
from ckpt.format.dtypes import HEADER_ITEMSIZE, ITEMSIZE, header_entry

_METADATA = "__metadata__"


class PieceSpec(NamedTuple):
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


def header_keys(tensors: Iterable[str]) -> list[str]:
    """The header key of each piece of a file, from the full names of their tensors, the pieces of one tensor in
    ascending order of their offsets: the name for the first piece, then name#1, name#2, ... past those numbers that
    give the name of another tensor in the file."""
    listed = list(tensors)
    taken = set(listed)
    if len(taken) == len(listed):
        return listed
    last: dict[str, int] = {}
    keys = []
    for name in listed:
        key, number = name, last.get(name, -1) + 1
        while number and (key := f"{name}#{number}") in taken:
            number += 1
        last[name] = number
        keys.append(key)
    return keys


def lay_out(pieces: Iterable[PieceSpec]) -> Layout:
    """The layout of a file that holds `pieces`. Pure: the same pieces give the same bytes.

    Raises ValueError for a key that stands twice, is reserved by the safetensors format or is no Unicode text, and for
    a header over the limit.
    """
    specs = list(pieces)
    keys = [spec.key for spec in specs]
    if len(set(keys)) != len(keys) or _METADATA in keys:
        raise ValueError(f"a header's keys are unique, and none is {_METADATA!r}")
    sizes = [-ITEMSIZE[spec.dtype] for spec in specs]
    order = [i for _, _, i in sorted(zip(sizes, keys, range(len(specs)), strict=True))]
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    entries: list[str] = []
    position = 0
    ends: list[int] = []
    for i in order:
        key, dtype, shape = specs[i]
        kind = kinds.get((dtype, shape))
        if kind is None:
            kind = kinds[dtype, shape] = _entry(dtype, shape), specs[i].bytes
        end = position + kind[1]
        # Written by hand: json.dumps of 24,000 small objects takes longer than copying their tensors.
        entries.append(f"{_quote(key)}{kind[0]}[{position},{end}]}}")
        ends.append(end)
        position = end
    text = ("{" + ",".join(entries) + "}").encode("ascii")
    if jsontext.has_lone_surrogate(text):
        raise ValueError("a tensor's name holds a lone surrogate")
    padded = -(-(8 + len(text)) // names.ALIGN) * names.ALIGN - 8
    if padded > names.MAX_HEADER:
        raise ValueError(f"the header of {len(specs):,} tensors has {padded:,} bytes, over {names.MAX_HEADER:,}")
    header = struct.pack("<Q", padded) + text.ljust(padded, b" ")
    base = len(header)
    starts = [0, *ends][: len(ends)]
    spans = tuple((base + start, base + end) for start, end in zip(starts, ends, strict=True))
    return Layout(header, tuple(order), spans, base + position)


def _entry(dtype: str, sizes: tuple[int, ...]) -> str:
    name, shape = header_entry(dtype, sizes)
    return f':{{"dtype":"{name}","shape":[{",".join(map(str, shape))}],"data_offsets":'


class HeaderEntry(NamedTuple):
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
    """The entries of a complete header (length field included), checked: known dtypes, lengths that fit them, spans
    without holes or overlaps up to the file's last byte. Raises CorruptCheckpointError (kind "header")."""
    size = header_bytes(header[:8], file_bytes, path)
    if len(header) < size:
        raise _corrupt("its header is cut short", path)
    text = header[8:size]
    value = jsontext.load(text, what="safetensors header", kind="header", limit=names.MAX_HEADER, path=path)
    value.pop(_METADATA, None)
    if len(value) > names.MAX_TENSORS:
        raise _corrupt(f"it lists {len(value):,} tensors", path)
    result: dict[str, HeaderEntry] = {}
    for key, item in value.items():
        entry = _header_entry(item, size)
        if entry is None:
            raise _corrupt(f"the entry {key[:80]!r} is of no known dtype, or its offsets or sizes are impossible", path)
        result[key] = entry
    position = size
    for start, end in sorted([(entry.start, entry.end) for entry in result.values()]):
        if start != position:
            raise _corrupt("its tensors overlap or leave a hole", path)
        position = end
    if position != file_bytes:
        raise _corrupt(f"its tensors end at {position:,} and the file at {file_bytes:,}", path)
    return result


def _header_entry(item: Any, base: int) -> HeaderEntry | None:
    if type(item) is not dict:
        return None
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if type(dtype) is not str or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        return None
    itemsize = HEADER_ITEMSIZE.get(dtype)
    if itemsize is None or len(shape) > names.MAX_DIMS + 1 or any(type(n) is not int or n < 0 for n in shape):
        return None
    start, end = offsets
    if type(start) is not int or type(end) is not int or start < 0 or end - start != math.prod(shape) * itemsize:
        return None
    return HeaderEntry(dtype, tuple(shape), base + start, base + end)


def _corrupt(why: str, path: str | None) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"The data file is damaged: {why}.", kind="header", path=path, stage="read")
