"""Checks at the start that all workers are present and have the same model and strategy.

After its PeerList, this policy only accepts or rejects workers that come later.
"""

from __future__ import annotations

import math
from typing import Any, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    Event,
    Failed,
    Joined,
    Left,
    Lost,
    Peer,
    PeerList,
    RejectPeer,
    Tick,
)

_NAMES_MAX = 16


class Assembly:
    """Starts the job once every worker has joined with the same model and strategy; else stops it.

    Before the PeerList, the first mismatch ends the job with one AbortJob. After that, every further worker
    is rejected. After a PeerList too, unless the job is open: then a worker with an unused id and the same
    model and strategy is answered with a PeerList of all workers that are present. One case stops a job that
    has started: within the deadline for the start, a second worker joins with the id, world, model and
    strategy of a worker that is present. Then two unnamed jobs share one address, and it is undetermined
    which workers train together.

    Args:
        world: number of workers in the job, at least 1; their ids are 0 to `world` - 1.
        timeout_s: time from the first event to the join of the last worker, in seconds.
        accepts_late_joiners: whether workers may join while the job runs.

    Raises:
        ValueError: a world or deadline out of range.
    """

    def __init__(self, world: int, timeout_s: float = 30.0, *, accepts_late_joiners: bool = False) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"expected a finite timeout of more than 0 seconds, got {timeout_s}")
        self._world = world
        self._timeout_s = timeout_s
        self._is_open = accepts_late_joiners
        self._first_event_s: float | None = None
        self._present: dict[int, tuple[Peer, str]] = {}  # the peer and its place, in order of joining
        self._strategy = ""  # of the first worker that joined; all workers present have the same
        self._model: tuple[str, ...] = ()  # of the first worker that joined
        self._refusal_cause: str | None = None  # why no worker may join any more
        self._is_stopped = False
        self._has_started = False
        self._gone_ids: set[int] = set()  # ids of workers that have gone, while the job is open

    def handle(self, event: Event) -> list[Action]:
        """Return a PeerList, an AbortJob, a RejectPeer or nothing.

        Raises:
            ProtocolError: a Lost, Failed or Left of a worker that the job does not have; nothing changes.
        """
        if self._first_event_s is None:
            self._first_event_s = event.now_s
        match event:
            case Joined():
                return self._handle_joined(event)
            case Lost() | Failed() | Left():
                return self._handle_gone(event)
            case Tick():
                return self._handle_tick(event.now_s)
        return []

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
            "refusal_cause": self._refusal_cause,
            "is_stopped": self._is_stopped,
            "has_started": self._has_started,
            "gone_ids": sorted(self._gone_ids),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._first_event_s = state["first_event_s"]
        self._present = {
            entry["worker"]: (
                Peer(worker=entry["worker"], name=entry["peer"], addresses=tuple(entry["addresses"])),
                entry["place"],
            )
            for entry in state["present"]
        }
        self._strategy = state["strategy"]
        self._model = tuple(state["model"])
        self._refusal_cause, self._is_stopped = state["refusal_cause"], state["is_stopped"]
        self._has_started = state["has_started"]
        self._gone_ids = set(state["gone_ids"])

    def _handle_joined(self, event: Joined) -> list[Action]:
        """Add a worker to those that are present, or refuse it.

        Return the PeerList once all are present, and for every worker that joins an open job later; an
        AbortJob for a mismatch before the start, or for a second job on the same address; a RejectPeer for a
        worker that may not join, or not any more; nothing while workers are missing.
        """
        if self._has_started and self._may_be_second_job(event):
            reason = (
                f"{self._duplicate(event)}, or, if these are two jobs, give each a MASTER_PORT of its own"
            )
            return self._stop(event.worker, None, reason)
        if self._refusal_cause is not None:
            return [RejectPeer(peer=event.peer, reason=self._refusal(event))]
        if self._has_started:
            return self._handle_late_joined(event)
        mismatch = self._mismatch(event)
        if mismatch is not None:
            return self._stop(event.worker, None, mismatch)
        if not self._present:
            self._strategy, self._model = event.strategy, event.model_signature
        peer = Peer(worker=event.worker, name=event.peer, addresses=event.addresses)
        self._present[event.worker] = (peer, event.location)
        if len(self._present) < self._world:
            return []
        self._has_started = True
        if not self._is_open:
            self._refusal_cause = "the job has started without it"
        peers = tuple(self._present[worker][0] for worker in range(self._world))
        return [PeerList(peers=peers, reason=f"all {self._world} workers are here with the same model")]

    def _handle_late_joined(self, event: Joined) -> list[Action]:
        if event.worker in self._present or event.worker in self._gone_ids:
            mismatch: str | None = (
                f"its id, {event.worker}, has been used: give every new worker an unused id"
            )
        else:
            mismatch = self._difference_to_present(event, f"worker {event.worker} ({event.location})")
        if mismatch is not None:
            return [RejectPeer(peer=event.peer, reason=mismatch)]
        peer = Peer(worker=event.worker, name=event.peer, addresses=event.addresses)
        self._present[event.worker] = (peer, event.location)
        peers = tuple(self._present[worker][0] for worker in sorted(self._present))
        return [PeerList(peers=peers, reason=f"worker {event.worker} ({event.location}) is new")]

    def _mismatch(self, event: Joined) -> str | None:
        """Return why this worker cannot take part in the job, None if it can."""
        newcomer = f"worker {event.worker} ({event.location})"
        if event.world != self._world:
            return (
                f"{newcomer} expects a world of {event.world} workers, this job has {self._world}: "
                "start every worker with the same WORLD_SIZE"
            )
        if not 0 <= event.worker < self._world:
            return (
                f"{newcomer} is not one of the workers 0 to {self._world - 1} of a world of {self._world}: "
                "give every worker a RANK of its own below WORLD_SIZE"
            )
        if event.worker in self._present:
            return self._duplicate(event)
        return self._difference_to_present(event, newcomer)

    def _may_be_second_job(self, event: Joined) -> bool:
        """Whether this worker could as well be the one of the job that is present with its id."""
        assert self._first_event_s is not None
        return (
            not self._is_stopped
            and event.worker in self._present
            and event.worker < self._world == event.world
            and event.now_s - self._first_event_s <= self._timeout_s
            and self._difference_to_present(event, "it") is None
        )

    def _duplicate(self, event: Joined) -> str:
        return (
            f"two workers have the id {event.worker}, at {self._present[event.worker][1]} "
            f"and at {event.location}: give every worker a RANK of its own"
        )

    def _difference_to_present(self, event: Joined, newcomer: str) -> str | None:
        """Return how a worker's strategy or model differs from that of the workers present, None if equal."""
        if not self._present:
            return None
        earlier, place = next(iter(self._present.values()))
        first = f"worker {earlier.worker} ({place})"
        if event.strategy != self._strategy:
            return (
                f"{newcomer} runs the strategy {event.strategy!r}, {first} runs {self._strategy!r}: "
                "give every worker the same strategy"
            )
        difference = _difference(first, self._model, newcomer, event.model_signature)
        if difference is not None:
            return f"{difference}: build the same model on every worker"
        return None

    def _refusal(self, event: Joined) -> str:
        if event.worker in self._present:
            return (
                f"worker {event.worker} ({event.location}) cannot take part: its id is taken by the one at "
                f"{self._present[event.worker][1]}, and {self._refusal_cause}"
            )
        return f"worker {event.worker} ({event.location}) cannot take part: {self._refusal_cause}"

    def _handle_gone(self, event: Lost | Failed | Left) -> list[Action]:
        if self._has_started and self._is_open:
            if self._present.pop(event.worker, None) is not None:
                self._gone_ids.add(event.worker)
            return []
        if not 0 <= event.worker < self._world:
            raise ProtocolError(
                f"expected a worker from 0 to {self._world - 1}, "
                f"got {type(event).__name__} of worker {event.worker}"
            )
        if self._refusal_cause is not None:
            if self._has_started:
                self._present.pop(event.worker, None)
            return []
        present = self._present.get(event.worker)
        description = f"worker {event.worker}" + (f" ({present[1]})" if present else "")
        match event:
            case Lost():
                return self._stop(
                    event.worker, None, f"{description} was lost before the start: {event.cause}"
                )
            case Failed():
                return self._stop(
                    event.worker, event.step, f"{description} failed before the start: {event.error}"
                )
            case Left():
                reason = f"{description} left before the start, {self._count()}"
                return self._stop(event.worker, event.step, reason)
            case _:
                assert_never(event)

    def _handle_tick(self, now_s: float) -> list[Action]:
        assert self._first_event_s is not None
        if (
            self._refusal_cause is not None
            or self._has_started
            or now_s - self._first_event_s <= self._timeout_s
        ):
            return []
        missing = [worker for worker in range(self._world) if worker not in self._present]
        names = ", ".join(str(worker) for worker in missing[:_NAMES_MAX]) + _more(len(missing))
        return self._stop(
            missing[0] if len(missing) == 1 else None,
            None,
            f"{'worker' if len(missing) == 1 else 'workers'} {names} did not join within "
            f"{self._timeout_s:g} s, {self._count()}: check why the missing workers did not start, "
            "or start the job with fewer workers",
        )

    def _stop(self, worker: int | None, step: int | None, reason: str) -> list[Action]:
        self._refusal_cause = f"the job has ended ({reason})"
        self._is_stopped = True
        return [AbortJob(worker=worker, step=step, reason=reason)]

    def _count(self) -> str:
        present = sorted(self._present.items())
        names = ", ".join(f"worker {worker} ({place})" for worker, (_, place) in present[:_NAMES_MAX])
        return f"{len(present)} of {self._world} are here" + (
            f" ({names}{_more(len(present))})" if present else ""
        )


def _more(count: int) -> str:
    return f" and {count - _NAMES_MAX} more" if count > _NAMES_MAX else ""


def _difference(worker: str, model: tuple[str, ...], other: str, other_model: tuple[str, ...]) -> str | None:
    """Return the first difference between the descriptions of two workers' models and optimizers, or None."""
    for index, (line, other_line) in enumerate(zip(model, other_model, strict=False)):
        if line != other_line:
            return (
                f"line {index + 1} of model and optimizer is {line!r} on {worker} "
                f"but {other_line!r} on {other}"
            )
    if len(model) == len(other_model):
        return None
    longer, shorter, lines = (
        (worker, other, model) if len(model) > len(other_model) else (other, worker, other_model)
    )
    common = min(len(model), len(other_model))
    return (
        f"model and optimizer have {len(lines)} lines on {longer} but {common} on {shorter}: "
        f"{lines[common]!r} is the first line that the latter lacks"
    )
