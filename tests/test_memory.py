"""Memory, handles and threads over many saves, and at a load: flat, and no more than is needed."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from manager_support import in_child, manager, resumed, write_steps

from ckpt import CheckpointManager, StateDict

pytestmark = pytest.mark.full

MB = 1 << 20


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_reset() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def saves_stay_flat(root: Path, count: int, megabytes: int) -> None:
    live = {"s": StateDict(**{f"t{i}": torch.ones(megabytes * MB // 40) for i in range(10)})}
    with CheckpointManager(root, live, keep_last=1) as made:
        seen: list[tuple[int, int, int]] = []
        for step in range(1, count + 1):
            made.save(step)
            if step % (count // 10) == 0:
                made.wait()
                gc.collect()
                seen.append((rss(), len(os.listdir("/proc/self/fd")), threading.active_count()))
        settled = seen[2:]
        sizes = [size for size, _, _ in settled]
        assert max(sizes) - min(sizes) < max(megabytes * MB // 4, 8 * MB), seen
        assert sizes[-1] - sizes[0] < 4 * MB, seen
        assert len({(fds, threads) for _, fds, threads in settled}) == 1, seen
    assert made.steps() == (count,)


def test_sixty_saves_faster_than_the_disk_leave_memory_handles_and_threads_flat(tmp_path: Path) -> None:
    assert in_child(lambda: saves_stay_flat(tmp_path, 60, 20)) == 0


@pytest.mark.slow
def test_two_hundred_saves_of_100_mb_leave_memory_handles_and_threads_flat(tmp_path: Path) -> None:
    assert in_child(lambda: saves_stay_flat(tmp_path, 200, 100), timeout=1500) == 0


def test_many_managers_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    def work() -> None:
        live = {"s": StateDict(x=torch.ones(MB // 4))}
        seen = []
        for number in range(60):
            made = CheckpointManager(tmp_path / str(number % 3), live, keep_last=1, lock_timeout=5)
            made.resume()
            made.save(number)
            if number % 2:
                made.close()
            del made
            if number % 20 == 19:
                gc.collect()
                seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), rss()))
        assert len({entry[:2] for entry in seen}) == 1, seen
        assert seen[-1][2] - seen[0][2] < 16 * MB, seen

    assert in_child(work) == 0


def test_a_save_takes_one_image_of_host_memory_and_no_more(tmp_path: Path) -> None:
    def work() -> None:
        live = {"s": StateDict(big=torch.ones(50 * MB // 4), more=torch.ones(50 * MB // 4))}
        with CheckpointManager(tmp_path, live) as made:
            before = rss()
            peak_reset()
            made.save(1)
            made.wait()
            assert peak() - before < 116 * MB, (peak() - before) / MB

    assert in_child(work) == 0


def test_a_resume_reads_into_the_live_tensors_and_takes_no_second_copy(tmp_path: Path) -> None:
    """MEM-01 / MEM-02: tensor by tensor into live storage; the peak is about the largest piece, not the checkpoint."""

    def state() -> dict[str, Any]:
        return {"s": StateDict(), "m": torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(40)])}

    assert in_child(lambda: write_model(tmp_path, state())) == 0

    def work() -> None:
        live = state()
        made = CheckpointManager(tmp_path, live, save_every_steps=100)
        before = rss()
        peak_reset()
        # Staging memory is made ready in the background after a resume; it is no part of the load.
        made._saver.prepare = lambda: None  # type: ignore[method-assign]
        assert made.resume() == 1
        taken = peak() - before
        made.close()
        assert taken < 40 * MB, f"{taken / MB:.0f} MB for a checkpoint of 160 MB"

    assert in_child(work) == 0


def write_model(root: Path, state: dict[str, Any]) -> None:
    with CheckpointManager(root, state) as made:
        made.save(1)


def test_fifty_thousand_tiny_tensors_under_256_handles(tmp_path: Path) -> None:
    """One file for all tensors of a rank: no handle for each."""

    def work() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        live = StateDict({f"t{i}": torch.full((3,), float(i)) for i in range(50_000)})
        with CheckpointManager(tmp_path, {"s": live}) as made:
            made.save(1)
            made.wait()
            for value in live.values():
                value.zero_()
            assert made.resume() == 1
        assert all(bool((value == float(name[1:])).all()) for name, value in live.items())
        assert len(os.listdir(tmp_path / "step-00000001")) == 3

    assert in_child(work, timeout=200) == 0


def test_a_manager_remembers_no_step_that_is_gone(tmp_path: Path) -> None:
    """What a run of weeks holds must not grow with the saves it has made."""
    live = {"s": StateDict({f"t{i}": torch.zeros(1) for i in range(2000)})}
    with CheckpointManager(tmp_path, live, keep_last=2, async_save=False) as made:
        for step in range(1, 16):
            made.save(step)
        assert len(made._session.scanner._parsed) <= 3


def test_a_thousand_steps_not_due_cost_next_to_nothing(tmp_path: Path) -> None:
    """A call that is not due touches no storage."""
    from manager_support import faults

    with faults() as fault, manager(tmp_path, save_every_steps=10_000) as made:
        made.save(1)
        fault.calls.clear()
        began = time.process_time()
        for step in range(2, 1002):
            made.save(step)
        assert time.process_time() - began < 5 and fault.calls == []
    write_steps(tmp_path, 3)
    assert resumed(tmp_path) == 3
