"""What a checkpoint says, laid out so that two of them can be compared: tensors by digest, everything else by value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckpt.commit.line import manifest
from ckpt.commit.roster import StepFolder
from ckpt.commit.stored import open_stored
from ckpt.format import names
from ckpt.format.index import RankIndex
from ckpt.format.manifest import Manifest
from ckpt.storage.base import ReadRange
from ckpt.storage.local import LocalStorage

Key = tuple[str, str]  # (kind, name) of a fact
TENSOR, RNG, DATA, VALUE, METRIC = "tensor", "rng", "data position", "value", "metric"


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in two runs at `step`. kind: TENSOR, RNG, ..., "batch", "step", "artefact"."""

    step: int | None
    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        where = f" at step {self.step}" if self.step is not None else ""
        return f"{self.kind} {self.name} differs{where}: {self.text}"


@dataclass(frozen=True)
class Record:
    """The manifest and indexes of one committed step."""

    manifest: Manifest
    indexes: tuple[RankIndex, ...]

    @staticmethod
    def load(folder: Path) -> Record | None:
        """From a folder that keeps the JSON files of one save; None for one that is not whole (a kill cut it short)."""
        try:
            record = Manifest.parse((folder / names.MANIFEST).read_bytes())
            listed = [entry.name for entry in record.files if entry.name.endswith(".json")]
            return Record(record, tuple(RankIndex.parse((folder / name).read_bytes(), record) for name in listed))
        except FileNotFoundError:
            return None

    @cached_property
    def facts(self) -> dict[Key, Any]:
        """(kind, name) -> what two runs must agree on. Ids, times and machines are left out."""
        table = self.manifest.tensors
        kinds = {name: part.get("kind") for name, part in self.manifest.parts.items()}
        found: dict[Key, Any] = {}
        for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
            found[kind_of(name, kinds), name] = (dtype, shape, [])
        for index in self.indexes:
            for piece in index.pieces:
                name = table.names[piece.tensor]
                box = (index.rank, piece.box.offsets, piece.box.sizes, piece.dim_order, piece.xxh3_128)
                found[kind_of(name, kinds), name][2].append(box)
            for path, value in _flat(index.values):
                path = path if index.rank == 0 else f"{path} (rank {index.rank})"
                found[kind_of(path, kinds, VALUE), path] = value
        for path, value in _flat(self.manifest.parts):
            found[VALUE, f"{path} (kind)"] = value
        for alias, target in table.aliases.items():
            found[VALUE, f"{alias} (tie)"] = target
        for key, value in self.manifest.metrics.items():
            found[METRIC, key] = float(value).hex()
        return found


def kind_of(name: str, kinds: Mapping[str, Any], other: str = TENSOR) -> str:
    part = name.split("/", 1)[0]
    if part == "rng" or str(kinds.get(part)) in ("generator", "rng"):
        return RNG
    return DATA if kinds.get(part) == "loader" else other


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by path; tagged values ({"$float": ...}) and empty containers are leaves."""
    if isinstance(value, Mapping) and value and not any(str(key).startswith("$") for key in value):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value and any(isinstance(item, list | tuple | Mapping) for item in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{path}/{number}")
    else:
        yield path, value


def differences(one: Record, other: Record, ignored: frozenset[Key] = frozenset()) -> list[Difference]:
    """What the two disagree on, in the order tensors, RNG, data position, values. ignored: facts left out."""
    step = one.manifest.step
    found = []
    for key in dict.fromkeys((*one.facts, *other.facts)):
        kind, name = key
        if key in ignored:
            continue
        if key not in one.facts or key not in other.facts:
            where = "the first" if key in one.facts else "the second"
            found.append(Difference(step, kind, name, f"only {where} run has it"))
        elif not same(one.facts[key], other.facts[key]):
            found.append(Difference(step, kind, name, _say(kind, one.facts[key], other.facts[key])))
    order = (TENSOR, RNG, DATA, VALUE, METRIC)
    return sorted(found, key=lambda item: order.index(item.kind))


def same(one: Any, other: Any) -> bool:
    """Equality that tells 1 from 1.0 and True, 0.0 from -0.0, and finds NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return repr(one) == repr(other) if isinstance(one, float) else one == other


def _say(kind: str, one: Any, other: Any) -> str:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 3:
        if one[:2] != other[:2]:
            return f"{one[0]} {list(one[1])} and {other[0]} {list(other[1])}"
        return f"other bytes ({one[0]} {list(one[1])})"
    left, right = (text if len(text := repr(value)) <= 60 else text[:57] + "..." for value in (one, other))
    return "other bits" if kind == RNG and left == right else f"{left} and {right}"


def byte_differences(at: str, folder: StepFolder, other_at: str, other: StepFolder) -> tuple[list[Difference], int]:
    """Compares the tensors' stored bytes themselves, tensor by tensor; the differences and the bytes compared."""
    left, right = _tensor_bytes(at, folder), _tensor_bytes(other_at, other)
    step = manifest(folder).step
    found, count = [], 0
    for (name, dtype, one), (other_name, _, two) in zip(left, right, strict=False):
        count += len(one)
        if name != other_name or one != two:
            text = f"{name} and {other_name} are stored in one place" if name != other_name else _apart(one, two, dtype)
            found.append(Difference(step, TENSOR, name, text))
    return found, count


def _tensor_bytes(at: str, folder: StepFolder) -> Iterator[tuple[str, str, bytes]]:
    storage = LocalStorage(at)
    stored = open_stored(storage, folder)
    table = stored.manifest.tensors
    for index in stored.indexes:
        for piece in sorted(index.pieces, key=lambda piece: (piece.tensor, piece.box.offsets)):
            entry = stored.manifest.file(index.files[piece.file].name)
            assert entry is not None
            buffer = bytearray(piece.bytes)
            storage.read_ranges(entry.path(stored.folder), [ReadRange(piece.start, (memoryview(buffer),))])
            yield table.names[piece.tensor], table.dtypes[piece.tensor], bytes(buffer)


def _apart(one: bytes, two: bytes, dtype: str) -> str:
    if len(one) != len(two):
        return f"{len(one):,} and {len(two):,} bytes"
    import numpy

    count = int(numpy.count_nonzero(numpy.frombuffer(one, numpy.uint8) != numpy.frombuffer(two, numpy.uint8)))
    return f"{count:,} of {len(one):,} bytes are others ({dtype})"
