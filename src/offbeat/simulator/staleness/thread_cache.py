"""The parameters of one simulated worker thread, reduced to the steps that they contain.

Nothing here decides which version is fresh enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.policies.staleness.caches import CacheDirectory
from offbeat.simulator.staleness.servers import PulledRow, PushedStep


class ThreadCache:
    """A thread's copy of the row, with each of its own steps once: in the row, or replayed on top of it.

    Args:
        directory: the cache directory of the process.
        worker: the thread's worker.
        fail_invariant: is called with what is wrong, and raises.

    Attributes:
        row: the installed row, None before the first.
        own_steps: the thread's own steps in each piece of its parameters.
        fetched: a row that was fetched in the background and is not installed.
        is_fetching: a row is on its way in the background.
    """

    def __init__(
        self, directory: CacheDirectory, worker: int, fail_invariant: Callable[[str], object]
    ) -> None:
        self.row: PulledRow | None = None
        self.own_steps: list[int] = []
        self.fetched: PulledRow | None = None
        self.is_fetching = False
        self._directory, self._worker, self._fail_invariant = directory, worker, fail_invariant
        self._logged: list[tuple[int, ...]] = []  # numbers of the steps in each push of the log

    def apply_own_step(self) -> None:
        """Apply a step of the thread to its copy."""
        self.own_steps = [count + 1 for count in self.own_steps]

    def log_update(self, time: int, steps: Sequence[PushedStep]) -> None:
        """Keep the steps of a push until every piece of an installed row contains them."""
        self._directory.log_update(self._worker, time)
        self._logged.append(tuple(step.number for step in steps))

    def install(self, row: PulledRow) -> None:
        """Install a row, and replay the thread's own steps that are missing in it."""
        directory, worker = self._directory, self._worker
        self.own_steps = []
        for piece in row.pieces:
            replayed = [
                number
                for own in self._logged[directory.count_included(worker, piece.time) :]
                for number in own
            ]
            seen = piece.steps[worker]
            if replayed != list(range(seen, seen + len(replayed))):
                self._fail_invariant(
                    f"worker {worker} replays its steps {replayed} on top of {seen} that the row has"
                )
            self.own_steps.append(seen + len(replayed))
        del self._logged[
            : directory.on_thread_copied(worker, row.version, min(piece.time for piece in row.pieces))
        ]
        self.row = row
