"""What the receipt says of random numbers and data positions after a resume, and when they are put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, ResumableLoader, StateDict
from ckpt.errors import StateMismatchError

pytestmark = pytest.mark.quick


class Remembering:
    """A loader of somebody else: making its iterator draws from the global RNG."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randperm(4)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def saved(root: Path, **objects: Any) -> None:
    with CheckpointManager(root, objects) as manager:
        manager.save(1)


@pytest.mark.parametrize("nested", [False, True])
def test_an_iterator_that_may_have_drawn_after_the_restore_is_in_the_receipt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nested: bool
) -> None:
    """At the first new step, once; RNG put back late, by batches or by hand, is no doubt."""
    loader: Any = Remembering()
    objects = {"data": {"train": loader}} if nested else {"data": loader}
    saved(tmp_path, **objects)
    for late in ("never", "batches", "by hand"):
        with CheckpointManager(tmp_path, objects, keep_last=None) as manager:
            step = manager.resume()
            if late == "batches":
                next(manager.batches(loader))
            elif late == "by hand":
                next(iter(loader))
                manager.restore_rng()
            assert manager.receipt is not None and manager.receipt.exactness == "bit-exact"
            caplog.clear()
            manager.save(step + 1)
            manager.save(step + 2)
            told = [r for r in caplog.records if r.levelno == logging.WARNING and "iterator" in r.getMessage()]
            assert len(told) == (late == "never")
            changed = "an iterator of data" in manager.receipt.exactness
            assert changed == (late == "never")
            assert changed == manager.receipt.exactness.startswith("changed: ")


def test_a_resumable_loader_needs_no_late_restore(tmp_path: Path) -> None:
    """Neither at the top nor inside a container, where it counts as registered."""

    def objects() -> dict[str, Any]:
        return {"data": {"train": ResumableLoader(torch.arange(8), 2)}}

    state = objects()
    with CheckpointManager(tmp_path, state) as manager:
        assert len(list(manager.loop(2, state["data"]["train"]))) == 2
    state = objects()
    with CheckpointManager(tmp_path, state) as manager:
        assert len(list(manager.loop(4, state["data"]["train"]))) == 2
        assert manager.receipt is not None and manager.receipt.exactness == "bit-exact"


def test_random_numbers_are_not_rewound_in_the_middle_of_training(tmp_path: Path) -> None:
    """A first look at some loader, steps after the resume, finds them where training left them."""
    saved(tmp_path, model=nn.Linear(1, 1))
    with CheckpointManager(tmp_path, {"model": nn.Linear(1, 1)}) as manager:
        step = manager.resume()
        torch.rand(3)
        manager.save(step + 1)
        before = torch.get_rng_state()
        assert list(manager.batches([1, 2])) == [1, 2]
        assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_that_would_refuse_its_state_is_asked_before_anything_changes(tmp_path: Path) -> None:
    """I8"""
    saved(tmp_path, model=nn.Linear(1, 1), data=ResumableLoader(torch.arange(8), 2, seed=1))
    live = nn.Linear(1, 1)
    before = live.weight.clone()
    objects = {"model": live, "data": ResumableLoader(torch.arange(8), 2, seed=2)}
    with CheckpointManager(tmp_path, objects) as manager:
        with pytest.raises(StateMismatchError, match="nothing was changed.*\n.*seed was 1 and is 2"):
            manager.resume()
        assert torch.equal(live.weight, before)


def test_what_a_loader_took_on_otherwise_is_in_the_receipt(tmp_path: Path) -> None:
    """Another batch size goes on at the sample, and the receipt says so."""
    saved(tmp_path, data=ResumableLoader(torch.arange(8), 4))
    with CheckpointManager(tmp_path, {"data": ResumableLoader(torch.arange(8), 1)}) as manager:
        manager.resume()
        assert manager.receipt is not None
        assert manager.receipt.exactness == "changed: data: batch_size 4 -> 1"


def test_an_override_of_plain_values_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, progress=StateDict(epoch=1))
    live = StateDict(epoch=5)
    with CheckpointManager(tmp_path, {"progress": live}) as manager:
        with pytest.raises(StateMismatchError, match="progress: override"):
            manager.resume(override={"progress": ["epoch"]})
        assert live["epoch"] == 5


def test_an_older_torch_explains_options_that_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of the save is known from its environment."""
    model = nn.Linear(1, 1)
    monkeypatch.setattr(torch, "__version__", "2.5.0")
    saved(tmp_path, model=model, optimizer=torch.optim.RAdam(model.parameters()))
    monkeypatch.undo()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": torch.optim.Adam(model.parameters())}) as manager:
        manager.resume()
        assert manager.receipt is not None and "the options are new" in manager.receipt.exactness
