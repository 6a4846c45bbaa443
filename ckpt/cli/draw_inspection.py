"""The picture of `ckpt inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.cli.draw_tensor import draw_tensor, draw_tensors
from ckpt.cli.screen import Screen, age, clean, figure, int_or, moment, number, seconds, size, width_of, wrapped
from ckpt.edges.inspecting import Inspection, PartSummary
from ckpt.edges.leaves import plain

_BAR = 48  # columns at most


def draw(screen: Screen, found: Inspection) -> None:
    _title(screen, found)
    if found.tensor is not None:
        draw_tensor(screen, found.tensor)
        return
    _parts(screen, found)
    _dtypes(screen, found)
    _state(screen, found)
    _metrics(screen, found)
    _world(screen, found)
    if found.tensors is not None:
        draw_tensors(screen, found.tensors)
    _warnings(screen, found)


def _title(screen: Screen, found: Inspection) -> None:
    dot = screen.sign(" · ", " - ")
    head = f"step {found.step:,}{dot}{size(found.bytes)}"
    if found.pinned:
        head += f"{dot}pinned"
    room = screen.width - width_of(head) - 2
    screen.line(f"{screen.style(head, 'bold')}  {screen.style(screen.fit(clean(found.path), max(room, 16)), 'cyan')}")
    past = age(found.time)
    facts = [f"saved {moment(found.time)}" + (f", {past} ago" if past else "")]
    write, stall = found.timings.get("write_s"), found.timings.get("stall_s", found.timings.get("capture_s"))
    if write is not None:
        rate = f" at {size(found.bytes / write)}/s" if write > 0 and found.bytes > 10_000_000 else ""
        facts.append(f"written in {seconds(write)}{rate}")
    if stall is not None:
        facts.append(f"training waited {seconds(stall)}")
    came = f"run {found.run[:8]}, incarnation {found.incarnation}"
    if found.parent is not None:
        came += f", resumed from step {found.parent.step:,}"
    facts.append(came)
    environment = [f"{key} {clean(found.environment[key])}" for key in ("torch", "python") if key in found.environment]
    facts += [", ".join(environment)] if environment else []
    screen.flow([screen.style(fact, "dim") for fact in facts], indent=0, separator=dot)
    if found.note:
        screen.line(f"note: {screen.fit(clean(found.note), screen.width - 6)}")


def _shares(screen: Screen, rows: list[tuple[list[str], float | None]], right: tuple[int, ...]) -> None:
    """Rows of cells, each with a bar of its share behind it where it has one."""
    widths = [max(width_of(cells[i]) for cells, _ in rows) for i in range(len(rows[0][0]))]
    taken = 2 + sum(widths) + 2 * len(widths)
    room = min(screen.width - taken - 6, _BAR)
    table = []
    for cells, share in rows:
        bar = ""
        if share is not None:
            percent = f"{share:4.0%}" if share >= 0.005 or share == 0 else " <1%"
            drawn = screen.bar(share, room) if room >= 4 else ""
            bar = percent + (f"  {screen.style(drawn, 'cyan')}" if drawn else "")
        table.append([*cells, bar])
    screen.table(table, right=right)


def _parts(screen: Screen, found: Inspection) -> None:
    screen.heading("What is inside")
    total = sum(part.bytes for part in found.parts.values())
    # A checkpoint of a few parts is one look; a container of hundreds of them would be many screens.
    rows: list[tuple[list[str], float | None]] = []
    for name, part in found.parts.items():
        kind = screen.style(part.kind, "dim")
        label = screen.fit(clean(name), 24)
        if part.tensors:
            tied = f" ({part.tied} tied)" if part.tied else ""
            count = f"{part.tensors:,} tensor{'s' if part.tensors != 1 else ''}{tied}"
            cells = [label, kind, count, number(part.params), size(part.bytes)]
            rows.append((cells, part.bytes / total if total else 0.0))
        else:
            rows.append(([label, kind, "", "", ""], None))
    if found.rng:
        rows.append((["rng", screen.style("random state", "dim"), "", "", ""], None))
    if screen.width < 72:
        rows = [(cells[:2] + cells[3:], share) for cells, share in rows]
    columns = len(rows[0][0]) if rows else 0
    if rows:
        _shares(screen, rows, tuple(range(2, columns)))
    else:
        screen.line("  nothing was registered")


def _dtypes(screen: Screen, found: Inspection) -> None:
    if not found.dtypes:
        return
    total = sum(tally.bytes for tally in found.dtypes.values())
    rows: list[tuple[list[str], float | None]] = [
        ([dtype, number(tally.params), size(tally.bytes)], tally.bytes / total if total else 0.0)
        for dtype, tally in found.dtypes.items()
    ]
    screen.heading("Element types")
    _shares(screen, rows, (1, 2))


def _state(screen: Screen, found: Inspection) -> None:
    lines = [(name, text) for name, part in found.parts.items() for text in _facts(screen, part)]
    if found.rng:
        lines.append(("rng", ", ".join(clean(name) for name in found.rng)))
    if not any(part.kind == "optimizer" for part in found.parts.values()):
        lines.append(("optimizer", screen.style("none in it: a run that has one cannot go on from here", "dim")))
    screen.heading("Where training stood")
    label = max((width_of(clean(name)) for name, _ in lines), default=0)
    label = min(label, 24)
    above = None
    for name, text in lines:
        shown = screen.fit(clean(name), label) if name != above else ""
        above = name
        pad = " " * (label - width_of(shown))
        room = max(screen.width - label - 4, 16)
        for part in [text] if "\x1b" in text else wrapped(text, room):
            screen.line(f"  {shown}{pad}  {part}")
            shown, pad = "", " " * label


def _facts(screen: Screen, part: PartSummary) -> list[str]:
    state: Mapping[str, Any] = part.state
    room = max(screen.width - 30, 30)
    if part.kind == "optimizer":
        return _groups(screen, part)
    if part.kind == "scheduler":
        found = [f"last_epoch {_shown(state['last_epoch'])}"] if "last_epoch" in state else []
        rates = state.get("last_lr")
        if isinstance(rates, list):
            found.append("lr " + ", ".join(dict.fromkeys(_shown(rate) for rate in rates)))
        return [screen.sign(" · ", " - ").join(found)] if found else []
    if part.kind == "scaler":
        if not state.get("enabled", True):
            return ["disabled"]
        scale = f"scale {_shown(state.get('scale'))}"
        return [f"{scale}, {_shown(state.get('growth_tracker'))} steps since it changed"]
    if part.kind == "loader":
        return [_position(state)] if state else []
    if part.kind == "object" and state:
        text = ", ".join(f"{clean(key)} = {_shown(value)}" for key, value in state.items())
        return [text if width_of(text) <= room else screen.fit(text, room)]
    return []


def _groups(screen: Screen, part: PartSummary) -> list[str]:
    groups = part.state.get("groups", [])
    found = []
    for i, group in enumerate(groups[:6]):
        options = [f"{key} {_shown(group[key])}" for key in ("lr", "weight_decay", "momentum") if group.get(key)]
        count = f"{group['params']:,} parameter{'s' if group['params'] != 1 else ''}"
        name = f"group {i}: " if len(groups) > 1 else ""
        found.append(f"{name}{count}" + "".join(f", {option}" for option in options))
    if len(groups) > 6:
        found.append(f"and {len(groups) - 6} more groups")
    if not part.tensors:
        found.append(screen.style("no state of its own yet: it has not stepped, or keeps none", "dim"))
    return found


def _position(state: Mapping[str, Any]) -> str:
    text = f"epoch {_shown(state['epoch'])}" if "epoch" in state else ""
    samples, length = state.get("samples"), state.get("length")
    if isinstance(samples, int):
        text += f"{', ' if text else ''}{samples:,}"
        text += f" of {length:,} samples" if isinstance(length, int) else " samples"
        text += f" ({state['fraction']:.0%})" if "fraction" in state else ""
    return text or ", ".join(f"{clean(key)} {_shown(value)}" for key, value in list(state.items())[:6])


def _shown(node: Any) -> str:
    value = plain(node)
    return f"{value:.4g}" if isinstance(value, float) and value != int_or(value) else figure(value)


def _metrics(screen: Screen, found: Inspection) -> None:
    if not found.metrics:
        return
    screen.heading("Metrics")
    screen.flow([f"{clean(name)} {screen.style(figure(value), 'bold')}" for name, value in found.metrics.items()])


def _world(screen: Screen, found: Inspection) -> None:
    ranks = found.world.get("ranks", [])
    if found.world.get("size", 1) == 1:
        return
    screen.heading(f"World of {found.world['size']} ranks")
    largest = max((rank["bytes"] for rank in ranks), default=0)
    total = sum(rank["bytes"] for rank in ranks)
    shown = ranks if len(ranks) <= 16 else ranks[:8]
    rows: list[tuple[list[str], float | None]] = [
        ([f"rank {rank['rank']}", size(rank["bytes"])], rank["bytes"] / total if total else 0.0) for rank in shown
    ]
    _shares(screen, rows, (1,))
    if len(shown) < len(ranks):
        screen.line(f"  ... and {len(ranks) - len(shown)} more, {size(largest)} at most each")


def _warnings(screen: Screen, found: Inspection) -> None:
    said = [f"step {step} is damaged: {clean(problem)}" for step, problem in found.damaged]
    if found.debris:
        count = len(found.debris)
        said.append(f"{count} folder{'s' if count != 1 else ''} left by saves that never finished; the next run sweeps")
    if said:
        screen.line()
    for text in said:
        screen.line(screen.style(f"! {screen.fit(text, screen.width - 2)}", "yellow"))
