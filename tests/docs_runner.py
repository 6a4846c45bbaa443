"""Runs the code blocks of one Markdown file in the current folder, in order: `python docs_runner.py FILE`.

A ```python block is executed; blocks of one file share their names. In a ```console block each line that starts with
"$ " is a command (a line ending in a backslash goes on), and the lines below it are what it prints. A block whose info
string goes on with `norun: reason` is not run. Blocks in other languages (text, json, toml, ...) are data.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DATA_LANGUAGES = frozenset({"text", "json", "toml", "yaml", "mermaid"})


class DocError(AssertionError):
    """A block did not do what the page says. The message begins with file:line."""


@dataclass(frozen=True)
class Block:
    line: int  # of the opening fence
    language: str
    note: str  # the rest of the info string
    text: str

    @property
    def runs(self) -> bool:
        return self.language in ("python", "console") and not self.note.startswith("norun")


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks, also those indented inside lists. A fence without an end or without a language is an error."""
    found: list[Block] = []
    opened: tuple[int, str, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(markdown.splitlines(), 1):
        fence = re.match(r"^(\s*)(`{3,})(.*)$", line)
        if opened is None:
            if fence:
                language, _, note = fence[3].strip().partition(" ")
                opened, body = (number, fence[1] + fence[2], language, note.strip()), []
        elif fence and fence[1] + fence[2] == opened[1] and not fence[3].strip():
            indent = len(opened[1]) - len(opened[1].lstrip())
            found.append(Block(opened[0], opened[2], opened[3], "\n".join(text[indent:] for text in body)))
            opened = None
        else:
            body.append(line)
    if opened is not None:
        raise DocError(f"line {opened[0]}: the block is never closed")
    for block in found:
        if block.language not in DATA_LANGUAGES | {"python", "console"}:
            raise DocError(f"line {block.line}: {block.language!r} is neither run nor named as data")
        if block.note.startswith("norun") and not block.note.removeprefix("norun").lstrip(": "):
            raise DocError(f"line {block.line}: norun needs a reason")
    return found


def transcript(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines it prints) of a console block."""
    steps: list[tuple[str, list[str]]] = []
    continued = False
    for line in text.splitlines():
        if continued:
            command, shown = steps[-1]
            steps[-1] = (f"{command}\n{line}", shown)
        elif line.startswith("$ "):
            steps.append((line[2:], []))
        elif steps:
            steps[-1][1].append(line)
        else:
            raise DocError("a console block begins with a line that starts with '$ '")
        continued = steps[-1][0].endswith("\\") and not steps[-1][1]
    return steps


def pattern(shown: str) -> str:
    """A regular expression for a line: any number where it has a number, any id for an id, any text for "..."."""
    result = ""
    for word in re.split(r"(\s+)", shown.strip()):
        if not word:
            continue
        if word.isspace():
            result += r"\s+"
            continue
        for piece in re.split(r"(\.\.\.|…|\b[0-9a-f]{8,}\b|\d+(?:[.,:]\d+)*|[█▏▎▍▌▋▊▉─━]+)", word):
            if piece in ("...", "…"):
                result += ".*"
            elif re.fullmatch(r"\d+(?:[.,:]\d+)*", piece):
                result += r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?"
            elif re.fullmatch(r"[0-9a-f]{8,}", piece):
                result += r"[0-9a-f]+"
            elif re.fullmatch(r"[█▏▎▍▌▋▊▉─━]+", piece):
                result += r"\S+"
            else:
                result += re.escape(piece)
    return result


def matches(shown: list[str], printed: str) -> bool:
    """Blank lines, the width of gaps and where a line wraps (which the length of a duration decides) do not count, nor
    does the dot between two facts, which a wrap takes away. A line "..." stands for any number of lines."""
    wanted = [text for line in shown if (text := line.replace("·", " ")).strip()]
    got = "\n".join(line.strip() for line in printed.replace("·", " ").splitlines() if line.strip())
    parts = [r"(?:.*\n)*?" if line.strip() in ("...", "…") else pattern(line) + r"\s+" for line in wanted]
    return re.fullmatch("".join(parts), got + "\n" if got else "") is not None


def write_commands(folder: Path) -> None:
    """Makes `ckpt` and `python` in `folder` mean this interpreter's, whether the package is installed or not."""
    for name, call in (("ckpt", '-m ckpt "$@"'), ("python", '"$@"')):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call}\n')
        script.chmod(0o755)


def run_console(block: Block, where: str, environment: dict[str, str]) -> None:
    for command, shown in transcript(block.text):
        result = subprocess.run(
            ["bash", "-c", command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        printed = result.stdout + result.stderr
        # Shown with nothing below it, a command need only succeed; with output, it may be one that fails.
        if not (matches(shown, printed) if shown else result.returncode == 0):
            raise DocError(f"{where}: $ {command}\nexit {result.returncode}\n{printed}")


def run_file(path: Path) -> int:
    """Runs the blocks of `path` and returns how many were not run. Raises DocError at the first that differs."""
    names: dict[str, object] = {"__name__": "__main__"}
    skipped = 0
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        write_commands(Path(folder))
        search = os.pathsep.join([folder, os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": search, "COLUMNS": "80", "NO_COLOR": "1"}
        for block in blocks(path.read_text()):
            if not block.runs:
                skipped += block.language in ("python", "console")
            elif block.language == "python":
                source = "\n" * block.line + block.text  # so that a traceback names the line of the page
                exec(compile(source, str(path), "exec"), names)
            else:
                run_console(block, f"{path.name}:{block.line}", environment)
    return skipped


if __name__ == "__main__":
    run_file(Path(sys.argv[1]))
