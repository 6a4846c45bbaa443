"""The examples run to their end, and a run that was stopped and called again ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL_GPT = ["--width", "32", "--depth", "1", "--length", "32", "--batch", "8", "--text", "40000"]


def command(script: str, root: Path, *options: str) -> list[str]:
    small = SMALL_GPT if script == "train_gpt.py" else []
    return [sys.executable, "-W", "error", str(EXAMPLES / script), "--root", str(root), *small, *options]


def train(script: str, root: Path, *options: str) -> str:
    """The last line that the script prints."""
    result = subprocess.run(command(script, root, *options), capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("train_minimal.py", ["--save-every", "7"]),
        ("train_gpt.py", ["--save-every", "4", "--validate-every", "5", "--precision", "bf16", "--workers", "1"]),
        ("train_gpt.py", ["--save-every", "4", "--validate-every", "5", "--precision", "fp16", "--sync"]),
    ],
    ids=["digits", "gpt-bf16-worker", "gpt-fp16-scaler-sync"],
)
def test_stopping_early_and_calling_again_ends_with_the_bits_of_one_run(
    script: str, options: list[str], tmp_path: Path
) -> None:
    # 40 steps are more than one epoch of the digits, so the seam and the end lie in different epochs.
    once = train(script, tmp_path / "once", "--steps", "40", *options)
    part = train(script, tmp_path / "twice", "--steps", "13", *options)
    twice = train(script, tmp_path / "twice", "--steps", "40", *options)
    assert re.fullmatch(r"step 40 loss \d+\.\d{6} weights [0-9a-f]{16}( average [0-9a-f]{16})?", once)
    assert twice == once
    assert twice.split()[-1] != part.split()[-1]  # the digest tells two trainings apart


def test_sigterm_saves_the_step_it_is_in_and_the_next_call_goes_on_from_there(tmp_path: Path) -> None:
    """LIFE-06 for a generous grace: nothing of the work before the signal is lost."""
    options = ("--steps", "40", "--save-every", "1000", "--precision", "fp32")
    once = train("train_gpt.py", tmp_path / "once", *options)

    with subprocess.Popen(
        command("train_gpt.py", tmp_path / "stopped", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stdout:
            if line.startswith("step 6 "):
                os.kill(child.pid, signal.SIGTERM)
                break
        said = child.stdout.read()
        assert child.wait(timeout=60) == 143, child.stderr.read()[-3000:]
    stopped = re.search(r"stopped by a signal after step (\d+)", said)
    assert stopped is not None and 6 <= int(stopped[1]) < 40, said

    result = subprocess.run(
        command("train_gpt.py", tmp_path / "stopped", *options), capture_output=True, text=True, timeout=200
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"step {int(stopped[1]) + 1} ")
    assert lines[-1] == once
    # Called once more at its end, it trains nothing and says the same.
    assert train("train_gpt.py", tmp_path / "stopped", *options) == once


def test_the_short_example_stays_short() -> None:
    assert (EXAMPLES / "train_minimal.py").read_text().count("\n") < 60
