"""A reader of format v1 written from docs/format.md alone: it imports nothing of the package it checks.

`read(root, step)` gives every tensor as bytes and array, and every value as a plain Python object. Names of sections in
the comments are those of the text.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from values_from_text import Damaged, Values, policy_fits

_ID = re.compile(r"[0-9a-f]{32}\Z")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_PART = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_STEP = re.compile(r"step-[0-9]{8,20}\Z")

# "Element types": dtype -> (item size, in the header, numpy's type where it has one)
DTYPES: dict[str, tuple[int, str | None, str | None]] = {
    "bool": (1, "BOOL", "?"), "uint8": (1, "U8", "u1"), "uint16": (2, "U16", "<u2"), "uint32": (4, "U32", "<u4"),
    "uint64": (8, "U64", "<u8"), "int8": (1, "I8", "i1"), "int16": (2, "I16", "<i2"), "int32": (4, "I32", "<i4"),
    "int64": (8, "I64", "<i8"), "float16": (2, "F16", "<f2"), "float32": (4, "F32", "<f4"),
    "float64": (8, "F64", "<f8"), "bfloat16": (2, "BF16", None), "float8_e4m3fn": (1, "F8_E4M3", None),
    "float8_e5m2": (1, "F8_E5M2", None), "float8_e4m3fnuz": (1, None, None), "float8_e5m2fnuz": (1, None, None),
    "float8_e8m0fnu": (1, None, None), "float4_e2m1fn_x2": (1, None, None), "complex32": (4, None, None),
    "complex64": (8, None, "<c8"), "complex128": (16, None, "<c16"),
}  # fmt: skip
HEADER_SIZES = {kind: size for size, kind, _ in DTYPES.values() if kind is not None}


class Unsupported(Exception):
    """A format of a later version."""


@dataclass
class Tensor:
    """All bytes in row-major order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...] | None
    data: bytes

    def numpy(self) -> Any:
        """The array; where numpy lacks the type, its items as unsigned integers of their size."""
        size, _, kind = DTYPES[self.dtype]
        return np.frombuffer(self.data, kind or f"<u{size}").reshape(self.shape)


@dataclass
class Checkpoint:
    """tensors: full name -> Tensor, or for a per-rank one rank -> Tensor; values: rank -> part -> value. A composite is
    a dict: its description and its components."""

    manifest: dict[str, Any]
    tensors: dict[str, Tensor | dict[int, Tensor]]
    values: dict[int, dict[str, Any]]
    composites: dict[str, dict[str, Any]]


def check(holds: bool, kind: str, why: str = "") -> None:
    if not holds:
        raise Damaged(kind, why)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def natural(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 1 << 62


def parse_json(data: bytes, kind: str) -> dict[str, Any]:
    """ "JSON in this format"."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check(len(dict(pairs)) == len(pairs), kind, "a key stands twice")
        return dict(pairs)

    def refuse(text: str) -> Any:
        raise Damaged(kind, text)

    def finite(text: str) -> float:
        check(math.isfinite(float(text)), kind, text)
        return float(text)

    def whole(text: str) -> int:
        finite(text)
        return int(text)

    check(data.count(b",") + data.count(b"[") + data.count(b"{") <= 32_000_000, kind, "too many values")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_float=finite, parse_int=whole
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails for a surrogate without its partner
    except (ValueError, RecursionError) as error:
        raise Damaged(kind, str(error)) from None
    check(type(value) is dict, kind, "no object")
    return value


def read_file(root: str, folder: str, entry: dict[str, Any]) -> bytes:
    place = entry.get("source") or [folder, entry["name"]]
    with open(os.path.join(root, *place), "rb") as file:
        return file.read()


# "manifest.json"


def read_manifest(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise Damaged("missing-manifest", path)
    with open(path, "rb") as file:
        data = file.read()
    check(len(data) <= 512 << 20, "manifest", "too long")
    body, seal = data[:-48], data[-48:]
    check(seal == b',"xxh3_128":"' + digest(body).encode() + b'"}\n', "manifest", "the seal is broken")
    value = parse_json(data, "manifest")
    version = value.get("format")
    check(type(version) is int and version >= 1, "manifest", "format")
    if version != 1:
        raise Unsupported(version)
    for entry in value["files"]:
        names = [entry["name"], *(entry.get("source") or [])[1:]]
        check(all(_FILE.match(name) and name != "manifest.json" for name in names), "file-name", str(names))
        check(not entry.get("source") or bool(_STEP.match(entry["source"][0])), "file-name", str(entry))
        check(not entry.get("source") or not entry["name"].endswith(".json"), "manifest", str(entry))
    check_manifest(value)
    return value


def check_manifest(value: dict[str, Any]) -> None:
    table = value["tensors"]
    count = len(table["names"])
    good = all(len(table[key]) == count for key in ("dtypes", "shapes", "groups"))
    good &= len(set(table["names"])) == count and all(dtype in DTYPES for dtype in table["dtypes"])
    good &= all(len(shape) <= 64 and all(natural(size) for size in shape) for shape in table["shapes"])
    good &= all(natural(group) and group < len(value["groups"]) for group in table["groups"])
    names = set(table["names"])
    good &= all(alias not in names and target in names for alias, target in table["aliases"].items())
    good &= all(natural(value[key]) for key in ("step", "incarnation")) and natural(value["world"]["size"])
    good &= all(_ID.match(value[key]) is not None for key in ("run", "save"))
    good &= len({entry["name"] for entry in value["files"]}) == len(value["files"])
    good &= all(group["kind"] in ("whole", "shards", "per-rank") and group["ranks"] for group in value["groups"])
    good &= "writer" not in value["world"] or _ID.match(str(value["world"]["writer"])) is not None
    good &= all(type(number) in (int, float) or list(number) == ["$float"] for number in value["metrics"].values())
    firsts = {name.split("/")[0] for name in (*value["parts"], *table["names"], *table["aliases"])}
    good &= all(_PART.match(first) is not None and first not in ("rng", "step") for first in firsts)
    good &= all(type(part["kind"]) is str for part in value["parts"].values())
    for named in (part.get("composites", {}) for part in value["parts"].values()):
        good &= type(named) is dict and all(type(one.get("kind")) is str for one in named.values())
    good &= all(math.prod(size or 1 for size in shape) <= 1 << 62 for shape in table["shapes"])
    good &= policy_fits(value.get("policy", {}))
    check(good, "manifest", "a member is not what it must be")


# "The line of a run"


def committed(root: str) -> dict[str, dict[str, Any]]:
    """Folder -> manifest of every committed step, of copies the one with the usual name or else the first."""
    found = {}
    for folder in sorted(os.listdir(root)):
        if folder.startswith(".") or folder == "pins" or not os.path.isdir(os.path.join(root, folder)):
            continue
        try:
            manifest = read_manifest(os.path.join(root, folder, "manifest.json"))
            for entry in manifest["files"]:
                path = os.path.join(root, *(entry.get("source") or [folder, entry["name"]]))
                check(os.path.isfile(path) and not os.path.islink(path), "missing-file", path)
                check(os.path.getsize(path) == entry["bytes"], "length", path)
        except (Damaged, Unsupported):
            continue
        found[folder] = manifest
    chosen: dict[str, str] = {}
    for folder, m in found.items():
        if m["save"] not in chosen or folder == f"step-{m['step']:08d}":
            chosen[m["save"]] = folder
    return {folder: found[folder] for folder in chosen.values()}


def newer_format(root: str) -> bool:
    """Whether who asks for the newest step must be refused."""
    numbers = [-1]
    for folder in os.listdir(root):
        try:
            if _STEP.match(folder):
                read_manifest(os.path.join(root, folder, "manifest.json"))
        except Unsupported:
            numbers.append(int(folder[5:]))
        except Damaged:
            pass
    return max(numbers) > max(line(root), default=-1)


def line(root: str) -> dict[int, str]:
    """Step -> folder of the steps on the line of the root's run."""
    steps = committed(root)
    if not steps:
        return {}
    run = max(steps.values(), key=lambda m: (m["incarnation"], m["step"]))["run"]
    mine = {folder: m for folder, m in steps.items() if m["run"] == run}
    saves = [(m["incarnation"], m["step"]) for m in mine.values()]
    (at, most), on = max(saves), dict[int, str]()
    while True:
        saved = {folder: m for folder, m in mine.items() if m["incarnation"] == at}
        on = {m["step"]: folder for folder, m in sorted(saved.items()) if m["step"] <= most} | on
        starts = [(m["parent"]["step"], m["parent"]["incarnation"]) for m in saved.values() if m["parent"]]
        if not starts:
            return on
        most, parent = min(most, max(starts)[0]), max(starts)[1]
        if parent >= at or parent not in dict(saves):
            parent = max((i for i, step in saves if step <= most and i < min(parent, at)), default=-1)
        at = parent


def pins(root: str) -> set[int]:
    folder = os.path.join(root, "pins")
    listed = os.listdir(folder) if os.path.isdir(folder) else []
    return {int(name[5:-5]) for name in listed if name.endswith(".json") and _STEP.match(name[:-5])}


# "rank-NNNNN.json" and "Data files"


def read(root: str, folder: str) -> Checkpoint:
    """The checkpoint in `folder`, every byte of it checked. Raises Damaged or Unsupported."""
    manifest = read_manifest(os.path.join(root, folder, "manifest.json"))
    contents: dict[str, bytes] = {}
    for entry in manifest["files"]:
        try:
            contents[entry["name"]] = read_file(root, folder, entry)
        except OSError:
            raise Damaged("missing-file", entry["name"]) from None
        check(len(contents[entry["name"]]) == entry["bytes"], "length", entry["name"])
    for entry in manifest["files"]:
        check(digest(contents[entry["name"]]) == entry["xxh3_128"], "digest", entry["name"])
    indexes = [parse_json(data, "index") for name, data in contents.items() if name.endswith(".json")]
    world = manifest["world"]["size"]
    check(sorted(index["rank"] for index in indexes) == list(range(world)), "index", "not one for each rank")
    found: dict[int, list[tuple[int, Any, Any, bytes]]] = {}
    for index in indexes:
        check(index["format"] == 1 and index["save"] == manifest["save"], "index", "of another save")
        check_files(index, contents)
        for number, box, order, data in pieces(index, manifest, contents):
            found.setdefault(number, []).append((index["rank"], box, order, data))
    tensors = assemble(manifest, found)
    composites = assemble_composites(manifest, tensors)
    values = {index["rank"]: Values(tensors | composites, index["rank"]).all(index["values"]) for index in indexes}
    return Checkpoint(manifest, tensors, values, composites)


def check_files(index: dict[str, Any], contents: dict[str, bytes]) -> None:
    for file in index["files"]:
        check(len(contents.get(file["name"], b"")) == file["bytes"], "index", file["name"])
        data, size = contents[file["name"]], file["block"]
        check(size % 4096 == 0 and 0 < size <= 1 << 30, "index", "block")
        blocks = [digest(data[i : i + size]) for i in range(0, len(data), size)]
        check(blocks == file["blocks"], "digest", "a block")
        header = data[: file["header_bytes"]]
        check(digest(header) == file["header_xxh3_128"], "header", "its digest")
        (length,) = struct.unpack("<Q", header[:8])
        check(8 + length == len(header) and length <= 100_000_000, "header", "its length")
        position = 0
        entries = parse_json(header[8:], "header")
        entries.pop("__metadata__", None)
        for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
            check(entry["data_offsets"][0] == position, "header", "a hole")
            position = entry["data_offsets"][1]
            item = HEADER_SIZES.get(entry["dtype"], -1)
            check(position - entry["data_offsets"][0] == item * math.prod(entry["shape"]), "header", "an entry")
        check(len(header) + position == len(data), "header", "its end")


def pieces(index: dict[str, Any], manifest: dict[str, Any], contents: dict[str, bytes]) -> list[Any]:
    table, columns = manifest["tensors"], index["pieces"]
    ends = [file["header_bytes"] for file in index["files"]]
    result = []
    keys = ("file", "start", "bytes", "tensor", "box", "dim_order", "xxh3_128")
    check(len({len(columns[key]) for key in keys}) == 1, "index", "columns")
    for file, start, size, number, box, order, mark in sorted(
        zip(*(columns[key] for key in keys), strict=True), key=lambda row: row[:3]
    ):
        shared = index["files"][file].get("shared", False)
        check(start == ends[file] or (shared and start > ends[file]), "index", "pieces overlap or leave a hole")
        ends[file] = start + size
        shape = table["shapes"][number]
        offsets, sizes = box or [[0] * len(shape), shape]
        fits = all(o + n <= m for o, n, m in zip(offsets, sizes, shape, strict=True))
        item = DTYPES[table["dtypes"][number]][0]
        check(fits and size == math.prod(sizes) * item, "index", "a piece's box or length")
        check(order is None or sorted(order) == list(range(len(shape))), "index", "dim_order")
        data = contents[index["files"][file]["name"]][start : start + size]
        check(digest(data) == mark, "digest", table["names"][number])
        result.append((number, (tuple(offsets), tuple(sizes)), order, data))
    for end, file in zip(ends, index["files"], strict=True):
        check(end == file["bytes"] or (file.get("shared", False) and end < file["bytes"]), "index", "the end")
    return result


def assemble(manifest: dict[str, Any], found: dict[int, Any]) -> dict[str, Tensor | dict[int, Tensor]]:
    table = manifest["tensors"]
    tensors: dict[str, Tensor | dict[int, Tensor]] = {}
    for number, name in enumerate(table["names"]):
        dtype, shape = table["dtypes"][number], tuple(table["shapes"][number])
        group, held = manifest["groups"][table["groups"][number]], found.get(number, [])
        ranks = sorted(rank for rank, *_ in held)
        if group["kind"] == "per-rank":
            check(ranks == sorted(group["ranks"]), "coverage", name)
            tensors[name] = {row[0]: join(dtype, shape, [row], name) for row in held}
        else:
            whole = group["kind"] == "whole"
            check(ranks == group["ranks"][:1] if whole else set(ranks) <= set(group["ranks"]), "coverage", name)
            tensors[name] = join(dtype, shape, held, name)
    for alias, name in table["aliases"].items():
        tensors[alias] = tensors[name]
    return tensors


def assemble_composites(manifest: dict[str, Any], tensors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for part in manifest["parts"].values():
        for name, description in part.get("composites", {}).items():
            inner = {full[len(name) + 1 :]: tensor for full, tensor in tensors.items() if full.startswith(f"{name}/")}
            found[name] = {**description, "components": inner}
    return found


def join(dtype: str, shape: tuple[int, ...], held: list[Any], name: str) -> Tensor:
    item = DTYPES[dtype][0]
    whole = np.zeros((*shape, item), np.uint8)
    times = np.zeros(shape, np.int64)
    for _, (offsets, sizes), _, data in held:
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        whole[where] = np.frombuffer(data, np.uint8).reshape(*sizes, item)
        times[where] += 1
    check(bool(held) and bool((times == 1).all()), "coverage", name)
    order = held[0][2]
    return Tensor(dtype, shape, None if order is None else tuple(order), whole.tobytes())
