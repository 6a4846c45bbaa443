"""The loop: which steps it yields, what it saves and when, and what it does with data, signals and endings."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import (
    Tiny,
    die,
    failure,
    faults,
    folders,
    in_child,
    manager,
    resumed,
    warnings,
    write_steps,
)  # fmt: skip

from ckpt import CheckpointManager, ResumableLoader
from ckpt.errors import StorageUnavailableError

pytestmark = pytest.mark.full


def run(root: Any, total: int, tiny: Tiny | None = None, **options: Any) -> list[int]:
    tiny = tiny or Tiny()
    seen = []
    with manager(root, tiny, keep_last=None, **options) as made:
        for step in made.loop(total):
            seen.append(step)
            tiny.at(step)
    return seen


def test_the_loop_resumes_by_itself_and_yields_what_is_left(tmp_path: Path) -> None:
    assert run(tmp_path, 3) == [1, 2, 3]
    tiny = Tiny(-1)
    assert run(tmp_path, 5, tiny) == [4, 5]
    assert resumed(tmp_path) == 5


def test_nothing_left_to_do_is_said_plainly_and_saves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SCHED-08 / LIFE-07: total is the absolute last step."""
    caplog.set_level(logging.INFO, "ckpt")
    run(tmp_path, 3)
    before = folders(tmp_path)
    for total in (3, 2, 0):
        caplog.clear()
        assert run(tmp_path, total) == []
        assert sum("nothing left to do" in r.getMessage() for r in caplog.records) == 1
    assert folders(tmp_path) == before
    assert run(tmp_path / "new", 0) == [] and not folders(tmp_path / "new")


def test_a_longer_target_goes_on(tmp_path: Path) -> None:
    """SCHED-08: the length is config, not state."""
    run(tmp_path, 9)
    assert run(tmp_path, 15) == list(range(10, 16))


@pytest.mark.parametrize(("every", "total", "saved"), [(4, 10, (4, 8, 10)), (5, 10, (5, 10)), (100, 7, (7,))])
def test_it_saves_when_due_and_the_last_step_once(
    tmp_path: Path, every: int, total: int, saved: tuple[int, ...]
) -> None:
    """LIFE-07: non-divisible lengths; the final save happens once."""
    tiny = Tiny()
    with manager(tmp_path, tiny, keep_last=None, save_every_steps=every) as made:
        for step in made.loop(total):
            tiny.at(step)
        assert made.steps() == saved, "durable when the loop ends"
        assert made.last_save is not None and made.last_save.step == total and made.last_save.durable
    assert not made._writer.busy


def test_a_resume_near_the_end_still_writes_the_last_checkpoint(tmp_path: Path) -> None:
    """LIFE-07: the last checkpoint of a resumed run, with lengths that do not divide."""
    run(tmp_path, 8, save_every_steps=4)
    assert run(tmp_path, 10, save_every_steps=4) == [9, 10]
    assert resumed(tmp_path) == 10


def test_no_second_resume_when_one_was_made(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    tiny = Tiny()
    with manager(tmp_path, tiny, keep_last=None) as made:
        assert made.resume(1) == 1
        assert next(iter(made.loop(5))) == 2


def test_a_save_inside_the_body_counts(tmp_path: Path) -> None:
    tiny = Tiny()
    with manager(tmp_path, tiny, keep_last=None) as made:
        for step in made.loop(3):
            assert made.save(step if tiny.at(step) else 0, metrics={"loss": step}) is True
    assert made.steps() == (1, 2, 3)


@pytest.mark.parametrize("end", ["break", "return", "raise"])
def test_leaving_early_saves_nothing_more_and_what_is_in_flight_goes_on(tmp_path: Path, end: str) -> None:
    tiny = Tiny()
    made = manager(tmp_path, tiny, keep_last=None)

    def body() -> None:
        for step in made.loop(10):
            tiny.at(step)
            if step == 3:
                if end == "return":
                    return
                if end == "raise":
                    raise RuntimeError("body")
                break

    if end == "raise":
        with pytest.raises(RuntimeError, match="body"):
            body()
    else:
        body()
    made.wait()
    assert made.steps() == (1, 2)
    assert [step for step in made.loop(5) if tiny.at(step)] == [3, 4, 5], "goes on after the last completed body"
    made.close()
    assert resumed(tmp_path) == 5


def test_a_keyboard_interrupt_passes_through(tmp_path: Path) -> None:
    tiny = Tiny()
    with pytest.raises(KeyboardInterrupt):
        with manager(tmp_path, tiny) as made:
            for step in made.loop(9):
                tiny.at(step)
                if step == 2:
                    raise KeyboardInterrupt
    assert made.steps() == (1,)


def test_the_loop_waits_for_durability_and_raises_what_failed(tmp_path: Path) -> None:
    tiny = Tiny()
    with faults() as fault, manager(tmp_path, tiny) as made:
        loop = made.loop(2)
        next(loop)
        fault.arm("publish")
        assert next(loop) == 2, "step 1 is saved in the background"
        made._writer.idle(30)
        failure(lambda: list(loop), StorageUnavailableError)
        assert fault.hits == 1


def test_total_is_checked_at_the_call(tmp_path: Path) -> None:
    with manager(tmp_path) as made:
        for bad in (True, 1.5, "9"):
            with pytest.raises(TypeError):
                made.loop(bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            made.loop(-1)


# With data


def batches_of(root: Path, stops: list[int], total: int, **kwargs: Any) -> list[tuple[int, list[int]]]:
    """Ids of every batch seen by processes that are killed at `stops`, and of the one that goes through."""
    seen: list[tuple[int, list[int]]] = []
    for stop in [*stops, total]:
        read, write = os.pipe()

        def work(stop: int = stop, write: int = write) -> None:
            loader = ResumableLoader(list(range(10)), 3, seed=4, **kwargs)
            made = CheckpointManager(root, {"loader": loader}, keep_last=None)
            with os.fdopen(write, "w") as out:
                for step, batch in made.loop(total, loader):
                    out.write(f"{step} {' '.join(map(str, batch.tolist()))}\n")
                    out.flush()
                    made.wait()
                    if step == stop and stop != total:
                        die()
            made.close()

        in_child(work, killed=stop != total)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                step, *ids = (int(word) for word in line.split())
                seen = [item for item in seen if item[0] < step] + [(step, ids)]
    return seen


def test_batches_go_on_through_epochs_whatever_kills_fall_between(tmp_path: Path) -> None:
    """DATA-08: several resumes in one epoch count from the epoch's start."""
    whole = batches_of(tmp_path / "a", [], 11)
    assert batches_of(tmp_path / "b", [1, 2, 3, 6, 9], 11) == whole
    assert [step for step, _ in whole] == list(range(1, 12))
    first = [i for _, ids in whole[:4] for i in ids]
    assert sorted(set(first)) == list(range(10)), "one epoch holds every sample"


def test_a_foreign_loader_is_warned_of_when_the_run_was_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]
    with manager(tmp_path) as made:
        assert [step for step, _ in made.loop(2, loader)] == [1, 2]
        assert made.receipt is not None and made.receipt.exactness == "fresh start"
    with manager(tmp_path) as made:
        caplog.clear()
        assert [step for step, _ in made.loop(4, loader)] == [3, 4]
        assert len(warnings(caplog)) == 1
        assert made.receipt is not None and "position" in made.receipt.exactness


def test_an_empty_loader_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with manager(tmp_path) as made, pytest.raises(ValueError, match="no batch"):
        list(made.loop(3, []))


def test_accumulation_inside_the_body_counts_optimizer_steps_and_samples_apart(tmp_path: Path) -> None:
    """DATA-16: accumulation 4, resumed at step 3: step counts optimizer steps, the loader its own samples."""

    def train(root: Path, stop: int) -> list[tuple[int, list[list[int]]]]:
        loader = ResumableLoader(list(range(50)), 3, seed=1)
        seen = []
        with CheckpointManager(root, {"loader": loader}, async_save=False) as made:
            start = made.resume()
            batches = iter(loader)
            for step in range(start + 1, stop + 1):
                seen.append((step, [next(batches).tolist() for _ in range(4)]))
                made.save(step)
            assert loader.state_dict()["samples"] == stop * 12 and loader.batch == stop * 4
        return seen

    whole = train(tmp_path / "a", 4)
    assert train(tmp_path / "b", 2) + train(tmp_path / "b", 4) == whole


@pytest.mark.parametrize("how", ["nothing", "save", "saved before"])
def test_save_last_after_a_break_saves_only_what_is_a_steps_state(tmp_path: Path, how: str) -> None:
    """A break leaves the loader behind the batch of a step that is not done: saved as the step before, the batch would
    be lost to the next process."""
    loader = ResumableLoader(list(range(40)), 2, seed=1)
    whole = [batch.tolist() for batch in loader][:8]

    def run(stop: int) -> list[list[int]]:
        loader = ResumableLoader(list(range(40)), 2, seed=1)
        every = 1 if how == "saved before" else 100
        made = CheckpointManager(tmp_path, {"loader": loader}, save_every_steps=every, keep_last=None)
        seen = []
        for step, batch in made.loop(8, loader):
            if step == stop and how != "save":
                break
            seen.append(batch.tolist())
            if step == stop:
                made.save(step)
                break
        if how == "nothing" and stop < 9:
            error = failure(lambda: made.close(save_last=True))
            assert error.stage == "close" and error.step == stop - 1 and f"step {stop}" in str(error)
            assert made.steps() == ()
            return []
        made.close(save_last=True)
        return seen

    assert run(5) + run(9) == whole
    assert resumed_loader(tmp_path) == 8


def resumed_loader(root: Path) -> int:
    with CheckpointManager(root, {"loader": ResumableLoader(list(range(40)), 2, seed=1)}) as made:
        return made.resume()


@pytest.mark.parametrize("done", [True, False])
def test_a_second_loop_yields_the_step_that_was_left_with_its_batch_and_loses_none(tmp_path: Path, done: bool) -> None:
    loader = ResumableLoader(list(range(40)), 2, seed=1)
    whole = [batch.tolist() for batch in loader][:8]
    loader = ResumableLoader(list(range(40)), 2, seed=1)
    seen = {}
    with CheckpointManager(tmp_path, {"loader": loader}, save_every_steps=100) as made:
        for stop in (3, 4, 9):
            for step, batch in made.loop(8, loader):
                assert step not in seen or not done
                seen[step] = batch.tolist()
                if step == stop:
                    if done:
                        made.save(step)
                    break
    assert list(seen.values()) == whole and resumed_loader(tmp_path) == 8


# Accumulation windows


class Gradients:
    """The documented way to save inside an accumulation window: gradients registered as state of their own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.grad = state[name].clone() if name in state else None


def accumulate(root: Path, micro: range, grads: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    state = {"model": model, "opt": opt, **({"grads": Gradients(model)} if grads else {})}
    data = torch.arange(64, dtype=torch.float32).view(16, 4) / 64
    with CheckpointManager(root, state, async_save=False, keep_last=None) as made:
        start = made.resume()
        for number in range(start + 1, micro.stop):
            model(data[number % 16]).pow(2).sum().backward()
            if number % 4 == 0:
                opt.step()
                opt.zero_grad()
            made.save(number)
    return [p.detach().clone() for p in model.parameters()]


def test_a_save_in_the_middle_of_an_accumulation_window_is_exact_with_gradients_registered(tmp_path: Path) -> None:
    """DATA-18: a step that is saved inside a window needs .grad: registered, the result is bit-exact."""
    whole = accumulate(tmp_path / "a", range(1, 13), grads=True)
    for stop in (2, 3, 6, 9, 11):
        accumulate(tmp_path / f"b{stop}", range(1, stop + 1), grads=True)
        again = accumulate(tmp_path / f"b{stop}", range(stop, 13), grads=True)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True)), stop


def test_saves_at_boundaries_are_exact_without_gradients_and_inside_a_window_they_are_not(tmp_path: Path) -> None:
    """DATA-18: save(k) belongs after the k-th optimizer.step(); this is what happens otherwise."""
    whole = accumulate(tmp_path / "a", range(1, 13), grads=False)
    for stop, exact in ((4, True), (8, True), (6, False)):
        accumulate(tmp_path / f"b{stop}", range(1, stop + 1), grads=False)
        again = accumulate(tmp_path / f"b{stop}", range(stop, 13), grads=False)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True)) is exact, stop
