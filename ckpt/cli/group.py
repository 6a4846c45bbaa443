"""The command `ckpt`: each subcommand's file is imported only when it runs, so that `ckpt ls` answers at once."""

from __future__ import annotations

from importlib import import_module

import click

from ckpt._version import __version__

# name -> (home, attribute, what it is for)
COMMANDS = {
    "ls": ("ckpt.cli.looking", "ls", "List the checkpoints of a run."),
    "inspect": ("ckpt.cli.looking", "inspect", "Show what is inside a checkpoint."),
    "verify": ("ckpt.cli.checking", "verify", "Read every byte back and compare all digests."),
    "diff": ("ckpt.cli.checking", "diff", "Compare two checkpoints bit by bit."),
    "export": ("ckpt.cli.carrying", "export", "Write the weights for other tools: safetensors or .pt."),
    "cp": ("ckpt.cli.carrying", "cp", "Copy a checkpoint, verified on the way."),
    "prune": ("ckpt.cli.keeping", "prune", "Remove old checkpoints of a run."),
    "pin": ("ckpt.cli.keeping", "pin", "Keep a checkpoint from ever being removed."),
    "unpin": ("ckpt.cli.keeping", "unpin", "Let retention remove a pinned checkpoint again."),
    "chaos": ("ckpt.cli.chaos", "chaos", "Kill a training again and again and prove that nothing is lost."),
    "demo": ("ckpt.cli.demo", "demo", "A training killed and resumed before your eyes, in about a minute."),
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        home, attribute, _ = COMMANDS[cmd_name]
        return getattr(import_module(home), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Without this each command's file would be imported only to show its first line.
        with formatter.section("Commands"):
            formatter.write_dl([(name, says) for name, (_, _, says) in COMMANDS.items()])


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="PATH is a run's root (its newest checkpoint is meant) or one step's folder, local or a URL.\n\n"
    "Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 findings or differences, 4 nothing committed there, "
    "5 storage could not be read.",
)
@click.version_option(__version__, prog_name="ckpt", message="%(prog)s %(version)s")
def group() -> None:
    """Look inside, check and keep the checkpoints of a training run.

    \b
    Example:
      ckpt ls runs/demo
      ckpt inspect runs/demo
    """
