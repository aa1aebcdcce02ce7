"""Who is here at the start, and whether they came to do the same work.

Nothing here knows what happens once the job runs: after its Start, this policy only turns away those who
come too late.
"""

from __future__ import annotations

import math
from typing import Any, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    Brought,
    Clocked,
    Evaluated,
    Event,
    Failed,
    Finished,
    Halted,
    Joined,
    Left,
    LeftOut,
    Lost,
    NodeEvent,
    Peer,
    PeerReachable,
    PeerUnreachable,
    Preempted,
    Ready,
    Recalled,
    Refuse,
    Saving,
    Start,
    StepTimed,
    Stop,
    Tick,
    ValidationEvent,
    Wants,
)

_NAMED_MAX = 16


class Assembly:
    """Starts the job once every worker is here with the same model and strategy, or says why it cannot.

    Before the Start, the first thing that is wrong ends the job with one Stop. After a Stop, nothing but a
    Refuse to whoever comes still; after a Start too, unless the job is `open`: then whoever comes with an id
    that nobody has had, and with the same model and strategy, is answered with a Start of all who are here.
    One case ends a job that has started: within the deadline for the start another worker comes that could
    as well be a worker of the start that is here, with its id, world, model and strategy. Then two jobs
    without names meet at one address, and it cannot be told whose workers train with one another.

    Args:
        world: how many workers make up the job, at least 1; their ids are 0 to `world` - 1.
        deadline_s: how long after the first event the last worker may come, in seconds.
        is_open: whether workers may come while the job runs.

    Raises:
        ValueError: a world or deadline out of range.
    """

    def __init__(self, world: int, deadline_s: float = 30.0, *, is_open: bool = False) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"expected a finite deadline of more than 0 seconds, got {deadline_s}")
        self._world = world
        self._deadline_s = deadline_s
        self._is_open = is_open
        self._first_event_s: float | None = None
        self._present: dict[int, tuple[Peer, str]] = {}  # the peer and its place, in the order they came
        self._strategy = ""  # as the first that came has it; everybody present has the same
        self._model: tuple[str, ...] = ()  # likewise
        self._over: str | None = None  # why nobody may come any more
        self._is_stopped = False
        self._has_started = False
        self._gone_ids: set[int] = set()  # of workers that are here no more, while the job is open

    def handle(self, event: Event) -> list[Action]:
        """Answer with a Start, a Stop, a Refuse or nothing.

        Raises:
            ProtocolError: a worker that the job does not have is said to have gone; nothing changes.
        """
        if self._first_event_s is None:
            self._first_event_s = event.now_s
        match event:
            case (
                Ready()
                | LeftOut()
                | Wants()
                | Brought()
                | Saving()
                | Recalled()
                | Clocked()
                | StepTimed()
                | Halted()
                | Evaluated()
                | Preempted()
                | Finished()
                | PeerUnreachable()
                | PeerReachable()
                | NodeEvent()
                | ValidationEvent()
            ):
                return []  # nearly all events are these
            case Joined():
                return self._joined(event)
            case Lost() | Failed() | Left():
                return self._gone(event)
            case Tick():
                return self._tick(event.now_s)
            case _:
                assert_never(event)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "first_event_s": self._first_event_s,
            "present": [
                {"worker": peer.worker, "peer": peer.name, "addresses": list(peer.addresses), "place": place}
                for peer, place in self._present.values()
            ],
            "strategy": self._strategy,
            "model": list(self._model),
            "over": self._over,
            "is_stopped": self._is_stopped,
            "has_started": self._has_started,
            "gone": sorted(self._gone_ids),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a policy with the same arguments."""
        self._first_event_s = state["first_event_s"]
        self._present = {
            one["worker"]: (
                Peer(worker=one["worker"], name=one["peer"], addresses=tuple(one["addresses"])),
                one["place"],
            )
            for one in state["present"]
        }
        self._strategy = state["strategy"]
        self._model = tuple(state["model"])
        self._over, self._is_stopped = state["over"], state["is_stopped"]
        self._has_started = state["has_started"]
        self._gone_ids = set(state["gone"])

    def _joined(self, event: Joined) -> list[Action]:
        if self._has_started and self._is_second(event):
            reason = f"{self._twice(event)}, or, if these are two jobs, give each a MASTER_PORT of its own"
            return self._stop(event.worker, None, reason)
        if self._over is not None:
            return [Refuse(peer=event.peer, reason=self._refusal(event))]
        if self._has_started:
            return self._joined_later(event)
        wrong = self._wrong(event)
        if wrong is not None:
            return self._stop(event.worker, None, wrong)
        if not self._present:
            self._strategy, self._model = event.strategy, event.model
        peer = Peer(worker=event.worker, name=event.peer, addresses=event.addresses)
        self._present[event.worker] = (peer, event.place)
        if len(self._present) < self._world:
            return []
        self._has_started = True
        if not self._is_open:
            self._over = "the job has started without it"
        peers = tuple(self._present[worker][0] for worker in range(self._world))
        return [Start(peers=peers, reason=f"all {self._world} workers are here with the same model")]

    def _joined_later(self, event: Joined) -> list[Action]:
        if event.worker in self._present or event.worker in self._gone_ids:
            wrong: str | None = f"its id, {event.worker}, has been used: give every newcomer one of its own"
        else:
            wrong = self._unlike(event, f"worker {event.worker} ({event.place})")
        if wrong is not None:
            return [Refuse(peer=event.peer, reason=wrong)]
        peer = Peer(worker=event.worker, name=event.peer, addresses=event.addresses)
        self._present[event.worker] = (peer, event.place)
        peers = tuple(self._present[worker][0] for worker in sorted(self._present))
        return [Start(peers=peers, reason=f"worker {event.worker} ({event.place}) is new")]

    def _wrong(self, event: Joined) -> str | None:
        """Say why this worker cannot take part in this job, if it cannot."""
        newcomer = f"worker {event.worker} ({event.place})"
        if event.world != self._world:
            return (
                f"{newcomer} expects a world of {event.world} workers, this job has {self._world}: "
                "start every worker with the same WORLD_SIZE"
            )
        if not 0 <= event.worker < self._world:
            return (
                f"{newcomer} is none of the workers 0 to {self._world - 1} of a world of {self._world}: "
                "give every worker a RANK of its own below WORLD_SIZE"
            )
        if event.worker in self._present:
            return self._twice(event)
        return self._unlike(event, newcomer)

    def _is_second(self, event: Joined) -> bool:
        """Whether this worker could be the job's own as well as the one that is here with its id."""
        assert self._first_event_s is not None
        return (
            not self._is_stopped
            and event.worker in self._present
            and event.worker < self._world == event.world
            and event.now_s - self._first_event_s <= self._deadline_s
            and self._unlike(event, "it") is None
        )

    def _twice(self, event: Joined) -> str:
        return (
            f"two workers call themselves worker {event.worker}, at {self._present[event.worker][1]} "
            f"and at {event.place}: give every worker a RANK of its own"
        )

    def _unlike(self, event: Joined, newcomer: str) -> str | None:
        """Say how a worker's strategy or model differs from those of who are here, if they do."""
        if not self._present:
            return None
        earlier, place = next(iter(self._present.values()))
        first = f"worker {earlier.worker} ({place})"
        if event.strategy != self._strategy:
            return (
                f"{newcomer} runs the strategy {event.strategy!r}, {first} runs {self._strategy!r}: "
                "give every worker the same strategy"
            )
        difference = _difference(first, self._model, newcomer, event.model)
        if difference is not None:
            return f"{difference}: build the same model on every worker"
        return None

    def _refusal(self, event: Joined) -> str:
        if event.worker in self._present:
            return (
                f"worker {event.worker} ({event.place}) cannot take part: its id is taken by the one at "
                f"{self._present[event.worker][1]}, and {self._over}"
            )
        return f"worker {event.worker} ({event.place}) cannot take part: {self._over}"

    def _gone(self, event: Lost | Failed | Left) -> list[Action]:
        if self._has_started and self._is_open:
            if self._present.pop(event.worker, None) is not None:
                self._gone_ids.add(event.worker)
            return []
        if not 0 <= event.worker < self._world:
            raise ProtocolError(
                f"expected a worker from 0 to {self._world - 1}, "
                f"got {type(event).__name__} of worker {event.worker}"
            )
        if self._over is not None:
            if self._has_started:
                self._present.pop(event.worker, None)
            return []
        here = self._present.get(event.worker)
        who = f"worker {event.worker}" + (f" ({here[1]})" if here else "")
        match event:
            case Lost():
                return self._stop(event.worker, None, f"{who} was lost before the start: {event.cause}")
            case Failed():
                return self._stop(event.worker, event.step, f"{who} failed before the start: {event.error}")
            case Left():
                reason = f"{who} left before the start, {self._count()}"
                return self._stop(event.worker, event.step, reason)
            case _:
                assert_never(event)

    def _tick(self, now_s: float) -> list[Action]:
        assert self._first_event_s is not None
        if self._over is not None or self._has_started or now_s - self._first_event_s <= self._deadline_s:
            return []
        missing = [worker for worker in range(self._world) if worker not in self._present]
        names = ", ".join(str(worker) for worker in missing[:_NAMED_MAX]) + _more(len(missing))
        return self._stop(
            missing[0] if len(missing) == 1 else None,
            None,
            f"{'worker' if len(missing) == 1 else 'workers'} {names} did not come within "
            f"{self._deadline_s:g} s, {self._count()}: see why the missing ones did not start, "
            "or start the job with fewer",
        )

    def _stop(self, worker: int | None, step: int | None, reason: str) -> list[Action]:
        self._over = f"the job has ended ({reason})"
        self._is_stopped = True
        return [Stop(worker=worker, step=step, reason=reason)]

    def _count(self) -> str:
        here = sorted(self._present.items())
        names = ", ".join(f"worker {worker} ({place})" for worker, (_, place) in here[:_NAMED_MAX])
        return f"{len(here)} of {self._world} are here" + (f" ({names}{_more(len(here))})" if here else "")


def _more(count: int) -> str:
    return f" and {count - _NAMED_MAX} more" if count > _NAMED_MAX else ""


def _difference(who: str, model: tuple[str, ...], other: str, other_model: tuple[str, ...]) -> str | None:
    """Name the first line in which the descriptions of two workers' models and optimizers differ, if any."""
    for index, (one, another) in enumerate(zip(model, other_model, strict=False)):
        if one != another:
            return f"line {index + 1} of model and optimizer is {one!r} on {who} but {another!r} on {other}"
    if len(model) == len(other_model):
        return None
    longer, shorter, lines = (
        (who, other, model) if len(model) > len(other_model) else (other, who, other_model)
    )
    common = min(len(model), len(other_model))
    return (
        f"model and optimizer have {len(lines)} lines on {longer} but {common} on {shorter}: "
        f"{lines[common]!r} is the first that the latter lacks"
    )
