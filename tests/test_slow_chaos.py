"""The two examples by their commands, each killed a hundred times at random and at every named point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TRAININGS = {
    "train_minimal.py": ["--steps", "120", "--save-every", "4"],
    "train_gpt.py": ["--steps", "120", "--save-every", "4", "--validate-every", "10", "--width", "64", "--depth", "2"],
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_hundred_random_kills_lose_nothing_and_change_no_bit(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt", "chaos", "--kills", "100", "--seed", "2", "--jobs", "2", "--json", "--"]
    command += [sys.executable, str(EXAMPLES / name), "--root", "runs/example", *TRAININGS[name]]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["verdict"] == "bit-exact" and found["differing"] == [] and found["problems"] == []
    assert found["random"]["kills"] == 100 and found["random"]["inside_a_save"] >= 50
    assert len(found["kills"]) == 100 + len(found["points"]) and all(found["points"].values())
    # For the report of the slow tier.
    print(json.dumps({key: found[key] for key in ("random", "points", "compared", "verified", "runs", "seconds")}))
