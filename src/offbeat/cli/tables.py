"""Tables and lines of text that the commands show; printed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from offbeat.cli import comparison, timesheet
from offbeat.cli.comparison import ComparisonRow
from offbeat.cli.doctor import Finding
from offbeat.cli.output import NO_VALUE, TextTable
from offbeat.cli.timesheet import TimeSheet, TimeSheetEntry
from offbeat.wire.job_view import TIME_PARTS

_NAMED_WORKERS_MAX: Final = 8
_FINDINGS: Final = (
    ("wall time", "wall_s", "{:,.2f} s"),
    ("samples/s", "samples_per_s", "{:,.0f}"),
    ("test accuracy", "accuracy", "{:.2%}"),
    ("training loss", "loss", "{:.4f}"),
)


def findings_lines(findings: Sequence[Finding]) -> list[TextTable | str]:
    """Return a table with a row for each of what `offbeat doctor` has found, and lines of what to do."""
    table = TextTable(
        headers=("check", "result", "found"),
        rows=[(one.check, one.level, one.found) for one in findings],
        text_columns=frozenset(range(3)),
    )
    return [table, *(f"{one.check}: {one.advice}" for one in findings if one.advice)]


def epoch_line(epoch: int, entries: Sequence[TimeSheetEntry]) -> str:
    """Return one line about an epoch that has ended: quality, throughput, and waiting time.

    Args:
        epoch: counted from 0; shown from 1.
        entries: one per worker.
    """
    items = [f"epoch {epoch + 1}"]
    loss, accuracy = timesheet.loss(entries), timesheet.accuracy(entries)
    if loss is not None:
        items.append(f"loss {loss:.4f}")
    if accuracy is not None:
        items.append(f"test accuracy {accuracy:.1%}")
    items.append(f"{timesheet.samples_per_s(entries):,.0f} samples/s")
    if len(entries) > 1:
        items.append(f"waiting: {_waits(entries)}")
    return "  ".join(items)


def time_parts_table(sheet: TimeSheet) -> TextTable:
    """Return the parts of each worker's wall time as shares of it; parts that are 0 for all are omitted."""
    totals = sheet.totals()
    shown = [part for part in TIME_PARTS if any(entry.parts_s[part] for entry in totals)]
    return TextTable(
        title="where each worker's time went",
        headers=("worker", *(part.replace("_", " ") for part in shown)),
        rows=[(str(entry.worker), *(f"{entry.share(part):.1%}" for part in shown)) for entry in totals],
    )


def results_table(figures: Mapping[str, float], log: str) -> TextTable:
    """Return the results of a training.

    Args:
        figures: see `timesheet.figures`.
        log: path of the run log.
    """
    rows = [(title, form.format(figures[name])) for title, name, form in _FINDINGS if name in figures]
    return TextTable(rows=[*rows, ("run log", log)], text_columns=frozenset({0, 1}))


def comparison_table(rows: Sequence[ComparisonRow], title: str) -> TextTable:
    """Return the cases of a comparison as one table."""
    base = comparison.baseline(rows)
    heads = ("strategy", "slowness", "seconds\nan epoch", "times\nslower", "time\nwaiting", "test\naccuracy")
    cells = [
        (
            row.case.strategy,
            comparison.describe_slowness(row.case.slow),
            f"{row.epoch_s:.3g}",
            NO_VALUE if (ratio := comparison.ratio(row, base)) is None else comparison.format_ratio(ratio),
            f"{row.wait_share:.0%}",
            NO_VALUE if row.accuracy is None else f"{row.accuracy:.1%}",
        )
        for row in rows
    ]
    return TextTable(title=title, headers=heads, rows=cells, text_columns=frozenset({0, 1}))


def comparison_notes(rows: Sequence[ComparisonRow], cores: int) -> list[str]:
    """Return notes on the columns of a comparison, and on the machine's influence on them."""
    notes = ["Time waiting: for other workers, mean over those that are not slowed."]
    base = comparison.baseline(rows)
    if base is not None:
        notes.append(f"Times slower: than {base.case.strategy} without slow workers.")
    if cores < rows[0].workers:
        notes.append(f"The {rows[0].workers} workers shared {cores} cores of this machine.")
    return notes


def _waits(entries: Sequence[TimeSheetEntry]) -> str:
    if len(entries) <= _NAMED_WORKERS_MAX:
        return ", ".join(f"worker {entry.worker} {entry.share('wait'):.0%}" for entry in entries)
    least, most = (pick(entries, key=lambda entry: entry.share("wait")) for pick in (min, max))
    return (
        f"from {least.share('wait'):.0%} (worker {least.worker}) "
        f"to {most.share('wait'):.0%} (worker {most.worker})"
    )
