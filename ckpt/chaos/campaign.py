"""The whole campaign: two runs without faults, runs that are killed and restarted, and the comparison of their ends."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.chaos import plans
from ckpt.chaos.ending import Compared, Ending, compare, take_artefact
from ckpt.chaos.launch import Launcher
from ckpt.chaos.oracle import Oracle
from ckpt.chaos.outcome import CleanRunsFailed, KillRecord, Outcome, about_seconds, several
from ckpt.chaos.plans import Measured, Plan
from ckpt.chaos.record import METRIC, Key
from ckpt.chaos.runs import Cancelled, Run, Start

MAX_TRIES = 4  # processes in which a kill may fail to strike before its point counts as not reached


class Watcher:
    """Is told how the campaign goes, from any thread; this one is silent."""

    def done(self, text: str) -> None:
        """A run ended, or `text` is what comes next."""

    def struck(self, kills: int, total: int) -> None:
        """`kills` of `total` planned kills have struck."""


@dataclass(frozen=True)
class Settings:
    """kills: random ones; points: names of `ckpt.points`, None for every one the training reaches; compare: a file the
    training leaves behind; timeout: seconds of one process, by default none for the runs without faults and generous
    for the others; jobs: runs side by side."""

    kills: int = 10
    points: tuple[str, ...] | None = None
    seed: int = 0
    compare: str | None = None
    timeout: float | None = None
    jobs: int = 1


class Campaign:
    """`run` does it all. work: an empty folder; keep: leave the folders of runs that ended well."""

    def __init__(
        self, launcher: Launcher, settings: Settings, work: Path, watcher: Watcher | None = None, *, keep: bool = True
    ) -> None:
        self.launcher = launcher
        self.settings = settings
        self.work = work
        self.watcher = watcher or Watcher()
        self.keep = keep
        self.stop = threading.Event()
        self.outcome = Outcome(settings.seed)
        self._lock = threading.Lock()
        self._struck = self._planned = 0
        self._jobs = settings.jobs if launcher.parallel and settings.compare is None else 1

    def run(self) -> Outcome:
        """Raises CleanRunsFailed when there is nothing to compare with; everything else is in the outcome."""
        began = time.monotonic()
        clean, measured, ignored = self._clean()
        queue = deque(plans.chains(self._draw(measured), measured))
        self._announce(queue, measured)
        number = 0
        while queue:
            batch = [queue.popleft() for _ in range(len(queue))]
            jobs = [(number + i + 1, chain) for i, chain in enumerate(batch)]
            number += len(batch)
            missed: list[Plan] = []
            rests = self._side_by_side(lambda job: self._faulty(job[0], job[1], clean, measured, ignored), jobs)
            for rest in rests:
                missed += [replace(plan, tries=plan.tries + 1) for plan in rest]
            again = [plan for plan in missed if plan.tries < MAX_TRIES]
            queue.extend(plans.chains(again, measured) if again and not self.outcome.problems else ())
        self._conclude()
        self.outcome.runs = number
        self.outcome.kills.sort(key=lambda kill: kill.run)  # stable: within a run in the order of time
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _side_by_side(self, work: Callable, jobs: Sequence) -> list:
        if self._jobs == 1 or len(jobs) == 1:
            return [work(job) for job in jobs]
        with ThreadPoolExecutor(self._jobs) as pool:
            waiting = [pool.submit(work, job) for job in jobs]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                # Children of the other run must not outlive the campaign.
                self.stop.set()
                for future in waiting:
                    future.cancel()
                raise

    # Without faults

    def _clean(self) -> tuple[Ending, Measured, frozenset[Key]]:
        runs = [Run(self.launcher, self.work / f"clean-{number}", self.stop) for number in (1, 2)]
        endings = self._side_by_side(self._clean_run, list(enumerate(runs, 1)))
        first, second = endings
        start = first.run.starts[0]
        measured = plans.measure(start.processes, start.seconds)
        if not measured.saves and self.settings.compare is None:
            made = "no CheckpointManager was made" if not first.roots else "its CheckpointManager saved nothing"
            raise CleanRunsFailed(
                f"The training ended without a checkpoint: {made}.",
                hint="Save more often (save_every_steps), check that the script uses ckpt.CheckpointManager, or name "
                "the file it leaves behind with --compare FILE.",
            )
        if self.settings.compare is not None and first.artefact is None:
            raise CleanRunsFailed(f"The training has not made {self.settings.compare}, the file to compare.")
        ignored = first.varying(second)
        differing = compare(first, second, ignored, Compared())
        if differing:
            raise CleanRunsFailed(
                f"The training itself is not deterministic, as two runs without faults show: {differing[0]}.",
                differing=tuple(differing),
                hint="Seed every generator before the first random number, set torch.set_num_threads and "
                "torch.use_deterministic_algorithms, and keep clocks out of the state.",
            )
        if ignored:
            listed = sorted({name for kind, name in ignored if kind == METRIC})
            if listed:
                self.outcome.notes.append(f"metrics that differ without faults are not compared: {', '.join(listed)}")
        self.outcome.saves = measured.saves
        if not self.keep:
            shutil.rmtree(runs[1].folder)
        return first, measured, ignored

    def _clean_run(self, job: tuple[int, Run]) -> Ending:
        number, run = job
        start = run.start(None, self.settings.timeout)
        if not start.finished:
            raise CleanRunsFailed(f"The training failed without any fault: {start.explained()}", path=str(run.folder))
        ending = Ending(run, self._artefact(run))
        oracle = Oracle(run.records)
        oracle.look([start.processes])
        if oracle.findings:
            raise CleanRunsFailed(f"Without any fault: {oracle.findings[0].text}", path=str(run.folder))
        saves = sum(1 for process in start.processes for _ in process.of("ack"))
        self.watcher.done(f"run without faults {number} of 2: {several(saves, 'save')} in {start.seconds:.1f} s")
        return ending

    def _artefact(self, run: Run) -> Path | None:
        return None if self.settings.compare is None else take_artefact(run, self.settings.compare, Path.cwd())

    # With faults

    def _announce(self, planned: Sequence[Sequence[Plan]], measured: Measured) -> None:
        self._planned = sum(map(len, planned))
        about = about_seconds(plans.seconds(planned, measured, self._jobs))
        self.watcher.done(f"{several(self._planned, 'kill')} planned in {several(len(planned), 'run')}, about {about}")
        self.watcher.struck(0, self._planned)

    def _draw(self, measured: Measured) -> list[Plan]:
        reachable = measured.reachable()
        asked = self.settings.points
        self.outcome.wanted = reachable if asked is None else asked
        self.outcome.unreached = tuple(name for name in plans.ORDER if name not in reachable)
        # No run can strike at the others: they would only cost time.
        possible = [name for name in self.outcome.wanted if name in reachable]
        return plans.draw(measured, self.settings.kills, possible, self.settings.seed)

    def _faulty(
        self, number: int, chain: Sequence[Plan], clean: Ending, measured: Measured, ignored: frozenset[Key]
    ) -> list[Plan]:
        """One run with the kills of `chain`; returns the plans that found no chance to strike."""
        run = Run(self.launcher, self.work / f"run-{number:03d}", self.stop)
        oracle = Oracle(run.records)
        waiting = list(chain)
        missed: list[Plan] = []
        newest = 0
        made: list[KillRecord] = []
        while True:
            done = sum(step <= newest for step in measured.steps)
            plan = plans.choose(waiting, measured, done)
            kill = None if plan is None else plans.aim(plan, measured, done, waiting)
            start = run.start(kill, self._limit(measured))
            self._resumed(made, start)
            before, newest = newest, max(oracle.look([one.processes for one in run.starts]).values(), default=0)
            problem = start.problem() or "; ".join(finding.text for finding in oracle.findings)
            if start.claim is not None and plan is not None:
                made.append(self._record(number, plan, start, before, problem))
                with self._lock:
                    self._struck += 1
                self.watcher.struck(self._struck, self._planned)
            elif plan is not None:
                missed.append(plan)
            if problem:
                self._failed(number, made, start, oracle)
                break
            if start.finished:
                break
        self._finish(number, run, oracle, made, clean, ignored)
        # What no process of a calm run came by will not come by in another one either.
        return [plan for plan in (*missed, *(waiting if made else ())) if plan.target != plans.SET_UP]

    def _limit(self, measured: Measured) -> float:
        return self.settings.timeout if self.settings.timeout is not None else 60 + 10 * measured.whole_s

    def _record(self, number: int, plan: Plan, start: Start, newest: int, problem: str) -> KillRecord:
        claim = start.claim
        assert claim is not None
        step = claim.step or newest  # killed before it resumed
        return KillRecord(
            number, plan.target, claim.point, claim.after, claim.inside, step, claim.pid, None, 0, problem
        )

    def _resumed(self, made: list[KillRecord], start: Start) -> None:
        """Writes what this start resumed into the kills that still waited for a resume."""
        steps = [event["step"] for process in start.processes for event in process.of("resumed")]
        for index, kill in enumerate(made):
            if kill.resumed is None:
                made[index] = replace(kill, resumed=steps[0] if steps else None, restarts=kill.restarts + 1)

    def _failed(self, number: int, made: list[KillRecord], start: Start, oracle: Oracle) -> None:
        where = f"run {number}, after {made[-1].point} at step {made[-1].step}" if made else f"run {number}"
        with self._lock:
            self.outcome.problems += [f"{where}: {finding.kind}: {finding.text}" for finding in oracle.findings]
            if start.problem():
                self.outcome.problems.append(f"{where}: {start.explained()}")

    def _finish(
        self, number: int, run: Run, oracle: Oracle, made: list[KillRecord], clean: Ending, ignored: frozenset[Key]
    ) -> None:
        different = []
        compared = Compared()
        if run.starts[-1].finished:
            different = compare(clean, Ending(run, self._artefact(run)), ignored, compared)
        with self._lock:
            outcome = self.outcome
            outcome.kills += made
            outcome.differing += different
            outcome.verified += oracle.checked
            total = outcome.compared
            total.tensors, total.rng = max(total.tensors, compared.tensors), max(total.rng, compared.rng)
            total.batches = max(total.batches, compared.batches)
            total.steps += compared.steps
            total.bytes += compared.bytes
            ended = "differs" if different else "equal"
            state = ended if run.starts[-1].finished else "FAILED"
            changed = {
                event["exactness"]
                for process in run.processes
                for event in process.of("resumed")
                if event["exactness"].startswith("changed")
            }
            outcome.notes += sorted(changed - set(outcome.notes))
        if run.starts[-1].finished and not different and not self.keep:
            shutil.rmtree(run.folder)
        self.watcher.done(f"run {number}: {several(len(made), 'kill')}, {several(len(run.starts), 'process')}, {state}")

    def _conclude(self) -> None:
        outcome = self.outcome
        if outcome.problems:
            return
        outcome.missed = tuple(name for name in outcome.wanted if not outcome.hits(name))
        inside, drawn = outcome.random_inside
        short = self.settings.kills - drawn
        if short > 0:
            outcome.holes.append(f"{short} of {several(self.settings.kills, 'random kill')} found no moment to strike")
        elif outcome.saves and 2 * inside < drawn:
            outcome.holes.append(f"only {inside} of {several(drawn, 'random kill')} struck inside a save")


def new_seed() -> int:
    return random.SystemRandom().randrange(1 << 31)


__all__ = ["Campaign", "Cancelled", "Settings", "new_seed"]
