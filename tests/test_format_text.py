"""What the text says of the line, of a newer format and of single members, by the reader made from it and by ckpt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reader_from_text as text
from manager_support import make_manifest

import ckpt
from ckpt.commit.line import check_newest, line_of
from ckpt.commit.roster import Scanner
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from ckpt.format import jsontext
from ckpt.format.digest import digest
from ckpt.format.manifest import Parent, seal
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"
Change = Callable[[dict[str, Any]], Any]


def plant(root: Path, name: str, step: int, incarnation: int, save: str, parent: int | None = None) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    where = None if parent is None else Parent(parent, 1, "e" * 32)
    record = make_manifest(step=step, incarnation=incarnation, save=save * 32, parent=where, files=())
    (folder / "manifest.json").write_bytes(record.encode())


LINES: dict[str, tuple[list[tuple[Any, ...]], dict[int, str]]] = {
    "abandoned": ([("a", 100, 1, "1"), ("b", 200, 1, "2"), ("c", 150, 2, "4", 100)], {100: "a", 150: "c"}),
    "resumed from an abandoned step": (
        [("a", 100, 1, "1"), ("b", 200, 1, "2"), ("c", 300, 1, "3"), ("d", 150, 2, "4", 100), ("e", 400, 3, "5", 300)],
        {100: "a", 200: "b", 300: "c", 400: "e"},
    ),
    "two parents": (
        [("a", 100, 1, "1"), ("b", 200, 1, "2"), ("c", 150, 2, "3", 100), ("d", 250, 2, "4", 200)],
        {100: "a", 150: "c", 200: "b", 250: "d"},
    ),
    "one number twice": ([("a", 100, 1, "1"), ("b", 100, 1, "2")], {100: "b"}),
    "one number in a later incarnation": ([("b", 100, 1, "1"), ("a", 100, 2, "2", 100)], {100: "a"}),
    "no parent": ([("a", 100, 1, "1"), ("b", 50, 2, "2")], {50: "b"}),
    "copies": ([("step-00000100", 100, 1, "1"), ("a", 100, 1, "1"), ("z", 100, 1, "1")], {100: "step-00000100"}),
    "copies without the regular one": ([("b", 100, 1, "1"), ("c", 100, 1, "1")], {100: "b"}),
    "not in pins": ([("a", 100, 1, "1"), ("pins", 200, 1, "2")], {100: "a"}),
}


@pytest.mark.parametrize("case", LINES)
def test_both_readers_see_the_line_that_the_text_describes(tmp_path: Path, case: str) -> None:
    steps, expected = LINES[case]
    for step in steps:
        plant(tmp_path, *step)
    ours = {folder.step: folder.name for folder in line_of(Scanner(LocalStorage(str(tmp_path))).scan()).steps}
    assert ours == expected and text.line(str(tmp_path)) == expected


@pytest.mark.parametrize(("step", "refused"), [(5, False), (10, False), (15, False), (200, True)])
def test_both_readers_refuse_where_a_newer_format_stands_above_the_newest(
    tmp_path: Path, step: int, refused: bool
) -> None:
    plant(tmp_path, "step-00000010", 10, 1, "1")
    plant(tmp_path, "step-00000020", 20, 1, "2")
    later = tmp_path / f"step-{step + 1:08d}"
    later.mkdir()
    (later / "manifest.json").write_bytes(seal(b'{"format":7'))
    roster = Scanner(LocalStorage(str(tmp_path))).scan()
    assert text.newer_format(str(tmp_path)) is refused and len(roster.later) == 1
    if refused:
        with pytest.raises(UnsupportedFormatError):
            check_newest(roster, line_of(roster).newest)
    else:
        check_newest(roster, line_of(roster).newest)


def test_a_tensor_that_does_not_exist_is_damage_to_who_reads_it(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v1-ranks", tmp_path / "root")
    folder = tmp_path / "root" / "step-00000012"
    write(folder, index=lambda i: i["values"].update(loader={"$tensor": "model/none"}))
    with pytest.raises(CorruptCheckpointError) as caught:
        ckpt.read(folder)
    assert caught.value.kind == "value"


# Single members


def write(folder: Path, manifest: Change | None = None, index: Change | None = None) -> None:
    """Changes a step's manifest or the index of rank 0, everything sealed and digested anew."""
    path = folder / "manifest.json"
    record = json.loads(path.read_bytes())
    del record["xxh3_128"]
    if index is not None:
        file = folder / "rank-00000.json"
        value = json.loads(file.read_bytes())
        index(value)
        file.write_bytes(jsontext.dump(value))
        entry = next(entry for entry in record["files"] if entry["name"] == file.name)
        entry["bytes"], entry["xxh3_128"] = file.stat().st_size, digest(file.read_bytes())
    if manifest is not None:
        manifest(record)
    path.write_bytes(seal(jsontext.dump(record)[:-1]))


def without_index(record: dict[str, Any]) -> None:
    record["files"] = [entry for entry in record["files"] if entry["name"] != "rank-00001.json"]


def own_source(record: dict[str, Any]) -> None:
    for entry in record["files"]:
        if entry["name"].endswith(".json"):
            entry["source"] = ["step-00000012", entry["name"]]


def value(node: Any) -> Change:
    return lambda index: index["values"].__setitem__("more", node)


MANIFESTS: dict[str, tuple[Change, str]] = {
    "nothing": (lambda m: None, "sound"),
    "an index missing": (without_index, "index"),
    "a larger world": (lambda m: m["world"].update(size=3), "index"),
    "a writer that is no id": (lambda m: m["world"].update(writer="x"), "manifest"),
    "a writer of null": (lambda m: m["world"].update(writer=None), "manifest"),
    "a writer": (lambda m: m["world"].update(writer="a" * 32), "sound"),
    "a part named rng": (lambda m: m["parts"].update(rng={"kind": "object"}), "manifest"),
    "a part named step": (lambda m: m["parts"].update(step={"kind": "object"}), "manifest"),
    "a part inside step": (lambda m: m["parts"].update({"step/a": {"kind": "object"}}), "manifest"),
    "an unknown kind": (lambda m: m["parts"].update(new={"kind": "unheard of"}), "sound"),
    "composites as a list": (lambda m: m["parts"]["model"].update(composites=[]), "manifest"),
    "a composite without a kind": (lambda m: m["parts"]["model"].update(composites={"model/x": {}}), "manifest"),
    "a metric as an integer's tag": (lambda m: m["metrics"].update(a={"$int": "0x5"}), "manifest"),
    "a metric that JSON lacks": (lambda m: m["metrics"].update(a={"$float": "inf"}), "sound"),
    "an integer beyond a double": (lambda m: m["environment"].update(a=10**400), "manifest"),
    "a large integer": (lambda m: m["environment"].update(a=10**308, text="9" * 400), "sound"),
    "an index with a source": (own_source, "manifest"),
    "a tensor of no part": (lambda m: m["tensors"]["aliases"].update({"/x": "model/bias"}), "manifest"),
    "too many elements": (lambda m: m["tensors"]["shapes"].__setitem__(1, [0, 1 << 40, 1 << 40]), "manifest"),
    "a policy of all": (lambda m: m.update(policy={"monitor": "é", "mode": "max", "keep_best": 1, "x": 0}), "sound"),
    "a policy of nothing": (lambda m: m.update(policy={}), "sound"),
    "a policy of null": (lambda m: m.update(policy=None), "manifest"),
    "an unnamed monitor": (lambda m: m.update(policy={"monitor": ""}), "manifest"),
    "a long monitor": (lambda m: m.update(policy={"monitor": "é" * 513}), "manifest"),
    "a monitor that is no text": (lambda m: m.update(policy={"monitor": 1}), "manifest"),
    "an unknown mode": (lambda m: m.update(policy={"mode": "most"}), "manifest"),
    "a mode that is no text": (lambda m: m.update(policy={"mode": True}), "manifest"),
    "keep every 0th": (lambda m: m.update(policy={"keep_every": 0}), "manifest"),
    "keep none best": (lambda m: m.update(policy={"keep_best": 0}), "manifest"),
    "keep true best": (lambda m: m.update(policy={"keep_best": True}), "manifest"),
    "keep many best": (lambda m: m.update(policy={"keep_best": (1 << 62) + 1}), "manifest"),
    "timings left out": (lambda m: m["timings"].clear(), "sound"),
}
INDEXES: dict[str, tuple[Change, str]] = {
    "no line feed": (lambda i: None, "sound"),
    "a rank twice": (lambda i: i.update(rank=1), "index"),
    "an unknown tag": (value({"$zz": 1}), "value"),
    "a member beside a tag": (value({"$tuple": [], "a": 1}), "value"),
    "an unknown tensor": (value({"$tensor": "model/none"}), "value"),
    "a known tensor": (value([{"$tensor": "model/bias"}, {"$tensor": ["model/bias", "cpu"]}]), "sound"),
    "an integer spelled out": (value([1 << 60, {"$int": "0x5"}]), "sound"),
}


def with_header(change: Change) -> Callable[[Path], None]:
    """Another header of the same length in rank 0's data file, every digest made anew."""

    def rewrite(folder: Path) -> None:
        path = folder / "rank-00000.safetensors"
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        made = change(entries)
        raw = made if isinstance(made, bytes) else length.to_bytes(8, "little") + jsontext.dump(entries)
        data[: 8 + length] = raw.ljust(8 + length)
        path.write_bytes(data)

        def index(value: dict[str, Any]) -> None:
            file, whole = value["files"][0], digest(bytes(data))
            file["header_xxh3_128"], file["blocks"] = digest(bytes(data[: 8 + length])), [whole]

        def manifest(record: dict[str, Any]) -> None:
            next(entry for entry in record["files"] if entry["name"] == path.name)["xxh3_128"] = digest(bytes(data))

        write(folder, manifest, index)

    return rewrite


def first(entries: dict[str, Any], **changes: Any) -> None:
    next(iter(entries.values())).update(changes)


HEADERS: dict[str, tuple[Change, str]] = {
    "the same header": (lambda h: None, "sound"),
    "metadata": (lambda h: h.update(__metadata__={"a": "b"}), "sound"),
    "a dtype of no table": (lambda h: first(h, dtype="F33"), "header"),
    "a shape of other elements": (lambda h: first(h, shape=[1, 1, 1]), "header"),
    "an overlap": (lambda h: first(h, data_offsets=[0, 1 << 20]), "header"),
    "no tensor": (lambda h: h.clear(), "header"),
    "no JSON": (lambda h: (4088).to_bytes(8, "little") + b"x{}", "header"),
    "a length beyond the file": (lambda h: (1 << 40).to_bytes(8, "little") + b"{}", "header"),
    "a shorter header": (lambda h: (4080).to_bytes(8, "little") + jsontext.dump(h), "header"),
}


def verified(folder: Path) -> str:
    kinds = {finding.kind for finding in ckpt.verify(folder).findings}
    assert len(kinds) < 2
    return kinds.pop() if kinds else "sound"


def theirs(folder: Path) -> str:
    try:
        text.read(str(folder.parent), folder.name)
    except text.Damaged as error:
        return error.kind
    except LookupError:
        return "value"
    return "sound"


@pytest.mark.parametrize("case", [*MANIFESTS, *INDEXES, *HEADERS])
def test_verify_and_the_reader_made_from_the_text_agree(tmp_path: Path, case: str) -> None:
    shutil.copytree(GOLDEN / "v1-ranks", tmp_path / "root")
    folder = tmp_path / "root" / "step-00000012"
    if case in MANIFESTS:
        change, kind = MANIFESTS[case]
        write(folder, manifest=change)
    elif case in INDEXES:
        change, kind = INDEXES[case]
        write(folder, index=change)
    else:
        change, kind = HEADERS[case]
        with_header(change)(folder)
    assert (verified(folder), theirs(folder)) == (kind, kind)
