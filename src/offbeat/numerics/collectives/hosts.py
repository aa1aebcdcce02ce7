"""Which all-reduce in two levels suits workers on several hosts. Pure, and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence


def hierarchy_of(hosts: Sequence[str]) -> str | None:
    """Return the all-reduce that sums inside each host, and these sums between hosts.

    Args:
        hosts: of the workers, in the order of their ranks.

    Returns:
        `torus:G` where several hosts have G workers each, of consecutive ranks, and G is at least 2;
        else None.
    """
    count = len({*hosts})
    per_host, rest = divmod(len(hosts), max(1, count))
    if count < 2 or per_host < 2 or rest:
        return None
    starts = range(0, len(hosts), per_host)
    if any(len({*hosts[start : start + per_host]}) > 1 for start in starts):
        return None
    return f"torus:{per_host}"
