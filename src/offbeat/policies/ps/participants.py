"""The clients whose pushes are summed in the namespaces that aggregate, and their first times.

Nothing here knows which servers exist or how the loss of a client is detected.
"""

from __future__ import annotations

from typing import Any


class AggregationParticipants:
    """Fixes the participants of a time before any of them pushes at it; later only lost clients are removed.

    A client begins at time 1 if no other client takes part, or no servers are there yet. Otherwise the
    namespace is paused: every participant reports the latest time that it has sent, and sends none after it
    until a view ends the pause; in that view the newcomer begins at the time after the latest. Clients that
    are to begin together join before the first of them pushes. A client that has left or is lost does
    not come back.
    """

    def __init__(self) -> None:
        self.first_times: dict[str, dict[int, int]] = {}
        self.pauses: dict[str, int] = {}
        self._newcomers: dict[str, list[int]] = {}
        self._reached: dict[str, dict[int, int]] = {}  # in this pause
        self._gone: set[int] = set()

    def join(self, client: int, namespace: str, view: int | None) -> bool:
        """Add a client that asks to take part; return whether a new view is needed.

        Args:
            view: the number of the view that would publish it, None if there is no view yet.
        """
        begins = self.first_times.setdefault(namespace, {})
        newcomers = self._newcomers.setdefault(namespace, [])
        if client in self._gone or client in begins or client in newcomers:
            return False
        if view is None or not begins:
            begins[client] = 1
            return True
        newcomers.append(client)
        if namespace in self.pauses:
            return False
        self.pauses[namespace], self._reached[namespace] = view, {}
        return True

    def on_pause_reached(self, client: int, namespace: str, pause: int, time: int) -> bool:
        """Note that a participant sends nothing after `time` in this pause; return whether all paused."""
        if self.pauses.get(namespace) != pause or client not in self.first_times[namespace]:
            return False
        self._reached[namespace][client] = time
        return self._end_pause(namespace)

    def leave(self, client: int, namespace: str) -> bool:
        """Remove a client that stops taking part; return whether a new view is needed."""
        if namespace not in self.first_times:
            return False
        took_part = self.first_times[namespace].pop(client, None) is not None
        self._reached.get(namespace, {}).pop(client, None)
        if client in self._newcomers[namespace]:
            self._newcomers[namespace].remove(client)
        return self._end_pause(namespace) or took_part

    def on_client_lost(self, client: int) -> bool:
        """Remove a client that is permanently lost; return whether a new view is needed."""
        self._gone.add(client)
        changed = [self.leave(client, namespace) for namespace in self.first_times]
        return any(changed)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as plain data."""
        return {
            "first_times": _listed(self.first_times),
            "pauses": list(self.pauses.items()),
            "newcomers": [[namespace, list(clients)] for namespace, clients in self._newcomers.items()],
            "reached": _listed(self._reached),
            "gone": sorted(self._gone),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.first_times, self._reached = _by_client(state["first_times"]), _by_client(state["reached"])
        self.pauses = dict(state["pauses"])
        self._newcomers = {namespace: list(clients) for namespace, clients in state["newcomers"]}
        self._gone = set(state["gone"])

    def _end_pause(self, namespace: str) -> bool:
        """End the pause and let the newcomers begin, if all have paused or no newcomer is left."""
        if namespace not in self.pauses:
            return False
        begins, newcomers = self.first_times[namespace], self._newcomers[namespace]
        reached = self._reached[namespace]
        if newcomers and not begins.keys() <= reached.keys():
            return False
        begins.update(dict.fromkeys(newcomers, 1 + max(reached.values(), default=0)))
        newcomers.clear()
        del self.pauses[namespace], self._reached[namespace]
        return True


def _listed(times: dict[str, dict[int, int]]) -> list[list[Any]]:
    return [[namespace, [list(entry) for entry in clients.items()]] for namespace, clients in times.items()]


def _by_client(listed: list[list[Any]]) -> dict[str, dict[int, int]]:
    return {namespace: dict(clients) for namespace, clients in listed}
