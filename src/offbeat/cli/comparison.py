"""Strategies side by side under the same slowness: the cases, the table that compares them, and its words.

Nothing here starts a process or prints; `offbeat.job` runs each case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from offbeat.cli import timesheet
from offbeat.cli.timesheet import TimeSheet
from offbeat.policies.stragglers.injection import Burst, SlowRule, parse

FIRST_EPOCH: Final = 1  # the epoch before it warms up: connections, memory and caches are set up in it
_NOTICED: Final = 1.05  # less is not told from chance
_NUMBERS: Final = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training of the comparison.

    Attributes:
        strategy: as on the command line.
        slow: the rules of this case, none for not slowed.
    """

    strategy: str
    slow: tuple[str, ...]

    @property
    def label(self) -> str:
        """The case as an end of names: `bsp_1_5`."""
        return f"{_slug(self.strategy)}_{_slug('_'.join(self.slow) or 'none')}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one case came to.

    Attributes:
        epoch_s: seconds an epoch until the last worker was done, mean over the epochs after the first.
        wait_share: share of the time spent waiting for others, 0 to 1, mean over the workers that no rule
            slows (over all workers where a rule may slow each).
        accuracy: on the test samples after the last epoch, None where none was measured.
    """

    case: Case
    workers: int
    epoch_s: float
    wait_share: float
    accuracy: float | None


def parse_slow(text: str) -> tuple[str, ...]:
    """Read the slowness of one case: `none`, or rules joined by `+`.

    Raises:
        ValueError: one line that says what is not understood.
    """
    if text == "none":
        return ()
    rules = tuple(text.split("+"))
    if "none" in rules:
        raise ValueError(f"slowness {text!r}: 'none' stands alone, it cannot be joined with a rule")
    for rule in rules:
        parse(rule)
    return rules


def cases(strategies: Sequence[str], slows: Sequence[str]) -> list[Case]:
    """Return every strategy under every slowness, the strategies in the outer order.

    Raises:
        ValueError: a slowness that is not understood, or something that is given twice.
    """
    for what, given in (("strategy", strategies), ("slow", slows)):
        twice = [text for text in given if given.count(text) > 1]
        if twice:
            raise ValueError(f"--{what} {twice[0]} is given twice")
    parsed = [parse_slow(text) for text in slows]
    return [Case(strategy=strategy, slow=slow) for strategy in strategies for slow in parsed]


def row(case: Case, workers: int, sheet: TimeSheet, threads: int = 1) -> Row:
    """Return what the case came to, from the time sheet of its run; a process has so many worker threads."""
    epochs = sorted({entry.epoch for entry in sheet.entries if entry.epoch >= FIRST_EPOCH})
    if not epochs:
        raise ValueError("a comparison needs at least 2 epochs, for the first one only warms up")
    free = _free_workers([parse(text) for text in case.slow], workers)
    shares = [entry.share("wait") for entry in sheet.totals(FIRST_EPOCH) if entry.worker // threads in free]
    measured = timesheet.accuracy(sheet.epoch(epochs[-1]))
    return Row(
        case=case,
        workers=workers,
        epoch_s=sum(timesheet.wall_s(sheet.epoch(epoch)) for epoch in epochs) / len(epochs),
        wait_share=sum(shares) / len(shares),
        accuracy=measured,
    )


def baseline(rows: Sequence[Row]) -> Row | None:
    """Return the row that the others are compared with: bsp not slowed, else the first that is not slowed."""
    unslowed = [row for row in rows if not row.case.slow]
    bsp = [row for row in unslowed if row.case.strategy.partition(":")[0] == "bsp"]
    return next(iter(bsp or unslowed), None)


def ratio(row: Row, base: Row | None) -> float | None:
    """Return how many times as long an epoch took, None where there is nothing to compare with."""
    return row.epoch_s / base.epoch_s if base is not None and base.epoch_s else None


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the findings as numbers by name, the unit last."""
    base = baseline(rows)
    found: dict[str, float | None] = {}
    for row in rows:
        label = row.case.label
        found[f"epoch_{label}_s"] = row.epoch_s
        found[f"slowdown_{label}_ratio"] = ratio(row, base)
        found[f"wait_{label}_share"] = row.wait_share
        found[f"{label}_accuracy"] = row.accuracy
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def plain_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as flat objects."""
    base = baseline(rows)
    return [
        {
            "strategy": row.case.strategy,
            "slow": "+".join(row.case.slow) or "none",
            "workers": row.workers,
            "epoch_s": row.epoch_s,
            "slowdown_ratio": ratio(row, base),
            "wait_share": row.wait_share,
            "accuracy": row.accuracy,
        }
        for row in rows
    ]


def in_words(slow: Sequence[str]) -> str:
    """Say a slowness as a sentence without its full stop."""
    return "; ".join(_rule_in_words(parse(text)) for text in slow) or "nobody is slowed"


def sentences(rows: Sequence[Row]) -> list[str]:
    """Say what the figures mean."""
    said = []
    for row in rows:
        own = next((r for r in rows if r.case.strategy == row.case.strategy and not r.case.slow), None)
        if row.case.slow and own is not None:
            said.append(_cost(row, row.epoch_s / own.epoch_s))
    for slow in dict.fromkeys(row.case.slow for row in rows):
        alike = sorted((row for row in rows if row.case.slow == slow), key=lambda row: row.epoch_s)
        first, last = alike[0], alike[-1]
        gain = last.epoch_s / first.epoch_s
        if slow and gain >= _NOTICED:
            said.append(
                f"Where {in_words(slow)}, {first.case.strategy} was {times(gain)} times as fast as "
                f"{last.case.strategy}."
            )
    return said


def times(ratio: float) -> str:
    """Return a ratio as text, with as many digits as tell it from 1."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def _cost(row: Row, ratio: float) -> str:
    name = row.case.strategy
    opening = "In lockstep (bsp)" if name == "bsp" else f"Under {name}"
    slowed = _slowed_count([parse(text) for text in row.case.slow])
    who = f"{_number(slowed)} slow worker{'s' * (slowed > 1)} of {_number(row.workers)}"
    if ratio < _NOTICED:
        seen = f"({times(ratio)} times as long)"
        return f"{opening}, {who} made no difference that can be told from chance {seen}."
    everybody = "everybody" if name == "bsp" else "the whole training"
    return (
        f"{opening}, {who} made {everybody} {times(ratio)} times slower: "
        f"the others spent {row.wait_share:.0%} of their time waiting."
    )


def _free_workers(rules: Sequence[SlowRule], workers: int) -> set[int]:
    named = {rule.worker for rule in rules}
    free = set() if None in named else set(range(workers)) - named
    return free or set(range(workers))


def _slowed_count(rules: Sequence[SlowRule]) -> int:
    return len({rule.worker for rule in rules})


def _rule_in_words(rule: SlowRule) -> str:
    who = "a worker drawn every epoch" if rule.worker is None else f"worker {rule.worker}"
    what = f"{who} takes {rule.factor:g}x as long"
    if rule.when is None:
        return what
    if isinstance(rule.when, Burst):
        return f"{what} in {rule.when.slow_steps} of every {rule.when.period_steps} steps"
    return f"{what} from {rule.when.start:.0%} to {rule.when.end:.0%} of every epoch"


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def _slug(text: str) -> str:
    """`1:5@0.0-0.5` as `1_5_at_0p0_to_0p5`: different spellings stay different names."""
    for sign, word in ((".", "p"), ("@", "_at_"), ("-", "_to_"), ("/", "_of_")):
        text = text.replace(sign, word)
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
