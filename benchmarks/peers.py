"""What is measured, ckpt and peers, each in its best documented setting. Every save ends durable: fsync and rename."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.states import State, flat, nested

CHUNK = 8 << 20


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Peer:
    """One way to save and load. `save` returns when the state is durable; `stall` returns how long an asynchronous save
    held the caller (and waits for its end before it returns); None where the peer cannot do that."""

    name = ""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder, self.state, self.count = folder, state, 0
        folder.mkdir(parents=True, exist_ok=True)

    def fresh(self) -> Path:
        """A new place; the one before is removed, outside what is timed."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.count += 1
        return self.folder / f"step-{self.count}"

    def save(self) -> float:
        raise NotImplementedError

    def load(self) -> float | None:
        return None

    def stall(self) -> tuple[float, float] | None:
        """(seconds the caller was held, seconds until durable)."""
        return None

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Ckpt(Peer):
    name = "ckpt"

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from ckpt import CheckpointManager

        self.make = lambda sync: CheckpointManager(
            folder, state.registered(), keep_last=2, async_save=not sync, save_every_steps=1
        )
        self.manager = self.make(False)
        self.manager.save(1)
        self.manager.wait()
        self.step = 1

    def save(self) -> float:
        self.step += 1

        def work() -> None:
            self.manager.save(self.step)
            self.manager.wait()

        return seconds(work)

    def stall(self) -> tuple[float, float]:
        self.step += 1
        started = time.perf_counter()
        self.manager.save(self.step)
        held = time.perf_counter() - started
        self.manager.wait()
        return held, time.perf_counter() - started

    def load(self) -> float:
        return seconds(self.manager.resume)

    def close(self) -> None:
        self.manager.close()
        super().close()


class OneFile(Peer):
    """Writes one file beside its name, fsyncs it, renames it, fsyncs the folder."""

    def write(self, draft: Path) -> None:
        raise NotImplementedError

    def save(self) -> float:
        path = self.fresh()

        def work() -> None:
            draft = path.with_suffix(".tmp")
            self.write(draft)
            fsync(draft)
            os.replace(draft, path)
            fsync(self.folder)

        took = seconds(work)
        self.path = path
        return took


class TorchSave(OneFile):
    name = "torch.save + fsync + rename"

    def write(self, draft: Path) -> None:
        torch.save(nested(self.state), draft)

    def load(self) -> float:
        def work() -> None:
            saved = torch.load(self.path, weights_only=True)
            self.state.module.load_state_dict(saved["model"])
            self.state.optimizer.load_state_dict(saved["optimizer"])

        return seconds(work)


class Dcp(Peer):
    threads = 1

    def _writer(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(path, thread_count=self.threads, sync_files=True)

    def save(self) -> float:
        import torch.distributed.checkpoint as dcp

        path = self.fresh()

        def work() -> None:
            dcp.save(flat(self.state), storage_writer=self._writer(path), no_dist=True)
            fsync(path)

        took = seconds(work)
        self.path = path
        return took

    def load(self) -> float:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import FileSystemReader

        return seconds(lambda: dcp.load(flat(self.state), storage_reader=FileSystemReader(self.path), no_dist=True))

    def stall(self) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp

        path = self.fresh()
        started = time.perf_counter()
        future: Any = dcp.async_save(flat(self.state), storage_writer=self._writer(path), no_dist=True)
        held = time.perf_counter() - started
        future.result()
        return held, time.perf_counter() - started


class Dcp1(Dcp):
    name = "torch.distributed.checkpoint"


class Dcp2(Dcp):
    name = "torch.distributed.checkpoint, 2 threads"
    threads = 2


class Safetensors(OneFile):
    name = "safetensors + fsync + rename (tensors only)"

    def write(self, draft: Path) -> None:
        from safetensors.torch import save_file

        save_file(flat(self.state), draft)

    def load(self) -> float:
        from safetensors.torch import load_file

        def work() -> None:
            live = flat(self.state)
            with torch.no_grad():
                for name, tensor in load_file(self.path).items():
                    live[name].copy_(tensor)

        return seconds(work)


class Raw(Peer):
    """As many bytes from touched, aligned memory: two threads, O_DIRECT, preallocated; the device's own speed."""

    name = "raw O_DIRECT write"

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        import mmap

        self.size = -(-state.bytes // 4096) * 4096
        self.memory = memoryview(mmap.mmap(-1, self.size))
        torch.frombuffer(self.memory, dtype=torch.uint8).fill_(7)

    def save(self) -> float:
        path = self.fresh()

        def work() -> None:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
            fd = os.open(path, flags)
            os.posix_fallocate(fd, 0, self.size)

            def part(first: int) -> None:
                for start in range(first * CHUNK, self.size, 2 * CHUNK):
                    os.pwrite(fd, self.memory[start : start + CHUNK], start)

            helpers = [threading.Thread(target=part, args=(number,)) for number in range(2)]
            for helper in helpers:
                helper.start()
            for helper in helpers:
                helper.join()
            os.fsync(fd)
            os.close(fd)

        return seconds(work)


class Memcpy(Peer):
    """One copy of all tensors' bytes into touched memory, in one piece: the least that any snapshot costs."""

    name = "memcpy into touched memory"

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        self.source = torch.ones(state.bytes, dtype=torch.uint8)
        self.target = torch.zeros(state.bytes, dtype=torch.uint8)

    def save(self) -> float:
        return seconds(lambda: self.target.copy_(self.source))


PEERS: tuple[type[Peer], ...] = (Ckpt, TorchSave, Dcp1, Dcp2, Safetensors, Raw, Memcpy)


def quiet() -> None:
    """Peers warn about settings that are the right ones here (one process, no group)."""
    warnings.filterwarnings("ignore")
