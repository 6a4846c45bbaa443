"""The training of `ckpt demo`: a small character model on the text of Python's standard library. Seconds on one core.

It is a plain script on purpose: what a user writes, with nothing in it that knows of a campaign.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

STEPS, SAVE_EVERY, LENGTH, VOCABULARY = 60, 4, 24, 128


def text() -> bytes:
    """ASCII of a few modules that every Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts = [(folder / name).read_bytes() for name in ("ast.py", "bisect.py", "heapq.py", "textwrap.py")]
    return bytes(char for char in b"".join(parts) if char < VOCABULARY)[:60_000]


class Crops:
    """Stretches of the text, each begun at a random place of its own."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // LENGTH - 2

    def __getitem__(self, index: int) -> Any:
        start = index * LENGTH + random.randrange(LENGTH)
        return self.data[start : start + LENGTH + 1].long()


def main() -> None:
    import torch
    from torch import nn

    from ckpt import CheckpointManager, ResumableLoader

    # Another number of threads adds in another order, which changes the last bits.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)

    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    loader = ResumableLoader(Crops(data), batch_size=64, seed=0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 32),
        nn.Flatten(0, 1),
        nn.Linear(32, 64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, VOCABULARY),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with CheckpointManager("runs/demo", state, save_every_steps=SAVE_EVERY) as manager:
        for step, crops in manager.loop(STEPS, loader):
            loss = nn.functional.cross_entropy(model(crops[:, :-1]), crops[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
