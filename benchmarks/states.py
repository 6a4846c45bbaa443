"""The training states that are measured: real modules with real optimizer state, no training needed to make them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class State:
    """A module and its optimizer, with moments in place. bytes: of all tensors."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in flat(self).values())

    def registered(self) -> dict[str, object]:
        return {"model": self.module, "optimizer": self.optimizer}


def flat(state: State) -> dict[str, torch.Tensor]:
    """All tensors by name, as peers that take flat mappings are given them."""
    names = {id(parameter): name for name, parameter in state.module.named_parameters()}
    tensors = {f"model.{name}": tensor.detach() for name, tensor in state.module.state_dict().items()}
    for parameter, entries in state.optimizer.state.items():
        for key, value in entries.items():
            tensors[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return tensors


def nested(state: State) -> dict[str, object]:
    """What a script hands to torch.save."""
    return {"model": state.module.state_dict(), "optimizer": state.optimizer.state_dict()}


class Block(nn.Module):
    """One transformer block of GPT-2's shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def gpt2() -> State:
    """GPT-2 124M with AdamW: 592 tensors, 1.49 GB."""
    width, module = 768, nn.Module()
    module.wte, module.wpe = nn.Embedding(50257, width), nn.Embedding(1024, width)
    module.h = nn.ModuleList(Block(width) for _ in range(12))
    module.ln_f = nn.LayerNorm(width)
    return _with_moments("gpt2-124m", module)


def small(count: int = 6000) -> State:
    """4 tensors a parameter, each of 4 KB or less: 24,000 tensors, 74 MB."""
    module = nn.Module()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(500, 1025, (count,), generator=generator).tolist()
    module.p = nn.ParameterList(torch.randn(size, generator=generator) for size in sizes)
    return _with_moments("small-24k", module)


def _with_moments(name: str, module: nn.Module) -> State:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(100.0),
            "exp_avg": torch.randn(parameter.shape, generator=generator),
            "exp_avg_sq": torch.rand(parameter.shape, generator=generator),
        }
    return State(name, module, optimizer)
