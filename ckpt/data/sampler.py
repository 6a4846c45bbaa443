"""`ResumableSampler`: the loader's order for people who keep their own DataLoader."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from ckpt.data.feed import BLOCK
from ckpt.data.position import Stream

REPLACED = "this iterator has ended: a newer one of the same object was made. Only the newest may be used."
MOVED = "this iterator has ended: set_epoch moved the position. Make a new one with iter()."
BUSY = (
    "load_state_dict while an iterator is alive: what it has fetched already belongs to the old position. "
    "Let it end, or drop it (leave the `for` loop, `del` the variable that holds it), then load."
)


class SamplerIterator(Iterator[int]):
    """One pass. Ended by a newer one, by set_epoch and by exhaustion.

    Exhaustion alone does not move the stream to the next epoch: a DataLoader with a short last batch exhausts its
    sampler while it makes that batch, which the training has then still to see. The pass is over when this object is.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._split = stream.begin()
        self._block: Iterator[int] = iter(())
        self.ended: str | None = None
        self.exhausted = False

    def __next__(self) -> int:
        if self.exhausted:
            raise StopIteration
        if self.ended is not None:
            raise RuntimeError(self.ended)
        index = next(self._block, None)
        if index is None:
            positions = self._split.rest(self._stream.samples)[:BLOCK]
            if not positions:
                self.exhausted = True
                self._stream.at_end = True
                raise StopIteration
            self._block = iter(self._stream.order().indices(positions))
            index = next(self._block)
        self._stream.consume(self._split)
        return index


class ResumableSampler(Sampler[int]):
    """Indices in the order of `ResumableLoader`, with the position in its state, as a plain sampler of one rank.

    `ResumableSampler(dataset, *, seed=0, shuffle=True, tail="pad", num_replicas=None, rank=None)`; `dataset` is
    anything with a length, or the length itself. The meaning of the arguments, of `set_epoch`, `epoch`, `samples`,
    `state_dict` and `load_state_dict` is the loader's; an index is consumed when it is handed out. With
    `DataLoader(dataset, batch_size, sampler=sampler, num_workers=0)` that is when the training gets its batch, and
    resume is exact at every batch, with or without set_epoch.

    Limits, all three lifted by `ResumableLoader`: with workers a DataLoader asks for up to num_workers *
    prefetch_factor batches ahead, so the state is ahead of the training by as many and a resume skips them; random
    augmentation goes on from the global generators (restore those after the iterator is made); and a DataLoader
    itself draws from torch's global generator each time it is iterated, unless it is given a `generator`.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: str = "pad",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        self._stream = Stream(
            length, seed=seed, shuffle=shuffle, tail=tail, per_rank=1, num_replicas=num_replicas, rank=rank
        )
        self._live: weakref.ref[SamplerIterator] | None = None

    def __iter__(self) -> Iterator[int]:
        """A pass from the stored position to the end of the epoch. It ends an older one that still lives."""
        self._end(REPLACED)
        self._settle()
        made = SamplerIterator(self._stream)
        self._live = weakref.ref(made)
        return made

    def __len__(self) -> int:
        """The number of indices of a whole epoch for this rank, also after a resume."""
        return self._stream.split().steps()

    @property
    def epoch(self) -> int:
        """The epoch of the next index."""
        self._settle()
        return self._stream.epoch

    @property
    def samples(self) -> int:
        """Samples of this epoch handed out, over all ranks."""
        self._settle()
        return self._stream.samples

    @property
    def resume_notes(self) -> tuple[str, ...]:
        """What differed, without harm to the position, at the last load_state_dict: "num_replicas 1 -> 2"."""
        return self._stream.notes

    def set_epoch(self, epoch: int) -> None:
        """To the beginning of `epoch`; in a restored epoch of which nothing was taken yet: no change."""
        self._settle()
        if self._stream.set_epoch(epoch):
            self._end(MOVED)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        self._settle()
        return self._stream.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises what `load_state_dict(state)` would raise, and changes nothing."""
        if self._living() is not None:
            raise RuntimeError(BUSY)
        self._stream.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. RuntimeError while a pass is under way, StateMismatchError for another stream."""
        self.check_state_dict(state)
        self._stream.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference can't be pickled, and a copy has no passes under way.
        return {**self.__dict__, "_live": None}

    def _living(self) -> SamplerIterator | None:
        live = self._live() if self._live is not None else None
        return None if live is None or live.exhausted or live.ended is not None else live

    def _settle(self) -> None:
        if self._stream.at_end and (self._live is None or self._live() is None):
            self._stream.finish()

    def _end(self, reason: str) -> None:
        live = self._living()
        if live is not None:
            live.ended = reason
