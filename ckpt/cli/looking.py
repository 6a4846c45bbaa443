"""`ckpt ls` and `ckpt inspect`."""

from __future__ import annotations

import click

from ckpt.cli.running import FINE, Answer, answers


@click.command()
@click.argument("root")
@click.option("--all", "everything", is_flag=True, help="Also abandoned, damaged and other runs' steps.")
@click.option("--best", "monitor", metavar="METRIC", help="Mark the step that is best by this metric, not the run's.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", help="Whether less or more of it is better.")
@answers
def ls(root: str, everything: bool, monitor: str | None, mode: str) -> Answer:
    """List the checkpoints under ROOT, the newest last.

    Shown are the committed steps of the newest run's line: not those that a resume of an older step left behind.

    \b
    Example:
      ckpt ls runs/demo
      ckpt ls runs/demo --all --best loss
      ckpt ls runs/demo --json | jq '.steps[-1].path'
    """
    from ckpt.cli.draw_listing import draw
    from ckpt.edges.listing import listing

    found = listing(root, everything=everything, monitor=monitor, mode=mode)
    return Answer(found.to_dict(), lambda screen: draw(screen, found), FINE)


@click.command()
@click.argument("path")
@click.argument("key", required=False)
@click.option("--tensors", is_flag=True, help="With the table of all tensors.")
@click.option("--step", type=click.IntRange(min=0), help="Another step than the newest, where PATH is a root.")
@answers
def inspect(path: str, key: str | None, tensors: bool, step: int | None) -> Answer:
    """Show what is inside a checkpoint: parts, sizes, positions, and with KEY one tensor's values.

    PATH is a run's root or one step's folder. KEY is a tensor's name, the end of one, or a pattern that fits just one;
    only that tensor is read.

    \b
    Example:
      ckpt inspect runs/demo
      ckpt inspect runs/demo --step 500 --tensors
      ckpt inspect runs/demo/step-00000500 model/fc.weight
    """
    from ckpt.cli.draw_inspection import draw
    from ckpt.edges.inspecting import inspect as look

    found = look(path, key=key, tensors=tensors, step=step)
    return Answer(found.to_dict(), lambda screen: draw(screen, found), FINE)
