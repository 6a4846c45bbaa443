"""A save as the texts of its index and its manifest, and the limits of the format, held before anything is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.capture.staging import Signature, Staged
from ckpt.commit.transfer import Digests
from ckpt.errors import UnsupportedStateError
from ckpt.format import jsontext, names
from ckpt.format.digest import digest
from ckpt.format.index import DataFile, Piece, RankIndex
from ckpt.format.manifest import FileEntry, Manifest, Parent, PlacementGroup, TensorTable
from ckpt.format.values import Json, encode_float
from ckpt.plan.planner import assign

_PIECE = 100  # bytes, at most, that a piece takes in an index besides its dim order: numbers, a digest, commas
_ROW = 40  # and a tensor in a manifest besides its name and shape: its dtype and its group
_REST = 1 << 16  # and what has a fixed size in either
_ESCAPED = 12  # bytes, at most, that one character of a text takes


@dataclass
class Job:
    """One save, complete in memory: nothing in it is shared with live objects. values: the JSON text of all values;
    environment: of the thread that called `save`."""

    step: int
    metrics: Mapping[str, float]
    staged: Staged
    dim_orders: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    parts: Mapping[str, Mapping[str, Json]]
    values: bytes
    environment: Mapping[str, Json]
    capture_s: float
    stall_s: float = 0.0
    save: str = field(default_factory=lambda: os.urandom(16).hex())


@dataclass(frozen=True)
class Place:
    """Where on the line of a run a save stands, who makes it, and what that one keeps."""

    run: str
    incarnation: int
    parent: Parent | None
    writer: str
    policy: Mapping[str, Json] = field(default_factory=dict)


def check_tensors(signature: Signature) -> None:
    """Raises UnsupportedStateError, naming it, for a tensor, or a number of them, beyond the format's limits."""
    if len(signature) > names.MAX_TENSORS:
        raise _too_large("it", f"holds {len(signature):,} tensors", names.MAX_TENSORS)
    _check_names(name for name, _, _ in signature)
    for name, _, shape in signature:
        if len(shape) > names.MAX_DIMS:
            raise _too_large(name[:200], f"has {len(shape)} dimensions", names.MAX_DIMS)


def check_texts(job: Job) -> None:
    """Raises UnsupportedStateError when the index or the manifest of `job` could be too large for a reader. To be
    called once `check_tensors` has passed its tensors."""
    count = len(job.staged.signature)
    if len(job.aliases) > names.MAX_TENSORS:
        raise _too_large("it", f"holds {len(job.aliases):,} tensors that share another's bytes", names.MAX_TENSORS)
    _check_names(job.aliases)
    orders = sum(map(len, job.dim_orders.values()))
    blocks = job.staged.layout.bytes // names.BLOCK + 1
    size = len(job.values) + count * _PIECE + orders * 4 + blocks * 36 + _REST
    nodes = _nodes(job.values) + count * 9 + orders + blocks
    _check_size("its values and pieces", size, nodes, names.MAX_INDEX)
    shared = sum(map(len, job.aliases)) + sum(map(len, job.aliases.values()))
    metrics = {key: encode_float(value) for key, value in job.metrics.items()}
    told = jsontext.dump([job.parts, metrics, job.environment])
    # The header of the data file spells each name and shape once, as the manifest does.
    table = job.staged.layout.data_start + count * _ROW + shared * _ESCAPED + len(job.aliases) * 8
    nodes = _nodes(told) + sum(len(shape) for _, _, shape in job.staged.signature) + count * 5 + len(job.aliases) * 2
    _check_size("its tensors' names and shapes", len(told) + table + _REST, nodes, names.MAX_MANIFEST)


def _check_names(listed: Iterable[str]) -> None:
    for name in listed:
        if len(name) * 4 > names.MAX_NAME and len(name.encode()) > names.MAX_NAME:
            raise _too_large(f"{name[:200]}...", f"is a name of {len(name.encode()):,} bytes", names.MAX_NAME)


def _nodes(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_size(what: str, size: int, nodes: int, limit: int) -> None:
    if size > limit:
        raise _too_large(what, f"take about {size:,} bytes of text", limit)
    if nodes > jsontext.MAX_NODES:
        raise _too_large(what, f"hold about {nodes:,} single values", jsontext.MAX_NODES)


def _too_large(what: str, how: str, limit: int) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"The state is too large for a checkpoint: {what} {how}, and the limit is {limit:,}.",
        name=what,
        stage="capture",
        hint="Keep large data in tensors or arrays, which are stored apart; nothing was written.",
    )


def table_of(job: Job) -> TensorTable:
    listed, dtypes, shapes = zip(*job.staged.signature, strict=True) if job.staged.signature else ((), (), ())
    return TensorTable(listed, dtypes, shapes, (0,) * len(listed), job.aliases)


def index_of(job: Job, data_name: str, digests: Digests, table: TensorTable) -> bytes:
    """The bytes of the index of the only rank, whose only data file is stored as `data_name`."""
    layout = job.staged.layout
    number = {name: i for i, name in enumerate(table.names)}
    boxes = [assigned.box for assigned in assign(table.shapes, 1)]
    pieces = tuple(
        Piece(number[name], 0, start, end - start, boxes[number[name]], job.dim_orders.get(name), piece_digest)
        for name, (start, end), piece_digest in zip(job.staged.names, layout.spans, digests.pieces, strict=True)
    )
    file = DataFile(data_name, layout.bytes, layout.data_start, digests.header, names.BLOCK, digests.blocks)
    return RankIndex(job.save, 0, {}, (file,), pieces).encode(table.shapes, job.values)


def manifest_of(
    job: Job, place: Place, table: TensorTable, index: tuple[str, bytes], data: tuple[str, str], write_s: float
) -> Manifest:
    """The commit record. index: stored name and bytes; data: stored name and digest of the data file."""
    files = (
        FileEntry(index[0], len(index[1]), digest(index[1])),
        FileEntry(data[0], job.staged.layout.bytes, data[1]),
    )
    return Manifest(
        run=place.run,
        save=job.save,
        incarnation=place.incarnation,
        parent=place.parent,
        step=job.step,
        time=time.time(),
        metrics=job.metrics,
        world={"size": 1, "writer": place.writer},
        parts=job.parts,
        tensors=table,
        groups=(PlacementGroup("whole", (0,)),),
        files=files,
        timings={"capture_s": job.capture_s, "stall_s": job.stall_s, "write_s": write_s},
        environment=job.environment,
        policy=place.policy,
    )
