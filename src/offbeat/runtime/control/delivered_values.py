"""The values of other workers, as the coordinator delivers them to one that has given its own."""

from __future__ import annotations

from offbeat.events import DeliverValue, EndGathering


class DeliveredValues:
    """Collects what is delivered to a worker; used under the lock of its `CoordinatorClient`.

    A program may have given up to wait for the end of a gathering. So an end counts only if it is that of the
    value given last.

    Args:
        worker: this worker's id; a newcomer learns it before it gives a value.

    Attributes:
        given: number of values that this worker has given.
        end: of the gathering of the value given last; None before.
        values: by worker, those of that gathering, once there is the end.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._by_gathering: dict[int, dict[int, str]] = {}
        self.given = 0
        self.end: EndGathering | None = None
        self.values: dict[int, str] = {}

    def begin(self) -> int:
        """Return the number of the value that this worker gives next."""
        self.given += 1
        self.end, self.values = None, {}
        return self.given - 1

    def on_action(self, action: DeliverValue | EndGathering) -> None:
        """Collect a value, or end a gathering."""
        if isinstance(action, DeliverValue):
            self._by_gathering.setdefault(action.gathering, {})[action.source] = action.value
            return
        values = self._by_gathering.pop(action.gathering, {})
        if action.numbers[action.members.index(self._worker)] == self.given - 1:
            self.end, self.values = action, values
