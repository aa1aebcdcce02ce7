"""What the commands show of a result: tables and lines of text, made here and printed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from offbeat.cli import comparison, timesheet
from offbeat.cli.comparison import Row
from offbeat.cli.output import NONE, Table
from offbeat.cli.timesheet import PARTS, Entry, TimeSheet

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
    totals = sheet.totals()
    shown = [part for part in PARTS if any(entry.parts_s[part] for entry in totals)]
    return Table(
        title="where each worker's time went",
        heads=("worker", *(part.replace("_", " ") for part in shown)),
        rows=[(str(entry.worker), *(f"{entry.share(part):.1%}" for part in shown)) for entry in totals],
    )


def findings(figures: Mapping[str, float], log: str) -> Table:
    """Return what a training came to.

    Args:
        figures: see `timesheet.figures`.
        log: where the run log is.
    """
    rows = [(title, form.format(figures[name])) for title, name, form in _FINDINGS if name in figures]
    return Table(rows=[*rows, ("run log", log)], words=frozenset({0, 1}))


def comparison_table(rows: Sequence[Row], title: str) -> Table:
    """Return the cases of a comparison side by side."""
    base = comparison.baseline(rows)
    heads = ("strategy", "slowness", "seconds\nan epoch", "times\nslower", "time\nwaiting", "test\naccuracy")
    cells = [
        (
            row.case.strategy,
            comparison.in_words(row.case.slow),
            f"{row.epoch_s:.3g}",
            NONE if (ratio := comparison.ratio(row, base)) is None else comparison.times(ratio),
            f"{row.wait_share:.0%}",
            NONE if row.accuracy is None else f"{row.accuracy:.1%}",
        )
        for row in rows
    ]
    return Table(title=title, heads=heads, rows=cells, words=frozenset({0, 1}))


def comparison_notes(rows: Sequence[Row], cores: int) -> list[str]:
    """Say what the columns of a comparison mean, and what the machine does to them."""
    notes = ["Time waiting: for other workers, mean over those that are not slowed."]
    base = comparison.baseline(rows)
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
