"""How a long read tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # bytes done, bytes in all; called from any thread
Told = Callable[[int], None]  # bytes more than before


def counted(progress: Progress | None, total: int) -> Told | None:
    """A teller that adds up what it is told and passes it on."""
    if progress is None:
        return None
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return tell
