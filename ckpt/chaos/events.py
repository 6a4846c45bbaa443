"""What the processes of a run report to the campaign, and what it tells them: kills, events, claims.

A process writes one line of JSON an event, each with one write to its own file. The files are read after the process
is dead, so nothing of the oracle lives in the process that is killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENV = "CKPT_CHAOS"  # JSON of a Config; set for every process of a run
CLAIM = "claim.json"


@dataclass(frozen=True)
class Kill:
    """One SIGKILL to come.

    kind "point": at the `occurrence`-th time the process reaches `point`. "save": `delay` seconds into the
    `occurrence`-th save, or at its acknowledgement if that comes first. "moment": `delay` seconds after the first
    manager was made. "outside": `delay` seconds after the start, from outside.
    """

    kind: str
    point: str = ""
    occurrence: int = 1
    delay: float = 0.0


@dataclass(frozen=True)
class Config:
    """token: what all processes of this start have in their environment; events: folder for this start's events;
    records: folder that keeps every acknowledged step's manifest and indexes; sandbox: folder that stands for every
    root."""

    token: str
    events: str
    records: str
    sandbox: str
    kill: Kill | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Config:
        value = json.loads(text)
        kill = value.pop("kill")
        return Config(**value, kill=None if kill is None else Kill(**kill))


@dataclass(frozen=True)
class Claim:
    """Written and fsynced by a process just before it kills itself, so that its death can be told from any other.

    step: of the save under way, else the last one saved or resumed; inside: a save was under way; after: the last named
    point that was reached, "" before the first.
    """

    point: str
    step: int
    pid: int
    inside: bool
    after: str

    @staticmethod
    def read(events: Path) -> Claim | None:
        try:
            return Claim(**json.loads((events / CLAIM).read_text()))
        except (FileNotFoundError, ValueError):
            # Made and not yet written: the process is about to write it.
            return None


@dataclass(frozen=True)
class Event:
    """One line of a process. `kind` is "manager", "outside", "point", "resumed", "save", "staged", "ack", "batch",
    "written"; the rest depends on it."""

    kind: str
    time: float
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True)
class Process:
    """One process that made a manager, and its events in order."""

    pid: int
    events: tuple[Event, ...]

    def of(self, kind: str) -> Iterator[Event]:
        return (event for event in self.events if event.kind == kind)


def read_processes(folder: Path) -> list[Process]:
    """Every process that reported into `folder`, in the order of their first events."""
    found = []
    for path in folder.glob("*.jsonl"):
        events = []
        for line in path.read_bytes().split(b"\n"):
            try:
                value = json.loads(line)
            except ValueError:
                # The write that SIGKILL cut short, or the empty text behind the last newline.
                continue
            events.append(Event(value.pop("event"), value.pop("time"), value))
        if events:
            found.append(Process(int(path.stem.split("-")[0]), tuple(events)))
    return sorted(found, key=lambda process: process.events[0].time)


def short_ids(ids: Sequence[int]) -> list[int] | str:
    """The ids of a batch as they are reported: long ones as a digest, so that logs stay small."""
    if len(ids) <= 256:
        return list(ids)
    import hashlib

    return f"{len(ids)} ids {hashlib.blake2b(','.join(map(str, ids)).encode(), digest_size=12).hexdigest()}"


def keep(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source`, so that it outlives its removal; fine when it is there already."""
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def free_name(folder: Path, stem: str) -> Path:
    """A path below `folder` that is not there yet."""
    return folder / f"{stem}-{os.urandom(4).hex()}.jsonl"
