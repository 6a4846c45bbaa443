"""`ResumableLoader`: a DataLoader whose batches are a pure function of (seed, epoch, batch number).

The loader is a DataLoader by type and attributes; the fetching is done by an inner, plain DataLoader over requests
(feed.py), through its public interface alone, so that workers, pinning and time-outs are torch's own.
"""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ckpt.data.feed import Feed, Fetch, as_it_is
from ckpt.data.position import Split, Stream, integer
from ckpt.data.sampler import BUSY, MOVED, REPLACED
from ckpt.data.seeding import Seeds

T = TypeVar("T", covariant=True)

CLOSED = "this iterator has ended: close() was called, or fetching a batch failed. Make a new one with iter()."

Observer = Callable[[int, int, tuple[int, ...]], None]
_observer: tuple[int, Observer] | None = None


def observe(callback: Observer | None) -> None:
    """Calls `callback(epoch, batch, indices)` for every batch that any ResumableLoader of this process hands out.

    `batch` counts from 0 within the epoch; `indices` are this rank's, in order. Called in the thread that called
    `next`, after the position has moved and before the batch is returned; what it raises comes out of `next`. Not
    inherited by child processes. None ends it.
    """
    global _observer
    _observer = None if callback is None else (os.getpid(), callback)


class _Inner(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        # The outer loader has warned already; a second warning would point into this file.
        return


class _Rest(Sampler[int]):
    """What `loader.sampler` shows: this rank's indices from the present position on. Looking moves nothing."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[int]:
        stream = self._stream
        order = stream.order()
        return (order.index(position) for position in stream.split().rest(stream.samples))

    def __len__(self) -> int:
        return len(self._stream.split().rest(0))


class LoaderIterator(Iterator[Any]):
    """One pass over the rest of an epoch. Ended by a newer one, by set_epoch, by `close` and by exhaustion."""

    def __init__(self, loader: ResumableLoader[Any], split: Split, source: Iterator[Any]) -> None:
        self._loader = loader
        self._split = split
        self._source: Iterator[Any] | None = source
        self._ended = ""
        self.exhausted = False

    def __next__(self) -> Any:
        source = self._source
        if source is None:
            if self.exhausted:
                raise StopIteration
            raise RuntimeError(self._ended)
        loader = self._loader
        try:
            batch = next(source)
        except StopIteration:
            self._source = None
            loader._exhausted(self._split)
            self.exhausted = True
            raise
        except BaseException as error:
            # The failed batch was not consumed. Going on would hand out the one after it and count it as this one.
            self.close()
            loader._drop_workers(source)
            if loader.num_workers > 0:
                # torch raises a worker's error out of a reference cycle with its frames, and those hold the iterator
                # and the caller's. The collector may tear them down in the next pass's forked workers, which then
                # hang for seconds over queues of their siblings. The frames are torch's own, no dataset's.
                traceback.clear_frames(error.__traceback__)
            raise
        loader._consumed(self._split)
        return batch

    @property
    def alive(self) -> bool:
        """Whether `next` may still give a batch."""
        return self._source is not None

    def close(self, reason: str = CLOSED) -> None:
        """Ends the pass where it is and lets its workers go; `next` raises RuntimeError from now on."""
        if self._source is not None:
            self._ended = reason
            self._source = None


class ResumableLoader(DataLoader[T]):
    """A DataLoader that resumes exactly, at any batch, with any number of workers.

    `dataset`: map-style, with `__len__` and `__getitem__`; its length is fixed here. `batch_size`: samples a rank.
    `seed` in [0, 2**64). `tail` decides how ranks share what is left at an epoch's end: "pad" repeats samples of the
    epoch's beginning so that all ranks have equally many, "drop" leaves out fewer than num_replicas samples,
    "uneven" gives each sample to one rank. `num_replicas` and `rank`: both or none; none takes torch.distributed's at
    the first `iter`. Other arguments are DataLoader's; `sampler`, `batch_sampler`, `generator` and `batch_size=None`
    are TypeErrors, `in_order=False` a ValueError: they would take the order out of the loader's hands.

    The position moves when `next` returns a batch. `iter()` starts at the position; exhaustion moves it to
    (epoch + 1, 0); after `break` the next `iter()` goes on behind the last batch. A batch that failed to load is not
    consumed: the error ends the pass, and the next `iter()` tries that batch again. `len()` is the number of batches
    of a whole epoch. A state saved at an epoch's last batch resumes with an empty pass, so that what a loop does
    after each epoch is done for that one too. For validation take a plain DataLoader, or call `set_epoch(0)` before
    each pass: a pass left by `break` would be continued by the next one.

    Random augmentation in `__getitem__` (python, numpy and torch global CPU generators) is seeded for each sample by
    (seed, epoch, position), in `collate_fn` and in a dataset's own `__getitems__` for each batch by the position of
    its first sample. Not covered: generators kept inside the dataset, accelerator generators, and operations whose
    result depends on the number of threads (a worker has one). The calling process's generators are never touched:
    with 0 workers they are put back after each fetch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: str = "pad",
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        **arguments: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler", "generator"):
            if arguments.pop(name, None) is not None:
                raise TypeError(
                    f"ResumableLoader takes no {name}: the order is its own, by `seed`. "
                    "Keep your DataLoader and give it a ResumableSampler if you need one."
                )
        if batch_size is None:
            raise TypeError("ResumableLoader takes no batch_size=None: position and seeding go by batches")
        if not arguments.get("in_order", True):
            raise ValueError("ResumableLoader takes no in_order=False: batches would come in the order of their luck")
        stream = Stream(
            _length(dataset),
            seed=seed,
            shuffle=shuffle,
            tail=tail,
            per_rank=integer("batch_size", batch_size, 1),
            drop_last=drop_last,
            num_replicas=num_replicas,
            rank=rank,
        )
        self._stream = stream
        self._feed = Feed()
        self._inner: _Inner | None = None
        self._live: weakref.ref[LoaderIterator] | None = None
        super().__init__(dataset, stream.per_rank, sampler=_Rest(stream), drop_last=stream.drop_last, **arguments)

    def __iter__(self) -> Any:
        """A pass from the stored position to the end of the epoch. It ends an older one that still lives."""
        self._end(REPLACED)
        stream = self._stream
        if _length(self.dataset) != stream.length:
            raise RuntimeError(
                f"the dataset had {stream.length} samples when the loader was made and has {_length(self.dataset)} "
                "now: positions would mean other samples. Make a new loader for the changed dataset."
            )
        split = stream.begin()
        self._feed.aim(stream.epoch, stream.order(), split, stream.samples)
        try:
            source = iter(self._inner_loader())
        except BaseException:
            self._drop_workers(None)
            raise
        made = LoaderIterator(self, split, source)
        self._live = weakref.ref(made)
        return made

    def __len__(self) -> int:
        """The number of batches of a whole epoch for this rank, also after a resume."""
        return self._stream.split().steps()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; at an epoch's last batch still that epoch, until StopIteration."""
        return self._stream.epoch

    @property
    def batch(self) -> int:
        """Batches of this epoch consumed (micro-batches, not optimizer steps).

        After a resume with another batch size or world size: how many of the present ones cover `samples`.
        """
        return self._stream.split().number(self._stream.samples)

    @property
    def samples(self) -> int:
        """Samples of this epoch consumed, over all ranks."""
        return self._stream.samples

    @property
    def resume_notes(self) -> tuple[str, ...]:
        """What differed at the last load_state_dict without harm to the position: "batch_size 4 -> 1"."""
        return self._stream.notes

    def set_epoch(self, epoch: int) -> None:
        """To the beginning of `epoch`; in a restored epoch of which nothing was consumed yet: no change.

        Not needed: epochs follow each other. A pass under way is ended. Leaving a restored epoch logs a warning.
        """
        if self._stream.set_epoch(epoch):
            self._end(MOVED)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values: `{seed, epoch, samples, length, shuffle, ...}`; legal at any time."""
        return self._stream.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises what `load_state_dict(state)` would raise, and changes nothing."""
        if self._living() is not None:
            raise RuntimeError(BUSY)
        self._stream.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; the next `iter()` starts there.

        RuntimeError while a pass is under way; StateMismatchError for another length, seed or shuffle; either leaves
        the position as it was. The present batch size, tail and workers stay: `resume_notes` lists what differs.
        """
        self.check_state_dict(state)
        self._stream.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # Passes and workers belong to this process: a copy starts with neither, at the same position.
        return {**self.__dict__, "_live": None, "_inner": None, "_feed": Feed()}

    def _inner_loader(self) -> _Inner:
        if self._inner is not None:
            return self._inner
        stream = self._stream
        # Private: without it every iter() draws the workers' base seed from the caller's global torch generator.
        generator = torch.Generator()
        generator.manual_seed(Seeds(stream.seed, stream.epoch).worker)
        fetch = Fetch(self.dataset, self.collate_fn, stream.seed, put_back=self.num_workers == 0)
        device = getattr(self, "pin_memory_device", "")
        extra: dict[str, Any] = {"pin_memory_device": device} if device else {}
        inner = _Inner(
            fetch,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=self._feed,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            **extra,
        )
        if self.persistent_workers:
            self._inner = inner
        return inner

    def _consumed(self, split: Split) -> None:
        stream = self._stream
        before = stream.samples
        stream.consume(split)
        if _observer is not None and _observer[0] == os.getpid():
            indices = stream.order().indices(split.step(before))
            _observer[1](stream.epoch, split.number(before), tuple(indices))

    def _exhausted(self, split: Split) -> None:
        if split.take(self._stream.samples):
            raise RuntimeError(
                f"the fetch ended at {self._stream.samples} of {self._stream.length} samples of epoch {self.epoch}"
            )
        self._stream.finish()

    def _drop_workers(self, source: Iterator[Any] | None) -> None:
        # Persistent workers of a failed pass may be dead or hold batches of it; new ones are made for the next.
        self._inner = None
        # At once, and not when whoever handles the failure lets go of its traceback: the next pass may come before.
        shutdown = getattr(source, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _living(self) -> LoaderIterator | None:
        live = self._live() if self._live is not None else None
        return live if live is not None and live.alive else None

    def _end(self, reason: str) -> None:
        live = self._living()
        if live is not None:
            live.close(reason)


def _length(dataset: Any) -> int:
    """len(dataset); TypeError, naming what is missing, for anything that is not map-style."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"ResumableLoader needs a map-style dataset, and {kind} is an IterableDataset: a stream has no positions. "
            "Register a loader that keeps its own state, such as torchdata's StatefulDataLoader."
        )
    for name in ("__getitem__", "__len__"):
        if not hasattr(dataset, name):
            raise TypeError(f"ResumableLoader needs a map-style dataset, and {kind} has no {name}")
    return len(dataset)


__all__ = ["LoaderIterator", "ResumableLoader", "observe"]
