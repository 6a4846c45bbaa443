"""The commands: data on stdout, messages on stderr, one JSON document, exit codes, and never a traceback."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edges_support import DATA, flip, net, save_run, step_dir

import ckpt
from ckpt.cli import main
from ckpt.cli.group import COMMANDS, group
from ckpt.cli.running import INTERRUPTED, failure
from ckpt.storage.local import LocalStorage

pytestmark = pytest.mark.quick
LOOKING = ("ls", "inspect", "verify", "diff", "export", "cp", "prune", "pin", "unpin")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_run(tmp_path / "run", 10, 20, parts={"model": net()})
    return tmp_path / "run"


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


def document(cli: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = cli(*arguments, "--json")
    assert out.count("\n") == 1 and out.isascii()
    found = json.loads(out, parse_constant=pytest.fail)
    assert found["schema"] == 1
    return code, found


# Documents


def test_ls_lists_the_line(cli: Run, root: Path) -> None:
    code, found = document(cli, "ls", root, "--best", "loss")
    assert code == 0 and found["root"] == str(root) and found["debris"] == found["foreign"] == []
    assert [(s["step"], s["newest"], s["best"], s["pinned"]) for s in found["steps"]] == [
        (10, False, False, False),
        (20, True, True, False),
    ]
    assert set(found["steps"][0]) >= {
        "step",
        "path",
        "run",
        "incarnation",
        "time",
        "bytes",
        "world_size",
        "metrics",
        "note",
    }
    (root / ".tmp-step-00000030-ab").mkdir()
    (root / "notes.txt").write_text("mine")
    code, found = document(cli, "ls", root)
    assert code == 0 and found["debris"] == [".tmp-step-00000030-ab"] and found["foreign"] == ["notes.txt"]


def test_inspect_says_the_same_as_the_function(cli: Run, root: Path) -> None:
    code, found = document(cli, "inspect", root, "--tensors", "--step", 10)
    assert code == 0 and found == json.loads(json.dumps(ckpt.inspect(root, tensors=True, step=10).to_dict()))
    assert {"key", "dtype", "shape", "bytes"} <= set(found["tensors"][0])
    code, found = document(cli, "inspect", root, "model/0.weight")
    wanted = {"min", "max", "mean", "std", "nan", "inf", "zero", "histogram"}
    assert code == 0 and wanted <= set(found["tensor"]) and "tensors" not in found


def test_verify_exits_3_on_any_damage_even_when_an_older_step_is_sound(cli: Run, root: Path) -> None:
    assert document(cli, "verify", root)[0] == 0
    flip(step_dir(root, 20) / DATA, 4200)
    code, found = document(cli, "verify", root)
    assert code == 3 and found["ok"] is False and [step["ok"] for step in found["steps"]] == [True, False]
    assert document(cli, "verify", step_dir(root, 10))[0] == 0
    assert [document(cli, "verify", root, "--step", step)[0] for step in (10, 11)] == [0, 4]
    _, text, _ = cli("verify", root)
    assert "DAMAGED" in text and DATA in text


def test_diff_exits_0_or_3(cli: Run, root: Path, tmp_path: Path) -> None:
    assert document(cli, "diff", step_dir(root, 10), root)[0] == 0
    save_run(tmp_path / "other", 20, parts={"model": net(5)})
    code, found = document(cli, "diff", root, tmp_path / "other")
    assert code == 3 and {"key", "kind", "max_abs"} <= set(found["changed"][0]) and found["added"] == []
    assert cli("diff", root, tmp_path / "other")[0] == 3


def test_export_prints_the_paths(cli: Run, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    assert cli("export", root, out)[:2] == (0, f"{out}\n")
    assert document(cli, "export", root, tmp_path / "w.pt", "--format", "torch")[1]["paths"] == [str(tmp_path / "w.pt")]
    code, _, err = cli("export", root, out)
    assert code == 1 and "--overwrite" in err
    assert cli("export", root, out, "--overwrite")[0] == 0
    assert cli("export", root, tmp_path / "x", "--format", "dcp")[0] == 2


def test_the_format_of_an_export_is_the_one_its_ending_promises(cli: Run, root: Path, tmp_path: Path) -> None:
    assert document(cli, "export", root, tmp_path / "weights.pt")[1]["format"] == "torch"
    assert document(cli, "export", root, tmp_path / "weights.safetensors")[1]["format"] == "safetensors"
    for name, kind in (("a.pt", "safetensors"), ("a.safetensors", "torch")):
        assert cli("export", root, tmp_path / name, "--format", kind)[0] == 2 and not (tmp_path / name).exists()


def test_cp_exits_0_when_the_same_is_there_and_1_when_another_is(cli: Run, root: Path, tmp_path: Path) -> None:
    assert document(cli, "cp", root, tmp_path / "b") == (0, copied(root, tmp_path, True))
    assert document(cli, "cp", root, tmp_path / "b") == (0, copied(root, tmp_path, False))
    assert cli("cp", root, tmp_path / "b" / "step-00000020", "--step", 10)[0] == 1


def copied(root: Path, tmp_path: Path, did: bool) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in step_dir(root, 20).iterdir() if path.name != "manifest.json")
    where = str(step_dir(tmp_path / "b", 20))
    return {"schema": 1, "step": 20, "source": str(step_dir(root, 20)), "path": where, "bytes": size, "copied": did}


def test_prune_pin_and_unpin(cli: Run, root: Path) -> None:
    assert document(cli, "pin", step_dir(root, 10), "--note", "the best")[1]["note"] == "the best"
    assert "pinned the best" in cli("ls", root)[1]
    code, found = document(cli, "prune", root, "--keep-last", 1, "--dry-run")
    assert code == 0 and found["dry_run"] is True and found["remove"] == []
    assert [(step["step"], step["reasons"]) for step in found["keep"]][0] == (10, ["pinned"])
    assert cli("unpin", step_dir(root, 10))[0] == cli("unpin", step_dir(root, 10))[0] == 0
    code, found = document(cli, "prune", root, "--keep-last", 1)
    assert code == 0 and [step["step"] for step in found["remove"]] == [10] and not step_dir(root, 10).exists()


def test_prune_and_ls_know_what_the_run_keeps(cli: Run, tmp_path: Path) -> None:
    root, values = tmp_path / "run", {10: 0.5, 20: 0.1, 25: 0.7, 30: 0.9, 40: 0.4}
    options: dict[str, Any] = {"keep_last": None, "monitor": "acc", "mode": "max", "keep_best": 1, "keep_every": 20}
    with ckpt.CheckpointManager(root, {"model": net()}, **options) as manager:
        for step, value in values.items():
            manager.save(step, metrics={"acc": value})
    found = document(cli, "ls", root)[1]["steps"]
    assert [step["step"] for step in found if step["best"]] == [30] and "best" in cli("ls", root)[1]
    assert [step["step"] for step in document(cli, "ls", root, "--best", "acc")[1]["steps"] if step["best"]] == [20]
    code, found = document(cli, "prune", root, "--keep-last", 1)
    assert code == 0 and [step["step"] for step in found["remove"]] == [10, 25]
    kept = {step["step"]: step["reasons"] for step in found["keep"]}
    assert kept == {20: ["every"], 30: ["best"], 40: ["last", "every", "in use"]}


def test_prune_of_a_root_that_is_being_written_fails(cli: Run, root: Path) -> None:
    with ckpt.CheckpointManager(root, {"model": net()}) as manager:
        manager.resume()
        code, found = document(cli, "prune", root, "--keep-last", 1)
        assert code == 1 and found["error"]["type"] == "LockedError" and found["error"]["hint"]
        assert cli("prune", root, "--keep-last", 1, "--dry-run")[0] == 0


# Failures


def test_each_failure_has_its_code_one_message_and_one_document(cli: Run, root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "debris" / ".tmp-step-00000001-aa").mkdir(parents=True)
    (tmp_path / "taken.pt").touch()
    cases: list[tuple[int, str, tuple[object, ...]]] = [
        (4, "NotCommittedError", ("ls", tmp_path / "missing")),
        (4, "NotCommittedError", ("ls", tmp_path / "empty")),
        (4, "NotCommittedError", ("ls", tmp_path / "debris")),
        (4, "NotCommittedError", ("ls", step_dir(root, 10))),
        (4, "NotCommittedError", ("inspect", tmp_path / "empty")),
        (4, "NotCommittedError", ("inspect", root, "--step", 11)),
        (4, "NotCommittedError", ("verify", tmp_path / "empty")),
        (4, "NotCommittedError", ("diff", root, tmp_path / "missing")),
        (4, "NotCommittedError", ("export", tmp_path / "empty", tmp_path / "x.pt")),
        (4, "NotCommittedError", ("cp", tmp_path / "empty", tmp_path / "x")),
        (4, "NotCommittedError", ("prune", tmp_path / "empty", "--keep-last", 1)),
        (4, "NotCommittedError", ("pin", step_dir(root, 99))),
        (1, "KeyError", ("inspect", root, "nothing/like/this")),
        (1, "FileExistsError", ("export", root, tmp_path / "taken.pt")),
        (1, "StateMismatchError", ("export", root, tmp_path / "x.pt", "--name", "nope")),
        (2, "UsageError", ("pin", root)),
        (2, "UsageError", ("unpin", root)),
        (2, "MissingParameter", ("ls",)),
        (2, "MissingParameter", ("prune", root)),
        (2, "BadParameter", ("prune", root, "--keep-last", 0)),
        (2, "NoSuchOption", ("ls", root, "--nope")),
        (2, "ValueError", ("ls", "simplecache::s3://x")),
        (2, "ValueError", ("ls", "")),
    ]
    for code, kind, arguments in cases:
        got, out, err = cli(*arguments)
        assert (got, out) == (code, ""), arguments
        assert err.startswith("ckpt: ") and len(err.splitlines()) <= 3, arguments
        got, found = document(cli, *arguments)
        assert got == code and set(found["error"]) == {"type", "message", "step", "path", "hint"}
        assert found["error"]["type"] == kind and found["error"]["message"], arguments


def test_storage_that_cannot_be_read_exits_5(cli: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LocalStorage, *_: object) -> None:
        raise ckpt.StorageUnavailableError("list failed", path="x", errno=13, hint="Look at the permissions.")

    monkeypatch.setattr(LocalStorage, "list", broken)
    for command in ("ls", "inspect", "verify"):
        code, found = document(cli, command, root)
        assert code == 5 and found["error"]["hint"] == "Look at the permissions."


def test_a_bug_is_a_sentence_too(cli: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(LocalStorage, "list", bug)
    code, out, err = cli("ls", root)
    assert (code, out, err) == (1, "", "ckpt: internal error: AttributeError: no such thing\n")


def test_an_unknown_command_or_none_is_wrong_usage(cli: Run) -> None:
    assert cli("nope")[0] == 2
    assert main([]) == 2


def test_the_codes_of_errors_follow_the_tree() -> None:
    wanted = {
        ckpt.NotCommittedError: 4,
        ckpt.StorageUnavailableError: 5,
        ckpt.OutOfSpaceError: 1,
        ckpt.CorruptCheckpointError: 1,
        ckpt.UnsupportedFormatError: 1,
        ckpt.LockedError: 1,
        ckpt.StateMismatchError: 1,
    }
    assert {kind: failure(kind("x", step=3, hint="y"))[0] for kind in wanted} == wanted
    for stage, code in (("read", 5), ("list", 5), ("write", 1), ("rename", 1), ("lock", 1)):
        assert failure(ckpt.StorageUnavailableError("x", stage=stage))[0] == code
    assert failure(ckpt.LockedError("x", step=3, hint="y"))[1]["error"]["step"] == 3


# Help and version


def test_every_command_has_a_help_with_an_example(cli: Run) -> None:
    code, text, _ = cli("--help")
    assert code == 0 and all(f"  {name} " in text for name in COMMANDS)
    for name in LOOKING:
        code, text, _ = cli(name, "--help")
        assert code == 0 and f"  ckpt {name} " in text and "--json" in text, name
        command = group.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None and command.name == name
        assert text.isascii() and max(map(len, text.splitlines())) <= 80


def test_the_version_is_told(cli: Run) -> None:
    assert cli("--version")[:2] == (0, f"ckpt {ckpt.__version__}\n")


# Processes


def process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckpt", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command, **pipes)


def test_a_closed_pipe_is_quiet_and_0(root: Path) -> None:
    for arguments in (("ls", root), ("inspect", root, "--tensors"), ("ls", root, "--json"), ("--help",)):
        read, write = os.pipe()
        os.close(read)
        with process(*arguments, stdout=write) as child:
            os.close(write)
            _, err = child.communicate(timeout=60)
        assert (child.returncode, err) == (0, ""), arguments


def test_an_interrupt_exits_130_without_a_word_of_python(root: Path, tmp_path: Path) -> None:
    # A FIFO as the root's lock would be opened without blocking; a read that never ends is what a person interrupts.
    code = (
        "import sys; from ckpt.cli import main; from ckpt.storage.local import LocalStorage; import time\n"
        "def slow(*_):\n    print('here', file=sys.stderr, flush=True); time.sleep(60)\n"
        "LocalStorage.list = slow; sys.exit(main(sys.argv[1:]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, "ls", str(root)], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None and child.stderr.readline() == "here\n"
    child.send_signal(signal.SIGINT)
    rest = child.stderr.read()
    child.stderr.close()
    assert child.wait(60) == INTERRUPTED and "Traceback" not in rest


def test_a_bar_is_drawn_on_a_terminal_only(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from ckpt.cli import bars

    monkeypatch.setattr(bars, "_PATIENCE", 0.0)
    assert main(["verify", str(root)]) == 0
    assert capsys.readouterr().err == ""
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", buffering=0) as terminal, os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with bars.bar("verify") as tell:
            assert tell is not None
            tell(5, 10)
            tell(10, 10)
        stream.flush()
        assert b"verify" in terminal.read(65536)


def test_commands_run_through_the_module_and_under_any_locale(root: Path) -> None:
    for locale in ("C", "C.UTF-8", "POSIX"):
        with process(
            "ls", root, env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        ) as child:
            out, err = child.communicate(timeout=60)
        assert child.returncode == 0 and err == "" and "newest" in out


def test_a_checkpoint_in_a_copied_folder_can_be_looked_at_without_its_root(
    cli: Run, root: Path, tmp_path: Path
) -> None:
    """CFG-09: a step copied to a flat folder is inspected, verified and exported like any other."""
    shutil.copytree(step_dir(root, 10), tmp_path / "flat")
    for arguments in (("inspect",), ("verify",)):
        assert cli(*arguments, tmp_path / "flat")[0] == 0
    assert cli("export", tmp_path / "flat", tmp_path / "x.safetensors")[0] == 0
    assert cli("diff", tmp_path / "flat", step_dir(root, 10))[0] == 0
