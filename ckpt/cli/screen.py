"""How results are drawn: as wide as the terminal, with colours only there, readable when piped.

Everything that came out of a checkpoint or a file name passes `clean`: a name can hold control sequences.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Screen:
    """Where text goes: `width` columns, with or without colours and characters beyond ASCII."""

    def __init__(self, stream: TextIO | None = None, width: int | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.terminal = bool(getattr(self.stream, "isatty", lambda: False)())
        self.width = width if width is not None else _columns(self.stream)
        self.colours = self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.unicode = _can_encode(self.stream, "█·→─±")
        self.lines: list[str] = []

    def style(self, text: str, *styles: str) -> str:
        if not self.colours or not text:
            return text
        return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}\x1b[0m"

    def sign(self, fancy: str, simple: str) -> str:
        return fancy if self.unicode else simple

    def line(self, text: str = "") -> None:
        self.lines.append(text.rstrip())

    def bar(self, fraction: float, width: int) -> str:
        """`fraction` of `width` columns filled; anything above 0 shows."""
        fraction = min(max(fraction, 0.0), 1.0)
        if not self.unicode:
            return "#" * max(round(fraction * width), 1 if fraction > 0 else 0)
        eighths = max(round(fraction * width * 8), 1 if fraction > 0 else 0)
        return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()

    def heading(self, text: str) -> None:
        self.line()
        self.line(self.style(text, "bold"))

    def table(self, rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), gap: int = 2, indent: int = 2) -> None:
        """Rows of cells in columns; the columns `right` are aligned to the right. Cells may hold styles."""
        columns = max((len(row) for row in rows), default=0)
        widths = [max((width_of(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]
        for row in rows:
            cells = []
            for i, cell in enumerate(row):
                space = " " * (widths[i] - width_of(cell))
                cells.append(space + cell if i in right else cell + (space if i < len(row) - 1 else ""))
            self.line(" " * indent + (" " * gap).join(cells))

    def flow(self, items: Sequence[str], *, indent: int = 2, separator: str = "   ") -> None:
        """Items one after another, in new lines where the width ends."""
        room = max(self.width - indent, 20)
        current = ""
        for item in items:
            if current and width_of(current) + len(separator) + width_of(item) > room:
                self.line(" " * indent + current)
                current = ""
            current = f"{current}{separator}{item}" if current else item
        if current:
            self.line(" " * indent + current)

    def fit(self, text: str, room: int) -> str:
        """`text` in at most `room` columns, its middle left out where it is longer. Not for styled text."""
        if width_of(text) <= room:
            return text
        dots = self.sign("…", "..")
        keep = max(room - len(dots), 1)
        head = keep // 3
        tail = keep - head
        while tail and width_of(text[:head] + text[-tail:]) > keep:
            tail -= 1
        return text[:head] + dots + (text[-tail:] if tail else "")

    def show(self) -> None:
        text = "".join(f"{line}\n" for line in self.lines)
        self.lines = []
        encoding = getattr(self.stream, "encoding", None)
        if encoding is not None:
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        self.stream.write(text)
        self.stream.flush()


def _columns(stream: Any) -> int:
    try:
        given = int(os.environ.get("COLUMNS", ""))
        if given > 0:
            return max(given, 40)
    except ValueError:
        pass
    try:
        return max(os.get_terminal_size(stream.fileno()).columns, 40)
    except (OSError, ValueError, AttributeError):
        return 80


def _can_encode(stream: Any, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def clean(text: object) -> str:
    """`text` on one line, with what could steer a terminal spelled out."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def wrapped(text: str, width: int) -> list[str]:
    """Words in lines of `width` columns; a longer word has a line of its own, cut to it."""
    lines = [""]
    for word in text.split(" "):
        while width_of(word) > width > 0:
            lines += [word[:width]] if lines[-1] else []
            lines[-1] = lines[-1] or word[:width]
            lines.append("")
            word = word[width:]
        if lines[-1] and width_of(lines[-1]) + 1 + width_of(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def width_of(text: str) -> int:
    """Columns that `text` takes, colours not counted."""
    if "\x1b" in text:
        parts = text.split("\x1b[")
        text = parts[0] + "".join(part.partition("m")[2] for part in parts[1:])
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def size(count: float | None) -> str:
    """Bytes as people say them: 1.49 GB."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5 or unit == "PB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{_three(count)} {unit}"
        count /= 1000
    raise AssertionError


def number(count: int) -> str:
    """Elements as people say them: 124.4 M."""
    value = float(count)
    for unit in ("", " k", " M", " G", " T", " P", " E"):
        if value < 999.5 or unit == " E":
            return f"{count}" if unit == "" else f"{_three(value)}{unit}"
        value /= 1000
    raise AssertionError


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def seconds(value: float | None) -> str:
    if value is None or value != value:
        return "?"
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.2f} s" if value < 60 else f"{value / 60:.1f} min"


def moment(value: float | None) -> str:
    """Local time; "?" for what no clock can show."""
    if value is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    except (ValueError, OverflowError, OSError):
        return "?"


def age(value: float | None, now: float | None = None) -> str:
    """How long ago, in the largest unit that says something; "" for the future, which is another machine's clock."""
    if value is None:
        return ""
    past = (time.time() if now is None else now) - value
    if past < 0 or past != past:
        return ""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h"), (86400 * 1000, 86400, "days")):
        if past < limit:
            return f"{past / divisor:.0f} {unit}"
    return f"{past / 86400 / 365.25:.1f} years"


def figure(value: Any) -> str:
    """A number in as many digits as help."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if value != int_or(value) or abs(value) >= 1e7 else f"{value:g}"
    return clean(value)


def int_or(value: float) -> float:
    try:
        return float(int(value))
    except (ValueError, OverflowError):
        return value
