"""Fault-tolerant checkpoints for PyTorch: a training run survives anything and goes on bit for bit.

The public surface is what stands here; names are resolved when they are first used, so that `import ckpt` and the
commands that only look inside checkpoints never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt._version import __version__

if TYPE_CHECKING:
    from ckpt.data.loader import ResumableLoader
    from ckpt.data.sampler import ResumableSampler
    from ckpt.data.statedict import StateDict
    from ckpt.edges.differing import diff
    from ckpt.edges.exporting import export
    from ckpt.edges.grouping import param_groups
    from ckpt.edges.inspecting import inspect
    from ckpt.edges.reading import read
    from ckpt.edges.verifying import verify
    from ckpt.edges.weights import load_weights
    from ckpt.errors import (
        CheckpointError,
        ClosedError,
        CommitUnknown,
        CoordinationError,
        CorruptCheckpointError,
        DeadlineError,
        ForkedError,
        LockedError,
        NotCommittedError,
        OutOfSpaceError,
        ReplicaDivergence,
        RunExistsError,
        StateMismatchError,
        StorageUnavailableError,
        UnsupportedFormatError,
        UnsupportedStateError,
    )
    from ckpt.manager.manager import CheckpointManager
    from ckpt.manager.reports import Receipt, SaveReport

_HOMES = {
    "ckpt.manager.manager": ("CheckpointManager",),
    "ckpt.manager.reports": ("Receipt", "SaveReport"),
    "ckpt.data.loader": ("ResumableLoader",),
    "ckpt.data.sampler": ("ResumableSampler",),
    "ckpt.data.statedict": ("StateDict",),
    "ckpt.edges.differing": ("diff",),
    "ckpt.edges.exporting": ("export",),
    "ckpt.edges.grouping": ("param_groups",),
    "ckpt.edges.inspecting": ("inspect",),
    "ckpt.edges.reading": ("read",),
    "ckpt.edges.verifying": ("verify",),
    "ckpt.edges.weights": ("load_weights",),
    "ckpt.errors": (
        "CheckpointError",
        "ClosedError",
        "CommitUnknown",
        "CoordinationError",
        "CorruptCheckpointError",
        "DeadlineError",
        "ForkedError",
        "LockedError",
        "NotCommittedError",
        "OutOfSpaceError",
        "ReplicaDivergence",
        "RunExistsError",
        "StateMismatchError",
        "StorageUnavailableError",
        "UnsupportedFormatError",
        "UnsupportedStateError",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
