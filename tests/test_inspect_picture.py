"""The pictures of ls and inspect: as wide as the terminal, readable anywhere, and never steered by what they show."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edges_support import GOLDEN, drawn, save_run

import ckpt
from ckpt.cli.draw_listing import draw as draw_listing
from ckpt.cli.screen import Screen, clean, width_of
from ckpt.edges.listing import listing

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "run"
    save_run(path, 10, 20)
    return path


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("which", ["v1-types", "v1-ranks", "v1-shared", "v1-example"])
def test_no_line_is_wider_than_the_terminal(root: Path, width: int, which: str) -> None:
    for path in (root, GOLDEN / which):
        text = drawn(path, width, tensors=True)
        assert [line for line in text.splitlines() if width_of(line) > width] == []
        screen = Screen(io.StringIO(), width)
        draw_listing(screen, listing(path, everything=True))
        assert [line for line in screen.lines if width_of(line) > width] == []


def test_a_pipe_gets_neither_colours_nor_more_than_ascii_where_that_is_all_it_takes(root: Path) -> None:
    plain = run("inspect", str(root), "--tensors", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0 and plain.stdout.isascii() and "\x1b" not in plain.stdout and "###" in plain.stdout
    fancy = run("inspect", str(root), PYTHONIOENCODING="utf-8")
    assert "\x1b" not in fancy.stdout and "███" in fancy.stdout


def test_what_comes_from_a_checkpoint_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\x07evil\r\n\u202e"
    parts = {"s": ckpt.StateDict(**{evil: 1.5, "t": torch.ones(2)}), "d": ckpt.StateDict(**{evil: torch.ones(2)})}
    with ckpt.CheckpointManager(tmp_path, parts, async_save=False) as manager:
        manager.save(1, metrics={evil: 1.0})
        manager.pin(1, evil)
    text = drawn(tmp_path, tensors=True) + run("ls", str(tmp_path)).stdout + run("inspect", str(tmp_path), evil).stderr
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    assert "evil" in text and clean("\x1b[31m") == "\\x1b[31m"


def test_a_terminal_gets_colours_and_the_window_says_how_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "123")
    assert Screen(Terminal()).colours and Screen(Terminal()).width == 123
    assert Screen(Terminal()).style("x", "bold") == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Screen(Terminal()).colours and not Screen(io.StringIO()).colours
