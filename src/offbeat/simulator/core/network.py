"""The cost of messages and of tensor transfers, in seconds.

Nothing here moves data or knows of outages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NetworkCosts:
    """Identical links between all nodes.

    Source: the ring's cost, 2 (m - 1) alpha + 2 (m - 1) / m n / beta for n bytes among m members (Patarasuk
    and Yuan 2009, section 4). Deviation: adding costs nothing, and no two transfers share a link.

    Args:
        latency_s: alpha, duration of a message of length 0.
        bytes_per_s: beta, bandwidth of one link.
        spread: members end an all-reduce at different times, up to this share of its duration apart.

    Raises:
        ValueError: a number out of range.
    """

    latency_s: float = 1e-4
    bytes_per_s: float = 1e9 / 8
    spread: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < math.inf:
            raise ValueError(f"expected a latency of more than 0 s, got {self.latency_s}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"expected more than 0 bytes/s, got {self.bytes_per_s}")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"expected a spread from 0 to 1, got {self.spread}")

    def all_reduce_s(self, size_bytes: int, members: int) -> float:
        """Return the duration of a ring all-reduce, from the arrival of its last member."""
        steps = 2 * (members - 1)
        return steps * self.latency_s + steps / members * size_bytes / self.bytes_per_s

    def transfer_s(self, size_bytes: int) -> float:
        """Return the duration of a message from one node to another."""
        return self.latency_s + size_bytes / self.bytes_per_s
