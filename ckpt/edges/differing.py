"""Two checkpoints compared bit by bit, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt.commit.stored import Stored
from ckpt.edges.arrays import CHUNK, INTEGERS, elements, read_bytes
from ckpt.edges.leaves import leaves
from ckpt.edges.opening import Found, rank_view, use
from ckpt.edges.progress import Progress, counted
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.values import encode_float


@dataclass(frozen=True)
class Change:
    """A key that both hold, differently. kind: "dtype", "shape", "layout" (the same elements in another dim order),
    "value" (numbers, or a stored value), or "bits" (equal as numbers, other bits: -0.0, payloads of NaN). max_abs: the
    largest difference of two finite elements, where they are numbers of one dtype and shape; None elsewhere."""

    key: str
    kind: str
    max_abs: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "max_abs": None if self.max_abs is None else encode_float(self.max_abs)}


@dataclass(frozen=True)
class DiffReport:
    """added: keys only B holds; removed: keys only A holds; compared: keys that both hold."""

    a: str
    b: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    compared: int

    @property
    def equal(self) -> bool:
        return not (self.added or self.removed or self.changed)

    def to_dict(self) -> dict[str, Any]:
        """What `ckpt diff --json` prints."""
        return {
            "schema": 1,
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": [change.to_dict() for change in self.changed],
            "compared": self.compared,
        }


def diff(a: Any, b: Any, *, progress: Progress | None = None) -> DiffReport:
    """Compares the states of two checkpoints (each a step's folder, or a root's newest): tensors, values, RNG.

    Bits decide: NaN equals NaN of the same bits. Step, time, run and metrics are not compared. Tensors of equal digests
    are not read. Raises NotCommittedError, CorruptCheckpointError, StorageUnavailableError.
    """
    return use(a, None, lambda first: use(b, None, lambda second: _diff(first, second, progress)))


def _diff(first: Found, second: Found, progress: Progress | None) -> DiffReport:
    one, other = first.stored(), second.stored()
    a, b = _Values(one), _Values(other)
    names_a, names_b = {*one.numbers, *a.leaves}, {*other.numbers, *b.leaves}
    changed = _tensors(one, other, progress)
    # What became another kind of thing under a tensor's name is told once, and so is what only one side holds.
    told = {change.key for change in changed} | (names_a ^ names_b)
    changed += [
        Change(key, "value") for key, kind in a.kinds.items() if b.kinds.get(key, kind) != kind and key not in told
    ]
    return DiffReport(
        a=first.path,
        b=second.path,
        added=tuple(sorted(names_b - names_a)),
        removed=tuple(sorted(names_a - names_b)),
        changed=tuple(changed),
        compared=len(names_a & names_b),
    )


class _Values:
    """What a checkpoint holds besides the bytes of tensors: see `leaves`. With several ranks paths end in "@rank"."""

    def __init__(self, stored: Stored) -> None:
        self.leaves: set[str] = set()
        # As text: 1, 1.0 and True are equal in Python and different states.
        self.kinds: dict[str, str] = {}
        for index in stored.indexes:
            end = f"@{index.rank}" if len(stored.indexes) > 1 else ""
            kinds: dict[str, str] = {}
            self.leaves |= {key + end for key in leaves(index.values, stored.manifest.parts, kinds)}
            self.kinds |= {key + end: kind for key, kind in kinds.items()}


def _tensors(one: Stored, other: Stored, progress: Progress | None) -> list[Change]:
    changed: list[Change] = []
    to_read: list[tuple[str, int, int]] = []
    a, b = one.manifest.tensors, other.manifest.tensors
    for name, i in one.numbers.items():
        j = other.numbers.get(name)
        if j is None:
            continue
        if a.dtypes[i] != b.dtypes[j]:
            changed.append(Change(name, "dtype"))
        elif a.shapes[i] != b.shapes[j]:
            changed.append(Change(name, "shape"))
        elif _digests(one, i) == _digests(other, j):
            if _order(one, i) != _order(other, j):
                changed.append(Change(name, "layout"))
        else:
            to_read.append((name, i, j))
    total = sum(_bytes(one, i) + _bytes(other, j) for _, i, j in to_read)
    told = counted(progress, total)
    read: dict[tuple[int, int], Change | None] = {}
    for name, i, j in to_read:
        if (i, j) not in read:
            read[i, j] = _compare(name, one, i, other, j, told)
        found = read[i, j]
        if found is not None:
            changed.append(Change(name, found.kind, found.max_abs))
        elif _order(one, i) != _order(other, j):
            changed.append(Change(name, "layout"))
    return changed


def _digests(stored: Stored, number: int) -> list[tuple[Any, str]]:
    """What tells a tensor's bytes apart where both are cut into the same boxes."""
    return sorted(
        ((source.piece.box.offsets, source.piece.box.sizes), source.piece.xxh3_128)
        for source in stored.sources.get(number, ())
    )


def _order(stored: Stored, number: int) -> tuple[int, ...] | None:
    return next((source.piece.dim_order for source in stored.sources.get(number, ())), None)


def _bytes(stored: Stored, number: int) -> int:
    return sum(source.piece.bytes for source in stored.sources.get(number, ()))


def _compare(
    name: str, one: Stored, i: int, other: Stored, j: int, told: Callable[[int], None] | None
) -> Change | None:
    import numpy

    dtype = one.manifest.tensors.dtypes[i]
    first, second = read_bytes(rank_view(one), i, told), read_bytes(rank_view(other), j, told)
    if numpy.array_equal(first, second):
        return None
    largest: float | None = None
    equal = True
    step = CHUNK * ITEMSIZE[dtype]
    with numpy.errstate(all="ignore"):
        for start in range(0, len(first), step):
            x = elements(first[start : start + step], dtype)
            y = elements(second[start : start + step], dtype)
            equal = equal and bool(((x == y) | (numpy.isnan(x) & numpy.isnan(y))).all())
            both = numpy.isfinite(x) & numpy.isfinite(y)
            if dtype in INTEGERS:
                # Python's integers: those of 64 bits differ by more than they can hold themselves.
                x, y = x.astype(object), y.astype(object)
                gaps = [abs(int(p) - int(q)) for p, q in zip(x[x != y], y[x != y], strict=True)]
                gap = float(max(gaps, default=0))
            else:
                apart = numpy.abs(x[both] - y[both])
                gap = float(apart.max()) if len(apart) else None
            if gap is not None:
                largest = gap if largest is None else max(largest, gap)
    return Change(name, "bits" if equal else "value", largest)
