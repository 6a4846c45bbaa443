"""Named moments of a save, a resume and a removal, so that faults can be made to strike exactly there.

`reach(name)` marks a moment. It does nothing unless a hook is installed, and then calls it in the thread that reached
the moment. `NAMES` is the whole list, in the order a save passes them: a campaign that covers the list covers the
protocol, and a name that is not in the list is refused so that the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable

SAVE_POINTS = (
    "save.begin",  # in the caller's thread, before anything was copied
    "save.staged",  # the copy is complete; the caller is about to go on
    "write.begin",  # writer thread, before the attempt's folder is made
    "write.half",  # half of the data bytes are written
    "write.data",  # all data bytes are written, none is fsynced yet
    "fsync.file.before",  # before each fsync of a data or index file
    "fsync.file.after",
    "write.manifest",  # the manifest is written, not yet fsynced
    "fsync.manifest.before",
    "fsync.manifest.after",
    "fsync.folder.before",  # the attempt's folder
    "fsync.folder.after",
    "publish.before",  # before the rename, or the conditional put
    "publish.after",
    "fsync.parent.before",  # the root, after the rename
    "fsync.parent.after",
    "commit.acknowledged",
)
RETENTION_POINTS = (
    "retention.begin",
    "remove.unpublish.before",  # before a step stops being committed
    "remove.unpublish.after",
    "remove.half",  # some of its files are gone
    "remove.done",
)
RESUME_POINTS = (
    "resume.begin",
    "resume.chosen",  # a step was chosen, nothing live has changed
    "resume.tensors",  # tensors are placed, values are not
    "resume.done",
)
NAMES = frozenset(SAVE_POINTS + RETENTION_POINTS + RESUME_POINTS)

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Calls `hook(name)` at every moment from now on, in the thread that reaches it; None takes it away."""
    global _hook
    _hook = hook


def reach(name: str) -> None:
    if _hook is None:
        return
    if name not in NAMES:
        raise ValueError(f"unknown point {name!r}; add it to ckpt.points so that every campaign covers it")
    _hook(name)
