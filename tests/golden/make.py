"""Builds the golden checkpoints; run as a script it writes missing ones, and never one that exists.

Ids, times and bytes are fixed: a difference means that today's code writes a format that needs another version.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.format import coverage, names
from ckpt.format.datafile import PieceSpec, header_keys, lay_out
from ckpt.format.digest import block_digests, digest, piece_digests
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.index import DataFile, Piece, RankIndex
from ckpt.format.manifest import FileEntry, Manifest, Parent, PlacementGroup, TensorTable
from ckpt.format.values import encode
from ckpt.geometry import Box

HERE = Path(__file__).resolve().parent
RUN = "00112233445566778899aabbccddeeff"
ENVIRONMENT = {"ckpt": "0.1.0", "torch": "2.13.0", "python": "3.11.9", "threads": 1, "deterministic": False}


# Positions of sparse tensors, which have to fit their shapes.
POSITIONS = {
    "model/sparse/indices": (0, 1, 0, 299),
    "extra/raw/csr/outer": (0, 1, 2, 2),
    "extra/raw/csr/inner": (7, 299),
}


CONTENT: dict[str, bytes] = {}  # of other tensors whose bytes have to make sense


def fill(name: str, dtype: str, count: int) -> bytes:
    """The bytes of a tensor: a function of its name alone, so that a swap shows."""
    if name in CONTENT:
        return CONTENT[name]
    if name in POSITIONS:
        return struct.pack(f"<{count}q", *POSITIONS[name])
    start = sum(name.encode())
    size = count * ITEMSIZE[dtype]
    return bytes((start + 7 * i) & (1 if dtype == "bool" else 0xFF) for i in range(size))


@dataclass
class Tensor:
    """dim_order: as in the index; group: number of the placement group; ranks: on which ranks there is a copy or a
    piece; boxes: per rank, the boxes it writes (None: the whole tensor)."""

    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...] | None = None
    group: int = 0
    boxes: dict[int, list[Box | None]] = field(default_factory=lambda: {0: [None]})
    file: int = 0

    def bytes_on(self, name: str, rank: int | None = None) -> bytes:
        """All bytes of the tensor in row-major order; on `rank`, where each rank has its own."""
        label = name if rank is None else f"{name}@{rank}"
        return fill(label, self.dtype, math.prod(self.shape))

    def piece(self, name: str, rank: int | None, box: Box) -> bytes:
        data, item = self.bytes_on(name, rank), ITEMSIZE[self.dtype]
        where = [0]
        for size, offset, length in zip(self.shape, box.offsets, box.sizes, strict=True):
            where = [base * size + i for base in where for i in range(offset, offset + length)]
        return b"".join(data[i * item : (i + 1) * item] for i in where)


@dataclass
class Golden:
    """One checkpoint: tensors, aliases, values by rank, and what the manifest says beside the tables."""

    step: int
    save: str
    tensors: dict[str, Tensor]
    parts: dict[str, dict[str, Any]]
    values: dict[int, dict[str, Any]]
    aliases: dict[str, str] = field(default_factory=dict)
    groups: tuple[PlacementGroup, ...] = (PlacementGroup("whole", (0,)),)
    incarnation: int = 1
    parent: Parent | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    world: int = 1
    block: int = names.BLOCK
    suffix: str = ""  # "-<save id>" where names are unique to the save
    shared: tuple[str, bytes, str] | None = None  # tensor, image and name of a file of an earlier step
    source: tuple[str, str] | None = None

    def files(self) -> dict[str, bytes]:
        table = self.tensors
        number = {name: i for i, name in enumerate(table)}
        out: dict[str, bytes] = {}
        entries: list[FileEntry] = []
        indexes: list[RankIndex] = []
        for rank in range(self.world):
            data, pieces = self._rank(rank, number, out)
            if rank == 0 and self.shared is not None:
                shared_file, shared_piece = self._shared(number, len(data))
                data, pieces = [*data, shared_file], [*pieces, shared_piece]
                entries.append(FileEntry(shared_file.name, shared_file.bytes, digest(self.shared[1]), self.source))
            index = RankIndex(self.save, rank, self.values.get(rank, {}), tuple(data), tuple(pieces))
            indexes.append(index)
            out[self._named(names.index_name(rank))] = index.encode(tuple(t.shape for t in table.values()))
        entries = [FileEntry(name, len(content), digest(content)) for name, content in sorted(out.items())] + entries
        manifest = Manifest(
            run=RUN,
            save=self.save,
            incarnation=self.incarnation,
            parent=self.parent,
            step=self.step,
            time=1767225600.5,
            metrics=self.metrics,
            world={"size": self.world},
            parts=self.parts,
            tensors=self._table(),
            groups=self.groups,
            files=tuple(entries),
            timings={"capture_s": 0.125, "stall_s": 0.25, "write_s": 0.5},
            environment=ENVIRONMENT,
        )
        coverage.check(manifest, indexes)
        out[names.MANIFEST] = manifest.encode()
        return out

    def _table(self) -> TensorTable:
        rows = [(name, t.dtype, t.shape, t.group) for name, t in self.tensors.items()]
        listed, dtypes, shapes, groups = zip(*rows, strict=True)
        return TensorTable(listed, dtypes, shapes, groups, self.aliases)

    def _named(self, name: str) -> str:
        stem, _, ending = name.rpartition(".")
        return f"{stem}{self.suffix}.{ending}"

    def _rank(self, rank: int, number: dict[str, int], out: dict[str, bytes]) -> tuple[list[DataFile], list[Piece]]:
        files: list[DataFile] = []
        pieces: list[Piece] = []
        last = max((t.file for t in self.tensors.values() if rank in t.boxes), default=0)
        for n in range(last + 1):
            rows = [
                (name, tensor, box or Box.whole(tensor.shape))
                for name, tensor in self.tensors.items()
                if tensor.file == n
                for box in tensor.boxes.get(rank, ())
            ]
            keys = header_keys(name for name, _, _ in rows)
            layout = lay_out(
                PieceSpec(key, tensor.dtype, box.sizes) for key, (_, tensor, box) in zip(keys, rows, strict=True)
            )
            body = []
            for i, (start, end) in zip(layout.order, layout.spans, strict=True):
                name, tensor, box = rows[i]
                body.append(tensor.piece(name, rank if self.groups[tensor.group].kind == "per-rank" else None, box))
                assert len(body[-1]) == end - start
            image = memoryview(layout.header + b"".join(body))
            marks = piece_digests(image, layout.spans)
            for i, (start, end), mark in zip(layout.order, layout.spans, marks, strict=True):
                name, tensor, box = rows[i]
                pieces.append(Piece(number[name], n, start, end - start, box, tensor.dim_order, mark))
            name = self._named(names.data_name(rank, n))
            header = digest(layout.header)
            blocks = tuple(digest(image[i : i + self.block]) for i in range(0, len(image), self.block))
            files.append(DataFile(name, len(image), layout.data_start, header, self.block, blocks))
            out[name] = bytes(image)
        return files, pieces

    def _shared(self, number: dict[str, int], file: int) -> tuple[DataFile, Piece]:
        assert self.shared is not None
        name, image, stored_as = self.shared
        content = self.tensors[name].bytes_on(name)
        start = image.index(content, names.ALIGN)
        header, blocks = digest(image[: names.ALIGN]), block_digests(memoryview(image))
        data = DataFile(stored_as, len(image), names.ALIGN, header, names.BLOCK, blocks, shared=True)
        return data, Piece(number[name], file, start, len(content), Box.whole((4,)), None, digest(content))


def example() -> dict[str, bytes]:
    golden = Golden(
        3,
        "000102030405060708090a0b0c0d0e0f",
        {"model/weight": Tensor("float32", (2, 3)), "model/steps": Tensor("int64", ())},
        {"model": {"kind": "module"}, "progress": {"kind": "object"}},
        {0: {"model": {}, "progress": {"epoch": 1, "seen": {"$tuple": [2, 3]}}}},
        metrics={"loss": 0.25},
    )
    return {f"{names.step_name(3)}/{name}": data for name, data in golden.files().items()}


# Every tag of the closed set. What stands under "raw" is spelled by the rooms that know tensors and arrays.
VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, (1 << 53) - 1, 1 << 53, -(1 << 200)],
    "floats": [0.5, -0.0, 1e-310, 1.7976931348623157e308, math.inf, -math.inf],
    "nan": math.nan,
    "text": 'caf\u00e9 \U0001f600 \x00 " \\ /',
    "surrogate": "\udcff",
    "dict": {"a": 1, "": 2},
    "keys": {1: "int", "1": "str", (1, 2): "tuple", None: "none", 2.5: "float", b"b": "bytes"},
    "bool_key": {True: "bool"},
    "dollar": {"$int": "not a tag"},
    "tuple": (1, (), [2]),
    "odict": OrderedDict(b=1, a=2),
    "counter": Counter({5: 2, "x": 1}),
    "defaultdict": defaultdict(list, {"a": [1]}),
    "deque": deque([1, 2], maxlen=3),
    "unbounded": deque([1]),
    "set": {3, 1, 2, "z"},
    "frozenset": frozenset({(1, 2), "a"}),
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "complex": complex(0.5, -math.inf),
    "slice": slice(1, None, 2),
    "range": range(0, 10, 3),
}
RAW: dict[str, Any] = {
    "tensor": {"$tensor": "extra/raw/tensor"}, "elsewhere": {"$tensor": ["extra/raw/elsewhere", "cuda:1"]},
    "composite": {"$tensor": "extra/raw/csr"}, "array": {"$ndarray": "extra/raw/array"},
    "big_endian": {"$ndarray": ["extra/raw/big_endian", ">i2", [2, 2]]}, "dtype": {"$dtype": "bfloat16"},
    "size": {"$size": [2, 3]}, "device": {"$device": "cuda:0"}, "npscalar": {"$npscalar": ["float64", "AAAAAAAA+D8="]},
    "npscalar_text": {"$npscalar": ["<U2", "YQAAAGIAAAA="]}, "npdtype": {"$npdtype": "<f4"}, "u8": {"$u8": "AAEC/w=="},
    "enum": {"$enum": {"$tuple": [1, "red"]}},
}  # fmt: skip
LOADER = {
    "seed": 7, "epoch": 1, "samples": 40, "length": 100, "shuffle": True, "tail": "pad", "drop_last": False,
    "batch_size": 5, "num_replicas": 2, "order": 1,
}  # fmt: skip
MT19937 = {"key": {"words": "<u4", "bytes": bytes(2496)}, "pos": 624}


def types() -> dict[str, bytes]:
    tensors = {f"model/dtype.{dtype}": Tensor(dtype, (2, 3)) for dtype in ITEMSIZE}
    tensors |= {
        "model/scalar": Tensor("float32", ()),
        "model/empty": Tensor("float32", (0, 3)),
        "model/conv.weight": Tensor("float32", (2, 3, 2, 2), (0, 2, 3, 1)),
        "model/t": Tensor("int16", (3, 2), (1, 0)),
        "model/caf\u00e9 %2F%25\U0001f600": Tensor("uint8", (3,)),
        "model/quantized/elements": Tensor("uint8", (2, 2)),
        "model/sparse/indices": Tensor("int64", (2, 2)),
        "model/sparse/values": Tensor("float32", (2,)),
        "optimizer/state/conv.weight/exp_avg": Tensor("float32", (2, 3, 2, 2), (0, 2, 3, 1), file=1),
        "optimizer/state/conv.weight/exp_avg_sq": Tensor("float32", (2, 3, 2, 2), (0, 2, 3, 1), file=1),
        "optimizer/state/conv.weight/step": Tensor("float32", (), file=1),
        "optimizer/groups/0/lr": Tensor("float64", (), file=1),
        "extra/raw/tensor": Tensor("float32", (2,), file=1),
        "extra/raw/elsewhere": Tensor("int64", (), file=1),
        "extra/raw/csr/outer": Tensor("int64", (4,)),
        "extra/raw/csr/inner": Tensor("int64", (2,)),
        "extra/raw/array": Tensor("float64", (2, 2), file=1),
        "extra/raw/big_endian": Tensor("uint8", (8,), file=1),
    }
    quantized = {"kind": "quantized", "dtype": "quint8", "shape": [2, 2], "scale": 0.5, "zero_point": 3}
    composites = {
        "model/quantized": quantized,
        "model/sparse": {"kind": "coo", "shape": [300, 300], "coalesced": True},
    }
    options = {"lr": {"$tensor": "optimizer/groups/0/lr"}, "betas": {"$tuple": [0.9, 0.999]}, "foreach": None}
    values = {
        "model": {"frozen": ["conv.weight"], "extra": {"_extra_state": {"version": 2}}},
        "optimizer": {
            "keys": "module",
            "defaults": ["betas", "foreach", "lr"],
            "stepped": True,
            "groups": [{"names": ["conv.weight"], "options": options}],
            "state": {},
        },
        "extra": {**encode(VALUES), "raw": RAW},
        "rng": {
            "python": encode({"version": 3, "words": bytes(range(250)) * 10, "gauss": None}),
            "numpy": encode({"bit_generator": "MT19937", "state": MT19937, "has_gauss": 0, "gauss": 0.0}),
            "torch": {"$u8": "AQIDBA=="},
            "cuda": [{"$u8": "BQY="}, {"$u8": "Bwg="}],
            "xpu": None,
            "mps": None,
        },
    }
    kinds = {"model": "module", "optimizer": "optimizer", "extra": "object"}
    parts: dict[str, dict[str, Any]] = {name: {"kind": kind} for name, kind in kinds.items()}
    parts["model"]["composites"] = composites
    parts["extra"]["composites"] = {"extra/raw/csr": {"kind": "csr", "shape": [3, 300]}}
    golden = Golden(
        7,
        "101112131415161718191a1b1c1d1e1f",
        tensors,
        parts,
        {0: values},
        {"model/head.weight": "model/conv.weight", "extra/raw/csr/values": "model/sparse/values"},
        incarnation=2,
        parent=Parent(3, 1, "000102030405060708090a0b0c0d0e0f"),
        metrics={"loss": 0.25, "nan": math.nan, "inf": math.inf, "val/acc \u00e9": -1.0},
    )
    return {f"{names.step_name(7)}/{name}": data for name, data in golden.files().items()}


def ranks() -> dict[str, bytes]:
    boxes: dict[int, list[Box | None]] = {0: [Box((0, 0), (3, 2)), Box((0, 2), (3, 3))], 1: [Box((3, 0), (1, 5))]}
    tensors = {
        "model/sharded": Tensor("bfloat16", (4, 5), None, 0, boxes),
        "model/empty": Tensor("float32", (0, 4), None, 0, {1: [None]}),
        "model/norm.running_mean": Tensor("float32", (3,), None, 1, {0: [None], 1: [None]}),
        "model/bias": Tensor("complex64", (3,), None, 2),
        "model/last": Tensor("int8", (2, 2), (1, 0), 3, {1: [None]}),
    }
    golden = Golden(
        12,
        "202122232425262728292a2b2c2d2e2f",
        tensors,
        {"model": {"kind": "module"}, "loader": {"kind": "loader"}},
        {
            rank: {"model": {}, "loader": LOADER, "rng": {"torch": {"$u8": state}}}
            for rank, state in ((0, "AQ=="), (1, "Ag=="))
        },
        groups=(
            PlacementGroup("shards", (0, 1)),
            PlacementGroup("per-rank", (0, 1)),
            PlacementGroup("whole", (0,)),
            PlacementGroup("whole", (1,)),
        ),
        world=2,
    )
    return {f"{names.step_name(12)}/{name}": data for name, data in golden.files().items()}


GOLDENS = {"v1-example": example, "v1-types": types, "v1-ranks": ranks}


def main() -> int:
    for name, build in GOLDENS.items():
        for path, data in () if (HERE / name).exists() else build().items():
            target = HERE / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
