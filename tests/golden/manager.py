"""One checkpoint written by a real manager: a little of every kind of part, with contents that no machine changes."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt import CheckpointManager, ResumableLoader, StateDict

STEP = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.head.weight
        self.register_buffer("scale16", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.zeros((), dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0, 2, dtype=torch.float8_e4m3fn))
        self.head.bias.requires_grad_(False)

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": 2, "names": ("a", "b")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["version"] == 2


def fill(state: dict[str, Any]) -> None:
    """Every element a small multiple of 1/4 that depends on the name: exact in every type."""
    with torch.no_grad():
        for name, tensor in ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor)):
            values = torch.arange(tensor.numel()).reshape(tensor.shape) % 16 + len(name)
            tensor.copy_(values.double() / 4)


def state() -> dict[str, Any]:
    net = Net().to(memory_format=torch.channels_last)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:1], "lr": 0.5}, {"params": trained[1:]}], lr=0.25)
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.5)
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    fill(net.state_dict(keep_vars=True))
    fill(average.state_dict(keep_vars=True))
    for i, p in enumerate(trained):
        fill({f"{i}{key}": value for key, value in optimizer.state[p].items()})
    progress = StateDict(epoch=1, seen=(1, 2), best=float("inf"), history=OrderedDict(a=[1.5, None]), blob=b"\x00\xff")
    progress["array"] = np.arange(4, dtype=np.int16).reshape(2, 2)
    progress["table"] = {1: torch.arange(3), "1": torch.tensor(2.5)}
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "average": average,
        "progress": progress,
        "nets": {"side": nn.Linear(1, 1, bias=False).requires_grad_(False), "count": 3},
        "torch_rng": torch.Generator().manual_seed(5),
        "python_rng": random.Random(6),
        "loader": ResumableLoader(list(range(10)), 2, seed=7),
    }


def write(root: Path) -> None:
    """Saves step 4 below `root` with one manager."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    parts = state()
    fill(parts["nets"]["side"].state_dict(keep_vars=True))
    torch.manual_seed(1)
    with CheckpointManager(root, parts) as manager:
        manager.save(STEP, metrics={"loss": 0.25, "worst": float("nan")})


if __name__ == "__main__":
    target = Path(__file__).resolve().parent / "v1-manager"
    if target.exists():
        sys.exit(f"{target} exists, and a golden checkpoint is never written again")
    write(target)
    for leftover in target.glob(".*"):
        leftover.unlink()
