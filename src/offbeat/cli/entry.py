"""Runs a command line: every failure becomes one line on standard error and an exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import typer

from offbeat.cli import output
from offbeat.errors import OffbeatError, WorkerError

BAD_INPUT: Final = 2
FAILED: Final = 1
INTERRUPTED: Final = 130
_BOXED_HELP_FROM_COLUMNS: Final = 80


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None) -> int:
    """Run one command of `app`; return the exit code.

    Args:
        app: the commands.
        program: its name in usage messages.
        arguments: without the program's name; None for the process's own.
    """
    columns = output.terminal_columns()
    has_room = columns is None or columns >= _BOXED_HELP_FROM_COLUMNS
    app.rich_markup_mode = "rich" if has_room else None  # in a narrow box option names would be cut off
    with output.guarded_streams():
        try:
            code = _run_command(app, program, arguments)
            sys.stdout.flush()
        except output.ReaderClosedError:
            return 0
        except output.OutputError as error:
            return print_error(str(error), FAILED)
        return code


def command_line(program: str) -> str:
    """Return the command line of this process, with `program` in the place of its first word."""
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


@contextmanager
def file_errors(action: Literal["read", "write"], path: Path | None = None) -> Iterator[None]:
    """Context in which an error of the system becomes an `OffbeatError` that names the file."""
    try:
        yield
    except OSError as error:
        raise OffbeatError(f"cannot {action} {path or error.filename}: {error.strerror or error}") from error


def print_error(message: str, code: int) -> int:
    """Print `message` to standard error as one line; return `code`."""
    print(f"offbeat: {' '.join(message.split())}", file=sys.stderr)
    return code


def _run_command(app: typer.Typer, program: str, arguments: Sequence[str] | None) -> int:
    try:
        _check_current_folder()
        code = app(
            args=None if arguments is None else list(arguments), prog_name=program, standalone_mode=False
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort:  # older versions of typer raise this on Ctrl-C
        return INTERRUPTED
    except output.OutputError:
        raise
    except (WorkerError, OSError) as error:
        return print_error(str(error), FAILED)
    except (OffbeatError, ValueError) as error:
        return print_error(str(error), BAD_INPUT)
    except Exception as error:
        message = getattr(error, "format_message", None)  # typer's usage errors
        if message is None:
            raise
        return print_error(message(), BAD_INPUT) if message() else BAD_INPUT  # empty: the help was shown
    return code if isinstance(code, int) else 0


def _check_current_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise OffbeatError("the current folder was removed: change to an existing one") from error
