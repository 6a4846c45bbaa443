"""What a campaign found, as values: the report draws them, `--json` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.chaos.ending import Compared
from ckpt.chaos.record import Difference
from ckpt.errors import CheckpointError

BIT_EXACT = "bit-exact"


class CleanRunsFailed(CheckpointError):
    """The runs without faults failed, differ from each other, or made no save: there is nothing to compare with.

    differing: what they differ in, the earliest first.
    """

    def __init__(self, message: str, *, differing: tuple[Difference, ...] = (), **fields: Any) -> None:
        super().__init__(message, stage="chaos", **fields)
        self.differing = differing


@dataclass(frozen=True)
class KillRecord:
    """One SIGKILL that struck. target: the row it belongs to; point: where it struck; after: the last named point
    before; step: of the save under way, else the last one; resumed: the step that was resumed next (0: a fresh start,
    None: no process came so far); restarts: starts it took until then, more than one where the next was killed too."""

    run: int
    target: str
    point: str
    after: str
    inside: bool
    step: int
    pid: int
    resumed: int | None
    restarts: int
    problem: str = ""


@dataclass
class Outcome:
    """exit: 0 bit-exact; 3 something differs, or a step was lost or torn; 1 nothing of that, and not all that was asked
    for could be struck (a campaign that could not compare raises CleanRunsFailed instead)."""

    seed: int
    kills: list[KillRecord] = field(default_factory=list)
    wanted: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()  # named points that a run without faults does not reach
    compared: Compared = field(default_factory=Compared)
    differing: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # lost or torn steps, restarts that failed
    missed: tuple[str, ...] = ()  # wanted points that no kill struck
    holes: list[str] = field(default_factory=list)  # random kills that did not strike, or not where they should
    notes: list[str] = field(default_factory=list)
    saves: int = 0
    runs: int = 0
    verified: int = 0  # steps whose every byte a fresh reader compared with its digest after a kill
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.problems:
            return self.problems[0].splitlines()[0]
        if self.differing:
            return str(self.differing[0])
        if self.missed:
            never = f"{several(len(self.missed), 'point')} {'was' if len(self.missed) == 1 else 'were'} never struck"
            return f"{BIT_EXACT}, but {never}: give the training more saves"
        return f"{BIT_EXACT}, but {self.holes[0]}: give the training more steps" if self.holes else BIT_EXACT

    @property
    def exit(self) -> int:
        if self.problems or self.differing:
            return 3
        return 1 if self.missed or self.holes else 0

    def hits(self, target: str) -> list[KillRecord]:
        return [kill for kill in self.kills if kill.target == target]

    @property
    def random_inside(self) -> tuple[int, int]:
        """Random kills that struck while a save was under way, and all random kills."""
        drawn = [kill for kill in self.kills if kill.target.startswith("random")]
        return sum(kill.inside for kill in drawn), len(drawn)

    def to_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        inside, drawn = self.random_inside
        return {
            "schema": 1,
            "kills": [_kill(kill) for kill in self.kills],
            "points": {name: len(self.hits(name)) for name in self.wanted},
            "unreached": list(self.unreached),
            "random": {"kills": drawn, "inside_a_save": inside},
            "compared": {**vars(self.compared)},
            "differing": [_difference(item) for item in self.differing],
            "problems": self.problems,
            "never_struck": list(self.missed),
            "holes": self.holes,
            "notes": self.notes,
            "saves": self.saves,
            "runs": self.runs,
            "verified": self.verified,
            "seconds": round(self.seconds, 3),
            "verdict": self.verdict,
            "seed": self.seed,
        }


def several(count: int, noun: str) -> str:
    """1 run, 2 runs, 2 processes."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def about_seconds(value: float) -> str:
    """A duration as one tells it beforehand: to ten seconds, from two minutes on to a minute."""
    if value >= 105:
        return several(round(value / 60), "minute")
    return several(max(1, round(value)) if value < 10 else 10 * round(value / 10), "second")


def _kill(kill: KillRecord) -> Mapping[str, Any]:
    return {
        "point": kill.point,
        "step": kill.step,
        "pid": kill.pid,
        "restarts": kill.restarts,
        "run": kill.run,
        "target": kill.target,
        "after": kill.after,
        "inside_a_save": kill.inside,
        "resumed": kill.resumed,
        "problem": kill.problem or None,
    }


def _difference(item: Difference) -> Mapping[str, Any]:
    return {"step": item.step, "kind": item.kind, "name": item.name, "text": item.text}
