"""A small state, faults at the verbs of storage, and processes that die: for tests of managers and storage."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointManager, StateDict, points
from ckpt.commit.roster import Scanner
from ckpt.errors import CheckpointError, translate_os_error
from ckpt.format.manifest import FileEntry, Manifest, Parent, PlacementGroup, TensorTable
from ckpt.storage.local import LocalStorage
from ckpt.storage.objects import ObjectStorage


class Tiny:
    """A state whose content tells its step: `at(step)` sets it, `step()` reads it back from every part."""

    def __init__(self, step: int = 0) -> None:
        self.values = StateDict(n=0, tensor=torch.zeros(8), items=[0])
        self.weights = torch.nn.Linear(3, 2)
        self.at(step)

    @property
    def state(self) -> dict[str, Any]:
        return {"values": self.values, "weights": self.weights}

    def at(self, step: int) -> Tiny:
        self.values["n"] = step
        self.values["tensor"].fill_(step)
        self.values["items"] = [step, [step]]
        with torch.no_grad():
            for parameter in self.weights.parameters():
                parameter.fill_(step)
        return self

    def step(self) -> int:
        found = {self.values["n"], *self.values["tensor"].tolist(), *self.values["items"][1], self.values["items"][0]}
        found |= {value for parameter in self.weights.parameters() for value in parameter.flatten().tolist()}
        assert len(found) == 1, f"two moments in one state: {found}"
        return int(found.pop())


def manager(root: Any, tiny: Tiny | None = None, **options: Any) -> CheckpointManager:
    options.setdefault("lock_timeout", 0.2)
    return CheckpointManager(root, (tiny or Tiny()).state, **options)


def write_steps(
    root: Any, *steps: int, metrics: Callable[[int], dict[str, float]] | None = None, **options: Any
) -> None:
    """One process's worth of saves: resumes, saves each step durably, closes."""
    options.setdefault("keep_last", None)
    tiny = Tiny()
    with manager(root, tiny, async_save=False, **options) as made:
        made.resume()
        for step in steps:
            assert made.save(step if tiny.at(step) else 0, metrics=metrics(step) if metrics else None)


def resumed(root: Any, step: Any = "auto", **options: Any) -> int:
    """The step a fresh process would stand at, checked against the state's content."""
    tiny = Tiny(-1)
    with manager(root, tiny, **options) as made:
        number = made.resume(step)
    assert tiny.step() == (number if made.receipt is not None and made.receipt.path else -1)
    return number


def folders(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith(".lock"))


def debris(root: Path) -> list[str]:
    return [name for name in folders(root) if name.startswith(".")]


def contents(root: Path) -> dict[str, bytes]:
    """Every file below `root`, links not followed, locks left out."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() and not path.is_symlink() else b"(no file)"
        for path in sorted(root.rglob("*"))
        if not path.name.startswith(".lock")
    }


def make_manifest(**changes: Any) -> Manifest:
    """A manifest as a save writes it, with whatever a test is about."""
    values: dict[str, Any] = dict(
        run="a" * 32,
        save=os.urandom(16).hex(),
        incarnation=1,
        parent=None,
        step=1,
        time=0.0,
        metrics={},
        world={"size": 1, "writer": "b" * 32},
        parts={},
        tensors=TensorTable(),
        groups=(PlacementGroup("whole", (0,)),),
        files=(FileEntry("rank-00000.json", 2, "0" * 32),),
        timings={},
        environment={},
    )
    values.update(changes)
    return Manifest(**values)


def parent_of(record: Manifest) -> Parent:
    return Parent(record.step, record.incarnation, record.save)


def plant(root: Path, record: Manifest, name: str | None = None) -> Path:
    """A committed step without tensors, written by hand."""
    folder = root / (name or f"step-{record.step:08d}")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(record.encode())
    (folder / "rank-00000.json").write_bytes(b"{}")
    return folder


def scan(root: Path) -> Any:
    return Scanner(LocalStorage(str(root))).scan()


class Faults:
    """Makes one verb of every storage fail, at its n-th call or from then on, and counts all calls."""

    VERBS = (
        "list", "stat", "read", "read_ranges", "make_folder", "write_new", "replace", "sync_folder", "publish",
        "put_new", "remove_file", "remove_folder", "free_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.armed: tuple[str, int, bool] | None = None  # verb, calls until it fails, whether it goes on failing
        self.code = errno.EIO
        self.hits = 0
        self.only: Callable[[str], bool] = lambda path: True
        self.guard = threading.Lock()

    def arm(self, verb: str, nth: int = 0, *, sticky: bool = False, code: int = errno.EIO) -> None:
        self.armed, self.code, self.hits = (verb, nth, sticky), code, 0

    def off(self) -> None:
        self.armed = None

    def strike(self, verb: str, path: str) -> None:
        with self.guard:
            self.calls.append(verb)
            if self.armed is None or self.armed[0] != verb or not self.only(path):
                return
            _, left, sticky = self.armed
            self.armed = (verb, max(left - 1, 0), sticky) if left or sticky else None
            if left:
                return
            self.hits += 1
        error = OSError(self.code, os.strerror(self.code))
        raise translate_os_error(error, stage=verb, path=path or "root") from error


@contextmanager
def faults() -> Iterator[Faults]:
    made = Faults()
    kept: list[tuple[type, str, Any]] = []

    def wrap(kind: type, verb: str, real: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if verb == "free_bytes":
                made.calls.append(verb)
            else:
                made.strike(verb, str(args[0]) if args else "")
            return real(self, *args, **kwargs)

        return call

    for kind in (LocalStorage, ObjectStorage):
        for verb in Faults.VERBS:
            real = kind.__dict__[verb]
            kept.append((kind, verb, real))
            setattr(kind, verb, wrap(kind, verb, real))
    try:
        yield made
    finally:
        for kind, verb, real in kept:
            setattr(kind, verb, real)


class Gate:
    """Holds whoever reaches a named point until it is opened."""

    def __init__(self, point: str, times: int = 1) -> None:
        self.point, self.left = point, times
        self.reached, self.open = threading.Event(), threading.Event()

    def __enter__(self) -> Gate:
        points.install(self._hook)
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        points.install(None)

    def _hook(self, name: str) -> None:
        if name == self.point and self.left:
            self.left -= 1
            self.reached.set()
            assert self.open.wait(60), "nobody opened the gate"

    def wait(self) -> None:
        assert self.reached.wait(60), f"{self.point} was not reached"


def at_point(point: str, action: Callable[[], None], nth: int = 1) -> Callable[[str], None]:
    """A hook that runs `action` at the n-th passing of `point`."""
    left = [nth]

    def hook(name: str) -> None:
        if name == point:
            left[0] -= 1
            if left[0] == 0:
                action()

    return hook


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], object], *, timeout: float = 60, killed: bool = False) -> int:
    """Runs `work` in a forked child; its exit status. An exception in it is status 99, with the trace on stderr.

    killed: asserts that it died by SIGKILL.
    """
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            status = int(work() or 0)  # type: ignore[call-overload]
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 99
        finally:
            os._exit(status)
    status = wait_for(pid, timeout)
    if killed:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"status {status:#x}"
        return -signal.SIGKILL
    assert os.WIFEXITED(status), f"the child died by signal {os.WTERMSIG(status)}"
    return os.WEXITSTATUS(status)


def wait_for(pid: int, timeout: float = 60) -> int:
    """The wait status of a child; one that hangs is killed and fails the test."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"a child was still running after {timeout} s")


def failure(call: Callable[[], object], kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def warnings(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ckpt" and record.levelname == "WARNING"]
