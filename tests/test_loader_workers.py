from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from loader_helpers import Noisy, global_rng
from torch.utils.data import get_worker_info

from ckpt.data import feed
from ckpt.data.loader import ResumableLoader, observe
from ckpt.data.position import Stream

# torch warns where a machine has fewer cores than workers; newer pythons warn of forks beside any thread.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


class Poisoned(Noisy):
    """Fails for one index, once, or kills the worker that is asked for it."""

    def __init__(self, flag: str, index: int, death: bool) -> None:
        super().__init__()
        self.flag, self.index, self.death = flag, index, death

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.index and os.path.exists(self.flag):
            os.unlink(self.flag)
            if self.death:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("unreadable")
        return super().__getitem__(index)


def spoil_generators(worker: int) -> None:
    """A worker_init_fn: what it leaves in the generators must reach no sample; what it sees is told by its info."""
    info = get_worker_info()
    assert info is not None and info.id == worker
    random.seed(worker), np.random.seed(worker), torch.manual_seed(worker)


def mixup(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)[torch.randperm(len(samples))] * random.random()


def take(loader: ResumableLoader, batches: int) -> list[tuple[int, bytes]]:
    """(epoch, bytes) of the next batches, through epochs, in one pass each."""
    seen: list[tuple[int, bytes]] = []
    while len(seen) < batches:
        epoch = loader.epoch
        for batch in loader:
            seen.append((epoch, batch.numpy().tobytes()))
            if len(seen) == batches:
                break
    return seen


def make(workers: int = 1, length: int = 13, **options) -> ResumableLoader:
    return ResumableLoader(Noisy(length), 4, seed=9, num_workers=workers, **options)


@pytest.fixture(scope="module")
def reference() -> list[tuple[int, bytes]]:
    """Three epochs of four batches, without workers."""
    return take(make(0), 12)


def check_resume(reference: list[tuple[int, bytes]], stop: int, before: dict, after: dict, batches: int = 8) -> None:
    """The oracle: stopped after `stop` batches under one set of options, resumed under another."""
    loader = make(**before)
    it = iter(loader)
    seen = [(0, next(it).numpy().tobytes()) for _ in range(stop)]
    assert seen == reference[:stop], "the batches before the stop"
    resumed = make(**after)
    resumed.load_state_dict(loader.state_dict())
    assert take(resumed, batches - stop) == reference[stop:batches], "the batches after the stop"
    assert resumed.resume_notes == ()


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
def test_resume_is_exact_at_every_batch_with_one_worker(reference, stop):
    """DATA-02, DATA-05: prefetched batches are not consumed ones."""
    check_resume(reference, stop, {"workers": 1, "prefetch_factor": 3}, {"workers": 1})


@pytest.mark.parametrize(("stop", "before", "after"), [(1, 3, 3), (3, 3, 0), (2, 0, 3), (2, 1, 3)])
def test_a_changed_number_of_workers_is_no_change(reference, stop, before, after):
    check_resume(reference, stop, {"workers": before}, {"workers": after})


def test_persistent_workers_keep_no_offset(reference):
    """DATA-09, DATA-13: after a resume each later epoch has its full length and its own batches."""
    check_resume(reference, 3, {}, {"workers": 2, "persistent_workers": True}, batches=12)


def test_persistent_workers_are_kept_and_follow_break_set_epoch_and_load(reference):
    loader = make(2, persistent_workers=True)
    assert take(loader, 1) == reference[:1]
    workers = loader._inner._iterator._workers  # type: ignore[union-attr]
    assert take(loader, 2) == reference[1:3]
    state = loader.state_dict()
    loader.set_epoch(2)
    assert take(loader, 4) == reference[8:12]
    loader.load_state_dict(state)
    assert take(loader, 9) == reference[3:12]
    assert loader._inner._iterator._workers is workers and all(w.is_alive() for w in workers)  # type: ignore[union-attr]


def test_several_resumes_in_one_epoch_with_workers(reference):
    """DATA-08"""
    seen: list[tuple[int, bytes]] = []
    state = None
    for batches in (1, 1, 0, 1, 5):
        loader = make(1)
        if state is not None:
            loader.load_state_dict(state)
        seen += take(loader, batches)
        state = loader.state_dict()
    assert seen == reference[:8]


CHILD = """
import hashlib, json, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from test_loader_workers import make, take
loader = make(int(sys.argv[4]))
loader.load_state_dict(json.loads(sys.argv[3]))
print(json.dumps([(e, hashlib.sha256(b).hexdigest()) for e, b in take(loader, 6)]))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_another_process_goes_on_with_the_same_bytes(reference, workers):
    loader = make(1)
    take(loader, 2)
    here = Path(__file__).parent
    command = [sys.executable, "-c", CHILD, str(here.parent), str(here), json.dumps(loader.state_dict()), str(workers)]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    rows = [[epoch, hashlib.sha256(data).hexdigest()] for epoch, data in reference[2:8]]
    assert json.loads(done.stdout) == rows


def test_spawned_workers_give_the_same_batches(reference):
    check_resume(
        reference, 1, {"workers": 0}, {"workers": 1, "multiprocessing_context": "spawn", "timeout": 120}, batches=6
    )


def test_worker_init_fn_runs_first_and_reaches_no_sample(reference):
    check_resume(reference, 2, {"workers": 1, "worker_init_fn": spoil_generators}, {"worker_init_fn": spoil_generators})


def test_collate_in_a_worker_draws_the_same(reference):
    assert take(make(1, collate_fn=mixup), 6) == take(make(0, collate_fn=mixup), 6) != reference[:6]


def test_the_callers_generators_are_never_touched_with_workers():
    """DATA-04: making workers draws a base seed, and not from the caller."""

    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    before = global_rng()
    loader = make(2, persistent_workers=True)
    for _ in range(2):
        it = iter(loader)
        assert global_rng() == before
        next(it)
        len(loader), loader.state_dict()
        assert global_rng() == before
        list(it)
        assert global_rng() == before


def test_the_base_seed_of_workers_is_the_epochs():
    class Seeds(Noisy):
        def __getitem__(self, index):
            return torch.tensor(get_worker_info().seed)  # type: ignore[union-attr]

    def seeds(seed: int) -> list[int]:
        loader = ResumableLoader(Seeds(2), 2, seed=seed, num_workers=1)
        return [int(next(iter(loader))[0]), int((loader.set_epoch(1), next(iter(loader)))[1][0])]

    assert seeds(1) == seeds(1) and len({*seeds(1), *seeds(2)}) == 4


@pytest.mark.parametrize("death", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_failed_or_killed_worker_loses_no_batch(reference, tmp_path, death, persistent):
    flag = tmp_path / "poison"
    flag.touch()
    index = int(np.frombuffer(reference[1][1])[0])
    loader = ResumableLoader(Poisoned(str(flag), index, death), 4, seed=9, num_workers=1, persistent_workers=persistent)
    loader.load_state_dict({**loader.state_dict(), "samples": 4})
    # A worker's death is told by a signal, which may arrive while the iterator is still being made.
    with pytest.raises(RuntimeError if death else OSError):
        it = iter(loader)
        next(it)
    assert loader.batch == 1 and not flag.exists()
    assert take(loader, 7) == reference[1:8]


def test_the_observer_hears_consumed_batches_not_prefetched_ones(reference):
    heard: list[tuple[int, int, tuple[int, ...]]] = []
    observe(lambda epoch, batch, indices: heard.append((epoch, batch, indices)))
    try:
        it = iter(make(1))
        next(it), next(it)
    finally:
        observe(None)
    rows = [np.frombuffer(data).reshape(-1, 7)[:, 0] for _, data in reference[:2]]
    assert heard == [(0, n, tuple(int(i) for i in row)) for n, row in enumerate(rows)]


def test_the_oracle_catches_a_position_counted_where_batches_are_prefetched(reference, monkeypatch):
    real = feed.requests

    def counting(*aim):
        for request in real(*aim):
            stream.samples = min(stream.length, stream.samples + 4)
            yield request

    stream = Stream(1, seed=0, shuffle=True, tail="pad", per_rank=1)
    begin = Stream.begin

    def remember(self):
        nonlocal stream
        stream = self
        return begin(self)

    monkeypatch.setattr(Stream, "begin", remember)
    monkeypatch.setattr(Stream, "consume", lambda self, split: None)
    monkeypatch.setattr(feed, "requests", counting)
    with pytest.raises(AssertionError, match="after the stop"):
        check_resume(reference, 1, {"workers": 1}, {"workers": 0})


def test_the_oracle_catches_an_offset_that_persistent_workers_keep(reference, monkeypatch):
    aim = feed.Feed.aim

    def once(self, epoch, order, split, samples):
        first = self.__dict__.setdefault("mutant", samples)
        aim(self, epoch, order, split, first)

    monkeypatch.setattr(feed.Feed, "aim", once)
    # The loader's own count of the epoch is put aside so that the oracle, not the guard, has to see it.
    monkeypatch.setattr(ResumableLoader, "_exhausted", lambda self, split: self._stream.finish())
    with pytest.raises(AssertionError, match="after the stop"):
        check_resume(reference, 3, {"workers": 0}, {"workers": 1, "persistent_workers": True}, batches=8)


def test_workers_leave_no_process_behind():
    import multiprocessing

    loader = make(2)
    it = iter(loader)
    next(it)
    newer = iter(loader)  # ends the older one and its workers
    assert len(multiprocessing.active_children()) == 2
    list(newer)
    for _ in make(1):
        break
    assert multiprocessing.active_children() == []
