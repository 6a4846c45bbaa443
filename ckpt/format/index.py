"""rank-NNNNN.json: one rank's values and the table of the pieces it wrote, in columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.format import jsontext, names
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.jsontext import Fields
from ckpt.format.manifest import Manifest
from ckpt.format.values import Json
from ckpt.geometry import Box

_HEX = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file of this rank: digests of its header (length field included) and of its blocks of `block` bytes,
    counted from the file's first byte.

    shared: an earlier save wrote it; bytes of it that no piece names are not of this checkpoint.
    """

    name: str
    bytes: int
    header_bytes: int
    header_xxh3_128: str
    block: int
    blocks: tuple[str, ...]
    shared: bool = False


class Piece(NamedTuple):
    """A box of tensor number `tensor` of the manifest's table, in row-major order at `start` in data file `file`.

    dim_order: the dimensions from the slowest to the fastest in the memory of the saved tensor; None for row-major.
    A tuple, because an index may hold a million of them and is built and parsed while training waits.
    """

    tensor: int
    file: int
    start: int
    bytes: int
    box: Box
    dim_order: tuple[int, ...] | None
    xxh3_128: str


@dataclass(frozen=True)
class RankIndex:
    save: str
    rank: int
    values: Mapping[str, Json]
    files: tuple[DataFile, ...]
    pieces: tuple[Piece, ...]

    def encode(self, shapes: Sequence[tuple[int, ...]], values: bytes | None = None) -> bytes:
        """The bytes of the index. `shapes`: global shapes of the manifest's table; a whole tensor's box is null.
        values: the JSON text of `values`, from whoever has it already."""
        columns = list(zip(*self.pieces, strict=True)) or [()] * len(Piece._fields)
        tensor, file, start, size, box, dim_order, digests = columns
        head = {"format": names.FORMAT_VERSION, "save": self.save, "rank": self.rank}
        tail = {
            "files": [_file(f) for f in self.files],
            "pieces": {
                "tensor": tensor,
                "file": file,
                "start": start,
                "bytes": size,
                "box": [
                    None if b.sizes == shapes[i] and not any(b.offsets) else [b.offsets, b.sizes]
                    for i, b in zip(tensor, box, strict=True)
                ],
                "dim_order": dim_order,
                "xxh3_128": digests,
            },
        }
        text = jsontext.dump(dict(self.values)) if values is None else values
        return b"".join((jsontext.dump(head)[:-1], b',"values":', text, b",", jsontext.dump(tail)[1:], b"\n"))

    @staticmethod
    def parse(data: bytes, manifest: Manifest, path: str | None = None) -> RankIndex:
        """The index in `data`, checked against the manifest: save id, files, spans, boxes, sizes.

        The caller has compared the length and digest of `data` with the manifest's. That the pieces of all ranks
        together cover every tensor is `ckpt.format.coverage.check`. Raises CorruptCheckpointError (kind "index").
        """
        value = jsontext.load(data, what="rank index", kind="index", limit=names.MAX_INDEX, path=path)
        top = Fields(value, what="rank index", kind="index", path=path)
        version = top.natural("format")
        if version != names.FORMAT_VERSION:
            raise top.error(f"'format' is {version}")
        save = top.matching("save", names.is_id)
        if save != manifest.save:
            raise top.error(f"it belongs to save {save}, the manifest to {manifest.save}")
        rank = top.natural("rank")
        if rank >= manifest.world_size:
            raise top.error(f"'rank' is {rank} in a world of {manifest.world_size}")
        files = tuple(_data_file(top, item, manifest) for item in top.column("files"))
        if len({file.name for file in files}) != len(files):
            raise top.error("it lists one data file twice")
        pieces = _pieces(top.sub("pieces"), manifest, files)
        return RankIndex(save, rank, top.get("values", dict), files, pieces)


def _file(file: DataFile) -> dict[str, Json]:
    value: dict[str, Json] = {
        "name": file.name,
        "bytes": file.bytes,
        "header_bytes": file.header_bytes,
        "header_xxh3_128": file.header_xxh3_128,
        "block": file.block,
        "blocks": file.blocks,
    }
    if file.shared:
        value["shared"] = True
    return value


def _data_file(top: Fields, item: Any, manifest: Manifest) -> DataFile:
    sub = Fields(item, what="rank index (files)", kind="index", path=top.path)
    name = sub.get("name", str)
    entry = manifest.file(name)
    size = sub.natural("bytes")
    if entry is None or entry.bytes != size:
        raise sub.error(f"the file {name[:80]!r} is not the manifest's")
    header, block = sub.natural("header_bytes", min(size, names.MAX_HEADER + 8)), sub.natural("block", names.MAX_BLOCK)
    if block < names.ALIGN or block % names.ALIGN:
        raise sub.error(f"'block' is {block}")
    blocks = sub.column("blocks", -(-size // block))
    if not _all_digests(blocks):
        raise sub.error("a block's digest is none")
    shared = sub.get("shared", bool) if "shared" in sub.value else False
    return DataFile(name, size, header, sub.matching("header_xxh3_128", names.is_id), block, tuple(blocks), shared)


def _all_digests(column: list[Any]) -> bool:
    # One pass over the joined text: a regular expression for each of a million digests would take a second.
    if not set(map(type, column)) <= {str} or not set(map(len, column)) <= {32}:
        return False
    return not "".join(column).strip(_HEX)


def _pieces(sub: Fields, manifest: Manifest, files: tuple[DataFile, ...]) -> tuple[Piece, ...]:
    tensor = sub.column("tensor")
    columns = [sub.column(key, len(tensor)) for key in ("file", "start", "bytes", "box", "dim_order", "xxh3_128")]
    file, start, size, boxes, orders, digests = columns
    for key, column in (("tensor", tensor), ("file", file), ("start", start), ("bytes", size)):
        if not set(map(type, column)) <= {int} or (column and min(column) < 0):
            raise sub.error(f"{key!r} holds something other than natural numbers")
    table = manifest.tensors
    if tensor and max(tensor) >= len(table.names):
        raise sub.error("a piece belongs to no tensor")
    if file and max(file) >= len(files):
        raise sub.error("a piece lies in no file")
    if not _all_digests(digests):
        raise sub.error("the digest of a piece is none")
    shapes, dtypes = table.shapes, table.dtypes
    whole: dict[tuple[int, ...], tuple[Box, int]] = {}
    parsed: list[Box] = []
    for number, length, box in zip(tensor, size, boxes, strict=True):
        shape = shapes[number]
        if box is None:
            known = whole.get(shape)
            if known is None:
                known = whole[shape] = Box.whole(shape), math.prod(shape)
            item, numel = known
        else:
            item = _box(sub, box, shape, table.names[number])
            numel = item.numel
        if length != numel * ITEMSIZE[dtypes[number]]:
            raise sub.error(f"a piece of {table.names[number][:200]!r} has the wrong length")
        parsed.append(item)
    checked = [None if o is None else _dim_order(sub, o, table, i) for i, o in zip(tensor, orders, strict=True)]
    _no_overlap(sub, list(zip(file, start, size, strict=True)), files)
    return tuple([_piece(row) for row in zip(tensor, file, start, size, parsed, checked, digests, strict=True)])


def _piece(row: Iterable[Any]) -> Piece:
    return tuple.__new__(Piece, row)  # without the call of Piece.__new__, which costs more than all checks


def _dim_order(sub: Fields, order: Any, table: Any, number: int) -> tuple[int, ...]:
    ok = type(order) is list and set(map(type, order)) <= {int}
    if not ok or sorted(order) != list(range(len(table.shapes[number]))):
        raise sub.error(f"the dim order of {table.names[number][:200]!r} is none")
    return tuple(order)


def _box(sub: Fields, box: Any, shape: tuple[int, ...], name: str) -> Box:
    ok = type(box) is list and len(box) == 2 and all(type(side) is list for side in box)
    if not ok or not all(type(n) is int for side in box for n in side):
        raise sub.error(f"a box of {name[:200]!r} is none")
    result = Box(tuple(box[0]), tuple(box[1]))
    if not result.fits(shape):
        raise sub.error(f"a box of {name[:200]!r} lies outside the tensor")
    return result


def _no_overlap(sub: Fields, spans: list[tuple[int, int, int]], files: tuple[DataFile, ...]) -> None:
    ends = [file.header_bytes for file in files]
    spans.sort()
    for file, start, size in spans:
        end = ends[file]
        if start != end and (start < end or not files[file].shared):
            raise sub.error(f"pieces in {files[file].name!r} overlap, leave a hole or begin in its header")
        ends[file] = start + size
    for file, end in zip(files, ends, strict=True):
        if end > file.bytes:
            raise sub.error(f"a piece lies beyond the end of {file.name!r}")
        if end != file.bytes and not file.shared:
            raise sub.error(f"the pieces of {file.name!r} end before it does")
