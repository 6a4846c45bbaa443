from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt.data.loader import ResumableLoader
from ckpt.data.sampler import ResumableSampler
from ckpt.errors import StateMismatchError

pytestmark = pytest.mark.quick


def loader_over(sampler: ResumableSampler, batch_size: int) -> DataLoader[int]:
    return DataLoader(range(10), batch_size, sampler=sampler)  # type: ignore[arg-type]


def epochs(sampler: ResumableSampler, batch_size: int, last: int) -> list[tuple[int, list[int]]]:
    """(epoch, ids) of every batch until epoch `last` is over, by the loop over epochs that people write."""
    seen = []
    for epoch in range(sampler.epoch, last + 1):
        for batch in loader_over(sampler, batch_size):
            seen.append((epoch, batch.tolist()))
    return seen


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
def test_the_order_is_the_loaders(replicas, tail):
    for rank in range(replicas):
        shared = {"seed": 3, "tail": tail, "num_replicas": replicas, "rank": rank}
        loader = ResumableLoader(range(17), 4, **shared)
        sampler = ResumableSampler(range(17), **shared)
        for _ in range(3):
            assert torch.cat(list(loader)).tolist() == list(sampler)
        assert len(sampler) == len(list(sampler))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5])
def test_resume_is_exact_at_every_batch_without_workers(batch_size):
    """DATA-02, DATA-05: with set_epoch and without, at short and full last batches."""
    reference = epochs(ResumableSampler(10, seed=5), batch_size, 2)
    for call_set_epoch in (False, True):
        sampler = ResumableSampler(10, seed=5)
        done = 0
        for epoch in range(3):
            if call_set_epoch:
                sampler.set_epoch(epoch)
            for batch in loader_over(sampler, batch_size):
                assert (epoch, batch.tolist()) == reference[done]
                done += 1
                resumed = ResumableSampler(10, seed=5)
                resumed.load_state_dict(sampler.state_dict())
                if call_set_epoch:
                    resumed.set_epoch(epoch)
                # The epoch whose last batch this is still belongs to the loop: its end-of-epoch work is to be done.
                assert resumed.epoch == epoch
                assert epochs(resumed, batch_size, 2) == reference[done:]
            resumed = ResumableSampler(10, seed=5)
            resumed.load_state_dict(sampler.state_dict())
            assert resumed.epoch == epoch + 1 and resumed.samples == 0
        assert done == len(reference)


def test_passes_without_set_epoch_are_different_epochs():
    """DATA-02: a forgotten set_epoch repeats no order, and a repeated one repeats exactly."""
    sampler = ResumableSampler(50, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first and sampler.epoch == 1


def test_a_world_change_deals_the_rest_exactly_once():
    """DATA-11: one rank, then two, then one again."""
    one = ResumableSampler(16, seed=2)
    it = iter(one)
    seen = [next(it) for _ in range(3)]
    two = [ResumableSampler(16, seed=2, num_replicas=2, rank=r) for r in range(2)]
    for sampler in two:
        sampler.load_state_dict(one.state_dict())
        assert sampler.resume_notes == ("num_replicas 1 -> 2",)
        it2 = iter(sampler)
        seen += [next(it2) for _ in range(4)]
    assert two[0].state_dict() == two[1].state_dict()
    back = ResumableSampler(16, seed=2)
    back.load_state_dict(two[0].state_dict())
    seen += list(back)
    assert sorted(seen) == list(range(16))


def test_state_load_and_iterators_cannot_get_mixed_up():
    """DATA-10: a load takes effect or raises, and a replaced iterator says so."""
    sampler = ResumableSampler(20)
    state = sampler.state_dict()
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    with pytest.raises(RuntimeError, match="newer one"):
        next(old)
    next(new)
    for call in (sampler.load_state_dict, sampler.check_state_dict):
        with pytest.raises(RuntimeError, match="while an iterator is alive"):
            call(state)
    assert sampler.samples == 2
    sampler.set_epoch(4)
    with pytest.raises(RuntimeError, match="set_epoch"):
        next(new)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.samples) == (0, 0)
    for wrong in ({"length": 21}, {"seed": 1}, {"shuffle": False}, {"order": 2}, {"samples": 21}, {"epoch": -1}):
        with pytest.raises(StateMismatchError):
            sampler.load_state_dict({**state, **wrong})
    with pytest.raises(StateMismatchError) as missing:
        sampler.load_state_dict({"seed": 0})
    assert missing.value.missing == ("epoch", "samples", "length", "shuffle")


def test_nothing_is_evaluated_for_skipped_indices(monkeypatch):
    from ckpt.data.order import Order

    asked = []
    real = Order.indices
    monkeypatch.setattr(Order, "indices", lambda self, positions: asked.append(len(positions)) or real(self, positions))
    sampler = ResumableSampler(10_000_000)
    sampler.load_state_dict({**sampler.state_dict(), "samples": 9_900_000})
    it = iter(sampler)
    assert asked == []
    next(it)
    assert len(asked) == 1 and asked[0] <= 1024


def test_a_copy_stands_where_the_original_does():
    sampler = ResumableSampler(20)
    it = iter(sampler)
    next(it)
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(it)
