"""The golden checkpoint of a real manager: written again today it has the same bytes, and it still resumes."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import reader_from_text as text
import torch

import ckpt
from ckpt import CheckpointManager
from ckpt.capture.rebuild import decode_with
from ckpt.errors import CorruptCheckpointError
from ckpt.format.manifest import Manifest

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden" / "v1-manager"
FOLDER = "step-00000004"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("golden_manager", GOLDEN.parent / "manager.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


golden = _load()


def test_a_manager_of_today_writes_the_bytes_it_wrote_then(tmp_path: Path) -> None:
    """Ids, times and the machine apart, as the text's rule of determinism says."""
    golden.write(tmp_path)
    then, now = GOLDEN / FOLDER, tmp_path / FOLDER
    data = "rank-00000.safetensors"
    assert (now / data).read_bytes() == (then / data).read_bytes()
    indexes = [json.loads((folder / "rank-00000.json").read_bytes()) for folder in (then, now)]
    manifests = [json.loads((folder / "manifest.json").read_bytes()) for folder in (then, now)]
    if manifests[0]["environment"]["torch"] != manifests[1]["environment"]["torch"]:
        for index in indexes:  # their options and attributes follow the version of torch
            del index["values"]["optimizer"], index["values"]["scheduler"]
    for index, manifest in zip(indexes, manifests, strict=True):
        assert index.pop("save") == manifest["save"]
        for key in ("run", "save", "time", "timings", "environment", "xxh3_128"):
            del manifest[key]
        del manifest["world"]["writer"], manifest["files"][0]
    assert json.dumps(indexes[0]) == json.dumps(indexes[1])
    assert json.dumps(manifests[0]) == json.dumps(manifests[1])


def test_two_saves_of_one_state_differ_in_ids_and_times_only(tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    for name in ("a", "b"):
        golden.write(tmp_path / name)
        step = tmp_path / name / FOLDER
        save = Manifest.parse((step / "manifest.json").read_bytes()).save.encode()
        files.append({path.name: path.read_bytes().replace(save, b"") for path in step.glob("rank-*")})
    assert files[0] == files[1] and len(files[0]) == 2


def test_it_resumes_into_fresh_objects_bit_for_bit(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "root")
    parts = golden.state()
    with torch.no_grad():
        for module in (parts["model"], parts["average"], parts["nets"]["side"]):
            for tensor in module.state_dict(keep_vars=True).values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
    with CheckpointManager(tmp_path / "root", parts) as manager:
        assert manager.resume() == golden.STEP
        assert manager.steps() == (golden.STEP,)
    stored = text.read(str(GOLDEN), FOLDER)
    live = {f"model/{key}": value for key, value in parts["model"].state_dict().items()}
    live |= {f"average/{key}": value for key, value in parts["average"].state_dict().items()}
    live["nets/side/weight"] = parts["nets"]["side"].weight
    for key, p in parts["model"].named_parameters():
        live |= {f"optimizer/state/{key}/{name}": value for name, value in parts["optimizer"].state.get(p, {}).items()}
    compared = 0
    for name, tensor in live.items():
        if isinstance(tensor, torch.Tensor):
            kept = stored.tensors[name]
            assert isinstance(kept, text.Tensor)
            logical = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            assert bytes(logical.tolist()) == kept.data, name
            compared += 1
    assert compared == len([name for name in stored.tensors if not name.startswith("progress/")])
    progress = parts["progress"]
    assert progress["seen"] == (1, 2) and math.isinf(progress["best"]) and progress["array"].dtype == "int16"
    assert progress["table"][1].tolist() == [0, 1, 2] and progress["table"]["1"] == 2.5


def test_ckpt_read_gives_the_tree_of_it() -> None:
    tree = ckpt.read(GOLDEN)
    stored = text.read(str(GOLDEN), FOLDER)
    weight = tree["model"]["conv.weight"]
    kept = stored.tensors["model/conv.weight"]
    assert isinstance(kept, text.Tensor)
    assert bytes(weight.contiguous().reshape(-1).view(torch.uint8).tolist()) == kept.data
    assert weight.stride() == (27, 1, 9, 3)
    assert tree["model"]["tied.weight"].data_ptr() == tree["model"]["head.weight"].data_ptr()
    assert set(tree["optimizer"]["state"]["conv.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert tree["optimizer"]["param_groups"][0]["params"] == ["conv.weight"]
    assert tree["progress"]["history"] == {"a": [1.5, None]}


PAYLOADS: dict[str, list[Any]] = {
    "$device": [0, -1, "", "x", "cpu:-1", "cuda:99999999999", None],
    "$dtype": ["nn", "Tensor", "", None, 5],
    "$size": [[-1.5], ["a"], 5],
    "$ndarray": [["a", "<f4", [1 << 40]], ["a", "<f4", [-1]], ["a", "O", [1]], ["a", "(1,", [1]], ["a"], 5],
    "$npscalar": [["float64", "AAA="], ["float64", ""], ["O", "AAAAAAAAAAA="], ["(1,", ""], "x", None],
    "$npdtype": ["(1,", "bogus", 10**30],
    "$u8": ["AAA", 5, None],
    "$other": [1],
}


@pytest.mark.parametrize(("tag", "payload"), [(tag, each) for tag, listed in PAYLOADS.items() for each in listed])
def test_a_malformed_payload_of_torch_or_numpy_is_damage(tag: str, payload: Any) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_with([{tag: payload}], lambda name, device: torch.empty(0, dtype=torch.uint8))
    assert caught.value.kind == "value"


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
def test_ckpt_reads_the_corners() -> None:
    root = GOLDEN.parent / "v1-corners"
    assert not ckpt.verify(root) and [step.step for step in ckpt.verify(root).steps] == [10, 20, 30]
    with CheckpointManager(root) as manager:
        assert manager.steps() == (10, 20, 30)
    tree = ckpt.read(root)
    model, stored = tree["model"], text.read(str(root), "of-the-paper")
    for layout, dense in (("csc", (3, 4)), ("bsr", (4, 6)), ("bsc", (4, 6))):
        assert str(model[layout].layout) == f"torch.sparse_{layout}" and model[layout].shape == dense
    kept = stored.tensors["model/w"]
    assert isinstance(kept, text.Tensor) and bytes(model["w"].view(torch.uint8).flatten().tolist()) == kept.data
    assert model["w#1"].shape == (1,) and model["$note"] == (1, 2) and set(model["flat"]) == {"a", "b"}
    quantized = tree["nets"]["tower"]["q"]
    assert quantized.dequantize()[:, 0].tolist() == [-64.0, 1.0] and quantized.q_per_channel_axis() == 0
    assert [value.shape for value in tree["extra"].values()] == [(1,), (2,), (3,), (4,)]
    group = tree["optimizer"]["param_groups"][0]
    assert (group["params"], group["$odd"]) == (["0.0"], 1)
    assert set(tree["optimizer"]["state"]["0.0"]) == {"exp_avg", "step", "host"}
    assert tree["bits"]["state"]["state"] == (1 << 120) + 5
    assert ckpt.inspect(root).world["size"] == 3 and ckpt.diff(root / "copy-of-10", root / "step-00000010").equal


@pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_ckpt_read_gives_every_dtype_and_value_of_the_hand_made_one() -> None:
    root = GOLDEN.parent / "v1-types"
    tree, stored = ckpt.read(root), text.read(str(root), "step-00000007")
    for name, kept in stored.tensors.items():
        if name.startswith("model/dtype."):
            tensor = tree["model"][name.removeprefix("model/")]
            assert isinstance(kept, text.Tensor) and str(tensor.dtype) == f"torch.{kept.dtype}"
            assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == kept.data
    assert tree["model"]["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert tree["model"]["caf\u00e9 /%\U0001f600"].shape == (3,)
    assert tree["model"]["sparse"].is_sparse and tree["model"]["quantized"].q_zero_point() == 3
    assert tree["extra"]["raw"]["composite"].layout is torch.sparse_csr
    assert tree["extra"]["keys"] == stored.values[0]["extra"]["keys"]
    assert tree["extra"]["raw"]["big_endian"].dtype == ">i2"
