"""What all commands share: one JSON document or one drawing, exit codes, and failures as one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from ckpt.cli.screen import Screen, clean
from ckpt.errors import CheckpointError, NotCommittedError, OutOfSpaceError, StorageUnavailableError

_WRITING = ("write", "put", "make folder", "fsync", "rename", "remove", "lock", "commit")

FINE, FAILED, USAGE, FINDINGS, NOTHING, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


@dataclass(frozen=True)
class Answer:
    """What a command found out. document: what --json prints; draw: puts the same on a screen; notes: for stderr."""

    document: Mapping[str, Any]
    draw: Callable[[Screen], None]
    code: int = FINE
    notes: tuple[str, ...] = ()


class Done(Exception):
    """A command ended with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def answers(function: Callable[..., Answer]) -> Callable[..., None]:
    """Makes a command of a function that returns an Answer; it gets --json."""

    @click.option("--json", "as_json", is_flag=True, help='Print one JSON document with "schema": 1.')
    @wraps(function)
    def command(as_json: bool, **arguments: Any) -> None:
        answer = function(**arguments)
        for note in answer.notes:
            say(note)
        if as_json:
            print_document(answer.document)
        else:
            screen = Screen()
            answer.draw(screen)
            screen.show()
        raise Done(answer.code)

    return command


def print_document(document: Mapping[str, Any]) -> None:
    # ASCII: the text is the same under any locale, and no name in it can steer a terminal.
    sys.stdout.write(json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A message for the person, apart from the data."""
    stream = sys.stderr
    encoding = getattr(stream, "encoding", None) or "ascii"
    stream.write("ckpt: " + "\n  ".join(clean(line) for line in text.splitlines()).encode(
        encoding, "backslashreplace").decode(encoding) + "\n")  # fmt: skip
    stream.flush()


def failure(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a failure."""
    name, message = type(error).__name__, str(error)
    if isinstance(error, KeyError) and error.args:
        message = str(error.args[0])
    if isinstance(error, click.ClickException):
        name, message = type(error).__name__, error.format_message()
    told = {
        "type": name,
        "message": message or name,
        "step": getattr(error, "step", None),
        "path": getattr(error, "path", None),
        "hint": getattr(error, "hint", None),
    }
    return code_of(error), {"schema": 1, "error": told}


def code_of(error: BaseException) -> int:
    if isinstance(error, NotCommittedError):
        return NOTHING
    if isinstance(error, StorageUnavailableError):
        writing = isinstance(error, OutOfSpaceError) or error.stage in _WRITING
        return FAILED if writing else UNREACHABLE
    if isinstance(error, click.UsageError):
        return USAGE
    if isinstance(error, (ValueError, TypeError)) and not isinstance(error, CheckpointError):
        return USAGE
    return FAILED


def step_folder(path: str) -> tuple[Any, str]:
    """(storage of the root, name) of the step's folder `path`, there or not; a usage error when it is a root."""
    from ckpt.edges.opening import parent_of, place_of
    from ckpt.format.names import parse_step_name
    from ckpt.storage.open import open_storage

    storage = open_storage(path)
    root, name = parent_of(storage)
    if root is not None and parse_step_name(name) is not None and storage.list() is None:
        return root, name
    place = place_of(path, writes=True)
    if place.folder is None:
        raise click.UsageError(f"{place.storage.url} is a run's root; give one of its step folders.")
    if not place.folder:
        raise click.UsageError(f"{place.storage.url} lies in no root.")
    return place.storage, place.folder
