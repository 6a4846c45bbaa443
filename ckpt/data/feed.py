"""What crosses from the loader to a fetch, and the fetch itself: one request is one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Subset

from ckpt.data.order import Order
from ckpt.data.position import Split
from ckpt.data.seeding import GlobalGenerators, Seeds, seed_globals

# Positions evaluated at once: below a thousand numpy's call overhead shows, above it the first batch waits longer.
BLOCK = 1024


class Request(NamedTuple):
    """One batch to fetch: its epoch, the positions in it and the dataset's indices there."""

    epoch: int
    positions: range
    indices: list[int]


def requests(epoch: int, order: Order, split: Split, samples: int) -> Iterator[Request]:
    """The batches of one rank from the position `samples` to the end of the epoch.

    Nothing before that position is evaluated, and nothing at all before the first `next`: iterators of torch may be
    made and dropped unused.
    """
    rest = split.rest(samples)
    size = split.per_rank
    block = max(1, BLOCK // size) * size
    for at in range(0, len(rest), block):
        positions = rest[at : at + block]
        indices = order.indices(positions)
        for low in range(0, len(positions), size):
            yield Request(epoch, positions[low : low + size], indices[low : low + size])


class Feed:
    """The sampler of the inner DataLoader. Every pass over it starts where `aim` was last pointed.

    One object serves all passes because persistent workers keep their loader: a start stored anywhere else would be
    the first pass's in all later ones.
    """

    def __init__(self) -> None:
        self._aim: tuple[int, Order, Split, int] | None = None

    def aim(self, epoch: int, order: Order, split: Split, samples: int) -> None:
        self._aim = (epoch, order, split, samples)

    def __iter__(self) -> Iterator[Request]:
        if self._aim is None:
            return iter(())
        return requests(*self._aim)

    def __len__(self) -> int:
        if self._aim is None:
            return 0
        _, _, split, samples = self._aim
        return -(-len(split.rest(samples)) // split.per_rank)


def as_it_is(batch: Any) -> Any:
    """The inner DataLoader's collate function: `Fetch` has collated already, under the batch's seed."""
    return batch


def batch_getter(dataset: Any) -> Callable[[list[int]], list[Any]] | None:
    """The dataset's `__getitems__` where it fetches whole batches by itself, else None."""
    bottom = dataset
    # Subset has the method always and goes sample by sample when what it wraps has none: taking its word for it would
    # make the augmentation of every split data set depend on the batch size.
    while isinstance(bottom, Subset) and type(bottom).__getitems__ is Subset.__getitems__:
        bottom = bottom.dataset
    return getattr(dataset, "__getitems__", None) if getattr(bottom, "__getitems__", None) else None


class Fetch:
    """The dataset of the inner DataLoader: answers a request with the collated batch. Travels to the workers.

    A dataset with `__getitems__` is asked once for the whole batch, under the batch's seed; any other sample by
    sample, each under its own. `collate_fn` runs under the batch's seed as well, so that a mix-up drawn there is the
    same wherever the batch is made. `put_back`: the fetch runs in the training process, whose generators it borrows.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int, *, put_back: bool) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        self._seed = seed
        self._put_back = put_back
        self._seeds: tuple[int, Seeds] | None = None

    def __getitem__(self, request: Request) -> Any:
        try:
            if not self._put_back:
                return self._fetch(request)
            with GlobalGenerators():
                return self._fetch(request)
        except StopIteration as error:
            # It would pass for the end of the epoch in the loop that asked, and the rest would be skipped unseen.
            raise RuntimeError(f"the dataset or collate_fn raised StopIteration, indices {request.indices}") from error

    def __len__(self) -> int:
        return len(self._dataset)

    def _fetch(self, request: Request) -> Any:
        if self._seeds is None or self._seeds[0] != request.epoch:
            self._seeds = (request.epoch, Seeds(self._seed, request.epoch))
        seeds = self._seeds[1]
        batch_base = seeds.batch(request.positions.start)
        getitems = batch_getter(self._dataset)
        if getitems is not None:
            seed_globals(batch_base)
            samples = getitems(request.indices)
        else:
            samples = []
            for position, index in zip(request.positions, request.indices, strict=True):
                seed_globals(seeds.sample(position))
                samples.append(self._dataset[index])
        seed_globals(batch_base)
        return self._collate(samples)
