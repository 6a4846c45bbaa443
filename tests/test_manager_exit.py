"""The end of the interpreter with a save in flight, in every way a script can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from manager_support import (
    Tiny,
    debris,
    faults,
    folders,
    manager,
    resumed,
    wait_for,
    write_steps,
)  # fmt: skip

from ckpt.errors import CheckpointError

pytestmark = pytest.mark.full


# The interpreter's end

SCRIPT = """
import json, os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from manager_support import Gate, Tiny, manager
from ckpt import points
base, results = sys.argv[1], {}
NAMES = ["return", "sys.exit", "exception", "os._exit", "hung", "thread", "atexit", "failed", "many", "closed"]
pids = {}
for name in NAMES:
    pid = os.fork()
    if pid == 0:
        break
    pids[name] = pid
else:
    for name, pid in pids.items():
        results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(results))
    sys.exit(0)
# In the child: what follows is the script of a user, ended in every way, with a real interpreter exit.
root = os.path.join(base, name)
os.makedirs(root)
os.dup2(os.open(os.path.join(base, name + ".err"), os.O_WRONLY | os.O_CREAT), 2)
tiny = Tiny(5)
made = manager(root, tiny, exit_timeout=0.2 if name == "hung" else 60)
slow = lambda point: time.sleep(0.3 if name != "hung" else 30) if point == "write.half" else None
points.install(slow)
made.save(5)
if name == "failed":
    points.install(None)
    made.wait()
    from manager_support import Faults, faults
    holder = faults()
    holder.__enter__().arm("publish", sticky=True)
    made.save(6)
tiny.at(99)
if name == "sys.exit":
    sys.exit(3)
if name == "exception":
    raise RuntimeError("the body")
if name == "os._exit":
    os._exit(4)
if name == "thread":
    def last():
        time.sleep(0.2)
    threading.Thread(target=last).start()
if name == "atexit":
    import atexit
    atexit.register(lambda: (tiny.at(6), made.save(6), tiny.at(98)))
if name == "many":
    more = [manager(os.path.join(base, f"many{i}"), Tiny(i)) for i in range(3)]
    for i, one in enumerate(more):
        one.save(i)
if name == "closed":
    made.close()
"""


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    base = tmp_path_factory.mktemp("exits")
    (base / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", base / "script.py", base, Path(__file__).parent],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return base, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "code", "step"),
    [("return", 0, 5), ("sys.exit", 3, 5), ("exception", 1, 5), ("thread", 0, 5), ("many", 0, 5), ("closed", 0, 5)],
)
def test_every_way_to_end_the_interpreter_finishes_the_save_in_flight(
    exits: tuple[Path, dict[str, int]], name: str, code: int, step: int
) -> None:
    """ASYNC-04: exit(0), sys.exit, raise right after an async save; the exit code is unchanged."""
    base, codes = exits
    assert codes[name] == code, (base / f"{name}.err").read_text()
    assert resumed(base / name) == step and debris(base / name) == []
    text = (base / f"{name}.err").read_text()
    assert ("RuntimeError: the body" in text) if name == "exception" else text == ""
    if name == "many":
        assert [resumed(base / f"many{i}") for i in range(3)] == [0, 1, 2]


def test_a_hung_save_is_abandoned_at_exit_with_one_error_line_that_names_the_step(
    exits: tuple[Path, dict[str, int]],
) -> None:
    """ASYNC-04: the drain at exit has a bound; what is unfinished is plainly debris."""
    base, codes = exits
    assert codes["hung"] == 0
    assert (base / "hung.err").read_text().splitlines() == [
        "step 5 is abandoned: its save was not finished within 0.2 s"
    ]
    assert len(debris(base / "hung")) == 1 and resumed(base / "hung") == 0


def test_os_exit_does_nothing_and_leaves_plain_debris(exits: tuple[Path, dict[str, int]]) -> None:
    """ASYNC-04: os._exit."""
    base, codes = exits
    assert codes["os._exit"] == 4 and (base / "os._exit.err").read_text() == ""
    assert resumed(base / "os._exit") == 0
    assert all(name.startswith(".tmp-") for name in folders(base / "os._exit"))


def test_a_failure_nobody_asked_about_is_an_error_line_at_exit(exits: tuple[Path, dict[str, int]]) -> None:
    base, codes = exits
    assert codes["failed"] == 0
    lines = (base / "failed.err").read_text().splitlines()
    assert len(lines) == 1 and "nobody asked" in lines[0] and "EIO" in lines[0]
    assert resumed(base / "failed") == 5


def test_a_save_made_while_the_interpreter_ends_is_durable(exits: tuple[Path, dict[str, int]]) -> None:
    base, codes = exits
    assert codes["atexit"] == 0, (base / "atexit.err").read_text()
    assert resumed(base / "atexit") == 6


def test_a_killed_process_leaves_what_was_durable(tmp_path: Path) -> None:
    """ASYNC-03 / TORN-13: killed 0.1 s after an async save returned, keep=1."""
    for wait in (0.0, 0.01, 0.05, 0.1):
        root = tmp_path / str(wait)
        write_steps(root, 1, keep_last=1)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            tiny = Tiny()
            made = manager(root, tiny, keep_last=1)
            made.resume()
            made.save(2 if tiny.at(2) else 0)
            os.write(write, b"x")
            time.sleep(60)
        os.read(read, 1)
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
        wait_for(pid)
        assert resumed(root) in (1, 2)


def test_a_use_after_a_failure_in_every_call_keeps_the_manager_usable(tmp_path: Path) -> None:
    tiny = Tiny()
    made = manager(tmp_path, tiny)
    with faults() as fault:
        for verb in ("list", "make_folder", "write_new", "sync_folder", "publish"):
            for nth in range(2):
                fault.arm(verb, nth)
                step = made._completed + 1
                try:
                    made.save(step if tiny.at(step) else 0)
                    made.wait()
                except CheckpointError:
                    pass
                fault.off()
    step = made._completed + 1
    assert made.save(step if tiny.at(step) else 0)
    made.close()
    assert resumed(tmp_path) == step and debris(tmp_path) == []
