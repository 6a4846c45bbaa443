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
SET_UP = "set-up"  # not asked for: leaves a checkpoint for the kills that need one to resume from
_LONGEST = 12  # kills of one run
_COMMITTED = points.SAVE_POINTS[points.SAVE_POINTS.index("publish.after") :]  # the save they are in is found again
_LATER_ONLY = ("resume.chosen", "resume.tensors")  # reached only where a checkpoint is there to resume from
ORDER = points.SAVE_POINTS + points.RETENTION_POINTS + points.RESUME_POINTS


@dataclass(frozen=True)
class Plan:
    """One kill to make: at a named point, or `target` IN_SAVE, ANY_MOMENT or SET_UP. `where` and `when` in [0, 1)
    choose among the occurrences and the delays that are possible when its turn comes. point: where a random one or the
    one of SET_UP strikes; "" for a random one after a delay."""

    target: str
    where: float
    when: float
    point: str = ""
    tries: int = 0

    @property
    def name(self) -> str:
        return self.point or self.target

    @property
    def retires(self) -> bool:
        return self.name in points.RETENTION_POINTS

    @property
    def spends(self) -> bool:
        """Whether the save it strikes in may be committed, so that it does not come again."""
        return self.name in _COMMITTED or self.name in (IN_SAVE, ANY_MOMENT)

    @property
    def saves(self) -> bool:
        """Whether it strikes only where a save is still to come."""
        return self.name in points.SAVE_POINTS or self.retires or self.name == IN_SAVE


@dataclass(frozen=True)
class Measured:
    """What a run without faults did. steps: all it saved, ascending; counts: named point -> times reached;
    save_s: seconds of a save, from its begin to its acknowledgement, the longest; run_s: from the first manager to the
    end; whole_s: of the whole process; retires_at: number of saves, the one that removes it counted, after which
    retention first removes a step."""

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
        return tuple(name for name in ORDER if name in names and fits([Plan(name, 0, 0)], self, 0))


def measure(processes: Sequence[Process], whole_s: float) -> Measured:
    counts: Counter[str] = Counter()
    steps: set[int] = set()
    longest = 0.0
    retires_at = None
    times = [event.time for process in processes for event in process.events]
    for process in processes:
        began: dict[tuple[str, int], float] = {}
        for event in process.events:
            if event.kind == "point":
                counts[event["name"]] += 1
                if event["name"] == "retention.begin" and retires_at is None:
                    retires_at = len(steps)
            elif event.kind == "save":
                began[event["root"], event["step"]] = event.time
            elif event.kind == "ack":
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
    """The plans of each run: as few runs as the saves allow, each plan with a save left for it when its turn comes.

    A plan that needs a checkpoint to resume from is preceded by one at SET_UP where no other leaves one for sure.
    """
    size = _LONGEST if measured.saves else 3
    for runs in range(max(1, -(-len(plans) // size)), len(plans)):
        spread = _spread(plans, measured, runs, size)
        if spread is not None:
            return spread
    return [_with_set_up([plan]) for plan in plans] if plans else [[]]


def _spread(plans: Sequence[Plan], measured: Measured, runs: int, size: int) -> list[list[Plan]] | None:
    """The plans in `runs` chains of about the same length and in their order; None when they do not fit."""
    found: list[list[Plan]] = [[] for _ in range(runs)]
    # The choosy ones first: few places are left for them later.
    for plan in sorted(plans, key=lambda one: (not one.retires, not one.spends, one.name in _LATER_ONLY)):
        places = [
            chain
            for chain in found
            if len(chain) < size and (not measured.saves or fits(_with_set_up([*chain, plan]), measured, 0))
        ]
        if not places:
            return None
        needs = plan.name in _LATER_ONLY
        min(places, key=lambda chain: (needs and not _leaves_a_step(chain), len(chain))).append(plan)
    place = {id(plan): number for number, plan in enumerate(plans)}
    return [_with_set_up(sorted(chain, key=lambda one: place[id(one)])) for chain in found]


def _leaves_a_step(chain: Sequence[Plan]) -> bool:
    return any(plan.retires or plan.name in _COMMITTED for plan in chain)


def _with_set_up(chain: list[Plan]) -> list[Plan]:
    if _leaves_a_step(chain) or not any(plan.name in _LATER_ONLY for plan in chain):
        return chain
    return [Plan(SET_UP, 0.0, 0.0, "commit.acknowledged"), *chain]


def fits(waiting: Sequence[Plan], measured: Measured, done: int) -> bool:
    """Whether saves are enough for all of `waiting` in one run that has committed `done` of them, at the worst."""
    retiring = sum(plan.retires for plan in waiting)
    spent = done + sum(plan.spends for plan in waiting)
    if retiring:
        if measured.retires_at is None:
            return False
        spent = max(spent, measured.retires_at - 1)
    return spent + retiring <= measured.saves and (done < measured.saves or not any(plan.saves for plan in waiting))


def choose(waiting: list[Plan], measured: Measured, done: int) -> Plan | None:
    """Takes the first plan out of `waiting` that the next process can fulfil: the first of those that leave enough
    saves for all others where there is one. done: saves of the run that are committed."""
    possible = [plan for plan in waiting if feasible(plan, measured, done, measured.saves - done)]
    for plan in possible:
        rest = [one for one in waiting if one is not plan]
        if fits(rest, measured, _worst(plan, measured, done, rest)):
            break
    else:
        if not possible:
            return None
        plan = possible[0]
    waiting.remove(plan)
    return plan


def _worst(plan: Plan, measured: Measured, done: int, rest: Sequence[Plan]) -> int:
    """The saves that may be committed when `plan` has struck."""
    if plan.retires:
        return max(done, (measured.retires_at or 1) - 1) + _room(plan, measured, done, rest)
    if plan.spends:
        return done + _room(plan, measured, done, rest)
    return done + _room(plan, measured, done, rest) - 1 if plan.saves else done


def _room(plan: Plan, measured: Measured, done: int, rest: Sequence[Plan]) -> int:
    """Among how many saves `plan` may choose: those behind it in the run need saves of their own."""
    if plan.tries:
        return 1
    free = measured.saves - done - sum(one.retires for one in rest)
    if plan.retires:
        free -= max(0, (measured.retires_at or 1) - 1 - done)
    return max(1, free // (sum(one.saves or one.spends for one in rest if not one.retires) + 1))


def feasible(plan: Plan, measured: Measured, done: int, left: int) -> bool:
    """Whether the process about to start can reach what `plan` asks for. done, left: saves of the run that are
    committed, and that are still to come."""
    if plan.name in _LATER_ONLY:
        return done > 0
    if plan.retires:
        return measured.retires_at is not None and left > 0 and done + left >= measured.retires_at
    return left > 0 or not plan.saves


def aim(plan: Plan, measured: Measured, done: int, rest: Sequence[Plan]) -> Kill:
    """The kill that `plan` means in a process of a run that has committed `done` saves and has the kills of `rest`
    still before it."""
    # Delays are drawn from what the runs without faults took; a quicker process ends first, so each try waits less.
    when = plan.when / 4**plan.tries
    if not measured.counts:
        return Kill("outside", delay=0.05 + when * measured.whole_s)
    room = _room(plan, measured, done, rest)
    if plan.target == ANY_MOMENT:
        left = max(measured.saves - done, 1)
        return Kill("moment", delay=when * measured.run_s * min(room, left) / max(measured.saves, 1))
    if plan.name == IN_SAVE:
        return Kill("save", occurrence=1 + int(plan.where * room), delay=when * measured.save_s)
    if plan.name in points.RESUME_POINTS:
        return Kill("point", plan.name, 1)
    over = measured.saves - (measured.retires_at or 1) + 1 if plan.retires else measured.saves
    each = max(1.0, measured.counts.get(plan.name, 1) / max(over, 1))
    return Kill("point", plan.name, 1 + int(plan.where * each * room))


def seconds(planned: Sequence[Sequence[Plan]], measured: Measured, jobs: int) -> float:
    """Roughly how long the runs of `planned` will take: each kill costs a start and about half of what lies between
    two saves."""
    start = max(0.0, measured.whole_s - measured.run_s)
    lost = measured.run_s / 2 / max(measured.saves, 1)
    each = [(len(chain) + 1) * start + measured.run_s + len(chain) * lost for chain in planned]
    return max([sum(each) / jobs, *each])
