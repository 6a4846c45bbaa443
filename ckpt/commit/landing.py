"""Stored bytes into tensors: straight into the memory of contiguous host tensors, through a buffer for the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

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
        for need, tensor in indirect:
            _fill_through_buffer(stored, need, tensor)
            if progress is not None:
                progress(need.source.piece.bytes)
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
