"""What a save would write is measured before it is written: a checkpoint that no reader takes is never made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import failure, folders

from ckpt import CheckpointManager, StateDict
from ckpt.errors import UnsupportedStateError
from ckpt.format import jsontext, names

pytestmark = pytest.mark.full


def many(count: int) -> StateDict:
    return StateDict(**{f"t{i}": torch.zeros(1) for i in range(count)})


def shared(count: int) -> StateDict:
    tensor = torch.zeros(1)
    return StateDict(**{f"t{i}": tensor for i in range(count)})


CASES: list[tuple[str, int, Callable[[], StateDict], str, Any]] = [
    ("MAX_INDEX", 1 << 20, lambda: StateDict(blob=bytes(1 << 20)), "its values and pieces take about", None),
    ("MAX_INDEX", 300_000, lambda: many(3000), "its values and pieces take about", None),
    ("MAX_NODES", 10_000, lambda: StateDict(items=list(range(10_000))), "single values", None),
    ("MAX_MANIFEST", 100_000, lambda: many(1000), "names and shapes", None),
    ("MAX_TENSORS", 20, lambda: many(21), "21 tensors", "it"),
    ("MAX_TENSORS", 20, lambda: shared(22), "21 tensors that share", "it"),
    ("MAX_DIMS", 64, lambda: StateDict(x=torch.zeros([1] * 65)[()]), "65 dimensions", "s/x"),
    ("MAX_NAME", 500, lambda: StateDict(**{"n" * 600: torch.zeros(1)}), "602 bytes", None),
    ("MAX_NAME", 500, lambda: StateDict(**{"ä" * 300: torch.zeros(1)}), "602 bytes", None),
    ("MAX_HEADER", 5000, lambda: many(100), "over 5,000", None),
]  # fmt: skip


def place(limit: str) -> Any:
    return jsontext if limit == "MAX_NODES" else names


@pytest.mark.parametrize(("limit", "value", "make", "said", "name"), CASES)
def test_a_state_beyond_a_limit_is_refused_by_save_itself_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
    make: Callable[[], StateDict],
    said: str,
    name: str | None,
) -> None:
    live = StateDict(small=1)
    with CheckpointManager(tmp_path, {"s": live}, on_failure="warn") as made:
        made.save(1)
        made.wait()
        live.clear()
        live.update(make())
        with monkeypatch.context() as tight:
            tight.setattr(place(limit), limit, value)
            error = failure(lambda: made.save(2), UnsupportedStateError)
            assert isinstance(error, UnsupportedStateError) and said in str(error), str(error)
            assert name is None or error.name == name
            made.wait()
        assert folders(tmp_path) == ["step-00000001"]
        live.clear()
        live["small"] = 2
        assert made.save(2) is True, "the manager is as usable as before"
    assert made.steps() == (1, 2)


@pytest.mark.parametrize(("limit", "value", "make", "said", "name"), [case for case in CASES if case[0] != "MAX_DIMS"])
def test_what_save_lets_through_can_be_resumed_under_the_same_limit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
    make: Callable[[], StateDict],
    said: str,
    name: str | None,
) -> None:
    """The estimate is never below what is written: at every limit either save refuses or resume succeeds."""
    live = make()
    refused = 0
    for factor in (0.5, 0.8, 0.95, 1.0, 1.05, 1.2, 2, 8):
        root = tmp_path / str(factor)
        with monkeypatch.context() as tight:
            tight.setattr(place(limit), limit, int(value * factor))
            made = CheckpointManager(root, {"s": live}, async_save=False)
            try:
                made.save(1)
            except UnsupportedStateError:
                refused += 1
                assert not root.exists() or folders(root) == []
            else:
                other = StateDict({key: torch.ones(1) if torch.is_tensor(v) else v for key, v in live.items()})
                made.close()
                with CheckpointManager(root, {"s": other}) as reader:
                    assert reader.resume() == 1
            made.close()
    assert 0 < refused < 8


def test_the_environment_of_a_step_is_that_of_the_thread_that_saved_it(tmp_path: Path) -> None:
    """Thread counts are set per thread: the writer's own would be compared with the training's."""
    before = torch.get_num_threads()
    live = StateDict(a=1)
    try:
        with CheckpointManager(tmp_path, {"s": live}) as made:
            torch.set_num_threads(3)
            made.save(1)
            made.wait()
            torch.set_num_threads(2)
            made.save(2)
        with CheckpointManager(tmp_path, {"s": live}) as made:
            made.resume(2)
            assert made.receipt is not None and made.receipt.exactness == "bit-exact"
            assert made.receipt.environment_then["threads"] == 2
            made.resume(1)
            assert made.receipt.environment_then["threads"] == 3
    finally:
        torch.set_num_threads(before)
