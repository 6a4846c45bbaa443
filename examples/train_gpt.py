"""A small character-level GPT on real text: the sources of Python's own standard library.

python examples/train_gpt.py --root runs/gpt --steps 300

It has what a real training has and what a resume has to get right: weight decay groups, warm-up and cosine decay,
dropout, gradient accumulation, mixed precision with or without a loss scaler, an averaged copy of the weights, tied
embeddings, random crops, and a validation pass in between. Stop it at any moment and run it again.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import sys
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from ckpt import CheckpointManager, ResumableLoader, StateDict

VOCABULARY = 128  # ASCII; other characters are left out of the text
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def standard_library_text(limit: int) -> Tensor:
    """The first `limit` ASCII characters of the library's top-level modules in order of name, as int64."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += bytes(c for c in path.read_bytes() if c < VOCABULARY)
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


class Crops(Dataset[Tensor]):
    """Windows of `length` + 1 characters. With `shift`, each starts at a random place within its stretch of text."""

    def __init__(self, text: Tensor, length: int, shift: bool) -> None:
        self.text, self.length, self.shift = text, length, shift

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length - 1

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length + (random.randrange(self.length) if self.shift else 0)
        return self.text[start : start + self.length + 1]


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.token(tokens) + self.place.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character_loss(model: nn.Module, crops: Tensor) -> Tensor:
    logits = model(crops[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), crops[:, 1:].flatten())


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay; biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def warm_up_then_cosine(warm_up: int, horizon: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, horizon - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


def autocast(precision: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=DTYPES[precision], enabled=precision != "fp32")


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[Tensor], precision: str) -> float:
    model.eval()
    with autocast(precision):
        losses = [next_character_loss(model, crops).item() for crops in loader]
    model.train()
    return sum(losses) / len(losses)


def digest(module: nn.Module) -> str:
    """Of every bit of the state, so that two runs can be compared by eye."""
    result = hashlib.sha256()
    for value in module.state_dict().values():
        result.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:16]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--root", default="runs/gpt", help="where the checkpoints are: a folder or a URL")
    parser.add_argument("--steps", type=int, default=100, help="the optimizer step to stop at")
    parser.add_argument("--save-every", type=int, default=10, help="optimizer steps between checkpoints")
    parser.add_argument("--validate-every", type=int, default=20, help="optimizer steps between validations")
    parser.add_argument("--sync", action="store_true", help="wait for the disk in every save")
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="of matrix products; fp16 uses a scaler")
    parser.add_argument("--threads", type=int, default=1, help="of torch; another number gives other last bits")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--batch", type=int, default=16, help="crops in one optimizer step")
    parser.add_argument("--accumulate", type=int, default=2, help="slices of a batch, one backward pass each")
    parser.add_argument("--width", type=int, default=96, help="of the model; a multiple of 32")
    parser.add_argument("--depth", type=int, default=3, help="of the model")
    parser.add_argument("--length", type=int, default=64, help="characters in a crop")
    parser.add_argument("--horizon", type=int, default=300, help="the step at which the learning rate is lowest")
    parser.add_argument("--text", type=int, default=1_000_000, help="characters of text to read at most")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.manual_seed(1)
    random.seed(1)
    torch.set_num_threads(args.threads)

    text = standard_library_text(args.text)
    held_out = max(len(text) // 100, 4 * args.length)
    crops = Crops(text[:-held_out], args.length, shift=True)
    loader = ResumableLoader(crops, batch_size=args.batch, seed=1, num_workers=args.workers)
    check = DataLoader(Crops(text[-held_out:], args.length, shift=False), batch_size=64)

    model = GPT(args.width, args.depth, args.width // 32, args.length, dropout=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(decay_groups(model), lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(10, args.horizon))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=20, enabled=args.precision == "fp16")
    best = StateDict(validation=math.inf)

    def train_step(batch: Tensor) -> float:
        total = 0.0
        for crops in batch.chunk(args.accumulate):
            with autocast(args.precision):
                loss = next_character_loss(model, crops) * (len(crops) / len(batch))
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if scaler.get_scale() >= scale:  # else gradients overflowed and the optimizer's step was left out
            scheduler.step()
            average.update_parameters(model)
        return total

    state = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"scaler": scaler, "loader": loader, "best": best}
    manager = CheckpointManager(
        args.root,
        state,
        keep_last=3,
        save_every_steps=args.save_every,
        async_save=not args.sync,
        on_signal=("SIGTERM",),
    )
    with manager:
        for step, batch in manager.loop(args.steps, loader):
            loss = train_step(batch)
            print(f"step {step} loss {loss:.4f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
            if step % args.validate_every == 0:
                best["validation"] = min(best["validation"], validate(average, check, args.precision))
                print(f"step {step} best validation {best['validation']:.4f}", flush=True)
            # The loop would save by itself; saying it here puts the figures into what `ckpt ls` shows.
            manager.save(step, metrics={"loss": loss, "validation": best["validation"]})
    if manager.should_stop:
        print(f"stopped by a signal after step {manager.latest_step}; run the same command to go on")
        return 143

    final = validate(average, check, args.precision)
    print(f"step {args.steps} loss {final:.6f} weights {digest(model)} average {digest(average)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
