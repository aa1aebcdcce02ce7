"""Workers that average their models, of which one stands still in a phase while something happens to it.

A worker that has reached a place touches a file, and stands there until a test touches another one. Where the
phase is a state of the job, the test sees it in the policy, which it feeds with the events of the run log.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.events import Joined, Lost, PeerUnreachable
from offbeat.policies import dispatch_event
from offbeat.policies.model_averaging.averaging import ModelAveraging
from offbeat.runtime.collectives.link_exchange import _ScheduleRun
from offbeat.runtime.control.peers import WorkerPeers
from offbeat.runtime.model_averaging.synchronizer import ModelAveragingSynchronizer
from offbeat.runtime.training import job_connection
from offbeat.strategies import DiLoCo
from offbeat.wire.codec import is_event
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import build_policies
from support.averaged_training import Averaging, check_run, train
from support.jobs import Job, job
from support.processes import Ended, values
from support.run_logs import entries_of, wait_for_entry, wait_until
from support.tcp_proxy import Line

WORKERS, VICTIM, HOLDER, NEWCOMER = 3, 1, 2, 3
SILENT_S = 3.0  # the default is 10 s
GATE_STEP = 3  # at which all stand, so that nobody ends before
PHASES = (
    "exchanging",
    "received",
    "epoch's mean",
    "waiting",
    "computing",
    "resting",
    "finished",
    "last averaging",
    "joining",
)
MEANS_OF_ALL = ("epoch's mean", "last averaging")


class Places:
    """Places of the workers of a job, as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stand(self, name: str, until: str = "open") -> None:
        """Reaches a place, and stands there until another one is opened."""
        self.open(name)
        wait_until((self._folder / until).exists, f"the way on from {name}")

    def open(self, name: str) -> None:
        (self._folder / name).touch()

    def close(self, name: str) -> None:
        (self._folder / name).unlink()

    def is_open(self, name: str) -> bool:
        return (self._folder / name).exists()


# In a worker ------------------------------------------------------------------------------------------------


def stands(
    rank: int, emit: Callable[[Any], None], strategy: Averaging, folder: Path, phase: str, rate: float
) -> tuple[int, list[float], int]:
    """Trains, and the victim stands still in a phase; see `train` for what is returned."""
    job_connection._SILENT_S = SILENT_S
    places, is_victim = Places(folder), rank == VICTIM
    _put_lines_between_workers(rank, places)
    session_of_loop: list[Any] = []
    gate_step = GATE_STEP if phase != "waiting" else None if is_victim else 1

    def before_step(session: Any, steps: int) -> None:
        session_of_loop[:] = [session]
        if phase in ("resting", "finished"):
            if rank == HOLDER and steps == 0:
                places.stand("holds", until="go")
            elif steps == 0:  # else the others may use all samples before the holder has any
                wait_until(lambda: places.is_open("holds"), "the holder's first batch")
        elif is_victim and steps == 1 and phase == "computing":
            places.stand("reached")
        elif is_victim and phase == "received" and _is_due(session) and not places.is_open("reached"):
            wait_until(lambda: _has_received(session), "the end of an exchange")
            places.stand("reached")
        elif phase not in MEANS_OF_ALL and steps == gate_step:
            places.stand(f"gate of {rank}")

    def after_loop() -> None:
        if phase == "finished" and rank == HOLDER:
            places.stand("holds again")

    if is_victim and phase == "joining":
        _stand_before_the_state_is_received(places)
    elif is_victim and phase in ("exchanging", *MEANS_OF_ALL):
        _hold_back_what_is_sent(places, session_of_loop, is_of_all=phase in MEANS_OF_ALL)
    elif is_victim and phase == "last step":
        _hold_back_the_last_step(places, session_of_loop)
    epochs = 1 if phase in ("resting", "finished") else 2
    return train(
        rank,
        emit,
        strategy,
        folder,
        rate=rate,
        epochs=epochs,
        spreads=not isinstance(strategy, DiLoCo),  # whose workers have one anchor
        before_step=before_step,
        after_loop=after_loop,
    )


def _hold_back_the_last_step(places: Places, session_of_loop: list[Any]) -> None:
    """The worker does not send in the last step of an exchange, so that one other member lacks the mean."""
    send = _ScheduleRun._send

    def send_all_but_the_last(self: _ScheduleRun, forward: Any, data: memoryview, start: int) -> None:
        if session_of_loop and forward.step == len(self._plan.steps) - 1:
            places.open("reached")
        else:
            send(self, forward, data, start)

    _ScheduleRun._send = send_all_but_the_last  # type: ignore[method-assign]


def _is_due(session: Any) -> bool:
    """Whether the worker is ready for an averaging, or in one."""
    protocol = session._synchronizer._protocol
    return protocol.is_ready or protocol.averaging is not None


def _has_received(session: Any) -> bool:
    """Whether the exchange of an averaging with others has ended, in the background."""
    pending = session._synchronizer._snapshots._pending
    return bool(pending) and all(one.ended_s is not None for one in pending)


def _stand_before_the_state_is_received(places: Places) -> None:
    carry_out = ModelAveragingSynchronizer._carry_out

    def stand_first(self: ModelAveragingSynchronizer, averaging: Any) -> bool:
        ModelAveragingSynchronizer._carry_out = carry_out  # type: ignore[method-assign]
        places.stand("reached")
        return carry_out(self, averaging)

    ModelAveragingSynchronizer._carry_out = stand_first  # type: ignore[method-assign]


def _hold_back_what_is_sent(places: Places, session_of_loop: list[Any], *, is_of_all: bool) -> None:
    """The worker sends nothing of its model in an exchange with others, until that is allowed."""
    begin = _ScheduleRun.begin

    def begin_later(self: _ScheduleRun, *arguments: Any) -> None:
        if not session_of_loop or places.is_open("reached"):
            return begin(self, *arguments)
        averaging = session_of_loop[0]._synchronizer._protocol.averaging
        if averaging is None or averaging.joining or averaging.includes_buffers is not is_of_all:
            return begin(self, *arguments)

        def wait() -> None:
            places.stand("reached")
            self._endpoint.call_soon(partial(begin, self, *arguments))

        threading.Thread(target=wait, daemon=True).start()
        return None

    _ScheduleRun.begin = begin_later  # type: ignore[method-assign]


def _put_lines_between_workers(rank: int, places: Places) -> None:
    """Let the victim and the others reach each other by lines, which are cut while "cut" is open."""
    add, lines = WorkerPeers.add, []

    def add_behind_lines(self: WorkerPeers, peers: Any) -> None:
        changed = []
        for peer in peers:
            if (peer.worker == VICTIM) != (rank == VICTIM):
                host, port = (
                    next(one for one in peer.addresses if one.startswith("tcp://"))
                    .removeprefix("tcp://")
                    .rsplit(":", 1)
                )
                lines.append(Line((host, int(port))))
                peer = replace(peer, addresses=(lines[-1].address,))
            changed.append(peer)
        add(self, tuple(changed))

    def watch() -> None:
        while True:
            wait_until(lambda: places.is_open("cut") or places.is_open("over"), "a cut", 1e6)
            for line in lines:
                line.cut(new_ones_too=True)
                line.reset()
            wait_until(lambda: not places.is_open("cut"), "the end of the cut", 1e6)
            for line in lines:
                line.mend()
                line.reset()

    WorkerPeers.add = add_behind_lines  # type: ignore[method-assign]
    threading.Thread(target=watch, daemon=True).start()


def joins(
    rank: int, emit: Callable[[Any], None], strategy: Averaging, folder: Path, phase: str
) -> tuple[int, list[float], int]:
    """A newcomer."""
    job_connection._SILENT_S = SILENT_S
    epochs = 1 if phase in ("resting", "finished") else 2
    return train(rank, emit, strategy, folder, epochs=epochs, spreads=False)


# In a test --------------------------------------------------------------------------------------------------


class Fault:
    """What happens while the victim stands in a phase.

    Args:
        running: the job.
        log: its run log.
        places: of its workers.
    """

    def __init__(self, running: Job, log: Path, places: Places) -> None:
        self.running, self.log, self.places = running, log, places

    def go_on(self) -> None:
        """Lets all workers go on that stand in a place."""
        for name in ("go", "open"):
            self.places.open(name)

    def kill(self) -> None:
        self.running.signal(VICTIM, signal.SIGKILL)
        self._wait_for_loss()

    def stop(self) -> None:
        self.running.signal(VICTIM, signal.SIGSTOP)
        self._wait_for_loss()

    def _wait_for_loss(self) -> None:
        wait_for_entry(self.log, "the loss", lambda one: isinstance(one, Lost) and one.worker == VICTIM)

    def join(self, strategy: Averaging, folder: Path, phase: str) -> None:
        self.running.add(joins, strategy, folder, phase)
        wait_for_entry(
            self.log, "the newcomer", lambda one: isinstance(one, Joined) and one.worker == NEWCOMER
        )

    def kill_coordinator(self) -> None:
        killed = self.running.coordinator()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: self.running.coordinator() != killed, "the next coordinator")

    def cut(self) -> None:
        self.places.open("cut")
        wait_for_entry(self.log, "the outage", self._is_of_the_victim)

    def _is_of_the_victim(self, entry: Any) -> bool:
        return isinstance(entry, PeerUnreachable) and VICTIM in (entry.worker, entry.peer)


def policy_of(log: Path) -> ModelAveraging:
    """The policy in the state in which the run log shows it."""
    record = read_log(log)
    policies = build_policies(record.header)
    for entry in record.entries:
        if is_event(entry):
            dispatch_event(policies, entry)
    (policy,) = [one for one in policies if isinstance(one, ModelAveraging)]
    return policy


def wait_for_policy(log: Path, what: str, condition: Callable[[ModelAveraging], bool]) -> None:
    wait_until(lambda: bool(entries_of(log)) and condition(policy_of(log)), what)


@contextmanager
def standing(strategy: Averaging, folder: Path, phase: str, rate: float = 0.05) -> Iterator[Fault]:
    """A job whose victim stands in a phase; at the end all workers may go on."""
    log, places = folder / "log", Places(folder)
    env = {"OFFBEAT_RUN_LOG": str(log)}
    with job(stands, WORKERS, strategy, folder, phase, rate, env=env) as running:
        if phase in ("resting", "finished"):
            wait_for_policy(log, "two that rest", lambda policy: policy._resting == {0, VICTIM})
        if phase == "finished":
            places.open("go")
            wait_for_policy(log, "two that wait", lambda policy: policy._roster.finished == {0, VICTIM})
        elif phase == "waiting":
            wait_until(
                lambda: all(places.is_open(f"gate of {rank}") for rank in (0, HOLDER)),
                "others at their gates",
            )
            wait_for_policy(log, "a worker that waits", lambda policy: policy._groups.ready == {VICTIM})
        elif phase != "resting":
            wait_until(lambda: places.is_open("reached"), f"the victim {phase}")
        fault = Fault(running, log, places)
        try:
            yield fault
        finally:
            fault.go_on()


def check_end(ended: list[Ended], folder: Path, phase: str, strategy: Averaging) -> None:
    """Checks the end of all workers but those that were not to survive; see `check_run`."""
    epochs = 1 if phase in ("resting", "finished") else 2
    check_run(folder / "log", folder, values(ended), strategy, epochs=epochs)
