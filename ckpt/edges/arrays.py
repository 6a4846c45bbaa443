"""The elements of one saved tensor without torch: its bytes by pieces, each checked, and any dtype as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt.commit.stored import Stored
from ckpt.commit.transfer import Landing, receive
from ckpt.edges.progress import Told
from ckpt.format.dtypes import ITEMSIZE
from ckpt.geometry import Box
from ckpt.plan.planner import needs

if TYPE_CHECKING:
    import numpy

CHUNK = 1 << 20  # elements turned into numbers at a time: a tensor of float32 must not need three times its memory

_NATIVE = {
    "bool": "?", "uint8": "u1", "int8": "i1", "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4",
    "int64": "<i8", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip
# bits of exponent and mantissa, bias, and which codes are no numbers
_SMALL = {
    "float8_e4m3fn": (4, 3, 7, "all ones is NaN"),
    "float8_e5m2": (5, 2, 15, "as in IEEE 754"),
    "float8_e4m3fnuz": (4, 3, 8, "minus zero is NaN"),
    "float8_e5m2fnuz": (5, 2, 16, "minus zero is NaN"),
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})
COMPLEX = frozenset({"complex32", "complex64", "complex128"})
FLOATS = frozenset(ITEMSIZE) - INTEGERS - COMPLEX


def read_bytes(stored: Stored, number: int, told: Told | None = None) -> numpy.ndarray[Any, Any]:
    """The bytes of tensor `number` of the manifest's table, row-major, as uint8 of one dimension, each piece checked.

    Raises CorruptCheckpointError naming the tensor, MemoryError.
    """
    import numpy

    table = stored.manifest.tensors
    name, shape, itemsize = table.names[number], table.shapes[number], ITEMSIZE[table.dtypes[number]]
    whole = numpy.empty((*shape, itemsize), numpy.uint8)
    flat = whole.reshape(-1)
    for need in needs([(number, Box.whole(shape))], stored.sources):
        piece = need.source.piece
        into = flat if need.exact else numpy.empty(piece.bytes, numpy.uint8)
        path = stored.path(need.source.file)
        if piece.bytes:
            landing = Landing(name, piece.start, memoryview(into), piece.xxh3_128)  # type: ignore[arg-type]
            receive(stored.storage, path, [landing], told)
        if not need.exact and piece.bytes:
            where = tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True))
            whole[where] = into.reshape(*piece.box.sizes, itemsize)
    return flat


def chunks(flat: numpy.ndarray[Any, Any], dtype: str) -> Iterator[numpy.ndarray[Any, Any]]:
    """The elements, in order, as integers of their own kind, float64 or complex128, CHUNK bytes or more at a time."""
    step = CHUNK * ITEMSIZE[dtype]
    for start in range(0, len(flat), step):
        yield elements(flat[start : start + step], dtype)


def elements(flat: numpy.ndarray[Any, Any], dtype: str) -> numpy.ndarray[Any, Any]:
    """Whole elements from their bytes. A float4_e2m1fn_x2 element is two numbers."""
    import numpy

    native = _NATIVE.get(dtype)
    if native is not None:
        found = numpy.frombuffer(flat, native)
        return found if dtype in INTEGERS else found.astype(numpy.complex128 if dtype in COMPLEX else numpy.float64)
    if dtype == "bfloat16":
        return (numpy.frombuffer(flat, "<u2").astype("<u4") << 16).view("<f4").astype(numpy.float64)
    if dtype == "complex32":
        return numpy.frombuffer(flat, "<f2").astype(numpy.float32).view(numpy.complex64).astype(numpy.complex128)
    if dtype == "float4_e2m1fn_x2":
        codes = numpy.stack([flat & 15, flat >> 4], axis=-1).reshape(-1)
        return numpy.array([*_FLOAT4, *(-value for value in _FLOAT4)])[codes]
    return numpy.array([small_float(code, dtype) for code in range(256)])[flat]


def small_float(code: int, dtype: str) -> float:
    """The number that one byte of an 8-bit float is."""
    if dtype == "float8_e8m0fnu":
        return float("nan") if code == 255 else 2.0 ** (code - 127)
    exponent_bits, mantissa_bits, bias, special = _SMALL[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    top = exponent == (1 << exponent_bits) - 1
    if special == "minus zero is NaN" and code == 0x80:
        return float("nan")
    if special == "all ones is NaN" and code & 0x7F == 0x7F:
        return float("nan")
    if special == "as in IEEE 754" and top:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
