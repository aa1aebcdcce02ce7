"""Notices what a program writes to parameters and optimizer state between the steps of a session.

Parameters are compared by version and by where they lie, states by identity: what is written in place through
`parameter.data`, or into a tensor of the state, leaves no trace and is not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from offbeat.errors import OffbeatError
from offbeat.runtime.training.trained import Trained


class _Mark(NamedTuple):
    version: int
    address: int
    state: Any


class Writes:
    """What the program has written since the last `note`.

    Args:
        trained: whose parameters and states.
    """

    def __init__(self, trained: Trained) -> None:
        self._watched: list[tuple[str, torch.Tensor, Optimizer]] = [
            (name, parameter, optimizer)
            for optimizer, group in zip(trained.optimizer_of_group, trained.groups, strict=True)
            for name, parameter in trained.parameters_of(group).items()
        ]
        self._collected: list[str] = []
        self.note()

    def collect(self, optimizer: Optimizer | None = None) -> None:
        """Keeps what has been written since the last `note`, for `take`; see `found`."""
        now = self._now()
        self._collected += self._changed(now, optimizer)
        for place, (_, _, owner) in enumerate(self._watched):
            if optimizer is None or owner is optimizer:
                self._marks[place] = now[place]

    def take(self) -> list[str]:
        """Returns what has been written since the last call of this."""
        self.collect()
        taken, self._collected = self._collected, []
        return taken

    def note(self) -> None:
        """Takes everything as it is now for what training has made of it."""
        self._marks = self._now()

    def found(self, optimizer: Optimizer | None = None) -> list[str]:
        """Returns what has been written since: "0.weight", or "the optimizer's state of 0.weight".

        Args:
            optimizer: whose parameters alone are looked at; another one may have stepped its own.
        """
        return self._changed(self._now(), optimizer)

    def _changed(self, marks: Sequence[_Mark], optimizer: Optimizer | None) -> list[str]:
        return [
            name if now[:2] != before[:2] else f"the optimizer's state of {name}"
            for (name, _, owner), now, before in zip(self._watched, marks, self._marks, strict=True)
            if (optimizer is None or owner is optimizer)
            and (now[:2] != before[:2] or now.state is not before.state)
        ]

    def _now(self) -> list[_Mark]:
        return [
            _Mark(one._version, one.data_ptr(), optimizer.state.get(one))
            for _, one, optimizer in self._watched
        ]


def check_all_wrote(written: Sequence[str], total: float, workers: int) -> None:
    """Refuses what this worker has written and others have not, for replicas differ by that.

    Args:
        written: by this worker, as `Writes.take` returned it.
        total: how much all workers have written together.
        workers: how many they are.

    Raises:
        OffbeatError: names the first of it.
    """
    if written and total != len(written) * workers:
        raise OffbeatError(
            f"the program has changed {written[0]} ({len(written)} such changes) between two steps, and not "
            "on every worker: change parameters and optimizer state alike on all of them, or before join"
        )
