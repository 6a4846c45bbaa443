"""diff decides by bits; export writes files that other tools read, whole or not at all; copies are checked."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from edges_support import DATA, GOLDEN, counted_reads, flip, four_ranks, net, save_run, span_of, state, step_dir
from torch import nn

import ckpt
from ckpt.edges.copying import copy
from ckpt.edges.pruning import prune

pytestmark = pytest.mark.quick


def save_values(root: Path, **values: Any) -> Path:
    save_run(root, 1, parts={"s": ckpt.StateDict(**values)})
    return root


def changes(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[str, float | None]]:
    a, b = save_values(tmp_path / "a", **one), save_values(tmp_path / "b", **other)
    report = ckpt.diff(a, b)
    found = {change.key: (change.kind, change.max_abs) for change in report.changed}
    return {key: value for key, value in found.items() if not key.startswith("rng/")}


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), ("value", 0.5)),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), ("bits", 0.0)),
        (torch.tensor([math.nan, 1.0]), torch.tensor([3.0, 1.0]), ("value", 0.0)),
        (torch.tensor([1, 5]), torch.tensor([1, 2]), ("value", 3.0)),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), ("value", float(2**64 - 1))),
        (torch.tensor([True]), torch.tensor([False]), ("value", 1.0)),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 4j]), ("value", 3.0)),
        (torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 2.0, dtype=torch.bfloat16), ("value", 1.0)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), ("dtype", None)),
        (torch.ones(2, 3), torch.ones(3, 2), ("shape", None)),
        (torch.ones(2, 3, 2, 2), torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last), ("layout", None)),
        (1, 2, ("value", None)),
        (1, 1.0, ("value", None)),
        (True, 1, ("value", None)),
        (0.0, -0.0, ("value", None)),
        (None, "None", ("value", None)),
    ],
)
def test_each_kind_of_difference_has_its_name(tmp_path: Path, one: Any, other: Any, kind: tuple[str, Any]) -> None:
    assert changes(tmp_path, {"x": one, "y": 1}, {"x": other, "y": 1}) == {"s/x": kind}


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        (None, torch.zeros(2), "s/x"),
        (1, torch.zeros(2), "s/x"),
        (1.0, torch.ones(()), "s/x"),
        ({"a": None}, {"a": torch.ones(2)}, "s/x/a"),
        ([0, None], [0, torch.ones(2)], "s/x/1"),
        ((1,), [1], "s/x"),
        ((torch.ones(1),), [torch.ones(1)], "s/x"),
        ([((1,), 2)], [([1], 2)], "s/x/0/0"),
        ({0: 1}, ["1"], None),
        (OrderedDict(a=1), {"a": 1}, "s/x"),
        (Counter(a=1), OrderedDict(a=1), "s/x"),
        ({}, [], "s/x"),
        ((), [], "s/x"),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64), "s/x"),
        (np.float64(1), 1.0, "s/x"),
        ({1}, frozenset({1}), "s/x"),
    ],
)
def test_a_value_that_became_another_kind_of_thing_is_told(
    tmp_path: Path, one: Any, other: Any, key: str | None
) -> None:
    a, b = save_values(tmp_path / "a", x=one), save_values(tmp_path / "b", x=other)
    for first, second in ((a, b), (b, a)):
        report = ckpt.diff(first, second)
        told = [change.key for change in report.changed if not change.key.startswith("rng/")]
        assert not report.equal and (key is None or told == [key])
        assert key is None or (report.added, report.removed) == ((), ())


def test_the_order_of_keys_and_the_spelling_of_a_dict_are_no_difference(tmp_path: Path) -> None:
    one, other = {"a": 1, "b": torch.ones(1)}, {"b": torch.ones(1), "a": 1}
    assert changes(tmp_path, {"x": one, "y": {"k": 1}}, {"y": {"k": 1}, "x": other}) == {}


def test_nan_equals_nan_of_the_same_bits_and_no_other(tmp_path: Path) -> None:
    def payload(bits: int) -> torch.Tensor:
        return torch.tensor([bits], dtype=torch.int32).view(torch.float32)

    assert changes(tmp_path / "1", {"x": payload(0x7FC00001)}, {"x": payload(0x7FC00001)}) == {}
    assert changes(tmp_path / "2", {"x": payload(0x7FC00001)}, {"x": payload(0x7FC00002)}) == {"s/x": ("bits", None)}
    assert changes(tmp_path / "3", {"x": math.nan}, {"x": math.nan}) == {}


def test_two_saves_of_one_state_are_equal_and_read_no_tensor(tmp_path: Path) -> None:
    save_run(tmp_path, 10, 20, parts={"model": net(), "s": ckpt.StateDict(a={"b": [1, {2: 3}]})})
    with counted_reads() as reads:
        report = ckpt.diff(step_dir(tmp_path, 10), tmp_path)
    assert report.equal and report.changed == () and reads.ranges == []
    assert (report.a, report.b) == (str(step_dir(tmp_path, 10)), str(step_dir(tmp_path, 20)))


def test_keys_of_one_side_are_added_or_removed(tmp_path: Path) -> None:
    a = save_values(tmp_path / "a", same=1, old=torch.ones(1), gone=2)
    b = save_values(tmp_path / "b", same=1, new=torch.ones(1), come=3)
    report = ckpt.diff(a, b)
    assert (report.added, report.removed) == (("s/come", "s/new"), ("s/gone", "s/old")) and not report.equal
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["schema"] == 1 and document["equal"] is False and document["added"] == ["s/come", "s/new"]


def test_learning_rates_go_by_the_path_that_read_uses(tmp_path: Path) -> None:
    parts = state()
    save_run(tmp_path / "a", 1, parts=parts)
    parts["optimizer"].param_groups[1]["lr"] = 5.0
    save_run(tmp_path / "b", 1, parts=parts)
    report = ckpt.diff(tmp_path / "a", tmp_path / "b")
    assert {change.key for change in report.changed if not change.key.startswith("rng")} == {
        "optimizer/param_groups/1/lr"
    }
    assert ckpt.read(tmp_path / "b", keys="optimizer/param_groups/1/lr")["optimizer"]["param_groups"] == [{"lr": 5.0}]


def test_checkpoints_of_several_ranks_compare_across_their_shards(tmp_path: Path) -> None:
    four_ranks(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert ckpt.diff(tmp_path / "a", tmp_path / "b").equal


def test_a_difference_in_a_damaged_tensor_is_damage(tmp_path: Path) -> None:
    save_run(tmp_path / "a", 1, parts={"model": net(1)})
    save_run(tmp_path / "b", 1, parts={"model": net(2)})
    flip(step_dir(tmp_path / "b", 1) / DATA, span_of(tmp_path / "b", 1, "model/2.weight")[0])
    with pytest.raises(ckpt.CorruptCheckpointError):
        ckpt.diff(tmp_path / "a", tmp_path / "b")


# export


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "run"
    save_run(path, 10, 20)
    return path


def same(found: dict[str, torch.Tensor], root: Path) -> bool:
    wanted = ckpt.read(root, keys="model")["model"]
    return set(found) == set(wanted) and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_safetensors_hold_the_modules_names_ties_under_each(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    assert ckpt.export(root, out) == (str(out),)
    assert same(safetensors.torch.load_file(out), root)
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    fresh = net(9)
    fresh.load_state_dict(safetensors.torch.load_file(out))


def test_a_pt_file_is_taken_by_a_safe_load_with_its_ties(root: Path, tmp_path: Path) -> None:
    (path,) = ckpt.export(step_dir(root, 10), tmp_path / "weights.pt", format="torch")
    found = torch.load(path, weights_only=True)
    assert same(found, root) and found["0.weight"].data_ptr() == found["3.weight"].data_ptr()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_module_inside_a_container_goes_by_its_path(tmp_path: Path, kind: str) -> None:
    save_run(tmp_path / "run", 1, parts={"nets": {"g": net(1), "d": [net(2), net(3)]}})
    for name, seed in (("nets/g", 1), ("nets/d/1", 3)):
        (path,) = ckpt.export(tmp_path / "run", tmp_path / f"{kind}{seed}.{kind}", name=name, format=kind)
        found = safetensors.torch.load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True)
        assert set(found) == set(net().state_dict()) and torch.equal(found["2.weight"], net(seed)[2].weight)


def test_more_than_a_shard_becomes_shards_with_an_index(root: Path, tmp_path: Path) -> None:
    paths = ckpt.export(root, tmp_path / "out", max_shard_bytes=200)
    names = [Path(path).name for path in paths]
    assert names[-1] == "model.safetensors.index.json" and len(names) > 2
    assert names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
    index = json.loads(Path(paths[-1]).read_text())
    assert set(index["weight_map"].values()) == set(names[:-1])
    found: dict[str, torch.Tensor] = {}
    for path in paths[:-1]:
        shard = safetensors.torch.load_file(path)
        assert all(index["weight_map"][key] == Path(path).name for key in shard)
        found |= shard
    assert same(found, root)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())


def test_every_dtype_is_written_as_it_is_or_refused_by_name(tmp_path: Path) -> None:
    for dtype in (
        "bool",
        "uint8",
        "int16",
        "uint64",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e8m0fnu",
        "complex64",
    ):
        tensor = torch.arange(4).to(torch.uint8).repeat(8).view(torch.uint8) % 2
        tensor = tensor.view(getattr(torch, dtype)) if dtype != "bool" else tensor.bool()
        save_run(tmp_path / dtype, 1, parts={"model": ckpt.StateDict(x=tensor)})
        (path,) = ckpt.export(tmp_path / dtype, tmp_path / f"{dtype}.safetensors")
        found = safetensors.torch.load_file(path)["x"]
        assert found.dtype == tensor.dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    for dtype in ("complex128", "float8_e4m3fnuz"):
        save_run(tmp_path / dtype, 1, parts={"model": ckpt.StateDict(x=torch.zeros(2, dtype=getattr(torch, dtype)))})
        with pytest.raises(ckpt.UnsupportedStateError, match=f"model/x is of dtype {dtype}"):
            ckpt.export(tmp_path / dtype, tmp_path / f"{dtype}.safetensors")
        (path,) = ckpt.export(tmp_path / dtype, tmp_path / f"{dtype}.pt", format="torch")
        assert torch.load(path, weights_only=True)["x"].dtype == getattr(torch, dtype)
    assert not list(tmp_path.glob("*128.safetensors"))


def test_shards_of_ranks_are_put_together(tmp_path: Path) -> None:
    four_ranks(tmp_path / "run")
    (path,) = ckpt.export(tmp_path / "run", tmp_path / "x.safetensors")
    found = safetensors.torch.load_file(path)["sharded"]
    assert torch.equal(found.view(torch.int32), ckpt.read(tmp_path / "run")["model"]["sharded"].view(torch.int32))


def test_what_is_there_is_only_replaced_when_asked_for(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite"):
        ckpt.export(root, out)
    assert out.read_text() == "mine"
    ckpt.export(root, out, overwrite=True)
    assert same(safetensors.torch.load_file(out), root)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileExistsError):
        ckpt.export(root, tmp_path / "folder")
    (path,) = ckpt.export(root, tmp_path / "folder", overwrite=True)
    assert path == str(tmp_path / "folder" / "model.safetensors")


def test_a_failed_export_leaves_nothing(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "run")
    flip(step_dir(tmp_path / "run", 20) / DATA, span_of(tmp_path / "run", 20, "model/2.weight")[0])
    out = tmp_path / "out"
    for kind, limit in (("safetensors", 200), ("safetensors", 10**9), ("torch", 10**9)):
        with pytest.raises(ckpt.CorruptCheckpointError):
            ckpt.export(tmp_path / "run", out, format=kind, max_shard_bytes=limit)
        assert not out.exists() or list(out.iterdir()) == []
        shutil.rmtree(out, ignore_errors=True)


def test_wrong_arguments_of_export_are_told(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ckpt.StateMismatchError, match="names with tensors: model, optimizer"):
        ckpt.export(root, tmp_path / "x.safetensors", name="nope")
    for arguments in ({"format": "onnx"}, {"format": "dcp"}, {"format": "torch"}, {"max_shard_bytes": 0}):
        with pytest.raises(ValueError, match="."):
            ckpt.export(root, tmp_path / "x.safetensors", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="local"):
        ckpt.export(root, "memory://x/y")


def test_values_a_safe_load_would_refuse_are_refused_by_name(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"fine": (1, "a", None, torch.float32), "slice": slice(1)}

    save_run(tmp_path / "run", 1, parts={"model": Extra(2, 2)})
    with pytest.raises(ckpt.UnsupportedStateError) as raised:
        ckpt.export(tmp_path / "run", tmp_path / "x.pt", format="torch")
    assert raised.value.name == "model/_extra_state/slice"
    assert len(safetensors.torch.load_file(ckpt.export(tmp_path / "run", tmp_path / "x.safetensors")[0])) == 2


# cp and prune


def test_a_copy_is_the_same_checkpoint_and_a_second_one_does_nothing(root: Path, tmp_path: Path) -> None:
    report = copy(root, tmp_path / "backup")
    assert report.copied and report.path == str(tmp_path / "backup" / "step-00000020")
    assert ckpt.diff(root, tmp_path / "backup").equal and ckpt.verify(tmp_path / "backup").ok
    assert not copy(root, tmp_path / "backup").copied
    assert copy(root, tmp_path / "backup" / "step-00000077", step=10).copied
    assert ckpt.inspect(tmp_path / "backup" / "step-00000077").step == 10
    assert not list((tmp_path / "backup").glob(".tmp*"))


def test_another_or_a_damaged_step_in_the_way_is_refused(root: Path, tmp_path: Path) -> None:
    save_run(tmp_path / "other", 20, parts={"model": net(3)})
    with pytest.raises(ckpt.CheckpointError, match="is not this checkpoint"):
        copy(root, tmp_path / "other")
    copy(root, tmp_path / "backup")
    flip(step_dir(tmp_path / "backup", 20) / DATA, 5000)
    with pytest.raises(ckpt.CheckpointError, match="damaged copy"):
        copy(root, tmp_path / "backup")


def test_a_damaged_source_is_not_copied(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "run")
    flip(step_dir(tmp_path / "run", 20) / DATA, 5000)
    with pytest.raises(ckpt.CorruptCheckpointError):
        copy(tmp_path / "run", tmp_path / "backup")
    assert [path.name for path in (tmp_path / "backup").iterdir() if not path.name.startswith(".lock")] == []


def test_a_copied_step_takes_shared_files_along(tmp_path: Path) -> None:
    copy(GOLDEN / "v1-shared", tmp_path / "backup")
    assert ckpt.verify(tmp_path / "backup").ok and ckpt.diff(GOLDEN / "v1-shared", tmp_path / "backup").equal
    assert not copy(GOLDEN / "v1-shared", tmp_path / "backup").copied


def test_prune_keeps_the_newest_and_the_pinned_and_says_why(tmp_path: Path) -> None:
    parts = save_run(tmp_path, 10, 20, 30, 40, parts={"model": net()})
    with ckpt.CheckpointManager(tmp_path, parts, keep_last=None) as manager:
        manager.pin(10, "paper")
    (tmp_path / ".tmp-step-00000050-ab").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    plan = prune(tmp_path, 1, dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    done = prune(tmp_path, 1)
    assert plan.keep == done.keep and plan.remove == done.remove and (plan.dry_run, done.dry_run) == (True, False)
    assert [(step.step, step.reasons) for step in done.keep] == [(10, ("pinned",)), (40, ("last", "in use"))]
    assert [step.step for step in done.remove] == [20, 30] and done.debris == (".tmp-step-00000050-ab",)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-00000010", "step-00000040"]


def test_prune_beside_a_live_run_is_refused_and_a_dry_run_is_not(tmp_path: Path) -> None:
    parts = save_run(tmp_path, 10, 20, parts={"model": net()})
    with ckpt.CheckpointManager(tmp_path, parts, keep_last=None) as manager:
        manager.resume()
        assert [step.step for step in prune(tmp_path, 1, dry_run=True).remove] == [10]
        with pytest.raises(ckpt.LockedError):
            prune(tmp_path, 1)
    assert step_dir(tmp_path, 10).is_dir()
