"""A checkpoint, or some of it, as plain tensors and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ckpt.capture.base import SavedState, Target
from ckpt.capture.reading import build_tree, leaf_paths
from ckpt.capture.tensors import allocate
from ckpt.commit.landing import land
from ckpt.commit.stored import Stored
from ckpt.edges.inspecting import near
from ckpt.edges.opening import locate
from ckpt.edges.progress import Progress, counted
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.values import spell
from ckpt.manager.resuming import saved_state


def read(
    path: Any,
    *,
    keys: str | Sequence[str] | None = None,
    step: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The state tree of one checkpoint as plain values and fresh, writable CPU tensors; nothing live is made.

    By registered name: ["model"][fqn], ["optimizer"] = {"state": {fqn: {...}}, "param_groups": [...]}, ["rng"]["torch"
    | ...], others as their state_dict gave them. Tensors that were tied share memory.

    path: a step's folder, or a root, where the newest committed step of the line (or `step`) is meant. keys: patterns
    of fnmatchcase on "/"-joined paths ("model/layers.0.weight", "model/*"); the path of an inner node takes all below
    it. Only the bytes of what fits are read, and each tensor is checked against its digest. In a list, what does not
    fit is left out.

    Raises KeyError, with near names, for a pattern that fits nothing; NotCommittedError, CorruptCheckpointError,
    StorageUnavailableError.
    """
    if keys is not None and not isinstance(keys, str) and not all(isinstance(key, str) for key in keys):
        raise TypeError(f"keys must be a pattern or a sequence of patterns, not {keys!r}")
    stored = locate(path, step=step).stored()
    saved = saved_state(stored)
    if keys is None:
        return build_tree(saved, fetch(stored, saved, list(saved.tensors), progress))
    fits = _matcher(saved, [keys] if isinstance(keys, str) else list(keys))
    return build_tree(saved, fetch(stored, saved, _wanted(saved, fits), progress), fits)


def fetch(
    stored: Stored, saved: SavedState, names: Sequence[str], progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Fresh CPU tensors with the bytes of the stored names, each checked."""
    tensors = {name: allocate(saved.tensors[name]) for name in names}
    total = sum(tensor.numel() * ITEMSIZE[saved.tensors[name].dtype] for name, tensor in tensors.items())
    land(stored, [Target(name, tensor) for name, tensor in tensors.items()], counted(progress, total))
    return tensors


def _matcher(saved: SavedState, patterns: list[str]) -> Callable[[str], bool]:
    """Whether a path, or the path of a node above it, fits one of the patterns. Each must fit some leaf."""
    paths = leaf_paths(saved)
    used: set[str] = set()
    known: dict[str, bool] = {}

    def fits(path: str) -> bool:
        if path not in known:
            found = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
            used.update(found)
            above = path.rpartition("/")[0]
            known[path] = bool(found) or (bool(above) and fits(above))
        return known[path]

    for path in paths:
        while path:
            used.update(pattern for pattern in patterns if pattern not in used and fnmatchcase(path, pattern))
            path = path.rpartition("/")[0]
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        raise KeyError(f"nothing in the checkpoint fits {unused[0]!r}{near(unused[0], paths)}")
    return fits


def _wanted(saved: SavedState, fits: Callable[[str], bool]) -> list[str]:
    """The stored names of all tensors that a leaf of the kept tree is made of."""
    names = {saved.aliases.get(name, name) for name in (*saved.tensors, *saved.aliases) if fits(name)}
    # A tensor inside a value may lie under another path than its name: it is known by the object that stands for it.
    marks = _Marks(saved)
    for path, leaf in _leaves(build_tree(saved, marks), ()):
        if isinstance(leaf, torch.Tensor) and id(leaf) in marks.names and fits(spell(path)):
            names.add(marks.names[id(leaf)])
    return [name for name in saved.tensors if name in names]


class _Marks(dict[str, torch.Tensor]):
    """An empty tensor for each stored one; those of composites are missing, since they would not fit together."""

    def __init__(self, saved: SavedState) -> None:
        super().__init__()
        self._inner = tuple(f"{name}/" for name in saved.composites)
        self.names: dict[int, str] = {}

    def __missing__(self, name: str) -> torch.Tensor:
        if self._inner and name.startswith(self._inner):
            raise KeyError(name)
        mark = self[name] = torch.empty(0, dtype=torch.uint8)
        self.names[id(mark)] = name
        return mark


def _leaves(node: Any, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], Any]]:
    if isinstance(node, Mapping):
        for key, item in node.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(node, (list, tuple)):
        for i, item in enumerate(node):
            yield from _leaves(item, (*path, i))
    else:
        yield path, node
