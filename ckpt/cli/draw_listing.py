"""The table of `ckpt ls`."""

from __future__ import annotations

from ckpt.cli.screen import Screen, age, clean, figure, moment, size, width_of, wrapped
from ckpt.edges.listing import ListedStep, Listing

_METRICS = 4  # columns at most; the rest is in --json


def draw(screen: Screen, found: Listing) -> None:
    of_line = [step for step in found.steps if step.state == "line"]
    total = sum(step.bytes or 0 for step in of_line)
    count = f"{len(of_line)} checkpoint{'s' if len(of_line) != 1 else ''}"
    dot = screen.sign(" · ", " - ")
    facts = dot.join([count, size(total), *([f"run {of_line[-1].run or ''}"[:12]] if of_line else [])])
    name = screen.fit(clean(found.root), max(screen.width - width_of(facts) - 2, 20))
    screen.line(f"{screen.style(name, 'bold')}  {screen.style(facts, 'dim')}")
    screen.line()
    _table(screen, found.steps)
    _rest(screen, found)


def _table(screen: Screen, steps: tuple[ListedStep, ...]) -> None:
    metrics = list(dict.fromkeys(key for step in steps for key in step.metrics))[:_METRICS]
    worlds = any((step.world_size or 1) != 1 for step in steps)
    head = ["", "step", "saved", "age", "bytes"] + (["ranks"] if worlds else [])
    rows: list[list[str]] = []
    for step in steps:
        row = [
            screen.style(screen.sign("→", ">"), "green") if step.newest else "",
            str(step.step),
            moment(step.time),
            age(step.time),
            size(step.bytes),
        ]
        row += [str(step.world_size or "?")] if worlds else []
        row += [figure(step.metrics[key]) if key in step.metrics else "" for key in metrics]
        rows.append([*row, _marks(screen, step)])
    fixed = len(head)
    table = [[*head, *(screen.fit(clean(key), 14) for key in metrics), ""], *rows]
    # What does not fit goes: the age, then metrics from the last one on (moved by one then), then the time.
    for drop in [3, *range(fixed + len(metrics) - 2, fixed - 2, -1), 2]:
        if _width(table) <= screen.width:
            break
        table = [row[:drop] + row[drop + 1 :] for row in table]
    head_row = [screen.style(cell, "dim") for cell in table[0]]
    columns = len(table[0])
    named = {i for i, cell in enumerate(table[0]) if cell == "saved"}
    right = [i for i in range(1, columns - 1) if i not in named]
    screen.table([head_row, *table[1:]], right=right, indent=0)


def _width(table: list[list[str]]) -> int:
    widths = [max(width_of(row[i]) for row in table) for i in range(len(table[0]))]
    return sum(widths) + 2 * (len(widths) - 1)


def _marks(screen: Screen, step: ListedStep) -> str:
    marks = []
    if step.newest:
        marks.append(screen.style("newest", "green"))
    if step.best:
        marks.append(screen.style("best", "cyan"))
    if step.pinned:
        note = screen.fit(clean(step.note), 40)
        marks.append(screen.style("pinned", "yellow") + (f" {note}" if note else ""))
    if step.state in ("abandoned", "other run"):
        marks.append(screen.style(step.state, "dim"))
    if step.state == "newer format":
        marks.append(screen.style("newer format", "yellow", "bold"))
    if step.state == "damaged":
        marks.append(screen.style("DAMAGED", "red", "bold"))
    return ", ".join(marks)


def _rest(screen: Screen, found: Listing) -> None:
    problems = [step for step in found.steps if step.state in ("damaged", "newer format")]
    if problems:
        screen.line()
    for step in problems:
        for text in wrapped(f"step {step.step}: {clean(step.problem)}", screen.width - 2):
            screen.line(f"  {text}")
    said = []
    hidden = all(step.state in ("line", "newer format") for step in found.steps)
    if hidden and found.damaged:
        said.append(screen.style(f"{found.damaged} damaged", "red"))
    if hidden and found.abandoned:
        said.append(f"{found.abandoned} abandoned after a rollback")
    if hidden and found.other_runs:
        said.append(f"{found.other_runs} of other runs")
    more = " (ckpt ls --all)" if said else ""
    if found.debris:
        said.append(f"{len(found.debris)} left by unfinished saves, swept by the next run")
    if found.foreign:
        said.append(f"{len(found.foreign)} that is not ours" if len(found.foreign) == 1 else
                    f"{len(found.foreign)} that are not ours")  # fmt: skip
    if said:
        screen.line()
        for text in wrapped(f"Also here: {', '.join(said)}{more}", screen.width):
            screen.line(screen.style(text, "dim") if "\x1b" not in text else text)
