"""What one checkpoint holds, from its manifest and indexes alone: no torch, no tensor bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpt.commit.stored import Stored
from ckpt.edges.leaves import facts
from ckpt.edges.opening import Found, rank_view, use
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.manifest import Manifest, Parent, TensorTable
from ckpt.format.values import Json, encode_float

if TYPE_CHECKING:
    from ckpt.edges.statistics import TensorStatistics


@dataclass(frozen=True)
class Tally:
    """How many tensors, elements and bytes; tensors that share memory count once."""

    tensors: int = 0
    params: int = 0
    bytes: int = 0

    def plus(self, params: int, size: int) -> Tally:
        return Tally(self.tensors + 1, self.params + params, self.bytes + size)


@dataclass(frozen=True)
class PartSummary:
    """One registered object. kind: "module", "optimizer", "scheduler", "scaler", "loader", "generator", "object" or
    "container"; dtypes: bytes by dtype; tied: names that share the bytes of another; state: what is worth knowing of
    its values (lr of each group, position in the data, ...)."""

    kind: str
    tensors: int
    params: int
    bytes: int
    dtypes: Mapping[str, int]
    tied: int
    state: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "dtypes": dict(self.dtypes), "state": dict(self.state)}


@dataclass(frozen=True)
class TensorRow:
    """A saved tensor; `alias_of` names the one whose bytes it shares."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    alias_of: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape)}


@dataclass(frozen=True)
class Inspection:
    """A look inside one checkpoint. time: unix seconds; bytes: of all files but the manifest; parts, dtypes: by name;
    rng: kinds of random streams it holds; world: `size` and bytes by rank; timings: seconds; debris, damaged: what else
    lies in the root when that was given. tensors and tensor: only where they were asked for."""

    step: int
    path: str
    run: str
    time: float
    bytes: int
    parts: Mapping[str, PartSummary]
    dtypes: Mapping[str, Tally]
    rng: tuple[str, ...]
    world: Mapping[str, Any]
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
    environment: Mapping[str, Any]
    incarnation: int
    parent: Parent | None
    pinned: bool
    note: str
    debris: tuple[str, ...] = ()
    damaged: tuple[tuple[int, str], ...] = ()
    tensors: tuple[TensorRow, ...] | None = None
    tensor: TensorStatistics | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `ckpt inspect --json` prints."""
        parent = self.parent
        found = {
            "schema": 1,
            **vars(self),
            "parts": {name: part.to_dict() for name, part in self.parts.items()},
            "dtypes": {name: vars(tally) for name, tally in self.dtypes.items()},
            "rng": list(self.rng),
            "world": dict(self.world),
            "metrics": {name: encode_float(value) for name, value in self.metrics.items()},
            "timings": {name: encode_float(value) for name, value in self.timings.items()},
            "environment": dict(self.environment),
            "parent": None if parent is None else {"step": parent.step, "incarnation": parent.incarnation},
            "debris": list(self.debris),
            "damaged": [{"step": step, "problem": problem} for step, problem in self.damaged],
        }
        for key, value in (("tensors", self.tensors), ("tensor", self.tensor)):
            if value is None:
                del found[key]
        if self.tensors is not None:
            found["tensors"] = [row.to_dict() for row in self.tensors]
        if self.tensor is not None:
            found["tensor"] = self.tensor.to_dict()
        return found


def inspect(path: Any, *, key: str | None = None, tensors: bool = False, step: int | None = None) -> Inspection:
    """What is inside the checkpoint at `path`: a step's folder, or a root, where the newest committed step of the line
    (or `step`) is meant.

    Reads the manifest and the indexes, no tensor bytes, and imports no torch. tensors: with the table of all tensors.
    key: with statistics and a histogram of one tensor, whose bytes alone are read; a full name ("model/fc.weight"), the
    end of one, or a pattern that fits just one.

    Raises NotCommittedError, CorruptCheckpointError, StorageUnavailableError; KeyError with near names when `key` fits
    no tensor or several.
    """
    return use(path, step, lambda found: _inspected(found, key, tensors))


def _inspected(found: Found, key: str | None, tensors: bool) -> Inspection:
    stored = found.stored()
    record = stored.manifest
    name = find_tensor(record.tensors, key) if key is not None else None
    statistics = None
    if name is not None:
        from ckpt.edges import statistics as room

        statistics = room.statistics(rank_view(stored), name)
    pin = found.pins.get(record.step)
    values = stored.indexes[0].values
    roster = found.roster
    return Inspection(
        step=record.step,
        path=found.path,
        run=record.run,
        time=record.time,
        bytes=record.bytes,
        parts=MappingProxyType(summarise(record, values)),
        dtypes=MappingProxyType(_dtypes(record.tensors)),
        rng=tuple(name for name, node in (values.get("rng") or {}).items() if node is not None),
        world=MappingProxyType({**record.world, "ranks": _ranks(stored)}),
        metrics=MappingProxyType(dict(record.metrics)),
        timings=MappingProxyType(dict(record.timings)),
        environment=MappingProxyType(dict(record.environment)),
        incarnation=record.incarnation,
        parent=record.parent,
        pinned=pin is not None,
        note=pin.note if pin is not None else "",
        debris=roster.debris if roster is not None else (),
        damaged=tuple((f.step, f.problem or "damaged") for f in roster.broken) if roster is not None else (),
        tensors=tuple(rows(record.tensors)) if tensors else None,
        tensor=statistics,
    )


def summarise(record: Manifest, values: Mapping[str, Json]) -> dict[str, PartSummary]:
    """The parts in the order of registration, those inside containers under their path."""
    table = record.tensors
    home = _Homes(record.parts)
    tallies = {name: Tally() for name in record.parts}
    dtypes: dict[str, dict[str, int]] = {name: {} for name in record.parts}
    for name, dtype, (numel, size) in zip(table.names, table.dtypes, _sizes(table), strict=True):
        part = home.of(name)
        tallies[part] = tallies.get(part, Tally()).plus(numel, size)
        inner = dtypes.setdefault(part, {})
        inner[dtype] = inner.get(dtype, 0) + size
    tied: dict[str, int] = {}
    for alias in table.aliases:
        tied[home.of(alias)] = tied.get(home.of(alias), 0) + 1
    return {
        name: PartSummary(
            kind=(kind := str(record.parts.get(name, {}).get("kind", ""))),
            **vars(tally),
            dtypes=MappingProxyType(dtypes[name]),
            tied=tied.get(name, 0),
            state=MappingProxyType(facts(kind, values.get(name))),
        )
        for name, tally in tallies.items()
    }


class _Homes:
    """The part a tensor belongs to, by its name: the longest registered path it begins with."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._inner = sorted((name for name in parts if "/" in name), key=len, reverse=True)

    def of(self, name: str) -> str:
        for part in self._inner:
            if name.startswith(f"{part}/"):
                return part
        return name.partition("/")[0]


def _sizes(table: TensorTable) -> list[tuple[int, int]]:
    """(elements, bytes) of each tensor; shapes repeat, so that each distinct one is multiplied out once."""
    known: dict[tuple[int, ...], int] = {}
    result = []
    for shape, dtype in zip(table.shapes, table.dtypes, strict=True):
        numel = known.get(shape)
        if numel is None:
            numel = 1
            for size in shape:
                numel *= size
            known[shape] = numel
        result.append((numel, numel * ITEMSIZE[dtype]))
    return result


def _dtypes(table: TensorTable) -> dict[str, Tally]:
    found: dict[str, Tally] = {}
    for dtype, (numel, size) in zip(table.dtypes, _sizes(table), strict=True):
        found[dtype] = found.get(dtype, Tally()).plus(numel, size)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def _ranks(stored: Stored) -> list[dict[str, int]]:
    return [
        {"rank": index.rank, "files": len(index.files), "bytes": sum(file.bytes for file in index.files)}
        for index in stored.indexes
    ]


def rows(table: TensorTable) -> list[TensorRow]:
    """Every tensor by name, aliases behind those whose bytes they share."""
    sizes = _sizes(table)
    number = {name: i for i, name in enumerate(table.names)}
    found = [TensorRow(name, table.dtypes[i], table.shapes[i], sizes[i][1]) for name, i in number.items()]
    for alias, target in table.aliases.items():
        i = number[target]
        found.append(TensorRow(alias, table.dtypes[i], table.shapes[i], sizes[i][1], target))
    return found


def find_tensor(table: TensorTable, key: str) -> str:
    """The one tensor that `key` means. Raises KeyError, with near names, when it fits none or several."""
    everything = [*table.names, *table.aliases]
    if key in set(everything):
        return key
    found = [name for name in everything if name.endswith(f"/{key}")]
    found = found or [name for name in everything if fnmatchcase(name, key)]
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise KeyError(f"{key!r} fits {len(found):,} tensors: {shown}. Name one of them.")
    raise KeyError(f"no tensor {key!r} in this checkpoint{near(key, everything)}")


def near(key: str, names: list[str]) -> str:
    """The end of a sentence that tells which names are like `key`."""
    close = get_close_matches(key, names[:20_000], n=3, cutoff=0.5)
    tail = key.rpartition("/")[2].strip("*?[]")
    close += [name for name in names if tail and tail in name and name not in close][: 3 - len(close)]
    return f"; near: {', '.join(close)}" if close else ""
