"""`ckpt prune`, `ckpt pin` and `ckpt unpin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.running import FAILED, FINE, Answer, answers, step_folder
from ckpt.cli.screen import Screen, clean, size
from ckpt.errors import NotCommittedError

if TYPE_CHECKING:
    from ckpt.storage.base import Storage


@click.command()
@click.argument("root")
@click.option("--keep-last", type=click.IntRange(min=1), required=True, metavar="N", help="How many newest steps stay.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@answers
def prune(root: str, keep_last: int, dry_run: bool) -> Answer:
    """Remove the checkpoints of a run but the newest N, the pinned ones and those its keep_best and keep_every keep.

    What unfinished saves left goes as well.     Refused while a run is writing ROOT; --dry-run is always allowed.

    \b
    Example:
      ckpt prune runs/demo --keep-last 3 --dry-run
    """
    from ckpt.edges.pruning import prune as remove

    found = remove(root, keep_last, dry_run=dry_run)
    notes = tuple(f"step {step.step} could not be removed: {step.path}" for step in found.failed)
    return Answer(found.to_dict(), lambda screen: _draw(screen, found), FAILED if found.failed else FINE, notes)


def _draw(screen: Screen, found: Any) -> None:
    rows = [[str(s.step), size(s.bytes), screen.style("keep", "green"), ", ".join(s.reasons)] for s in found.keep]
    word = "would go" if found.dry_run else "removed"
    rows += [[str(step.step), size(step.bytes), screen.style(word, "red"), ""] for step in found.remove]
    rows.sort(key=lambda row: int(row[0]))
    screen.table(rows, right=(0, 1))
    count, total = len(found.remove), sum(step.bytes for step in found.remove)
    steps = f"{count} checkpoint{'s' if count != 1 else ''}"
    screen.line(f"{steps} {'would be' if found.dry_run else ''} removed, {size(total)} freed".replace("  ", " "))
    if found.debris:
        swept = "would be swept" if found.dry_run else "swept"
        screen.line(f"{len(found.debris)} left by unfinished saves {swept}")


@click.command()
@click.argument("step_path")
@click.option("--note", default="", help="Why it is kept; shown by ls and inspect.")
@answers
def pin(step_path: str, note: str) -> Answer:
    """Keep a checkpoint from ever being removed. Can be done beside a live run.

    \b
    Example:
      ckpt pin runs/demo/step-00000500 --note "best so far"
    """
    from ckpt.commit.roster import set_pin
    from ckpt.edges.opening import path_of

    storage, folder = step_folder(step_path)
    step = _step_in(storage, folder)
    set_pin(storage, step, note)
    path = path_of(storage, folder)
    document = {"schema": 1, "step": step, "path": path, "pinned": True, "note": note}
    return Answer(document, lambda screen: screen.line(f"step {step} is pinned: {clean(path)}"))


@click.command()
@click.argument("step_path")
@answers
def unpin(step_path: str) -> Answer:
    """Let retention remove a pinned checkpoint again; fine when it was not pinned.

    \b
    Example:
      ckpt unpin runs/demo/step-00000500
    """
    from ckpt.commit.roster import remove_pin
    from ckpt.edges.opening import path_of

    storage, folder = step_folder(step_path)
    step = _step_in(storage, folder)
    remove_pin(storage, step)
    path = path_of(storage, folder)
    document = {"schema": 1, "step": step, "path": path, "pinned": False, "note": ""}
    return Answer(document, lambda screen: screen.line(f"step {step} is not pinned: {clean(path)}"))


def _step_in(storage: Storage, folder: str) -> int:
    """What the manifest says, whatever the folder is called; its name where there is no manifest any more."""
    from ckpt.commit.roster import Scanner

    found = Scanner(storage, tables=False).look(folder)
    if found is not None:
        return found.step
    raise NotCommittedError(f"{storage.url}/{folder} is no checkpoint.", path=f"{storage.url}/{folder}")
