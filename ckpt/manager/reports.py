"""What a manager tells about its last save and its last resume, and the surroundings that decide bits."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt._version import __version__
from ckpt.errors import CheckpointError


@dataclass(frozen=True)
class SaveReport:
    """The newest finished save. bytes: of all ranks; stall_s: how long training waited for it, waiting for an earlier
    save included; write_s: from the copy to the commit; durable: the step survives; error: why not."""

    step: int
    path: str
    bytes: int
    stall_s: float
    write_s: float
    durable: bool
    error: CheckpointError | None = None

    def __str__(self) -> str:
        if not self.durable:
            return f"step {self.step} was not saved: {self.error or self.path}"
        took = f"{self.write_s:.3f} s, training waited {self.stall_s:.3f} s"
        return f"saved step {self.step} as {self.path}: {self.bytes:,} bytes in {took}"


@dataclass(frozen=True)
class Receipt:
    """The last resume. `path` is None for a fresh start; `skipped`: ((step, reason), ...) of damaged newer steps.

    exactness: "fresh start", "bit-exact", or "changed: " and every reason why the run may differ from one that was
    never interrupted. notes: differences that were settled, each a sentence.
    """

    step: int
    path: str | None
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[tuple[int, str], ...]
    world_size_then: int | None
    world_size_now: int
    exactness: str
    environment_then: Mapping[str, Any]
    environment_now: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.path is None:
            return self.exactness
        count = f"{len(self.restored)} object{'s' if len(self.restored) != 1 else ''}"
        return f"resumed step {self.step} of {self.path}: {self.exactness}, {count}"


def environment() -> dict[str, Any]:
    """What, beside the state, decides the bits of the next step."""
    info: dict[str, Any] = {
        "ckpt": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "devices": _devices(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        info["numpy"] = str(numpy.__version__)
    return info


def _devices() -> list[str]:
    names = [f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"]
    # Asking an accelerator that this process has not used would initialise it, which takes memory and time.
    if torch.cuda.is_initialized():
        names += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return names


_DECIDING = {
    "torch": "torch version",
    "threads": "thread count",
    "deterministic": "determinism flags",
    "devices": "device model",
}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The deciding surroundings that differ, as reasons for `Receipt.exactness`."""
    return [
        f"{words} ({_short(then.get(key))} then, {_short(now.get(key))} now)"
        for key, words in _DECIDING.items()
        if then.get(key) != now.get(key)
    ]


def _short(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
