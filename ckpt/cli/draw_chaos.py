"""What a campaign found, as a table a person reads at a glance; and its progress while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckpt.chaos.campaign import Watcher
from ckpt.chaos.outcome import BIT_EXACT, KillRecord, Outcome, several
from ckpt.chaos.plans import ANY_MOMENT, IN_SAVE, SET_UP
from ckpt.cli.running import say
from ckpt.cli.screen import Screen, clean, figure, seconds, size

_SHOWN = 8  # differences and problems that are listed; --json has them all


def draw(screen: Screen, outcome: Outcome) -> None:
    rows: list[tuple[str, ...]] = [("point", "hits", "killed at step", "resumed at", "restarts", "verdict")]
    for name in (*outcome.wanted, IN_SAVE, ANY_MOMENT, SET_UP):
        kills = outcome.hits(name)
        if kills or name in outcome.wanted:
            rows.append(_row(screen, name, kills))
    screen.table([tuple(screen.style(cell, "bold") for cell in rows[0]), *rows[1:]], right=(1, 4), indent=0)
    screen.line()
    _draw_numbers(screen, outcome)
    found = [*outcome.problems, *(str(item) for item in outcome.differing)]
    for text in found[:_SHOWN]:
        for line in text.splitlines():
            # The last line of all says it.
            if line != outcome.verdict:
                screen.line(f"  {screen.style(clean(line), 'red')}")
    if len(found) > _SHOWN:
        screen.line(f"  and more (--json lists all {len(found)})")
    good = outcome.verdict == BIT_EXACT
    screen.line(screen.style(clean(outcome.verdict), "green" if good else "red", "bold"))


def _row(screen: Screen, name: str, kills: Sequence[KillRecord]) -> tuple[str, ...]:
    verdict = "no hit" if not kills else "FAILED" if any(kill.problem for kill in kills) else "ok"
    return (
        name,
        str(len(kills)),
        _some([kill.step for kill in kills]),
        _some([kill.resumed for kill in kills]),
        str(sum(kill.restarts for kill in kills)),
        screen.style(verdict, "green" if verdict == "ok" else "red"),
    )


def _some(steps: Sequence[int | None]) -> str:
    """As many of the steps as the column has room for."""
    texts = ["-" if step is None else str(step) for step in steps]
    shown: list[str] = []
    for number, text in enumerate(texts):
        more = f" +{len(texts) - number}" if number else ""
        if len(" ".join([*shown, text])) > 13 - (4 if number < len(texts) - 1 else 0):
            return " ".join(shown) + more if shown else f"{text}{'' if len(texts) == 1 else f' +{len(texts) - 1}'}"
        shown.append(text)
    return " ".join(shown)


def _draw_numbers(screen: Screen, outcome: Outcome) -> None:
    inside, drawn = outcome.random_inside
    compared = outcome.compared
    texts = [
        f"{several(len(outcome.kills), 'kill')} in {several(outcome.runs, 'run')}",
        *([f"{inside} of {several(drawn, 'random one')} inside a save"] if drawn else []),
        f"{several(outcome.verified, 'checkpoint')} read back after a kill",
        f"compared: {figure(compared.tensors)} tensors",
        f"{figure(compared.rng)} RNG values",
        f"{figure(compared.batches)} batches",
        f"{figure(compared.steps)} checkpoints by digest",
        f"{size(compared.bytes)} byte by byte",
        f"seed {outcome.seed}",
        seconds(outcome.seconds),
    ]
    screen.flow(texts, indent=0, separator=", ")
    if outcome.unreached:
        screen.line(f"not reached by this training: {', '.join(outcome.unreached)}")
    if outcome.missed:
        screen.line(f"never struck: {', '.join(outcome.missed)}")
    for hole in outcome.holes[1 if not outcome.missed and outcome.exit == 1 else 0 :]:
        screen.line(hole)
    for note in outcome.notes:
        screen.line(f"note: {clean(note)}")


class _Lines(Watcher):
    """One line a run, for logs."""

    def done(self, text: str) -> None:
        say(text)


class _Bar(Watcher):
    """One moving line on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars: Any = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bars.add_task("runs without faults", total=None)
        self.bars.start()

    def done(self, text: str) -> None:
        self.bars.console.print(text, markup=False, highlight=False)

    def struck(self, kills: int, total: int) -> None:
        self.bars.update(self.task, description="kills", completed=kills, total=total)


@contextmanager
def progress() -> Iterator[Watcher]:
    """Tells how it goes on stderr: a bar on a terminal, a line for each run elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.bars.stop()
