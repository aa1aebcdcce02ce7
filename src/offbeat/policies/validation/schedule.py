"""When epochs are validated: which snapshots are taken, what is evaluated, and when results are reported.

Nothing here evaluates, copies or waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from offbeat.errors import ProtocolError

WhenFull: TypeAlias = Literal["block", "skip"]
PENDING_MAX: Final = 2
"""Snapshots that may wait in addition to the one that is evaluated; the paper leaves it open."""


@dataclass(frozen=True, kw_only=True)
class TakeSnapshot:
    """Take a snapshot of the model and evaluate its parts; `parts` are positions in the set."""

    epoch: int
    parts: tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class WaitForValidation:
    """Wait until the validation of `epoch` has ended, and ask again."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class SkipValidation:
    """Do not validate this epoch: the largest allowed number of snapshots is in use."""

    epoch: int


def split_even(samples: int, parts: int) -> tuple[range, ...]:
    """Split positions 0 to `samples` - 1 into contiguous parts whose sizes differ by at most 1.

    Returns:
        `parts` ranges, longer ones first; fewer where there are fewer samples, so that none is empty.

    Raises:
        ValueError: no samples, or no parts.
    """
    if samples < 1 or parts < 1:
        raise ValueError(f"expected at least 1 sample and 1 part, got {samples} and {parts}")
    parts = min(parts, samples)
    size, remainder = divmod(samples, parts)
    starts = [part * size + min(part, remainder) for part in range(parts + 1)]
    return tuple(range(starts[part], starts[part + 1]) for part in range(parts))


@dataclass(kw_only=True)
class _Pending:
    """An epoch whose validation has not been reported; `results` by part, None where there are none."""

    parts: int
    results: dict[int, Any] | None = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.results is None or len(self.results) == self.parts


class ValidationScheduler:
    """Decides at the end of each epoch whether it is validated now, later or not, and reports in order.

    Source: the overlapped validation paper, algorithm of the validation threads: one training thread, T
    validation threads, the set split into T equal contiguous parts. Deviation: the paper leaves open what
    happens when the validation of an epoch outlasts the next one; here up to `pending_max` snapshots wait in
    addition to the one that is evaluated, then training waits, or the epoch is skipped.

    Args:
        pending_max: at least 0; at most one snapshot more is alive.
        when_full: what happens at the end of an epoch then: "block" or "skip".

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, *, pending_max: int = PENDING_MAX, when_full: WhenFull = "block") -> None:
        if pending_max < 0:
            raise ValueError(f"expected max_pending to be at least 0 snapshots, got {pending_max}")
        if when_full not in get_args(WhenFull):
            raise ValueError(f"expected when_full to be block or skip, got {when_full!r}")
        self._pending_max, self._when_full = pending_max, when_full
        self._pending: dict[int, _Pending] = {}  # by epoch, oldest first

    @property
    def live_epochs(self) -> tuple[int, ...]:
        """The epochs whose snapshots are still needed, oldest first."""
        return tuple(epoch for epoch, pending in self._pending.items() if pending.results is not None)

    def missing_parts(self, epoch: int) -> tuple[int, ...]:
        """Return the parts of an epoch that are not evaluated yet, by number; none if the epoch is over."""
        pending = self._pending.get(epoch)
        if pending is None or pending.results is None:
            return ()
        return tuple(part for part in range(pending.parts) if part not in pending.results)

    def on_epoch_ended(
        self, epoch: int, parts: Sequence[range]
    ) -> TakeSnapshot | WaitForValidation | SkipValidation:
        """Decide what happens to the epoch that has ended; after `WaitForValidation` it must be called again.

        Args:
            epoch: later than those before, apart from dropped ones (see `drop_after`).
            parts: at least one; positions of the validation set, as from `split_even`.

        Raises:
            ProtocolError: epochs must come in order.
        """
        if self._pending and epoch <= max(self._pending):
            raise ProtocolError(f"epoch {epoch} ends after epoch {max(self._pending)} has ended")
        alive = self.live_epochs
        if len(alive) <= self._pending_max:
            self._pending[epoch] = _Pending(parts=len(parts))
            return TakeSnapshot(epoch=epoch, parts=tuple(parts))
        if self._when_full == "block":
            return WaitForValidation(epoch=alive[0])
        self._pending[epoch] = _Pending(parts=0, results=None)
        return SkipValidation(epoch=epoch)

    def on_part_done(self, epoch: int, part: int, result: Any) -> tuple[Any, ...] | None:
        """Record the result of a part.

        Returns:
            The results of all parts, in the order of the set, if this was the last one; otherwise None.

        Raises:
            ProtocolError: there is no such part, or it has been evaluated.
        """
        pending = self._pending.get(epoch)
        if pending is None or pending.results is None or part not in self.missing_parts(epoch):
            raise ProtocolError(f"expected a part that is being evaluated, got part {part} of epoch {epoch}")
        pending.results[part] = result
        return tuple(pending.results[index] for index in range(pending.parts)) if pending.is_over else None

    def fail(self, epoch: int) -> None:
        """End an epoch under way without results, because a part has failed."""
        self._pending[epoch].results = None

    def pop_finished(self) -> int | None:
        """Return the next epoch that has ended, each once and in order; None where there is none."""
        for epoch, pending in self._pending.items():
            if not pending.is_over:
                return None
            del self._pending[epoch]
            return epoch
        return None

    def drop_after(self, after: int) -> tuple[int, ...]:
        """Drop the epochs after `after`, to which training has returned; return the dropped ones."""
        dropped = tuple(epoch for epoch in self._pending if epoch > after)
        for epoch in dropped:
            del self._pending[epoch]
        return dropped
