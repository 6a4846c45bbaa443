"""Handwritten digits with a small convolutional net. Stop it at any moment, run it again: it goes on by itself.

python examples/train_minimal.py --root runs/digits
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from ckpt import CheckpointManager, ResumableLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="runs/digits", help="where the checkpoints are (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="the step to stop at (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=25, metavar="N")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # another number of threads adds in another order, which changes the last bits

    pixels, digits = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.as_tensor(digits)
    loader = ResumableLoader(TensorDataset(images, labels), batch_size=64, seed=0)

    body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*body, nn.Dropout(0.2), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with CheckpointManager(args.root, state, save_every_steps=args.save_every) as manager:
        for _step, (x, y) in manager.loop(args.steps, loader):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    model.eval()
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(images), labels).item()
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(f"step {args.steps} loss {final:.6f} weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
