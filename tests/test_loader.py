from __future__ import annotations

import os
import pickle
import random

import numpy as np
import pytest
import torch
from loader_helpers import Blocks, Noisy, check_resume_everywhere, global_rng, ids, run
from torch.utils.data import DataLoader, IterableDataset, Subset

from ckpt.data import feed
from ckpt.data.loader import ResumableLoader, observe
from ckpt.data.order import Order
from ckpt.data.seeding import Seeds, seed_globals

pytestmark = pytest.mark.quick


def test_a_sample_keeps_its_augmentation_whatever_the_batch_size():
    rows = {int(r[0]): r.tolist() for b in ResumableLoader(Noisy(), 4) for r in b}
    assert {int(r[0]): r.tolist() for b in ResumableLoader(Noisy(), 1) for r in b} == rows
    # A Subset answers for whole batches by going sample by sample: it must not change the seeds.
    split = ResumableLoader(Subset(Noisy(), range(13)), 5)
    assert {int(r[0]): r.tolist() for b in split for r in b} == rows
    assert len({tuple(r[1:]) for r in rows.values()}) == 13


def test_each_draw_is_the_one_the_normative_text_names():
    """A dataset and a collate_fn seeded by hand as docs/data-order.md says, padding included."""

    def collate(samples):
        return torch.stack(samples), torch.rand(2), random.random()

    first, seeds, order = 12, Seeds(9, 1), Order(13, 9, 1)
    loader = ResumableLoader(Noisy(), 2, seed=9, num_replicas=2, rank=0, collate_fn=collate)
    other = ResumableLoader(Noisy(), 2, seed=9, num_replicas=2, rank=1, collate_fn=collate)
    last, padded = ((loader.set_epoch(1), list(loader))[1][-1], (other.set_epoch(1), list(other))[1][-1])
    for (rows, noise, number), position in ((last, first), (padded, first + 1)):
        seed_globals(seeds.sample(position))
        assert torch.equal(rows, Noisy()[order.index(position)][None])
        seed_globals(seeds.batch(position))
        assert torch.equal(noise, torch.rand(2)) and number == random.random()
    assert ids(padded[0]) == [order.index(0)]


def test_a_batchwise_dataset_is_asked_once_a_batch_and_collate_is_seeded():
    noise = [b[:, 1].tolist() for b in ResumableLoader(Blocks(), 4)]
    assert [len(set(n)) for n in noise] == [1, 1, 1, 1] and len({n[0] for n in noise}) == 4
    assert feed.batch_getter(Subset(Blocks(), [0])) and not feed.batch_getter(Subset(Noisy(), [0]))

    def mixup(samples):
        return torch.stack(samples)[torch.randperm(len(samples))] * random.random()

    check_resume_everywhere(lambda: ResumableLoader(Noisy(), 4, collate_fn=mixup))


def test_other_loaders_change_nothing():
    """DATA-04, DATA-19: a validation loader iterated in between, and a validation pass always starts over."""
    reference = run(ResumableLoader(Noisy(), 4), 2)
    loader, plain = ResumableLoader(Noisy(), 4), DataLoader(Noisy(), 2, shuffle=True)
    validation = ResumableLoader(range(6), 2, shuffle=False)
    seen = []
    for epoch in range(2):
        for batch in loader:
            seen.append((epoch, batch.numpy().tobytes()))
            list(plain)
            validation.set_epoch(0)
            for shown in validation:
                assert ids(shown) == [0, 1]
                break
    assert seen == reference


def test_the_callers_generators_are_never_touched():
    """DATA-04: bit-identical around making, len, state, iter, next, exhaustion and a failing sample."""

    class Broken(Noisy):
        def __getitem__(self, index):
            if len(self.asked) > 8:
                random.random(), np.random.rand(), torch.rand(1)
                raise KeyError(index)
            return super().__getitem__(index)

    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # half a pair of normals is state as well
    before = global_rng()
    loader = ResumableLoader(Broken(), 4)
    assert global_rng() == before
    len(loader), loader.state_dict(), loader.set_epoch(0), loader.load_state_dict(loader.state_dict())
    it = iter(loader)
    assert global_rng() == before
    next(it), next(it)
    assert global_rng() == before
    with pytest.raises(KeyError):
        next(it)
    assert global_rng() == before
    list(ResumableLoader(Noisy(), 4))
    assert global_rng() == before


def test_a_batch_that_failed_is_not_consumed_and_comes_again():
    class Flaky(Noisy):
        fail = True

        def __getitem__(self, index):
            if self.fail and len(self.asked) == 5:
                raise OSError("unreadable")
            return super().__getitem__(index)

    reference = run(ResumableLoader(Noisy(), 4), 1)
    dataset = Flaky()
    loader = ResumableLoader(dataset, 4)
    it = iter(loader)
    seen = [(0, next(it).numpy().tobytes())]
    with pytest.raises(OSError, match="unreadable"):
        next(it)
    with pytest.raises(RuntimeError, match="failed"):
        next(it)
    assert loader.batch == 1
    dataset.fail = False
    assert seen + run(loader, 1) == reference


def test_a_stop_iteration_of_the_dataset_is_no_end_of_the_epoch():
    class Short(Noisy):
        def __getitem__(self, index):
            return next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(ResumableLoader(Short(), 4))


def test_a_dataset_that_changed_its_length_is_refused():
    data = list(range(8))
    loader = ResumableLoader(data, 4)
    data.append(8)
    with pytest.raises(RuntimeError, match="had 8 samples .* has 9"):
        iter(loader)


def test_arguments_that_take_the_order_away_are_refused_by_name():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    class NoLength:
        def __getitem__(self, index):
            return index

    for name, value in (("sampler", [0]), ("batch_sampler", [[0]]), ("generator", torch.Generator())):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            ResumableLoader(range(3), 1, **{name: value})
        assert list(ResumableLoader(range(1), 1, **{name: None}))
    for call, kind, word in (
        (lambda: ResumableLoader(range(3), None), TypeError, "batch_size"),  # type: ignore[arg-type]
        (lambda: ResumableLoader(range(3), 0), ValueError, "batch_size"),
        (lambda: ResumableLoader(range(3), True), TypeError, "batch_size"),
        (lambda: ResumableLoader(Stream(), 1), TypeError, "IterableDataset"),
        (lambda: ResumableLoader(NoLength(), 1), TypeError, "__len__"),
        (lambda: ResumableLoader({1, 2}, 1), TypeError, "__getitem__"),
        (lambda: ResumableLoader(range(3), 1, in_order=False), ValueError, "in_order"),
        (lambda: ResumableLoader(range(3), 1, tail="no"), ValueError, "tail"),
        (lambda: ResumableLoader(range(3), 1, workers=2), TypeError, "workers"),
        (lambda: ResumableLoader(range(3), 1, rank=0), ValueError, "num_replicas"),
    ):
        with pytest.raises(kind, match=word):
            call()


def test_it_is_a_dataloader_and_shows_itself_as_one():
    data = range(10)
    loader = ResumableLoader(data, np.int64(4), drop_last=True)
    assert isinstance(loader, DataLoader) and loader.dataset is data and loader.batch_size == 4 and loader.drop_last
    assert len(loader) == 2
    shown = [list(b) for b in loader.batch_sampler]
    assert loader.samples == 0 and shown == [ids(b) for b in loader]
    state = loader.state_dict()
    assert set(state) >= {"seed", "epoch", "samples", "length", "shuffle"}
    assert all(type(v) in (int, bool, str) for v in state.values())
    it = iter(loader)
    next(it)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.state_dict() == loader.state_dict() and [ids(b) for b in copied] == [ids(b) for b in it]


def test_the_observer_hears_what_was_consumed_and_only_that():
    heard = []
    observe(lambda epoch, batch, indices: heard.append((epoch, batch, indices)))
    try:
        loader = ResumableLoader(range(10), 4)
        got = [tuple(ids(b)) for b in loader]
        it = iter(loader)
        next(it)
        assert heard[:3] == [(0, n, b) for n, b in enumerate(got)] and heard[3][:2] == (1, 0) and len(heard) == 4
        child = os.fork()
        if child == 0:
            next(it)
            os._exit(len(heard))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    finally:
        observe(None)
    next(it)
    assert len(heard) == 4
