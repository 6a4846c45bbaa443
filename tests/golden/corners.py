"""Golden checkpoints of what the others leave out: shared files, rare composites, small blocks, odd names, copies.

Run from tests/ as a module (`python -m golden.corners`) it writes what is missing.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

from golden.make import CONTENT, HERE, MT19937, Golden, Tensor

from ckpt.format import jsontext, names
from ckpt.format.manifest import Parent, PlacementGroup
from ckpt.format.values import encode
from ckpt.geometry import Box

CONTENT |= {
    "model/csc/outer": struct.pack("<5q", 0, 1, 1, 2, 3),
    "model/csc/inner": struct.pack("<3q", 0, 2, 1),
    "model/bsr/outer": struct.pack("<3q", 0, 1, 2),
    "model/bsr/inner": struct.pack("<2q", 1, 0),
    "model/bsc/outer": struct.pack("<3q", 0, 1, 2),
    "model/bsc/inner": struct.pack("<2q", 1, 0),
    "nets/tower/q/elements": struct.pack("<6b", -128, -1, 0, 1, 2, 127),
    "nets/tower/q/scales": struct.pack("<2d", 0.5, 0.25),
    "nets/tower/q/zero_points": struct.pack("<2q", 0, -3),
}
NAN = {"$float": "7ff8000000000001"}
FINGERPRINT = {"code": "0" * 32, "values": "1" * 32, "varying": False}
PCG64 = {
    "bit_generator": "PCG64", "state": {"state": (1 << 120) + 5, "inc": (1 << 100) + 3}, "has_uint32": 0, "uinteger": 0,
}  # fmt: skip
SCALER = {
    "scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 1,
    "used": True,
}  # fmt: skip


def _tensors() -> dict[str, Tensor]:
    """Group 0 is whole, in the index of rank 1 of the ranks (1, 0); group 1 whole on rank 0; group 2 shards."""
    rows: list[Box | None] = [Box((0, 0), (1, 2)), Box((1, 0), (1, 2))]
    return {
        "model/other": Tensor("float32", (3,), None, 0, {1: [None]}),
        "model/big": Tensor("float32", (1500,), None, 1),
        "model/w": Tensor("float32", (2, 2), None, 2, {0: rows}),
        "model/w#1": Tensor("float32", (1,), None, 1),
        "model/csc/outer": Tensor("int64", (5,), None, 1),
        "model/csc/inner": Tensor("int64", (3,), None, 1),
        "model/csc/values": Tensor("float32", (3,), None, 1),
        "model/bsr/outer": Tensor("int64", (3,), None, 1),
        "model/bsr/inner": Tensor("int64", (2,), None, 1),
        "model/bsr/values": Tensor("float32", (2, 2, 3), None, 1),
        "model/bsc/outer": Tensor("int64", (3,), None, 1),
        "model/bsc/inner": Tensor("int64", (2,), None, 1),
        "model/bsc/values": Tensor("float32", (2, 2, 3), None, 1),
        "model/flat/a": Tensor("float32", (2,), None, 1),
        "model/flat/b": Tensor("int8", (3,), None, 1),
        "optimizer/state/0.0/exp_avg": Tensor("float32", (2, 2), (1, 0), 1),
        "nets/tower/q/elements": Tensor("int8", (2, 3), None, 1),
        "nets/tower/q/scales": Tensor("float64", (2,), None, 1),
        "nets/tower/q/zero_points": Tensor("int64", (2,), None, 1),
        "extra/%-": Tensor("uint8", (1,), None, 1),
        "extra/%uDCFF": Tensor("uint8", (2,), None, 1),
        "extra/%nan": Tensor("uint8", (3,), None, 1),
        "extra/%nan%2": Tensor("uint8", (4,), None, 1),
    }


def _parts() -> dict[str, dict[str, Any]]:
    composites = {
        "model/csc": {"kind": "csc", "shape": [3, 4]},
        "model/bsr": {"kind": "bsr", "shape": [4, 6]},
        "model/bsc": {"kind": "bsc", "shape": [4, 6]},
        "model/flat": {
            "kind": "flatten", "shape": [2], "dtype": "float32", "context": {"mode": {"$opaque": "Mode"}, "n": 2},
        },
    }  # fmt: skip
    quantized = {"kind": "quantized", "dtype": "qint8", "shape": [2, 3], "axis": 0}
    return {
        "model": {"kind": "module", "composites": composites},
        "optimizer": {"kind": "optimizer"},
        "scheduler": {"kind": "scheduler", "functions": {"lr_lambdas/0": FINGERPRINT}},
        "scaler": {"kind": "scaler"},
        # The composites of a part inside a container stand in the entry of the container.
        "nets": {"kind": "container", "composites": {"nets/tower/q": quantized}},
        "nets/tower": {"kind": "module"},
        "extra": {"kind": "object"},
        "bits": {"kind": "generator", "family": "numpy:PCG64"},
        "old_bits": {"kind": "generator", "family": "numpy-legacy:MT19937"},
    }


def _values() -> dict[str, Any]:
    group = {
        "names": ["0.0"],
        "options": {"$dict": [["lr", 0.5], ["$odd", 1]]},
        "functions": {"rule": FINGERPRINT},
        "layouts": [[[2, 2], [1, 0]]],
        "device": "cuda",
        "host": ["step"],
    }
    return {
        "model": {"extra": {"$dict": [["$note", {"$tuple": [1, 2]}]]}, "metadata": {"": {"": {"version": 2}}}},
        "optimizer": {
            "keys": "position",
            "defaults": ["$odd", "lr"],
            "stepped": True,
            "groups": [group],
            "state": {"0.0": {"step": 3, "host": {"$dict": [["$h", None]]}}},
            "shared": {"$dict": [[1, "one"]]},
        },
        "scheduler": {"last_epoch": 3, "lr_lambdas": [None]},
        "scaler": SCALER,
        "nets": {"tower": {"$part": "nets/tower"}, "count": 3},
        "nets/tower": {},
        "extra": {
            "$dict": [
                ["", {"$tensor": "extra/%-"}],
                [{"$str": "7bO/"}, {"$tensor": "extra/%uDCFF"}],
                [NAN, {"$tensor": "extra/%nan"}],
                [NAN, {"$tensor": "extra/%nan%2"}],
            ]
        },
        "bits": encode(PCG64),
        "old_bits": encode({"bit_generator": "MT19937", "state": MT19937, "has_gauss": 0, "gauss": 0.0}),
        "rng": {"torch": {"$u8": "AA=="}},
    }


def corners() -> dict[str, bytes]:
    """Three ranks, the last without a tensor, in blocks of 4096 bytes; a step with a copy beside it; a renamed one."""
    main = Golden(
        30,
        "40" * 16,
        _tensors(),
        _parts(),
        {0: _values(), 1: {"rng": {"torch": {"$u8": "AQ=="}}}, 2: {"rng": {"torch": {"$u8": "Ag=="}}}},
        groups=(PlacementGroup("whole", (1, 0)), PlacementGroup("whole", (0,)), PlacementGroup("shards", (0, 1, 2))),
        world=3,
        block=4096,
    )
    out = {f"of-the-paper/{name}": data for name, data in main.files().items()}
    small = {"model/w": Tensor("float32", (2,))}
    for step, save, folders in ((10, "41", ("copy-of-10", "step-00000010")), (20, "42", ("renamed",))):
        golden = Golden(step, save * 16, small, {"model": {"kind": "module"}}, {0: {"model": {}}})
        for folder in folders:
            out |= {f"{folder}/{name}": data for name, data in golden.files().items()}
    return out


def shared() -> dict[str, bytes]:
    """Names unique to a save, as on object stores; the second step takes a frozen tensor from the first one's file; a
    third was resumed from the first, so that the second is off the line; the first is pinned."""
    saves = [f"{n:02x}" * 16 for n in (0x31, 0x32, 0x33)]
    frozen, moving = Tensor("float32", (4,)), Tensor("float32", (2, 2))
    parts = {"model": {"kind": "module"}}
    out: dict[str, bytes] = {}
    first = Golden(100, saves[0], {"model/frozen": frozen, "model/w": moving}, parts, {0: {"model": {}}})
    first.suffix = f"-{saves[0]}"
    made = first.files()
    data = f"rank-00000-{saves[0]}.safetensors"
    earlier = ("step-00000100", data)
    for step, save, incarnation, parent in ((200, saves[1], 1, None), (150, saves[2], 2, Parent(100, 1, saves[0]))):
        nowhere = Tensor("float32", (4,), boxes={})
        golden = Golden(step, save, {"model/frozen": nowhere, "model/w": moving}, parts, {0: {"model": {}}})
        golden.suffix, golden.incarnation, golden.parent = f"-{save}", incarnation, parent
        golden.shared, golden.source = ("model/frozen", made[data], "shared-0.safetensors"), earlier
        out |= {f"{names.step_name(step)}/{name}": content for name, content in golden.files().items()}
    out |= {f"step-00000100/{name}": content for name, content in made.items()}
    return out | {"pins/step-00000100.json": jsontext.dump({"step": 100, "note": "the paper's table 2"})}


GOLDENS = {"v1-shared": shared, "v1-corners": corners}


def main() -> int:
    for name, build in GOLDENS.items():
        for path, data in () if (HERE / name).exists() else build().items():
            target = HERE / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return 0


if __name__ == "__main__":
    assert names.FORMAT_VERSION == 1
    sys.exit(main())
