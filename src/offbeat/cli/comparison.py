"""Comparison of strategies under the same slowness: the cases, the table, and sentences about it.

Nothing here starts a process or prints; `offbeat.cli.job` runs each case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from offbeat.cli import timesheet
from offbeat.cli.timesheet import TimeSheet
from offbeat.policies.stragglers.injection import Burst, Chance, SlowRule, parse_slow_rule

FIRST_EPOCH: Final = 1  # epoch 0 is a warm-up: connections, memory and caches are set up in it
_RATIO_MIN: Final = 1.05  # smaller ratios count as noise
_NUMBERS: Final = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve"),
)


@dataclass(frozen=True, kw_only=True)
class ComparisonCase:
    """One training of a comparison.

    Attributes:
        strategy: as on the command line.
        slow: the slowness rules of this case, empty for none.
    """

    strategy: str
    slow: tuple[str, ...]

    @property
    def label(self) -> str:
        """The case as a suffix of names: `bsp_1_5`."""
        return f"{_slug(self.strategy)}_{_slug('_'.join(self.slow) or 'none')}"


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The result of one case.

    Attributes:
        epoch_s: duration of an epoch in seconds, until the last worker ended it; mean over all but the first.
        wait_share: share of the time spent waiting for other workers, 0 to 1, mean over the workers that no
            rule slows (over all workers where a rule may slow each).
        accuracy: on the test samples after the last epoch, None where it was not measured.
    """

    case: ComparisonCase
    workers: int
    epoch_s: float
    wait_share: float
    accuracy: float | None


def parse_slowness(text: str) -> tuple[str, ...]:
    """Parse the slowness of one case: `none`, or rules joined by `+`.

    Raises:
        ValueError: the text is no slowness; the message is one line.
    """
    if text == "none":
        return ()
    rules = tuple(text.split("+"))
    if "none" in rules:
        raise ValueError(f"slowness {text!r}: 'none' stands alone, it cannot be joined with a rule")
    for rule in rules:
        parse_slow_rule(rule)
    return rules


def comparison_cases(strategies: Sequence[str], slows: Sequence[str]) -> list[ComparisonCase]:
    """Return every strategy under every slowness, in the order of the strategies.

    Raises:
        ValueError: a slowness is malformed, or something is given twice.
    """
    for what, given in (("strategy", strategies), ("slow", slows)):
        twice = [text for text in given if given.count(text) > 1]
        if twice:
            raise ValueError(f"--{what} {twice[0]} is given twice")
    parsed = [parse_slowness(text) for text in slows]
    return [ComparisonCase(strategy=strategy, slow=slow) for strategy in strategies for slow in parsed]


def comparison_row(case: ComparisonCase, workers: int, sheet: TimeSheet, threads: int = 1) -> ComparisonRow:
    """Return the result of a case from the time sheet of its run; `threads` is worker threads per process."""
    epochs = sorted({entry.epoch for entry in sheet.entries if entry.epoch >= FIRST_EPOCH})
    if not epochs:
        raise ValueError("a comparison needs at least 2 epochs, for the first one is a warm-up")
    free = _free_workers([parse_slow_rule(text) for text in case.slow], workers)
    shares = [entry.share("wait") for entry in sheet.totals(FIRST_EPOCH) if entry.worker // threads in free]
    measured = timesheet.accuracy(sheet.epoch(epochs[-1]))
    return ComparisonRow(
        case=case,
        workers=workers,
        epoch_s=sum(timesheet.wall_s(sheet.epoch(epoch)) for epoch in epochs) / len(epochs),
        wait_share=sum(shares) / len(shares),
        accuracy=measured,
    )


def baseline(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the row to compare with: that of bsp without slowness, else the first without slowness."""
    unslowed = [row for row in rows if not row.case.slow]
    bsp = [row for row in unslowed if row.case.strategy.partition(":")[0] == "bsp"]
    return next(iter(bsp or unslowed), None)


def ratio(row: ComparisonRow, base: ComparisonRow | None) -> float | None:
    """Return the duration of an epoch relative to that of `base`; None without a base."""
    return row.epoch_s / base.epoch_s if base is not None and base.epoch_s else None


def figures(rows: Sequence[ComparisonRow]) -> dict[str, float]:
    """Return the results as numbers by name, with the unit last."""
    base = baseline(rows)
    found: dict[str, float | None] = {}
    for row in rows:
        label = row.case.label
        found[f"epoch_{label}_s"] = row.epoch_s
        found[f"slowdown_{label}_ratio"] = ratio(row, base)
        found[f"wait_{label}_share"] = row.wait_share
        found[f"{label}_accuracy"] = row.accuracy
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def rows_as_dicts(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """Return the rows as flat dicts."""
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


def describe_slowness(slow: Sequence[str]) -> str:
    """Describe a slowness as a sentence without its full stop."""
    return "; ".join(_rule_in_words(parse_slow_rule(text)) for text in slow) or "no worker is slowed"


def summary_sentences(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return sentences that interpret the results."""
    texts = []
    for row in rows:
        own = next((r for r in rows if r.case.strategy == row.case.strategy and not r.case.slow), None)
        if row.case.slow and own is not None:
            texts.append(_cost(row, row.epoch_s / own.epoch_s))
    for slow in dict.fromkeys(row.case.slow for row in rows):
        alike = sorted((row for row in rows if row.case.slow == slow), key=lambda row: row.epoch_s)
        first, last = alike[0], alike[-1]
        gain = last.epoch_s / first.epoch_s
        if slow and gain >= _RATIO_MIN:
            texts.append(
                f"Where {describe_slowness(slow)}, {first.case.strategy} was {format_ratio(gain)} times as "
                f"fast as {last.case.strategy}."
            )
    return texts


def format_ratio(ratio: float) -> str:
    """Format a ratio, with two decimals below 2 and one above."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def _cost(row: ComparisonRow, ratio: float) -> str:
    name = row.case.strategy
    opening = "In lockstep (bsp)" if name == "bsp" else f"Under {name}"
    slowed = _slowed_count([parse_slow_rule(text) for text in row.case.slow])
    slow_workers = f"{_number(slowed)} slow worker{'s' * (slowed > 1)} of {_number(row.workers)}"
    if ratio < _RATIO_MIN:
        measured = f"({format_ratio(ratio)} times as long)"
        return f"{opening}, {slow_workers} made no difference beyond noise {measured}."
    slowed_part = "every worker" if name == "bsp" else "the whole training"
    return (
        f"{opening}, {slow_workers} made {slowed_part} {format_ratio(ratio)} times slower: "
        f"the other workers spent {row.wait_share:.0%} of their time waiting."
    )


def _free_workers(rules: Sequence[SlowRule], workers: int) -> set[int]:
    named = {rule.worker for rule in rules}
    free = set() if None in named else set(range(workers)) - named
    return free or set(range(workers))


def _slowed_count(rules: Sequence[SlowRule]) -> int:
    return len({rule.worker for rule in rules})


def _rule_in_words(rule: SlowRule) -> str:
    worker = "a worker drawn every epoch" if rule.worker is None else f"worker {rule.worker}"
    text = f"{worker} takes {rule.factor:g}x as long"
    if rule.applies_in is None:
        return text
    if isinstance(rule.applies_in, Burst):
        return f"{text} in {rule.applies_in.slow_steps} of every {rule.applies_in.period_steps} steps"
    if isinstance(rule.applies_in, Chance):
        return f"{text} in each step with probability {rule.applies_in.probability:g}"
    return f"{text} from {rule.applies_in.start:.0%} to {rule.applies_in.end:.0%} of every epoch"


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def _slug(text: str) -> str:
    """Return `1:5@0.0-0.5` as `1_5_at_0p0_to_0p5`: different spellings stay different names."""
    for sign, word in ((".", "p"), ("@", "_at_"), ("-", "_to_"), ("/", "_of_")):
        text = text.replace(sign, word)
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
