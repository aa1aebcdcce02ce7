"""Bulk-synchronous training: all workers average with each other in every round.

No Ready is answered: the one group is in force from round 0 on, so exchanges overlap the backward pass
without a request. The policy only detects when lockstep cannot continue, and stops the job with the reason.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Any, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    AssignRoundBatch,
    BatchesSkipped,
    Event,
    Failed,
    Finished,
    Group,
    JobComplete,
    Joined,
    Left,
    Lost,
    PeerReachable,
    PeerUnreachable,
    Ready,
    StepsTimed,
    Tick,
)
from offbeat.policies.membership.reachability import Reachability


@dataclass(slots=True)
class _OpenRound:
    """A round for which some workers are Ready: the fields of the first Ready, and the count of all."""

    worker: int
    step: int
    epoch: int
    batches_fetched: int
    since_s: float
    count: int


class Lockstep:
    """One group of all workers, each with weight 1/W, from the moment the last one joins.

    A round is for the same batch on all workers. A worker that has skipped batches asks which batch a round
    is for. The answer comes once a worker is Ready for the round, or all workers have asked: then it is the
    first batch that not all have skipped.

    The policy stops the job, at most once, when a worker is lost or fails; when two workers are in different
    steps, or at different batches, in the same round; when a worker begins a round that can never complete
    because another worker has finished; or when two workers that both reach the coordinator cannot reach each
    other for too long. After an AbortJob it returns nothing. An outage that passes changes nothing: a worker
    that is silent towards the coordinator is not late. `offbeat.policies.membership.assembly` decides which
    workers may join.

    Source: L. G. Valiant, "A bridging model for parallel computation", Communications of the ACM 33(8),
    1990: supersteps that end when all have ended. Deviation: no message closes a superstep; a worker knows
    that a round is over when it holds the mean, which needs every member's gradients.

    Args:
        world: W, at least 1; the workers are 0 to W-1.
        rounds_ahead_max: how many rounds the Readys received from one worker may be ahead of those received
            from another. No worker can be more than one round ahead of another, because the mean of a round
            needs both; but each worker has its own connection, and the order of arrival across connections is
            arbitrary. Workers train on without a coordinator for 300 s, which are so many rounds of 3 ms, and
            the first one that reaches it again sends its Readys of all of them. So this only bounds the
            memory, and detects a worker that runs without exchanging at all.
        timeout_s: how long a round may stay open after its first Ready, in seconds.
        unreachable_timeout_s: how long two workers may report that they cannot reach each other, in seconds.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        world: int,
        rounds_ahead_max: int = 100_000,
        timeout_s: float = 600.0,
        unreachable_timeout_s: float = 10.0,
    ) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if rounds_ahead_max < 1:
            raise ValueError(f"expected at least 1 round ahead, got {rounds_ahead_max}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"expected a finite timeout of more than 0 s, got {timeout_s}")
        if not 0 < unreachable_timeout_s < math.inf:
            raise ValueError(
                f"expected a finite unreachable_timeout_s of more than 0 s, got {unreachable_timeout_s}"
            )
        self._world = world
        self._silent_s = unreachable_timeout_s
        self._timeout_s = timeout_s
        self._rounds_ahead_max = rounds_ahead_max
        self._joined: set[int] = set()
        self._rounds = [0] * world  # rounds for which each worker was Ready
        self._steps: list[int | None] = [None] * world  # the step of each worker's last Ready
        self._steps_finished = [0] * world  # the steps that each worker reported as finished
        self._left_after: dict[int, int] = {}  # workers that left: their steps
        # Workers that have finished, and stay until all have: their steps.
        self._finished_after: dict[int, int] = {}
        self._open_rounds: dict[int, _OpenRound] = {}
        self._asking: dict[int, BatchesSkipped] = {}  # workers that ask for the batch of their round
        self._rounds_complete = 0
        self._reachability = Reachability()
        self._stopped = False

    def handle(self, event: Event) -> list[Action]:
        """Return the Group, an AbortJob, a JobComplete, the answers to BatchesSkipped, or nothing.

        Raises:
            ProtocolError: an event that no worker of a running job can cause; nothing changes.
        """
        if self._stopped:
            return []
        match event:
            case Joined():
                return self._handle_joined(event)
            case Ready():
                return self._handle_ready(event)
            case BatchesSkipped():
                return self._handle_left_out(event)
            case Left():
                return self._handle_left(event)
            case Lost() | Failed():
                return self._handle_gone(event)
            case Tick():
                return self._handle_tick(event.now_s)
            case PeerUnreachable() | PeerReachable():
                return self._handle_report(event)
            case StepsTimed():
                if 0 <= event.worker < self._world and event.steps:
                    self._steps_finished[event.worker] = event.steps[-1].step + 1
                return []
            case Finished():
                return self._handle_finished(event)
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "joined": sorted(self._joined),
            "rounds": list(self._rounds),
            "steps": list(self._steps),
            "steps_finished": list(self._steps_finished),
            "left_after": [list(entry) for entry in self._left_after.items()],
            "finished_after": [list(entry) for entry in self._finished_after.items()],
            "open_rounds": [[round_, *astuple(first)] for round_, first in self._open_rounds.items()],
            "asking": [vars(asked) for asked in self._asking.values()],
            "rounds_complete": self._rounds_complete,
            "reachability": self._reachability.state_dict(),
            "stopped": self._stopped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._joined = set(state["joined"])
        self._rounds = list(state["rounds"])
        self._steps = list(state["steps"])
        self._steps_finished = list(state["steps_finished"])
        self._left_after = dict(state["left_after"])
        self._finished_after = dict(state["finished_after"])
        self._open_rounds = {round_: _OpenRound(*first) for round_, *first in state["open_rounds"]}
        self._asking = {asked["worker"]: BatchesSkipped(**asked) for asked in state["asking"]}
        self._rounds_complete = state["rounds_complete"]
        self._reachability.load_state_dict(state["reachability"])
        self._stopped = state["stopped"]

    def _is_running(self) -> bool:
        return len(self._joined) == self._world

    def _handle_joined(self, event: Joined) -> list[Action]:
        if self._is_running() or not 0 <= event.worker < self._world:
            return []
        self._joined.add(event.worker)
        if not self._is_running():
            return []
        members = tuple(range(self._world))
        weights = (1.0 / self._world,) * self._world
        reason = f"all {self._world} workers are here, and in lockstep all take part in every round"
        return [
            Group(
                generation=0,
                step=0,
                exchange_id=0,
                members=members,
                joining=(),
                weights=weights,
                reason=reason,
            )
        ]

    def _handle_ready(self, event: Ready) -> list[Action]:
        self._check_next(event)
        if (stop := self._stop_if_other_finished(event)) is not None:
            return stop
        first = self._open_rounds.get(event.round)
        if first is None:
            first = self._open_rounds[event.round] = _OpenRound(
                event.worker, event.step, event.epoch, event.batches_fetched, event.now_s, 0
            )
        elif (first.step, first.epoch, first.batches_fetched) != (
            event.step,
            event.epoch,
            event.batches_fetched,
        ):
            return self._out_of_step(first, event)
        self._asking.pop(event.worker, None)
        self._rounds[event.worker] += 1
        self._steps[event.worker] = event.step
        first.count += 1
        if first.count == self._world:
            del self._open_rounds[event.round]
            self._rounds_complete += 1
        return self._answer_asking(event.round) if self._asking else []

    def _handle_left_out(self, event: BatchesSkipped) -> list[Action]:
        self._check_next(event)
        if (stop := self._stop_if_other_finished(event)) is not None:
            return stop
        self._asking[event.worker] = event
        return self._answer_asking(event.round)

    def _answer_asking(self, round_: int) -> list[Action]:
        """Answer the workers that ask for the batch of a round, if it is known."""
        asking = [asked for asked in self._asking.values() if asked.round == round_]
        first: _OpenRound | BatchesSkipped | None = self._open_rounds.get(round_)
        if first is None and len(asking) == self._world:
            first = min(asking, key=_position_of)
        if first is None:
            return []
        answers: list[Action] = []
        for asked in asking:
            del self._asking[asked.worker]
            if (
                first.epoch != asked.epoch
                or not asked.batches_fetched - asked.skipped <= first.batches_fetched <= asked.batches_fetched
            ):
                return self._out_of_step(first, asked)
            reason = f"worker {first.worker} takes part in the round with this batch"
            answers.append(
                AssignRoundBatch(
                    worker=asked.worker, round=round_, batch=first.batches_fetched, reason=reason
                )
            )
        return answers

    def _stop_if_other_finished(self, event: Ready | BatchesSkipped) -> list[Action] | None:
        """Stop if a worker begins a round in which another one, which has finished, takes no part."""
        for other, steps in (self._left_after | self._finished_after).items():
            if self._rounds[other] <= event.round:
                return self._stop_for_finished(other, steps, event.worker, event.step)
        return None

    def _out_of_step(self, first: _OpenRound | BatchesSkipped, event: Ready | BatchesSkipped) -> list[Action]:
        """Stop because the gradients of a round are of different steps or batches."""
        positions = {
            first.worker: (first.epoch, first.batches_fetched, first.step),
            event.worker: (event.epoch, event.batches_fetched, event.step),
        }
        behind, ahead = sorted(positions, key=positions.__getitem__)
        if positions[behind][:2] == positions[ahead][:2]:
            worker, other = positions
            return self._stop(
                None,
                None,
                f"worker {worker} is in step {first.step} but worker {other} in step {event.step}, "
                f"both in round {event.round}: call backward and step equally often on every worker",
            )
        return self._stop(
            None,
            None,
            f"worker {ahead} has gone on to {_position(*positions[ahead][:2])} while worker {behind} is at "
            f"{_position(*positions[behind][:2])}, both in round {event.round}: worker {ahead} has skipped a "
            "batch. Iterate over session.batches, where single batches may be skipped before backward(); "
            "or use every batch on every worker, with weight 0 in the loss where it is bad",
        )

    def _handle_report(self, event: PeerUnreachable | PeerReachable) -> list[Action]:
        if event.peer in self._left_after or event.worker in self._left_after:
            return []  # the report crossed the Left of one of the two
        self._reachability.on_report(event)
        if event.worker is None and isinstance(event, PeerReachable):
            # Restart the timeouts: its connections to other workers may recover a little later.
            self._reachability.restart_timers(event.peer, event.now_s)
            for first in self._open_rounds.values():
                first.since_s = event.now_s
            self._asking = {first: replace(asked, now_s=event.now_s) for first, asked in self._asking.items()}
        return []

    def _handle_tick(self, now_s: float) -> list[Action]:
        return self._stop_unreachable(now_s) or self._stop_late(now_s)

    def _stop_unreachable(self, now_s: float) -> list[Action]:
        """Stop if two workers are alive, and only the connection between them has failed for too long."""
        oldest = self._reachability.oldest_outage()
        if oldest is None or now_s - oldest[0] <= self._silent_s:
            return []
        since_s, worker, peer, cause = oldest
        return self._stop(
            None,
            None,
            f"worker {worker} has not been able to reach worker {peer} for {now_s - since_s:.0f} s "
            f"({cause}), and both reach the coordinator: look for a firewall or a missing route between "
            "their hosts",
        )

    def _stop_late(self, now_s: float) -> list[Action]:
        waiting: list[tuple[int, float, _OpenRound | BatchesSkipped]] = []
        waiting += [(round_, first.since_s, first) for round_, first in self._open_rounds.items()]
        waiting += [(asked.round, asked.now_s, asked) for asked in self._asking.values()]
        if not waiting:
            return []
        round_, since_s, first = min(waiting, key=lambda entry: entry[:2])
        if now_s - since_s <= self._timeout_s:
            return []
        late = [
            other
            for other, rounds in enumerate(self._rounds)
            if rounds <= round_ and other not in self._asking
        ]
        if self._reachability.silent_workers.intersection(late):
            return []
        return self._stop(
            late[0],
            first.step,
            f"{_worker_names(late)} did not finish computing step {first.step + 1} within "
            f"{self._timeout_s:g} s after worker {first.worker} had: check what it is doing, or set a "
            "longer deadline",
        )

    def _check_next(self, event: Ready | BatchesSkipped) -> None:
        kind = type(event).__name__
        received = f"got {kind} for round {event.round} of worker {event.worker}"
        if not self._is_running():
            raise ProtocolError(f"expected {self._world} workers to join first, {received}")
        if not 0 <= event.worker < self._world:
            raise ProtocolError(f"expected a worker from 0 to {self._world - 1}, {received}")
        if event.worker in self._left_after or event.worker in self._finished_after:
            raise ProtocolError(
                f"expected nothing more from worker {event.worker}, which has finished, {received}"
            )
        if event.round != self._rounds[event.worker]:
            raise ProtocolError(f"expected {kind} for round {self._rounds[event.worker]}, {received}")
        if event.round - self._rounds_complete > self._rounds_ahead_max - 1:
            slowest = self._rounds.index(self._rounds_complete)
            raise ProtocolError(
                f"expected no worker to be more than {self._rounds_ahead_max} rounds ahead of another, "
                f"{received} while worker {slowest} was Ready for {self._rounds_complete} rounds: "
                "check whether it trains without exchanging"
            )

    def _handle_finished(self, event: Finished) -> list[Action]:
        if not self._is_running() or event.worker in self._left_after or event.worker in self._finished_after:
            return []
        self._check_known(event)
        self._finished_after[event.worker] = event.step
        return self._stop_if_others_continue(event.worker, event.step) or self._complete_job()

    def _complete_job(self) -> list[Action]:
        """Dismiss the workers that stay until all have finished, once all have."""
        if not self._finished_after or len(self._left_after | self._finished_after) < self._world:
            return []
        return [JobComplete(reason="all workers have finished")]

    def _handle_left(self, event: Left) -> list[Action]:
        if not self._is_running() or event.worker in self._left_after:
            return []
        self._check_known(event)
        was_done = self._leave(event.worker, event.step)
        return (
            []
            if was_done
            else self._stop_if_others_continue(event.worker, event.step) or self._complete_job()
        )

    def _leave(self, worker: int, step: int) -> bool:
        """Record that a worker has left; return whether it had reported before that it has finished."""
        self._left_after[worker] = step
        self._reachability.forget(worker)
        return self._finished_after.pop(worker, None) is not None

    def _stop_if_others_continue(self, gone: int, gone_steps: int) -> list[Action]:
        """Stop if another worker was Ready for a round in which the finished one takes no part."""
        for other, rounds in enumerate(self._rounds):
            if rounds > self._rounds[gone]:
                steps = self._steps[other]
                assert steps is not None
                return self._stop_for_finished(gone, gone_steps, other, steps)
        return []

    def _handle_gone(self, event: Lost | Failed) -> list[Action]:
        if not self._is_running() or event.worker in self._left_after:
            return []
        self._check_known(event)
        if (
            isinstance(event, Lost) and event.worker in self._finished_after
        ):  # it had nothing more to contribute
            self._leave(event.worker, self._finished_after[event.worker])
            return []
        match event:
            case Lost():
                step = self._step_of(event.worker)
                when = "before its first step was computed" if step is None else f"after {_steps(step)}"
                return self._stop(event.worker, step, f"worker {event.worker} was lost {when}: {event.cause}")
            case Failed():
                reason = f"worker {event.worker} failed after {_steps(event.step)}: {event.error}"
                return self._stop(event.worker, event.step, reason)
            case _:
                assert_never(event)

    def _check_known(self, event: Finished | Left | Lost | Failed) -> None:
        if not 0 <= event.worker < self._world:
            raise ProtocolError(
                f"expected a worker from 0 to {self._world - 1}, "
                f"got {type(event).__name__} of worker {event.worker}"
            )

    def _step_of(self, worker: int) -> int | None:
        """Return the step that a worker is known to be in.

        A round is not over when all workers were Ready for it: the exchange may take long.
        """
        step = self._steps[worker]
        if step is None:
            return None
        further = [  # a worker Ready for a later round holds the mean of this worker's last one
            later
            for rounds, later in zip(self._rounds, self._steps, strict=True)
            if later is not None and rounds > self._rounds[worker]
        ]
        return max(step, self._steps_finished[worker], *further)

    def _stop_for_finished(self, gone: int, gone_steps: int, other: int, other_steps: int) -> list[Action]:
        return self._stop(
            None,
            None,
            f"worker {gone} has finished after {_steps(gone_steps)}; "
            f"worker {other} begins step {other_steps + 1}: give every worker the same number of batches",
        )

    def _stop(self, worker: int | None, step: int | None, reason: str) -> list[Action]:
        self._stopped = True
        return [AbortJob(worker=worker, step=step, reason=reason)]


def _worker_names(ids: list[int]) -> str:
    if len(ids) == 1:
        return f"worker {ids[0]}"
    return f"workers {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _position_of(asked: BatchesSkipped) -> tuple[int, int]:
    return asked.epoch, asked.batches_fetched


def _position(epoch: int, batch: int) -> str:
    return f"batch {batch} of epoch {epoch}" if batch else f"epoch {epoch}"
