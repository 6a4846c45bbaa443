"""Who writes which piece, and which pieces a reader needs. Pure: boxes in, boxes out; no storage, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.errors import CorruptCheckpointError
from ckpt.format.index import Piece, RankIndex
from ckpt.geometry import Box, covers


class Assigned(NamedTuple):
    """Rank `rank` writes `box` of tensor number `tensor`."""

    tensor: int
    rank: int
    box: Box


def assign(shapes: Sequence[tuple[int, ...]], world_size: int) -> tuple[Assigned, ...]:
    """Every element of every tensor to one rank, once."""
    if world_size != 1:
        raise ValueError("the tensors of several ranks are assigned by their placements, not by their shapes")
    whole = {shape: Box.whole(shape) for shape in set(shapes)}
    return tuple([Assigned(number, 0, whole[shape]) for number, shape in enumerate(shapes)])


class Source(NamedTuple):
    """A stored piece: `rank` whose index lists it, and where in the file it lies."""

    rank: int
    file: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Need:
    """`overlap` of the wanted box comes from `source`; `exact` when piece and wanted box are the same box."""

    want: int
    source: Source
    overlap: Box
    exact: bool


def sources(indexes: Sequence[RankIndex]) -> dict[int, list[Source]]:
    """All stored pieces by tensor number."""
    table: dict[int, list[Source]] = {}
    for index in indexes:
        rank, files = index.rank, [file.name for file in index.files]
        for piece in index.pieces:
            table.setdefault(piece.tensor, []).append(Source(rank, files[piece.file], piece))
    return table


def needs(wanted: Sequence[tuple[int, Box]], stored: Mapping[int, Sequence[Source]]) -> tuple[Need, ...]:
    """What to read so that every wanted (tensor number, box) is whole, in the order of the bytes in their files.

    Raises CorruptCheckpointError (kind "coverage") when the stored pieces leave an element of a wanted box out, or
    hold one twice: checked here, before anything is read or touched (I8).
    """
    result: list[Need] = []
    for want, (number, box) in enumerate(wanted):
        found: list[Need] = []
        for source in stored.get(number, ()):
            overlap = box if source.piece.box == box else source.piece.box.overlap(box)
            if overlap is not None:
                found.append(Need(want, source, overlap, source.piece.box == box))
        local = [
            Box(tuple(o - b for o, b in zip(need.overlap.offsets, box.offsets, strict=True)), need.overlap.sizes)
            for need in found
        ]
        if not covers(box.sizes, local):
            raise CorruptCheckpointError(
                f"The stored pieces of tensor number {number} do not cover it once.", kind="coverage", stage="plan"
            )
        result.extend(found)
    result.sort(key=lambda need: (need.source.file, need.source.piece.start))
    return tuple(result)
