"""A small sound checkpoint of two ranks as values and bytes, and the ways in which tests spoil it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.format import jsontext, names
from ckpt.format.datafile import PieceSpec, lay_out
from ckpt.format.index import DataFile, Piece, RankIndex
from ckpt.format.manifest import FileEntry, Manifest, Parent, PlacementGroup, TensorTable, seal
from ckpt.geometry import Box

RUN, SAVE, OTHER, D = "0" * 31 + "1", "0" * 31 + "2", "0" * 31 + "3", "d" * 32
LAYOUT = lay_out([PieceSpec("model/w", "float32", (4, 2)), PieceSpec("model/b", "bfloat16", (3,))])
MANIFEST = Manifest(
    run=RUN,
    save=SAVE,
    incarnation=2,
    parent=Parent(400, 1, OTHER),
    step=500,
    time=1700000000.25,
    metrics={"loss": 0.5, "worst": float("inf")},
    world={"size": 2},
    parts={"model": {"kind": "module"}},
    tensors=TensorTable(
        ("model/w", "model/b"), ("float32", "bfloat16"), ((4, 2), (3,)), (0, 1), {"model/t": "model/w"}
    ),
    groups=(PlacementGroup("whole", (0,)), PlacementGroup("per-rank", (0, 1))),
    files=(
        FileEntry("rank-00000.json", 10, D),
        FileEntry("rank-00000.safetensors", LAYOUT.bytes, D),
        FileEntry("rank-00000-1.safetensors", 5000, D, ("step-00000400", "rank-00000.safetensors")),
    ),
    timings={"capture_s": 0.25},
    environment={"torch": "2.13.0"},
)
SPAN_W, SPAN_B = LAYOUT.spans
INDEX = RankIndex(
    SAVE,
    0,
    {"epoch": 3},
    (DataFile("rank-00000.safetensors", LAYOUT.bytes, LAYOUT.data_start, D, names.BLOCK, (D,)),),
    (
        Piece(0, 0, SPAN_W[0], 16, Box((0, 0), (2, 2)), (1, 0), D),
        Piece(0, 0, SPAN_W[0] + 16, 16, Box((2, 0), (2, 2)), None, D),
        Piece(1, 0, SPAN_B[0], 6, Box((0,), (3,)), None, D),
    ),
)
INDEX_BYTES = INDEX.encode(MANIFEST.tensors.shapes)
HEADER = LAYOUT.header


def kind_of(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CorruptCheckpointError) as caught:
        call(*args, **kwargs)
    assert len(str(caught.value)) < 700
    return caught.value.kind


def sealed(value: dict[str, Any]) -> bytes:
    return seal(jsontext.dump({key: item for key, item in value.items() if key != "xxh3_128"})[:-1])


def tree(data: bytes) -> dict[str, Any]:
    return json.loads(data)


def only_ours(kinds: set[str], call: Callable[..., object], *args: Any) -> CheckpointError | None:
    try:
        call(*args)
    except CorruptCheckpointError as error:
        assert error.kind in kinds
        return error
    return None
