"""The coordinator of a simulated job: the real policies, its log, and what a restart keeps of them.

It sends nothing; `SimulatedCluster` delivers events to it and carries out the actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NoReturn

from offbeat.events import (
    Action,
    Event,
    Joined,
    Left,
    Lost,
    PeerReachable,
    PeerUnreachable,
    ToAllWorkers,
)
from offbeat.policies import Policy, dispatch_event


class SimulatedCoordinator:
    """Answers events with the actions of its policies; a restarted one continues from the durable log.

    The log is durable up to the last entry with actions, or up to the last `sync`. A restart replays it with
    new policies, which must give the same actions; what came after it is lost.

    Args:
        build: builds the policies; called again for each restart.
        keeps_log: whether `log` is kept; needed for restarts.
        fail_invariant: ends the run with an error.

    Attributes:
        policies: the policies of the running coordinator.
        log: every event with the actions that answered it.
        is_down: it was killed, and has not been restarted.
        incarnation: restarts so far; messages of an earlier incarnation are lost.
        clock_lag_s: how far its clock, which continues from the end of its log, lags behind the engine's.
        joined: the workers that it has a connection to.
        lost: the workers that it has given up.
        unconnected: workers that could not connect when it restarted.
        recorded: events of each worker in the log, where they are recorded exactly once.
        sent: messages sent to each worker, where they are delivered exactly once.
        last_actions: the last action of each type that goes to all workers.
    """

    def __init__(
        self,
        build: Callable[[], Sequence[Policy]],
        *,
        keeps_log: bool,
        fail_invariant: Callable[[str], NoReturn],
    ) -> None:
        self._build, self._keeps_log, self._fail_invariant = build, keeps_log, fail_invariant
        self.policies = list(build())
        self.log: list[tuple[Event, tuple[Action, ...]]] = []
        self._durable = 0  # length of the part of the log that a killed coordinator has written
        self.is_down = False
        self.incarnation = 0
        self.clock_lag_s = 0.0
        self.joined: set[int] = set()
        self.lost: set[int] = set()
        self.unconnected: set[int] = set()
        self.recorded: Counter[int] = Counter()
        self.sent: dict[int, list[tuple[Action, ...]]] = defaultdict(list)
        self.last_actions: list[Action] = []

    def handle(self, event: Event) -> list[Action]:
        """Return the policies' actions; the log is durable if there are any."""
        actions = dispatch_event(self.policies, event)
        if self._keeps_log:
            self.log.append((event, tuple(actions)))
        if actions:
            self.sync()
        return actions

    def sync(self) -> None:
        """Make the log durable."""
        self._durable = len(self.log)

    def keep_last(self, action: Action) -> None:
        """Keep an action that goes to all workers, as the last one of its type."""
        self.last_actions = [last for last in self.last_actions if type(last) is not type(action)] + [action]

    def kill(self) -> None:
        """End it; the log ends with its last durable entry."""
        self.is_down = True
        self.incarnation += 1
        del self.log[self._durable :]

    def restart(self, now_s: float) -> None:
        """Start again at the engine's time `now_s`: replay the log, which must give the same actions."""
        self.is_down = False
        self.policies = list(self._build())
        self.last_actions.clear()
        for event, actions in self.log:
            if tuple(dispatch_event(self.policies, event)) != actions:
                self._fail_invariant(f"a replay of the log gives other actions for {event}")
            for action in actions:
                if isinstance(action, ToAllWorkers):
                    self.keep_last(action)
        events = [event for event, _ in self.log]
        self.recorded = Counter(getattr(event, "worker", -1) for event in events if type(event) is not Lost)
        self.joined = {event.worker for event in events if isinstance(event, Joined)}
        self.joined -= {event.worker for event in events if isinstance(event, Lost | Left)}
        self.clock_lag_s = now_s - (self.log[-1][0].now_s if self.log else 0.0)

    def has_logged_join(self, worker: int) -> bool:
        """Whether the worker's Joined is in the log."""
        return any(isinstance(event, Joined) and event.worker == worker for event, _ in self.log)

    def unreachable_peers(self, observer: int | None) -> set[int]:
        """Return the peers that an observer has reported as unreachable and not as reachable since.

        Args:
            observer: a worker; None for the coordinator itself.
        """
        found: set[int] = set()
        for event, _ in self.log:
            if isinstance(event, PeerUnreachable | PeerReachable) and event.worker == observer:
                if isinstance(event, PeerUnreachable):
                    found.add(event.peer)
                else:
                    found.discard(event.peer)
        return found
