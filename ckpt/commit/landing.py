"""Stored bytes into tensors: straight into the memory of contiguous host tensors, through a buffer for the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch

from ckpt.capture.base import Target
from ckpt.commit.stored import Stored
from ckpt.commit.transfer import Landing, receive
from ckpt.errors import CorruptCheckpointError
from ckpt.geometry import Box
from ckpt.plan.planner import Need, needs

_BUFFER = 64 << 20  # bytes of pieces that go through one buffer together
_ALIGN = 64


def land(stored: Stored, targets: Sequence[Target], progress: Callable[[int], None] | None = None) -> None:
    """Fills every target with the saved bytes, each piece checked against its digest as it lands.

    Coverage of every target is checked before the first byte is read. On CorruptCheckpointError some targets hold
    other bytes than before. Peak extra memory is that of one batch of pieces that cannot be read in place: 64 MiB, or
    the largest of them.
    """
    first: dict[int, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target in targets:
        number = stored.numbers[target.name]
        source = first.setdefault(number, target.tensor)
        if source is not target.tensor:
            copies.append((target.tensor, source))
    direct, indirect = _sorted(stored, first)
    with torch.no_grad():
        for file, landings in direct.items():
            landings.sort(key=lambda item: item.start)
            receive(stored.storage, stored.path(file), landings, progress)
        for batch in _batches(indirect):
            _fill_through_buffer(stored, batch, progress)
        for tensor, source in copies:
            bitwise_copy(tensor, source)
    if targets:
        # A graph built before the load must not be run backward through weights that have changed under it.
        torch.autograd.graph.increment_version([target.tensor for target in targets])


def _sorted(
    stored: Stored, wanted: Mapping[int, torch.Tensor]
) -> tuple[dict[str, list[Landing]], list[tuple[Need, torch.Tensor]]]:
    """The pieces that can be read straight into their tensor, by file, and those that go through a buffer."""
    direct: dict[str, list[Landing]] = {}
    indirect: list[tuple[Need, torch.Tensor]] = []
    names, shapes = stored.manifest.tensors.names, stored.manifest.tensors.shapes
    rest: list[tuple[int, Box]] = []
    for number, tensor in wanted.items():
        found = stored.sources.get(number, ())
        # One piece that is the whole tensor is what nearly all are: no geometry is needed for them.
        if len(found) == 1 and found[0].piece.box.sizes == shapes[number] and _in_place(tensor):
            _, file, piece = found[0]
            view = memory_of(tensor, piece.bytes)
            direct.setdefault(file, []).append(Landing(names[number], piece.start, view, piece.xxh3_128))
        else:
            rest.append((number, Box.whole(shapes[number])))
    try:
        plan = needs(rest, stored.sources)
    except CorruptCheckpointError as error:
        error.step, error.path = stored.manifest.step, f"{stored.storage.url}/{stored.folder}"
        raise
    for need in plan:
        indirect.append((need, wanted[rest[need.want][0]]))
    return direct, indirect


def _in_place(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and _plain(tensor)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def memory_of(tensor: torch.Tensor, size: int) -> memoryview:
    """The bytes of a contiguous host tensor, writable. The tensor must be kept alive by the caller."""
    if size == 0:
        return memoryview(bytearray())
    return _view(tensor.data_ptr(), size, _WRITABLE)


def _batches(needs: Sequence[tuple[Need, torch.Tensor]]) -> list[list[tuple[Need, torch.Tensor]]]:
    """Pieces of one file, neighbours together, that share a buffer: a read for each would cost more than the bytes."""
    batches: list[list[tuple[Need, torch.Tensor]]] = []
    size, file = 0, None
    for item in needs:
        source = item[0].source
        if file != source.file or size + source.piece.bytes > _BUFFER or not batches:
            batches.append([])
            size, file = 0, source.file
        batches[-1].append(item)
        size += source.piece.bytes
    return batches


def _fill_through_buffer(
    stored: Stored, batch: Sequence[tuple[Need, torch.Tensor]], progress: Callable[[int], None] | None
) -> None:
    starts: list[int] = []
    end = 0
    for need, _ in batch:
        starts.append(end)
        # A view as another dtype has to start at a multiple of its item size.
        end += -(-need.source.piece.bytes // _ALIGN) * _ALIGN
    buffer = torch.empty(end, dtype=torch.uint8)
    whole = memory_of(buffer, end)
    names = stored.manifest.tensors.names
    landings: list[Landing] = []
    for (need, _), start in zip(batch, starts, strict=True):
        piece = need.source.piece
        landings.append(Landing(names[piece.tensor], piece.start, whole[start : start + piece.bytes], piece.xxh3_128))
    receive(stored.storage, stored.path(batch[0][0].source.file), landings, progress)
    for (need, tensor), start in zip(batch, starts, strict=True):
        if need.source.piece.bytes:
            host = buffer[start : start + need.source.piece.bytes].view(tensor.dtype)
            _place(need, host.view(need.source.piece.box.sizes), tensor)


def _place(need: Need, host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies the wanted part of a piece to its place in `tensor`."""
    if not need.exact:
        for dim, (offset, start, size) in enumerate(
            zip(need.overlap.offsets, need.source.piece.box.offsets, need.overlap.sizes, strict=True)
        ):
            host = host.narrow(dim, offset - start, size)
            tensor = tensor.narrow(dim, offset, size)
    bitwise_copy(tensor, host)


def bitwise_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`copy_` that keeps every bit also where a type has no copy kernel of its own."""
    if target.dtype.itemsize == 1 and target.dtype not in (torch.bool, torch.uint8, torch.int8):
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
