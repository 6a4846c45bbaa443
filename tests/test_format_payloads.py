"""Payloads that only torch or numpy can make into values: checked without them, as they themselves would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import CheckpointManager, StateDict
from ckpt.format.payloads import check, itemsize_of

pytestmark = pytest.mark.quick

KINDS = [
    "?", "u1", "<u2", ">u4", "<u8", "i1", ">i2", "<i4", "<i8", "<f2", ">f4", "<f8", "<c8", ">c16", "<U3", ">U1", "S4",
    "S0", "<M8[s]", ">M8[25us]", "<m8", "<m8[ns]", "M8[D]",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_numpy_type_that_can_be_saved_is_known_by_both_spellings(kind: str) -> None:
    dtype = np.dtype(kind)
    assert itemsize_of(dtype.str) == dtype.itemsize
    if dtype.kind not in "US" and dtype.isnative:
        assert itemsize_of(dtype.name) == dtype.itemsize


@pytest.mark.parametrize(
    "kind",
    ["O", "|O", "V4", "|V4", "<f16", "longdouble", "=f4", "float8", "int7", "<i3", "(1,", "", None, 5, "<U", "f4"],
)
def test_a_type_that_cannot_be_saved_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="numpy type"):
        itemsize_of(kind)


def values() -> dict[str, Any]:
    arrays = {f"array {kind}": np.zeros((2, 3), kind) for kind in KINDS}
    scalars = {f"scalar {kind}": np.zeros(1, kind)[0] for kind in KINDS}
    rest = {
        "types": [np.dtype(kind) for kind in KINDS], "dtypes": [torch.bfloat16, torch.qint8, torch.bits8],
        "sizes": [torch.Size(()), torch.Size([2, -1])], "devices": [torch.device("cpu"), torch.device("cuda:1")],
        "tensors": [torch.ones(2), torch.zeros(0)], "empty": np.zeros((0, 3), "<U3"), "text": np.str_("a"),
    }  # fmt: skip
    return {**arrays, **scalars, **rest}


def test_whatever_is_saved_is_sound_and_comes_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"values": StateDict(values())}, async_save=False) as manager:
        manager.save(1)
    assert not ckpt.verify(tmp_path)
    back = ckpt.read(tmp_path)["values"]
    for key, value in values().items():
        if isinstance(value, (np.ndarray, np.generic)):
            assert back[key].dtype == value.dtype and back[key].tobytes() == value.tobytes()
    assert back["types"] == values()["types"] and back["sizes"] == values()["sizes"]
    assert back["dtypes"] == values()["dtypes"] and back["devices"] == values()["devices"]


@pytest.mark.parametrize(
    ("tag", "payload"),
    [
        ("$tensor", 1), ("$tensor", ["a"]), ("$tensor", ["a", ""]), ("$tensor", [1, "cpu"]), ("$ndarray", ["a", "<f4"]),
        ("$ndarray", ["a", "O", [1]]), ("$ndarray", ["a", "<f4", [-1]]), ("$ndarray", ["a", "<f4", [True]]),
        ("$npscalar", ["float64", "AAAA"]), ("$npscalar", ["float64", "AAAAAAAAAAA"]), ("$npscalar", "x"),
        ("$dtype", "Tensor"), ("$dtype", None), ("$size", [0.5]), ("$size", 1), ("$device", "cuda:"),
        ("$device", "cpu:-1"), ("$u8", [1]), ("$u8", "YW\nI="), ("$part", 1), ("$opaque", "x"), ("$zz", 1),
    ],
)  # fmt: skip
def test_a_payload_of_another_form_is_refused(tag: str, payload: Any) -> None:
    with pytest.raises(ValueError):
        check(tag, payload)
