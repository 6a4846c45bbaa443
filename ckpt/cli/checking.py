"""`ckpt verify` and `ckpt diff`."""

from __future__ import annotations

import click

from ckpt.cli.running import FINDINGS, FINE, Answer, answers
from ckpt.cli.screen import Screen, clean, figure, size

_SHOWN = 8  # findings of one step that are listed; --json has them all


@click.command()
@click.argument("path")
@click.option("--step", type=click.IntRange(min=0), help="Only this step, where PATH is a root.")
@answers
def verify(path: str, step: int | None) -> Answer:
    """Read every byte back and compare all digests; a damaged file is named, and the tensor in it.

    PATH is a run's root, whose steps are all checked, or one step's folder. Exit code 3 when anything is damaged
    or could not be checked.

    \b
    Example:
      ckpt verify runs/demo
      ckpt verify runs/demo/step-00000500 --json
    """
    from ckpt.cli.bars import bar
    from ckpt.edges.verifying import verify as check

    with bar("verify") as progress:
        found = check(path, step=step, progress=progress)
    return Answer(found.to_dict(), lambda screen: _draw_verdicts(screen, found), FINE if found.ok else FINDINGS)


def _draw_verdicts(screen: Screen, found) -> None:  # noqa: ANN001  (its type would import what --help does not need)
    total = sum(step.bytes for step in found.steps)
    width = max((len(str(step.step)) for step in found.steps), default=1)
    later = [step for step in found.steps if [finding.kind for finding in step.findings] == ["unsupported-format"]]
    for step in found.steps:
        word = screen.style("sound", "green") if step.ok else screen.style("DAMAGED", "red", "bold")
        if step in later:
            word = screen.style("NEWER FORMAT", "yellow", "bold")
        name = clean(step.path.rpartition("/")[2])
        screen.line(f"  step {step.step:>{width}}  {size(step.bytes):>8}  {word}{'' if step.ok else f'  {name}'}")
        for finding, reason in list(zip(step.findings, step.reasons, strict=True))[:_SHOWN]:
            screen.line(f"    {clean(finding.file)}: {clean(reason)}")
        if len(step.findings) > _SHOWN:
            screen.line(f"    and {len(step.findings) - _SHOWN:,} more findings (--json lists all)")
    damaged = sum(not step.ok for step in found.steps) - len(later)
    count = len(found.steps)
    if damaged:
        screen.line(f"{damaged} of {count} checkpoint{'s' if count != 1 else ''} damaged")
    if later:
        screen.line(f"{len(later)} of {count} checkpoint{'s' if count != 1 else ''} not checked: of a newer format")
    if found.ok:
        what = "the checkpoint is" if count == 1 else f"all {count} checkpoints are"
        screen.line(f"{what} sound: {size(total)} read, every digest right")


@click.command()
@click.argument("a")
@click.argument("b")
@answers
def diff(a: str, b: str) -> Answer:
    """Compare the states of two checkpoints bit by bit: tensors, values and random state.

    A and B are roots (their newest step) or step folders. Exit code 0 when they are equal, 3 when not.

    \b
    Example:
      ckpt diff runs/one/step-00000500 runs/two/step-00000500
    """
    from ckpt.cli.bars import bar
    from ckpt.edges.differing import diff as compare

    with bar("diff") as progress:
        found = compare(a, b, progress=progress)
    return Answer(found.to_dict(), lambda screen: _draw_diff(screen, found), FINE if found.equal else FINDINGS)


def _draw_diff(screen: Screen, found) -> None:  # noqa: ANN001
    screen.line(f"A  {clean(found.a)}")
    screen.line(f"B  {clean(found.b)}")
    if found.equal:
        screen.line(screen.style(f"equal: {found.compared:,} tensors and values, bit for bit", "green"))
        return
    for sign, names, where, colour in (
        ("-", found.removed, "only in A", "red"),
        ("+", found.added, "only in B", "green"),
    ):
        if names:
            screen.heading(f"{len(names):,} {where}")
        for name in names[:_SHOWN]:
            screen.line(screen.style(f"  {sign} {screen.fit(clean(name), screen.width - 4)}", colour))
        if len(names) > _SHOWN:
            screen.line(f"    and {len(names) - _SHOWN:,} more (--json lists all)")
    if found.changed:
        screen.heading(f"{len(found.changed):,} of {found.compared:,} differ")
        rows = [
            [
                screen.fit(clean(c.key), screen.width - 32),
                c.kind,
                "" if c.max_abs is None else f"max {figure(c.max_abs)}",
            ]
            for c in found.changed[: _SHOWN * 4]
        ]
        screen.table(rows)
        if len(found.changed) > len(rows):
            screen.line(f"  and {len(found.changed) - len(rows):,} more (--json lists all)")
