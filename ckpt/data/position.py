"""Which positions of an epoch a rank takes, and where a stream of epochs stands.

The position of a stream is the number of samples that all ranks together have consumed of the epoch, so it means the
same at any world size and any batch size. Positions are dealt like cards: with W ranks, rank r takes s + r, s + r + W,
s + r + 2W, ... from wherever the epoch stands at s.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.data.order import MAX_LENGTH, ORDER_VERSION, Order
from ckpt.errors import StateMismatchError

log = logging.getLogger("ckpt")

TAILS = ("pad", "drop", "uneven")


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high); TypeError for a bool or a non-integer, ValueError out of bounds."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got a bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if number < low or (high is not None and number >= high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high})"
        raise ValueError(f"{name} must be {bound}, got {number}")
    return number


@dataclass(frozen=True)
class Split:
    """How the positions of an epoch of `length` samples fall to one of `replicas` ranks, `per_rank` at a time.

    What is left at the end, fewer than replicas * per_rank samples, goes by `tail`: "pad" gives every rank the same
    number, going on at the epoch's beginning where samples run out; "drop" gives every rank the same number and leaves
    out the at most replicas - 1 samples that cannot be shared; "uneven" gives each sample to exactly one rank.
    `drop_last` leaves out a rank's last batch where that is shorter than per_rank.
    """

    length: int
    replicas: int
    rank: int
    per_rank: int
    tail: str
    drop_last: bool

    @property
    def together(self) -> int:
        """The samples that all ranks together take in one full step."""
        return self.replicas * self.per_rank

    def take(self, samples: int) -> int:
        """The number of samples this rank takes in the step that begins where `samples` are consumed; 0: no step."""
        left = self.length - samples
        if left >= self.together:
            return self.per_rank
        if left <= 0:
            return 0
        if self.tail == "pad":
            count = -(-left // self.replicas)
        elif self.tail == "drop":
            count = left // self.replicas
        else:
            count = max(0, -(-(left - self.rank) // self.replicas))
        return 0 if self.drop_last and count < self.per_rank else count

    def after(self, samples: int) -> int:
        """The samples consumed once the step that began at `samples` is done."""
        return min(self.length, samples + self.together)

    def steps(self) -> int:
        """The number of steps of a whole epoch for this rank."""
        full = self.length // self.together
        return full + (1 if self.take(full * self.together) else 0)

    def number(self, samples: int) -> int:
        """The number of steps, at this split, that cover the first `samples` of the epoch."""
        return -(-samples // self.together)

    def step(self, samples: int) -> range:
        """The positions this rank takes in the step that begins at `samples`; padding lies at or beyond `length`."""
        first = samples + self.rank
        return range(first, first + self.take(samples) * self.replicas, self.replicas)

    def rest(self, samples: int) -> range:
        """All positions this rank takes from `samples` to the end of the epoch."""
        full = max(0, self.length - samples) // self.together
        count = full * self.per_rank + self.take(samples + full * self.together)
        first = samples + self.rank
        return range(first, first + count * self.replicas, self.replicas)


def present_world() -> tuple[int, int]:
    """(world size, rank) of torch.distributed's default group, (1, 0) where there is none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


class Stream:
    """Where one rank stands in the endless stream of epochs. Held by the loader and by the sampler."""

    def __init__(
        self,
        length: int,
        *,
        seed: int,
        shuffle: bool,
        tail: str,
        per_rank: int,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.length = integer("length", length, 0, MAX_LENGTH + 1)
        self.seed = integer("seed", seed, 0, 1 << 64)
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle must be True or False, got {type(shuffle).__name__}")
        if tail not in TAILS:
            raise ValueError(f'tail must be "pad", "drop" or "uneven", got {tail!r}')
        if (num_replicas is None) != (rank is None):
            raise ValueError("num_replicas and rank go together: give both, or neither to take torch.distributed's")
        self.shuffle = shuffle
        self.tail = tail
        self.per_rank = per_rank
        self.drop_last = bool(drop_last)
        self._world: tuple[int, int] | None = None
        if num_replicas is not None:
            replicas = integer("num_replicas", num_replicas, 1)
            self._world = (replicas, integer("rank", rank, 0, replicas))
        self.epoch = 0
        self.samples = 0
        self.notes: tuple[str, ...] = ()
        # A pass is exhausted whose end still has to be settled; only the sampler leaves an end open.
        self.at_end = False
        self._restored = False
        self._order: tuple[int, Order] | None = None

    def split(self) -> Split:
        """The split at the world that was given, or frozen by `begin`, or else is there now."""
        replicas, rank = self._world or present_world()
        return Split(self.length, replicas, rank, self.per_rank, self.tail, self.drop_last)

    def order(self) -> Order:
        """The order of the present epoch."""
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, Order(self.length, self.seed, self.epoch, self.shuffle))
        return self._order[1]

    def begin(self) -> Split:
        """Freezes the world and settles where the next pass starts.

        A position at the epoch's very end is left there when it was restored: that pass is empty and ends the epoch,
        so code that runs after each epoch runs for this one too. Otherwise the pass was left by `break` after the last
        batch, that code has run, and the next epoch starts.
        """
        if self._world is None:
            self._world = present_world()
            if self._world[0] == 1 and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
                log.warning(
                    "WORLD_SIZE is %s but torch.distributed is not initialised: this process reads every sample. "
                    "Initialise it before the first iteration, or give num_replicas and rank.",
                    os.environ["WORLD_SIZE"],
                )
        split = self.split()
        if self.at_end or (self.samples and not self._restored and not split.take(self.samples)):
            self.finish()
        return split

    def consume(self, split: Split) -> None:
        """The step at the present position has been handed to the training."""
        self.samples = split.after(self.samples)
        self._restored = False

    def finish(self) -> None:
        """The epoch has ended: (epoch + 1, 0)."""
        self.epoch += 1
        self.samples = 0
        self._restored = self.at_end = False

    def set_epoch(self, epoch: Any) -> bool:
        """To (epoch, 0); True when that moved the stream.

        A restored position in that very epoch is kept until a step of it is consumed: loops call set_epoch at the top
        of every epoch, the resumed one included, and would lose the position without this.
        """
        number = integer("epoch", epoch, 0, 1 << 64)
        if self._restored:
            if number == self.epoch:
                return False
            ended = self.samples > 0 and not self.split().take(self.samples)
            if not (ended and number == self.epoch + 1):
                log.warning(
                    "set_epoch(%d) gives up the restored position (epoch %d, %d of %d samples). "
                    "Start the loop over epochs at `.epoch` to go on there.",
                    *(number, self.epoch, self.samples, self.length),
                )
        self.epoch, self.samples = number, 0
        self._restored = self.at_end = False
        return True

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values; the same on every rank that is in step."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": self.samples,
            "length": self.length,
            "shuffle": self.shuffle,
            "tail": self.tail,
            "drop_last": self.drop_last,
            "batch_size": self.per_rank,
            "num_replicas": self.split().replicas,
            "order": ORDER_VERSION,
        }

    def check(self, state: Mapping[str, Any]) -> tuple[int, int, tuple[str, ...]]:
        """(epoch, samples, notes) that `load_state_dict(state)` would take on. StateMismatchError when it does not fit.

        Changes nothing.
        """
        needed = ("seed", "epoch", "samples", "length", "shuffle")
        missing = [key for key in needed if key not in state]
        if missing:
            raise StateMismatchError(
                f"this is no state of a data stream: it lacks {', '.join(missing)}.", missing=missing
            )
        try:
            seed, epoch, samples, length = (
                integer(key, state[key], 0) for key in ("seed", "epoch", "samples", "length")
            )
        except (TypeError, ValueError) as error:
            raise StateMismatchError(f"this is no state of a data stream: {error}.") from None
        found = (
            ("length", length, self.length),
            ("seed", seed, self.seed),
            ("shuffle", state["shuffle"], self.shuffle),
            ("order", state.get("order", ORDER_VERSION), ORDER_VERSION),
        )
        wrong = [f"{key} was {then!r} and is {now!r}" for key, then, now in found if then != now]
        if wrong:
            raise StateMismatchError(
                f"the saved position is in another data stream: {'; '.join(wrong)}.",
                hint="Give the values of the saved run, or leave the stream out of the resume to start it anew.",
            )
        if samples > length:
            raise StateMismatchError(f"this is no state of a data stream: {samples} of {length} samples are consumed.")
        present = self.state_dict()
        notes = tuple(
            f"{key} {state[key]!r} -> {present[key]!r}"
            for key in ("batch_size", "num_replicas", "tail", "drop_last")
            if key in state and state[key] != present[key]
        )
        return epoch, samples, notes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of `state`; what `check` raises leaves everything as it was."""
        self.epoch, self.samples, self.notes = self.check(state)
        self._restored, self.at_end = True, False
