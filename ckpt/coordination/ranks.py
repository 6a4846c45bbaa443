"""How ranks agree. Every decision that must be the same on all ranks goes through one of these calls (I11).

A single process agrees with itself. Saves of several processes need a channel of their own, and are refused until the
process has one, rather than done torn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckpt.errors import CoordinationError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one run, seen from `rank`."""

    rank: int = 0
    world_size: int = 1

    def decide(self, choose: Callable[[], T]) -> T:
        """What rank 0 chose, on every rank."""
        return choose()


def this_process() -> Ranks:
    """The ranks this process belongs to.

    Raises CoordinationError inside a torch.distributed job of more than one process: state of several ranks would be
    saved as if each were alone.
    """
    import sys

    # A process that never imported torch.distributed cannot be one of several ranks.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return Ranks()
    size = distributed.get_world_size()
    if size > 1:
        raise CoordinationError(
            f"This is rank {distributed.get_rank()} of {size}: this version saves and resumes single processes only.",
            ranks=(distributed.get_rank(),),
            stage="coordinate",
            hint="Run one process, or give each rank a root of its own before the process group is made.",
        )
    return Ranks()
