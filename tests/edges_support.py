"""Roots to look into: a small but complete training state, a checkpoint of four ranks, and damage."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.cli.draw_inspection import draw
from ckpt.cli.screen import Screen
from ckpt.storage.base import ReadRange
from ckpt.storage.local import LocalStorage

GOLDEN = Path(__file__).parent / "golden"
DATA = "rank-00000.safetensors"


def net(seed: int = 0, width: int = 8) -> nn.Sequential:
    """A model with a buffer of another dtype and a tied weight."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4), nn.Linear(4, width))
    model[3].weight = model[0].weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def state(model: nn.Module | None = None) -> dict[str, Any]:
    """Everything a training registers, after two steps of it."""
    model = model if model is not None else net()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = ckpt.ResumableLoader(torch.utils.data.TensorDataset(torch.arange(40)), batch_size=8)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
        "loader": loader,
        "progress": ckpt.StateDict(best=float("inf"), words=["a", "b"]),
    }


def save_run(root: Any, *steps: int, parts: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Saves the same state as each of `steps`, with loss = 1 / step as metric."""
    parts = state() if parts is None else parts
    options.setdefault("keep_last", None)
    with ckpt.CheckpointManager(root, parts, lock_timeout=0.2, async_save=False, **options) as manager:
        for step in steps or (10,):
            manager.save(step, metrics={"loss": 1 / step})
    return parts


def step_dir(root: Any, step: int) -> Path:
    return Path(root) / f"step-{step:08d}"


def flip(path: Path, offset: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


def span_in(file: Path, key: str) -> tuple[int, int]:
    """Where the bytes of tensor `key` lie in a data file, told by its safetensors header."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])[key]
    return 8 + size + entry["data_offsets"][0], 8 + size + entry["data_offsets"][1]


def span_of(root: Any, step: int, key: str) -> tuple[int, int]:
    return span_in(step_dir(root, step) / DATA, key)


class Reads:
    """What was asked of storage: `whole` files read, and (path, start, bytes) of `ranges`."""

    def __init__(self) -> None:
        self.whole: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []

    def bytes_of(self, ending: str) -> int:
        return sum(count for path, _, count in self.ranges if path.endswith(ending))


@contextmanager
def counted_reads() -> Iterator[Reads]:
    reads, read, ranges = Reads(), LocalStorage.read, LocalStorage.read_ranges

    def whole(self: LocalStorage, path: str, limit: int) -> bytes | None:
        reads.whole.append(path)
        return read(self, path, limit)

    def some(self: LocalStorage, path: str, wanted: list[ReadRange]) -> None:
        reads.ranges += [(path, item.start, sum(len(view) for view in item.into)) for item in wanted]
        ranges(self, path, wanted)

    LocalStorage.read, LocalStorage.read_ranges = whole, some  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        LocalStorage.read, LocalStorage.read_ranges = read, ranges  # type: ignore[method-assign]


def drawn(path: Any, width: int = 80, **options: Any) -> str:
    """What `ckpt inspect` draws, without colours."""
    stream = io.StringIO()
    screen = Screen(stream, width)
    draw(screen, ckpt.inspect(path, **options))
    screen.show()
    return stream.getvalue()


def golden_maker() -> Any:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def four_ranks(root: Path, step: int = 20) -> Path:
    """A checkpoint of four ranks: a tensor of which each holds two rows, and one that each keeps for itself."""
    make = golden_maker()
    rows = {rank: [make.Box((2 * rank, 0), (2, 16))] for rank in range(4)}
    built = make.Golden(
        step=step,
        save=f"{step:032x}",
        tensors={
            "model/sharded": make.Tensor("float32", (8, 16), group=1, boxes=rows),
            "model/mean": make.Tensor("float32", (4,), group=2, boxes={rank: [None] for rank in range(4)}),
        },
        parts={"model": {"kind": "module"}},
        values={rank: {"model": {}} for rank in range(4)},
        groups=(
            make.PlacementGroup("whole", (0,)),
            make.PlacementGroup("shards", (0, 1, 2, 3)),
            make.PlacementGroup("per-rank", (0, 1, 2, 3)),
        ),
        world=4,
    )
    folder = step_dir(root, step)
    folder.mkdir(parents=True)
    for name, data in built.files().items():
        (folder / name).write_bytes(data)
    return folder
