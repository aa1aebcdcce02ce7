"""Output of the commands: tables that fit the terminal, and the handling of failed writes.

Results go to standard output, progress and errors to standard error. `guarded_streams` wraps every command: a
result that cannot be written ends the command with an error of this module, progress that cannot be written
is dropped, and no text fails over a character that the encoding lacks. Nothing here decides what is shown.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Self, TextIO, cast

from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from offbeat.errors import OffbeatError

NO_VALUE: Final = "-"  # for a cell without a value
_BAR_FROM_COLUMNS: Final = 80


class OutputError(OffbeatError):
    """A result cannot be written.

    Attributes:
        reason: the system's error message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot write to standard output: {reason}")
        self.reason = reason


class ReaderClosedError(Exception):
    """The reader of standard output has closed it."""


# Streams -------------------------------------------------------------------------------------------------


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Route standard output and standard error through `_Guard` inside the context.

    Those of the three standard streams that are closed are opened on /dev/null, so that no file or socket
    gets their descriptors, and with them the output of a child process.
    """
    _open_closed_streams()
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Guard(before[0], is_result=True))
    sys.stderr = cast(TextIO, _Guard(before[1], is_result=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Guard:
    """A text stream that redirects itself to /dev/null after its first failure.

    Args:
        is_result: a failure is an error; else it is ignored, for there is no stream left to report it.
    """

    def __init__(self, stream: TextIO, *, is_result: bool) -> None:
        self._stream, self._is_result = stream, is_result
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text.

        Raises:
            OutputError: it cannot be written.
            ReaderGoneError: the reader has closed the stream.
        """
        try:
            self._stream.write(text)
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; raises as `write` does."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        with suppress(OSError):  # a stream that is no file has no descriptor
            _redirect_to_null(self._stream.fileno())
        if not self._is_result:
            return
        if isinstance(error, BrokenPipeError):
            raise ReaderClosedError from error
        raise OutputError(error.strerror or str(error)) from error


def _redirect_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def _open_closed_streams() -> None:
    names = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for _ in names:  # each gets the lowest free descriptor: that of the stream
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in names:
        # A closed standard output is an error for results: opened read-only, every write to it fails.
        mode = os.O_RDONLY if name == "stdout" else os.O_RDWR
        setattr(sys, name, os.fdopen(os.open(os.devnull, mode), "r" if name == "stdin" else "w"))


def terminal_columns() -> int | None:
    """Return the width of a line in columns, from COLUMNS or the terminal; None without a limit."""
    return shutil.get_terminal_size((0, 0)).columns or None


# Tables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Rows of text under heads.

    Attributes:
        title: a line above the table, "" for none.
        headers: heads of the columns, which may contain line feeds. With two columns and no heads each row is
            a name and its value.
        rows: as many cells each as there are columns.
        text_columns: indices of the text columns, which are left-aligned; the remaining ones are numbers.
    """

    title: str = ""
    headers: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]]
    text_columns: frozenset[int] = frozenset({0})


def print_output(*shown: TextTable | str | Text) -> None:
    """Write tables and lines to standard output.

    A table that does not fit into the terminal breaks its text between words; where that is not enough, each
    cell becomes a line `head: cell`, and an empty line ends a row. So no number and no name is ever cut.
    Where standard output is no terminal and COLUMNS is not set, there is no limit.

    Raises:
        OutputError: the text cannot be written.
        ReaderGoneError: the reader has closed standard output.
    """
    for item in shown:
        if isinstance(item, TextTable):
            _show_table(item, terminal_columns())
        else:
            _console().print(item, soft_wrap=True)
    sys.stdout.flush()


def drop_columns(table: TextTable, heads: Sequence[str], columns: int | None) -> TextTable:
    """Return the table without the first of the columns with these heads, as many as it takes to fit."""
    for head in heads:
        widths = _widths(table, None)
        if columns is None or widths is None or _boxed_columns(widths) <= columns:
            break
        at = table.headers.index(head)
        table = TextTable(
            title=table.title,
            headers=table.headers[:at] + table.headers[at + 1 :],
            rows=[row[:at] + row[at + 1 :] for row in table.rows],
            text_columns=frozenset(one - (one > at) for one in table.text_columns - {at}),
        )
    return table


def _show_table(table: TextTable, columns: int | None) -> None:
    widths = _widths(table, columns)
    if table.title:
        _console().print(Text(table.title, style="italic"), soft_wrap=True)
    if widths is None:
        _console().print("\n".join(_lines(table)), soft_wrap=True)
    else:
        _console(_boxed_columns(widths)).print(_boxed(table, widths))


class Display:
    """The whole screen of the terminal at standard output, drawn again at each `show`; use it in a `with`."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    @property
    def columns(self) -> int:
        """The present width."""
        return self._console.width

    @property
    def lines(self) -> int:
        """The present height."""
        return self._console.height

    def show(self, *shown: TextTable | str | Text) -> None:
        """Draw tables and lines as `print_output` would print them; what is below the last line is cut."""
        self._live.update(Group(*map(self._make_renderable, shown)), refresh=True)

    def _make_renderable(self, item: TextTable | str | Text) -> RenderableType:
        if not isinstance(item, TextTable):
            return item
        widths = _widths(item, self.columns)
        return Text("\n".join(_lines(item))) if widths is None else _boxed(item, widths)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        self._live.__exit__(*ended)


def _console(columns: int = 80) -> Console:
    return Console(file=sys.stdout, width=columns, height=25, highlight=False, markup=False, emoji=False)


def _widths(table: TextTable, columns: int | None) -> list[int] | None:
    """Return the widths of a table's columns; None where no table fits."""
    cells = list(zip(*([table.headers] if table.headers else []), *table.rows, strict=True))
    widths = [max(cell_len(line) for cell in column for line in [*cell.splitlines(), ""]) for column in cells]
    least = [max(cell_len(word) for cell in column for word in [*cell.split(), ""]) for column in cells]
    over = 0 if columns is None else _boxed_columns(widths) - columns
    for at in sorted(range(len(widths)), key=lambda at: least[at] - widths[at]):
        if at in table.text_columns and over > 0:
            cut = min(over, widths[at] - least[at])
            widths[at] -= cut
            over -= cut
    return widths if over <= 0 else None


def _boxed_columns(widths: list[int]) -> int:
    return sum(widths) + 3 * len(widths) + 1


def _boxed(table: TextTable, widths: list[int]) -> rich_table.Table:
    drawn = rich_table.Table(show_header=bool(table.headers))
    for at, width in enumerate(widths):
        head = Text(table.headers[at]) if table.headers else ""
        drawn.add_column(head, width=width, justify="left" if at in table.text_columns else "right")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _lines(table: TextTable) -> Iterator[str]:
    if not table.headers:
        yield from (": ".join(row) for row in table.rows)
        return
    heads = [" ".join(head.split()) for head in table.headers]
    for number, row in enumerate(table.rows):
        if number:
            yield ""
        yield from (f"{head}: {cell}" for head, cell in zip(heads, row, strict=True))


# Progress ------------------------------------------------------------------------------------------------


def make_progress() -> Progress:
    """Return a progress display on standard error that fits the terminal; descriptions are never cut."""
    console = Console(file=sys.stderr)
    what = TextColumn("{task.description}", markup=False, table_column=rich_table.Column(overflow="fold"))
    bar = [BarColumn()] if console.width >= _BAR_FROM_COLUMNS else []
    return Progress(what, *bar, TimeElapsedColumn(), console=console)
