"""Modules: names that no wrapper changes, in-place restore, and modules with a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_support import bits, parameter_bits, registry, resume, save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from ckpt.capture.module import parameter_names, unwrap
from ckpt.capture.state import capture
from ckpt.errors import StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.quick


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def net() -> nn.Module:
    # "module" and "_orig_mod" as names of one's own must survive: prefixes are not stripped as text.
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "module": Block()})
    model["_orig_mod"] = nn.Linear(2, 2)
    return model


def test_parameter_names_pass_wrappers_and_give_the_lexically_first_path() -> None:
    """KEYS-01, TENSOR-04"""
    shared = nn.Linear(2, 2)
    models = {"b": nn.ModuleDict({"z": shared, "a": shared}), "a": checkpoint_wrapper(nn.Sequential(nn.Linear(1, 1)))}
    inner = unwrap(models["a"])[0]  # type: ignore[index]
    assert parameter_names(models) == {
        id(shared.weight): "b/a.weight",
        id(shared.bias): "b/a.bias",
        id(inner.weight): "a/0.weight",
        id(inner.bias): "a/0.bias",
    }


def test_parameters_and_buffers_stay_the_same_objects_and_memory() -> None:
    """MEM-01"""
    model, live = net(), net()
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in live.state_dict(keep_vars=True).items()}
    resume(save(model=model), model=live)
    for name, tensor in live.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and tensor.data_ptr() == before[name][1]
    assert parameter_bits(live) == parameter_bits(model)


def test_transient_buffers_are_neither_saved_nor_touched() -> None:
    model, live = Block(), Block()
    mask = live.mask.clone()
    stored = save(model=model)
    assert "model/mask" not in stored.data
    resume(stored, model=live)
    assert torch.equal(live.mask, mask)


def test_absent_parameters_are_absent_and_differences_are_listed_in_full() -> None:
    """AUX-11, KEYS-03: unmatched names are errors that list them; strict=False restores what fits."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2), "c": nn.Linear(2, 3)})
    live = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "d": nn.Linear(2, 2)})
    before = parameter_bits(live)
    stored = save(model=model)
    with pytest.raises(StateMismatchError) as caught:
        resume(stored, model=live)
    assert caught.value.missing == ("model/a.bias", "model/d.weight", "model/d.bias")
    assert set(caught.value.unexpected) == {"model/c.weight", "model/c.bias"}
    assert parameter_bits(live) == before
    plan = resume(stored, strict=False, model=live)
    assert torch.equal(live["b"].weight, model["b"].weight)
    assert plan.missing == ["model/a.bias", "model/d.weight", "model/d.bias"]
    assert plan.changes


def test_a_shape_or_dtype_that_differs_is_an_error_even_without_strict() -> None:
    stored = save(model=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    live = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2).to(torch.bfloat16)})
    before = parameter_bits(live)
    with pytest.raises(StateMismatchError) as caught:
        resume(stored, strict=False, model=live)
    assert ("model/a.weight", "[2, 2]", "[3, 2]") in caught.value.shape
    assert ("model/b.bias", "float32", "bfloat16") in caught.value.dtype
    assert parameter_bits(live) == before


def test_frozen_and_trained_parameters_come_back_as_they_were() -> None:
    """OPT-07: unfrozen at step 3, saved, and the script freezes again at its start."""
    model, live = net(), net()
    for parameter in live.parameters():
        parameter.requires_grad_(False)
    model["_orig_mod"].weight.requires_grad_(False)
    plan = resume(save(model=model), model=live)
    assert [p.requires_grad for p in live.parameters()] == [p.requires_grad for p in model.parameters()]
    (note,) = plan.notes
    assert "layers.0.linear.weight (trained)" in note and "_orig_mod.weight" not in note
    assert not resume(save(model=model), model=live).notes


class Counting(nn.Module):
    """Extra state with a tensor, and of a type that only the typed values keep."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.count: Any = (count, {count: torch.full((2,), float(count))})

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_extra_state_comes_back_with_types_and_tensors() -> None:
    """TENSOR-14: get_extra_state is honoured, at any depth."""
    model, live = nn.Sequential(Counting(3), checkpoint_wrapper(Counting(4))), nn.Sequential(Counting(), Counting())
    resume(save(model=model), model=live)
    assert bits(live[0].count) == bits((3, {3: torch.full((2,), 3.0)}))
    assert bits(live[1].count) == bits((4, {4: torch.full((2,), 4.0)}))


def test_extra_state_that_is_missing_or_unexpected_is_listed() -> None:
    plain = nn.Sequential(nn.Module())
    plain[0].weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(StateMismatchError) as caught:
        resume(save(model=plain), model=nn.Sequential(Counting()))
    assert caught.value.missing == ("model/0._extra_state",)
    with pytest.raises(StateMismatchError) as caught:
        resume(save(model=nn.Sequential(Counting(1))), model=plain)
    assert "model/0._extra_state" in caught.value.unexpected


def test_extra_state_outside_the_closed_set_is_refused_by_path() -> None:
    """PY-02"""
    model = Counting()
    model.count = {"lock": object()}
    with pytest.raises(UnsupportedStateError) as caught:
        save(model=nn.Sequential(model))
    assert caught.value.name == "model/0._extra_state/lock"


def test_ties_across_modules_are_stored_once_and_filled_once() -> None:
    """TENSOR-04: embedding and head of one model, and of two."""

    def tied() -> tuple[nn.Module, nn.Module]:
        embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        head.weight = embedding.weight
        return nn.ModuleDict({"embedding": embedding, "head": head}), nn.ModuleDict({"again": head})

    (first, second), (live, other) = tied(), tied()
    stored = save(model=first, other=second)
    assert list(stored.data) == ["model/embedding.weight"]
    assert stored.saved().aliases == {
        "model/head.weight": "model/embedding.weight",
        "other/again.weight": "model/embedding.weight",
    }
    plan = resume(stored, model=live, other=other)
    assert len(plan.targets) == 1
    assert live["head"].weight is live["embedding"].weight
    assert torch.equal(live["head"].weight, first["head"].weight)


class Renaming(nn.Module):
    """Saves its weight transposed and under another name, and reads that back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.loaded_version: Any = None

    _version = 7

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "kernel"] = self.weight.detach().t()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.loaded_version = local_metadata.get("version")
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "kernel"].t())


def test_a_module_that_saves_in_its_own_way_loads_in_its_own_way() -> None:
    model, live = nn.ModuleDict({"a": nn.Linear(2, 2), "r": Renaming()}), nn.ModuleDict()
    live["a"], live["r"] = nn.Linear(2, 2), Renaming()
    weight = live["r"].weight
    stored = save(model=checkpoint_wrapper(model))
    assert "model/r.kernel" in stored.data and "model/r.weight" not in stored.data
    resume(stored, model=live)
    assert live["r"].weight is weight and live["r"].loaded_version == 7
    assert torch.equal(weight, model["r"].weight) and torch.equal(live["a"].weight, model["a"].weight)


def test_a_module_that_refuses_its_state_raises_our_error() -> None:
    class Grumpy(Renaming):
        def _load_from_state_dict(self, *args: Any) -> None:
            raise RuntimeError("not today")

    with pytest.raises(StateMismatchError, match="model/r did not take .* RuntimeError: not today"):
        resume(save(model=nn.ModuleDict({"r": Renaming()})), model=nn.ModuleDict({"r": Grumpy()}))


def test_the_saved_layout_wins_in_a_module_that_loads_itself_too() -> None:
    """TENSOR-08"""

    def hooked() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(2, 3, 3))
        model.register_load_state_dict_post_hook(lambda module, keys: None)
        return model

    model, live = hooked().to(memory_format=torch.channels_last), hooked()
    resume(save(model=model), model=live)
    assert parameter_bits(live) == parameter_bits(model)


def test_a_custom_module_is_compared_before_anything_changes_where_it_cannot_rename() -> None:
    def hooked(width: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width))
        model[1].register_load_state_dict_post_hook(lambda module, keys: None)
        return model

    live = hooked(3)
    before = parameter_bits(live)
    with pytest.raises(StateMismatchError) as caught:
        resume(save(model=hooked(2)), model=live)
    assert ("model/1.weight", "[2, 2]", "[3, 2]") in caught.value.shape
    assert parameter_bits(live) == before


def test_a_class_with_a_state_dict_of_its_own_is_asked() -> None:
    """KEYS-03: what it gives is what it gets, types included."""

    class Own(nn.Linear):
        def state_dict(self) -> Any:  # type: ignore[override]
            return {"w": self.weight.detach(), "steps": (1, 2)}

        def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
            self.got = state
            with torch.no_grad():
                self.weight.copy_(state["w"])

    model, live = Own(2, 2), Own(2, 2)
    stored = save(model=model)
    assert list(stored.data) == ["model/w"]
    resume(stored, model=live)
    assert live.got["steps"] == (1, 2) and torch.equal(live.weight, model.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.SyncBatchNorm(3),
        lambda: nn.LSTM(3, 2, num_layers=2),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: AveragedModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), use_buffers=True),
        lambda: nn.ParameterList([torch.randn(2), torch.randn(3)]),
        lambda: nn.ParameterDict({"a/b": torch.randn(2), "0": torch.randn(3)}),
    ],
    ids=["weight_norm", "spectral_norm", "sync_bn", "lstm", "attention", "averaged", "list", "dict"],
)
def test_modules_of_torch_come_back(make: Callable[[], nn.Module]) -> None:
    """AUX-07, KEYS-04: n_averaged included; a parameter called "0" or with a slash keeps its name."""
    model, live = make(), make()
    if isinstance(model, AveragedModel):
        model.update_parameters(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    resume(save(model=model), model=live)
    assert parameter_bits(live) == parameter_bits(model)


def test_an_averaged_model_goes_on_counting() -> None:
    """AUX-07"""
    model = nn.Linear(2, 2)
    averaged, live = AveragedModel(model), AveragedModel(nn.Linear(2, 2))
    for _ in range(3):
        averaged.update_parameters(model)
    resume(save(ema=averaged), ema=live)
    assert live.n_averaged.item() == 3


def test_capture_runs_no_forward_and_changes_no_bit() -> None:
    """I7 for modules: no hook of training fires, nothing is drawn, train/eval and gradients stay."""
    model = net()
    fired: list[str] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: fired.append("forward"))
        module.register_full_backward_hook(lambda *_: fired.append("backward"))
    model["module"].eval()
    modes, before, rng = [m.training for m in model.modules()], parameter_bits(model), torch.get_rng_state()
    capture(registry(model=model))
    assert fired == [] and parameter_bits(model) == before
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), rng)


def test_the_class_of_a_model_may_move_between_save_and_load(tmp_path: Path) -> None:
    """PY-03: state only; no class name or module path is stored."""
    stored = save(model=net())
    assert "Block" not in stored.text and "test_capture_modules" not in stored.text
    renamed = type("Renamed", (Block,), {"__module__": "elsewhere"})
    live = nn.ModuleDict({"layers": nn.ModuleList([renamed(), renamed()]), "module": renamed()})
    live["_orig_mod"] = nn.Linear(2, 2)
    resume(stored, model=live)
