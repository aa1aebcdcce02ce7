"""Which calls of `ray.train.report` the workers make, and which they skip."""

from __future__ import annotations

from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationBarrierResetError


class ReportLedger:
    """Decides of each report whether all workers make it, when the first of them does.

    Ray needs the same reports of each worker, and drops those that are under way when it replaces a worker.
    A report is known by its epoch and its number in the epoch. It is skipped while a worker is missing, and
    until its replacement has come to a report: the others may have made more of that epoch before.
    """

    def __init__(self) -> None:
        self._missing: set[int] = set()  # ranks
        self._is_made: dict[tuple[int, int], bool] = {}

    def check(self, rank: int, report: tuple[int, int]) -> None:
        """Return if a worker is to make a report; never wait for another worker.

        Raises:
            SynchronizationBarrierResetError: the report is to be skipped.
        """
        is_made = self._is_made.setdefault((report[0], report[1]), not self._missing)
        self._missing.discard(rank)
        if not is_made:
            raise SynchronizationBarrierResetError(f"report {report} is not made by all workers")

    def lose(self, rank: int) -> None:
        """Skip reports, also those under way, until the worker that replaces this rank has come to one."""
        self._missing.add(rank)
        self._is_made = dict.fromkeys(self._is_made, False)
