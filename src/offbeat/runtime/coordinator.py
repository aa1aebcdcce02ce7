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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

from offbeat.errors import LinkError, OffbeatError, ProtocolError
from offbeat.events import Action, Event, Failed, Joined, Left, Lost, Refuse, Tick
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
        idle_s: how long to stay without a single worker before giving up.
    """

    job: str
    token: str
    host: str
    policies: tuple[PolicySpec, ...]
    log_path: str | None = None
    about: dict[str, Any] = {}
    tick_s: float = 0.5
    idle_s: float = 60.0


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
        self._inbox: queue.SimpleQueue[_Arrival | LinkError] = queue.SimpleQueue()
        self._worker_of: dict[str, int] = {}
        self._present: set[str] = set()
        self._refused: set[str] = set()
        self._seen_anybody = False
        self._ticked_s = time.monotonic()
        self._log = self._open_log()
        self._endpoint = Endpoint(
            self.NAME,
            job=configuration.job,
            token=configuration.token,
            on_message=lambda peer, payload: self._inbox.put(_Arrival(peer, payload)),
            on_lost=self._inbox.put,
            on_left=lambda peer: self._inbox.put(LinkError(peer, "it hung up before it left the job")),
            host=configuration.host,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where workers reach it, best first."""
        return self._endpoint.addresses

    def serve(self) -> None:
        """Runs until every worker has gone, or none has come for `idle_s` seconds."""
        idle_since_s = time.monotonic()
        try:
            while True:
                for event, peer in self._next():
                    self._handle(event, peer)
                now_s = time.monotonic()
                if self._present:
                    idle_since_s = now_s
                elif self._seen_anybody or now_s - idle_since_s > self._configuration.idle_s:
                    return
        finally:
            if self._log is not None:
                self._log.close()
            self._endpoint.close()

    def _next(self) -> Iterator[tuple[Event, str]]:
        """Yields what happened next, with the peer that it came from ("" for nobody)."""
        due_s = self._ticked_s + self._configuration.tick_s
        try:
            item = self._inbox.get(timeout=max(0.0, due_s - time.monotonic()))
        except queue.Empty:
            self._ticked_s = time.monotonic()
            if self._log is not None:
                self._log.flush()
            yield Tick(now_s=self._ticked_s), ""
            return
        if isinstance(item, LinkError):
            if item.peer in self._present:
                worker = self._worker_of[item.peer]
                yield Lost(now_s=time.monotonic(), worker=worker, cause=str(item)), item.peer
        elif item.peer not in self._refused:
            try:
                for event in decode_events(item.payload, time.monotonic()):
                    yield event, item.peer
            except ProtocolError as error:
                self._refuse(item.peer, str(error))

    def _handle(self, event: Event, peer: str) -> None:
        if isinstance(event, Joined):
            event = replace(event, peer=peer)
        if peer and not self._may_say(event, peer):
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
        """A peer joins first, and then speaks for the worker as which it joined."""
        if isinstance(event, Tick):
            self._refuse(peer, "a worker must not send a Tick: time is the coordinator's")
            return False
        joined = self._worker_of.get(peer)
        if joined is None and not isinstance(event, Joined):
            self._refuse(peer, f"expected Joined as the first event of {peer}, got {type(event).__name__}")
            return False
        if joined is not None and joined != event.worker:
            self._refuse(
                peer, f"{peer} joined as worker {joined} and may not speak for worker {event.worker}"
            )
            return False
        return True

    def _note(self, event: Event, peer: str) -> None:
        match event:
            case Joined():
                self._worker_of[peer] = event.worker
                self._present.add(peer)
                self._seen_anybody = True
            case Left() | Lost() | Failed():
                self._present.discard(peer)

    def _tell(self, actions: Sequence[Action]) -> None:
        common = [action for action in actions if not isinstance(action, Refuse)]
        for action in actions:
            if isinstance(action, Refuse):
                self._refuse(action.peer, action.reason)
        if common:
            payload = encode_actions(common)
            for peer in sorted(self._present):
                self._endpoint.send(peer, payload)

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
