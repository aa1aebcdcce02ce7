"""The numbers at the end of a round's last bucket, which so cost no message of their own.

A member contributes its own numbers, and receives their sums over all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.runtime.averaging.interface import FLOAT32_PER_FLOAT64, join_float64, split_float64

_FLAGS = 5  # weights, members with a stale bucket, writes, members with a preemption signal, times
_LISTS = 3  # with one number per member: offsets, own blocks, late blocks


@dataclass(frozen=True, kw_only=True)
class RoundSums:
    """What the trailer of a round says when it is summed over the members.

    Attributes:
        weight: of all members together; 0 if no member had a sample.
        stale: members that have changed a gradient after they sent its bucket.
        writes: of the program, on all members.
        preempted: members that know of a preemption signal.
        round_s: of all members, how long the round before took, from the end of the one before that, in
            seconds.
        offsets_s: by member, when it began the round, in seconds since its previous round.
        contributions: by member, numbers of blocks in its gradients: its own, late ones.
        used: by parameter, whether a member with weight has a gradient; if none has weight, whether all
            members have one, which they keep.
    """

    weight: float
    stale: float
    writes: float
    preempted: float
    round_s: float
    offsets_s: Sequence[float]
    contributions: Sequence[tuple[int, int]]
    used: Sequence[bool]
    _split_hyperparameters: Sequence[float]

    @property
    def hyperparameters(self) -> list[float]:
        """The first member's hyperparameters."""
        return join_float64(self._split_hyperparameters)


@dataclass(frozen=True)
class TrailerLayout:
    """Where each number stands in a trailer: equal on all members, whatever groups they were in.

    Attributes:
        capacity: members that the lists have room for.
        parameters: the number of parameters.
        hyperparameters: the number of hyperparameters.
    """

    capacity: int
    parameters: int
    hyperparameters: int

    @property
    def length(self) -> int:
        """Numbers in a trailer."""
        return self._used_start + self.parameters + FLOAT32_PER_FLOAT64 * self.hyperparameters

    @property
    def _used_start(self) -> int:
        return _FLAGS + _LISTS * self.capacity

    def encode(
        self,
        position: int,
        *,
        weight: float,
        is_stale: bool,
        writes: int,
        is_preempted: bool,
        round_s: float,
        offset_s: float,
        has_gradient: Sequence[bool],
        hyperparameters: Sequence[float],
    ) -> list[float]:
        """Return the contribution of the member at a position, without its blocks (see `RoundSums`).

        Args:
            position: the member's position; only position 0 contributes hyperparameters.
            weight: of its gradients; 0 if it has no new ones.
            has_gradient: by parameter; the gradients of a member without weight count in `used` only if
                there are no others.
        """
        values = [0.0] * self.length
        values[:_FLAGS] = weight, float(is_stale), float(writes), float(is_preempted), round_s
        values[_FLAGS + position] = offset_s
        first = self._used_start
        values[first : first + self.parameters] = used_counts(has_gradient, weight, self.capacity)
        if position == 0:
            values[first + self.parameters :] = split_float64(hyperparameters)
        return values

    def block_indices(self, position: int) -> tuple[int, int]:
        """Return the indices of a member's count of own blocks and of its count of late blocks."""
        own = _FLAGS + self.capacity + position
        return own, own + self.capacity

    def decode(self, values: Sequence[float], size: int) -> RoundSums:
        """Return the sums over a group of this size."""
        indices = [self.block_indices(position) for position in range(size)]
        first = self._used_start
        weight, stale, writes, preempted, round_s = values[:_FLAGS]
        return RoundSums(
            weight=weight,
            stale=stale,
            writes=writes,
            preempted=preempted,
            round_s=round_s,
            offsets_s=values[_FLAGS : _FLAGS + size],
            contributions=[(int(values[own]), int(values[late])) for own, late in indices],
            used=decode_used(values[first : first + self.parameters], size),
            _split_hyperparameters=values[first + self.parameters :],
        )


def used_counts(has_gradient: Sequence[bool], weight: float, size: int) -> list[float]:
    """Return by parameter what a member adds to the counts of `decode_used`.

    One member with weight suffices, without weight all members are needed.

    Args:
        has_gradient: by parameter, whether the member has a gradient.
        weight: of the member's gradients.
        size: of the group, or more.
    """
    count = float(size) if weight else 1.0
    return [count * one for one in has_gradient]


def decode_used(counts: Sequence[float], size: int) -> list[bool]:
    """Return `RoundSums.used` from the sums of all members' counts in a group of this size."""
    return [count >= size for count in counts]
