"""What it costs to say something or to send tensors; and which nodes cannot hear each other.

Nothing here moves anything: these are times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Network:
    """Lines that are all alike.

    Source: the ring's cost, 2 (m - 1) alpha + 2 (m - 1) / m n / beta for n bytes among m members (Patarasuk
    and Yuan 2009, section 4). Deviation: adding costs nothing, and nobody shares a line.

    Args:
        latency_s: alpha, how long a message takes that has no length.
        bytes_per_s: beta, of one line.
        spread: members end an all-reduce at different times, apart by up to this share of it.

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
        """Return how long a ring all-reduce takes after the last member has begun."""
        steps = 2 * (members - 1)
        return steps * self.latency_s + steps / members * size_bytes / self.bytes_per_s

    def transfer_s(self, size_bytes: int) -> float:
        """Return how long a message takes from one node to another."""
        return self.latency_s + size_bytes / self.bytes_per_s
