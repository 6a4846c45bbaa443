"""A save and a resume in memory, for tests of the capture rooms: storage is a dict of bytes and a JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt.capture.base import RestorePlan, SavedState, TensorInfo
from ckpt.capture.state import Registry, capture, plan_restore
from ckpt.capture.tensors import DTYPE_NAMES, as_bytes


@dataclass
class Stored:
    """What a save left: nothing in it is shared with a live object."""

    text: str
    data: dict[str, bytes]
    environment: dict[str, str] = field(default_factory=dict)

    def saved(self) -> SavedState:
        tree = json.loads(self.text)
        tensors = {
            name: TensorInfo(dtype, tuple(shape), None if order is None else tuple(order))
            for name, (dtype, shape, order) in tree["tensors"].items()
        }
        return SavedState(1, tree["parts"], tree["values"], tensors, tree["aliases"], self.environment)


def registry(**objects: Any) -> Registry:
    made = Registry()
    for name, obj in objects.items():
        made.register(name, obj)
    return made


def save(**objects: Any) -> Stored:
    return save_registry(registry(**objects))


def save_registry(made: Registry) -> Stored:
    snapshot = capture(made)
    table = {
        name: [DTYPE_NAMES[tensor.dtype], list(tensor.shape), snapshot.dim_orders.get(name)]
        for name, tensor in snapshot.tensors.items()
    }
    data = {name: as_bytes(tensor).numpy().tobytes() for name, tensor in snapshot.tensors.items()}
    tree = {"tensors": table, "aliases": snapshot.aliases, "parts": snapshot.parts, "values": snapshot.values}
    return Stored(json.dumps(tree), data)


def resume(
    stored: Stored, strict: bool = True, override: Mapping[str, tuple[str, ...]] | None = None, **objects: Any
) -> RestorePlan:
    return resume_registry(registry(**objects), stored, strict, override)


def resume_registry(
    made: Registry, stored: Stored, strict: bool = True, override: Mapping[str, tuple[str, ...]] | None = None
) -> RestorePlan:
    plan = plan_restore(made, stored.saved(), strict, override)
    plan.check()
    plan.prepare()
    for target in plan.targets:
        info = plan.saved.tensors[target.name]
        raw = torch.frombuffer(bytearray(stored.data[target.name]) or bytearray(1), dtype=torch.uint8)
        with torch.no_grad():
            if target.tensor.numel():
                target.tensor.detach().copy_(raw.view(target.tensor.dtype).view(info.shape))
    plan.apply()
    return plan


def bits(value: Any) -> Any:
    """`value` with every tensor as (dtype, shape, strides, device, bytes) and every float as its hex: NaNs compare."""
    if isinstance(value, torch.Tensor):
        raw = as_bytes(value).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), value.stride(), str(value.device), raw
    if isinstance(value, Mapping):
        return type(value).__name__, {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(item) for item in value]
    return type(value).__name__, value.hex() if isinstance(value, float) else value


class Holder(nn.Module):
    """A module whose only state is the buffers it is given."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


class Pair:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def optimizer_bits(optimizer: torch.optim.Optimizer) -> Any:
    """Everything that decides the next step of an optimizer: options of each group, and state by position."""
    rows = []
    for group in optimizer.param_groups:
        options = {key: bits(value) for key, value in group.items() if key not in ("params", "param_names")}
        rows.append((options, [_state_bits(optimizer.state.get(p)) for p in group["params"]]))
    return rows


def _state_bits(state: Any) -> Any:
    return None if state is None else {key: bits(value) for key, value in state.items()}


def parameter_bits(module: torch.nn.Module) -> Any:
    return {name: bits(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}


def concrete_subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from concrete_subclasses(sub)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 5)
        self.third = nn.Linear(5, 2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def two_groups(model: Net, flip: bool) -> list[dict[str, Any]]:
    decayed = {"params": [model.first.weight, model.second.weight, model.third.weight], "weight_decay": 0.1}
    plain = {"params": [model.first.bias, model.second.bias, model.third.bias], "weight_decay": 0.0, "lr": 0.01}
    if flip:
        decayed["params"].reverse()
        return [plain, decayed]
    return [decayed, plain]


def grown() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.first.parameters(), lr=0.1)
    train(model, optimizer, range(3))
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.01})
    train(model, optimizer, range(3, 5))
    return model, optimizer
