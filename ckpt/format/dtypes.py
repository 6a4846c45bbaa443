"""Element types of format v1: torch's names, their sizes, and how a safetensors header spells them.

A dtype that the safetensors format lacks, or that its older readers do not know, is written there as U8 with one more
dimension of `itemsize` bytes; the tensor table of the manifest holds the true name and shape.
"""

from __future__ import annotations

_SAFETENSORS: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "float64": 8, "int64": 8, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
HEADER_ITEMSIZE: dict[str, int] = {name: ITEMSIZE[dtype] for dtype, name in _SAFETENSORS.items()}


def header_entry(dtype: str, sizes: tuple[int, ...]) -> tuple[str, list[int]]:
    """The safetensors (dtype, shape) under which a piece of `sizes` elements is written."""
    name = _SAFETENSORS.get(dtype)
    if name is not None:
        return name, list(sizes)
    return "U8", [*sizes, ITEMSIZE[dtype]]
