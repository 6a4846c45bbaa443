"""A checkpoint, or some of it, as plain tensors and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckpt.capture.base import SavedState, Target
from ckpt.capture.reading import build_tree, leaf_paths
from ckpt.capture.tensors import allocate
from ckpt.commit.landing import land
from ckpt.commit.stored import Stored
from ckpt.edges.inspecting import near
from ckpt.edges.opening import rank_view, use
from ckpt.edges.progress import Progress, counted
from ckpt.format.dtypes import ITEMSIZE
from ckpt.format.values import spell
from ckpt.manager.resuming import saved_state

if TYPE_CHECKING:
    import torch


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
    patterns = [keys] if isinstance(keys, str) else None if keys is None else list(keys)
    return use(path, step, lambda found: _read(rank_view(found.stored()), patterns, progress))


def _read(stored: Stored, keys: list[str] | None, progress: Progress | None) -> dict[str, Any]:
    saved = saved_state(stored)
    if keys is None:
        return build_tree(saved, fetch(stored, saved, list(saved.tensors), progress))
    paths = leaf_paths(saved)
    fits = _Fits(paths, keys)
    return build_tree(saved, fetch(stored, saved, _wanted(saved, paths, fits), progress), fits)


def fetch(
    stored: Stored, saved: SavedState, names: Sequence[str], progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Fresh CPU tensors with the bytes of the stored names, each checked."""
    tensors = {name: allocate(saved.tensors[name]) for name in names}
    total = sum(tensor.numel() * ITEMSIZE[saved.tensors[name].dtype] for name, tensor in tensors.items())
    land(stored, [Target(name, tensor) for name, tensor in tensors.items()], counted(progress, total))
    return tensors


class _Fits:
    """Whether a path, or the path of a node above it, fits one of the patterns. Each must fit something."""

    def __init__(self, paths: list[str], patterns: list[str]) -> None:
        self._patterns = patterns
        self._known: dict[str, bool] = {}
        for pattern in patterns:
            if not any(fnmatchcase(node, pattern) for node in dict.fromkeys(_with_above(paths))):
                raise KeyError(f"nothing in the checkpoint fits {pattern!r}{near(pattern, paths)}")

    def __call__(self, path: str) -> bool:
        if path not in self._known:
            above = path.rpartition("/")[0]
            fits = any(fnmatchcase(path, pattern) for pattern in self._patterns)
            self._known[path] = fits or (bool(above) and self(above))
        return self._known[path]


def _with_above(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        while path:
            yield path
            path = path.rpartition("/")[0]


def _wanted(saved: SavedState, paths: list[str], fits: _Fits) -> list[str]:
    """The stored names of all tensors that a leaf of the kept tree is made of."""
    import torch

    names = {saved.aliases.get(name, name) for name in (*saved.tensors, *saved.aliases) if fits(name)}
    # A tensor inside a value may lie under another path than its name: it is known by the memory that stands for it.
    leaves, inner = set(paths), tuple(f"{name}/" for name in saved.composites)
    odd = [name for name in saved.tensors if name not in leaves and not (inner and name.startswith(inner))]
    marks = {name: allocate(saved.tensors[name]) for name in odd}
    name_of = {tensor.data_ptr(): name for name, tensor in marks.items() if tensor.numel()}
    for path, leaf in _leaves(build_tree(saved, marks), ()) if marks else ():
        address = leaf.data_ptr() if isinstance(leaf, torch.Tensor) else _address(leaf)
        if address in name_of and fits(spell(path)):
            names.add(name_of[address])
    return [name for name in saved.tensors if name in names]


def _address(leaf: Any) -> int | None:
    interface = getattr(leaf, "__array_interface__", None)
    return interface["data"][0] if isinstance(interface, dict) and interface.get("data") else None


def _leaves(node: Any, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], Any]]:
    if isinstance(node, Mapping):
        for key, item in node.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(node, (list, tuple)):
        for i, item in enumerate(node):
            yield from _leaves(item, (*path, i))
    else:
        yield path, node
