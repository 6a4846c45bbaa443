"""A process that dies by SIGKILL at any named point of a save, a removal or a resume loses nothing it was promised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import chaos_support as support
import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, points
from ckpt.chaos.ending import Compared, Ending, compare
from ckpt.chaos.events import Kill
from ckpt.chaos.oracle import Oracle
from ckpt.chaos.runs import Run, Start, roots_of
from ckpt.commit.roster import Roster, Scanner
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.full

STEPS, EVERY = 12, 2
# From here on the step of the save that was killed is there.
THERE = points.SAVE_POINTS[points.SAVE_POINTS.index("publish.after") :]
ALL = points.SAVE_POINTS + points.RETENTION_POINTS + points.RESUME_POINTS


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    support.warm_up()


@pytest.fixture
def work() -> Iterator[Path]:
    with support.folder() as path:
        yield path


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def clean(request: pytest.FixtureRequest) -> Iterator[tuple[bool, Ending]]:
    with support.folder() as path:
        run = support.run_of(training(request.param), path / "clean")
        assert run.start(None, 120).finished
        yield request.param, Ending(run)


def training(background: bool, **manager: object) -> support.Training:
    return support.Training(STEPS, EVERY, async_save=background, **manager)


def roster(run: Run) -> Roster:
    ((_, at),) = roots_of(run.processes).items()
    return Scanner(LocalStorage(at)).scan()


def steps(run: Run) -> list[int]:
    return [folder.step for folder in roster(run).steps]


def died_at(run: Run, point: str, occurrence: int = 1) -> Start:
    """Starts the training and lets it die there, and there only."""
    start = run.start(Kill("point", point, occurrence), 120)
    assert start.claim is not None, f"{point} was not reached: {start.explained()}"
    assert (start.claim.point, start.claim.after, start.code) == (point, point, -9)
    assert start.claim.pid == start.leader
    return start


def nothing_lost(run: Run, oracle: Oracle) -> int:
    newest = oracle.look([start.processes for start in run.starts])
    assert oracle.findings == []
    return max(newest.values(), default=0)


def ends_like(clean: Ending, run: Run) -> Compared:
    start = run.start(None, 120)
    assert start.finished, start.explained()
    compared = Compared()
    assert compare(clean, Ending(run), frozenset(), compared) == []
    assert roster(run).debris == ()
    return compared


@pytest.mark.parametrize("point", points.SAVE_POINTS)
def test_a_kill_in_a_save_leaves_the_old_step_or_the_new_one_and_the_run_ends_with_the_same_bits(
    point: str, clean: tuple[bool, Ending], work: Path
) -> None:
    """TORN-13, CFG-06: a set of files is whole or not there; the same step is saved again after a death behind it."""
    background, calm = clean
    run, oracle = support.run_of(training(background), work / "run"), Oracle(work / "run" / "records")
    # The third save: there are older steps to fall back to, and retention has not begun.
    each = sum(event["name"] == point for p in calm.run.processes for event in p.of("point")) // (STEPS // EVERY)
    died_at(run, point, 2 * each + 1)
    expected = 3 * EVERY if point in THERE else 2 * EVERY
    assert nothing_lost(run, oracle) == expected
    compared = ends_like(calm, run)
    assert nothing_lost(run, oracle) == STEPS
    assert compared.batches == STEPS and compared.tensors > 10 and compared.bytes > 0
    resumed = [event["step"] for event in run.starts[-1].processes[0].of("resumed")]
    assert resumed == [expected]


@pytest.mark.parametrize("point", points.RETENTION_POINTS)
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_in_retention_leaves_keep_last_steps_and_debris_that_the_next_save_removes(
    point: str, keep: int, work: Path
) -> None:
    """RET-05, DUR-07: old steps go only behind a durable newer one, and nothing is left of what died."""
    train = training(True, keep_last=keep)
    run, oracle = support.run_of(train, work / "run"), Oracle(work / "run" / "records")
    died_at(run, point, 2)
    newest = nothing_lost(run, oracle)
    assert newest >= (keep + 1) * EVERY and len(steps(run)) >= keep
    start = run.start(None, 120)
    assert start.finished, start.explained()
    assert nothing_lost(run, oracle) == STEPS
    assert steps(run) == [STEPS - EVERY * i for i in reversed(range(keep))]
    assert roster(run).debris == ()


@pytest.mark.parametrize("point", points.RESUME_POINTS)
def test_a_kill_in_a_resume_changes_nothing_on_disk(point: str, clean: tuple[bool, Ending], work: Path) -> None:
    background, calm = clean
    run, oracle = support.run_of(training(background), work / "run"), Oracle(work / "run" / "records")
    died_at(run, "publish.after", 4)
    before = roster(run)
    for _ in range(2):
        died_at(run, point)
        assert [folder.manifest for folder in roster(run).steps] == [folder.manifest for folder in before.steps]
    assert nothing_lost(run, oracle) == 4 * EVERY
    ends_like(calm, run)


def test_deaths_upon_deaths_in_one_epoch_still_end_with_the_same_bits(clean: tuple[bool, Ending], work: Path) -> None:
    """A kill while the remains of the kill before are swept, one before any step of its own, one in the same save."""
    background, calm = clean
    run, oracle = support.run_of(training(background), work / "run"), Oracle(work / "run" / "records")
    deaths = ("write.half", "write.half", "publish.before", "save.begin", "publish.after", "resume.tensors")
    for point in (*deaths, "fsync.manifest.after", "remove.half", "commit.acknowledged"):
        died_at(run, point)
        nothing_lost(run, oracle)
    ends_like(calm, run)


def test_twelve_deaths_with_keep_last_two_leave_two_steps_and_no_debris(work: Path) -> None:
    """DUR-07"""
    train = support.Training(30, 2, keep_last=2)
    run, oracle = support.run_of(train, work / "run"), Oracle(work / "run" / "records")
    for number in range(12):
        died_at(run, ("write.data", "publish.before", "fsync.parent.before")[number % 3], 1 + number % 2)
        nothing_lost(run, oracle)
        assert len(steps(run)) <= 3
    assert run.start(None, 120).finished
    found = roster(run)
    assert [folder.step for folder in found.steps] == [28, 30]
    assert (found.debris, found.damaged, found.foreign) == ((), (), ())


class Large:
    """200 MB, another value at each step."""

    def __call__(self) -> None:
        torch.set_num_threads(1)
        model = nn.ParameterList([nn.Parameter(torch.zeros(25_000_000)) for _ in range(2)])
        with CheckpointManager("runs/large", {"model": model}, keep_last=2) as manager:
            for step in range(manager.resume() + 1, 100):
                with torch.no_grad():
                    for number, p in enumerate(model):
                        if step > 1 and not torch.equal(p[:3], torch.full((3,), 10.0 * (step - 1) + number)):
                            raise AssertionError(f"step {step} began from {p[:3]}")
                        p.fill_(10.0 * step + number)
                manager.save(step)


def test_200_megabytes_killed_at_thirty_moments_of_a_save_never_show_an_incomplete_step(work: Path) -> None:
    """TORN-01: the final name never shows incomplete data, a resume has the previous step's bits, debris is swept."""
    run, oracle = support.run_of(Large(), work / "run"), Oracle(work / "run" / "records")
    chance = random.Random(4)
    newest = died = debris = 0
    for number in range(30):
        # Half at points of the second save, half after a time; a save that is over by then dies at its acknowledgement.
        point = chance.choice(points.SAVE_POINTS)
        timed = Kill("save", occurrence=1, delay=chance.random() * 0.2)
        kill = Kill("point", point, 2) if number % 2 else timed
        start = run.start(kill, 120)
        assert start.claim is not None and start.code == -9 and start.claim.inside
        died += 1
        found = nothing_lost(run, oracle)
        assert newest <= found <= newest + 2
        newest = found
        debris += bool(roster(run).debris)
        assert len(roster(run).debris) <= 2, "the next save did not sweep what the one before left"
    assert died == 30 and debris > 5 and newest >= 15
