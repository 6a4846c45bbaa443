"""Files for other tools: they appear whole under their names, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt.errors import CheckpointError
from ckpt.format.names import TMP_PREFIX
from ckpt.storage.local import LocalStorage


@dataclass(frozen=True)
class Target:
    """A file to be made: its name, and what gives its bytes when its turn comes."""

    name: str
    make: Callable[[], memoryview | bytes]


def put_files(folder: str, targets: Sequence[Target], overwrite: bool) -> tuple[str, ...]:
    """Makes all files in `folder`, one in memory at a time; they are renamed into place when all are written, in
    order, and durable on return. FileExistsError, with nothing changed, when one is there and `overwrite` is False."""
    storage = LocalStorage(folder)
    paths = tuple(os.path.join(folder, target.name) for target in targets)
    if not overwrite:
        for path in paths:
            if os.path.lexists(path):
                raise FileExistsError(f"{path} is there already; overwrite=True (--overwrite) replaces it")
    drafts: list[str] = []
    try:
        for target in targets:
            data = target.make()
            storage.make_root()
            draft = f"{TMP_PREFIX}{target.name}-{os.urandom(8).hex()}"
            drafts.append(draft)
            storage.write_new(draft, data)
            del data
        for path, target, draft in zip(paths, targets, list(drafts), strict=True):
            if overwrite:
                storage.supersede(draft, target.name)
            elif not storage.publish(draft, target.name):
                raise FileExistsError(f"{path} is there already; overwrite=True (--overwrite) replaces it")
            drafts.remove(draft)
        storage.sync_folder()
    finally:
        for draft in drafts:
            with contextlib.suppress(CheckpointError):
                storage.remove_file(draft)
    return paths
