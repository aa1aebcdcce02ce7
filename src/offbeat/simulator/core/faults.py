"""Faults of a simulated cluster as data: what goes wrong and when, with a one-line text form.

Nothing here acts; `offbeat.simulator.training.cluster` carries the faults out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

FAULT_FORMS = (
    "die:1@2.5 (worker 1 dies after 2.5 s; die:1,2@2.5 for two at once), hang:1@2.5+30 (for 30 s), "
    "late:1@2.5+0.2 (its messages arrive 0.2 s late, once), cut:1@2.5+3 (from the coordinator, for 3 s), "
    "cut:1-2@2.5+3 (from worker 2), cut:1-s@2.5+3 (from all servers), cut:1>2@2.5+3 (messages from 1 to 2 "
    "are lost; c is the coordinator), split:1,2@2.5+3 (these workers from all other nodes), reset:1-2@2.5 "
    "(their connection breaks; reset:1@2.5 for the one to the coordinator), join:9@2.5 (worker 9 joins), "
    "leave:1@2.5, restart@2.5+0.5 (the coordinator, down for 0.5 s)"
)
SERVERS: Final = -2  # all servers together, as a peer
LostMessages: TypeAlias = Literal["both", "worker", "peer"]
LOST_MESSAGES: tuple[LostMessages, ...] = get_args(LostMessages)
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_FAULT = re.compile(
    rf"(?P<kind>die|hang|late|cut|split|reset|join|leave|restart)"
    rf"(?::(?P<workers>[0-9]+(?:,[0-9]+)*|[0-9]+-(?:[0-9]+|s)|[0-9]+>[0-9]+|[0-9]+>c|c>[0-9]+))?"
    rf"@(?P<at>{_NUMBER})(?:\+(?P<length>{_NUMBER}))?"
)


@dataclass(frozen=True, kw_only=True)
class WorkerDeath:
    """Workers die without notice, all at once."""

    at_s: float
    workers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerHang:
    """A worker neither computes nor responds for a while, and then resumes with all queued messages."""

    at_s: float
    worker: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Messages of a worker, in one direction, arrive `duration_s` after `at_s` at the earliest."""

    at_s: float
    worker: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class LinkCut:
    """A worker and another node do not receive each other's messages for a while.

    Attributes:
        peer: another worker, `SERVERS`, or None for the coordinator.
        lost: whose messages are lost: those of both, only the worker's, or only the peer's.
    """

    at_s: float
    worker: int
    peer: int | None
    duration_s: float
    lost: LostMessages = "both"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Some workers are cut off from all other nodes, the coordinator included, for a while."""

    at_s: float
    workers: tuple[int, ...]
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class ConnectionReset:
    """The connection of a worker to another worker, or to the coordinator (None), breaks; both go on."""

    at_s: float
    worker: int
    peer: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerArrival:
    """A worker that was not there at the start joins."""

    at_s: float
    worker: int


@dataclass(frozen=True, kw_only=True)
class WorkerDeparture:
    """A worker leaves in order, after the first step that it finishes past `at_s`."""

    at_s: float
    worker: int


@dataclass(frozen=True, kw_only=True)
class CoordinatorRestart:
    """The coordinator dies, and a new one replays its log after a while."""

    at_s: float
    duration_s: float


Fault: TypeAlias = (
    WorkerDeath
    | WorkerHang
    | Delay
    | LinkCut
    | Partition
    | ConnectionReset
    | WorkerArrival
    | WorkerDeparture
    | CoordinatorRestart
)


def parse_fault(text: str) -> Fault:
    """Parse one fault.

    Raises:
        ValueError: the text is no fault; the message is one line with the expected forms.
    """
    found = _FAULT.fullmatch(text)
    if found is not None:
        kind, at_s, nodes = found["kind"], float(found["at"]), found["workers"] or ""
        workers = [int(number) for number in re.findall("[0-9]+", nodes)]
        length_s = None if found["length"] is None else float(found["length"])
        between = "".join(re.findall("[->]", nodes)) or ","
        match kind, between, workers, length_s:
            case "die", ",", [_, *_], None:
                return WorkerDeath(at_s=at_s, workers=tuple(sorted(set(workers))))
            case "hang", ",", [worker], float():
                return WorkerHang(at_s=at_s, worker=worker, duration_s=length_s)
            case "late", ",", [worker], float():
                return Delay(at_s=at_s, worker=worker, duration_s=length_s)
            case "cut", ",", [worker], float():
                return LinkCut(at_s=at_s, worker=worker, peer=None, duration_s=length_s)
            case "cut", ">", [worker], float():
                lost: LostMessages = "peer" if nodes.startswith("c") else "worker"
                return LinkCut(at_s=at_s, worker=worker, peer=None, duration_s=length_s, lost=lost)
            case "cut", "-", [worker], float():
                return LinkCut(at_s=at_s, worker=worker, peer=SERVERS, duration_s=length_s)
            case "cut", "-", [worker, peer], float() if worker != peer:
                return LinkCut(at_s=at_s, worker=worker, peer=peer, duration_s=length_s)
            case "cut", ">", [worker, peer], float() if worker != peer:
                return LinkCut(at_s=at_s, worker=worker, peer=peer, duration_s=length_s, lost="worker")
            case "split", ",", [_, *_], float():
                return Partition(at_s=at_s, workers=tuple(sorted(set(workers))), duration_s=length_s)
            case "reset", ",", [worker], None:
                return ConnectionReset(at_s=at_s, worker=worker, peer=None)
            case "reset", "-", [worker, peer], None if worker != peer:
                return ConnectionReset(at_s=at_s, worker=worker, peer=peer)
            case "join", ",", [worker], None:
                return WorkerArrival(at_s=at_s, worker=worker)
            case "leave", ",", [worker], None:
                return WorkerDeparture(at_s=at_s, worker=worker)
            case "restart", ",", [], float():
                return CoordinatorRestart(at_s=at_s, duration_s=length_s)
    raise ValueError(f"fault {text[:100]!r} is not understood: expected {FAULT_FORMS}")


def format_fault(fault: Fault) -> str:
    """Return the text of a fault, as `parse_fault` reads it."""
    match fault:
        case WorkerDeath():
            return f"die:{','.join(map(str, fault.workers))}@{fault.at_s!r}"
        case WorkerHang():
            return f"hang:{fault.worker}@{fault.at_s!r}+{fault.duration_s!r}"
        case Delay():
            return f"late:{fault.worker}@{fault.at_s!r}+{fault.duration_s!r}"
        case LinkCut():
            return f"cut:{_nodes(fault)}@{fault.at_s!r}+{fault.duration_s!r}"
        case Partition():
            return f"split:{','.join(map(str, fault.workers))}@{fault.at_s!r}+{fault.duration_s!r}"
        case ConnectionReset():
            return f"reset:{fault.worker}{'' if fault.peer is None else f'-{fault.peer}'}@{fault.at_s!r}"
        case WorkerArrival():
            return f"join:{fault.worker}@{fault.at_s!r}"
        case WorkerDeparture():
            return f"leave:{fault.worker}@{fault.at_s!r}"
        case CoordinatorRestart():
            return f"restart@{fault.at_s!r}+{fault.duration_s!r}"


def _nodes(cut: LinkCut) -> str:
    if cut.peer == SERVERS:
        return f"{cut.worker}-s"
    if cut.lost == "both":
        return f"{cut.worker}" if cut.peer is None else f"{cut.worker}-{cut.peer}"
    peer = "c" if cut.peer is None else f"{cut.peer}"
    return f"{cut.worker}>{peer}" if cut.lost == "worker" else f"{peer}>{cut.worker}"


def check_faults(faults: Iterable[Fault], world: int) -> None:
    """Raise ValueError where a fault names a worker that is not there, or a newcomer that is."""
    known = set(range(world))
    for fault in sorted(faults, key=lambda fault: fault.at_s):
        if isinstance(fault, WorkerArrival):
            if fault.worker in known:
                raise ValueError(f"fault {format_fault(fault)}: worker {fault.worker} is there already")
            known.add(fault.worker)
            continue
        named = (
            set(fault.workers)
            if isinstance(fault, WorkerDeath | Partition)
            else {getattr(fault, "worker", 0)}
        )
        if isinstance(fault, LinkCut | ConnectionReset) and fault.peer not in (None, SERVERS):
            named.add(fault.peer)
        for worker in sorted(named - known):
            raise ValueError(f"fault {format_fault(fault)}: there is no worker {worker} at that time")
