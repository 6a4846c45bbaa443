"""`ckpt chaos` and `ckpt demo` as commands: any way of starting a training, the table, the document, the exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt.chaos.ending import Compared
from ckpt.chaos.outcome import KillRecord, Outcome
from ckpt.chaos.plans import ANY_MOMENT, IN_SAVE, ORDER
from ckpt.chaos.record import Difference
from ckpt.cli.draw_chaos import draw
from ckpt.cli.screen import Screen

pytestmark = pytest.mark.full

DEMO = [sys.executable, "-m", "ckpt.chaos.demo_train"]
GPT = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
SMALL_GPT = ["--width", "32", "--depth", "1", "--length", "32", "--batch", "8", "--text", "40000"]


def chaos(*arguments: str, cwd: Path, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt", "chaos", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


def alive(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_gpt_example_by_its_command_survives_every_point_and_ten_random_kills(tmp_path: Path) -> None:
    """The user's command, unchanged, in interpreters of its own; the document holds what the contract names."""
    command = [sys.executable, str(GPT), *SMALL_GPT, "--root", "runs/gpt", "--steps", "48", "--save-every", "4"]
    result = chaos("--json", "--seed", "5", "--jobs", "2", "--", *command, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert (found["schema"], found["verdict"], found["seed"], found["differing"]) == (1, "bit-exact", 5, [])
    assert set(found["compared"]) >= {"tensors", "rng", "batches"} and found["compared"]["batches"] == 48
    assert len(found["kills"]) == 10 + len(ORDER)
    assert all({"point", "step", "pid", "restarts"} <= set(kill) for kill in found["kills"])
    assert list(found["points"]) == list(ORDER) and all(found["points"].values())
    assert found["random"]["inside_a_save"] * 2 >= found["random"]["kills"] == 10
    assert "run without faults 1 of 2" in result.stderr and "\x1b" not in result.stderr
    # Nothing in the user's folder, and no folder left behind.
    assert list(tmp_path.iterdir()) == [] and "kept in" not in result.stderr


def test_a_training_behind_a_shell_is_killed_with_all_that_the_shell_started(tmp_path: Path) -> None:
    shell = f"sleep 300 & {' '.join(DEMO)}; code=$?; echo over; exit $code"
    arguments = ["--kills", "1", "--points", "publish.after", "--work", str(tmp_path / "work")]
    result = chaos(*arguments, "--", "bash", "-c", shell, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "bit-exact" and max(map(len, lines)) <= 80
    assert any(line.split() == ["publish.after", "1", *line.split()[2:]] and line.endswith("ok") for line in lines)
    assert alive(str(tmp_path / "work")) == []
    # A folder of the user's choice stays.
    assert (tmp_path / "work" / "clean-1" / "start-000" / "stdout").read_text().endswith("over\n")


SCRIPT = """
import os
folder = os.environ["CKPT_SANDBOX"]
with open(os.path.join(folder, "starts"), "a+") as file:
    file.write("x")
    starts = file.tell()
import torch
path = os.path.join(folder, "mine.pt")
start, weights = 0, torch.zeros(1000)
if os.path.exists(path):
    start, weights = torch.load(path, weights_only=True)
for step in range(start, 30):
    weights += step * torch.arange(1000)
    torch.save((step + 1, weights), path + ".tmp")
    os.replace(path + ".tmp", path)
weights += starts * {sloppy}
torch.save({{"w": weights, "nan": torch.tensor(float("nan"))}}, "final.pt")
"""


@pytest.mark.parametrize("sloppy", [False, True])
def test_a_script_without_a_manager_is_compared_by_the_file_it_leaves(sloppy: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(sloppy=int(sloppy)))
    arguments = ["--kills", "2", "--seed", "16", "--compare", "final.pt", "--json", "--work", "work"]
    result = chaos(*arguments, "--", sys.executable, "train.py", cwd=tmp_path)
    found = json.loads(result.stdout)
    assert len(found["kills"]) == 2, result.stderr
    if sloppy:
        assert result.returncode == 3 and found["verdict"].startswith("artefact w differs: ")
    else:
        assert (result.returncode, found["verdict"]) == (0, "bit-exact")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--points", "no.such.point", "--", "true"], "no.such.point"),
        (["--kills", "-1", "--", "true"], "-1"),
        (["--kills", "3"], "COMMAND"),
        (["--work", ".", "--", "true"], "not an empty folder"),
        (["--compare", "there.pt", "--", "true"], "exists already"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "there.pt").write_bytes(b"mine")
    result = chaos(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "") and said in result.stderr, result.stderr
    assert (tmp_path / "there.pt").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-command-here"], "could not be started"),
        ([sys.executable, "-c", "import sys; sys.exit('no data')"], "no data"),
        ([sys.executable, "-c", "pass"], "no CheckpointManager was made"),
    ],
)
def test_a_command_that_cannot_be_tested_exits_with_one_and_a_document(
    command: list[str], said: str, tmp_path: Path
) -> None:
    result = chaos("--json", "--work", "work", "--", *command, cwd=tmp_path)
    found = json.loads(result.stdout)
    assert result.returncode == 1 and said in found["error"]["message"] and said in result.stderr
    assert set(found["error"]) == {"type", "message", "step", "path", "hint"} and "Traceback" not in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_campaign_that_is_stopped_takes_its_children_along(number: int, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt", "chaos", "--jobs", "2", "--work", "work", "--"]
    script = "import time, pathlib, os; pathlib.Path(os.environ['CKPT_SANDBOX'], 'on').touch(); time.sleep(300)"
    with subprocess.Popen(
        [*command, sys.executable, "-c", script],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as campaign:  # fmt: skip
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("work/clean-*/sandbox/on"))) < 2:
            assert time.monotonic() < deadline and campaign.poll() is None
            time.sleep(0.02)
        assert len(alive(str(tmp_path / "work"))) >= 2
        campaign.send_signal(number)
        campaign.wait(60)
        assert campaign.stderr is not None
        assert campaign.returncode == code, campaign.stderr.read()
    assert alive(str(tmp_path / "work")) == []


def kill(target: str, step: int, problem: str = "") -> KillRecord:
    return KillRecord(1, target, target, target, True, step, 4711, step - 10, 1, problem)


def drawn(outcome: Outcome) -> list[str]:
    stream = io.StringIO()
    screen = Screen(stream, width=80)
    draw(screen, outcome)
    screen.show()
    return stream.getvalue().splitlines()


def test_the_table_fits_80_columns_and_ends_with_the_verdict() -> None:
    kills = [kill(name, 12_345_670 + i) for i, name in enumerate((*ORDER, *[IN_SAVE] * 30, *[ANY_MOMENT] * 10))]
    outcome = Outcome(1, kills, ORDER, (), Compared(592, 23, 6000, 40, 1_490_000_000), saves=12, runs=4, verified=99)
    lines = drawn(outcome)
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["point", "hits", "killed", "at", "step", "resumed", "at", "restarts", "verdict"]
    assert lines[1].split() == ["save.begin", "1", "12345670", "12345660", "1", "ok"]
    assert lines[-1] == "bit-exact" and all(name in "\n".join(lines) for name in ORDER)
    assert "66 kills in 4 runs, 40 of 40 random ones inside a save" in "\n".join(lines)


def test_the_table_names_what_failed_and_what_was_not_hit() -> None:
    lost = "run 1, after publish.after at step 20: lost: step 20 was acknowledged and the newest sound step is 10"
    outcome = Outcome(1, [kill("publish.after", 20, lost)], ("publish.after", "remove.half"))
    outcome.problems = [lost]
    outcome.differing = [Difference(30, "tensor", f"model/{i}", "other bytes") for i in range(20)]
    text = "\n".join(drawn(outcome))
    rows = [line.split() for line in text.splitlines()]
    assert ["publish.after", "1", "20", "10", "1", "FAILED"] in rows and ["remove.half", "0", "0", "no", "hit"] in rows
    assert text.splitlines()[-1] == lost and "tensor model/3 differs at step 30: other bytes" in text
    assert "lists all 21" in text and outcome.exit == 3
    document = outcome.to_dict()
    assert json.loads(json.dumps(document))["verdict"] == lost and len(document["differing"]) == 20


def test_demo_ends_bit_exact_and_leaves_nothing(tmp_path: Path) -> None:
    """The command itself; two named points stand for all, which the example's campaign above has killed at."""
    short = "functools.partial(campaign.Settings, points=('publish.after', 'remove.half'))"
    code = f"import functools, sys; from ckpt.chaos import campaign; campaign.Settings = {short}; "
    code += "from ckpt.cli import main; sys.exit(main(['demo', '--kills', '0', '--json']))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["verdict"] == "bit-exact" and found["points"] == {"publish.after": 1, "remove.half": 1}
    assert list(tmp_path.glob("ckpt*")) == list(tmp_path.glob("runs")) == []
