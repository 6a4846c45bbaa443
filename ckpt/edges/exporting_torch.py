"""A state dict in torch's own file format, held to what `torch.load(weights_only=True)` takes."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

from ckpt.capture.reading import build_tree
from ckpt.commit.stored import Stored
from ckpt.edges.progress import Progress
from ckpt.edges.reading import fetch
from ckpt.errors import UnsupportedStateError
from ckpt.format.names import unescape
from ckpt.manager.resuming import saved_state


def torch_file(stored: Stored, name: str, progress: Progress | None = None) -> memoryview:
    """The bytes of a .pt with what was saved as `name`."""
    import torch

    saved = saved_state(stored)
    wanted = {saved.aliases.get(full, full) for full in (*saved.tensors, *saved.aliases) if full.startswith(f"{name}/")}
    tensors = fetch(stored, saved, [full for full in saved.tensors if full in wanted], progress)
    tree: Any = build_tree(saved, tensors, lambda path: path.startswith(f"{name}/"))
    for key in name.split("/"):
        # Of a list the tree holds nothing but the object asked for.
        tree = tree[unescape(key)] if isinstance(tree, dict) else tree[0]
    _check(tree, name)
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getbuffer()


def _check(value: Any, path: str) -> None:
    """Refuses, by name, what a safe load would refuse: found now, not by whoever gets the file."""
    import torch

    safe = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check(item, f"{path}/{key}")
    elif type(value) in (list, tuple, set):
        for i, item in enumerate(value):
            _check(item, f"{path}/{i}")
    elif not isinstance(value, torch.Tensor) and type(value) not in safe:
        raise UnsupportedStateError(
            f"{path} is of type {type(value).__name__}, which torch.load(weights_only=True) refuses.",
            name=path,
            type=type(value).__name__,
            stage="export",
            hint='Use format="safetensors", which holds the tensors alone.',
        )
