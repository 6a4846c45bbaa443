"""What an object makes of its state in a load of its own is compared with what was saved, before and after."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_support import Net, Pair, bits, parameter_bits, resume, save, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ckpt
from ckpt.capture.base import RestorePlan
from ckpt.data.statedict import StateDict
from ckpt.errors import StateMismatchError

pytestmark = pytest.mark.quick


class Asked(nn.Module):
    """Asked as a whole: its class has a `state_dict`."""

    def __init__(self, size: int = 2, value: float = 1.0001) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((2,), value))
        self.b = nn.Parameter(torch.full((size,), value))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


class Reading(nn.Module):
    """Reads its part of a state_dict by a method of its own."""

    def __init__(self, size: int = 2, value: float = 1.0001) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((2,), value))
        self.b = nn.Parameter(torch.full((size,), value))

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class Hooked(nn.Module):
    """Has a hook; holds a buffer."""

    def __init__(self, size: int = 2, value: float = 1.0001) -> None:
        super().__init__()
        self.register_buffer("a", torch.full((2,), value))
        self.register_buffer("b", torch.full((size,), value))
        self.register_state_dict_post_hook(lambda *_: None)


KINDS: list[Callable[..., nn.Module]] = [
    Asked, Reading, Hooked, lambda *args: nn.Sequential(Reading(*args)), lambda *args: nn.Sequential(Hooked(*args)),
]  # fmt: skip
NAMES = ["asked", "reading", "hooked", "reading-child", "hooked-child"]


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_another_shape_or_dtype_is_an_error_before_anything_changes(make: Callable[..., nn.Module], what: str) -> None:
    live, beside = (make(3) if what == "shape" else make().bfloat16()), nn.Linear(2, 2)
    before = parameter_bits(live), parameter_bits(beside)
    with pytest.raises(StateMismatchError, match="nothing was changed") as caught:
        resume(save(beside=nn.Linear(2, 2), model=make()), beside=beside, model=live)
    listed = getattr(caught.value, what)
    assert any(name.endswith("b") for name, _, _ in listed)
    assert (parameter_bits(live), parameter_bits(beside)) == before


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_weights_that_do_not_fit_leave_such_a_model_as_it_was(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    with ckpt.CheckpointManager(tmp_path, {"model": make()}) as manager:
        manager.save(1)
    live = make(3, 7.0)
    before = parameter_bits(live)
    with pytest.raises(StateMismatchError):
        ckpt.load_weights(tmp_path, live)
    assert parameter_bits(live) == before
    other = make(2, 7.0).bfloat16()
    report = ckpt.load_weights(tmp_path, other)
    assert {name.rpartition(".")[2] for name, _, _ in report.cast} == {"a", "b"}
    wanted = {name: tensor.bfloat16() for name, tensor in make().state_dict().items()}
    assert bits(dict(other.state_dict())) == bits(wanted)


def test_a_model_whose_load_fails_half_way_has_its_weights_back(tmp_path: Path) -> None:
    class Failing(Reading):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)
            raise RuntimeError("not today")

    with ckpt.CheckpointManager(tmp_path, {"model": nn.Sequential(Reading(), nn.Linear(2, 2))}) as manager:
        manager.save(1)
    live = nn.Sequential(Failing(2, 7.0), nn.Linear(2, 2))
    before = parameter_bits(live)
    with pytest.raises(StateMismatchError, match="not today"):
        ckpt.load_weights(tmp_path, live)
    assert parameter_bits(live) == before


def test_without_strict_a_name_that_such_a_module_misses_is_listed() -> None:
    class More(Reading):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.zeros(1))

    plan = resume(save(model=nn.Sequential(Reading())), False, model=nn.Sequential(More()))
    assert plan.missing == ["model/0.more"] and plan.changes


def test_other_bits_after_a_load_of_its_own_are_listed_by_name() -> None:
    class Halving(Reading):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)
            with torch.no_grad():
                self.a.mul_(0.5)

    plan = resume(save(model=nn.Sequential(Reading())), model=nn.Sequential(Halving()))
    (change,) = plan.changes
    assert "model/0.a" in change and "model/0.b" not in change


def test_a_load_of_its_own_that_keeps_every_bit_is_no_change() -> None:
    for make in KINDS:
        live = make(2, 0.0)
        plan = resume(save(model=make()), model=live)
        assert not plan.changes and parameter_bits(live) == parameter_bits(make())


class MyMomentum(torch.optim.SGD):
    def state_dict(self) -> Any:
        return super().state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_an_optimizers_own_load_casts_is_an_error_that_names_it(dtype: torch.dtype) -> None:
    """OPT-01: fp32 state of bf16 parameters goes through torch's cast here; state of the parameters' dtype does not."""

    def made() -> dict[str, Any]:
        model = nn.Linear(2, 2, bias=False).to(dtype)
        optimizer = MyMomentum(model.parameters(), lr=0.1)
        optimizer.state[model.weight]["master"] = torch.full((2, 2), 1.0001)
        return {"model": model, "optimizer": optimizer}

    live = made()
    if dtype is torch.float32:
        assert not resume(save(**made()), **live).changes
        return
    with pytest.raises(StateMismatchError) as caught:
        resume(save(**made()), **live)
    assert caught.value.dtype == (("optimizer/state/0/master", "float32", "bfloat16"),)


@pytest.mark.parametrize("then", [torch.optim.RAdam, torch.optim.Adamax], ids=lambda kind: kind.__name__)
def test_state_of_another_kind_of_optimizer_is_refused(then: Any) -> None:
    """Options of the script that the saved optimizer had not tell as much as those that are gone."""
    model, live = Net(), Net()
    saved, fresh = then(model.parameters(), lr=0.1), torch.optim.Adam(live.parameters(), lr=0.1)
    train(model, saved, range(1))
    stored = save(model=model, optimizer=saved)
    with pytest.raises(StateMismatchError, match="another kind of optimizer"):
        resume(stored, model=live, optimizer=fresh)
    stored.environment = {"torch": "2.5.0"}
    assert any("options are new" in change for change in resume(stored, model=live, optimizer=fresh).changes)


def test_state_under_other_keys_tells_optimizers_with_the_same_options_apart() -> None:
    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["speed"] = torch.zeros_like(p)

    model, live = Net(), Net()
    saved, fresh = torch.optim.SGD(model.parameters(), momentum=0.9), Other(live.parameters(), momentum=0.9)
    train(model, saved, range(1))
    train(live, fresh, range(1))
    with pytest.raises(StateMismatchError, match="'speed'.*'momentum_buffer'"):
        resume(save(model=model, optimizer=saved), model=live, optimizer=fresh)


def test_an_optimizer_that_was_copied_is_no_other_kind() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None: ...

    model = Net()
    live = copy.deepcopy(Bare(model.parameters()))
    live.param_groups[0]["params"][:] = list(model.parameters())
    assert live.defaults.keys() - Bare(model.parameters()).defaults.keys() == {"differentiable"}
    assert not resume(save(model=model, optimizer=Bare(model.parameters())), model=model, optimizer=live).changes


class Phase(enum.Enum):
    WARM = "warm"
    DONE = "done"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def test_an_enum_comes_back_as_a_member_of_the_live_one() -> None:
    """PY-02: by value into the live enum, in lists and as keys of mappings too."""

    def state(phase: Phase, level: Level) -> dict[str, Any]:
        return {"p": phase, "l": [level, level], "k": {phase: (level, 0)}, "n": {"deep": level}}

    live = StateDict(state(Phase.WARM, Level.LOW))
    plan = resume(save(s=StateDict(state(Phase.DONE, Level.HIGH))), s=live)
    assert dict(live) == state(Phase.DONE, Level.HIGH) and type(live["l"][1]) is Level
    assert type(live["k"][Phase.DONE][0]) is Level and not plan.changes
    tree = {"held": {"p": Phase.WARM}}
    resume(save(c={"held": {"p": Phase.DONE}}), c=tree)
    assert tree == {"held": {"p": Phase.DONE}}


def test_an_enum_with_no_live_one_is_told_and_a_value_that_is_gone_is_refused() -> None:
    live = StateDict()
    plan = resume(save(s=StateDict(p=Phase.DONE)), s=live)
    assert dict(live) == {"p": "done"} and any("s/p" in change for change in plan.changes)
    gone = enum.Enum("Phase", {"WARM": "warm"})
    with pytest.raises(StateMismatchError, match="'done', which is no Phase now"):
        resume(save(s=StateDict(p=Phase.DONE)), s=StateDict(p=gone["WARM"]))


def test_tensors_in_values_come_back_as_the_leaves_they_were() -> None:
    """Requiring gradients, and being a parameter, is more than the elements tell; a history is no state."""
    leaf = torch.ones(2, requires_grad=True)
    state = {"leaf": leaf, "view": leaf.detach(), "loss": leaf.sum(), "plain": torch.zeros(1)}
    state |= {"p": nn.Parameter(torch.ones(1)), "frozen": nn.Parameter(torch.ones(1, dtype=torch.int32), False)}
    live = StateDict()
    resume(save(s=StateDict(state)), s=live)
    flags = {key: (type(value), value.requires_grad) for key, value in live.items()}
    assert flags == {
        "leaf": (torch.Tensor, True), "view": (torch.Tensor, False), "loss": (torch.Tensor, False),
        "plain": (torch.Tensor, False), "p": (nn.Parameter, True), "frozen": (nn.Parameter, False),
    }  # fmt: skip
    assert live["leaf"].data_ptr() == live["view"].data_ptr()


@pytest.mark.parametrize("name", ["progress", "model", "c/inner"])
def test_an_override_that_nothing_takes_is_refused_by_name(name: str) -> None:
    def objects() -> dict[str, Any]:
        return {"progress": StateDict(epoch=1), "model": nn.Linear(1, 1), "c": {"inner": Pair({"x": 1})}}

    with pytest.raises(StateMismatchError, match=f"{name}: override"):
        resume(save(**objects()), override={name: ("epoch",)}, **objects())
    with pytest.raises(StateMismatchError, match="rng: override names 'pyhton'"):
        resume(save(**objects()), override={"rng": ("pyhton",)}, **objects())


def test_an_optimizer_in_a_container_keeps_what_an_override_names() -> None:
    def objects(lr: float) -> dict[str, Any]:
        model = Net()
        return {"model": model, "all": {"opt": torch.optim.SGD(model.parameters(), lr=lr)}}

    live = objects(0.5)
    resume(save(**objects(0.1)), override={"all/opt": ("lr",)}, **live)
    assert live["all"]["opt"].param_groups[0]["lr"] == 0.5


def test_tensors_that_were_tied_and_are_not_now_are_told() -> None:
    """TENSOR-04"""

    def made(tied: bool) -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        if tied:
            model["b"].weight = model["a"].weight  # type: ignore[assignment]
        return model

    live = made(False)
    plan = resume(save(model=made(True)), model=live)
    assert torch.equal(live["a"].weight, live["b"].weight)  # type: ignore[index]
    (change,) = plan.changes
    assert "model/a.weight" in change and "model/b.weight" in change
    assert not resume(save(model=made(True)), model=made(True)).changes


@pytest.mark.parametrize("first", ["a", "model"])
def test_a_tensor_of_two_parts_comes_back_as_one(first: str) -> None:
    """TENSOR-04: whichever of them is registered first; what a module holds stays where it is."""

    def objects() -> dict[str, Any]:
        model, shared = nn.Linear(2, 2), torch.ones(2)
        found = {"a": StateDict(w=model.weight.detach(), s=shared), "b": StateDict(s=shared), "model": model}
        return {first: found[first], **found}

    live = objects()
    weight, address = live["model"].weight, live["model"].weight.data_ptr()
    saved = objects()
    plan: RestorePlan = resume(save(**saved), **live)
    assert live["model"].weight is weight and weight.data_ptr() == address
    assert live["a"]["w"].data_ptr() == address and not live["a"]["w"].requires_grad
    assert live["a"]["s"].data_ptr() == live["b"]["s"].data_ptr()
    assert torch.equal(weight, saved["model"].weight) and not plan.changes
    assert len(plan.targets) == 3


def test_an_average_with_another_decay_is_told() -> None:
    """AUX-07: the decay is in a closure, which no state_dict shows."""
    model = nn.Linear(2, 2)

    def made(decay: float) -> nn.Module:
        return nn.Sequential(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)))

    stored = save(ema=made(0.9))
    assert not resume(stored, ema=made(0.9)).changes
    assert resume(stored, ema=made(0.5)).changes == ["the function multi_avg_fn of ema/0 changed"]
    assert resume(stored, ema=nn.Sequential(AveragedModel(model))).changes


def test_the_weights_of_an_average_go_into_the_plain_model(tmp_path: Path) -> None:
    """AUX-07: with the names of the model, by what is known of the wrapper and not by text."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(model, use_buffers=True)
    with torch.no_grad():
        for p in average.parameters():
            p.add_(1)
    with ckpt.CheckpointManager(tmp_path, {"ema": average}) as manager:
        manager.save(1)
    report = ckpt.load_weights(tmp_path, model, name="ema")
    assert parameter_bits(model) == parameter_bits(average.module)
    assert set(report.loaded) == set(model.state_dict()) and not report.missing and not report.unexpected
    again = AveragedModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert set(ckpt.load_weights(tmp_path, again, name="ema").loaded) == set(average.state_dict())
