"""The folder in which a campaign lives."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Workplace:
    """path: the folder; given: it is the user's choice, and stays whatever happens; spared: it stays."""

    path: Path
    given: bool
    spared: bool = True


@contextmanager
def workplace(chosen: str | None) -> Iterator[Workplace]:
    """A folder of the campaign's own: `chosen`, which must be empty or not there (ValueError), else a temporary one,
    removed at the end unless it is `spared`, which it is until somebody says otherwise."""
    if chosen is None:
        place = Workplace(Path(tempfile.mkdtemp(prefix="ckpt-chaos-")).resolve(), given=False)
    else:
        place = Workplace(Path(chosen).absolute(), given=True)
        if place.path.exists() and (not place.path.is_dir() or any(place.path.iterdir())):
            raise ValueError(f"{chosen} is not an empty folder; a campaign needs one of its own")
        place.path.mkdir(parents=True, exist_ok=True)
    try:
        yield place
    finally:
        if not place.given and not place.spared:
            shutil.rmtree(place.path)
