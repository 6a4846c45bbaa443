"""A manager in a forked child: told apart at once, and nothing of the parent's is touched."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch
from manager_support import (
    Gate,
    Tiny,
    failure,
    in_child,
    manager,
    resumed,
    write_steps,
)  # fmt: skip

from ckpt import StateDict
from ckpt.errors import ForkedError

pytestmark = pytest.mark.full


# Fork


def test_a_forked_child_is_told_both_pids_and_never_hangs(tmp_path: Path) -> None:
    """REMOTE-06 for local roots; also while the writer thread is at work and the lock of calls is held."""
    with Gate("write.half") as gate, manager(tmp_path, Tiny(1)) as made:
        made.save(1)
        gate.wait()
        parent = os.getpid()

        def child() -> None:
            for call in (
                lambda: made.save(2), made.resume, made.wait, made.close, lambda: made.loop(3), made.steps,
                lambda: made.latest_step, lambda: made.pin(1), lambda: made.register("x", StateDict()),
                made.restore_rng, made.__enter__,
            ):  # fmt: skip
                error = failure(call, ForkedError)
                assert isinstance(error, ForkedError)
                assert (error.owner_pid, error.pid) == (parent, os.getpid()) and str(parent) in str(error)
            assert made.receipt is None and made.should_stop is False

        assert in_child(child, timeout=30) == 0
        gate.open.set()
    assert resumed(tmp_path) == 1


def test_a_forked_child_that_leaves_the_with_body_by_an_exception_leaves_the_parents_save_alone(
    tmp_path: Path,
) -> None:
    """ASYNC-04: fork right after an async save."""
    with Gate("write.half") as gate:
        with manager(tmp_path, Tiny(1)) as made:
            made.save(1)
            gate.wait()

            def child() -> None:
                try:
                    with made:
                        pass
                except ForkedError:
                    pass
                began = time.monotonic()
                made.__exit__(KeyError, KeyError("x"), None)
                assert time.monotonic() - began < 5

            assert in_child(child, timeout=30) == 0
            gate.open.set()
    assert resumed(tmp_path) == 1


def test_a_child_that_collects_its_copy_of_a_manager_keeps_its_own_memory(tmp_path: Path) -> None:
    """A DataLoader worker drops the parent's objects; the staging memory's place may hold the worker's own by then."""
    made = manager(tmp_path, Tiny(1))
    made.save(1)
    made.wait()
    image = made._saver.staging._buffer.bytes(4096)
    address, kept = image.data_ptr(), image[:64].tolist()
    assert any(kept)
    del image

    def child() -> None:
        nonlocal made
        mine = [line.split()[0] for line in open("/proc/self/maps")]
        inside = [r for r in mine if int(r.split("-")[0], 16) <= address < int(r.split("-")[1], 16)]
        assert inside, "an address range that is free here could be given to somebody else and unmapped by us"
        del made
        gc.collect()
        own = [torch.zeros(1 << 19) for _ in range(8)]
        assert all(t.sum().item() == 0 for t in own)

    assert in_child(child) == 0
    made.close()


def test_data_loader_workers_and_saves_do_not_disturb_each_other(tmp_path: Path) -> None:
    """REMOTE-06: forked workers while saves are in flight; a checkpoint opened inside a worker."""
    write_steps(tmp_path / "other", 7)

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            return resumed(tmp_path / "other", lock_timeout=20) + index

    tiny = Tiny()
    with manager(tmp_path / "run", tiny) as made:
        made.resume()
        step = 0
        for _ in range(2):
            loader = torch.utils.data.DataLoader(Data(), batch_size=3, num_workers=2, multiprocessing_context="fork")
            for batch in made.batches(loader):
                assert all(7 <= value < 19 for value in batch.tolist())
                step += 1
                made.save(step if tiny.at(step) else 0)
    assert resumed(tmp_path / "run") == 8
