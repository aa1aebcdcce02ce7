"""Bounded staleness under an adversary: whole jobs, with messages in any order on all sides."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.events import (
    AbortJob,
    Action,
    AssignBlocks,
    Event,
    Finished,
    JobComplete,
    Joined,
    Lost,
    RejectPeer,
    SamplesRequested,
    StepFinished,
    StepPermit,
)
from offbeat.events.recipients import Recipient
from offbeat.policies.data.block_queue import BlockQueue
from offbeat.policies.staleness.bounded_staleness import BoundedStaleness

BATCH = 4


class Worker:
    """A worker's side, as far as it matters: its next message, if it need not wait.

    Attributes:
        steps_left: steps to take with equal shards, where no blocks are assigned.
        inbox, outbox: messages under way to it and from it.
        pushed: the servers have all its pushes at clocks before this one.
    """

    def __init__(self, job: Job, worker: int, begins: int) -> None:
        self.job, self.worker, self.pushed = job, worker, begins
        self.queue = BlockQueue()
        self.steps_left = job.chance.randint(0, 12)
        self.per_step = job.chance.choice([1, 1, 2])
        self.permit: StepPermit | None = None
        self.inbox: deque[Action] = deque()
        self.outbox: deque[Event] = deque([self.clocked(None, begins, ())])
        self.has_asked = self.is_in_step = self.has_finished = self.is_done = False

    def clocked(self, clock: int | None, version: int, blocks: tuple[int, ...]) -> StepFinished:
        chance = self.job.chance
        return StepFinished(
            now_s=0.0,
            worker=self.worker,
            clock=clock,
            parameter_version=version,
            epoch=max(0, self.queue.epoch),
            step=0,
            compute_s=chance.choice([0.1, 0.1, 0.3]),
            samples=BATCH,
            loss=chance.choice([None, math.nan, 0.0, *(chance.random() for _ in range(7))]),
            blocks=blocks,
        )

    def receive(self) -> None:
        action = self.inbox.popleft()
        match action:
            case StepPermit():
                assert self.permit is None or action.clock >= self.permit.clock
                self.permit = action
                self.pushed = max(self.pushed, action.clock)
            case AssignBlocks():
                self.queue.on_assigned(action)
            case JobComplete() | AbortJob() | RejectPeer():
                self.is_done = self.has_finished = True

    def may_start(self) -> bool:
        """A permit has arrived, and the servers have a version that it may read."""
        return (
            self.permit is not None
            and self.permit.may_start
            and self.permit.version_min <= self.job.version()
        )

    def advance(self) -> bool:
        """Takes the next action; False where it has to wait."""
        if self.has_finished:
            return False
        if not self.job.assigns:
            return self.advance_with_equal_shards()
        queue = self.queue
        if self.is_in_step and (len(queue.started) >= self.per_step or queue.is_awaited):
            self.end_step(queue.pop_contribution(is_counted=True))
        elif queue.epoch < 0 or queue.is_exhausted:
            self.begin_next_epoch(skips=False)
        elif len(queue):
            if not (self.is_in_step or self.may_start()):
                return False
            if self.job.skips and self.job.chance.random() < 0.05:
                self.begin_next_epoch(skips=True)
                return True
            block = queue.next_to_load()
            assert block is not None
            assert queue.start(block.id)
            self.is_in_step, self.has_asked = True, False
        elif not self.has_asked:
            self.want(skips=False)
        else:
            return False
        return True

    def advance_with_equal_shards(self) -> bool:
        if not self.steps_left:
            self.finish()
        elif self.may_start():
            self.steps_left -= 1
            self.end_step(())
        else:
            return False
        return True

    def end_step(self, blocks: tuple[int, ...]) -> None:
        assert self.permit is not None
        self.outbox.append(self.clocked(self.permit.clock, self.permit.version_min, blocks))
        self.permit = replace(self.permit, may_start=False)  # it waits for the next one
        self.is_in_step = self.has_asked = False

    def begin_next_epoch(self, *, skips: bool) -> None:
        queue = self.queue
        if skips:
            queue.discard()
            self.is_in_step = False
        if queue.epoch + 1 == self.job.epochs:
            self.finish()
        else:
            queue.begin_epoch(max(queue.epoch + 1, self.job.least_epoch() if queue.epoch < 0 else 0))
            self.want(skips=skips)

    def want(self, *, skips: bool) -> None:
        self.has_asked = True
        self.outbox.append(
            SamplesRequested(
                now_s=0.0,
                worker=self.worker,
                epoch=self.queue.epoch,
                samples=self.job.samples,
                batch_size=BATCH,
                is_last=self.queue.epoch + 1 == self.job.epochs,
                abandons_previous=skips,
                blocks_max=0,
                started_blocks=self.queue.started,
                round=0,
                consumed_ranges=(),
            )
        )

    def finish(self) -> None:
        """All its pushes are done, and it takes part in no sum any more."""
        self.has_finished = True
        self.pushed = 2**63
        self.outbox.append(Finished(now_s=0.0, worker=self.worker, epoch=max(0, self.queue.epoch), step=0))


class Job:
    """A policy, its twin that is restored from its state now and then, and workers.

    Attributes:
        other: another policy, which has to give the same answers.
    """

    def __init__(
        self, seed: int, workers: int, *, deaths: int, newcomers: int, skips: bool, **arguments: Any
    ):
        self.chance = random.Random(seed)
        self.arguments = {"world": workers, **arguments}
        self.policy, self.twin = self.fresh(), self.fresh()
        self.other: BoundedStaleness | None = None
        self.assigns = arguments["shards"] == "dynamic"
        self.deaths, self.newcomers, self.skips = deaths, newcomers, skips
        self.epochs, self.samples = self.chance.randint(1, 3), self.chance.randint(1, 60)
        self.workers: dict[int, Worker] = {}
        self.next_worker = workers
        self.clocks: dict[int, int] = {}  # of workers between begin and end, from the permits
        self.used: Counter[tuple[int, int]] = Counter()  # epoch and position
        self.blocks: dict[int, Any] = {}
        self.bounds = {None if arguments["s"] is None else s for s in range(11)}
        self.steps = 0

    def fresh(self) -> BoundedStaleness:
        return BoundedStaleness(**self.arguments)

    def version(self) -> int:
        """The servers' version: they have all pushes at clocks before it."""
        return min(one.pushed for one in self.workers.values())

    def least_epoch(self) -> int:
        begun = [one.queue.epoch for one in self.workers.values() if one.queue.epoch >= 0]
        return min(begun, default=0)

    def join(self, worker: int) -> None:
        self.handle(
            Joined(
                now_s=0.0,
                worker=worker,
                world=1,
                peer=f"peer-{worker}",
                location="",
                addresses=(),
                model_signature=(),
                strategy="",
            )
        )

    def handle(self, event: Event) -> None:
        actions = self.policy.handle(event)
        assert self.twin.handle(event) == actions
        assert self.other is None or self.other.handle(event) == actions
        if self.chance.random() < 0.2:
            self.twin = self.fresh()
            self.twin.load_state_dict(json.loads(json.dumps(self.policy.state_dict())))
        self.note(event)
        for action in actions:
            self.check(action)
            for worker, one in self.workers.items():
                if action.is_for(Recipient(f"peer-{worker}", worker)):
                    one.inbox.append(action)

    def note(self, event: Event) -> None:
        match event:
            case StepFinished():
                self.steps += event.clock is not None
                for block in event.blocks:
                    for start, stop in self.blocks[block].ranges:
                        positions = range(start, stop)
                        self.used.update((self.blocks[block].epoch, position) for position in positions)
            case Lost() | Finished():
                self.clocks.pop(event.worker, None)

    def check(self, action: Action) -> None:
        """Spec 2.4 (i), (ii) and (v), and 2.5, for the last decision."""
        assert not isinstance(action, RejectPeer) or "it came when all others were done" in action.reason
        if isinstance(action, AssignBlocks):
            self.blocks |= {block.id: block for block in action.blocks}
        if not isinstance(action, StepPermit):
            return
        before = self.clocks.get(action.worker, 0)
        assert action.clock >= before
        self.clocks[action.worker] = action.clock
        assert action.staleness_bound in self.bounds
        assert action.staleness_bound is None or action.clock - action.version_min <= action.staleness_bound
        if action.staleness_bound is None and not action.may_start:
            assert action.reason in ("it has no samples", "not all workers have joined yet") or (
                action.reason.endswith("more steps alone") and self.steps < self.arguments["warm_start"]
            )

    def run(self) -> None:
        """Every possible event happens, one at a time, in any order; some worker can always move."""
        for worker in range(self.next_worker):
            self.join(worker)
        for worker in range(self.next_worker):
            self.workers[worker] = Worker(self, worker, 0)
        for _ in range(20_000):
            if self.chance.random() < 0.02:
                self.join_or_lose()
            moves = [
                (one, move)
                for one in self.workers.values()
                for move in ("advance", "receive", "send")
                if move == "advance" or (one.inbox if move == "receive" else one.outbox)
            ]
            self.chance.shuffle(moves)
            if not any(self.does(one, move) for one, move in moves):
                break
            starts = [one.permit for one in self.workers.values() if one.permit and one.permit.may_start]
            assert all(permit.version_min <= min(self.clocks.values(), default=2**63) for permit in starts)
        assert all(one.is_done for one in self.workers.values()), "a worker waits without a limit"

    def does(self, one: Worker, move: str) -> bool:
        if move == "advance":
            return one.advance()
        if move == "receive":
            one.receive()
        else:
            self.handle(one.outbox.popleft())
        return True

    def join_or_lose(self) -> None:
        if self.deaths and len(self.workers) > 1 and self.chance.random() < 0.5:
            self.deaths -= 1
            worker = self.chance.choice(sorted(self.workers))
            del self.workers[worker]
            self.handle(Lost(now_s=0.0, worker=worker, cause="cut"))
        elif self.newcomers and not any(one.is_done or one.has_finished for one in self.workers.values()):
            self.newcomers -= 1
            worker, self.next_worker = self.next_worker, self.next_worker + 1
            begins = max(one.pushed for one in self.workers.values()) + self.chance.choice([0, 1])
            self.workers[worker] = Worker(self, worker, begins)
            self.join(worker)

    def samples_used(self) -> set[int]:
        """How often samples were used, in the epochs that any worker was in."""
        epochs = {block.epoch for block in self.blocks.values()}
        return {self.used[epoch, position] for epoch in epochs for position in range(self.samples)}


arguments = st.fixed_dictionaries(
    {
        "counts": st.sampled_from(["own", "common"]),
        "shards": st.sampled_from(["dynamic", "equal"]),
        "s": st.one_of(st.none(), st.integers(0, 4)),
        "warm_start": st.sampled_from([0, 0, 1, 4, 30]),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), arguments)
def test_all_workers_finish_and_every_sample_is_used_once(seed, workers, arguments):
    job = Job(seed, workers, deaths=0, newcomers=0, skips=False, **arguments)
    job.run()
    assert not job.assigns or job.samples_used() == {1}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), arguments)
def test_invariants_hold_when_workers_die_or_join(seed, workers, arguments):
    job = Job(seed, workers, deaths=2, newcomers=2, skips=False, **arguments)
    job.run()
    assert not job.assigns or max(job.samples_used(), default=0) <= 1  # none where worker 0 dies first


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), arguments)
@example(
    2507, 2, {"counts": "own", "shards": "dynamic", "s": None, "warm_start": 0}
)  # one joins when it is over
def test_invariants_hold_when_workers_leave_an_epoch_early(seed, workers, arguments):
    job = Job(seed, workers, deaths=1, newcomers=1, skips=True, **{**arguments, "shards": "dynamic"})
    job.run()
    assert max(job.samples_used(), default=1) <= 1


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.sampled_from(["own", "common"]),
    st.sampled_from(["dynamic", "equal"]),
    st.booleans(),
)
def test_invariants_hold_under_any_losses_and_stragglers(seed, workers, counts, shards, has_detector):
    detector = {"n_profile": 1, "limit": 1, "threshold_s": 0.2} if has_detector else None
    more = {"counts": counts, "shards": shards, "s": 2, "detector": detector}
    job = Job(
        seed, workers, deaths=1, newcomers=1, skips=False, dynamic={"s_min": 1, "s_max": 5, "step": 2}, **more
    )
    job.bounds = set(range(1, 6))
    job.run()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), arguments)
def test_an_infinite_limit_equals_a_static_bound(seed, workers, arguments):
    arguments = {**arguments, "s": 3}
    job = Job(seed, workers, deaths=1, newcomers=1, skips=False, dynamic={"limit": None}, **arguments)
    job.other = BoundedStaleness(workers, **arguments)
    job.run()
