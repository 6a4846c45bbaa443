"""What a look inside shows, what it reads for that, and what it never imports."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edges_support import DATA, counted_reads, drawn, four_ranks, net, save_run, step_dir

import ckpt
from ckpt.edges.arrays import elements, small_float
from ckpt.edges.listing import listing
from ckpt.edges.statistics import BINS

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("look") / "run"
    save_run(path, 10, 20)
    return path


def test_parts_count_elements_and_bytes_with_ties_once(root: Path) -> None:
    found = ckpt.inspect(root)
    model = net()
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    assert found.step == 20 and found.parts["model"].kind == "module"
    assert found.parts["model"].params == sum(t.numel() for t in tensors)
    assert found.parts["model"].bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert found.parts["model"].tied == 1
    trained = sum(p.numel() for p in model.parameters())
    assert found.parts["optimizer"].params == 2 * trained + len(list(model.parameters()))
    assert set(found.parts["model"].dtypes) == {"float32", "int64"}
    assert sum(tally.bytes for tally in found.dtypes.values()) == sum(part.bytes for part in found.parts.values())


def test_it_shows_where_training_stood(root: Path) -> None:
    """AUX-01: the loss scale is in it and shown; so are the learning rates and the position in the data."""
    parts = ckpt.inspect(root).parts
    assert parts["scaler"].state["scale"] == 1024.0
    assert [group["lr"] for group in parts["optimizer"].state["groups"]] == [0.00025, 0.00025]
    assert [group["weight_decay"] for group in parts["optimizer"].state["groups"]] == [0.1, 0.0]
    assert parts["scheduler"].state["last_epoch"] == 2
    assert (parts["loader"].state["epoch"], parts["loader"].state["samples"]) == (0, 16)
    assert parts["loader"].state["fraction"] == pytest.approx(0.4)
    assert ckpt.inspect(root).rng[:1] == ("python",) and "torch" in ckpt.inspect(root).rng
    text = drawn(root)
    for words in ("scale 1024", "lr 0.00025", "last_epoch 2", "16 of 40 samples (40%)", "best = inf"):
        assert words in text


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path: Path) -> None:
    """OPT-16: what cannot be resumed is marked when one looks."""
    save_run(tmp_path / "weights", 1, parts={"model": net()})
    assert "none in it: a run that has one cannot go on from here" in drawn(tmp_path / "weights")
    save_run(tmp_path / "whole", 1)
    assert "cannot go on" not in drawn(tmp_path / "whole")


def test_what_it_returns_is_frozen_and_equals_the_json(root: Path) -> None:
    found = ckpt.inspect(root, tensors=True, key="model/0.weight")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.step = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        found.parts["model"] = None  # type: ignore[index]
    for arguments in ((), ("--tensors",), ("model/0.weight",)):
        printed = run("inspect", str(root), *arguments, "--json").stdout
        key = "model/0.weight" if arguments == ("model/0.weight",) else None
        mine = ckpt.inspect(root, tensors="--tensors" in arguments, key=key).to_dict()
        assert json.loads(printed) == json.loads(json.dumps(mine, allow_nan=False))


def test_numbers_that_json_lacks_are_spelled_by_a_tag(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(tmp_path / "r", {"s": ckpt.StateDict()}, async_save=False) as manager:
        manager.save(1, metrics={"a": math.nan, "b": math.inf, "c": 1.0})
    for command in ("ls", "inspect"):
        text = run(command, str(tmp_path / "r"), "--json").stdout
        document = json.loads(text, parse_constant=pytest.fail)
        metrics = document["metrics"] if command == "inspect" else document["steps"][0]["metrics"]
        assert metrics == {"a": {"$float": "7ff8000000000000"}, "b": {"$float": "inf"}, "c": 1.0}


def test_renamed_copied_and_linked_step_folders_are_the_same_checkpoint(root: Path, tmp_path: Path) -> None:
    """CFG-09: the manifest is the truth, a folder's name is for people."""
    import shutil

    for name in ("best model", "flat", "step-00099999"):
        shutil.copytree(step_dir(root, 10), tmp_path / "copies" / name)
        assert ckpt.inspect(tmp_path / "copies" / name).step == 10
        assert ckpt.read(tmp_path / "copies" / name, keys="progress/words")["progress"]["words"] == ["a", "b"]
    (tmp_path / "latest").symlink_to(step_dir(root, 20))
    assert ckpt.inspect(tmp_path / "latest").step == 20
    assert [step.step for step in listing(tmp_path / "copies").steps] == [10]


@pytest.mark.parametrize("name", ["a[b]*{c}", "with space", "dé-ü", "-dash", "100%25"])
def test_characters_of_patterns_in_a_path_mean_themselves(tmp_path: Path, name: str) -> None:
    """FS-11: folders are listed, never globbed."""
    save_run(tmp_path / name / "run", 3)
    assert [step.step for step in listing(tmp_path / name / "run").steps] == [3]
    assert ckpt.inspect(tmp_path / name / "run").step == 3
    assert ckpt.verify(tmp_path / name / "run").ok


def test_paths_of_any_kind_are_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("HOME", str(root.parent))
    for path in (root, str(root), "run", "run/", "~/run", f"file://{root}", step_dir(root, 20), "run/step-00000020"):
        assert ckpt.inspect(path).step == 20
    save_run("memory://edges/run", 7)
    assert ckpt.inspect("memory://edges/run").step == 7
    assert ckpt.inspect("memory://edges/run/step-00000007").step == 7
    with pytest.raises(ValueError, match="chained"):
        ckpt.inspect("simplecache::memory://edges/run")


def test_a_path_that_is_neither_root_nor_step_is_not_committed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "debris" / ".tmp-step-00000003-aa").mkdir(parents=True)
    for path in ("missing", "file", "empty", "debris", "debris/.tmp-step-00000003-aa"):
        with pytest.raises(ckpt.NotCommittedError):
            ckpt.inspect(tmp_path / path)
    with pytest.raises(ckpt.NotCommittedError, match="step-00000020.*is one step's folder"):
        listing(step_dir(root, 20))


def test_debris_and_damaged_steps_are_told(tmp_path: Path) -> None:
    """TORN-01: what a killed save left behind is reported and is never taken for a checkpoint."""
    save_run(tmp_path, 10, 20)
    (tmp_path / ".tmp-step-00000030-0123").mkdir()
    (step_dir(tmp_path, 20) / DATA).unlink()
    found = ckpt.inspect(tmp_path)
    assert found.step == 10 and found.debris == (".tmp-step-00000030-0123",)
    assert [step for step, _ in found.damaged] == [20]
    assert "1 folder left by saves that never finished" in drawn(tmp_path)
    assert "step 20 is damaged" in drawn(tmp_path)
    rows = {step.step: step.state for step in listing(tmp_path, everything=True).steps}
    assert rows == {10: "line", 20: "damaged"}


def test_abandoned_steps_show_only_when_asked_for(tmp_path: Path) -> None:
    parts = save_run(tmp_path, 10, 20, 30, parts={"model": net()})
    with ckpt.CheckpointManager(tmp_path, parts, keep_last=None, async_save=False) as manager:
        manager.resume(10)
        manager.save(15)
    assert [step.step for step in listing(tmp_path).steps] == [10, 15]
    assert listing(tmp_path).abandoned == 2 and listing(tmp_path).steps[-1].newest
    states = [(step.step, step.state) for step in listing(tmp_path, everything=True).steps]
    assert states == [(10, "line"), (15, "line"), (20, "abandoned"), (30, "abandoned")]
    assert ckpt.inspect(tmp_path).step == 15
    assert ckpt.inspect(tmp_path).parent is not None and ckpt.inspect(tmp_path, step=30).step == 30


# What is read, and imported


def test_a_listing_reads_each_manifest_once_and_nothing_else(tmp_path: Path) -> None:
    save_run(tmp_path, *range(1, 8), parts={"model": net()})
    with counted_reads() as reads:
        listing(tmp_path)
    assert sorted(reads.whole) == [f"step-{step:08d}/manifest.json" for step in range(1, 8)]
    assert reads.ranges == []


def test_a_look_inside_reads_one_index_and_no_data(tmp_path: Path) -> None:
    save_run(tmp_path, *range(1, 8), parts={"model": net()})
    with counted_reads() as reads:
        ckpt.inspect(tmp_path, tensors=True)
    indexes = [path for path in reads.whole if path.endswith("rank-00000.json")]
    assert indexes == ["step-00000007/rank-00000.json"] and reads.ranges == []
    assert len(reads.whole) == 7 + 1 + 1  # the newest manifest once more, with its table


def test_a_key_reads_the_bytes_of_that_tensor_alone(root: Path) -> None:
    with counted_reads() as reads:
        ckpt.inspect(root, key="model/0.weight")
    assert reads.bytes_of(DATA) == 8 * 4 * 4


def test_looking_imports_neither_torch_nor_numpy_nor_rich(root: Path) -> None:
    forbidden = {"torch", "numpy", "rich", "fsspec", "filelock"}
    assert not forbidden & imported("ls", str(root))
    assert not forbidden & imported("ls", str(root), "--json", "--all")
    assert not forbidden & imported("inspect", str(root), "--tensors")
    assert not forbidden & imported("verify", str(root))
    assert not {"torch", "rich"} & imported("inspect", str(root), "model/0.weight")
    assert not {"torch", "rich"} & imported("diff", str(root), str(root))
    assert not {"torch", "numpy", "xxhash", "rich"} & imported("--version")


def imported(*arguments: str) -> set[str]:
    code = (
        "import sys; from ckpt.cli import main; code = main(sys.argv[1:]);"
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


# One tensor


def torch_values(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.is_complex():
        return tensor.to(torch.complex128).abs().flatten().numpy()
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.flatten().numpy()
    return tensor.to(torch.float64).flatten().numpy()


DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64",
    "complex128",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_torch_for_every_dtype(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    raw = torch.randint(0, 256, (61 * kind.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    tensor = (raw % 2 if dtype == "bool" else raw).view(kind)
    save_run(tmp_path, 1, parts={"s": ckpt.StateDict(t=tensor)})
    found = ckpt.inspect(tmp_path, key="s/t").tensor
    assert found is not None
    values = torch_values(tensor)
    assert found.nan == int(np.isnan(values).sum()) and found.inf == int(np.isinf(values).sum())
    assert found.zero == int((values == 0).sum()) and (found.numel, found.bytes) == (61, 61 * kind.itemsize)
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        assert found.min == finite.min() and found.max == finite.max()
        assert found.mean == pytest.approx(finite.astype(np.float64).mean(), rel=1e-9)
        scale = float(np.abs(finite.astype(np.float64)).max()) or 1.0
        assert found.std == pytest.approx((finite.astype(np.float64) / scale).std(ddof=1) * scale, rel=1e-9)
    assert sum(found.histogram.counts) == len(finite) and len(found.histogram.counts) in (1, BINS)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_every_code_of_an_eight_bit_float_is_the_number_torch_says(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float64).numpy()
    mine = np.array([small_float(code, dtype) for code in range(256)])
    np.testing.assert_array_equal(mine, codes)
    np.testing.assert_array_equal(elements(np.arange(256, dtype=np.uint8), dtype), codes)


def test_a_byte_of_float4_is_two_numbers() -> None:
    assert elements(np.array([0x2F], np.uint8), "float4_e2m1fn_x2").tolist() == [-6.0, 1.0]


def test_large_integers_keep_every_digit(tmp_path: Path) -> None:
    save_run(tmp_path, 1, parts={"s": ckpt.StateDict(t=torch.tensor([2**63 - 1, -(2**63), 5]))})
    found = ckpt.inspect(tmp_path, key="t").tensor
    assert found is not None and (found.min, found.max) == (-(2**63), 2**63 - 1)


def test_scalars_empty_and_all_nan_tensors_have_a_picture(tmp_path: Path) -> None:
    values = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "nan": torch.full((3,), math.nan)}
    values |= {"same": torch.ones(10), "huge": torch.tensor([-1.7e308, 1.7e308] * 5, dtype=torch.float64)}
    save_run(tmp_path, 1, parts={"s": ckpt.StateDict(**values)})
    scalar, empty, nan, same, huge = (ckpt.inspect(tmp_path, key=f"s/{key}").tensor for key in values)
    assert scalar is not None and scalar.values == (2.5,) and scalar.std is None and scalar.shape == ()
    assert empty is not None and empty.min is None and empty.histogram.counts == ()
    assert nan is not None and nan.nan == 3 and nan.mean is None
    assert same is not None and same.histogram.counts == (10,) and same.std == 0.0
    assert huge is not None and huge.mean == 0.0 and huge.histogram.counts[0] == huge.histogram.counts[-1] == 5
    for key in values:
        assert f"s/{key}" in drawn(tmp_path, key=f"s/{key}")


def test_a_key_may_be_an_end_or_a_pattern_and_a_wrong_one_names_its_neighbours(root: Path) -> None:
    assert ckpt.inspect(root, key="2.bias").tensor.key == "model/2.bias"  # type: ignore[union-attr]
    assert ckpt.inspect(root, key="model/*running_mean").tensor.key == "model/1.running_mean"  # type: ignore[union-attr]
    tied = ckpt.inspect(root, key="model/3.weight").tensor
    assert tied is not None and tied.aliases == ("model/0.weight",)
    with pytest.raises(KeyError, match="near: .*model/0.weight"):
        ckpt.inspect(root, key="model/0.wieght")
    with pytest.raises(KeyError, match="fits 4 tensors"):
        ckpt.inspect(root, key="model/*.bias")


def test_tensors_in_shards_are_read_across_ranks(tmp_path: Path) -> None:
    four_ranks(tmp_path)
    found = ckpt.inspect(tmp_path, key="model/sharded")
    assert found.world["size"] == 4 and found.tensor is not None and found.tensor.shape == (8, 16)
    assert [rank["rank"] for rank in found.world["ranks"]] == [0, 1, 2, 3]
    assert "World of 4 ranks" in drawn(tmp_path)
