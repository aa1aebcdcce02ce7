"""What the manager has published to a client, for the client's threads that read it and wait for it.

The links' thread writes it. Nothing here sends requests to the manager or knows of other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.errors import OffbeatError
from offbeat.events import RejectNamespace
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.messages import PlacementView
from offbeat.runtime.processes.waiting import SignalSafeCondition


class ClusterState:
    """The manager's latest view, its refusals, and whether this client is still connected.

    Methods may be called by any thread.

    Attributes:
        latest: the latest view; None before the first.
        failure: why this client is disconnected from the parameter server; None as long as it is not.
    """

    def __init__(self) -> None:
        self.latest: PlacementView | None = None
        self.failure: str | None = None
        self._refused: dict[str, str] = {}  # reason by namespace
        self._changed = SignalSafeCondition()

    def space(self, name: str) -> NamespaceSpec | None:
        """Return the definition of the namespace of this name; None if there is none."""
        view = self.latest
        return None if view is None else view.spaces.get(name)

    def participants(self, name: str) -> dict[int, int]:
        """Return the time of each participant's first push in a namespace, by the client's number."""
        view = self.latest
        return {} if view is None else view.participants.get(name, {})

    def has_lost_keys(self, name: str) -> bool:
        """Whether keys of a namespace are lost."""
        view = self.latest
        return view is not None and any(arc.namespace == name for arc in view.lost)

    def describe_unanswered(self, servers: Sequence[int]) -> str:
        """Return that these servers have not answered, and which servers are silent, as text for errors."""
        text = f"{_named(servers)} {'has' if len(servers) == 1 else 'have'} not answered"
        silent = () if self.latest is None else self.latest.silent_servers
        return f"{text}; the manager receives nothing from {_named(silent)}, and waits" if silent else text

    def describe_masters(self, name: str, first: int, last: int) -> str:
        """Return the masters of keys `first` to `last` - 1 of a namespace, as text for errors."""
        view = self.latest
        if view is None or name not in view.spaces:
            return "no server is known"
        masters = {span.holders[:1] for span in view.ring.spans(view.spaces[name], first, last)}
        named = ", ".join(f"server {master[0]}" for master in sorted(masters) if master)
        return f"its keys are with {named}" if named else "no server is left"

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until a condition holds; it is evaluated whenever the manager has published something.

        Args:
            condition: must not block.
            what: description of the condition, for errors.
            timeout_s: in seconds.

        Raises:
            OffbeatError: that took longer, or this client is disconnected from the parameter server.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.failure is not None, timeout_s)
            if condition():
                return
            if self.failure is not None:
                raise OffbeatError(f"stopped waiting for {what} of the parameter server: {self.failure}")
            raise OffbeatError(f"timed out after {timeout_s:g} s waiting for {what} of the parameter server")

    def wait_unless_refused(
        self, name: str, condition: Callable[[], bool], what: str, timeout_s: float, *, problem: str
    ) -> None:
        """Wait as `wait_for` does, but at most until the manager refuses a request for a namespace.

        Args:
            name: of the namespace.
            condition: must not block.
            what: description of the condition, for errors.
            timeout_s: in seconds.
            problem: the beginning of the error message; the manager's reason follows.

        Raises:
            OffbeatError: the manager has refused; that took longer; this client is out of the parameter
                server.
        """
        self.wait_for(lambda: name in self._refused or condition(), what, timeout_s)
        with self._changed:
            if name in self._refused:
                raise OffbeatError(f"{problem}: {self._refused[name]}")

    def forget_refusal(self, name: str) -> None:
        """Discard the refusal of an earlier request for a namespace, before a new request."""
        with self._changed:
            self._refused.pop(name, None)

    # In the I/O thread --------------------------------------------------------------------------------

    def set_view(self, view: PlacementView) -> None:
        """Store a new view."""
        with self._changed:
            self.latest = view
            self._changed.notify_all()

    def set_refusal(self, refused: RejectNamespace) -> None:
        """Store the manager's refusal of a request for a namespace."""
        with self._changed:
            self._refused[refused.name] = refused.reason
            self._changed.notify_all()

    def set_failure(self, cause: str) -> bool:
        """Note that this client is disconnected from the parameter server; return whether that is new."""
        with self._changed:
            if self.failure is not None:
                return False
            self.failure = cause
            self._changed.notify_all()
            return True


def _named(servers: Sequence[int]) -> str:
    return ", ".join(f"server {server}" for server in servers)
