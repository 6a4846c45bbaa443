"""`ckpt demo`."""

from __future__ import annotations

import sys

import click

from ckpt.cli.running import Answer, answers


@click.command()
@click.option("--kills", type=click.IntRange(min=0), default=4, show_default=True, help="Kills at random moments.")
@answers
def demo(kills: int) -> Answer:
    """Train a small model on real text, kill it once at every named point and --kills times at random, and prove
    that the end is the same to the last bit.

    Takes about a minute on two cores, needs no network, and leaves nothing behind.

    \b
    Example:
      ckpt demo
    """
    from ckpt.chaos.campaign import Settings
    from ckpt.chaos.launch import CommandLauncher
    from ckpt.cli.chaos import campaign

    command = [sys.executable, "-m", "ckpt.chaos.demo_train"]
    return campaign(CommandLauncher(command), Settings(kills=kills, seed=0, jobs=2), None)
