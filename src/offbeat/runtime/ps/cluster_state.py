"""What the manager has told a client, for the client's threads that read it and wait for it.

The links' thread writes it. Nothing here asks the manager for anything or knows of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.errors import OffbeatError
from offbeat.events import SpaceRefused
from offbeat.policies.ps.hash_ring import Space
from offbeat.policies.ps.messages import View
from offbeat.runtime.processes.waiting import Condition


class Views:
    """The manager's latest view, what it has refused, and whether this client is still in.

    Methods may be called by any thread.

    Attributes:
        latest: who holds what, by the manager's last word; None before there is one.
        failure: why this client is out of the parameter server; None as long as it is in.
    """

    def __init__(self) -> None:
        self.latest: View | None = None
        self.failure: str | None = None
        self._refused: dict[str, str] = {}  # namespaces: why
        self._changed = Condition()

    def space(self, name: str) -> Space | None:
        """Return what the namespace of this name is; None if there is none."""
        view = self.latest
        return None if view is None else view.spaces.get(name)

    def participants(self, name: str) -> dict[int, int]:
        """Return the time of the first push of each client that takes part in a namespace, by number."""
        view = self.latest
        return {} if view is None else view.participants.get(name, {})

    def has_lost(self, name: str) -> bool:
        """Whether keys of a namespace are lost."""
        view = self.latest
        return view is not None and any(arc.namespace == name for arc in view.lost)

    def unanswered(self, servers: Sequence[int]) -> str:
        """Return that these servers have not answered, and whom they may wait for, as errors say it."""
        text = f"{_named(servers)} {'has' if len(servers) == 1 else 'have'} not answered"
        silent = () if self.latest is None else self.latest.silent
        return f"{text}; the manager does not hear {_named(silent)}, and waits" if silent else text

    def masters(self, name: str, first: int, last: int) -> str:
        """Return which servers are asked for keys `first` to `last` - 1 of a namespace, as errors say it."""
        view = self.latest
        if view is None or name not in view.spaces:
            return "no server is known"
        masters = {span.holders[:1] for span in view.ring.spans(view.spaces[name], first, last)}
        named = ", ".join(f"server {master[0]}" for master in sorted(masters) if master)
        return f"its keys are with {named}" if named else "there is no server any more"

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until a condition holds, which is asked whenever the manager has said something.

        Args:
            condition: must not wait for anything.
            what: is waited for, as errors say it.
            timeout_s: for how many seconds.

        Raises:
            OffbeatError: that took longer, or this client is out of the parameter server.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.failure is not None, timeout_s)
            if condition():
                return
            if self.failure is not None:
                raise OffbeatError(f"waited for {what} of the parameter server: {self.failure}")
            raise OffbeatError(f"waited {timeout_s:g} s for {what} of the parameter server in vain")

    def wait_unless_refused(
        self, name: str, condition: Callable[[], bool], what: str, timeout_s: float, *, problem: str
    ) -> None:
        """Wait as `wait_for` does, but not longer than until the manager refuses something of a namespace.

        Args:
            name: of the namespace.
            condition: must not wait for anything.
            what: is waited for, as errors say it.
            timeout_s: for how many seconds.
            problem: how the error begins that ends with the manager's reason.

        Raises:
            OffbeatError: the manager has refused; that took longer; this client is out of the parameter
                server.
        """
        self.wait_for(lambda: name in self._refused or condition(), what, timeout_s)
        with self._changed:
            if name in self._refused:
                raise OffbeatError(f"{problem}: {self._refused[name]}")

    def forget_refusal(self, name: str) -> None:
        """What the manager has refused of a namespace counts no more: it is about to be asked again."""
        with self._changed:
            self._refused.pop(name, None)

    # In the links' thread --------------------------------------------------------------------------------

    def see(self, view: View) -> None:
        """There is a new view."""
        with self._changed:
            self.latest = view
            self._changed.notify_all()

    def refuse(self, refused: SpaceRefused) -> None:
        """The manager has refused something of a namespace."""
        with self._changed:
            self._refused[refused.name] = refused.reason
            self._changed.notify_all()

    def end(self, cause: str) -> bool:
        """This client is out of the parameter server; return whether it was in until now."""
        with self._changed:
            if self.failure is not None:
                return False
            self.failure = cause
            self._changed.notify_all()
            return True


def _named(servers: Sequence[int]) -> str:
    return ", ".join(f"server {server}" for server in servers)
