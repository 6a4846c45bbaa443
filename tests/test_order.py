from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.data import order as order_module
from ckpt.data import seeding
from ckpt.data.order import Order, fold, mix
from ckpt.data.position import TAILS, Split, Stream

pytestmark = pytest.mark.quick

DOC = Path(__file__).parents[1] / "docs" / "data-order.md"


def vectors(kind: str) -> list[tuple[dict[str, int], list[str], list[str]]]:
    """The test vectors of one kind in the normative text: (named words, bare words, values)."""
    found = []
    for line in DOC.read_text().partition("## Test vectors")[2].splitlines():
        if line.startswith(kind + " ") and " = " in line:
            left, right = line.removeprefix(kind + " ").split(" = ")
            named = {k: int(v) for k, v in (word.split("=") for word in left.split() if "=" in word)}
            found.append((named, [word for word in left.split() if "=" not in word], right.split()))
    assert found, f"docs/data-order.md has no vector of kind {kind}"
    return found


def spec_index(n: int, seed: int, epoch: int, p: int) -> int:
    """The index at a position, from the words of docs/data-order.md; shares no line with the package."""
    two64 = 2**64

    def spec_mix(z: int) -> int:
        z = (z ^ z // 2**30) * 0xBF58476D1CE4E5B9 % two64
        z = (z ^ z // 2**27) * 0x94D049BB133111EB % two64
        return z ^ z // 2**31

    def spec_fold(*words: int) -> int:
        h = 0
        for w in words:
            h = spec_mix((h + 0x9E3779B97F4A7C15) % two64 ^ w)
        return h

    a = next(a for a in range(1, n + 1) if a * a >= n)
    b = -(-n // a)
    keys = [spec_fold(int.from_bytes(b"order", "big"), seed, epoch, i) for i in range(12)]
    x = p % n
    while True:
        left, right = divmod(x, b)
        for i in range(0, 12, 2):
            left = (left + spec_mix(keys[i] ^ right) // 2**32 * a // 2**32) % a
            right = (right + spec_mix(keys[i + 1] ^ left) // 2**32 * b // 2**32) % b
        x = left * b + right
        if x < n:
            return x


def test_the_vectors_of_the_normative_text_hold():
    for _, words, values in vectors("mix"):
        assert [hex(mix(int(words[0], 16)))] == values
    for _, words, values in vectors("fold"):
        assert [hex(fold(*map(int, words)))] == values
    for named, _, values in vectors("key"):
        keys = Order(10, named["seed"], named["epoch"])._keys
        assert [hex(keys[0]), hex(keys[11])] == values
    for named, _, values in vectors("epoch"):
        order = Order(named["n"], named["seed"], named["epoch"])
        assert [str(i) for i in order.indices(range(named["n"]))] == values
    for named, _, values in vectors("at"):
        order = Order(named["n"], named["seed"], named["epoch"])
        for position, index in (value.split(":") for value in values):
            assert order.index(int(position)) == int(index)


def test_the_seed_vectors_of_the_normative_text_hold(monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(seeding.random, "seed", seen.append)
    monkeypatch.setattr(seeding.numpy.random, "seed", seen.append)
    monkeypatch.setattr(seeding.torch, "default_generator", type("G", (), {"manual_seed": seen.append}))
    for kind in ("sample", "batch"):
        for named, _, values in vectors(kind):
            base = getattr(seeding.Seeds(named["seed"], named["epoch"]), kind)(named["p"])
            seen.clear()
            seeding.seed_globals(base)
            assert [hex(base), *map(str, seen)] == values
    for named, _, values in vectors("worker"):
        assert [str(seeding.Seeds(named["seed"], named["epoch"]).worker)] == values


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**64 - 1))
def test_each_epoch_is_a_permutation_and_three_implementations_agree(n, seed, epoch):
    order = Order(n, seed, epoch)
    one_by_one = [order.index(p) for p in range(n)]
    assert sorted(one_by_one) == list(range(n))
    assert order._vector(np, range(n)).tolist() == one_by_one
    assert order.indices(range(n)) == one_by_one
    assert [spec_index(n, seed, epoch, p) for p in range(min(n, 8))] == one_by_one[:8]


@pytest.mark.parametrize("n", [2**31 - 1, 2**32, 2**32 + 1, 10**12 + 39, 2**53 + 1, 2**62])
def test_scalar_and_vector_agree_where_integers_get_long(n):
    order = Order(n, 3, 5)
    for positions in (range(0, 3000, 7), range(n - 400, n), range(n - 40, n + 40)):
        assert order.indices(positions) == [order.index(p) for p in positions]
        assert all(type(i) is int and 0 <= i < n for i in order.indices(positions))


def test_without_numpy_the_numbers_are_the_same(monkeypatch):
    with_numpy = Order(1000, 1, 2).indices(range(1000))
    monkeypatch.setattr(order_module, "_numpy", lambda: None)
    assert Order(1000, 1, 2).indices(range(1000)) == with_numpy


def test_every_permutation_of_four_is_about_equally_likely():
    times = 400
    counts = Counter(tuple(Order(4, seed, epoch).indices(range(4))) for seed in range(96) for epoch in range(100))
    assert len(counts) == 24
    chi2 = sum((c - times) ** 2 / times for c in counts.values())
    assert chi2 < 53  # 23 degrees of freedom, p = 4e-4; the seeds are fixed, so this never flickers


def test_places_and_neighbours_show_no_pattern():
    n, epochs = 1009, 400
    firsts, steps, same = [], [], 0
    before = None
    for epoch in range(epochs):
        line = Order(n, 11, epoch).indices(range(n))
        firsts.append(line[0])
        steps += [(b - a) % n for a, b in zip(line, line[1:], strict=False)]
        same += 0 if before is None else sum(a == b for a, b in zip(line, before, strict=True))
        before = line
    assert abs(np.mean(firsts) - n / 2) < 4 * n / (12 * epochs) ** 0.5
    # Steps between neighbours are uniform over 1 .. n - 1: 1008 cells of about 400 each.
    counts = np.bincount(steps, minlength=n)[1:]
    chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert abs(chi2 - (n - 2)) < 5 * (2 * (n - 2)) ** 0.5
    # A place that keeps its index from one epoch to the next is as rare as chance: one an epoch.
    assert 0.7 * epochs < same < 1.3 * epochs


def test_neighbouring_seeds_and_epochs_give_unrelated_orders():
    lines = [tuple(Order(100, s, e).indices(range(100))) for s in range(20) for e in range(20)]
    assert len(set(lines)) == len(lines)


def test_shuffle_false_counts_up_and_padding_wraps():
    assert Order(5, 0, 9, shuffle=False).indices(range(8)) == [0, 1, 2, 3, 4, 0, 1, 2]
    order = Order(5, 0, 9)
    assert order.indices(range(5, 10)) == order.indices(range(5))
    with pytest.raises(IndexError):
        Order(0, 0, 0).index(0)
    with pytest.raises(ValueError, match="length"):
        Order(2**62 + 1, 0, 0)


def walk(split: Split, samples: int = 0) -> list[range]:
    taken = []
    while split.take(samples):
        taken.append(split.step(samples))
        samples = split.after(samples)
    return taken


geometry = {
    "length": st.integers(0, 60),
    "replicas": st.integers(1, 7),
    "per_rank": st.integers(1, 6),
    "tail": st.sampled_from(TAILS),
    "drop_last": st.booleans(),
}


@settings(max_examples=300, deadline=None)
@given(**geometry, share=st.floats(0, 1))
def test_rest_is_the_sum_of_the_steps_and_len_is_their_number(length, replicas, per_rank, tail, drop_last, share):
    start = int(length * share)
    for rank in range(replicas):
        split = Split(length, replicas, rank, per_rank, tail, drop_last)
        assert split.steps() == len(walk(split))
        assert [p for step in walk(split, start) for p in step] == list(split.rest(start))


@settings(max_examples=300, deadline=None)
@given(**geometry)
def test_what_each_tail_promises_about_the_union_of_ranks(length, replicas, per_rank, tail, drop_last):
    ranks = [list(Split(length, replicas, r, per_rank, tail, False).rest(0)) for r in range(replicas)]
    union = Counter(p for rank in ranks for p in rank)
    sizes = {len(rank) for rank in ranks}
    if tail == "pad":
        assert set(range(length)) <= set(union) and max(union.values(), default=1) == 1
        assert len(sizes) == 1 and sum(union.values()) - length < replicas
    elif tail == "drop":
        assert set(union) <= set(range(length)) and max(union.values(), default=1) == 1
        assert len(sizes) == 1 and length - len(union) < replicas
    else:
        assert union == Counter(range(length))
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200, deadline=None)
@given(data=st.data(), length=st.integers(1, 80))
def test_any_chain_of_world_and_batch_sizes_loses_and_repeats_nothing(data, length):
    """DATA-11 for every chain of geometries: the samples before the last, incomplete step are dealt exactly once."""
    samples, seen = 0, []
    while True:
        replicas, per_rank = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
        splits = [Split(length, replicas, r, per_rank, "uneven", False) for r in range(replicas)]
        seen += [p for split in splits for p in split.step(samples)]
        samples = splits[0].after(samples)
        if samples == length:
            break
    assert sorted(seen) == list(range(length))


def test_wrong_arguments_are_named():
    good = {"seed": 0, "shuffle": True, "tail": "pad", "per_rank": 1}
    for changed, kind, word in (
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"seed": True}, TypeError, "seed"),
        ({"seed": 1.0}, TypeError, "seed"),
        ({"shuffle": None}, TypeError, "shuffle"),
        ({"tail": "keep"}, ValueError, "tail"),
        ({"num_replicas": 2}, ValueError, "go together"),
        ({"rank": 0}, ValueError, "go together"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank"),
        ({"num_replicas": 0, "rank": 0}, ValueError, "num_replicas"),
    ):
        with pytest.raises(kind, match=word):
            Stream(10, **{**good, **changed})
    assert Stream(10, **{**good, "seed": np.int64(3)}).state_dict()["seed"] == 3


def test_each_generator_is_a_function_of_the_base_alone():
    def draw():
        return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(3).tolist())

    python, np_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with seeding.GlobalGenerators():
        seeding.seed_globals(5)
        first = draw()
        draw()  # leaves half a pair of normals in each generator
        seeding.seed_globals(5)
        assert draw() == first
        seeding.seed_globals(6)
        other = draw()
        assert all(a != b for a, b in zip(first, other, strict=True))
    assert random.getstate() == python
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), np_state, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_the_text_names_the_version_the_state_carries():
    assert re.search(r"version (\d+) of the order", DOC.read_text()).group(1) == str(order_module.ORDER_VERSION)  # type: ignore[union-attr]
