from __future__ import annotations

import logging
import random
from collections import Counter

import numpy as np
import pytest
import torch
from loader_helpers import Blocks, Noisy, check_resume_everywhere, ids, run

from ckpt.data import feed
from ckpt.data.loader import ResumableLoader
from ckpt.data.order import Order
from ckpt.data.position import Stream
from ckpt.errors import StateMismatchError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dataset", [Noisy, Blocks])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}, {"num_replicas": 2, "rank": 1}])
def test_resume_is_exact_at_every_batch_and_in_the_epochs_after(dataset, options):
    """DATA-02, DATA-05, DATA-13"""
    check_resume_everywhere(lambda: ResumableLoader(dataset(), 4, seed=9, **options))


def test_the_oracle_catches_a_position_that_is_applied_twice(monkeypatch):
    real = feed.Feed.aim
    monkeypatch.setattr(
        feed.Feed, "aim", lambda self, e, o, split, s: real(self, e, o, split, min(split.length, 2 * s))
    )
    with pytest.raises(Exception, match="after stopping at 1|the fetch ended at"):
        check_resume_everywhere(lambda: ResumableLoader(Noisy(), 4))


def test_the_oracle_catches_a_loader_restarted_at_the_epochs_start(monkeypatch):
    real = Stream.load_state_dict
    monkeypatch.setattr(Stream, "load_state_dict", lambda self, state: real(self, {**state, "samples": 0}))
    with pytest.raises(AssertionError, match="after stopping at 1"):
        check_resume_everywhere(lambda: ResumableLoader(Noisy(), 4))


def test_the_oracle_catches_an_offset_that_later_epochs_keep(monkeypatch):
    real = Stream.finish

    def finish(self):
        kept = self.__dict__.get("mutant_offset", 0)
        real(self)
        self.samples = kept

    load = Stream.load_state_dict
    monkeypatch.setattr(Stream, "finish", finish)
    monkeypatch.setattr(
        Stream, "load_state_dict", lambda self, s: (load(self, s), setattr(self, "mutant_offset", s["samples"]))
    )
    with pytest.raises(AssertionError, match="after stopping at 1"):
        check_resume_everywhere(lambda: ResumableLoader(Noisy(), 4))


@pytest.mark.parametrize("library", ["random", "numpy", "torch"])
def test_the_oracle_catches_one_generator_that_is_not_seeded(monkeypatch, library):
    from ckpt.data import seeding

    class Unseeded:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return (lambda *_: None) if name in ("seed", "manual_seed") else getattr(self.real, name)

    if library == "numpy":
        monkeypatch.setattr(seeding, "numpy", type("N", (), {"random": Unseeded(np.random)}))
    elif library == "random":
        monkeypatch.setattr(seeding, "random", Unseeded(random))
    else:
        monkeypatch.setattr(seeding, "torch", type("T", (), {"default_generator": Unseeded(torch.default_generator)}))
    made = []

    def make():
        # Each process of a real run starts from generators of its own.
        random.seed(len(made)), np.random.seed(len(made)), torch.manual_seed(len(made))
        made.append(1)
        return ResumableLoader(Noisy(), 4)

    with pytest.raises(AssertionError, match="the batches"):
        check_resume_everywhere(make)


def test_five_resumes_in_one_epoch_add_up():
    """DATA-08: the position counts from the epoch's start, not from the last resume."""
    reference = run(ResumableLoader(Noisy(40), 3, seed=4), 2)
    seen: list[tuple[int, bytes]] = []
    state = None
    for batches in (2, 1, 4, 0, 3, 99):
        loader = ResumableLoader(Noisy(40), 3, seed=4)
        if state is not None:
            loader.load_state_dict(state)
        assert loader.batch == len(seen)
        if batches == 99:
            seen += run(loader, 2)
            break
        it = iter(loader)
        seen += [(0, next(it).numpy().tobytes()) for _ in range(batches)]
        state = loader.state_dict()
    assert seen == reference


def test_the_end_of_an_epoch_and_the_start_of_the_next_are_one_place_in_the_stream():
    """DATA-05: saved at the last batch, at the end-of-epoch hook, at the first batch of the next."""
    loader = ResumableLoader(Noisy(12), 4)
    second = run(ResumableLoader(Noisy(12), 4), 2)[3:]
    states, hooks = {}, []
    for _ in range(2):
        for batch_number, _ in enumerate(loader):
            states[loader.epoch, batch_number] = loader.state_dict()
        hooks.append(loader.state_dict())
    assert (hooks[0]["epoch"], hooks[0]["samples"]) == (1, 0)
    # At the last batch the epoch's own end is still to come: the pass that ends it is empty, none is skipped.
    assert (states[0, 2]["epoch"], states[0, 2]["samples"]) == (0, 12)
    for state, epoch, rest in ((states[0, 2], 0, second), (hooks[0], 1, second), (states[1, 0], 1, second[1:])):
        resumed = ResumableLoader(Noisy(12), 4)
        resumed.load_state_dict(state)
        assert resumed.epoch == epoch
        assert run(resumed, 2) == rest


def test_break_goes_on_at_the_next_unconsumed_batch():
    loader = ResumableLoader(range(12), 4, shuffle=False)
    for batch in loader:
        assert ids(batch) == [0, 1, 2, 3] and (loader.epoch, loader.batch, loader.samples) == (0, 1, 4)
        break
    assert [ids(b) for b in loader] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            break
    # Left after the last batch: the next batch is the next epoch's, and no pass comes out empty.
    assert loader.epoch == 1 and len(list(loader)) == 3 and loader.epoch == 3


def test_set_epoch_after_a_resume_keeps_the_position_and_otherwise_starts_over(caplog):
    """DATA-02: with and without set_epoch at the top of the resumed epoch the ids are identical."""
    reference = run(ResumableLoader(Noisy(), 4), 3)
    stopped = ResumableLoader(Noisy(), 4)
    list(stopped)
    for _ in zip(range(3), stopped, strict=False):
        pass
    state = {**stopped.state_dict(), "samples": 12}
    for call in (False, True):
        loader = ResumableLoader(Noisy(), 4)
        loader.load_state_dict(state)
        seen = []
        for epoch in range(loader.epoch, 3):
            if call:
                loader.set_epoch(epoch)
            seen += [(epoch, b.numpy().tobytes()) for b in loader]
        assert seen == reference[7:]
    loader.set_epoch(1)
    assert (loader.epoch, loader.samples, len(list(loader))) == (1, 0, 4)
    it = iter(loader)
    next(it)
    loader.set_epoch(2)
    assert (loader.epoch, loader.samples) == (2, 0)
    with pytest.raises(RuntimeError, match="set_epoch"):
        next(it)
    assert not caplog.records
    loader.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "ckpt"):
        loader.set_epoch(0)
    assert "gives up the restored position" in caplog.text
    for wrong, kind in ((-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="epoch"):
            loader.set_epoch(wrong)


def test_load_takes_effect_or_raises_whatever_was_called_before():
    """DATA-10"""
    reference = run(ResumableLoader(Noisy(), 4), 1)
    source = ResumableLoader(Noisy(), 4)
    next(iter(source))
    state = source.state_dict()
    loader = ResumableLoader(Noisy(), 4)
    len(loader), loader.state_dict(), iter(loader), list(loader.batch_sampler)
    for _ in loader:
        break
    loader.load_state_dict(state)
    assert run(loader, 1) == reference[1:]
    it = iter(loader)
    for _ in range(2):
        before = loader.state_dict()
        for call in (loader.load_state_dict, loader.check_state_dict):
            with pytest.raises(RuntimeError, match="while an iterator is alive"):
                call(state)
        assert loader.state_dict() == before
        next(it)
    it.close()
    with pytest.raises(RuntimeError, match="close"):
        next(it)
    loader.load_state_dict(state)
    assert run(loader, 1) == reference[1:]


def test_a_second_iterator_ends_the_first():
    loader = ResumableLoader(range(12), 4, shuffle=False)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(RuntimeError, match="newer"):
        next(first)
    assert ids(next(second)) == [4, 5, 6, 7] and loader.batch == 2
    list(second)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(second)
    assert (loader.epoch, loader.samples) == (1, 0)


def test_another_length_seed_or_shuffle_is_a_mismatch_and_changes_nothing():
    loader = ResumableLoader(range(12), 4)
    state = loader.state_dict()
    next(iter(loader))
    for wrong in ({"length": 13}, {"seed": 1}, {"shuffle": False}, {"samples": 13}, {"epoch": "1"}, {"order": 2}):
        with pytest.raises(StateMismatchError, match="data stream"):
            loader.load_state_dict({**state, **wrong})
    with pytest.raises(StateMismatchError, match="lacks seed"):
        loader.load_state_dict({})
    assert loader.samples == 4 and loader.resume_notes == ()


def test_another_batch_size_goes_on_at_the_sample_and_says_so():
    """CFG-02"""
    loader = ResumableLoader(range(13), 4, seed=8)
    seen = [ids(b) for _, b in zip(range(2), loader, strict=False)]
    state = {**loader.state_dict(), "samples": 8}
    resumed = ResumableLoader(range(13), 1, seed=8)
    resumed.load_state_dict(state)
    assert resumed.batch_size == 1 and resumed.resume_notes == ("batch_size 4 -> 1",)
    rest = [ids(b) for b in resumed]
    assert all(len(b) == 1 for b in rest) and len(rest) == 5
    assert sum(seen, []) + sum(rest, []) == Order(13, 8, 0).indices(range(13))
    assert len(resumed) == 13 and len(list(resumed)) == 13
    same = ResumableLoader(range(13), 4, seed=8, tail="drop")
    same.load_state_dict(state)
    assert same.resume_notes == ("tail 'pad' -> 'drop'",)
    # The five words of the contract are enough.
    same.load_state_dict({k: state[k] for k in ("seed", "epoch", "samples", "length", "shuffle")})
    assert same.resume_notes == () and same.samples == 8


@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 3), (3, 1, 2)])
def test_a_changed_world_size_loses_and_repeats_no_sample(worlds):
    """DATA-11: 48 samples dealt by different numbers of ranks one after the other."""
    seen: list[int] = []
    state = None
    for number, world in enumerate(worlds):
        ranks = [ResumableLoader(range(48), 2, seed=1, num_replicas=world, rank=r) for r in range(world)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
                assert loader.resume_notes == (f"num_replicas {worlds[number - 1]} -> {world}",)
        last = number == len(worlds) - 1
        for loader in ranks:
            it = iter(loader)
            for batch in it if last else (next(it) for _ in range(3)):
                seen += ids(batch)
            if not last:
                state = loader.state_dict()
        assert last or all(loader.state_dict() == state for loader in ranks)
    # "pad" may repeat at the epoch's end, fewer than the ranks there are.
    counts = Counter(seen)
    assert set(counts) == set(range(48)) and sum(counts.values()) - 48 < worlds[-1]


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
def test_what_the_tail_decides_at_an_epochs_end(tail):
    ranks = [ResumableLoader(range(11), 2, tail=tail, num_replicas=3, rank=r) for r in range(3)]
    got = [[ids(b) for b in loader] for loader in ranks]
    assert [len(g) for g in got] == [len(loader) for loader in ranks]
    counts = Counter(i for g in got for b in g for i in b)
    assert (sum(counts.values()), max(counts.values())) == {"pad": (12, 2), "drop": (9, 1), "uneven": (11, 1)}[tail]
    assert tail == "uneven" or len({sum(map(len, g)) for g in got}) == 1


def test_each_rank_keeps_a_position_of_its_own():
    """DATA-12: ranks 223 and 220 batches into the epoch come back where each of them was."""
    for rank, batches in ((0, 223), (1, 220)):
        loader = ResumableLoader(range(2000), 4, num_replicas=2, rank=rank)
        it = iter(loader)
        for _ in range(batches):
            next(it)
        resumed = ResumableLoader(range(2000), 4, num_replicas=2, rank=rank)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.batch == batches and ids(next(iter(resumed))) == ids(next(it))


def test_batches_samples_and_optimizer_steps_are_counted_apart():
    """DATA-16: accumulation of 4, resumed at optimizer step 10."""
    loader = ResumableLoader(range(160), 2)
    steps = 0
    for number, _ in enumerate(loader, 1):
        steps += number % 4 == 0
        if steps == 10:
            break
    assert (loader.batch, loader.samples) == (40, 80)
    resumed = ResumableLoader(range(160), 2)
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.batch, resumed.samples) == (40, 80) and len(list(resumed)) == 40


def test_skipping_loads_nothing_and_evaluates_nothing_that_is_skipped(monkeypatch):
    asked = []
    real = Order.indices
    monkeypatch.setattr(Order, "indices", lambda self, positions: asked.append(len(positions)) or real(self, positions))
    counts = []
    for samples in (0, 9_900_000):
        dataset = Noisy(10_000_000)
        loader = ResumableLoader(dataset, 32)
        loader.load_state_dict({**loader.state_dict(), "samples": samples})
        asked.clear()
        it = iter(loader)
        assert asked == [] and dataset.asked == []
        first = next(it)
        assert dataset.asked == ids(first) == Order(10_000_000, 0, 0).indices(range(samples, samples + 32))
        counts.append(asked[:1])
    assert counts == [[1024], [1024]]


def test_the_world_is_torch_distributeds_at_the_first_iter(monkeypatch, caplog):
    loader = ResumableLoader(range(16), 2)
    assert len(loader) == 8
    monkeypatch.setattr("ckpt.data.position.present_world", lambda: (2, 1))
    assert len(loader) == 4
    first = ids(next(iter(loader)))
    assert first == Order(16, 0, 0).indices(range(1, 4, 2))
    monkeypatch.setattr("ckpt.data.position.present_world", lambda: (1, 0))
    assert len(loader) == 4 and loader.state_dict()["num_replicas"] == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING, "ckpt"):
        iter(ResumableLoader(range(16), 2))
    assert "this process reads every sample" in caplog.text


def test_an_empty_dataset_gives_empty_epochs():
    loader = ResumableLoader([], 4)
    assert len(loader) == 0 and list(loader) == [] and loader.epoch == 1 and list(loader) == [] and loader.epoch == 2
