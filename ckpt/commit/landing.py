"""Stored bytes into tensors: straight into the memory of contiguous host tensors, through a buffer for the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from ckpt.capture.base import Target
from ckpt.commit.stored import Stored
from ckpt.commit.transfer import Landing, damaged_piece, receive
from ckpt.errors import CorruptCheckpointError
from ckpt.format.digest import digest
from ckpt.geometry import Box
from ckpt.plan.planner import Need, needs
from ckpt.storage.base import ReadRange


def land(stored: Stored, targets: Sequence[Target], progress: Callable[[int], None] | None = None) -> None:
    """Fills every target with the saved bytes, each piece checked against its digest as it lands.

    Coverage of every target is checked before the first byte is read. On CorruptCheckpointError some targets hold
    other bytes than before. Peak extra memory is the largest piece that cannot be read in place.
    """
    first: dict[int, int] = {}
    copies: list[tuple[int, int]] = []
    wanted: list[tuple[int, Box]] = []
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    for target in targets:
        number = stored.numbers[target.name]
        if number in seen:
            copies.append((seen[number], len(tensors)))
            tensors.append(target.tensor)
            continue
        seen[number] = len(tensors)
        first[len(wanted)] = len(tensors)
        wanted.append((number, Box.whole(stored.manifest.tensors.shapes[number])))
        tensors.append(target.tensor)
    try:
        plan = needs(wanted, stored.sources)
    except CorruptCheckpointError as error:
        error.step, error.path = stored.manifest.step, f"{stored.storage.url}/{stored.folder}"
        raise
    with torch.no_grad():
        _fill(stored, plan, [tensors[first[want]] for want in range(len(wanted))], progress)
        for source, destination in copies:
            tensors[destination].copy_(tensors[source])
    if tensors:
        # A graph built before the load must not be run backward through weights that have changed under it.
        torch.autograd.graph.increment_version(tensors)


def _fill(
    stored: Stored, plan: Sequence[Need], tensors: Sequence[torch.Tensor], progress: Callable[[int], None] | None
) -> None:
    direct: dict[str, list[Landing]] = {}
    indirect: list[Need] = []
    names = stored.manifest.tensors.names
    for need in plan:
        tensor = tensors[need.want]
        if need.exact and tensor.device.type == "cpu" and tensor.is_contiguous() and _plain(tensor):
            piece = need.source.piece
            view = memory_of(tensor, piece.bytes)
            direct.setdefault(need.source.file, []).append(
                Landing(names[piece.tensor], piece.start, view, piece.xxh3_128)
            )
        else:
            indirect.append(need)
    for file, landings in direct.items():
        receive(stored.storage, stored.path(file), landings, progress)
    for need in indirect:
        _fill_through_buffer(stored, need, tensors[need.want])
        if progress is not None:
            progress(need.source.piece.bytes)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor, size: int) -> memoryview:
    """The bytes of a contiguous host tensor, writable. The tensor must be kept alive by the caller."""
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _fill_through_buffer(stored: Stored, need: Need, tensor: torch.Tensor) -> None:
    piece = need.source.piece
    buffer = bytearray(piece.bytes)
    path = stored.path(need.source.file)
    stored.storage.read_ranges(path, [ReadRange(piece.start, (memoryview(buffer),))])
    if digest(buffer) != piece.xxh3_128:
        raise damaged_piece(stored.storage, path, stored.manifest.tensors.names[piece.tensor])
    if not buffer:
        return
    host = torch.frombuffer(buffer, dtype=torch.uint8).view(tensor.dtype).view(piece.box.sizes)
    inside = host
    for dim, (offset, start, size) in enumerate(
        zip(need.overlap.offsets, piece.box.offsets, need.overlap.sizes, strict=True)
    ):
        inside = inside.narrow(dim, offset - start, size)
    target = tensor
    if not need.exact:
        for dim, (offset, size) in enumerate(zip(need.overlap.offsets, need.overlap.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
    bitwise_copy(target, inside)


def bitwise_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`copy_` that keeps every bit also where a type has no copy kernel of its own."""
    if target.dtype.itemsize == 1 and target.dtype not in (torch.bool, torch.uint8, torch.int8):
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
