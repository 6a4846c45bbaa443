"""Streams that take nothing: a full device, and stdout or stderr closed from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from edges_support import net, save_run

pytestmark = pytest.mark.quick


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_run(tmp_path / "run", 10, 20, parts={"model": net()})
    return tmp_path / "run"


def process(*arguments: object, stdout: object, stderr: object = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckpt", *map(str, arguments)]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)  # type: ignore[call-overload]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
@pytest.mark.parametrize("arguments", [("ls",), ("ls", "--json"), ("inspect",), ("verify", "--json"), ("--help",)])
def test_an_output_that_cannot_be_written_is_1_and_one_line(root: Path, arguments: tuple[str, ...]) -> None:
    place = () if arguments[0] == "--help" else (root,)
    with open("/dev/full", "w") as full, process(*arguments, *place, stdout=full) as child:
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1, "ckpt: the output could not be written: No space left on device\n")
    with open("/dev/full", "w") as full, process(*arguments, *place, stdout=full, stderr=full) as child:
        assert child.wait(60) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_a_failure_is_told_where_its_document_cannot_be_written(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, process("ls", tmp_path / "none", "--json", stdout=full) as child:
        _, err = child.communicate(timeout=60)
    assert child.returncode == 4 and err.startswith("ckpt: There is no ") and err.count("\n") == 1


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_closed_streams_are_quiet_and_leave_the_exit_code(root: Path, tmp_path: Path, closed: str) -> None:
    redirections = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-"}[closed]
    for arguments, code in (
        (("ls", root), 0),
        (("ls", root, "--json"), 0),
        (("verify", root), 0),
        (("--help",), 0),
        (("ls", tmp_path, "--json"), 4),
        (("nothing",), 2),
    ):
        line = f'exec "$@" {redirections}'
        command = ["sh", "-c", line, "sh", sys.executable, "-m", "ckpt", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, arguments
        assert "Traceback" not in done.stderr and "internal" not in done.stderr
        assert done.stderr == "" or code != 0
