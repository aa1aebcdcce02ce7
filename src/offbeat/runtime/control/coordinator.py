"""The coordinator: one small process that hears every worker, asks the policies and tells the workers.

It holds no tensor and never imports torch. All it decides comes from policies; all that goes in and out is
recorded. Run as `python -m offbeat.runtime.coordinator`: it reads its configuration, one JSON object, from
standard input, answers with its addresses on standard output and then serves until the job is over.

What it hears is written to a journal before anybody is told what follows from it, so that a coordinator that
is killed can be started again (see `offbeat.runtime.supervisor`) and go on as if nothing had happened.
"""

from __future__ import annotations

import math
import queue
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TextIO, cast

import msgspec

from offbeat.errors import LinkError, OffbeatError, ProtocolError
from offbeat.events import (
    Action,
    ClientGone,
    CloseServers,
    Deal,
    EvaluatePart,
    Event,
    Failed,
    Grant,
    GroupViewed,
    Joined,
    Left,
    Lend,
    LendSnapshot,
    Lost,
    MergeStates,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeSilent,
    PassesEnded,
    PeerReachable,
    PeerUnreachable,
    Preempt,
    Recall,
    Refuse,
    RoundNamed,
    Settle,
    SpaceRefused,
    Start,
    Stop,
    TaskIssued,
    Tick,
    Used,
    Validated,
    Validating,
    Viewed,
    WorkerLost,
    WorkerRefused,
)
from offbeat.policies import decide
from offbeat.runtime.control.channel import Tally, decode_tally, encode_tally
from offbeat.runtime.control.journal import Journal
from offbeat.runtime.control.run_log import LogPlace, RunLog
from offbeat.runtime.control.starting import failure, given, say
from offbeat.runtime.processes.supervisor import supervise
from offbeat.runtime.transport import addresses as places
from offbeat.runtime.transport.endpoint import UNREACHABLE_S, Endpoint
from offbeat.wire.record import (
    build_policy,
    decode_actions,
    decode_events,
    encode_actions,
    from_plain,
    messages_of,
    to_plain,
)


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy to build: `path` is `module:Class` inside `offbeat.policies`."""

    path: str
    arguments: dict[str, Any] = {}


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """All that a coordinator is told.

    Attributes:
        host: the address to listen on and to be reached at.
        log_path: where the run log goes, None for no log.
        log_bytes_max: what it may take, all parts together; None for one file without a bound.
        about: further plain data for the log's header.
        tick_s: how often policies hear that time passed.
        silent_s: a worker from whom nothing came for so long is lost.
        stay_s: how long after its start a coordinator that has not started the job stays for workers who may
            still come, to tell them why; as long as they are waited for.
        journal_events: after how many events the journal begins anew with the state of the policies. So many
            are replayed at most when the coordinator is started again (10 000 took 0.2 s on one core).
    """

    job: str
    token: str
    host: str
    policies: tuple[PolicySpec, ...]
    log_path: str | None = None
    log_bytes_max: int | None = None
    about: dict[str, Any] = {}
    tick_s: float = 0.25
    silent_s: float = 10.0
    stay_s: float = 30.0
    journal_events: int = 10_000


_BACK_S = 15.0  # reaching a worker may take 10 s, and what it has missed has to be heard
_NAMED_MAX = 16  # workers
_TEXT_MAX = 10_000  # characters; what a reason quotes must fit into a control message
_LOG_ENDED = b"the run log has ended"  # a record of the journal: a successor does not try again


@dataclass(frozen=True)
class _Arrival:
    peer: str
    payload: bytes


@dataclass(frozen=True)
class _Silence:
    """Nothing comes from a peer; or something comes again, where there is no cause."""

    peer: str
    cause: str


@dataclass
class _Member:
    """A peer that has joined, whether it takes part or not.

    Attributes:
        speaker: the worker, by its id, or the node, by its name, for which it speaks.
        addresses: where it listens.
        is_present: it has neither left, failed nor been lost, and was not refused.
        is_refused: nothing that it says counts.
        recorded: how many events were heard of it.
        told: how many actions it was told.
        unheard: the last of them, which it has not said it has heard.
        is_silent: the policies have been told that nothing comes from it.
    """

    speaker: int | str
    addresses: tuple[str, ...]
    is_present: bool = True
    is_refused: bool = False
    is_silent: bool = False
    recorded: int = 0
    told: int = 0
    unheard: deque[Action] = field(default_factory=deque)


class Coordinator:
    """Feeds what arrives to the policies and sends out what they decide.

    It listens from the beginning and serves later, perhaps in a child of the process that made it, and in
    another child if that one was killed: each begins with what the journal says.

    Args:
        configuration: see `Configuration`.

    Attributes:
        addresses: where workers reach it, best first.
        journal: all that a successor needs.

    Raises:
        ValueError: the configuration makes no sense.
        OSError: it is impossible to listen there, or to begin the log.
    """

    NAME = "coordinator"

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._policies = [build_policy(spec.path, spec.arguments) for spec in configuration.policies]
        self._inbox: queue.SimpleQueue[_Arrival | _Silence | BaseException] = queue.SimpleQueue()
        self._members: dict[str, _Member] = {}  # by link name
        self._present: set[str] = set()
        self._strangers: set[str] = set()  # turned away before they joined
        self._connections: dict[str, int] = {}  # of those who have said a tally
        self._away: dict[str, float] = {}  # present, and to be heard of before time passes; until when
        self._expected = 0  # workers, as the one says that expects most
        self._has_started = False
        self._opened_s = self._ticked_s = self._turned_s = time.monotonic()
        self._held_up_s = float("-inf")
        self._endpoint: Endpoint | None = None
        self.journal = Journal()
        self._log = self._open_log()
        self._log_begins = self._log.place
        self._listeners = places.listen(configuration.host)
        self.addresses = tuple(address for _, address in self._listeners)

    def serve(self) -> None:
        """Runs until every worker has gone, or, before the start, nobody is to be waited for any more.

        An error of its own ends the job: every worker is told, and then it is raised.

        Raises:
            OffbeatError: the journal of an earlier coordinator of this job cannot be replayed.
        """
        self._restore()
        configuration = self._configuration
        self._endpoint = Endpoint(
            self.NAME,
            job=configuration.job,
            token=configuration.token,
            on_message=lambda peer, payload: self._inbox.put(_Arrival(peer, payload)),
            on_lost=self._inbox.put,
            on_left=lambda peer: self._inbox.put(LinkError(peer, "it hung up before it left the job")),
            on_unreachable=lambda peer, cause: self._inbox.put(_Silence(peer, cause)),
            on_reachable=lambda peer: self._inbox.put(_Silence(peer, "")),
            on_error=self._inbox.put,
            listeners=self._listeners,
            silent_s=configuration.silent_s,
        )
        try:
            for peer in sorted(self._present):
                self._call_back(peer)
            self._turned_s = self._ticked_s = time.monotonic()
            while self._present or not self._is_over():
                for event, peer in self._next():
                    self._handle(event, peer)
            self._flush()  # a goodbye says that everything has been heard
        except Exception as error:
            with suppress(LinkError):
                text = f"the coordinator failed: {type(error).__name__}: {error}"[:_TEXT_MAX]
                self._tell([Stop(worker=None, step=None, reason=text)])
            raise
        finally:
            self._endpoint.close()
            self._log.close()

    def _is_over(self) -> bool:
        everybody_came = 0 < self._expected <= len(self._members)
        return (
            self._has_started
            or everybody_came
            or time.monotonic() - self._opened_s > self._configuration.stay_s
        )

    # What is heard ---------------------------------------------------------------------------------------

    def _next(self) -> Iterator[tuple[Event, str]]:
        """Yields what happened next, with the peer that it is about ("" where it is about nobody)."""
        wait_s = self._ticked_s + self._configuration.tick_s - time.monotonic()
        try:
            if wait_s <= 0:  # time passes also where there is always something to hear
                raise queue.Empty
            item = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            yield from self._tick()
            return
        self._see_whether_held_up()
        match item:
            case _Arrival() if item.peer not in self._strangers:
                try:
                    tally = decode_tally(item.payload)
                    if tally is not None:
                        self._answer(item.peer, tally)
                        return
                    for event in decode_events(item.payload, time.monotonic()):
                        if self._may_say(event, item.peer):
                            yield event, item.peer
                except ProtocolError as error:
                    self._expel(item.peer, str(error))
            case _Silence() if item.peer in self._present:
                if self._members[item.peer].is_silent == (not item.cause):
                    yield self._silence(item.peer, item.cause), item.peer
            case LinkError() if item.peer in self._present:
                # Where this process was held up itself, it is called back; where it has given the session up
                # and begins another one, it is there.
                is_own_fault = time.monotonic() - self._held_up_s < self._configuration.silent_s
                if (is_own_fault or item.failure == "replaced") and item.peer not in self._away:
                    self._call_back(item.peer)
                else:
                    yield self._lost(item.peer, str(item)), item.peer
            case BaseException() if not isinstance(item, LinkError):
                raise item

    def _tick(self) -> Iterator[tuple[Event, str]]:
        """Time has passed; policies hear of it once everybody can be heard."""
        self._see_whether_held_up()
        now_s = time.monotonic()
        if now_s - self._ticked_s < self._configuration.tick_s:
            return
        self._ticked_s = now_s
        self._flush()
        for peer in [peer for peer, until_s in self._away.items() if now_s > until_s]:
            yield self._lost(peer, f"it was not heard of again within {_BACK_S:g} s"), peer
        if not self._away:
            yield Tick(now_s=now_s), ""

    def _see_whether_held_up(self) -> None:
        """Where this process was held up itself, others are not to blame for what it has not heard."""
        now_s = time.monotonic()
        gap_s, self._turned_s = now_s - self._turned_s, now_s
        if gap_s > 4 * self._configuration.tick_s:
            self._ticked_s = now_s
        if gap_s > self._configuration.silent_s / 2:
            self._held_up_s = now_s

    def _may_say(self, event: Event, peer: str) -> bool:
        """A peer joins first, once, and then speaks for the worker or node as which it joined."""
        known = self._members.get(peer)
        if peer in self._strangers or (known is not None and known.is_refused):
            return False
        wrong = self._wrong(event, peer)
        if wrong is not None:
            self._expel(peer, wrong)
        return wrong is None

    def _wrong(self, event: Event, peer: str) -> str | None:
        kind = type(event).__name__
        if _is_observed(event):
            return f"a worker or node must not send {kind}, which the coordinator observes itself"
        known = self._members.get(peer)
        speaker = _speaker(event)
        if (known is None) != isinstance(event, Joined | NodeJoined):
            expected = "Joined or NodeJoined, once, as its first event"
            return f"expected {expected}, got {kind} from {peer}"
        if isinstance(event, NodeJoined) and event.node != peer:
            return f"{peer} may not join as {event.node}"
        if known is not None and known.speaker != speaker:
            return f"{peer} joined as {_named(known.speaker)} and may not speak for {_named(speaker)}"
        longest = max(map(len, _texts(event)), default=0)
        if longest > _TEXT_MAX:
            return f"expected texts of at most {_TEXT_MAX} characters, got {longest} in {kind} from {peer}"
        return None

    def _lost(self, peer: str, cause: str) -> Lost | NodeLost:
        speaker = self._members[peer].speaker
        if isinstance(speaker, str):
            return NodeLost(now_s=time.monotonic(), node=speaker, cause=cause)
        return Lost(now_s=time.monotonic(), worker=speaker, cause=f"{cause} (noticed by the coordinator)")

    def _silence(self, peer: str, cause: str) -> Event:
        """What the policies are told of a peer from which nothing comes, or something comes again."""
        now_s, speaker = time.monotonic(), self._members[peer].speaker
        if isinstance(speaker, str):
            if cause:
                return NodeSilent(now_s=now_s, node=speaker, silent_s=UNREACHABLE_S)
            return NodeHeard(now_s=now_s, node=speaker)
        if cause:
            return PeerUnreachable(now_s=now_s, worker=None, peer=speaker, cause=cause)
        return PeerReachable(now_s=now_s, worker=None, peer=speaker)

    def _expel(self, peer: str, reason: str) -> None:
        """Turns a peer away that broke the protocol; if it takes part in the job, that has lost a worker."""
        if peer in self._present:
            self._handle(self._lost(peer, f"it broke the protocol: {reason}"), peer)
        elif peer not in self._members:
            self._strangers.add(peer)
            self._send(peer, encode_actions([Refuse(peer=peer, reason=reason)]))
        elif not self._members[peer].is_refused:
            self._tell([Refuse(peer=peer, reason=reason)])

    # What follows ----------------------------------------------------------------------------------------

    def _handle(self, event: Event, peer: str) -> None:
        if isinstance(event, Joined):
            event = replace(event, peer=peer)
        actions = self._decide(event, peer)
        answers = encode_actions(actions) if actions else b""
        self.journal.add(msgspec.msgpack.encode((peer, to_plain(event), answers)))
        self._write(event, actions)
        if self._tell(self._told(event, peer, actions)):
            self._flush()
        if self.journal.records >= self._configuration.journal_events or self._log.is_part_over:
            self._renew()

    def _decide(self, event: Event, peer: str) -> list[Action]:
        self._note(event, peer)
        actions = decide(self._policies, event)
        self._has_started |= any(isinstance(action, Start | Viewed) for action in actions)
        return actions

    def _note(self, event: Event, peer: str) -> None:
        match event:
            case Joined():
                self._members[peer] = _Member(event.worker, event.addresses)
                self._present.add(peer)
                self._introduce(peer)
                self._expected = max(self._expected, event.world)
            case NodeJoined():
                self._members[peer] = _Member(event.node, event.addresses)
                self._present.add(peer)
                self._introduce(peer)
            case Left() | Failed() | Lost() | NodeLeft() | NodeLost():
                self._part(peer)
            case PeerUnreachable(worker=None) | NodeSilent():
                self._members[peer].is_silent = True
            case PeerReachable(worker=None) | NodeHeard():
                self._members[peer].is_silent = False
        if not _is_observed(event):
            self._members[peer].recorded += 1

    def _part(self, peer: str) -> None:
        self._members[peer].is_present = False
        self._present.discard(peer)
        self._away.pop(peer, None)

    # What is told ----------------------------------------------------------------------------------------

    def _told(self, event: Event, peer: str, actions: list[Action]) -> list[Action]:
        """What is told after an event: besides what was decided, that one who was lost is out.

        A worker that is lost is told so itself, and the others, unless the job ends with it.
        """
        told = list(actions)
        if isinstance(event, Lost | NodeLost) and not self._members[peer].is_refused:
            lost = _named(self._members[peer].speaker)
            told.append(Refuse(peer=peer, reason=f"{lost} was lost: {event.cause}"))
        if isinstance(event, Lost | Failed) and not any(isinstance(one, Stop) for one in actions):
            told.append(self._worker_lost(event))
        return told

    def _worker_lost(self, event: Lost | Failed) -> WorkerLost:
        cause = (
            event.cause if isinstance(event, Lost) else f"it failed after {event.step} steps: {event.error}"
        )
        speakers = (self._members[peer].speaker for peer in self._present)
        others = sorted(speaker for speaker in speakers if isinstance(speaker, int))
        reason = f"worker {event.worker} was lost: {cause}; training goes on with {_workers(others)}"
        return WorkerLost(worker=event.worker, reason=reason)

    def _tell(self, actions: Sequence[Action]) -> bool:
        """Tells each worker what of these actions is for it; returns whether there was anything to tell."""
        if not actions:
            return False
        for action in actions:
            if isinstance(action, Refuse) and action.peer in self._members:
                self._part(action.peer)
                self._members[action.peer].is_refused = True
        common: list[Action] = []
        payloads: list[bytes] = []
        for peer in sorted(self._members):
            mine = [action for action in actions if self._is_for(action, peer)]
            if not mine:
                continue
            member = self._members[peer]
            member.told += len(mine)
            member.unheard.extend(mine)
            if mine != common:
                common, payloads = mine, messages_of(mine)
            for payload in payloads:
                self._send(peer, payload)
        return True

    def _is_for(self, action: Action, peer: str) -> bool:
        """Whether a worker is told of an action."""
        if isinstance(action, Refuse):
            return action.peer == peer
        if peer not in self._present:
            return False
        speaker = self._members[peer].speaker
        match action:
            case Viewed() | SpaceRefused():
                return action.node == speaker or (not action.node and isinstance(speaker, str))
            case CloseServers():
                return isinstance(speaker, str)
            case ClientGone():
                return isinstance(speaker, str) and speaker.startswith("server-")
            case TaskIssued() | PassesEnded() | WorkerRefused():
                return action.node == speaker
            case GroupViewed():
                return speaker in ([action.node] if action.node else [one.node for one in action.workers])
            case Deal() | Used() | Grant() | Recall() | RoundNamed():
                return action.worker == speaker
            case Settle() | EvaluatePart() | MergeStates():
                return action.worker == speaker
            case LendSnapshot():
                return speaker in (action.worker, action.borrower)
            case Preempt() | Validating() | Validated():
                return isinstance(speaker, int) and action.worker in (None, speaker)
            case Lend():
                return speaker in (action.worker, action.patron)
        return isinstance(speaker, int) or isinstance(action, Stop)

    def _send(self, peer: str, payload: bytes) -> None:
        """Sends a message, after what it follows from has been written down; nothing during a replay."""
        if self._endpoint is not None:
            self.journal.flush()
            self._endpoint.send(peer, payload)

    # Coming back -----------------------------------------------------------------------------------------

    def _call_back(self, peer: str) -> None:
        """Seeks a worker that may live and not be connected; if it cannot be reached, the links say so."""
        assert self._endpoint is not None
        self._away[peer] = time.monotonic() + _BACK_S
        self._introduce(peer)
        worker = self._members[peer]
        self._send(peer, encode_tally(Tally(0, worker.recorded, worker.told)))

    def _introduce(self, peer: str) -> None:
        """Lets the links dial a peer that has joined; what the silence of a node means, a policy decides."""
        member = self._members[peer]
        if self._endpoint is not None:
            silent_s = math.inf if isinstance(member.speaker, str) else None
            with suppress(ValueError):  # else it has to come by itself
                self._endpoint.introduce(peer, member.addresses, lasting=True, silent_s=silent_s)

    def _answer(self, peer: str, tally: Tally) -> None:
        """Says what is recorded of a worker; on a new connection, also what it has missed.

        Raises:
            ProtocolError: it claims to have heard what it was not told.
        """
        worker = self._members.get(peer)
        recorded, told = (worker.recorded, worker.told) if worker is not None else (0, 0)
        unheard = worker.unheard if worker is not None else deque[Action]()
        if not told - len(unheard) <= tally.heard <= told:
            raise ProtocolError(
                f"expected between {told - len(unheard)} and {told} actions to be heard, got {tally.heard}"
            )
        while len(unheard) > told - tally.heard:
            unheard.popleft()
        before = self._connections.get(peer, 0)
        if tally.connection < before:
            return
        self._connections[peer] = tally.connection
        self._send(peer, encode_tally(Tally(tally.connection, recorded, told)))
        if tally.connection > before:
            for action in unheard:
                self._send(peer, encode_actions([action]))
        elif self._away.pop(peer, None) is not None:
            self._ticked_s = time.monotonic()
            self._inbox.put(_Silence(peer, ""))  # which an earlier coordinator may have reported

    def _restore(self) -> None:
        """Goes on where an earlier coordinator of this job was killed, if there was one."""
        snapshot, records = self.journal.read()
        if snapshot or records:
            log_place = self._load(snapshot) if snapshot else self._log_begins
            self._log.go_on(None if _LOG_ENDED in records else log_place)
        for record in records:
            if record == _LOG_ENDED:
                continue
            peer, plain, answers = msgspec.msgpack.decode(record, type=tuple[str, dict[str, Any], bytes])
            event = cast(Event, from_plain(plain))
            actions = self._decide(event, peer)
            if (encode_actions(actions) if actions else b"") != answers:  # bytes: no NaN is equal to itself
                raise OffbeatError(
                    f"the coordinator was started again and decides otherwise: to {event} it answered "
                    f"{decode_actions(answers) if answers else []}, and answers {actions} now"
                )
            self._write(event, actions)
            self._tell(self._told(event, peer, actions))
        self._flush()

    def _renew(self) -> None:
        """Lets the journal begin anew, and the log in a new part if it is time for one."""
        self._flush()
        policies = [policy.state_dict() for policy in self._policies]
        if self._log.is_part_over:
            self._log.begin_part(policies)
        workers = [
            {
                **vars(worker),
                "peer": peer,
                "unheard": [encode_actions([action]) for action in worker.unheard],
            }
            for peer, worker in self._members.items()
        ]
        state = {
            "workers": workers,
            "expected": self._expected,
            "has_started": self._has_started,
            "policies": policies,
            "log": self._log.place,
        }
        self.journal.renew(msgspec.msgpack.encode(state))

    def _load(self, snapshot: bytes) -> LogPlace | None:
        """Takes over what `_renew` wrote; returns where the run log was then."""
        state = msgspec.msgpack.decode(snapshot)
        for plain in state["workers"]:
            peer, addresses, unheard = plain.pop("peer"), plain.pop("addresses"), plain.pop("unheard")
            actions = [action for payload in unheard for action in decode_actions(payload)]
            self._members[peer] = _Member(addresses=tuple(addresses), unheard=deque(actions), **plain)
        self._present = {peer for peer, worker in self._members.items() if worker.is_present}
        self._expected, self._has_started = state["expected"], state["has_started"]
        for policy, one in zip(self._policies, state["policies"], strict=True):
            policy.load_state_dict(one)
        return None if state["log"] is None else LogPlace(*state["log"])

    # The run log -----------------------------------------------------------------------------------------

    def _open_log(self) -> RunLog:
        configuration = self._configuration
        header = {
            "job": configuration.job,
            "policies": [msgspec.to_builtins(spec) for spec in configuration.policies],
            **configuration.about,
        }
        return RunLog(
            configuration.log_path, header, bytes_max=configuration.log_bytes_max, on_end=self._end_log
        )

    def _end_log(self) -> None:
        self.journal.add(_LOG_ENDED)
        self.journal.flush()

    def _write(self, event: Event, actions: Sequence[Action]) -> None:
        """Adds to the log, which shows nothing that a successor might not know."""
        if self._log.is_full:
            self.journal.flush()
        self._log.write(event, actions)

    def _flush(self) -> None:
        self.journal.flush()
        self._log.flush()


def _is_observed(event: Event) -> bool:
    """Whether the coordinator has observed that itself, and nobody may send it."""
    match event:
        case Tick() | Lost() | NodeLost() | NodeSilent() | NodeHeard():
            return True
        case PeerUnreachable() | PeerReachable():
            return event.worker is None
    return False


def _speaker(event: Event) -> int | str:
    """The worker or the node that has sent an event."""
    speaker = event.worker if hasattr(event, "worker") else event.node  # type: ignore[union-attr]
    assert speaker is not None  # what the coordinator observes itself, nobody sends
    return speaker


def _named(speaker: int | str) -> str:
    return speaker if isinstance(speaker, str) else f"worker {speaker}"


def _workers(ids: list[int]) -> str:
    if len(ids) > _NAMED_MAX:
        return f"{len(ids)} workers"
    if len(ids) < 2:
        return f"worker {ids[0]}" if ids else "nobody"
    return f"workers {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def _texts(event: Event) -> Iterator[str]:
    """Yields every text of an event, which a reason may quote."""
    for value in vars(event).values():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                yield text


def main(source: TextIO = sys.stdin, answer: TextIO = sys.stdout) -> int:
    """Reads the configuration, answers with addresses or an error, serves and is started again if killed."""
    try:
        coordinator = Coordinator(given(source, Configuration))
    except (OffbeatError, ValueError, OSError) as error:
        say(answer, failure(error))
        return 1
    say(answer, {"addresses": coordinator.addresses})
    answer.close()
    return supervise(coordinator.serve, lambda: coordinator.journal.size_bytes, name="the coordinator")


if __name__ == "__main__":
    sys.exit(main())
