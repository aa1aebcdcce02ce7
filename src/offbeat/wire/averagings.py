"""The averagings of models in a run log: how many there were, and how many moved the mean of all models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from offbeat.events import Action, AverageModels, Event, ModelsAveraged


class AveragingCounts(NamedTuple):
    """Averagings of two workers or more.

    Attributes:
        total: all of them.
        incomplete: those that some members ended with the mean and others without it, because one was lost or
            could not be reached. With equal weights only these move the mean of all models.
    """

    total: int
    incomplete: int


def count_averagings(entries: Iterable[Event | Action]) -> AveragingCounts:
    """Count the averagings of a run log."""
    groups: dict[int, tuple[int, ...]] = {}
    receivers: dict[int, set[int]] = {}
    for entry in entries:
        if isinstance(entry, AverageModels) and len(entry.group) > 1:
            groups[entry.exchange_id], receivers[entry.exchange_id] = entry.group, set()
        elif isinstance(entry, ModelsAveraged) and entry.has_mean and entry.exchange_id in groups:
            receivers[entry.exchange_id].add(entry.worker)
    incomplete = [
        exchange_id
        for exchange_id, group in groups.items()
        if receivers[exchange_id] and not receivers[exchange_id].issuperset(group)
    ]
    return AveragingCounts(len(groups), len(incomplete))
