"""The table of all tensors, and one tensor's figures with its histogram."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.cli.screen import Screen, clean, figure, size, width_of
from ckpt.edges.inspecting import TensorRow
from ckpt.edges.statistics import TensorStatistics

_BAR = 60


def shape_text(screen: Screen, shape: Sequence[int]) -> str:
    return screen.sign("×", "x").join(map(str, shape)) if shape else "scalar"


def draw_tensors(screen: Screen, rows: Sequence[TensorRow]) -> None:
    screen.heading(f"{len(rows):,} tensors")
    cells = [
        [clean(row.key), row.dtype, shape_text(screen, row.shape), "tied" if row.alias_of else size(row.bytes)]
        for row in rows
    ]
    if not cells:
        return
    head = ["name", "dtype", "shape", "bytes"]
    taken = sum(max(width_of(row[i]) for row in [head, *cells]) for i in (1, 2, 3))
    room = max(screen.width - 2 - taken - 6, 16)
    table = [[screen.style(text, "dim") for text in head]]
    table += [[screen.fit(row[0], room), *row[1:]] for row in cells]
    screen.table(table, right=(2, 3))


def draw_tensor(screen: Screen, found: TensorStatistics) -> None:
    screen.heading(screen.fit(clean(found.key), screen.width))
    facts = [found.dtype, shape_text(screen, found.shape), f"{found.numel:,} elements", size(found.bytes)]
    screen.flow(facts, separator=screen.sign(" · ", " - "))
    for alias in found.aliases:
        screen.line(f"  tied to {screen.fit(clean(alias), screen.width - 10)}")
    if not found.numel:
        screen.line("  it is empty")
        return
    if found.values:
        screen.flow([_element(value) for value in found.values], indent=2, separator="  ")
    screen.line()
    of = " of magnitudes" if found.of == "magnitudes" else ""
    rows = [[f"min{of}", figure(found.min), "NaN", _count(screen, found.nan, found.numel)]]
    rows += [[f"max{of}", figure(found.max), "infinite", _count(screen, found.inf, found.numel)]]
    rows += [["mean", figure(found.mean), "zero", _count(screen, found.zero, found.numel, warn=False)]]
    rows += [["std", figure(found.std), "", ""]]
    screen.table([[screen.style(a, "dim"), b, screen.style(c, "dim"), d] for a, b, c, d in rows], gap=3, right=(1,))
    _histogram(screen, found)


def _element(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, (float, complex)) else figure(value)


def _count(screen: Screen, count: int, total: int, warn: bool = True) -> str:
    share = f" ({count / total:.1%})" if count else ""
    text = f"{count:,}{share}"
    return screen.style(text, "red", "bold") if warn and count else text


def _histogram(screen: Screen, found: TensorStatistics) -> None:
    edges, counts = found.histogram.edges, found.histogram.counts
    if len(counts) < 2:
        return
    screen.line()
    most = max(counts)
    labels = [_edge(edge, edges) for edge in edges]
    left = max(width_of(label) for label in labels)
    right = max(len(f"{count:,}") for count in counts)
    room = max(min(screen.width - left - right - 7, _BAR), 4)
    for label, count in zip(labels, counts, strict=False):
        bar = screen.style(screen.bar(count / most if most else 0.0, room), "cyan")
        screen.line(f"  {' ' * (left - width_of(label))}{label} {screen.sign('│', '|')}{bar} {count:,}")
    screen.line(f"  {' ' * (left - width_of(labels[-1]))}{labels[-1]} {screen.sign('╵', '|')}")


def _edge(edge: float, edges: Sequence[float]) -> str:
    """Enough digits to tell neighbours apart."""
    step = abs(edges[1] - edges[0]) or 1.0
    largest = max(abs(edges[0]), abs(edges[-1]))
    if largest >= 1e6 or largest < 1e-4:
        return f"{edge:.3e}"
    digits = 0
    while digits < 9 and step < 1:
        step *= 10
        digits += 1
    text = f"{edge:.{digits + 1}f}"
    return text.lstrip("-") if float(text) == 0 else text
