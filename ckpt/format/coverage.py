"""Whether the pieces of all ranks are the checkpoint: every tensor covered once, as its placement group says."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.errors import CorruptCheckpointError
from ckpt.format.index import RankIndex
from ckpt.format.manifest import Manifest
from ckpt.geometry import Box, covers


def check_ranks(manifest: Manifest, indexes: Iterable[RankIndex], path: str | None = None) -> None:
    """One index for each rank of the world and no other. Raises CorruptCheckpointError (kind "index")."""
    ranks = sorted(index.rank for index in indexes)
    if ranks != list(range(manifest.world_size)):
        shown = ", ".join(map(str, ranks[:20])) or "none"
        why = f"it lists the indexes of the ranks {shown} in a world of {manifest.world_size}"
        raise CorruptCheckpointError(
            f"{path or 'The checkpoint'} is damaged: {why}.", kind="index", step=manifest.step, path=path, stage="read"
        )


def check(manifest: Manifest, indexes: Iterable[RankIndex]) -> None:
    """Checks the indexes of every rank of the manifest's world together.

    Raises CorruptCheckpointError: of kind "index" as `check_ranks`, of kind "coverage" with the tensor's name when a
    tensor has missing, overlapping or surplus pieces, or pieces on a rank that is not of its group.
    """
    indexes = list(indexes)
    check_ranks(manifest, indexes)
    table, groups = manifest.tensors, manifest.groups
    held: list[list[tuple[int, Box]]] = [[] for _ in table.names]
    for index in indexes:
        for piece in index.pieces:
            held[piece.tensor].append((index.rank, piece.box))
    for name, shape, number, pieces in zip(table.names, table.shapes, table.groups, held, strict=True):
        group = groups[number]
        if group.kind == "whole":
            ok = len(pieces) == 1 and pieces[0][0] == group.ranks[0] and pieces[0][1].sizes == shape
        elif group.kind == "per-rank":
            ok = sorted(rank for rank, _ in pieces) == sorted(group.ranks) and all(b.sizes == shape for _, b in pieces)
        else:
            boxes = [box for _, box in pieces]
            ok = all(rank in group.ranks for rank, _ in pieces) and bool(boxes) and covers(shape, boxes)
        if not ok:
            raise _corrupt(manifest, f"the pieces of {name[:200]!r} do not make it up once", name)


def _corrupt(manifest: Manifest, why: str, tensor: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"The checkpoint is damaged: {why}.", kind="coverage", tensor=tensor, step=manifest.step, stage="read"
    )
