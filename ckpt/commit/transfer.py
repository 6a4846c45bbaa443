"""Bytes between an image in memory and storage: written and digested side by side, read and checked side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt import points, threads
from ckpt.commit.attempt import Attempt
from ckpt.errors import CorruptCheckpointError
from ckpt.format.datafile import Layout
from ckpt.format.digest import Streaming, digest
from ckpt.format.names import BLOCK
from ckpt.storage.base import ReadRange, Storage

GROUP = 16 << 20  # bytes read and checked by one thread at a time
CHECKERS = 2


@dataclass(frozen=True)
class Digests:
    """Of one data file: of its header, its blocks, its pieces in file order, and the whole."""

    header: str
    blocks: tuple[str, ...]
    pieces: tuple[str, ...]
    whole: str


def digest_image(image: memoryview, layout: Layout) -> Digests:
    """All digests of an image in one walk over its blocks, so that each byte is fetched from memory once."""
    whole = Streaming()
    blocks: list[str] = []
    pieces: list[str] = []
    spans = iter(layout.spans)
    span = next(spans, None)
    open_piece: Streaming | None = None
    for start in range(0, len(image), BLOCK):
        end = min(start + BLOCK, len(image))
        block = image[start:end]
        whole.update(block)
        blocks.append(digest(block))
        while span is not None and span[0] < end or span is not None and span[1] <= end:
            first, last = span
            if last <= end and open_piece is None:
                pieces.append(digest(image[first:last]))
            else:
                open_piece = open_piece or Streaming()
                open_piece.update(image[max(first, start) : min(last, end)])
                if last > end:
                    break
                pieces.append(open_piece.hexdigest())
                open_piece = None
            span = next(spans, None)
    return Digests(digest(image[: layout.data_start]), tuple(blocks), tuple(pieces), whole.hexdigest())


def send(attempt: Attempt, name: str, image: memoryview, layout: Layout) -> Digests:
    """Writes an image as file `name` of the attempt, durably, while another thread digests the same bytes in memory.

    Raises what the storage raised; a digest is never taken from bytes that came back from storage.
    """
    result: list[Digests] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            result.append(digest_image(image, layout))
        except BaseException as error:
            failed.append(error)

    helper = threads.start(work, "ckpt-digest")
    if helper is None:
        work()
    try:
        attempt.write(name, image, _half(len(image)))
    finally:
        # The image may be filled again as soon as this returns, raised or not.
        if helper is not None:
            helper.join()
    if failed:
        raise failed[0]
    return result[0]


def _half(total: int) -> Callable[[int], None]:
    passed = False

    def progress(done: int) -> None:
        nonlocal passed
        if not passed and done * 2 >= total:
            passed = True
            points.reach("write.half")

    return progress


class Landing(NamedTuple):
    """A stored piece of `len(into)` bytes at `start` of its file, to be read into `into` and checked."""

    tensor: str
    start: int
    into: memoryview
    xxh3_128: str


def receive(
    storage: Storage, path: str, landings: Sequence[Landing], progress: Callable[[int], None] | None = None
) -> None:
    """Reads every piece of one file into place and checks each against its digest, several groups at a time.

    `landings` are in file order. Raises CorruptCheckpointError (kind "digest") naming the tensor, or what the storage
    raised; the buffers then hold whatever arrived.
    """
    groups = iter(_groups(landings))
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not failed:
                with lock:
                    group = next(groups, None)
                if group is None:
                    return
                storage.read_ranges(path, _coalesced(group))
                for item in group:
                    if digest(item.into) != item.xxh3_128:
                        raise damaged_piece(storage, path, item.tensor)
                if progress is not None:
                    progress(sum(len(item.into) for item in group))
        except BaseException as error:
            failed.append(error)

    total = sum(len(item.into) for item in landings)
    helpers = [threads.start(work, "ckpt-read") for _ in range(CHECKERS - 1 if total >= GROUP else 0)]
    work()
    for helper in helpers:
        if helper is not None:
            helper.join()
    if failed:
        raise failed[0]


def _coalesced(group: Sequence[Landing]) -> list[ReadRange]:
    """Neighbours in the file as one range: a read a tensor would cost tens of thousands of system calls."""
    ranges: list[ReadRange] = []
    start, end, views = 0, -1, []
    for item in group:
        if item.start != end and views:
            ranges.append(ReadRange(start, tuple(views)))
            views = []
        if not views:
            start = item.start
        views.append(item.into)
        end = item.start + len(item.into)
    if views:
        ranges.append(ReadRange(start, tuple(views)))
    return ranges


def damaged_piece(storage: Storage, path: str, tensor: str) -> CorruptCheckpointError:
    where = f"{storage.url}/{path}"
    return CorruptCheckpointError(
        f"The bytes of {tensor} in {where} are not the bytes that were saved.",
        kind="digest",
        file=path.rpartition("/")[2],
        tensor=tensor,
        path=where,
        stage="read",
    )


def _groups(landings: Sequence[Landing]) -> list[list[Landing]]:
    groups: list[list[Landing]] = []
    group: list[Landing] = []
    count = 0
    for item in landings:
        group.append(item)
        count += len(item.into)
        if count >= GROUP or len(group) >= 4096:
            groups.append(group)
            group, count = [], 0
    if group:
        groups.append(group)
    return groups
