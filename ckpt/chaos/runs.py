"""One run: a training started in a sandbox of its own, and again after each kill, until it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.chaos.events import CLAIM, ENV, Claim, Config, Kill, Process, read_processes
from ckpt.chaos.launch import Child, Launcher, dead, end, tail
from ckpt.errors import CheckpointError
from ckpt.storage.open import SANDBOX

TICK = 0.01


class Cancelled(Exception):
    """The campaign was stopped from outside while a run was under way."""


@dataclass(frozen=True)
class Start:
    """One process of a run, from its start to its end. code: negative for a signal, None when it timed out."""

    folder: Path
    kill: Kill | None
    code: int | None
    claim: Claim | None
    processes: tuple[Process, ...]
    seconds: float
    leader: int  # pid of the command itself, which need not be the process that trains

    @property
    def finished(self) -> bool:
        return self.code == 0 and self.claim is None

    def problem(self) -> str:
        """What went wrong, in words, when it neither finished nor was killed as planned; "" else."""
        for process in self.processes:
            for event in process.of("outside"):
                return (
                    f"a manager of process {process.pid} was about to write into {event['at']} (root {event['root']}), "
                    f"which is outside the sandbox: does the script change {SANDBOX}?"
                )
        if self.claim is not None:
            # Behind a shell only the shell's code is ours to see; that the trainer died was awaited.
            pid, point = self.claim.pid, self.claim.point
            if pid == self.leader and self.code != -9:
                return f"process {pid} was to die by SIGKILL at {point} and ended with {self.code}"
            return ""
        if self.code is None:
            return f"it did not end within {self.seconds:.0f} s and was killed"
        if self.code < 0:
            return f"it was killed by signal {-self.code}, which the campaign did not send"
        return f"it ended with exit code {self.code}" if self.code else ""

    def explained(self) -> str:
        """`problem` with the end of what the process wrote to stderr, or else to stdout."""
        said = tail(self.folder / "stderr") or tail(self.folder / "stdout")
        indented = "\n".join(f"    {line}" for line in said.splitlines())
        return self.problem() + (f"; the end of its output:\n{indented}" if said else "")


@dataclass
class Run:
    """folder: everything of the run; `sandbox` stands for every root of the training."""

    launcher: Launcher
    folder: Path
    stop: threading.Event
    starts: list[Start] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sandbox = self.folder / "sandbox"
        self.records = self.folder / "records"
        for folder in (self.sandbox, self.records):
            folder.mkdir(parents=True)

    @property
    def processes(self) -> list[Process]:
        return [process for start in self.starts for process in start.processes]

    def start(self, kill: Kill | None, timeout: float | None) -> Start:
        """Starts the training once and returns when every process of it is dead."""
        folder = self.folder / f"start-{len(self.starts):03d}"
        folder.mkdir()
        token = os.urandom(16).hex()
        inside = None if kill is None or kill.kind == "outside" else kill
        config = Config(token, str(folder), str(self.records), str(self.sandbox), inside)
        began = time.monotonic()
        child = self.launcher.start({ENV: config.encode(), SANDBOX: str(self.sandbox)}, folder)
        claim = None
        try:
            limit = None if timeout is None else began + timeout
            code, claim = self._watch(child, folder, kill, began, limit)
        finally:
            end(child, token)
        seconds = time.monotonic() - began
        if claim is not None and claim.pid == child.pid:
            code = child.poll()
        start = Start(folder, kill, code, claim, tuple(read_processes(folder)), seconds, child.pid)
        self.starts.append(start)
        return start

    def _watch(
        self, child: Child, folder: Path, kill: Kill | None, began: float, limit: float | None
    ) -> tuple[int | None, Claim | None]:
        while True:
            # First the exit, then the claim: a claim is complete before the process it names can be dead.
            code = child.poll()
            if (folder / CLAIM).exists():
                claim = Claim.read(folder)
                if claim is not None:
                    _await_death(claim.pid, child)
                    return child.poll(), claim
            if code is not None:
                return code, None
            now = time.monotonic()
            if kill is not None and kill.kind == "outside" and now - began >= kill.delay:
                return _struck_from_outside(child)
            if limit is not None and now > limit:
                return None, None
            if self.stop.wait(TICK):
                raise Cancelled


def _struck_from_outside(child: Child) -> tuple[int | None, Claim | None]:
    """Kills the first process of the start; it may have ended by itself just before, which is no kill."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    while (code := child.poll()) is None:
        time.sleep(TICK / 5)
    return code, Claim("random, any moment", 0, child.pid, False, "") if code == -9 else None


def _await_death(pid: int, child: Child) -> None:
    """Until the process that wrote its claim is dead, by its own hand and not by ours."""
    deadline = time.monotonic() + 10
    while not (child.poll() is not None if pid == child.pid else dead(pid)):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Process {pid} announced its SIGKILL and lives on.", stage="chaos", hint="Is SIGKILL held up here?"
            )
        time.sleep(TICK / 5)


def roots_of(processes: Sequence[Process]) -> dict[str, str]:
    """Root as the script names it -> the folder that stands for it, in the order of first use."""
    return {event["root"]: event["at"] for process in processes for event in process.of("manager")}
