"""The command line. `main` is what the `ckpt` script and `python -m ckpt` call."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Data goes to stdout, messages to stderr; never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read the output has seen enough. Closed here, stdout is not flushed again when the interpreter ends.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BrokenPipeError, ValueError):
                stream.flush()
                continue
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return 0


def _run(arguments: list[str]) -> int:
    import click

    from ckpt.cli.group import group
    from ckpt.cli.running import Done, failure, print_document, say

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
            print_document(document)
        say(_sentence(error, document["error"]["message"]))
        return code


def _wants_json(arguments: Sequence[str]) -> bool:
    before = list(arguments)
    return "--json" in (before[: before.index("--")] if "--" in before else before)


def _sentence(error: BaseException, message: str) -> str:
    import click

    from ckpt.errors import CheckpointError

    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message}\nTry `{error.ctx.command_path} --help`."
    known = (CheckpointError, click.ClickException, ValueError, TypeError, KeyError, OSError)
    return message if isinstance(error, known) else f"internal error: {type(error).__name__}: {message}"
