"""Detection of a program's writes to parameters and optimizer state between the steps of a session.

Parameters are compared by version counter and address, states by identity: writes in place through
`parameter.data`, or into a tensor of the state, leave no trace and are not detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from offbeat.errors import OffbeatError
from offbeat.runtime.training.trained import TrainingState


class _ParameterState(NamedTuple):
    version: int
    address: int
    state: Any


class WriteDetector:
    """What the program has written since the last `mark`.

    Args:
        trained: the parameters and states to watch.
    """

    def __init__(self, trained: TrainingState) -> None:
        self._watched: list[tuple[str, torch.Tensor, Optimizer]] = [
            (name, parameter, optimizer)
            for optimizer, group in zip(trained.optimizer_of_group, trained.groups, strict=True)
            for name, parameter in trained.parameters_of(group).items()
        ]
        self._collected: list[str] = []
        self.mark()

    def collect(self, optimizer: Optimizer | None = None) -> None:
        """Keep what has been written since the last `mark`, for `pop`; see `written_since_mark`."""
        now = self._now()
        self._collected += self._changed(now, optimizer)
        for place, (_, _, owner) in enumerate(self._watched):
            if optimizer is None or owner is optimizer:
                self._marks[place] = now[place]

    def pop(self) -> list[str]:
        """Return what has been written since the last call of this method."""
        self.collect()
        taken, self._collected = self._collected, []
        return taken

    def mark(self) -> None:
        """Record the current values as the results of training."""
        self._marks = self._now()

    def written_since_mark(self, optimizer: Optimizer | None = None) -> list[str]:
        """Return what has been written since `mark`: "0.weight", or "the optimizer's state of 0.weight".

        Args:
            optimizer: restricts the check to its parameters; another optimizer may have stepped its own.
        """
        return self._changed(self._now(), optimizer)

    def _changed(self, current: Sequence[_ParameterState], optimizer: Optimizer | None) -> list[str]:
        return [
            name if now[:2] != before[:2] else f"the optimizer's state of {name}"
            for (name, _, owner), now, before in zip(self._watched, current, self._marks, strict=True)
            if (optimizer is None or owner is optimizer)
            and (now[:2] != before[:2] or now.state is not before.state)
        ]

    def _now(self) -> list[_ParameterState]:
        return [
            _ParameterState(one._version, one.data_ptr(), optimizer.state.get(one))
            for _, one, optimizer in self._watched
        ]


def check_all_wrote(written: Sequence[str], total: float, workers: int) -> None:
    """Reject writes that this worker has made and others have not, since replicas would differ.

    Args:
        written: by this worker, as `WriteDetector.pop` returned it.
        total: the number of writes of all workers together.
        workers: the number of workers.

    Raises:
        OffbeatError: names the first write.
    """
    if written and total != len(written) * workers:
        raise OffbeatError(
            f"the program has changed {written[0]} ({len(written)} such changes) between two steps, and not "
            "on every worker: change parameters and optimizer state alike on all of them, or before join"
        )
