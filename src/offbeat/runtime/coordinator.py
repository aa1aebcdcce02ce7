"""The coordinator: one small process that hears every worker, asks the policies and tells the workers.

It holds no tensor and never imports torch. All it decides comes from policies; all that goes in and out is
recorded. Run as `python -m offbeat.runtime.coordinator`: it reads its configuration, one JSON object, from
standard input, answers with its addresses on standard output and then serves until the job is over.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

from offbeat.errors import LinkError, OffbeatError, ProtocolError
from offbeat.events import Action, Deal, Event, Failed, Joined, Left, Lost, Refuse, Start, Stop, Tick
from offbeat.policies import decide
from offbeat.record import LogWriter, build_policy, decode_events, encode_actions
from offbeat.runtime.links import Endpoint


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy to build: `path` is `module:Class` inside `offbeat.policies`."""

    path: str
    arguments: dict[str, Any] = {}


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """All that a coordinator is told.

    Attributes:
        host: the address to listen on and to be reached at.
        log_path: where the run log goes, None for no log.
        about: further plain data for the log's header.
        tick_s: how often policies hear that time passed.
        silent_s: a worker from whom nothing came for so long is lost.
        stay_s: how long after its start a coordinator that has not started the job stays for workers who may
            still come, to tell them why; as long as they are waited for.
    """

    job: str
    token: str
    host: str
    policies: tuple[PolicySpec, ...]
    log_path: str | None = None
    about: dict[str, Any] = {}
    tick_s: float = 0.5
    silent_s: float = 10.0
    stay_s: float = 30.0


_TEXT_MAX = 10_000  # characters; what a reason quotes must fit into a control message


@dataclass(frozen=True)
class _Arrival:
    peer: str
    payload: bytes


class Coordinator:
    """Feeds what arrives to the policies and sends out what they decide.

    Args:
        configuration: see `Configuration`.
    """

    NAME = "coordinator"

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._policies = [build_policy(spec.path, spec.arguments) for spec in configuration.policies]
        self._inbox: queue.SimpleQueue[_Arrival | BaseException] = queue.SimpleQueue()
        self._worker_of: dict[str, int] = {}
        self._present: set[str] = set()
        self._refused: set[str] = set()
        self._expected = 0  # workers, as the one says that expects most
        self._has_started = False
        self._opened_s = self._ticked_s = time.monotonic()
        self._log = self._open_log()
        self._endpoint = Endpoint(
            self.NAME,
            job=configuration.job,
            token=configuration.token,
            on_message=lambda peer, payload: self._inbox.put(_Arrival(peer, payload)),
            on_lost=self._inbox.put,
            on_left=lambda peer: self._inbox.put(LinkError(peer, "it hung up before it left the job")),
            on_error=self._inbox.put,
            host=configuration.host,
            silent_s=configuration.silent_s,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where workers reach it, best first."""
        return self._endpoint.addresses

    def serve(self) -> None:
        """Runs until every worker has gone, or, before the start, nobody is to be waited for any more.

        An error of its own ends the job: every worker is told, and then it is raised.
        """
        try:
            while self._present or not self._is_over():
                for event, peer in self._next():
                    self._handle(event, peer)
        except Exception as error:
            with suppress(LinkError):
                text = f"the coordinator failed: {type(error).__name__}: {error}"[:_TEXT_MAX]
                self._tell([Stop(worker=None, step=None, reason=text)])
            raise
        finally:
            self._endpoint.close()
            if self._log is not None:
                self._log.close()

    def _is_over(self) -> bool:
        everybody_came = 0 < self._expected <= len(self._worker_of)
        return (
            self._has_started
            or everybody_came
            or time.monotonic() - self._opened_s > self._configuration.stay_s
        )

    def _next(self) -> Iterator[tuple[Event, str]]:
        """Yields what happened next, with the peer that said it ("" where nobody said it)."""
        wait_s = self._ticked_s + self._configuration.tick_s - time.monotonic()
        try:
            if wait_s <= 0:  # time passes also where there is always something to hear
                raise queue.Empty
            item = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            self._ticked_s = time.monotonic()
            if self._log is not None:
                self._log.flush()
            yield Tick(now_s=self._ticked_s), ""
            return
        match item:
            case _Arrival() if item.peer not in self._refused:
                try:
                    for event in decode_events(item.payload, time.monotonic()):
                        yield event, item.peer
                except ProtocolError as error:
                    self._expel(item.peer, str(error))
            case LinkError() if item.peer in self._present:
                yield self._lost(item.peer, str(item)), ""
            case BaseException() if not isinstance(item, LinkError):
                raise item

    def _handle(self, event: Event, peer: str) -> None:
        if isinstance(event, Joined):
            event = replace(event, peer=peer)
        if peer and (peer in self._refused or not self._may_say(event, peer)):
            return
        self._note(event, peer)
        actions = decide(self._policies, event)
        if self._log is not None:
            self._log.event(event)
            self._log.actions(actions)
        if actions:
            self._tell(actions)
            if self._log is not None:
                self._log.flush()

    def _may_say(self, event: Event, peer: str) -> bool:
        """A peer joins first, once, and then speaks for the worker as which it joined."""
        wrong = self._wrong(event, peer)
        if wrong is not None:
            self._expel(peer, wrong)
        return wrong is None

    def _wrong(self, event: Event, peer: str) -> str | None:
        kind = type(event).__name__
        if isinstance(event, Tick | Lost):
            return f"a worker must not send {kind}, which the coordinator observes itself"
        joined = self._worker_of.get(peer)
        if (joined is None) != isinstance(event, Joined):
            expected = "Joined, once, as its first event"
            return f"expected {expected}, got {kind} from {peer}"
        if joined is not None and joined != event.worker:
            return f"{peer} joined as worker {joined} and may not speak for worker {event.worker}"
        longest = max(map(len, _texts(event)), default=0)
        if longest > _TEXT_MAX:
            return f"expected texts of at most {_TEXT_MAX} characters, got {longest} in {kind} from {peer}"
        return None

    def _note(self, event: Event, peer: str) -> None:
        match event:
            case Joined():
                self._worker_of[peer] = event.worker
                self._present.add(peer)
                self._expected = max(self._expected, event.world)
            case Left() | Failed():
                self._present.discard(peer)

    def _tell(self, actions: Sequence[Action]) -> None:
        self._has_started |= any(isinstance(action, Start) for action in actions)
        for action in actions:
            if isinstance(action, Refuse):
                self._refuse(action.peer, action.reason)
        common = [action for action in actions if not isinstance(action, Refuse | Deal)]
        payload = encode_actions(common) if common else b""
        dealt = {action.worker for action in actions if isinstance(action, Deal)}
        for peer in sorted(self._present):
            worker = self._worker_of[peer]
            if worker in dealt:
                mine = [action for action in actions if _is_for(action, worker)]
                self._endpoint.send(peer, encode_actions(mine))
            elif common:
                self._endpoint.send(peer, payload)

    def _lost(self, peer: str, cause: str) -> Lost:
        self._present.discard(peer)
        return Lost(now_s=time.monotonic(), worker=self._worker_of[peer], cause=cause)

    def _expel(self, peer: str, reason: str) -> None:
        """Turns a peer away that broke the protocol; if it takes part in the job, that has lost a worker."""
        took_part = peer in self._present
        self._refuse(peer, reason)
        if took_part:
            self._handle(self._lost(peer, f"it broke the protocol: {reason}"), "")

    def _refuse(self, peer: str, reason: str) -> None:
        """Turns a peer away; what it still says is not heard."""
        self._refused.add(peer)
        self._present.discard(peer)
        self._endpoint.send(peer, encode_actions([Refuse(peer=peer, reason=reason)]))

    def _open_log(self) -> LogWriter | None:
        configuration = self._configuration
        if configuration.log_path is None:
            return None
        header = {
            "job": configuration.job,
            "policies": [msgspec.to_builtins(spec) for spec in configuration.policies],
            **configuration.about,
        }
        return LogWriter(Path(configuration.log_path), header)


def _is_for(action: Action, worker: int) -> bool:
    """Whether a worker of the job is told of an action."""
    match action:
        case Refuse():
            return False
        case Deal():
            return action.worker == worker
        case _:
            return True


def _texts(event: Event) -> Iterator[str]:
    """Yields every text of an event, which a reason may quote."""
    for value in vars(event).values():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                yield text


def main(source: TextIO = sys.stdin, answer: TextIO = sys.stdout) -> int:
    """Reads the configuration, answers with addresses or an error, serves."""
    try:
        coordinator = Coordinator(msgspec.json.decode(source.readline(), type=Configuration))
    except (OffbeatError, ValueError, OSError) as error:
        json.dump({"error": str(error)}, answer)
        answer.write("\n")
        answer.flush()
        return 1
    json.dump({"addresses": coordinator.addresses}, answer)
    answer.write("\n")
    answer.flush()
    answer.close()
    coordinator.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
