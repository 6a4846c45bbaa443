"""The child's side of a campaign: reports what a manager does, and kills its own process where the campaign says.

Attached by every CheckpointManager while CKPT_CHAOS is set, in whichever process of the command makes one. It draws no
random number, changes nothing that is saved, and stays out of forked children.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckpt import points
from ckpt.chaos.events import CLAIM, ENV, Claim, Config, free_name, keep, short_ids
from ckpt.format import names

_agent: Agent | None = None


def attach(manager: Any) -> None:
    """Called by a manager under construction, before it touches its storage."""
    global _agent
    if _agent is None or _agent.pid != os.getpid():
        _agent = Agent(Config.decode(os.environ[ENV]))
        _agent.begin()
    _agent.adopt(manager)


class Agent:
    def __init__(self, config: Config) -> None:
        self.pid = os.getpid()
        self.config = config
        self.kill = config.kill
        self._events = Path(config.events)
        self._fd = os.open(free_name(self._events, str(self.pid)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._armed = False
        self._striking = False
        self._open: set[tuple[str, int]] = set()  # (root, step) of saves under way
        self._step = 0
        self._last = ""
        self._writing = threading.local()
        self._registries: list[tuple[str, weakref.ref[Any]]] = []
        self._positions: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        from ckpt.data.loader import observe

        points.install(self.reached)
        observe(self.batch)
        if self.kill is not None and self.kill.kind == "moment":
            self._later(self.kill.delay)

    def emit(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"event": kind, "time": time.monotonic(), **fields}) + "\n"
        # Not fsynced: only this process dies, and what it handed to the system stays.
        os.write(self._fd, line.encode())

    def adopt(self, manager: Any) -> None:
        """Proves that the manager's storage lies in the sandbox, and listens to its saves and resumes."""
        root, storage = manager.root, manager._storage
        at = getattr(storage, "root", storage.url)
        sandbox = os.path.realpath(self.config.sandbox)
        if not os.path.realpath(at).startswith(sandbox + os.sep):
            # An exception could be caught by the script, which would then write into a real root.
            self.emit("outside", root=root, at=str(at))
            os.kill(self.pid, signal.SIGKILL)
        self.emit("manager", root=root, at=str(at))
        self._registries.append((root, weakref.ref(manager._registry)))
        self._listen(root, str(at), manager._saver, manager._session, manager._restorer)

    def _listen(self, root: str, at: str, saver: Any, session: Any, restorer: Any) -> None:
        stage, write, resume = saver._stage, session.write, restorer.resume

        def staged(number: int, metrics: Any) -> Any:
            self._step = number
            self._open.add((root, number))
            self.emit("save", root=root, step=number)
            try:
                job = stage(number, metrics)
            except BaseException:
                self._open.discard((root, number))
                raise
            self.emit("staged", root=root, step=number, save=job.save)
            return job

        def written(job: Any) -> None:
            self._writing.job = (root, at, job.step, job.save, session.incarnation)
            try:
                write(job)
            finally:
                self._writing.job = None
                self._open.discard((root, job.step))
                error = session.last.error if session.last is not None else None
                self.emit("written", root=root, step=job.step, error=None if error is None else str(error))

        def resumed(*args: Any, **kwargs: Any) -> int:
            step = resume(*args, **kwargs)
            self._step = step
            parent = session.parent
            exactness = restorer.receipt.exactness if restorer.receipt is not None else ""
            save = None if parent is None else parent.save
            self.emit("resumed", root=root, step=step, save=save, exactness=exactness)
            return step

        saver._stage, session.write, restorer.resume = staged, written, resumed

    def reached(self, name: str) -> None:
        """The hook of `ckpt.points`, in the thread that reached `name`."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            if self._striking:
                # Another thread is about to kill this process: nothing may be done behind this point.
                _stand_still()
            self._counts[name] += 1
            count = self._counts[name]
            self._last = name
        if name == "commit.acknowledged":
            self._acknowledged()
        self.emit("point", name=name, count=count)
        kill = self.kill
        if kill is None:
            return
        if kill.kind == "point" and name == kill.point and count == kill.occurrence:
            self.strike(name)
        if kill.kind == "save":
            if name == "commit.acknowledged" and self._armed:
                self.strike("random, in a save")
            if name == "save.begin" and count == kill.occurrence:
                self._armed = True
                self._later(kill.delay)

    def _acknowledged(self) -> None:
        job = getattr(self._writing, "job", None)
        if job is None:
            return
        root, at, step, save, incarnation = job
        kept = Path(self.config.records) / save
        kept.mkdir(parents=True, exist_ok=True)
        for path in Path(at, names.step_name(step)).glob("*.json"):
            keep(path, kept / path.name)
        self.emit("ack", root=root, step=step, save=save, incarnation=incarnation)

    def _later(self, delay: float) -> None:
        why = "random, in a save" if self._armed else "random, any moment"

        def work() -> None:
            time.sleep(delay)
            self.strike(why)

        threading.Thread(target=work, name="ckpt-chaos", daemon=True).start()

    def strike(self, point: str) -> None:
        """Kills this process, unless another process of the run has died for this kill already."""
        with self._lock:
            if self._striking:
                _stand_still()
            claim = Claim(point, self._step, self.pid, bool(self._open), self._last)
            try:
                fd = os.open(self._events / CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return
            self._striking = True
        os.write(fd, json.dumps(asdict(claim)).encode())
        os.fsync(fd)
        os.kill(self.pid, signal.SIGKILL)
        _stand_still()

    def batch(self, epoch: int, batch: int, ids: Sequence[int]) -> None:
        root = self._source(epoch, batch)
        self.emit("batch", root=root, epoch=epoch, batch=batch, ids=short_ids(ids))

    def _source(self, epoch: int, batch: int) -> str | None:
        """The root of the registered loader that has just moved to behind this batch; None for any other loader."""
        found = None
        for root, loader in self._loaders():
            position = (loader.epoch, loader.samples)
            moved = self._positions.get(id(loader)) != position
            self._positions[id(loader)] = position
            if moved and (loader.epoch, loader.batch) == (epoch, batch + 1):
                found = root
        return found

    def _loaders(self) -> list[tuple[str, Any]]:
        from ckpt.data.loader import ResumableLoader

        found: dict[int, tuple[str, Any]] = {}
        for root, ref in self._registries:
            registry = ref()
            objects = [] if registry is None else list(registry.objects.values())
            for part in [] if registry is None else registry.parts.values():
                inner: Any = getattr(part, "objects", dict)
                objects += inner().values()
            for obj in objects:
                if isinstance(obj, ResumableLoader):
                    found.setdefault(id(obj), (root, obj))
        return list(found.values())


def _stand_still() -> None:
    """Waits for the SIGKILL that another thread, or the system, is about to deliver."""
    while True:
        time.sleep(1)
