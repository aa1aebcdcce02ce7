"""What the commands show of a result: tables and lines of text, made here and printed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.table import Table

from offbeat import comparing, timesheet
from offbeat.comparing import Row
from offbeat.timesheet import PARTS, Entry, TimeSheet

_NAMED_WORKERS_MAX: Final = 8
_FINDINGS: Final = (
    ("wall time", "wall_s", "{:,.2f} s"),
    ("samples/s", "samples_per_s", "{:,.0f}"),
    ("test accuracy", "accuracy", "{:.2%}"),
    ("training loss", "loss", "{:.4f}"),
)


def epoch_line(epoch: int, entries: Sequence[Entry]) -> str:
    """Return one line about an epoch that has ended: how good, how fast, and who waited.

    Args:
        epoch: counted from 0; shown from 1.
        entries: one a worker.
    """
    said = [f"epoch {epoch + 1}"]
    loss, accuracy = timesheet.loss(entries), timesheet.accuracy(entries)
    if loss is not None:
        said.append(f"loss {loss:.4f}")
    if accuracy is not None:
        said.append(f"test accuracy {accuracy:.1%}")
    said.append(f"{timesheet.samples_per_s(entries):,.0f} samples/s")
    if len(entries) > 1:
        said.append(f"waiting: {_waits(entries)}")
    return "  ".join(said)


def parts(sheet: TimeSheet) -> Table:
    """Return where each worker's time went, as shares of it; parts in which nobody was are left out."""
    table = Table("worker", title="where each worker's time went", title_justify="left")
    totals = sheet.totals()
    shown = [part for part in PARTS if any(entry.parts_s[part] for entry in totals)]
    for part in shown:
        table.add_column(part.replace("_", " "), justify="right")
    for entry in totals:
        table.add_row(str(entry.worker), *(f"{entry.share(part):.1%}" for part in shown))
    return table


def findings(figures: Mapping[str, float], log: str) -> Table:
    """Return what a training came to.

    Args:
        figures: see `timesheet.figures`.
        log: where the run log is.
    """
    table = Table(show_header=False)
    for title, name, form in _FINDINGS:
        if name in figures:
            table.add_row(title, form.format(figures[name]))
    table.add_row("run log", log)
    return table


def comparison(rows: Sequence[Row], title: str) -> Table:
    """Return the cases of a comparison side by side."""
    base = comparing.baseline(rows)
    table = Table("strategy", "slowness", title=title, title_justify="left", pad_edge=False)
    for column in ("seconds\nan epoch", "times\nslower", "time\nwaiting", "test\naccuracy"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = comparing.ratio(row, base)
        table.add_row(
            row.case.strategy,
            comparing.in_words(row.case.slow),
            f"{row.epoch_s:.3g}",
            "–" if ratio is None else comparing.times(ratio),
            f"{row.wait_share:.0%}",
            "–" if row.accuracy is None else f"{row.accuracy:.1%}",
        )
    return table


def comparison_notes(rows: Sequence[Row], cores: int) -> list[str]:
    """Say what the columns of a comparison mean, and what the machine does to them."""
    notes = ["Time waiting: for other workers, mean over those that are not slowed."]
    base = comparing.baseline(rows)
    if base is not None:
        notes.append(f"Times slower: than {base.case.strategy} with nobody slowed.")
    if cores < rows[0].workers:
        notes.append(f"The {rows[0].workers} workers shared {cores} cores of this machine.")
    return notes


def _waits(entries: Sequence[Entry]) -> str:
    if len(entries) <= _NAMED_WORKERS_MAX:
        return ", ".join(f"worker {entry.worker} {entry.share('wait'):.0%}" for entry in entries)
    least, most = (pick(entries, key=lambda entry: entry.share("wait")) for pick in (min, max))
    return (
        f"from {least.share('wait'):.0%} (worker {least.worker}) "
        f"to {most.share('wait'):.0%} (worker {most.worker})"
    )
