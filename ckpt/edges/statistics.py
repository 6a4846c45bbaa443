"""What the elements of one tensor look like as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.commit.stored import Stored
from ckpt.edges.arrays import COMPLEX, INTEGERS, chunks, read_bytes
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.values import encode_float

if TYPE_CHECKING:
    import numpy

BINS = 20
FEW = 8  # elements that are shown one by one
Number = int | float


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` of the finite elements lie in [edges[i], edges[i + 1]), the last bin's upper edge included."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class TensorStatistics:
    """of: "elements", or "magnitudes" where they are complex. min, max, mean and std are those of the finite elements,
    None when there is none; std is that of a sample (n - 1), None for a single element. values: the elements
    themselves where they are few. aliases: other names of the same bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    numel: int
    of: str
    min: Number | None
    max: Number | None
    mean: float | None
    std: float | None
    nan: int
    inf: int
    zero: int
    histogram: Histogram
    values: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "shape": list(self.shape),
            "min": _number(self.min),
            "max": _number(self.max),
            "mean": _number(self.mean),
            "std": _number(self.std),
            "histogram": {
                "edges": [_number(edge) for edge in self.histogram.edges],
                "counts": list(self.histogram.counts),
            },
            "values": [_number(value) for value in self.values],
            "aliases": list(self.aliases),
        }


def _number(value: Any) -> Any:
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, complex):
        return {"$complex": [encode_float(value.real), encode_float(value.imag)]}
    return value


def statistics(stored: Stored, name: str) -> TensorStatistics:
    """Reads the tensor `name` and nothing else. Raises KeyError for an unknown name, CorruptCheckpointError."""
    number = stored.numbers[name]
    table = stored.manifest.tensors
    dtype, shape = table.dtypes[number], table.shapes[number]
    flat = read_bytes(stored, number)
    stored_as = table.names[number]
    names = [stored_as, *(alias for alias, target in table.aliases.items() if target == stored_as)]
    return TensorStatistics(
        key=name,
        dtype=dtype,
        shape=shape,
        bytes=len(flat),
        numel=len(flat) // ITEMSIZE[dtype],
        of="magnitudes" if dtype in COMPLEX else "elements",
        aliases=tuple(other for other in names if other != name),
        **_figures(flat, dtype),
    )


def _figures(flat: numpy.ndarray[Any, Any], dtype: str) -> dict[str, Any]:
    import numpy

    nan = inf = zero = count = 0
    low: Number | None = None
    high: Number | None = None
    total = 0.0
    with numpy.errstate(all="ignore"):
        for chunk in chunks(flat, dtype):
            nan += int(numpy.isnan(chunk).sum())
            inf += int(numpy.isinf(chunk).sum())
            zero += int((chunk == 0).sum())
            finite = _finite(chunk, dtype)
            if len(finite):
                count += len(finite)
                # .item() keeps integers exact, which float64 would not above 2**53.
                low, high = _least(low, finite.min().item()), _most(high, finite.max().item())
                total += float(finite.sum(dtype=numpy.float64))
        mean = total / count if count else None
        spread, counts, edges = 0.0, numpy.zeros(BINS, numpy.int64), ()
        if low is not None and high is not None and mean is not None:
            scale = max(abs(float(low)), abs(float(high))) or 1.0
            # Scaled to [-1, 1]: the squares and the range of the largest floats would overflow.
            first, last = float(low) / scale, float(high) / scale
            for chunk in chunks(flat, dtype):
                scaled = _finite(chunk, dtype).astype(numpy.float64) / scale
                spread += float(((scaled - mean / scale) ** 2).sum())
                if first < last:
                    counts += numpy.histogram(scaled, bins=BINS, range=(first, last))[0]
            edges = tuple(float(edge) * scale for edge in numpy.linspace(first, last, BINS + 1))
            if first == last:
                counts, edges = numpy.array([count]), (float(low), float(high))
            spread = math.sqrt(spread / (count - 1)) * scale if count > 1 else math.nan
        values = ()
        if 0 < len(flat) // ITEMSIZE[dtype] <= FEW:
            values = tuple(value.item() for chunk in chunks(flat, dtype) for value in chunk)
    return {
        "min": low if not isinstance(low, bool) else int(low),
        "max": high if not isinstance(high, bool) else int(high),
        "mean": mean,
        "std": spread if count > 1 else None,
        "nan": nan,
        "inf": inf,
        "zero": zero,
        "histogram": Histogram(edges, tuple(int(n) for n in counts) if edges else ()),
        "values": values,
    }


def _finite(chunk: numpy.ndarray[Any, Any], dtype: str) -> numpy.ndarray[Any, Any]:
    import numpy

    if dtype in INTEGERS:
        return chunk
    return numpy.abs(chunk[numpy.isfinite(chunk)]) if dtype in COMPLEX else chunk[numpy.isfinite(chunk)]


def _least(one: Number | None, other: Number) -> Number:
    return other if one is None else min(one, other)


def _most(one: Number | None, other: Number) -> Number:
    return other if one is None else max(one, other)
