"""The state of a training at the ends of its epochs: snapshots of the model, and what else is rolled back.

Nothing here evaluates, waits or decides.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from offbeat.runtime.devices.interface import Accelerator
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.isolation import GlobalRandomState
from offbeat.runtime.validation.snapshot import Snapshot, unwrap


class Stateful(Protocol):
    """An object with a state that can be saved and restored, such as an optimizer or a scheduler."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state."""


@dataclass(kw_only=True)
class EpochState:
    """The end of an epoch whose metrics may still matter: its snapshot, and what rolling back to it needs."""

    snapshot: Snapshot
    cancelled: SignalSafeEvent
    states: list[Any]
    randomness: GlobalRandomState | None


class ValidatedTraining:
    """Captures the state of a training, in memory that is reused, and restores it.

    Args:
        model: in training; may be wrapped.
        restores: restored in addition to the model and the global random numbers.
        goes_back: states are captured for `restore` too, not only for evaluating the model.
        accelerators: those that hold the model.

    Attributes:
        accelerators: see above.
        copy_s: time that snapshots have cost the training thread, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        restores: Sequence[Stateful],
        *,
        goes_back: bool,
        accelerators: Sequence[Accelerator],
    ) -> None:
        self._model, self._restores, self._goes_back = model, restores, goes_back
        self._free: list[Snapshot] = []
        self.accelerators = accelerators
        self.copy_s = 0.0

    @property
    def model(self) -> nn.Module:
        """The model in training, without wrappers.

        Raises:
            OffbeatError: see `unwrap`.
        """
        return unwrap(self._model)

    def capture(self, *, shared: bool) -> EpochState:
        """Return the current state.

        Args:
            shared: other processes are to read the snapshot.

        Raises:
            OffbeatError: the model cannot be copied.
        """
        start_s = time.perf_counter()
        snapshot = self._free.pop() if self._free else self.make_snapshot(shared=shared)
        snapshot.capture(self.model)
        moment = EpochState(
            snapshot=snapshot,
            cancelled=SignalSafeEvent(),
            states=[copy.deepcopy(one.state_dict()) for one in self._restores] if self._goes_back else [],
            randomness=GlobalRandomState() if self._goes_back else None,
        )
        self.copy_s += time.perf_counter() - start_s
        return moment

    def make_snapshot(self, *, shared: bool) -> Snapshot:
        """Return a snapshot in new memory, without values."""
        return Snapshot(shared=shared, accelerators=self.accelerators)

    def restore(self, moment: EpochState) -> None:
        """Restore an earlier state."""
        moment.snapshot.restore_to(self.model)
        for stateful, state in zip(self._restores, moment.states, strict=True):
            stateful.load_state_dict(state)
        assert moment.randomness is not None
        moment.randomness.restore()

    def reuse(self, unused: Snapshot) -> None:
        """Use the memory of a snapshot for the next one."""
        self._free.append(unused)

    def drop_unused(self) -> None:
        """Drop the memory that is kept for the next snapshots."""
        self._free.clear()
