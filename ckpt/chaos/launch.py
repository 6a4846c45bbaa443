"""Starting the processes of a run, and ending every one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckpt.errors import CheckpointError

GRACE = 10.0  # seconds within which a killed process must be gone


class Child(ABC):
    """The first process of a start; it leads a process group of its own."""

    pid: int

    @abstractmethod
    def poll(self) -> int | None:
        """None while it lives; else its exit code, negative for a signal."""


class Launcher(ABC):
    """How the user's training is started; each start is a process of its own in the campaign's working directory."""

    parallel = True  # whether two may be started side by side

    @abstractmethod
    def start(self, env: Mapping[str, str], folder: Path) -> Child:
        """Starts it with `env` added to the environment; stdout and stderr go to files of these names in `folder`."""


class _Command(Child):
    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()


class CommandLauncher(Launcher):
    """The user's own command, unchanged."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    def start(self, env: Mapping[str, str], folder: Path) -> Child:
        with open(folder / "stdout", "ab") as out, open(folder / "stderr", "ab") as err:
            try:
                popen = subprocess.Popen(
                    self.command,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise CheckpointError(
                    f"{self.command[0]!r} could not be started: {error.strerror}.",
                    stage="chaos",
                    errno=error.errno,
                    hint="Give the command as you would type it: ckpt chaos -- python train.py",
                ) from error
        return _Command(popen)


class _Fork(Child):
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class ForkLauncher(Launcher):
    """A function, called in a forked child: saves the seconds an interpreter takes to import torch. The function seeds
    itself, and this process must have no thread inside torch."""

    parallel = False

    def __init__(self, train: Callable[[], object]) -> None:
        self._train = train

    def start(self, env: Mapping[str, str], folder: Path) -> Child:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return _Fork(pid)
        code = 1
        try:
            os.setsid()
            os.environ.update(env)
            for number, name in ((1, "stdout"), (2, "stderr")):
                fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.dup2(fd, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            self._train()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: what the parent registered for its own end must not run here.
            os._exit(code)
        return _Fork(pid)


def living(token: str, group: int) -> set[int]:
    """Pids of live processes, this one not, of process group `group` or whose environment at their start held `token`.

    The token finds those that have left the group (daemons); without /proc there is only the group's leader.
    """
    found = set()
    mark = token.encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            state, _, pgrp = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if state not in (b"Z", b"X") and (
                int(pgrp) == group or mark in Path("/proc", name, "environ").read_bytes()
            ):
                found.add(int(name))
        except OSError:
            # Gone meanwhile, or not ours to look at.
            continue
    return found


def dead(pid: int) -> bool:
    """True when the process is gone, or dead and only waiting to be collected by its parent."""
    try:
        state = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[0]
        return state in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc"):
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def end(child: Child, token: str) -> None:
    """Kills the whole group of `child` and every process that inherited `token`, and waits for each of them.

    Loader workers outlive a killed trainer for a second and hold its files: the next start must not meet them.
    """
    deadline = time.monotonic() + GRACE
    pids = living(token, child.pid)
    while pids or child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        for pid in pids - {child.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        pids = {pid for pid in pids | living(token, child.pid) if not dead(pid)}
        if pids and time.monotonic() > deadline:
            raise CheckpointError(
                f"Processes {sorted(pids)} of the run did not die within {GRACE:g} s of SIGKILL.",
                stage="chaos",
                hint="They hang in the system (a network file system, a device); end them before trying again.",
            )


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a file of any size; "" when it is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
