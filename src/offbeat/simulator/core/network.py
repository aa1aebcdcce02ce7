"""The cost of messages and of tensor transfers, in seconds.

Nothing here moves data or knows of outages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Line:
    """The line that joins one node to all others.

    Args:
        latency_s: alpha, duration of a message of length 0.
        bytes_per_s: beta, bandwidth in each direction.

    Raises:
        ValueError: a number out of range.
    """

    latency_s: float = 1e-4
    bytes_per_s: float = 1e9 / 8

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < math.inf:
            raise ValueError(f"expected a latency of more than 0 s, got {self.latency_s}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"expected more than 0 bytes/s, got {self.bytes_per_s}")


@dataclass(frozen=True, kw_only=True)
class NetworkCosts(Line):
    """The lines of all nodes: identical ones, but for those of some workers.

    A message passes the lines of its sender and of its receiver: it has the longer latency and the lower
    bandwidth of the two. In a ring each of the 2 (m - 1) steps takes as long as on its slowest line, because
    no member can send on what it has not received.

    Source: the ring's cost, 2 (m - 1) alpha + 2 (m - 1) / m n / beta for n bytes among m members (Patarasuk
    and Yuan 2009, section 4). Deviation: adding costs nothing, and no two transfers share a line. A worker is
    in one exchange at a time, so exchanges never have to; only the state for a worker that joins travels at
    the same time as gradients.

    Args:
        latency_s, bytes_per_s: of each node without a line of its own; see `Line`.
        spread: members end an all-reduce at different times, up to this share of its duration apart.
        lines: by worker, a line of its own.

    Raises:
        ValueError: a number out of range.
    """

    spread: float = 0.05
    lines: Mapping[int, Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.spread <= 1:
            raise ValueError(f"expected a spread from 0 to 1, got {self.spread}")

    def message_s(self, *nodes: int) -> float:
        """Return the duration of a message of length 0 between nodes: the longest latency of their lines."""
        return max(self.lines.get(node, self).latency_s for node in nodes) if self.lines else self.latency_s

    def all_reduce_s(self, size_bytes: int, members: Sequence[int]) -> float:
        """Return the duration of a ring all-reduce, from the arrival of its last member."""
        steps = 2 * (len(members) - 1)
        if not steps:
            return 0.0
        return steps * self.message_s(*members) + steps / len(members) * size_bytes / self._rate(members)

    def transfer_s(self, size_bytes: int, *nodes: int) -> float:
        """Return the duration of a message from one of two nodes to the other."""
        return self.message_s(*nodes) + size_bytes / self._rate(nodes)

    def _rate(self, nodes: Sequence[int]) -> float:
        """Return the lowest bandwidth of the nodes' lines, in bytes/s."""
        if not self.lines:
            return self.bytes_per_s
        return min(self.lines.get(node, self).bytes_per_s for node in nodes)
