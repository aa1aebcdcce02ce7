"""Promises of `offbeat.cli.output`: no number is cut on any terminal; lost output ends in one line."""

import io
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
from rich.cells import cell_len

from offbeat.cli import output, tables, timesheet
from offbeat.cli.doctor import Finding
from offbeat.cli.main import main
from offbeat.cli.output import OutputError, ReaderClosedError, TextTable
from support.comparison_rows import row, sheet_of_three_epochs
from support.lockstep_log import lockstep_group, log_of
from support.source_files import imports, modules, name_of
from support.wide_result import RESULT

COMMANDS = ("", "run", "train", "compare", "simulate", "replay", "top", "trace", "doctor", "serve")
OFFBEAT = f"{sys.executable} -m offbeat"
SIMULATE = "simulate --strategy ssp:s=3 --workers 3 --steps 5"
ROWS = [
    row("bsp", epoch_s=123.4567, wait_share=0.0),
    row("partial:threshold=1.25,limit=1000000", ("1:5@0.0-0.5", "2:3@burst=20/100"), epoch_s=0.0123456),
    row("a-strategy-of-a-name-that-no-narrow-terminal-has-room-for", accuracy=None),
]


# Tables --------------------------------------------------------------------------------------------------


@contextmanager
def standard_output(encoding="utf-8"):
    """Standard output that encodes as a terminal of such a locale does."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with redirect_stdout(stream), output.guarded_streams():
        yield stream


def tables_of_a_training():
    sheet = sheet_of_three_epochs([0.31, 0.0, 0.62, 0.1234])
    figures = timesheet.figures(sheet) | {"samples_per_s": 123_456.789, "loss": 0.012345}
    log = "runs/20260102-030405-partial-threshold-1-25/log.jsonl"
    return (
        tables.time_parts_table(sheet),
        tables.results_table(figures, log),
        tables.comparison_table(ROWS, "mlp on digits, 4 workers"),
        tables.findings_lines([Finding(check="open files", level="problem", found="100 may be open")])[0],
    )


def words_of(table):
    cells = [table.title, *table.headers, *(cell for row in table.rows for cell in row)]
    return {word for cell in cells for word in cell.split()}


def words_of_the_result():
    found = {*RESULT.rows[0], *RESULT.figures, "0.0125", "54,321,987", "1.234e-07"}
    for one in RESULT.rows[:40]:
        found |= {f"{one['size_bytes']:,}", *one["method"].split(), *one["note"].split()}
        found |= {f"{value:.4g}" for name, value in one.items() if name.startswith("measured")}
    return found


SHOWN = {
    **{
        name: (words_of(table), lambda table=table: output.print_output(table))
        for name, table in zip(
            ("parts", "results", "comparison", "findings"), tables_of_a_training(), strict=True
        )
    },
    "result": (words_of_the_result(), RESULT.print),
}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [80, 40, 20])
@pytest.mark.parametrize("name", SHOWN)
def test_every_number_and_name_of_every_table_is_whole(name, columns, encoding, monkeypatch):
    words, show = SHOWN[name]
    monkeypatch.setenv("COLUMNS", str(columns))
    with standard_output(encoding) as stream:
        show()
    text = stream.buffer.getvalue().decode(encoding)
    shown = set(re.split(r"[\s│┃|]+", text))
    for word in words:
        assert {word, f"{word}:"} & shown, f"{word} is not whole in\n{text}"
    assert "…" not in text
    assert "\\u" not in text
    for line in text.splitlines():
        is_drawn = line.startswith(tuple("│┃|┏┡└┌+"))
        assert not is_drawn or cell_len(line) <= columns


def test_every_table_is_drawn_here_and_is_among_those_that_are_tested():
    drawing = ("rich.table", "rich.console", "rich.panel", "rich.columns")
    drawn = {name_of(path) for path in modules() if any(name.startswith(drawing) for name in imports(path))}
    users = [
        path for path in modules() if any(name.startswith("offbeat.cli.output") for name in imports(path))
    ]
    made = {name_of(path) for path in users if re.search(r"\bTextTable\(", path.read_text())}
    assert drawn == {"cli/output.py"}
    assert made == {"cli/tables.py", "cli/result.py", "cli/top.py"}


def test_a_table_breaks_text_between_words_before_it_becomes_lines(monkeypatch, capsys):
    table = TextTable(
        headers=("case", "what it is", "s"),
        rows=[("a", "worker 1 takes 5x as long", "1.25")],
        text_columns=frozenset({0, 1}),
    )
    monkeypatch.setenv("COLUMNS", "36")
    output.print_output(table)
    drawn = capsys.readouterr().out
    assert "│ a    │ worker 1 takes 5x  │ 1.25 │" in drawn
    assert "│      │ as long            │      │" in drawn
    monkeypatch.setenv("COLUMNS", "20")
    output.print_output(table)
    assert capsys.readouterr().out == "case: a\nwhat it is: worker 1 takes 5x as long\ns: 1.25\n"


def test_without_a_terminal_a_table_is_as_wide_as_it_has_to_be(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(os.devnull) as devnull:
        script = "from support.wide_result import RESULT; RESULT.print()"
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdin=devnull,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[1],
        )
    assert "a long name of method 39" in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) > 150


@pytest.mark.parametrize("columns", [100, 80, 40, 20])
def test_progress_cuts_no_text(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    before, sys.stderr = sys.stderr, stream
    try:
        with output.make_progress() as progress:
            progress.add_task("bsp on digits, 4 workers", total=3)
    finally:
        sys.stderr = before
    stream.flush()
    printed = stream.buffer.getvalue().decode().split()
    assert [word for word in printed if "━" not in word and word != "0:00:00"] == [
        "bsp",
        "on",
        "digits,",
        "4",
        "workers",
    ]
    assert "0:00:00" in printed


@pytest.mark.parametrize("columns", [80, 40, 20])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_cuts_no_name_of_an_option(command, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    main([*command.split(), "--help"])
    names = re.findall(r"^│ +(?:\* +)?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*command.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert names
    assert set(names) <= set(printed.split())


# Failed output -------------------------------------------------------------------------------------------


def commands(folder):
    log_of(folder / "log.jsonl", lockstep_group())
    return {"simulate": SIMULATE, "replay": f"replay {folder}", "help": "--help", "train": "train --help"}


NAMES = ["simulate", "replay", "help", "train"]


@pytest.mark.parametrize("name", NAMES)
def test_a_result_that_does_not_fit_on_the_disk_ends_with_one_line_and_1(name, tmp_path, capsys):
    with open("/dev/full", "w") as full, redirect_stdout(full):
        assert main(commands(tmp_path)[name].split()) == 1
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1] == "offbeat: cannot write to standard output: No space left on device"
    assert [line for line in printed if line.startswith("offbeat: ")] == printed[-1:]


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_reader_ends_a_command_silently(name, tmp_path, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, redirect_stdout(pipe):
        assert main(commands(tmp_path)[name].split()) == 0
    assert "offbeat: " not in capsys.readouterr().err


def test_after_the_first_failure_further_output_is_discarded():
    with open("/dev/full", "w") as full, redirect_stdout(full), output.guarded_streams():
        with pytest.raises(OutputError, match="No space left on device"):
            print("one", flush=True)
        print("two", flush=True)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, redirect_stdout(pipe), output.guarded_streams():
        with pytest.raises(ReaderClosedError):
            print("one", flush=True)
        print("two", flush=True)


def in_bash(line, folder):
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("streams", "code"),
    [
        (">&-", 1),
        ("<&-", 0),
        ("2>&-", 0),
        ("2>/dev/full", 0),
        ("<&- >&- 2>&-", 1),
        (">/dev/full 2>/dev/full", 1),
    ],
)
def test_closed_and_full_streams_leave_no_traceback_and_the_code_reports_a_lost_result(
    streams, code, tmp_path
):
    done = in_bash(f"{OFFBEAT} {SIMULATE} {streams}", tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    if streams == ">&-":
        last = done.stderr.splitlines()[-1]
        assert last == "offbeat: cannot write to standard output: Bad file descriptor"
    assert ("figure" in done.stdout or "steps_count" in done.stdout) == (code == 0)


def test_no_file_gets_the_number_of_a_standard_stream_that_is_closed(tmp_path):
    code = (
        "import os; from offbeat.cli import output\n"
        "with output.guarded_streams():\n"
        "    with open('numbers', 'w') as file:\n"
        "        file.write(str([file.fileno() > 2, *map(os.get_inheritable, range(3))]))"
    )
    done = in_bash(f'{sys.executable} -c "{code}" <&- >&- 2>&-', tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "numbers").read_text() == "[True, True, True, True]"


def test_characters_that_an_encoding_lacks_are_escaped():
    name = os.fsdecode(b"caf\xc3\xa9-\xff")
    with standard_output("ascii") as stream:
        print(name, flush=True)
    assert stream.buffer.getvalue() == b"caf\\xe9-\\udcff\n"


def test_a_removed_current_folder_is_reported(tmp_path):
    done = in_bash(f"mkdir here && cd here && rmdir ../here && {OFFBEAT} {SIMULATE}", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "offbeat: the current folder was removed: change to an existing one\n"
