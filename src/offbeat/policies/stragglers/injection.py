"""Injected slowness: one-line rules that name a worker, its factor of slowness, and when it applies.

Every process uses its own copy and all copies agree: random draws come from the seed, the rule's index in
the list, and the epoch or the worker's step, never from shared or global state. This module never sleeps;
the session sleeps (factor - 1) times the compute time that it measured.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

RULE_SYNTAX = (
    "WORKER:FACTOR or random:FACTOR, and after it @START-END (parts of an epoch), @burst=SLOW/PERIOD "
    "(steps), @p=PROBABILITY (of each step) or nothing"
)
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_RULE = re.compile(
    rf"(?P<worker>random|[0-9]+):(?P<factor>{_NUMBER})"
    rf"(?:@(?:(?P<start>{_NUMBER})-(?P<end>{_NUMBER})|burst=(?P<slow>[0-9]+)/(?P<period>[0-9]+)"
    rf"|p=(?P<probability>{_NUMBER})))?"
)
_TEXT_LENGTH_MAX = 100


@dataclass(frozen=True, kw_only=True)
class EpochPart:
    """From `start` (included) to `end` (excluded) of every epoch, as parts of its steps, 0 to 1."""

    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.start < self.end <= 1.0:
            raise ValueError(
                f"expected a part of an epoch, 0 <= start < end <= 1, got {self.start:g}-{self.end:g}"
            )


@dataclass(frozen=True, kw_only=True)
class Burst:
    """The first `slow_steps` of every `period_steps` steps, counted over the whole run."""

    slow_steps: int
    period_steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.slow_steps <= self.period_steps:
            raise ValueError(
                f"expected a burst of 1 to {self.period_steps} slow steps in a period of "
                f"{self.period_steps}, got {self.slow_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class Chance:
    """Each step with the same probability, above 0 and at most 1; drawn for each rule and step."""

    probability: float

    def __post_init__(self) -> None:
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(
                f"expected the probability of a slow step, above 0 and at most 1, got {self.probability:g}"
            )


@dataclass(frozen=True, kw_only=True)
class SlowRule:
    """One worker takes `factor` times as long, always or at times.

    Attributes:
        worker: the worker's id, or None for one that is drawn uniformly in each epoch.
        factor: how many times as long a step takes; finite, at least 1 (1 = not slower).
        applies_in: None for always.
    """

    worker: int | None
    factor: float
    applies_in: EpochPart | Burst | Chance | None = None

    def __post_init__(self) -> None:
        if self.worker is not None and self.worker < 0:
            raise ValueError(f"expected a worker of at least 0, got {self.worker}")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"expected a finite factor of at least 1 (1 = not slower), got {self.factor:g}")


def parse_slow_rule(text: str) -> SlowRule:
    """Read one rule: `1:5`, `random:3`, `1:5@0.0-0.5`, `random:3@0.5-1`, `1:5@burst=20/100`, `1:5@p=0.05`.

    Raises:
        ValueError: text that is no rule; the message names the text, the expected form and the error.
    """
    quoted = repr(text[:_TEXT_LENGTH_MAX])
    match = _RULE.fullmatch(text) if len(text) <= _TEXT_LENGTH_MAX else None
    if match is None:
        raise ValueError(
            f"slowness {quoted} is not understood: expected {RULE_SYNTAX}, e.g. 1:5, random:3@0.0-0.5"
        )
    when: EpochPart | Burst | Chance | None = None
    try:
        if match["start"] is not None:
            when = EpochPart(start=float(match["start"]), end=float(match["end"]))
        elif match["slow"] is not None:
            when = Burst(slow_steps=int(match["slow"]), period_steps=int(match["period"]))
        elif match["probability"] is not None:
            when = Chance(probability=float(match["probability"]))
        worker = None if match["worker"] == "random" else int(match["worker"])
        return SlowRule(worker=worker, factor=float(match["factor"]), applies_in=when)
    except ValueError as error:
        raise ValueError(f"slowness {quoted}: {error}") from None


class InjectedSlowness:
    """Evaluates slowness rules: the factor of each worker in each step.

    Rules that apply to the same worker and step multiply, like a temporary delay on a slow machine: `1:2` and
    `random:3` make worker 1, when drawn, 6 times slower.

    Args:
        rules: any number, none of them naming a worker outside 0 to `workers` - 1.
        workers: number of workers, at least 1; a random rule draws among them.
        seed: two jobs with the same seed draw the same workers and steps.

    Raises:
        ValueError: a bad count, or a rule about a worker that does not exist.
    """

    def __init__(self, rules: Sequence[SlowRule], *, workers: int, seed: int) -> None:
        if workers < 1:
            raise ValueError(f"expected at least 1 worker, got {workers}")
        for rule in rules:
            if rule.worker is not None and rule.worker >= workers:
                raise ValueError(
                    f"slowness names worker {rule.worker}, but the workers are 0 to {workers - 1}: "
                    "name one of those or 'random'"
                )
        self._rules = tuple(rules)
        self._workers = workers
        self._seed = seed

    def factor(
        self, worker: int, epoch: int, step_in_epoch: int, steps_per_epoch: int | None, step: int
    ) -> float:
        """Return how many times as long this step takes; 1.0 is normal.

        Args:
            worker: the worker's id.
            epoch: counted from 0.
            step_in_epoch: counted from 0 in each epoch.
            steps_per_epoch: None if unknown; then no rule may use a part of an epoch.
            step: counted from 0 over the whole run.

        Raises:
            ValueError: a rule uses a part of an epoch and `steps_per_epoch` is None or less than 1.
        """
        product = 1.0
        for index, rule in enumerate(self._rules):
            # The time is checked first, so that a missing steps_per_epoch raises on every worker.
            if not _applies(rule.applies_in, step_in_epoch, steps_per_epoch, step) or worker != (
                _drawn_worker(self._seed, epoch, index, self._workers) if rule.worker is None else rule.worker
            ):
                continue
            if not isinstance(rule.applies_in, Chance) or (
                random.Random(f"slowness {self._seed} {index} {step}").random() < rule.applies_in.probability
            ):
                product *= rule.factor
        return product


def _applies(
    when: EpochPart | Burst | Chance | None, step_in_epoch: int, steps_per_epoch: int | None, step: int
) -> bool:
    if when is None or isinstance(when, Chance):  # its steps are drawn afterwards, for the rule's worker only
        return True
    if isinstance(when, Burst):
        return step % when.period_steps < when.slow_steps
    if steps_per_epoch is None or steps_per_epoch < 1:
        raise ValueError(
            f"slowness in the part {when.start:g}-{when.end:g} of an epoch needs the number of steps in an "
            f"epoch, got {steps_per_epoch}: use session.batches, which knows it, or a burst instead"
        )
    # A quotient of two integers is rounded just as the rule's decimals were, so 0.7 begins at step 7 of 10.
    return when.start <= step_in_epoch / steps_per_epoch < when.end


@lru_cache(maxsize=64)
def _drawn_worker(seed: int, epoch: int, index: int, workers: int) -> int:
    """Draw the epoch's slow worker; seeded by a string, which `random` hashes alike in all processes."""
    return random.Random(f"slowness {seed} {epoch} {index}").randrange(workers)
