"""The command line. `main` is what the `ckpt` script and `python -m ckpt` call."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Data goes to stdout, messages to stderr; never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _fill_closed()
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Who read the output has seen enough.
        code = 0
    except OSError:
        # Not even stderr takes a word.
        code = 1
    _leave_streams()
    return code


def _fill_closed() -> None:
    """A stream that was closed when Python began is None; what is written to it goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())


def _leave_streams() -> None:
    """What could not be written would be written again when the interpreter ends, and fail with a traceback there."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                stream.close()


def _run(arguments: list[str]) -> int:
    import click

    from ckpt.cli.group import group
    from ckpt.cli.running import Done, failure, say

    try:
        # Not click's own main: it ends with 1 on a closed pipe.
        with group.make_context("ckpt", list(arguments)) as context:
            group.invoke(context)
        return 0
    except Done as done:
        return done.code
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, EOFError):
        return 130
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001  (the outermost frame: a person gets a sentence, the log the rest)
        logging.getLogger("ckpt").debug("the command failed", exc_info=True)
        code, document = failure(error)
        if _wants_json(arguments):
            _try_to_print(document)
        say(_sentence(error, document["error"]["message"]))
        return code


def _try_to_print(document: dict[str, Any]) -> None:
    from ckpt.cli.running import print_document

    try:
        print_document(document)
    except OSError as failed:
        # The failure itself is told on stderr all the same.
        if not _is_output(failed):
            raise


def _wants_json(arguments: Sequence[str]) -> bool:
    before = list(arguments)
    return "--json" in (before[: before.index("--")] if "--" in before else before)


def _is_output(error: BaseException) -> TypeGuard[OSError]:
    """True for what writing to stdout failed with: every other OSError says which file it is about."""
    return type(error) is OSError and error.filename is None and error.errno in _NOT_WRITTEN


def _sentence(error: BaseException, message: str) -> str:
    import click

    from ckpt.errors import CheckpointError

    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message}\nTry `{error.ctx.command_path} --help`."
    if _is_output(error):
        return f"the output could not be written: {error.strerror}"
    known = (CheckpointError, click.ClickException, ValueError, TypeError, KeyError, OSError)
    return message if isinstance(error, known) else f"internal error: {type(error).__name__}: {message}"
