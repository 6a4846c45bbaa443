"""Format v1: what is written is canonical, deterministic, and read back equal, by us and by the safetensors package."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CheckpointError
from ckpt.format import coverage, jsontext, names
from ckpt.format.datafile import PieceSpec, lay_out, parse_header
from ckpt.format.digest import Streaming, block_digests, digest, piece_digests
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.index import DataFile, Piece, RankIndex
from ckpt.format.manifest import FileEntry, Manifest, Parent, PlacementGroup, TensorTable, seal
from ckpt.geometry import Box

pytestmark = pytest.mark.quick

RUN, SAVE, OTHER = "0" * 31 + "1", "0" * 31 + "2", "0" * 31 + "3"
D = "d" * 32


def small_manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "run": RUN,
        "save": SAVE,
        "incarnation": 2,
        "parent": Parent(400, 1, OTHER),
        "step": 500,
        "time": 1700000000.25,
        "metrics": {"loss": 0.5, "acc": math.nan},
        "world": {"size": 1},
        "parts": {"model": {"kind": "module"}},
        "tensors": TensorTable(
            ("model/w", "model/b"), ("float32", "bfloat16"), ((2, 3), ()), (0, 0), {"model/tied": "model/w"}
        ),
        "groups": (PlacementGroup("whole", (0,)),),
        "files": (FileEntry("rank-00000.json", 10, D), FileEntry("rank-00000.safetensors", 4122, D)),
        "timings": {"capture_s": 0.25, "write_s": 1.5},
        "environment": {"torch": "2.13.0"},
    }
    return Manifest(**{**values, **changes})


def small_index(manifest: Manifest) -> RankIndex:
    table = manifest.tensors
    layout = lay_out(PieceSpec(*row) for row in zip(table.names, table.dtypes, table.shapes, strict=True))
    pieces = tuple(
        Piece(i, 0, start, end - start, Box.whole(table.shapes[i]), (1, 0) if i == 0 else None, D)
        for i, (start, end) in zip(layout.order, layout.spans, strict=True)
    )
    file = DataFile("rank-00000.safetensors", layout.bytes, layout.data_start, D, names.BLOCK, (D,))
    return RankIndex(SAVE, 0, {"epoch": 3}, (file,), pieces)


# --- the manifest ---------------------------------------------------------------------------------------------------


def test_a_manifest_is_spelled_byte_for_byte_as_the_text_says() -> None:
    body = (
        '{"format":1,"run":"00000000000000000000000000000001","save":"00000000000000000000000000000002",'
        '"incarnation":2,"parent":{"step":400,"incarnation":1,"save":"00000000000000000000000000000003"},"step":500,'
        '"time":1700000000.25,"metrics":{"loss":0.5,"acc":{"$float":"7ff8000000000000"}},"world":{"size":1},'
        '"parts":{"model":{"kind":"module"}},"environment":{"torch":"2.13.0"},'
        '"timings":{"capture_s":0.25,"write_s":1.5},'
        f'"files":[{{"name":"rank-00000.json","bytes":10,"xxh3_128":"{D}"}},'
        f'{{"name":"rank-00000.safetensors","bytes":4122,"xxh3_128":"{D}"}}],'
        '"groups":[{"kind":"whole","ranks":[0]}],'
        '"tensors":{"names":["model/w","model/b"],"dtypes":["float32","bfloat16"],"shapes":[[2,3],[]],"groups":[0,0],'
        '"aliases":{"model/tied":"model/w"}}'
    )
    expected = body + ',"xxh3_128":"' + xxhash.xxh3_128(body.encode()).hexdigest() + '"}\n'
    assert small_manifest().encode() == expected.encode("ascii")


def test_a_manifest_comes_back_equal_and_encodes_to_the_same_bytes() -> None:
    manifest = small_manifest(metrics={"loss": 0.5, "worst": math.inf})
    parsed = Manifest.parse(manifest.encode())
    assert parsed == manifest
    assert parsed.encode() == manifest.encode()
    assert parsed.bytes == 4132 and parsed.world_size == 1 and parsed.order == (2, 500)
    entry = parsed.file("rank-00000.json")
    assert entry == FileEntry("rank-00000.json", 10, D) and parsed.file("other") is None
    assert entry.path("step-00000500") == "step-00000500/rank-00000.json"


def test_a_manifest_without_parent_tensors_and_metrics_comes_back_equal() -> None:
    manifest = small_manifest(parent=None, tensors=TensorTable(), groups=(), files=(), metrics={}, parts={})
    assert Manifest.parse(manifest.encode()) == manifest


def test_a_policy_stands_behind_the_environment_and_only_when_there_is_one() -> None:
    policy = {"monitor": "loss", "mode": "min", "keep_best": 2, "keep_every": 1 << 62}
    made = small_manifest(policy=policy, metrics={})
    data = made.encode()
    assert b'"environment":{"torch":"2.13.0"},"policy":{"monitor":"loss",' in data
    assert Manifest.parse(data) == Manifest.parse(data, tables=False) == made
    assert b"policy" not in small_manifest().encode() and Manifest.parse(small_manifest().encode()).policy == {}


def test_a_listing_reads_everything_but_the_tensor_table() -> None:
    manifest = small_manifest(environment={"trap": {"tensors": {"names": []}}}, metrics={})
    data = manifest.encode()
    head = Manifest.parse(data, tables=False)
    for key in ("run", "save", "incarnation", "parent", "step", "time", "files", "groups", "parts", "world", "timings"):
        assert getattr(head, key) == getattr(manifest, key)
    assert head.environment == manifest.environment
    assert "model/w" not in repr(head)
    assert head == manifest and manifest == head
    assert head.tensors.names == manifest.tensors.names and head.encode() == data


def test_a_listing_does_not_look_into_the_table_but_checks_its_seal() -> None:
    body = small_manifest().encode()[: -len(seal(b""))].replace(b'"float32"', b'"float99"')
    head = Manifest.parse(seal(body), tables=False)
    assert head.step == 500
    for _ in range(2):
        with pytest.raises(CheckpointError, match="float99"):
            _ = head.tensors.names
    with pytest.raises(CheckpointError, match="float99"):
        Manifest.parse(seal(body))
    with pytest.raises(CheckpointError, match="own digest"):
        Manifest.parse(seal(body).replace(b"float99", b"float32"), tables=False)


def test_keys_a_later_minor_version_adds_are_ignored() -> None:
    body = json.loads(small_manifest(metrics={}).encode())
    del body["xxh3_128"]
    body["hint"] = {"new": [1]}
    body["files"][0]["hint"] = 1
    body["tensors"]["hint"] = []
    body["groups"][0]["hint"] = None
    data = seal(jsontext.dump(body)[:-1])
    assert Manifest.parse(data) == small_manifest(metrics={})
    assert Manifest.parse(data, tables=False).files == small_manifest().files


def test_a_file_kept_in_an_earlier_step_is_found_there() -> None:
    entry = FileEntry("rank-00000-1.safetensors", 5, D, ("step-00000400", "rank-00000.safetensors"))
    parsed = Manifest.parse(small_manifest(files=(entry,), metrics={}).encode())
    assert parsed.files == (entry,)
    assert parsed.files[0].path("step-00000500") == "step-00000400/rank-00000.safetensors"


# --- the index ------------------------------------------------------------------------------------------------------


def test_an_index_is_spelled_byte_for_byte_as_the_text_says() -> None:
    manifest = small_manifest()
    expected = (
        f'{{"format":1,"save":"{SAVE}","rank":0,"values":{{"epoch":3}},'
        '"files":[{"name":"rank-00000.safetensors","bytes":4122,"header_bytes":4096,'
        f'"header_xxh3_128":"{D}","block":1048576,"blocks":["{D}"]}}],'
        '"pieces":{"tensor":[0,1],"file":[0,0],"start":[4096,4120],"bytes":[24,2],"box":[null,null],'
        f'"dim_order":[[1,0],null],"xxh3_128":["{D}","{D}"]}}}}\n'
    )
    assert small_index(manifest).encode(manifest.tensors.shapes) == expected.encode("ascii")


def test_an_index_comes_back_equal() -> None:
    manifest = small_manifest()
    index = small_index(manifest)
    parsed = RankIndex.parse(index.encode(manifest.tensors.shapes), manifest)
    assert parsed == index
    assert parsed.pieces[0].box == Box((0, 0), (2, 3)) and isinstance(parsed.pieces[0], Piece)


def test_a_rank_without_tensors_has_an_index_without_pieces() -> None:
    manifest = small_manifest(tensors=TensorTable(), groups=(), files=())
    index = RankIndex(SAVE, 0, {}, (), ())
    assert RankIndex.parse(index.encode(()), manifest) == index


def test_shards_of_two_ranks_and_two_files_come_back_and_cover_their_tensor() -> None:
    manifest, indexes = two_ranks()
    parsed = [RankIndex.parse(i.encode(manifest.tensors.shapes), manifest) for i in indexes]
    assert parsed == indexes
    coverage.check(manifest, parsed)


def two_ranks() -> tuple[Manifest, list[RankIndex]]:
    boxes = {0: [Box((0, 0), (1, 4)), Box((1, 0), (1, 4))], 1: [Box((2, 0), (2, 2)), Box((2, 2), (2, 2))]}
    files: list[FileEntry] = []
    indexes: list[RankIndex] = []
    for rank, mine in boxes.items():
        data: list[DataFile] = []
        pieces: list[Piece] = []
        for number, box in enumerate(mine):
            specs = [PieceSpec("model/w", "float16", box.sizes), PieceSpec("state/x", "int64", ())][: 2 - number]
            layout = lay_out(specs)
            name = names.data_name(rank, number)
            files.append(FileEntry(name, layout.bytes, D))
            data.append(DataFile(name, layout.bytes, layout.data_start, D, names.BLOCK, (D,)))
            for i, (start, end) in zip(layout.order, layout.spans, strict=True):
                piece_box = box if i == 0 else Box.whole(())
                pieces.append(Piece(i, number, start, end - start, piece_box, None, D))
        files.append(FileEntry(names.index_name(rank), 1, D))
        indexes.append(RankIndex(SAVE, rank, {}, tuple(data), tuple(pieces)))
    manifest = small_manifest(
        world={"size": 2},
        tensors=TensorTable(("model/w", "state/x"), ("float16", "int64"), ((4, 4), ()), (0, 1)),
        groups=(PlacementGroup("shards", (0, 1)), PlacementGroup("per-rank", (0, 1))),
        files=tuple(files),
    )
    return manifest, indexes


def test_a_shared_file_may_hold_bytes_of_other_checkpoints() -> None:
    manifest = small_manifest()
    index = small_index(manifest)
    file = index.files[0]
    shared = DataFile(file.name, file.bytes, file.header_bytes, D, file.block, file.blocks, shared=True)
    only = RankIndex(SAVE, 0, {}, (shared,), index.pieces[1:])
    assert RankIndex.parse(only.encode(manifest.tensors.shapes), manifest) == only


# --- the data file --------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SPECS = st.dictionaries(
    st.text(min_size=1, max_size=12), st.tuples(st.sampled_from(sorted(ITEMSIZE)), SIZES), max_size=12
)


@given(SPECS)
def test_a_layout_has_no_holes_is_aligned_and_ordered(table: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    specs = [PieceSpec(f"m/{key}", *rest) for key, rest in table.items()]
    layout = lay_out(specs)
    assert layout.data_start % names.ALIGN == 0 and layout.data_start == len(layout.header)
    assert sorted(layout.order) == list(range(len(specs)))
    ordered = [specs[i] for i in layout.order]
    assert ordered == sorted(specs, key=lambda spec: (-ITEMSIZE[spec.dtype], spec.key))
    position = layout.data_start
    for spec, (start, end) in zip(ordered, layout.spans, strict=True):
        assert start == position and end - start == spec.bytes and start % ITEMSIZE[spec.dtype] == 0
        position = end
    assert position == layout.bytes
    entries = parse_header(layout.header, layout.bytes)
    assert {key: (entry.start, entry.end) for key, entry in entries.items()} == {
        spec.key: span for spec, span in zip(ordered, layout.spans, strict=True)
    }
    assert lay_out(reversed(specs)).header == layout.header


@given(SPECS)
def test_a_header_is_canonical_json(table: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header = lay_out(PieceSpec(f"m/{key}", *rest) for key, rest in table.items()).header
    text = header[8:].rstrip(b" ")
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert jsontext.dump(json.loads(text)) == text


def test_the_safetensors_package_reads_our_image_in_every_dtype() -> None:
    """Opened as it is by another tool: known dtypes as themselves, the others as bytes of one more dimension."""
    import safetensors

    specs = [PieceSpec(f"model/{dtype}", dtype, (3, 2)) for dtype in ITEMSIZE]
    specs += [PieceSpec("model/scalar", "float32", ()), PieceSpec("model/none", "int16", (0, 4))]
    layout = lay_out(specs)
    data = bytes(i % 251 for i in range(layout.bytes - layout.data_start))
    read = dict(safetensors.deserialize(layout.header + data))
    assert set(read) == {spec.key for spec in specs}
    for i, (start, end) in zip(layout.order, layout.spans, strict=True):
        spec, entry = specs[i], read[specs[i].key]
        assert bytes(entry["data"]) == data[start - layout.data_start : end - layout.data_start]
        if entry["dtype"] == "U8" and spec.dtype != "uint8":
            assert entry["shape"] == [*spec.sizes, ITEMSIZE[spec.dtype]]
            assert spec.dtype.startswith(("complex", "float8", "float4"))
        else:
            assert entry["shape"] == list(spec.sizes)


@pytest.mark.parametrize("keys", [["m/a", "m/a"], ["__metadata__"], ["m/\ud800"]])
def test_a_layout_refuses_keys_no_reader_could_tell(keys: list[str]) -> None:
    with pytest.raises(ValueError):
        lay_out(PieceSpec(key, "uint8", (1,)) for key in keys)


def test_digests_are_of_blocks_pieces_and_the_whole() -> None:
    image = memoryview(bytes(range(256)) * 10000)
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert block_digests(image) == tuple(
        xxhash.xxh3_128(image[i : i + (1 << 20)]).hexdigest() for i in (0, 1 << 20, 2 << 20)
    )
    assert piece_digests(image, [(5, 9), (9, 9)]) == (digest(image[5:9]), digest(b""))
    stream = Streaming()
    stream.update(image[:1000])
    stream.update(image[1000:])
    assert stream.hexdigest() == digest(image)


# --- hypothesis on the tables ---------------------------------------------------------------------------------------

TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=20).map(lambda text: f"model/{text}"),
    st.tuples(st.sampled_from(sorted(ITEMSIZE)), SIZES),
    max_size=15,
)
TREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda sub: st.lists(sub, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), sub),
    max_leaves=12,
)  # fmt: skip


@given(TENSORS, st.dictionaries(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False)), TREE)
def test_any_manifest_and_index_come_back_equal(
    table: dict[str, tuple[str, tuple[int, ...]]], metrics: dict[str, float], tree: Any
) -> None:
    layout = lay_out(PieceSpec(key, *rest) for key, rest in table.items())
    shapes = tuple(shape for _, shape in table.values())
    manifest = small_manifest(
        metrics=metrics,
        tensors=TensorTable(tuple(table), tuple(d for d, _ in table.values()), shapes, (0,) * len(table)),
        files=(FileEntry("rank-00000.safetensors", layout.bytes, D),),
        environment={"tree": tree},
    )
    assert Manifest.parse(manifest.encode()) == manifest
    assert Manifest.parse(manifest.encode(), tables=False).environment == manifest.environment
    pieces = tuple(
        Piece(i, 0, start, end - start, Box.whole(shapes[i]), tuple(reversed(range(len(shapes[i])))), D)
        for i, (start, end) in zip(layout.order, layout.spans, strict=True)
    )
    blocks = (D,) * -(-layout.bytes // 4096)
    file = DataFile("rank-00000.safetensors", layout.bytes, layout.data_start, D, 4096, blocks)
    index = RankIndex(SAVE, 0, {"tree": tree}, (file,), pieces)
    assert RankIndex.parse(index.encode(shapes), manifest) == index
