"""`ckpt export` and `ckpt cp`."""

from __future__ import annotations

import click

from ckpt.cli.running import Answer, answers
from ckpt.cli.screen import Screen, clean, size


@click.command()
@click.argument("path")
@click.argument("out")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    help="Taken from OUT's ending (.safetensors; .pt, .pth, .bin) if not given.",
)
@click.option("--name", default="model", show_default=True, help="Registered name of what is written.")
@click.option("--step", type=click.IntRange(min=0), help="Another step than the newest, where PATH is a root.")
@click.option("--max-shard-bytes", type=click.IntRange(min=1), help="Largest safetensors file; 5 GB if not given.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there.")
@answers
def export(
    path: str, out: str, kind: str | None, name: str, step: int | None, max_shard_bytes: int | None, overwrite: bool
) -> Answer:
    """Write the weights of a checkpoint for other tools; prints the files made.

    OUT is a file, or without an extension a folder. Keys are the module's own names ("layers.0.weight").

    \b
    Example:
      ckpt export runs/demo model.safetensors
      ckpt export runs/demo/step-00000500 model.pt
    """
    from ckpt.cli.bars import bar
    from ckpt.edges.exporting import MAX_SHARD_BYTES, format_of
    from ckpt.edges.exporting import export as write

    kind = format_of(out, kind)
    if kind == "dcp":
        raise click.UsageError("this version cannot write the dcp format yet; use safetensors or torch")
    with bar("export") as progress:
        paths = write(
            path,
            out,
            format=kind,
            name=name,
            step=step,
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes or MAX_SHARD_BYTES,
            progress=progress,
        )

    def draw(screen: Screen) -> None:
        for each in paths:
            screen.line(clean(each))

    return Answer({"schema": 1, "paths": list(paths), "format": kind, "name": name}, draw)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--step", type=click.IntRange(min=0), help="Another step than the newest, where SRC is a root.")
@answers
def cp(source: str, target: str, step: int | None) -> Answer:
    """Copy one checkpoint to another root, every byte checked on the way.

    DST is a root, or a folder named like a step. It appears there whole or not at all. When the same checkpoint is
    there already, nothing is done; when another one is, the exit code is 1.

    \b
    Example:
      ckpt cp runs/demo/step-00000500 backup
    """
    from ckpt.cli.bars import bar
    from ckpt.edges.copying import copy

    with bar("copy") as progress:
        found = copy(source, target, step=step, progress=progress)

    def draw(screen: Screen) -> None:
        did = "copied and verified" if found.copied else "was there already, the same"
        screen.line(f"{clean(found.path)}  step {found.step}, {size(found.bytes)} {did}")

    return Answer(found.to_dict(), draw)
