"""Digests of many spans of one file, compared while the file goes by in slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpt.format.digest import Streaming, digest


class Span(NamedTuple):
    """Bytes `start` to `end` of a file must have the digest `xxh3_128`; `label` is whose they are."""

    start: int
    end: int
    xxh3_128: str
    label: int


class SpanChecker:
    """`spans` are sorted and do not overlap. `wrong`: labels of those whose bytes differ, in order."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._next = 0
        self._open: Streaming | None = None
        self.wrong: list[int] = []

    def feed(self, offset: int, view: memoryview) -> None:
        """The bytes from `offset` on, which follow those fed before."""
        end = offset + len(view)
        while self._next < len(self._spans):
            span = self._spans[self._next]
            if span.start >= end and span.end > span.start:
                return
            if self._open is None and span.end <= end:
                # The common case of a span that lies in one slice takes no object.
                found = digest(view[span.start - offset : span.end - offset])
            else:
                self._open = self._open or Streaming()
                self._open.update(view[max(span.start - offset, 0) : min(span.end, end) - offset])
                if span.end > end:
                    return
                found = self._open.hexdigest()
                self._open = None
            self._close(span, found)

    def finish(self) -> None:
        """After the last slice: spans that were never reached are wrong."""
        while self._next < len(self._spans):
            span = self._spans[self._next]
            self._close(span, digest(b"") if span.start == span.end else "")

    def _close(self, span: Span, found: str) -> None:
        if found != span.xxh3_128:
            self.wrong.append(span.label)
        self._next += 1
