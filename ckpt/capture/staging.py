"""The host buffer that already is the file: one copy from the live tensors into the image that will be written.

The buffer is reused by every save, page-aligned so that it can be written directly, and kept out of forked children.
Layout and views are kept for as long as the structure of the state stays the same.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt import threads
from ckpt.errors import CheckpointError, UnsupportedStateError
from ckpt.format.datafile import Layout, PieceSpec, lay_out

Signature = tuple[tuple[str, str, tuple[int, ...]], ...]

_HUGE = 2 << 20
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None  # MADV_WIPEONFORK, which Python's mmap does not name
_SLICE = 16 << 20  # bytes touched between two looks at whether to stop


class HostBuffer:
    """Reused memory of at least the size last asked for. Not thread-safe, but for `touch`."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._toucher: threading.Thread | None = None
        self._stop = threading.Event()

    def reserve(self, size: int) -> None:
        """Makes room for `size` bytes; what was in the buffer is lost when it has to grow."""
        self.settle()
        if self._map is not None and len(self._map) >= size:
            return
        self._map = self._bytes = None
        rounded = max(_HUGE, -(-size // _HUGE) * _HUGE)
        try:
            area = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError) as error:
            raise CheckpointError(
                f"There is no memory for a staging buffer of {rounded:,} bytes: {error}.",
                stage="stage",
                needed=rounded,
                hint="Free host memory; training can go on, nothing was saved.",
            ) from error
        # Wiped on fork: a forked DataLoader worker would make every later copy fault page by page, and double memory.
        # Not MADV_DONTFORK: a worker that collects its copy of the manager would unmap whatever it has at the address.
        for advice in (_WIPE_ON_FORK, getattr(mmap, "MADV_HUGEPAGE", None)):
            if advice is not None:
                try:
                    area.madvise(advice)
                except OSError:
                    continue
        self._map = area
        self._bytes = torch.frombuffer(area, dtype=torch.uint8)

    def touch(self, size: int) -> None:
        """Reserves `size` bytes and faults them in, on a thread of its own: the first copy then runs at full speed."""
        if self._map is not None and len(self._map) >= size:
            return
        self.reserve(size)
        area = self._map
        assert area is not None
        stop = self._stop = threading.Event()

        def fault() -> None:
            # Not by torch: a thread inside its C++ code when the interpreter ends takes the whole process down. In
            # slices, so that whoever waits for the end waits for little.
            address = ctypes.addressof(ctypes.c_char.from_buffer(area))
            for start in range(0, len(area), _SLICE):
                if stop.is_set():
                    return
                ctypes.memset(address + start, 0, min(_SLICE, len(area) - start))

        self._toucher = threads.start(fault, "ckpt-touch")  # without it the first copy is slower, that is all

    def settle(self, wait: bool = True) -> None:
        """Ends `touch`: its zeros must not land over a copy. wait=False only tells it to end."""
        toucher, self._toucher = self._toucher, None
        self._stop.set()
        if toucher is not None and wait:
            toucher.join()

    def bytes(self, size: int) -> torch.Tensor:
        assert self._bytes is not None
        return self._bytes[:size]

    def view(self, size: int) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)[:size]


@dataclass(frozen=True)
class Staged:
    """A complete image in host memory, valid until the next `stage`. `names[i]` is the i-th piece of the file;
    `signature` names, in the order of capture, every tensor with its dtype and shape."""

    image: memoryview
    layout: Layout
    names: tuple[str, ...]
    signature: Signature


class Staging:
    """Turns live tensors into file images. Used by one thread at a time."""

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._signature: Signature | None = None
        self._layout: Layout | None = None
        self._names: tuple[str, ...] = ()
        self._views: list[torch.Tensor] = []

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocates and touches, in the background, the memory that `stage` of such tensors will need."""
        self._buffer.touch(self._plan(tensors).bytes)

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Staged:
        """Copies every tensor, bit for bit in row-major order. Returns when the copies are complete: nothing the caller
        does to a tensor afterwards reaches the image."""
        layout = self._plan(tensors)
        self._buffer.reserve(layout.bytes)
        if not self._views:
            self._make_views(tensors, layout)
        sources = [tensors[name] for name in self._names]
        with torch.no_grad():
            _copy(self._views, sources)
        assert self._signature is not None
        return Staged(self._buffer.view(layout.bytes), layout, self._names, self._signature)

    def _plan(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        signature = tuple((name, str(t.dtype)[6:], tuple(t.shape)) for name, t in tensors.items())
        if signature != self._signature or self._layout is None:
            specs = [PieceSpec(name, dtype, shape) for name, dtype, shape in signature]
            try:
                layout = lay_out(specs)
            except ValueError as error:
                raise UnsupportedStateError(
                    f"The state cannot be saved: {error}.",
                    stage="capture",
                    hint="Join small tensors into larger ones, or shorten their names.",
                ) from error
            self._signature, self._layout, self._views = signature, layout, []
            self._names = tuple(specs[i].key for i in layout.order)
        return self._layout

    def _make_views(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        image = self._buffer.bytes(layout.bytes)
        image[: layout.data_start] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._views = [
            image[start:end].view(_carrier(tensors[name].dtype)).view(tensors[name].shape)
            for name, (start, end) in zip(self._names, layout.spans, strict=True)
        ]

    def settle(self, wait: bool = True) -> None:
        """Ends the background work of `prepare`; wait=False returns before it has ended."""
        self._buffer.settle(wait)

    def release(self) -> None:
        """Lets the memory go."""
        self._buffer.settle()
        self._buffer = HostBuffer()
        self._views = []


# Types without a copy kernel travel as integers of their size.
_BYTE_SIZED = ("float4_e2m1fn_x2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz float8_e4m3fn float8_e5m2").split()
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    dtype: torch.uint8 for name in _BYTE_SIZED if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def _carrier(dtype: torch.dtype) -> torch.dtype:
    return _CARRIERS.get(dtype, dtype)


def _copy(views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if _CARRIERS:
        sources = [source.view(torch.uint8) if source.dtype in _CARRIERS else source for source in sources]
    # One call for all tensors: for tens of thousands of small ones the loop in Python would cost more than the copies.
    if views:
        torch._foreach_copy_(views, sources)
