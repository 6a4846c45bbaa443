"""Campaigns over whole trainings: what they promise, what they refuse, and the two examples killed at every point."""

from __future__ import annotations

import functools
import importlib
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos_support as support
import numpy as np
import pytest
import torch

import ckpt
from ckpt import CheckpointManager, ResumableLoader, StateDict, points
from ckpt.chaos.launch import dead
from ckpt.chaos.outcome import BIT_EXACT, CleanRunsFailed
from ckpt.chaos.plans import ORDER, Measured, chains, draw

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL_GPT = ["--width", "32", "--depth", "1", "--length", "32", "--batch", "8", "--text", "40000"]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    support.warm_up()


@pytest.fixture
def work() -> Iterator[Path]:
    with support.folder() as path:
        yield path


def example(name: str, sync: bool, *options: str) -> Callable[[], None]:
    """The example's file as it is; `sync` makes its manager wait for the disk in every save."""

    def train() -> None:
        if sync:
            ckpt.CheckpointManager = functools.partial(ckpt.CheckpointManager, async_save=False)  # type: ignore
        sys.argv = [name, "--root", "runs/example", *(SMALL_GPT if name == "train_gpt.py" else []), *options]
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return train


# What a campaign promises


@pytest.mark.parametrize("name", ["train_gpt.py", "train_minimal.py"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_an_example_killed_at_every_point_and_ten_moments_ends_with_the_same_bits(
    name: str, sync: bool, work: Path
) -> None:
    """Every named point is hit, most random kills fall into a save, no step is lost, no batch repeated or skipped."""
    if name == "train_minimal.py":
        importlib.import_module("sklearn.datasets")  # once, and not in each forked child
    train = example(name, sync, "--steps", "40", "--save-every", "3")
    outcome = support.campaign(train, work, kills=10, seed=7 if sync else 8)
    assert outcome.verdict == BIT_EXACT, outcome.to_dict()
    assert outcome.wanted == ORDER and all(outcome.hits(point) for point in ORDER)
    inside, drawn = outcome.random_inside
    assert drawn == 10 and 2 * inside >= drawn
    assert outcome.compared.batches == 40 and outcome.compared.rng >= 5 and outcome.compared.steps >= 13
    per_run = [sum(kill.run == run for kill in outcome.kills) for run in range(1, outcome.runs + 1)]
    assert max(per_run) >= 3 and sum(per_run) == 36


def test_workers_of_a_killed_trainer_are_gone_before_the_next_start(work: Path) -> None:
    outcome = support.campaign(support.Training(steps=12, workers=1), work, kills=3, points=("write.half",))
    assert outcome.verdict == BIT_EXACT and len(outcome.kills) == 4


def test_the_same_seed_strikes_at_the_same_points_and_steps(work: Path) -> None:
    struck = []
    for name in ("one", "two"):
        wanted = ("publish.after", "write.half", "resume.tensors", "remove.half", "save.staged")
        outcome = support.campaign(support.Training(), work / name, kills=0, points=wanted, seed=11)
        struck.append([(kill.run, kill.point, kill.step, kill.resumed) for kill in outcome.kills])
    assert struck[0] == struck[1] and len(struck[0]) == 5


def test_the_users_root_is_never_touched(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    support.Training(steps=4)()
    before = {path: path.stat().st_mtime_ns for path in sorted(Path("runs").rglob("*"))}
    assert before
    outcome = support.campaign(support.Training(steps=8), work / "chaos", kills=2, points=())
    assert outcome.verdict == BIT_EXACT
    assert {path: path.stat().st_mtime_ns for path in sorted(Path("runs").rglob("*"))} == before


def test_a_run_that_starts_from_a_real_root_reads_it_and_leaves_it_alone(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    support.Training(steps=4)()
    before = {path: path.stat().st_mtime_ns for path in sorted(Path("runs").rglob("*"))}

    def train() -> None:
        state = support.Training().state()
        manager = CheckpointManager("runs/next", state, save_every_steps=2)
        start = manager.resume(from_="runs/small")
        assert start >= 4
        ckpt.load_weights("runs/small/step-00000004", support.Training().state()["model"])
        for _step, batch in manager.loop(12, state["loader"]):
            support.train_step(state, batch)
        manager.close()

    outcome = support.campaign(train, work / "chaos", kills=0, points=("publish.after", "write.half", "save.begin"))
    assert outcome.verdict == BIT_EXACT and len(outcome.kills) == 3 and outcome.compared.batches == 8
    assert {path: path.stat().st_mtime_ns for path in sorted(Path("runs").rglob("*"))} == before


def test_several_managers_in_one_process_are_each_compared(work: Path) -> None:
    def train() -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        first, second = (torch.nn.Linear(3, 3) for _ in range(2))
        loader = ResumableLoader(support.Noisy(), 4, seed=1)
        with (
            CheckpointManager("runs/a-b", {"model": first, "loader": loader}) as one,
            CheckpointManager("runs/a/b", {"model": second}) as two,
        ):
            two.resume()
            for step, batch in one.loop(10, loader):
                with torch.no_grad():
                    first.weight.add_(batch.mean())
                    second.weight.fill_(step)
                if step % 2 == 0:
                    two.save(step)

    outcome = support.campaign(train, work, kills=0, points=("publish.after", "save.begin", "write.half"))
    # The second root may be a step ahead or behind at a death: only its own steps are compared.
    assert {kill.point for kill in outcome.kills} == {"publish.after", "save.begin", "write.half"}
    assert not outcome.problems and outcome.compared.batches == 10
    assert {path.parent.name for path in (work / "clean-1" / "sandbox").rglob("step-*")} == {"a-b", "b"}


def test_a_validation_loader_that_is_not_registered_is_not_taken_for_training_data(work: Path) -> None:
    def train() -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loader = ResumableLoader(support.Noisy(), 4, seed=1)
        check = ResumableLoader(support.Noisy(8), 4, seed=1, shuffle=False)
        with CheckpointManager("runs/v", {"loader": loader, "n": StateDict(n=0)}, save_every_steps=2) as manager:
            for _step, _batch in manager.loop(10, loader):
                check.set_epoch(0)
                for _ in check:
                    pass

    outcome = support.campaign(train, work, kills=0, points=("commit.acknowledged", "publish.before"))
    assert outcome.verdict == BIT_EXACT and outcome.compared.batches == 10


def unseeded(spoil: bool) -> Callable[[], None]:
    """A training that draws nothing from numpy, and does not seed it either."""

    def train() -> None:
        random.seed(0)
        torch.manual_seed(0)
        np.random.seed(int.from_bytes(os.urandom(4), "little"))
        state = StateDict(n=0)
        manager = CheckpointManager("runs/u", {"state": state})
        start = manager.resume()
        if spoil and start:
            np.random.rand()
        for step in range(start + 1, 8):
            state["n"] += step
            manager.save(step, metrics={"seconds": time.monotonic()})
        manager.close()

    return train


def test_a_stream_that_nobody_seeds_and_a_metric_that_is_a_clock_are_no_difference(work: Path) -> None:
    outcome = support.campaign(unseeded(spoil=False), work, kills=0, points=("publish.after", "write.data"))
    assert outcome.verdict == BIT_EXACT
    assert outcome.notes == ["metrics that differ without faults are not compared: seconds"]


def test_a_stream_that_nobody_seeds_must_still_come_back(work: Path) -> None:
    outcome = support.campaign(unseeded(spoil=True), work, kills=0, points=("publish.after", "write.data"))
    assert {item.kind for item in outcome.differing} == {"rng"} and "numpy" in outcome.verdict


@pytest.mark.parametrize("saves", [1, 3, 4])
def test_a_training_of_few_saves_is_killed_at_each_point_it_has_and_no_run_is_idle(saves: int, work: Path) -> None:
    """keep_last=3 and four saves: the last one alone removes a step, once in each run."""
    outcome = support.campaign(support.Training(steps=2 * saves), work, kills=0)
    assert (outcome.verdict, outcome.exit, outcome.saves) == (BIT_EXACT, 0, saves), outcome.to_dict()
    assert outcome.wanted == (ORDER if saves == 4 else points.SAVE_POINTS + points.RESUME_POINTS)
    assert set(outcome.unreached) == set(ORDER) - set(outcome.wanted)
    assert len(outcome.kills) == len(outcome.wanted) and all(outcome.hits(point) for point in outcome.wanted)
    assert outcome.runs == {1: 4, 3: 2, 4: 5}[saves] == len({kill.run for kill in outcome.kills})


def test_points_that_need_a_checkpoint_get_one_first(work: Path) -> None:
    outcome = support.campaign(support.Training(steps=4), work, kills=0, points=("resume.tensors", "resume.chosen"))
    assert [kill.target for kill in outcome.kills] == ["set-up", "resume.tensors", "resume.chosen"]
    assert (outcome.verdict, outcome.runs, outcome.kills[1].step) == (BIT_EXACT, 1, 2)


# What a campaign refuses


def fails(train: Callable[[], object], work: Path, **settings: object) -> str:
    with pytest.raises(CleanRunsFailed) as caught:
        support.campaign(train, work, **{"kills": 1, "points": (), **settings})
    return str(caught.value)


def test_a_training_that_is_not_deterministic_is_told_where_it_differs_first(work: Path) -> None:
    class Random(support.Training):
        def state(self) -> dict[str, object]:
            state = super().state()
            torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
            return state

    said = fails(Random(steps=6), work)
    assert said.startswith("The training itself is not deterministic") and "differs at step 2" in said
    assert "tensor" in said


def test_data_in_another_order_is_told_as_a_batch(work: Path) -> None:
    class Shuffled(support.Training):
        def state(self) -> dict[str, object]:
            seed = int.from_bytes(os.urandom(4), "little")
            return {**super().state(), "loader": ResumableLoader(support.Noisy(), 4, seed=seed)}

    assert "show: batch 1 differs at step 2: epoch 0 batch 0 (ids " in fails(Shuffled(steps=6), work)


def test_no_save_is_told_with_what_to_do(work: Path) -> None:
    def nothing() -> None:
        pass

    def manager() -> None:
        CheckpointManager("runs/n", {"state": StateDict(a=1)}).close()

    assert "no CheckpointManager was made. Save more often" in fails(nothing, work / "1")
    assert "its CheckpointManager saved nothing. Save more often" in fails(manager, work / "2")


def test_a_training_that_fails_by_itself_is_told_with_the_end_of_its_output(work: Path) -> None:
    def train() -> None:
        print("x" * 50_000_000)
        raise RuntimeError("the data set is not there")

    said = fails(train, work)
    assert "exit code 1" in said and "the data set is not there" in said and len(said) < 10_000


def test_a_training_that_hangs_is_ended_and_told(work: Path) -> None:
    said = fails(lambda: time.sleep(600), work, timeout=0.3)
    assert "did not end within 0 s" in said


def test_a_resume_that_hangs_fails_the_campaign(work: Path) -> None:
    def before() -> None:
        if any(Path(os.environ["CKPT_SANDBOX"]).iterdir()):
            time.sleep(600)

    outcome = support.campaign(
        support.Training(steps=6, before=before), work, kills=0, points=("publish.after",), timeout=6
    )
    assert outcome.exit == 3 and "did not end within 6 s" in outcome.verdict


def test_a_resume_that_fails_fails_the_campaign_with_the_end_of_its_output(work: Path) -> None:
    def before() -> None:
        if any(Path(os.environ["CKPT_SANDBOX"]).iterdir()):
            raise RuntimeError("no resume here")

    outcome = support.campaign(support.Training(steps=6, before=before), work, kills=0, points=("publish.after",))
    assert outcome.exit == 3 and "exit code 1" in outcome.verdict and "no resume here" in outcome.problems[0]


def test_a_root_outside_the_sandbox_stops_the_process_before_it_writes(work: Path) -> None:
    real = work / "real"

    def train() -> None:
        del os.environ["CKPT_SANDBOX"]
        support.Training(root=str(real))()

    said = fails(train, work / "chaos")
    assert "outside the sandbox" in said and str(real) in said
    assert not real.exists()


def test_children_that_the_training_leaves_behind_are_ended_with_it(work: Path) -> None:
    note = work / "pids"

    def train() -> None:
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(note, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
        support.Training(steps=4)()
        # Not the interpreter's end: no exit handler, no flush.
        os._exit(0)

    outcome = support.campaign(train, work / "chaos", kills=0, points=("publish.after",))
    assert outcome.verdict == BIT_EXACT
    pids = [int(line) for line in note.read_text().split()]
    assert len(pids) >= 3 and all(dead(pid) for pid in pids)


# Plans


def test_three_of_four_random_kills_aim_into_a_save_and_every_point_is_planned() -> None:
    measured = Measured(steps=tuple(range(1, 21)), counts=dict.fromkeys(points.NAMES, 20), retires_at=4)
    plans = draw(measured, 40, measured.reachable(), seed=3)
    assert plans == draw(measured, 40, measured.reachable(), seed=3) != draw(measured, 40, ORDER, seed=4)
    assert sum(plan.target == "random, in a save" for plan in plans) == 30
    assert sum(plan.target == "random, any moment" for plan in plans) == 10
    assert sorted(plan.target for plan in plans if plan.target in points.NAMES) == sorted(ORDER)
    assert all(3 <= len(chain) <= 12 for chain in chains(plans, measured))
