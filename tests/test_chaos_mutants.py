"""A campaign fails when it should: each plausible bug of a resume or a commit is found, and named for what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos_mutants as mutants
import chaos_support as support
import pytest
import torch

from ckpt import CheckpointManager
from ckpt.chaos.outcome import BIT_EXACT, CleanRunsFailed

pytestmark = pytest.mark.full

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    support.warm_up()


@pytest.fixture
def work() -> Iterator[Path]:
    with support.folder() as path:
        yield path


# The bug -> (the kind, and a part of the name, of a difference that it must lead to).
DIFFERENCES: dict[Callable[[], None], tuple[str, str]] = {
    mutants.python_rng_not_restored: ("rng", "rng/python"),
    mutants.numpy_rng_not_restored: ("rng", "rng/numpy"),
    mutants.torch_rng_not_restored: ("rng", "rng/torch"),
    mutants.loader_restarts_its_epoch: ("batch", ""),
    mutants.loader_one_batch_ahead: ("batch", ""),
    mutants.moments_cast: ("tensor", "momentum"),
    mutants.moments_change_their_dtype: ("tensor", "momentum"),
    mutants.two_moments_swapped: ("tensor", "adam"),
    mutants.scheduler_not_restored: ("value", "scheduler"),
    mutants.scheduler_off_by_one: ("value", "scheduler"),
    mutants.scaler_stale: ("value", "scaler"),
    mutants.counter_lost: ("value", "best/count"),
    mutants.running_statistics_lost: ("tensor", "model/3.running_mean"),
    mutants.one_bit_of_a_counter_flipped: ("tensor", "model/3.num_batches_tracked"),
}
# The bug -> (the point to kill at, a part of what is said).
LOSSES: dict[Callable[[], None], tuple[str, str]] = {
    mutants.published_before_the_files_are_written: ("write.half", "torn: step 6 is visible and not complete"),
    mutants.acknowledged_before_it_is_published: ("publish.before", "lost: step 6 was acknowledged"),
    mutants.old_steps_removed_before_the_new_one_is_there: ("publish.before", "lost: step 4 was acknowledged"),
    mutants.newest_step_torn_behind_its_acknowledgement: ("save.begin", "damaged"),
}


def test_the_training_itself_is_found_bit_exact(work: Path) -> None:
    outcome = support.campaign(support.Training(steps=12), work, kills=2, points=("publish.after",))
    assert (outcome.verdict, outcome.exit, len(outcome.kills)) == (BIT_EXACT, 0, 3)


@pytest.mark.parametrize("mutant", DIFFERENCES, ids=lambda mutant: mutant.__name__)
def test_what_a_resume_does_not_bring_back_is_found(mutant: Callable[[], None], work: Path) -> None:
    kind, name = DIFFERENCES[mutant]
    train = support.Training(steps=12, before=mutant)
    outcome = support.campaign(train, work, kills=0, points=("publish.after", "write.data", "save.staged"))
    assert len(outcome.kills) == 3 and not outcome.problems
    assert any(item.kind == kind and name in item.name for item in outcome.differing), outcome.differing
    assert outcome.exit == 3 and outcome.verdict == str(outcome.differing[0]) != BIT_EXACT
    earliest = outcome.differing[0].step
    assert earliest is not None and earliest > min(kill.resumed or 0 for kill in outcome.kills)


@pytest.mark.parametrize("mutant", LOSSES, ids=lambda mutant: mutant.__name__)
def test_a_lost_or_torn_step_is_found(mutant: Callable[[], None], work: Path) -> None:
    from ckpt.chaos.events import Kill
    from ckpt.chaos.oracle import Oracle

    point, said = LOSSES[mutant]
    run = support.run_of(support.Training(steps=12, before=mutant), work / "run")
    # In the third save: whatever is lost of it, there was something to lose.
    start = run.start(Kill("point", point, 3), 120)
    assert start.claim is not None and start.code == -9
    oracle = Oracle(run.records)
    oracle.look([start.processes])
    found = [f"{finding.kind}: {finding.text}" for finding in oracle.findings]
    assert any(said in text for text in found), found


@pytest.mark.parametrize("mutant", list(LOSSES)[:2], ids=lambda mutant: mutant.__name__)
def test_a_campaign_over_a_lossy_commit_exits_with_three(mutant: Callable[[], None], work: Path) -> None:
    train = support.Training(steps=12, before=mutant)
    point = LOSSES[mutant][0]
    outcome = support.campaign(train, work, kills=2, points=(point,), seed=3)
    assert outcome.exit == 3 and outcome.problems, outcome.to_dict()


def test_a_commit_that_damages_every_step_fails_without_any_kill(work: Path) -> None:
    train = support.Training(steps=6, before=mutants.newest_step_torn_behind_its_acknowledgement)
    with pytest.raises(CleanRunsFailed, match="Without any fault"):
        support.campaign(train, work, kills=1)


class Backoff:
    """A loss scaler of one's own that skips steps by a history it does not export."""

    def __init__(self) -> None:
        self.scale, self.since, self.skipped = 8.0, 0, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def update(self) -> None:
        self.since += 1
        if self.since == 5:
            self.scale, self.since, self.skipped = self.scale / 2, 0, self.skipped + 1


def test_a_counter_that_an_object_does_not_export_is_found_by_what_it_changes(work: Path) -> None:
    """AUX-04: the checkpoint holds all that the object gave, and still the end depends on where it was restarted."""

    def train() -> None:
        torch.manual_seed(0)
        backoff, weight = Backoff(), torch.nn.Linear(2, 2)
        manager = CheckpointManager("runs/aux", {"backoff": backoff, "model": weight})
        for step in manager.loop(12):
            backoff.update()
            with torch.no_grad():
                weight.weight.mul_(1 + step / backoff.scale)
        manager.close()

    outcome = support.campaign(train, work, kills=0, points=("publish.after", "write.half", "save.staged"))
    assert outcome.exit == 3 and ("value", "backoff/scale") in {(item.kind, item.name) for item in outcome.differing}


def test_a_point_that_no_kill_struck_is_a_hole_and_no_difference(work: Path) -> None:
    """With every step kept, nobody can die while something is removed."""
    train = support.Training(steps=8, every=2, keep_last=None)
    outcome = support.campaign(train, work, kills=0, points=("publish.after", "remove.half"))
    assert [kill.target for kill in outcome.kills] == ["publish.after"] and outcome.runs == 1
    assert (outcome.problems, outcome.missed, outcome.exit) == ([], ("remove.half",), 1)
    assert outcome.verdict == "bit-exact, but 1 point was never struck: give the training more saves"
    assert "remove.half" in outcome.unreached


def test_a_bug_put_into_the_users_command_from_outside_is_found_by_the_command(tmp_path: Path) -> None:
    """The same through `ckpt chaos`: nothing but the child's environment says that the library is mutated."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'CKPT_CHAOS' in os.environ:\n"
        f"    sys.path.insert(0, {str(REPO / 'tests')!r})\n"
        "    import chaos_mutants\n"
        "    chaos_mutants.torch_rng_not_restored()\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-m", "ckpt", "chaos", "--kills", "0", "--points", "publish.after", "--json"]
    command += ["--seed", "1", "--", sys.executable, "-m", "ckpt.chaos.demo_train"]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert result.returncode == 3, result.stderr
    found = json.loads(result.stdout)
    assert found["verdict"] != BIT_EXACT and [kill["point"] for kill in found["kills"]] == ["publish.after"]
    assert any(item["kind"] == "rng" and "torch" in item["name"] for item in found["differing"])
    kept = result.stderr.partition("is kept in ")[2].strip()
    assert Path(kept, "clean-1").is_dir()
    subprocess.run(["rm", "-r", kept], check=True)
