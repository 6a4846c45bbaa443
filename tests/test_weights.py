"""load_weights fills a model and nothing else; read gives plain tensors and reads only what was asked for."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from edges_support import DATA, GOLDEN, counted_reads, flip, net, save_run, span_of, state, step_dir
from torch import nn

import ckpt

pytestmark = pytest.mark.quick


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        k: bytes(v.detach().contiguous().flatten().view(torch.uint8).tolist()) for k, v in model.state_dict().items()
    }


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = net(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "run"
    save_run(path, 10, 20)
    return path


@pytest.fixture(scope="module")
def saved() -> nn.Module:
    """The model as `root` holds it."""
    return state()["model"]


def test_weights_arrive_bit_for_bit_and_nothing_else_changes(root: Path, saved: nn.Module) -> None:
    """CFG-04: weights alone are another call than resume, and it says what it loaded."""
    model = net(9).eval()
    model[0].weight.requires_grad_(False)
    before = torch.get_rng_state(), random.getstate()
    report = ckpt.load_weights(root, model)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert bits(model) == bits(saved) != bits(net(9))
    assert not model.training and not model[0].weight.requires_grad and model[2].weight.requires_grad
    assert (report.step, report.missing, report.unexpected, report.cast) == (20, (), (), ())
    assert set(report.loaded) == set(model.state_dict())
    with pytest.raises(AttributeError):
        report.step = 1  # type: ignore[misc]


def test_wrapped_and_plain_models_exchange_weights(tmp_path: Path) -> None:
    """KEYS-01: compiled, data-parallel and plain models have the same names, whichever saved and whichever loads."""

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend="eager")

    def wrappers(seed: int) -> dict[str, nn.Module]:
        return {
            "plain": Net(seed),
            "compiled": compiled(Net(seed)),
            "parallel": nn.DataParallel(Net(seed)),
            "compiled parallel": compiled(nn.DataParallel(Net(seed))),
            "parallel compiled": nn.DataParallel(compiled(Net(seed))),
        }

    for name, model in wrappers(0).items():
        path = tmp_path / name.replace(" ", "-")
        save_run(path, 1, parts={"model": model})
        for other, target in wrappers(4).items():
            report = ckpt.load_weights(path, target)
            assert report.missing == report.unexpected == (), (name, other)
            assert list(bits(target).values()) == list(bits(model).values()), (name, other)


def test_another_dtype_is_cast_and_listed(root: Path, saved: Any) -> None:
    model = net(9).to(torch.bfloat16)
    report = ckpt.load_weights(root, model)
    assert ("0.weight", "float32", "bfloat16") in report.cast and "0.weight" in report.loaded
    assert torch.equal(model[0].weight, saved[0].weight.to(torch.bfloat16))
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_another_shape_is_an_error_and_leaves_the_model(root: Path) -> None:
    model = net(9, width=16)
    before = bits(model)
    for strict in (True, False):
        with pytest.raises(ckpt.StateMismatchError) as raised:
            ckpt.load_weights(root, model, strict=strict)
        assert ("model/0.weight", "[8, 4]", "[16, 4]") in raised.value.shape
    assert bits(model) == before


def test_names_that_do_not_fit_are_listed_or_an_error(root: Path, saved: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Identity(), nn.Linear(2, 2))
    with pytest.raises(ckpt.StateMismatchError) as raised:
        ckpt.load_weights(root, model)
    assert set(raised.value.missing) == {"model/4.weight", "model/4.bias"}
    report = ckpt.load_weights(root, model, strict=False)
    assert set(report.missing) == {"4.weight", "4.bias"}
    assert set(report.unexpected) == {"3.weight", "3.bias"}
    assert torch.equal(model[2].weight, saved[2].weight)


def test_an_unknown_name_lists_those_there_are(root: Path) -> None:
    for name in ("modell", "optimizer"):
        with pytest.raises(ckpt.StateMismatchError, match="names with weights: model"):
            ckpt.load_weights(root, net(), name=name)
    with pytest.raises(TypeError):
        ckpt.load_weights(root, {})  # type: ignore[arg-type]
    for step in ("auto", "best", "newest", True, -1):
        with pytest.raises((ValueError, TypeError)):
            ckpt.load_weights(root, net(), step=step)


def test_modules_inside_containers_have_names_too(tmp_path: Path) -> None:
    save_run(tmp_path, 1, parts={"nets": {"g": net(1), "d": [net(2)]}})
    for name, seed in (("nets/g", 1), ("nets/d/0", 2)):
        model = net(9)
        assert len(ckpt.load_weights(tmp_path, model, name=name).loaded) == len(model.state_dict())
        assert torch.equal(model[0].weight, net(seed)[0].weight)


def test_a_damaged_newest_step_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for part in ("model/0.weight", "optimizer/state/2.bias/exp_avg"):
        root = tmp_path / part.replace("/", "-")
        save_run(root, 10, 20)
        flip(step_dir(root, 20) / DATA, span_of(root, 20, part)[0])
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="ckpt"):
            report = ckpt.load_weights(root, net(9))
        assert report.step == 10 and [step for step, _ in report.skipped] == [20]
        assert len([record for record in caplog.records if "passed over" in record.message]) == 1
        with pytest.raises(ckpt.CorruptCheckpointError):
            ckpt.load_weights(root, net(9), step=20)
        with pytest.raises(ckpt.CorruptCheckpointError):
            ckpt.load_weights(step_dir(root, 20), net(9))
        flip(step_dir(root, 10) / DATA, span_of(root, 10, part)[0])
        model = net(9)
        before = bits(model)
        with pytest.raises(ckpt.CorruptCheckpointError) as raised:
            ckpt.load_weights(root, model)
        assert [step for step, _ in raised.value.attempts] == [20, 10]
        assert bits(model) == before


def test_a_last_damaged_tensor_leaves_the_first_ones_alone(tmp_path: Path) -> None:
    save_run(tmp_path, 1, parts={"model": net()})
    for key in ("model/0.bias", "model/2.weight", "model/1.num_batches_tracked"):
        offset = span_of(tmp_path, 1, key)[0]
        flip(step_dir(tmp_path, 1) / DATA, offset)
        model = net(9)
        before = bits(model)
        with pytest.raises(ckpt.CorruptCheckpointError):
            ckpt.load_weights(tmp_path, model)
        assert bits(model) == before
        flip(step_dir(tmp_path, 1) / DATA, offset)


class Adapter(nn.Module):
    """A base with low-rank adapters, which alone are its state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.base = net(seed)
        self.a = nn.Parameter(torch.full((2, 4), float(seed)))
        self.b = nn.Parameter(torch.full((8, 2), float(seed)))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"a": self.a.detach(), "b": self.b.detach()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if set(state) != {"a", "b"}:
            raise RuntimeError(f"not the state of adapters: {sorted(state)}")
        with torch.no_grad():
            self.a.copy_(state["a"])
            self.b.copy_(state["b"])


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner


def test_adapters_alone_and_whole_models_are_told_apart(tmp_path: Path) -> None:
    """AUX-11: adapter-only and full checkpoints into bare, wrapped and twice wrapped models: all of it, or an error
    that lists the names; saved tensors without a place are an error."""
    save_run(tmp_path / "adapter", 1, parts={"model": Adapter(3)})
    save_run(tmp_path / "full", 1, parts={"model": net(3)})
    fresh = Adapter(0)
    assert set(ckpt.load_weights(tmp_path / "adapter", fresh).loaded) == {"a", "b"}
    assert torch.equal(fresh.a, Adapter(3).a) and torch.equal(fresh.base[0].weight, net(0)[0].weight)
    for target in (net(0), Wrapped(net(0)), Wrapped(Wrapped(net(0)))):
        before = bits(target)
        with pytest.raises(ckpt.StateMismatchError) as raised:
            ckpt.load_weights(tmp_path / "adapter", target)
        assert set(raised.value.unexpected) == {"model/a", "model/b"} and raised.value.missing
        assert bits(target) == before
    for target in (Adapter(0), Wrapped(net(0)), Wrapped(Wrapped(net(0)))):
        with pytest.raises(ckpt.StateMismatchError):
            ckpt.load_weights(tmp_path / "full", target)
    assert ckpt.inspect(tmp_path / "adapter").parts["model"].kind == "object"
    assert ckpt.load_weights(tmp_path / "full", net(0)).unexpected == ()


# param_groups


def test_saved_groups_over_a_new_model_build_the_optimizer_that_was_saved(tmp_path: Path) -> None:
    parts = state()
    parts["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 7.0})
    parts["model"].register_parameter("late", parts["optimizer"].param_groups[-1]["params"][0])
    save_run(tmp_path, 1, parts=parts)
    model = net(9)
    model.register_parameter("late", nn.Parameter(torch.zeros(2)))
    with counted_reads() as reads:
        groups = ckpt.param_groups(tmp_path, torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert reads.ranges == []
    assert [len(group["params"]) for group in groups] == [2, 5, 1]
    assert groups[2]["params"][0] is model.late and groups[2]["lr"] == 7.0
    fresh = torch.optim.AdamW(groups)
    again = {"model": model, "optimizer": fresh}
    with ckpt.CheckpointManager(tmp_path, again, strict=False) as manager:
        assert manager.resume() == 1
    with pytest.raises(ckpt.StateMismatchError, match="optimizers in it: optimizer"):
        ckpt.param_groups(tmp_path, model, name="adam")
    with pytest.raises(ckpt.StateMismatchError, match="late"):
        ckpt.param_groups(tmp_path, net(9))


# read


def test_read_gives_the_tree_with_ties_and_fresh_memory(root: Path) -> None:
    tree = ckpt.read(root)
    expected = state()
    assert set(tree) == {*expected, "rng"}
    model = expected["model"].state_dict()
    assert set(tree["model"]) == set(model)
    assert all(torch.equal(tree["model"][key], model[key]) for key in model if "running" not in key)
    assert tree["model"]["0.weight"].data_ptr() == tree["model"]["3.weight"].data_ptr()
    moments = expected["optimizer"].state_dict()["state"]
    assert torch.equal(tree["optimizer"]["state"]["0.weight"]["exp_avg"], moments[0]["exp_avg"])
    assert [group["weight_decay"] for group in tree["optimizer"]["param_groups"]] == [0.1, 0.0]
    assert tree["progress"] == {"best": float("inf"), "words": ["a", "b"]}
    assert tree["loader"]["samples"] == 16 and tree["scheduler"]["last_epoch"] == 2
    assert tree["rng"]["torch"].dtype == torch.uint8
    tree["model"]["0.weight"].fill_(0)
    assert not torch.equal(ckpt.read(root)["model"]["0.weight"], tree["model"]["0.weight"])


def test_read_of_some_keys_reads_the_bytes_of_these_alone(root: Path) -> None:
    with counted_reads() as reads:
        tree = ckpt.read(root, keys=["model/0.*", "optimizer/state/*/step", "scheduler/last_epoch"])
    assert set(tree) == {"model", "optimizer", "scheduler"}
    assert set(tree["model"]) == {"0.weight", "0.bias"}
    assert all(set(entry) == {"step"} for entry in tree["optimizer"]["state"].values())
    assert tree["scheduler"] == {"last_epoch": 2}
    steps = 4 * len(tree["optimizer"]["state"])
    assert reads.bytes_of(DATA) == 8 * 4 * 4 + 8 * 4 + steps


def test_neighbours_are_read_in_one_range(tmp_path: Path) -> None:
    save_run(tmp_path, 1, parts={"s": ckpt.StateDict(**{f"t{i:04d}": torch.full((3,), i) for i in range(500)})})
    with counted_reads() as reads:
        tree = ckpt.read(tmp_path, keys="s/*")
    assert len(tree["s"]) == 500 and len(reads.ranges) < 5


@pytest.mark.parametrize(
    ("keys", "names"), [("model", "model"), ("*/param_groups/0/lr", "optimizer"), ("rng/*", "rng")]
)
def test_a_pattern_may_name_a_node_or_reach_over_slashes(root: Path, keys: str, names: str) -> None:
    tree = ckpt.read(root, keys=keys)
    assert set(tree) == {names}
    if keys == "model":
        assert set(tree["model"]) == set(net().state_dict())


def test_a_pattern_that_fits_nothing_is_a_keyerror_with_near_names(root: Path) -> None:
    with pytest.raises(KeyError, match="near: model/0.weight"):
        ckpt.read(root, keys=["model/0.weight", "model/0.wieght"])
    with pytest.raises(KeyError, match="MODEL"):
        ckpt.read(root, keys="MODEL/*")  # case counts
    with pytest.raises(TypeError):
        ckpt.read(root, keys=[1])  # type: ignore[list-item]


def test_damage_in_what_is_read_is_an_error_and_elsewhere_is_not_looked_at(tmp_path: Path) -> None:
    save_run(tmp_path, 1, parts={"model": net()})
    flip(step_dir(tmp_path, 1) / DATA, span_of(tmp_path, 1, "model/2.weight")[0])
    assert set(ckpt.read(tmp_path, keys="model/0.*")["model"]) == {"0.weight", "0.bias"}
    with pytest.raises(ckpt.CorruptCheckpointError) as raised:
        ckpt.read(tmp_path, keys="model/2.*")
    assert raised.value.tensor == "model/2.weight"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("which", ["v1-types", "v1-ranks", "v1-shared", "v1-example", "v1-manager"])
def test_reading_piece_by_piece_is_reading_the_whole(which: str) -> None:
    whole = ckpt.read(GOLDEN / which)
    for part in whole:
        assert set(ckpt.read(GOLDEN / which, keys=part)) == {part}
    assert set(ckpt.read(GOLDEN / which, keys="*")) == set(whole)
