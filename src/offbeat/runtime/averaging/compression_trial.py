"""Which compression of gradients makes the steps of a job shortest, measured in its first steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.numerics.compressors.registry import parse_compression

CANDIDATES: Final = ("bf16", "powersgd:2")
_MEASURED_ROUNDS = 5
ROUNDS: Final = (1 + len(CANDIDATES)) * (1 + _MEASURED_ROUNDS) + 1
"""After so many rounds a trial of `CANDIDATES` is over."""

_GAIN_MIN = 0.05  # of the time of a step; less is not worth what a compression changes in the gradients


class CompressionTrial:
    """Tries gradients that are sent whole, and then with several compressions, each for a few rounds.

    A round's time counts all of a step: what compressing costs the processor, and what of the exchange the
    backward pass hides. All members of a group that does not change call this with the same times, so they
    change and choose at the same rounds. A compression is chosen over those before it if steps are at least
    5 % shorter.

    Args:
        candidates: the compressions, from the most exact.

    Attributes:
        chosen: the compression that stays; None until it is chosen, "" for none.
        times_s: by name of what was tried, "" for none, the median time of a step.
    """

    def __init__(self, candidates: Sequence[str] = CANDIDATES) -> None:
        self._names = ("", *candidates)
        self._ended_rounds = 0
        self._measured_s: list[float] = []
        self.chosen: str | None = None
        self.times_s: dict[str, float] = {}

    def end_round(self, previous_round_s: float) -> bool:
        """End a round; return whether `compression` has changed for the next one.

        Args:
            previous_round_s: how long the round before it took, the same number on all members.
        """
        before = self.compression
        if self._ended_rounds and self.chosen is None:
            self._measure(self._ended_rounds - 1, previous_round_s)
        self._ended_rounds += 1
        return self.compression != before

    def _measure(self, round_: int, time_s: float) -> None:
        trial, number = divmod(round_, 1 + _MEASURED_ROUNDS)
        if number:  # the first round after a change is longer
            self._measured_s.append(time_s)
        if number == _MEASURED_ROUNDS:
            self.times_s[self._names[trial]] = median(self._measured_s)
            self._measured_s.clear()
            if len(self.times_s) == len(self._names):
                self._choose()

    def _choose(self) -> None:
        chosen = ""
        for name, time_s in self.times_s.items():
            if time_s <= (1 - _GAIN_MIN) * self.times_s[chosen]:
                chosen = name
        self.chosen = chosen

    @property
    def compression(self) -> str:
        """The compression of the round under way, "" for none."""
        if self.chosen is not None:
            return self.chosen
        return self._names[min(self._ended_rounds // (1 + _MEASURED_ROUNDS), len(self._names) - 1)]

    @property
    def method(self) -> CompressionMethod | None:
        """The method of `compression`, None for none."""
        return parse_compression(self.compression) if self.compression else None

    def __str__(self) -> str:
        """Return what was chosen, and why."""
        times = ", ".join(f"{time_s:.3g} s {_described(name)}" for name, time_s in self.times_s.items())
        return f"gradients are sent {_described(self.chosen or '')}: a step took {times}"


def _described(name: str) -> str:
    return f"with compress={name}" if name else "whole"
