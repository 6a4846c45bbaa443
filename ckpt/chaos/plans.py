"""Which kills a campaign makes, and where exactly the next one strikes. Pure; all chance comes from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt import points
from ckpt.chaos.events import Kill, Process

IN_SAVE = "random, in a save"
ANY_MOMENT = "random, any moment"
_LATER_ONLY = ("resume.chosen", "resume.tensors")  # reached only where a checkpoint is there to resume from
ORDER = points.SAVE_POINTS + points.RETENTION_POINTS + points.RESUME_POINTS


@dataclass(frozen=True)
class Plan:
    """One kill to make: at a named point, or `target` IN_SAVE or ANY_MOMENT. `where` and `when` in [0, 1) choose among
    the occurrences and the delays that are possible when its turn comes. `exact`: a random kill at `point`."""

    target: str
    where: float
    when: float
    point: str = ""
    tries: int = 0


@dataclass(frozen=True)
class Measured:
    """What a run without faults did. steps: all it saved, ascending; counts: named point -> times reached;
    save_s: seconds of a save, from its begin to its acknowledgement, the longest; run_s: from the first manager to the
    end; whole_s: of the whole process; retires_at: number of saves after which retention first removes a step."""

    steps: tuple[int, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    save_s: float = 0.0
    run_s: float = 0.0
    whole_s: float = 0.0
    retires_at: int | None = None

    @property
    def saves(self) -> int:
        return len(self.steps)

    def reachable(self) -> tuple[str, ...]:
        """Named points at which this training can be killed, in the order of `ckpt.points`."""
        names = set(self.counts) | (set(_LATER_ONLY) if "resume.begin" in self.counts else set())
        return tuple(name for name in ORDER if name in names)


def measure(processes: Sequence[Process], whole_s: float) -> Measured:
    counts: Counter[str] = Counter()
    steps: set[int] = set()
    longest = 0.0
    acknowledged = 0
    retires_at = None
    times = [event.time for process in processes for event in process.events]
    for process in processes:
        began: dict[tuple[str, int], float] = {}
        for event in process.events:
            if event.kind == "point":
                counts[event["name"]] += 1
                if event["name"] == "retention.begin" and retires_at is None:
                    retires_at = acknowledged
            elif event.kind == "save":
                began[event["root"], event["step"]] = event.time
            elif event.kind == "ack":
                acknowledged += 1
                steps.add(event["step"])
                longest = max(longest, event.time - began.get((event["root"], event["step"]), event.time))
    run_s = max(times) - min(times) if times else 0.0
    return Measured(tuple(sorted(steps)), dict(counts), longest, run_s, whole_s, retires_at)


def draw(measured: Measured, kills: int, wanted: Iterable[str], seed: int) -> list[Plan]:
    """`kills` random ones and one at each wanted point, in an order of chance.

    Three of four random kills aim into a save: half of them at a named point of it, half after a delay.
    """
    chance = random.Random(seed)
    plans = [Plan(name, chance.random(), chance.random()) for name in wanted]
    inside = [name for name in points.SAVE_POINTS if name in measured.counts]
    for number in range(kills):
        where, when = chance.random(), chance.random()
        if not inside or number % 4 == 3:
            plans.append(Plan(ANY_MOMENT, where, when))
        else:
            plans.append(Plan(IN_SAVE, where, when, chance.choice(inside) if number % 2 else ""))
    chance.shuffle(plans)
    return plans


def chains(plans: Sequence[Plan], measured: Measured) -> list[list[Plan]]:
    """The plans of each run: three or more kills a run, also within one epoch, as few runs as the saves allow."""
    size = max(3, min(12, measured.saves - 1))
    runs = max(1, -(-len(plans) // size))
    return [list(plans[number::runs]) for number in range(runs)]


def feasible(plan: Plan, measured: Measured, done: int, left: int) -> bool:
    """Whether the process about to start can reach what `plan` asks for. done, left: saves of the run that are
    committed, and that are still to come."""
    name = plan.point or plan.target
    if name in _LATER_ONLY:
        return done > 0
    if name in points.RESUME_POINTS or name == ANY_MOMENT:
        return True
    if name in points.RETENTION_POINTS:
        return measured.retires_at is not None and left > 0 and done + left > measured.retires_at
    return left > 0


def aim(plan: Plan, measured: Measured, left: int, kills_left: int) -> Kill:
    """The kill that `plan` means in a process with `left` saves to come, of a run with `kills_left` kills after it."""
    if not measured.counts:
        return Kill("outside", delay=0.05 + plan.when / 4**plan.tries * measured.whole_s)
    # Later kills of the run need saves of their own; the last third of them is kept for those that hit late.
    room = max(1, left // (kills_left + 1))
    if plan.tries:
        room = 1
    # Delays are drawn from what the runs without faults took; a quicker process ends first, so each try waits less.
    when = plan.when / 4**plan.tries
    if plan.target == ANY_MOMENT:
        share = max(left, 1) / max(measured.saves, 1) / (kills_left + 1)
        return Kill("moment", delay=when * measured.run_s * share)
    if plan.target == IN_SAVE and not plan.point:
        return Kill("save", occurrence=1 + int(plan.where * room), delay=when * measured.save_s)
    name = plan.point or plan.target
    if name in points.RESUME_POINTS:
        return Kill("point", name, 1)
    each = measured.counts.get(name, 1) / max(measured.saves, 1)
    return Kill("point", name, 1 + int(plan.where * max(1.0, each * room)))
