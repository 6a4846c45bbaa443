"""rank-NNNNN.json: one rank's values and the table of the pieces it wrote, in columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.format import jsontext, names
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.jsontext import Fields
from ckpt.format.manifest import Manifest
from ckpt.format.values import Json
from ckpt.geometry import Box


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file of this rank: digests of its header (length field included) and of its blocks of `block` bytes,
    counted from the file's first byte."""

    name: str
    bytes: int
    header_bytes: int
    header_xxh3_128: str
    block: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of tensor number `tensor` of the manifest's table, in row-major order at `start` in data file `file`.

    dim_order: the dimensions from the slowest to the fastest in the memory of the saved tensor; None for row-major.
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

    def encode(self, shapes: tuple[tuple[int, ...], ...]) -> bytes:
        """The bytes of the index. `shapes`: global shapes of the manifest's table; a whole tensor's box is null."""
        pieces = self.pieces
        boxes = [
            None if p.box == Box.whole(shapes[p.tensor]) else [list(p.box.offsets), list(p.box.sizes)] for p in pieces
        ]
        value = {
            "format": names.FORMAT_VERSION,
            "save": self.save,
            "rank": self.rank,
            "values": dict(self.values),
            "files": [
                {
                    "name": f.name,
                    "bytes": f.bytes,
                    "header_bytes": f.header_bytes,
                    "header_xxh3_128": f.header_xxh3_128,
                    "block": f.block,
                    "blocks": f.blocks,
                }
                for f in self.files
            ],
            "pieces": {
                "tensor": [p.tensor for p in pieces],
                "file": [p.file for p in pieces],
                "start": [p.start for p in pieces],
                "bytes": [p.bytes for p in pieces],
                "box": boxes,
                "dim_order": [p.dim_order for p in pieces],
                "xxh3_128": [p.xxh3_128 for p in pieces],
            },
        }
        return jsontext.dump(value) + b"\n"

    @staticmethod
    def parse(data: bytes, manifest: Manifest, path: str | None = None) -> RankIndex:
        """The index in `data`, checked against the manifest: save id, files, spans, boxes, sizes.

        Raises CorruptCheckpointError (kind "index").
        """
        value = jsontext.load(data, what="rank index", kind="index", limit=names.MAX_INDEX, path=path)
        top = Fields(value, what="rank index", kind="index", path=path)
        if top.get("format", int) != names.FORMAT_VERSION:
            raise top.error(f"'format' is {value['format']}")
        save = top.matching("save", names.is_id)
        if save != manifest.save:
            raise top.error(f"it belongs to save {save}, the manifest to {manifest.save}")
        rank = top.natural("rank")
        if rank >= manifest.world_size:
            raise top.error(f"'rank' is {rank} in a world of {manifest.world_size}")
        files = tuple(_data_file(top, item, manifest) for item in top.column("files"))
        pieces = _pieces(top.sub("pieces"), manifest, files)
        return RankIndex(save, rank, top.get("values", dict), files, pieces)


def _data_file(top: Fields, item: Any, manifest: Manifest) -> DataFile:
    sub = Fields(item, what="rank index (files)", kind="index", path=top.path)
    name = sub.get("name", str)
    entry = manifest.file(name)
    size = sub.natural("bytes")
    if entry is None or entry.bytes != size:
        raise sub.error(f"the file {name[:80]!r} is not the manifest's")
    header, block = sub.natural("header_bytes", size), sub.natural("block")
    if block < names.ALIGN:
        raise sub.error(f"'block' is {block}")
    blocks = sub.column("blocks", -(-size // block))
    if not all(names.is_id(item) for item in blocks):
        raise sub.error("a block's digest is none")
    return DataFile(name, size, header, sub.matching("header_xxh3_128", names.is_id), block, tuple(blocks))


def _pieces(sub: Fields, manifest: Manifest, files: tuple[DataFile, ...]) -> tuple[Piece, ...]:
    tensor = sub.column("tensor")
    columns = [sub.column(key, len(tensor)) for key in ("file", "start", "bytes", "box", "dim_order", "xxh3_128")]
    table = manifest.tensors
    result: list[Piece] = []
    for number, file, start, size, box, order, digest in zip(tensor, *columns, strict=True):
        if type(number) is not int or not 0 <= number < len(table.names):
            raise sub.error("a piece belongs to no tensor")
        name, shape = table.names[number], table.shapes[number]
        if type(file) is not int or not 0 <= file < len(files):
            raise sub.error(f"a piece of {name[:200]!r} lies in no file")
        whole = _box(sub, box, shape, name)
        if type(start) is not int or type(size) is not int or size != whole.numel * ITEMSIZE[table.dtypes[number]]:
            raise sub.error(f"a piece of {name[:200]!r} has the wrong length")
        if start < files[file].header_bytes or start + size > files[file].bytes:
            raise sub.error(f"a piece of {name[:200]!r} lies outside its file")
        if order is not None and (type(order) is not list or sorted(order) != list(range(len(shape)))):
            raise sub.error(f"the dim order of {name[:200]!r} is none")
        if not names.is_id(digest):
            raise sub.error(f"the digest of {name[:200]!r} is none")
        result.append(Piece(number, file, start, size, whole, None if order is None else tuple(order), digest))
    _no_overlap(sub, result, files)
    return tuple(result)


def _box(sub: Fields, box: Any, shape: tuple[int, ...], name: str) -> Box:
    if box is None:
        return Box.whole(shape)
    ok = type(box) is list and len(box) == 2 and all(type(side) is list for side in box)
    if not ok or not all(type(n) is int for side in box for n in side):
        raise sub.error(f"a box of {name[:200]!r} is none")
    result = Box(tuple(box[0]), tuple(box[1]))
    if not result.fits(shape) or math.prod(result.sizes) < 0:
        raise sub.error(f"a box of {name[:200]!r} lies outside the tensor")
    return result


def _no_overlap(sub: Fields, pieces: list[Piece], files: tuple[DataFile, ...]) -> None:
    ends = [file.header_bytes for file in files]
    for piece in sorted(pieces, key=lambda p: (p.file, p.start, p.bytes)):
        if piece.start != ends[piece.file]:
            raise sub.error("pieces overlap or leave a hole")
        ends[piece.file] = piece.start + piece.bytes
    if any(end != file.bytes for end, file in zip(ends, files, strict=True)):
        raise sub.error("the pieces end before their file does")
