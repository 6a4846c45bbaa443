"""Malformed tables of a manifest, an index and a header: wrong types anywhere, impossible pieces, offsets, sizes."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from malformed import (
    HEADER,
    INDEX,
    INDEX_BYTES,
    LAYOUT,
    MANIFEST,
    OTHER,
    SAVE,
    SPAN_B,
    SPAN_W,
    D,
    kind_of,
    only_ours,
    sealed,
    tree,
)

from ckpt.errors import UnsupportedFormatError
from ckpt.format import coverage, jsontext
from ckpt.format.datafile import header_bytes, parse_header
from ckpt.format.index import Piece, RankIndex
from ckpt.format.manifest import Manifest, PlacementGroup
from ckpt.geometry import Box

pytestmark = pytest.mark.quick

# --- every value of every type everywhere -----------------------------------------------------------------------------

WRONG: list[Any] = [
    None, True, False, 0, 1, -1, 3, 1 << 62, 1 << 70, 10**400, 0.5, 1e308, "", "x", "..", "a/b", "f" * 32, [], [[]],
    [None], [0], [[0, 0], [1, 1]], ["model/w"], {}, {"a": 1}, {"$float": "x"}, {"$float": []},
    {"$int": "0x" + "f" * 400}, {"$tuple": [1]}, {"kind": 1},
]  # fmt: skip


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(node, dict):
        for key in node:
            yield from places(node[key], (*path, key))
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from places(item, (*path, i))


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def removed(node: Any, path: tuple[Any, ...]) -> Any:
    copy = dict(node) if isinstance(node, dict) else list(node)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = removed(copy[path[0]], path[1:])
    return copy


# Where any JSON may stand, or more than one type.
FREE = {"environment", "values", "parts", "metrics", "timings", "parent", "time", "aliases"}


def test_a_manifest_with_any_value_of_a_wrong_type_is_refused() -> None:
    value = tree(MANIFEST.encode())
    del value["xxh3_128"]
    for path in places(value):
        if not path:
            continue
        for wrong in WRONG:
            changed = replaced(value, path, wrong)
            error = only_ours({"manifest", "file-name"}, parse_sealed, changed)
            only_ours({"manifest", "file-name"}, parse_sealed, changed, False)
            right = path[0] in FREE or path[-1] == "source" or same_type(value, path, wrong)
            assert error is not None or right, (path, wrong)
        error = only_ours({"manifest", "file-name"}, parse_sealed, removed(value, path))
        # Mappings of data may lack an entry, and lists an item where nothing else counts them.
        optional = path[-1] == "source" or (len(path) > 1 and bool(FREE & {path[0], path[-2]}))
        assert error is not None or optional or type(path[-1]) is int, path


def parse_sealed(value: dict[str, Any], tables: bool = True) -> Manifest | None:
    try:
        return Manifest.parse(sealed(value), tables=tables)
    except UnsupportedFormatError:
        return None


def same_type(value: Any, path: tuple[Any, ...], wrong: Any) -> bool:
    for key in path:
        value = value[key]
    return type(value) is type(wrong)


def test_an_index_with_any_value_of_a_wrong_type_is_refused() -> None:
    value = tree(INDEX_BYTES)
    for path in places(value):
        if not path:
            continue
        for wrong in WRONG:
            changed = replaced(value, path, wrong)
            error = only_ours({"index"}, RankIndex.parse, jsontext.dump(changed), MANIFEST)
            free = path[0] == "values" or path[1:2] in (("box",), ("dim_order",))
            assert error is not None or free or same_type(value, path, wrong), (path, wrong)
        error = only_ours({"index"}, RankIndex.parse, jsontext.dump(removed(value, path)), MANIFEST)
        assert error is not None or path[:2] == ("values", "epoch"), path


def test_a_header_with_any_value_of_a_wrong_type_is_refused() -> None:
    value = tree(HEADER[8:])
    for path in places(value):
        if not path:
            continue
        for wrong in WRONG:
            text = jsontext.dump(replaced(value, path, wrong))
            header = struct.pack("<Q", len(text)) + text
            shift = len(header) - LAYOUT.data_start
            error = only_ours({"header"}, parse_header, header, LAYOUT.bytes + shift)
            assert error is not None or same_type(value, path, wrong), (path, wrong)


# --- pieces -----------------------------------------------------------------------------------------------------------


def changed_index(**columns: list[Any]) -> bytes:
    value = tree(INDEX_BYTES)
    value["pieces"].update(columns)
    return jsontext.dump(value)


START = [SPAN_W[0], SPAN_W[0] + 16, SPAN_B[0]]
PIECES = {
    "past the end": {"start": [START[0], START[1], START[2] + 4]},
    "far past the end": {"start": [START[0], START[1], 1 << 61]},
    "in the header": {"start": [START[0] - 16, START[1], START[2]]},
    "overlapping": {"start": [START[0], START[0], START[2]]},
    "overlapping by a byte": {"start": [START[0], START[1] - 1, START[2]]},
    "with a hole": {"start": [START[0], START[1] + 16, START[2]]},
    "negative": {"start": [-1, START[1], START[2]]},
    "too long": {"bytes": [16, 16, 8]},
    "too short": {"bytes": [16, 12, 6]},
    "of no tensor": {"tensor": [0, 0, 2]},
    "of tensor -1": {"tensor": [0, 0, -1]},
    "in no file": {"file": [0, 0, 1]},
    "in file -1": {"file": [0, 0, -1]},
    "a box beyond the tensor": {"box": [[[0, 0], [2, 2]], [[3, 0], [2, 2]], None]},
    "a box of other dimensions": {"box": [[[0, 0], [2, 2]], [[2], [4]], None]},
    "a negative box": {"box": [[[0, 0], [2, 2]], [[2, 0], [-2, -2]], None]},
    "a box of negative offset": {"box": [[[-1, 0], [2, 2]], [[2, 0], [2, 2]], None]},
    "a dim order twice": {"dim_order": [[0, 0], None, None]},
    "a dim order of bools": {"dim_order": [[True, False], None, None]},
    "a dim order too long": {"dim_order": [[0, 1, 2], None, None]},
    "a digest too short": {"xxh3_128": [D, D, D[:-1]]},
    "digests of one joined length": {"xxh3_128": [D, D + "d", D[:-1]]},
    "a digest in capitals": {"xxh3_128": [D, D, D.upper()]},
    "a digest of spaces": {"xxh3_128": [D, D, " " * 32]},
    "columns of unequal length": {"start": START[:2]},
    "one row more": {"tensor": [0, 0, 1, 1]},
}


@pytest.mark.parametrize("columns", PIECES.values(), ids=PIECES)
def test_impossible_pieces_are_refused(columns: dict[str, list[Any]]) -> None:
    assert kind_of(RankIndex.parse, changed_index(**columns), MANIFEST) == "index"


def test_a_missing_piece_leaves_a_hole_in_its_file() -> None:
    value = tree(INDEX_BYTES)
    for gone in range(3):
        pieces = {key: column[:gone] + column[gone + 1 :] for key, column in value["pieces"].items()}
        data = jsontext.dump({**value, "pieces": pieces})
        assert kind_of(RankIndex.parse, data, MANIFEST) == "index"


FILES = {
    "another name": {"name": "rank-00001.safetensors"},
    "another length": {"bytes": LAYOUT.bytes + 1},
    "a header longer than the file": {"header_bytes": LAYOUT.bytes + 1},
    "a block of nothing": {"block": 0},
    "a block of a byte": {"block": 1},
    "a block of no memory": {"block": 1 << 40},
    "a block more": {"blocks": [D, D]},
    "no block": {"blocks": []},
    "a digest that is none": {"blocks": ["x" * 32]},
}


@pytest.mark.parametrize("change", FILES.values(), ids=FILES)
def test_a_data_file_that_differs_from_the_manifest_is_refused(change: dict[str, Any]) -> None:
    value = tree(INDEX_BYTES)
    value["files"][0].update(change)
    assert kind_of(RankIndex.parse, jsontext.dump(value), MANIFEST) == "index"


def test_an_index_of_another_save_rank_or_version_is_refused() -> None:
    """TORN-13: one id in each component; a set that does not belong together is refused."""
    for change in ({"save": OTHER}, {"rank": 2}, {"rank": -1}, {"format": 2}, {"format": 0}):
        data = jsontext.dump({**tree(INDEX_BYTES), **change})
        assert kind_of(RankIndex.parse, data, MANIFEST) == "index"
    twice = tree(INDEX_BYTES)
    twice["files"] = twice["files"] * 2
    assert kind_of(RankIndex.parse, jsontext.dump(twice), MANIFEST) == "index"


def test_all_ranks_together_must_hold_every_element_once() -> None:
    other = RankIndex(SAVE, 1, {}, (), (Piece(1, 0, 4096, 6, Box.whole((3,)), None, D),))
    halves = INDEX
    whole = RankIndex(SAVE, 0, {}, (), (Piece(0, 0, 4096, 32, Box.whole((4, 2)), None, D), INDEX.pieces[2]))
    coverage.check(MANIFEST, [whole, other])
    moved = RankIndex(SAVE, 0, {}, (), (Piece(0, 0, 0, 16, Box((1, 0), (2, 2)), None, D), *INDEX.pieces[1:]))
    sharded = dataclasses.replace(MANIFEST, groups=(PlacementGroup("shards", (0,)), MANIFEST.groups[1]))
    coverage.check(sharded, [halves, other])
    for manifest, indexes in (
        (MANIFEST, [halves, other]),  # "whole" is one piece
        (MANIFEST, [whole, RankIndex(SAVE, 1, {}, (), ())]),  # per-rank tensors are on each rank
        (MANIFEST, [whole, RankIndex(SAVE, 1, {}, (), (other.pieces[0], whole.pieces[0]))]),  # surplus
        (sharded, [moved, other]),  # overlapping and missing at once
        (sharded, [RankIndex(SAVE, 0, {}, (), INDEX.pieces[1:]), other]),
        (sharded, [RankIndex(SAVE, 0, {}, (), INDEX.pieces[2:]), other]),
    ):
        assert kind_of(coverage.check, manifest, indexes) == "coverage"
    for indexes in ([whole], [other], [whole, whole], [whole, other, other], []):
        assert kind_of(coverage.check, MANIFEST, indexes) == "index"
        assert kind_of(coverage.check_ranks, MANIFEST, indexes) == "index"


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [101_000_000, 1 << 40, (1 << 64) - 1])
def test_a_header_that_claims_to_be_huge_is_refused_before_memory_is_taken(length: int) -> None:
    tracemalloc.start()
    assert kind_of(header_bytes, struct.pack("<Q", length), 1 << 62) == "header"
    assert kind_of(header_bytes, struct.pack("<Q", 5000), 4096) == "header"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def header_of(**entries: Any) -> bytes:
    text = jsontext.dump(entries)
    return struct.pack("<Q", len(text)) + text


HEADERS = {
    "overlap": ({"a": [0, 4], "b": [2, 6]}, 6),
    "hole": ({"a": [0, 4], "b": [8, 12]}, 12),
    "past the end": ({"a": [0, 4], "b": [4, 8]}, 7),
    "before the end": ({"a": [0, 4]}, 9),
    "the wrong way round": ({"a": [4, 0]}, 4),
}


@pytest.mark.parametrize(("spans", "size"), HEADERS.values(), ids=HEADERS)
def test_a_header_whose_tensors_do_not_fill_the_file_is_refused(spans: dict[str, list[int]], size: int) -> None:
    header = header_of(
        **{key: {"dtype": "U8", "shape": [abs(b - a)], "data_offsets": [a, b]} for key, (a, b) in spans.items()}
    )
    assert kind_of(parse_header, header, len(header) + size) == "header"


def test_a_header_with_a_wrong_length_or_dtype_is_refused() -> None:
    for dtype, shape in (("F32", [2]), ("F33", [4]), ("U8", [-4]), ("U8", [4.0]), ("U8", [2] * 66)):
        header = header_of(a={"dtype": dtype, "shape": shape, "data_offsets": [0, 4]})
        assert kind_of(parse_header, header, len(header) + 4) == "header"
