"""`ckpt chaos`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.running import Answer, Done, answers, say

if TYPE_CHECKING:
    from ckpt.chaos.campaign import Settings
    from ckpt.chaos.launch import Launcher


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--kills",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Kills at random moments, in addition to one at each named point.",
)
@click.option(
    "--points",
    default="all",
    metavar="all|none|NAME,...",
    help="Named points to kill at, once each; all: every one that the training reaches.  [default: all]",
)
@click.option("--seed", type=click.IntRange(min=0), help="Draws the same kills again.  [default: a new one, printed]")
@click.option("--work", metavar="DIR", help="Empty folder for all runs, kept.  [default: temporary, kept on failure]")
@click.option("--compare", metavar="FILE", help="A file the command leaves behind, compared as well.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds of one process.")
@click.option("--jobs", type=click.IntRange(1, 2), default=1, show_default=True, help="Runs side by side.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@answers
def chaos(command: tuple[str, ...], points: str, seed: int | None, work: str | None, **settings: Any) -> Answer:
    """Kill a training again and again, resume it each time, and compare its end bit by bit with that of a calm run.

    COMMAND is yours, unchanged, with its own options behind it. It runs twice without faults first. Every root that its
    CheckpointManagers write to is replaced by a folder in the work folder, so your checkpoints are never touched.
    Without a CheckpointManager, name what the command leaves behind with --compare; its own checkpoints then belong
    below the folder named by $CKPT_SANDBOX.

    Exit code 0: bit-exact. 3: something differs, or a checkpoint was lost or torn. 1: the campaign has a hole (a point
    that was asked for was never struck), or the runs without faults failed, differ from each other, or saved nothing.

    \b
    Example:
      ckpt chaos -- python train.py --steps 200
      ckpt chaos --kills 30 --points none --seed 7 --json -- python -m my.training
    """
    from ckpt.chaos.campaign import Settings, new_seed
    from ckpt.chaos.ending import refuse_existing
    from ckpt.chaos.launch import CommandLauncher

    refuse_existing(settings["compare"])
    chosen = Settings(points=point_names(points), seed=new_seed() if seed is None else seed, **settings)
    return campaign(CommandLauncher(command), chosen, work)


def point_names(text: str) -> tuple[str, ...] | None:
    from ckpt.points import NAMES

    if text in ("all", "none"):
        return None if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise click.UsageError(
            f"--points takes all, none or names of {', '.join(sorted(NAMES))}; not {unknown or text!r}"
        )
    return names


def campaign(launcher: Launcher, settings: Settings, work: str | None) -> Answer:
    """Runs a campaign with progress on stderr and its result as a table or a document."""
    from ckpt.chaos.campaign import Campaign
    from ckpt.chaos.workplace import workplace
    from ckpt.cli.draw_chaos import draw, progress

    with workplace(work) as place:
        try:
            with progress() as watcher, _terminable():
                running = Campaign(launcher, settings, place.path, watcher, keep=place.given)
                outcome = running.run()
            place.spared = outcome.exit == 3
        except (KeyboardInterrupt, Done):
            place.spared = False
            raise
        finally:
            if place.spared and not place.given:
                left = " and ".join(sorted(path.name for path in place.path.iterdir())) or "nothing"
                say(f"what {left} left behind (checkpoints, reports, output) is kept in {place.path}")
    return Answer(outcome.to_dict(), lambda screen: draw(screen, outcome), outcome.exit)


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM an exception, so that no child outlives the command."""

    def ended(number: int, frame: object) -> None:
        raise Done(128 + number)

    before = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
