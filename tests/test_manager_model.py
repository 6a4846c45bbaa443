"""Long random lives of a run, against a model of what was acknowledged: saves, rollbacks, faults, restarts, kills."""

from __future__ import annotations

import errno
import os
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
from manager_support import Faults, Tiny, at_point, debris, die, faults, in_child, manager, scan

from ckpt import CheckpointManager, points
from ckpt.errors import CheckpointError, CommitUnknown

pytestmark = pytest.mark.full


class Life:
    """One run over many processes. `durable`: the steps of the line that were acknowledged and must survive, oldest
    first, as far as keep_last asks for; `maybe`: steps whose fate was told as unknown, or whose process was killed."""

    def __init__(self, root: str, seed: int, fault: Faults) -> None:
        self.random = random.Random(seed)
        self.root, self.fault = root, fault
        self.keep = self.random.choice([1, 2, 3, None])
        self.durable: list[int] = []
        self.maybe: set[int] = set()
        self.left: set[int] = set()  # abandoned by a rollback: listed until the new incarnation has committed
        self.back: list[int] | None = None  # `durable` before a rollback that no commit has followed yet
        self.made: CheckpointManager | None = None
        self.tiny = Tiny()
        self.at = 0
        self.told: list[str] = []

    def open(self) -> CheckpointManager:
        if self.made is None:
            self.tiny = Tiny(-1)
            self.made = manager(
                self.root, self.tiny, keep_last=self.keep, async_save=self.random.random() < 0.5, lock_timeout=5
            )
            self.resume("auto")
        return self.made

    def resume(self, step: Any) -> None:
        assert self.made is not None
        self.at = self.made.resume(step)
        self.told.append(f"resume({step}) -> {self.at}")
        self.undo_rollback()
        newest = max(self.durable, default=0)
        if step == "auto":
            assert self.at >= newest and (self.at == newest or self.at in self.maybe), "; ".join(self.told)
        if self.at or self.durable:
            assert self.tiny.step() == self.at, self.told
        there = self.made.steps()
        if self.at < newest:
            self.back = [s for s in self.durable if s in there]
        self.left |= {s for s in (*self.durable, *self.maybe) if s > self.at}
        self.maybe = {s for s in self.maybe if s <= self.at}
        self.durable = [s for s in self.durable if s <= self.at and s in there]

    def undo_rollback(self) -> None:
        """As long as no commit follows a rollback, the line is what it was before it."""
        if self.back is not None:
            self.durable, self.back = self.back, None
            self.maybe |= self.left - set(self.durable)
            self.left.clear()

    def save(self, count: int) -> None:
        made = self.open()
        for _ in range(count):
            self.at += self.random.randint(1, 5)
            self.tiny.at(self.at)
            try:
                made.save(self.at)
                made.wait()
            except CommitUnknown:
                self.maybe.add(self.at)
                self.back = None
                self.told.append(f"save({self.at}) unknown")
            except CheckpointError as error:
                self.told.append(f"save({self.at}) {error.errno}")
            else:
                self.told.append(f"save({self.at})")
                self.durable.append(self.at)
                self.left.clear()
                self.back = None

    def check(self) -> None:
        """I5, and that what was acknowledged is listed."""
        if self.made is None:
            return
        self.fault.off()
        there = self.made.steps()
        wanted = self.durable if self.keep is None else self.durable[-self.keep :]
        missing = [step for step in wanted if step not in there]
        # A step of unknown fate that did become durable counts for keep_last like any other.
        assert len(missing) <= len(self.maybe) and (not wanted or wanted[-1] in there), (
            missing,
            self.keep,
            there,
            "; ".join(self.told),
        )
        assert set(there) <= set(self.durable) | self.maybe | self.left | {self.at}, "; ".join(self.told)

    def close(self) -> None:
        if self.made is not None:
            made, self.made = self.made, None
            made.close()

    def kill(self) -> None:
        """The process of this life dies at a random point of a save."""
        self.close()
        point = self.random.choice(points.SAVE_POINTS)
        nth = self.random.randint(1, 2)

        def work() -> None:
            tiny = Tiny(-1)
            made = manager(self.root, tiny, keep_last=self.keep, lock_timeout=5)
            start = made.resume()
            points.install(at_point(point, die, nth))
            for step in range(start + 1, start + 4):
                made.save(step if tiny.at(step) else 0)
            made.wait()
            die()

        in_child(work, killed=True)
        self.undo_rollback()
        newest = max([0, *self.durable, *self.maybe])
        self.maybe |= set(range(newest + 1, newest + 4))
        self.told.append(f"killed at {point} {nth}")
        self.open()
        # Steps of the killed process that are there were made durable or are at least whole; they are history now.
        there = self.made.steps() if self.made is not None else ()
        self.durable = [s for s in self.durable if s in there] + [s for s in there if s not in self.durable]
        self.durable.sort()
        self.maybe.clear()

    def live(self, steps: int) -> None:
        for _ in range(steps):
            roll = self.random.random()
            if roll < 0.45:
                self.save(self.random.randint(1, 3))
            elif roll < 0.7:
                self.open()
                verb = self.random.choice([v for v in Faults.VERBS if v not in ("free_bytes", "replace", "put_new")])
                self.fault.arm(verb, self.random.randint(0, 6), sticky=self.random.random() < 0.3, code=errno.EIO)
                self.told.append(f"{verb} fails")
                self.save(self.random.randint(1, 2))
            elif roll < 0.8:
                made = self.open()
                there = made.steps()
                if there:
                    self.resume(self.random.choice(there))
            elif roll < 0.9 or self.root.startswith("memory"):
                self.close()
                self.open()
            else:
                self.kill()
            self.check()
        self.close()
        if not self.root.startswith("memory") and self.durable:
            self.open()
            self.save(1)
            self.close()
            assert debris(Path(self.root)) == [] and scan(Path(self.root)).damaged == ()


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_to_a_run_what_was_acknowledged_is_there(tmp_path: Path, place: str, seed: int) -> None:
    """I5 over whole lives: at every instant there is a durable step, and the newest acknowledged one is listed."""
    with faults() as fault:
        root = str(tmp_path / "root") if place == "local" else f"memory://t-{uuid.uuid4().hex}"
        life = Life(root, seed, fault)
        try:
            life.live(25)
        finally:
            fault.off()
            points.install(None)
            if life.made is not None:
                life.made.close()
        assert os.getpid() and life.told
