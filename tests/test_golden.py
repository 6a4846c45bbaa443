"""The golden checkpoints: today's code writes the same bytes, reads them, and so does a reader made from the text."""

from __future__ import annotations

import ast
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reader_from_text as text
import safetensors
from golden import corners, make

from ckpt.commit.line import line_of
from ckpt.commit.roster import Scanner
from ckpt.errors import CorruptCheckpointError
from ckpt.format import coverage
from ckpt.format.datafile import parse_header
from ckpt.format.digest import digest
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.index import RankIndex
from ckpt.format.manifest import Manifest
from ckpt.format.values import decode
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parent.parent / "docs"


GOLDENS = make.GOLDENS | corners.GOLDENS
ROOTS = sorted(path.name for path in GOLDEN.glob("v1-*"))
STEPS = sorted(path.parent.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("v1-*/*/manifest.json"))


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_every_golden_is_there_small_and_known() -> None:
    assert set(GOLDENS) | {"v1-manager"} == set(ROOTS)
    for root in ROOTS:
        assert 0 < sum(map(len, files(GOLDEN / root).values())) < 100_000


@pytest.mark.parametrize("name", GOLDENS)
def test_todays_code_writes_the_same_bytes(name: str) -> None:
    assert GOLDENS[name]() == files(GOLDEN / name)


def open_step(step: str) -> tuple[Manifest, list[RankIndex], dict[str, bytes]]:
    """The files of one step by the package's own parsers, all digests checked."""
    folder = GOLDEN / step
    manifest = Manifest.parse((folder / "manifest.json").read_bytes())
    contents = {entry.name: (folder.parent / entry.path(folder.name)).read_bytes() for entry in manifest.files}
    for entry in manifest.files:
        assert len(contents[entry.name]) == entry.bytes and digest(contents[entry.name]) == entry.xxh3_128
    indexes = [RankIndex.parse(data, manifest) for name, data in contents.items() if name.endswith(".json")]
    coverage.check(manifest, indexes)
    return manifest, indexes, contents


@pytest.mark.parametrize("step", STEPS)
def test_todays_code_reads_every_golden_and_spells_it_the_same(step: str) -> None:
    manifest, indexes, contents = open_step(step)
    assert manifest.encode() == (GOLDEN / step / "manifest.json").read_bytes()
    assert Manifest.parse(manifest.encode(), tables=False).files == manifest.files
    for index in indexes:
        name = next(n for n, d in contents.items() if n.endswith(".json") and json.loads(d)["rank"] == index.rank)
        assert index.encode(manifest.tensors.shapes) == contents[name]
        for file in index.files:
            header = contents[file.name][: file.header_bytes]
            assert digest(header) == file.header_xxh3_128
            spans = {(entry.start, entry.end) for entry in parse_header(header, file.bytes).values()}
            mine = {(p.start, p.start + p.bytes) for p in index.pieces if index.files[p.file].name == file.name}
            assert mine == spans or (file.shared and mine < spans)


@pytest.mark.parametrize("step", STEPS)
def test_a_reader_made_from_the_text_restores_the_same_tensors_and_values(step: str) -> None:
    manifest, indexes, contents = open_step(step)
    root, folder = step.split("/")
    read = text.read(str(GOLDEN / root), folder)
    table = manifest.tensors
    assert set(read.tensors) == {*table.names, *table.aliases}
    for number, name in enumerate(table.names):
        ours = [
            (index.rank, piece.box, contents[index.files[piece.file].name][piece.start : piece.start + piece.bytes])
            for index in indexes
            for piece in index.pieces
            if piece.tensor == number
        ]
        theirs = read.tensors[name]
        if isinstance(theirs, dict):
            assert {rank: tensor.data for rank, tensor in theirs.items()} == {rank: data for rank, _, data in ours}
            continue
        assert (theirs.dtype, theirs.shape) == (table.dtypes[number], table.shapes[number])
        whole = np.frombuffer(theirs.data, np.uint8).reshape(*theirs.shape, ITEMSIZE[theirs.dtype])
        for _, box, data in ours:
            where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert whole[where].tobytes() == data
    for index in indexes:
        values = text.Values(read.tensors | read.composites, index.rank)
        ours = decode(dict(index.values), lambda tag, payload, values=values: values.decode({tag: payload}))
        assert same(read.values[index.rank], ours)


def same(a: Any, b: Any) -> bool:
    """Equal with equal types, NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))  # by items: a NaN finds no entry
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    return a == b


def test_the_reader_made_from_the_text_finds_what_the_builder_put_in() -> None:
    """Independent of the package's parsers: the bytes of `fill` by name, and the Python values themselves."""
    read = text.read(str(GOLDEN / "v1-types"), "step-00000007")
    for name, tensor in read.tensors.items():
        stored = read.manifest["tensors"]["aliases"].get(name, name)
        assert isinstance(tensor, text.Tensor)
        assert tensor.data == make.fill(stored, tensor.dtype, math.prod(tensor.shape))
    conv = read.tensors["model/conv.weight"]
    assert isinstance(conv, text.Tensor) and conv.dim_order == (0, 2, 3, 1) and conv.numpy().shape == (2, 3, 2, 2)
    assert read.tensors["model/head.weight"] is conv
    extra = dict(read.values[0]["extra"])
    raw = extra.pop("raw")
    assert same(extra, make.VALUES)
    assert raw["tensor"] is read.tensors["extra/raw/tensor"]
    csr = raw["composite"]
    assert (csr["kind"], csr["shape"], sorted(csr["components"])) == ("csr", [3, 300], ["inner", "outer", "values"])
    assert csr["components"]["values"] is read.tensors["model/sparse/values"]
    assert raw["array"].dtype == "<f8" and raw["array"].shape == (2, 2)
    assert raw["big_endian"].dtype == ">i2" and raw["big_endian"].shape == (2, 2)
    assert raw["npscalar"] == 1.5 and raw["npscalar_text"] == "ab" and raw["npdtype"] == np.dtype("<f4")
    assert raw["u8"] == b"\x00\x01\x02\xff" and raw["enum"] == (1, "red") and raw["size"] == (2, 3)
    assert math.isnan(float(text.Values({}, 0).decode(read.manifest["metrics"]["nan"])))
    sharded = text.read(str(GOLDEN / "v1-ranks"), "step-00000012")
    tensor, mean = sharded.tensors["model/sharded"], sharded.tensors["model/norm.running_mean"]
    assert isinstance(tensor, text.Tensor) and tensor.data == make.fill("model/sharded", "bfloat16", 20)
    assert isinstance(mean, dict) and mean[1].data == make.fill("model/norm.running_mean@1", "float32", 3)
    assert sharded.values[1] == {"model": {}, "loader": make.LOADER, "rng": {"torch": b"\x02"}}
    assert sharded.values[0]["rng"] == {"torch": b"\x01"}


def test_the_reader_made_from_the_text_imports_nothing_of_the_package() -> None:
    modules: set[str] = set()
    for file in ("reader_from_text.py", "values_from_text.py"):
        for node in ast.walk(ast.parse((Path(__file__).parent / file).read_text())):
            modules |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            modules |= {str(node.module)} if isinstance(node, ast.ImportFrom) else set()
    foreign = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert foreign == {"numpy", "xxhash", "values_from_text"}


def test_both_readers_see_the_same_line_and_pins() -> None:
    for root in ROOTS:
        roster = Scanner(LocalStorage(str(GOLDEN / root))).scan()
        ours = {folder.step: folder.name for folder in line_of(roster).steps}
        assert text.line(str(GOLDEN / root)) == ours and ours
        assert text.pins(str(GOLDEN / root)) == set(roster.pins)
    assert text.line(str(GOLDEN / "v1-shared")) == {100: "step-00000100", 150: "step-00000150"}
    assert text.pins(str(GOLDEN / "v1-shared")) == {100}
    assert text.line(str(GOLDEN / "v1-corners")) == {10: "step-00000010", 20: "renamed", 30: "of-the-paper"}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("v1-*/*/*.safetensors")), ids=lambda path: path.name)
def test_every_golden_data_file_opens_in_the_safetensors_package(path: Path) -> None:
    with safetensors.safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == sorted(header(path))
    assert len(safetensors.deserialize(path.read_bytes())) == len(header(path))


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_the_corners_hold_what_they_are_for() -> None:
    read = text.read(str(GOLDEN / "v1-corners"), "of-the-paper")
    folder = GOLDEN / "v1-corners" / "of-the-paper"
    keys = [header(folder / f"rank-0000{rank}.safetensors") for rank in range(3)]
    assert list(keys[1]) == ["model/other"] and keys[2] == {}
    assert keys[0]["model/w"]["shape"] == [1, 2] and keys[0]["model/w#1"]["shape"] == [1]
    assert keys[0]["model/w#2"]["shape"] == [1, 2] and "model/w#3" not in keys[0]
    index = json.loads((folder / "rank-00000.json").read_bytes())
    assert index["files"][0]["block"] == 4096 and len(index["files"][0]["blocks"]) == 3
    flat, quantized = read.composites["model/flat"], read.composites["nets/tower/q"]
    assert list(flat["components"]) == ["a", "b"] and flat["context"] == {"mode": {"$opaque": "Mode"}, "n": 2}
    assert quantized["axis"] == 0 and list(quantized["components"]) == ["elements", "scales", "zero_points"]
    values = read.values[0]
    by_key = [(key, value) for key, value in values["extra"].items() if not isinstance(key, float)]
    assert [(key, value.shape) for key, value in by_key] == [("", (1,)), ("\udcff", (2,))]
    assert [value.shape for key, value in values["extra"].items() if key != key] == [(3,), (4,)]
    assert values["optimizer"]["groups"][0]["options"] == {"lr": 0.5, "$odd": 1}
    assert values["nets"]["tower"] == "nets/tower" and values["bits"]["state"]["state"] == (1 << 120) + 5
    assert [read.values[rank]["rng"]["torch"] for rank in range(3)] == [b"\0", b"\1", b"\2"]


def test_the_example_in_the_text_is_the_golden_one() -> None:
    folder = GOLDEN / "v1-example" / "step-00000003"
    page = (DOCS / "format.md").read_text()
    for name in ("manifest.json", "rank-00000.json"):
        assert f"\n{(folder / name).read_text().rstrip()}\n" in page
    data = (folder / "rank-00000.safetensors").read_bytes()
    rows = [line.split("  ", 1) for line in page.splitlines() if len(line) == 53 and line[4:6] == "  "]
    shown = {int(offset, 16): bytes.fromhex(row) for offset, row in rows}
    assert shown == {i: data[i : i + 16] for i in range(0, len(data), 16) if data[i : i + 16].strip(b" ")}
    assert f"first {len((folder / 'manifest.json').read_bytes()) - 48} bytes" in page


# --- damage of a whole checkpoint, as both readers tell it ----------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def make_copy(step: str) -> Path:
        root = tmp_path / "root"
        shutil.copytree(GOLDEN / step.split("/")[0], root)
        return root / step.split("/")[1]

    return make_copy


def theirs(folder: Path) -> str:
    try:
        text.read(str(folder.parent), folder.name)
    except text.Damaged as error:
        return error.kind
    return "sound"


def ours(folder: Path) -> str:
    from ckpt.commit.stored import check_all, open_stored

    storage = LocalStorage(str(folder.parent))
    found = Scanner(storage).look(folder.name)
    assert found is not None
    try:
        check_all(open_stored(storage, found))
    except CorruptCheckpointError as error:
        # Past the manifest every message names the file, for the person who has to look.
        assert error.kind.endswith("manifest") or any(path.name in str(error) for path in GOLDEN.glob("*/*/*"))
        return error.kind
    return "sound"


def test_both_readers_call_the_same_damage_by_the_same_name(copy: Callable[[str], Path]) -> None:
    """TORN-10: flipped bits, swapped shards of equal size, shards of another step: all seen, none by length alone."""
    folder = copy("v1-ranks/step-00000012")
    assert (theirs(folder), ours(folder)) == ("sound", "sound")
    one, two = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    index, manifest = folder / "rank-00001.json", folder / "manifest.json"
    a, b = one.read_bytes(), two.read_bytes()

    def damaged(kind: str, *changes: tuple[Path, bytes | None]) -> None:
        before = [(path, path.read_bytes()) for path, _ in changes]
        for path, data in changes:
            path.unlink()
            if data is not None:
                path.write_bytes(data)
        assert (theirs(folder), ours(folder)) == (kind, kind)
        for path, data in before:
            path.write_bytes(data)

    damaged("digest", (one, a[:-1] + bytes([a[-1] ^ 1])))
    damaged("digest", (one, a[:9] + bytes([a[9] ^ 1]) + a[10:]))
    damaged("length", (one, a[:-1]))
    damaged("length", (one, a + b"\0"))
    damaged("length", (one, b""))
    damaged("length", (one, b), (two, a))
    damaged("missing-file", (two, None))
    damaged("missing-file", (index, None))
    damaged("digest", (index, index.read_bytes().replace(b'"rank":1', b'"rank":0')))
    damaged("missing-manifest", (manifest, None))
    damaged("manifest", (manifest, manifest.read_bytes()[:-1]))
    damaged("manifest", (manifest, manifest.read_bytes().replace(b'"format":1', b'"format":2')))
    assert (theirs(folder), ours(folder)) == ("sound", "sound")


def test_same_named_files_of_two_steps_that_were_swapped_are_seen(copy: Callable[[str], Path]) -> None:
    """TORN-10, TORN-13: one save id a checkpoint; two moments are never mixed."""
    folder = copy("v1-example/step-00000003")
    other = GOLDEN / "v1-types" / "step-00000007"
    for name in ("rank-00000.json", "rank-00000.safetensors"):
        before = (folder / name).read_bytes()
        swapped = (other / name).read_bytes()[: len(before)].ljust(len(before), b" ")
        (folder / name).write_bytes(swapped)
        assert (theirs(folder), ours(folder)) == ("digest", "digest")
        (folder / name).write_bytes(before)


def test_a_renamed_or_copied_step_folder_stays_readable(copy: Callable[[str], Path]) -> None:
    """CFG-09: the manifest is the truth; the name is for people."""
    folder = copy("v1-types/step-00000007")
    moved = folder.rename(folder.with_name("the-good-one"))
    assert (theirs(moved), ours(moved)) == ("sound", "sound")
    assert text.line(str(moved.parent)) == {7: "the-good-one"}
