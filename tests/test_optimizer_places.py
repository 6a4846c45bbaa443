"""Where optimizer state lands: its device by torch's own rule, tensors of other kinds, optimizers in containers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from capture_support import Net, bits, optimizer_bits, registry, resume, save, train
from torch import nn

from ckpt.capture.groups import SavedGroup
from ckpt.capture.optimizer import Home
from ckpt.capture.state import capture
from ckpt.errors import StateMismatchError

pytestmark = pytest.mark.quick


def home(saved_on: str, host: tuple[str, ...], accelerated: bool) -> Home:
    """A parameter that is elsewhere than on the CPU; the meta device stands for an accelerator."""
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    return Home(parameter, SavedGroup(("w",), {}, {}, None, saved_on, frozenset(host)), accelerated, None)


@pytest.mark.parametrize(
    ("key", "saved_on", "host", "accelerated", "expected"),
    [
        ("exp_avg", "cpu", (), False, "meta"),
        ("exp_avg", "cuda", (), False, "meta"),
        ("exp_avg", "cuda", ("exp_avg",), False, "cpu"),  # offloaded state stays offloaded
        ("step", "cpu", (), False, "cpu"),  # saved by a CPU run: as torch would make it here
        ("step", "cpu", (), True, "meta"),
        ("step", "cuda", ("step",), False, "cpu"),
        ("step", "cuda", ("step",), True, "meta"),  # the script's fused or capturable was kept
        ("step", "cuda", (), True, "meta"),
        ("mu_product", "cpu", (), False, "cpu"),
    ],
)
def test_state_goes_where_the_parameter_is_but_for_counters_of_the_host(
    key: str, saved_on: str, host: tuple[str, ...], accelerated: bool, expected: str
) -> None:
    assert home(saved_on, host, accelerated).of(key).type == expected


def test_nested_state_saved_beside_a_cpu_parameter_follows_the_parameter() -> None:
    assert home("cpu", (), False).beside("cpu").type == "meta"
    assert home("cuda", (), False).beside("cpu").type == "cpu"
    assert home("cuda", (), False).beside("cuda:0").type == "meta"


class Scaled(torch.Tensor):
    """A tensor made of narrow elements and a scale, as 8-bit optimizers keep their moments."""

    elements: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, elements: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, elements.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, elements: torch.Tensor, scale: torch.Tensor) -> None:
        self.elements, self.scale = elements, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["elements", "scale"], {"bits": 8}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["elements"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].elements, args[0].scale)
        raise NotImplementedError(function)


def scaled(seed: int) -> Scaled:
    draw = torch.Generator().manual_seed(seed)
    return Scaled(torch.randint(-128, 128, (5, 6), dtype=torch.int8, generator=draw), torch.rand(5, generator=draw))


def test_a_moment_of_a_tensor_subclass_is_filled_inside_the_live_one() -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(again.parameters(), lr=0.1)
    moment, held = scaled(1), scaled(2)
    optimizer.state[model.first.weight]["moment"] = moment
    stored = save(model=model, optimizer=optimizer)
    fresh.state[again.first.weight]["moment"] = held
    resume(stored, model=again, optimizer=fresh)
    assert fresh.state[again.first.weight]["moment"] is held
    assert bits([held.elements, held.scale]) == bits([moment.elements, moment.scale])


def test_a_moment_of_a_tensor_subclass_without_a_live_one_is_a_mismatch_that_names_it() -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(again.parameters(), lr=0.1)
    optimizer.state[model.first.weight]["moment"] = scaled(1)
    stored = save(model=model, optimizer=optimizer)
    with pytest.raises(
        StateMismatchError, match=r"optimizer/state/first\.weight/moment was saved as a tensor of a class"
    ):
        resume(stored, model=again, optimizer=fresh)
    assert len(fresh.state) == 0


@pytest.mark.parametrize("depth", ["direct", "nested"])
def test_a_sparse_moment_comes_back_sparse(depth: str) -> None:
    model, again = Net(), Net()
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(again.parameters(), lr=0.1)
    sparse = torch.eye(5, 6).to_sparse_coo()
    optimizer.state[model.first.weight]["moment"] = sparse if depth == "direct" else [sparse, 1]
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    found = fresh.state[again.first.weight]["moment"]
    found = found if depth == "direct" else found[0]
    assert found.layout == torch.sparse_coo
    assert bits([found._indices(), found._values()]) == bits([sparse._indices(), sparse._values()])


def test_optimizers_and_schedulers_inside_containers_keep_their_names_and_state() -> None:
    def build() -> dict[str, Any]:
        models = {"gen": Net(), "disc": Net()}
        optimizers = {name: torch.optim.Adam(model.parameters(), lr=0.1) for name, model in models.items()}
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers.values()]
        both = torch.optim.SGD([*models["gen"].parameters(), *models["disc"].parameters()], lr=0.1, momentum=0.9)
        return {"models": models, "optimizers": optimizers, "schedulers": schedulers, "both": both}

    objects, again = build(), build()
    for base, name in enumerate(("gen", "disc")):
        train(objects["models"][name], objects["optimizers"][name], range(10 * base, 10 * base + 3))
        train(objects["models"][name], objects["both"], range(10 * base, 10 * base + 3))
    stored = save(**objects)
    assert "optimizers/gen/state/first.weight/exp_avg" in stored.data
    assert not any(name.startswith("optimizers/gen/state/models") for name in stored.data)
    resume(stored, **again)
    for name in ("gen", "disc"):
        assert optimizer_bits(again["optimizers"][name]) == optimizer_bits(objects["optimizers"][name])
    assert optimizer_bits(again["both"]) == optimizer_bits(objects["both"])


def test_captured_values_are_independent_of_the_live_groups() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = [1, {"at": 2}]
    optimizer.state[model.first.weight]["history"] = [1.0, None]
    snapshot = capture(registry(model=model, optimizer=optimizer))
    before = json.dumps(snapshot.values["optimizer"])
    optimizer.param_groups[0]["schedule"][1]["at"] = 3
    optimizer.state[model.first.weight]["history"].append(2.0)
    optimizer.param_groups[0]["params"].pop()
    assert json.dumps(snapshot.values["optimizer"]) == before


def test_a_live_moment_that_is_a_view_of_another_layout_is_replaced() -> None:
    shape = (4, 3, 2, 2)
    model, again = nn.Conv2d(3, 4, 2, bias=False), nn.Conv2d(3, 4, 2, bias=False)
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(again.parameters(), lr=0.1)
    moment = torch.randn(shape).to(memory_format=torch.channels_last)
    optimizer.state[model.weight]["momentum_buffer"] = moment
    fresh.state[again.weight]["momentum_buffer"] = torch.zeros(2, *shape)[1]
    resume(save(model=model, optimizer=optimizer), model=again, optimizer=fresh)
    assert bits(fresh.state[again.weight]["momentum_buffer"]) == bits(moment)
