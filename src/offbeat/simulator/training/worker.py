"""A simulated worker: it does what the runtime's session does, with the same `Follower`, in virtual time.

Nothing here decides who takes part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.events import (
    Action,
    Deal,
    Dismiss,
    EpochEnded,
    Event,
    Finished,
    Group,
    Halt,
    Halted,
    Joined,
    Left,
    Ready,
    Recall,
    Refuse,
    Saving,
    Start,
    Stop,
    Wants,
)
from offbeat.policies.membership.group_membership import Follower, Turn
from offbeat.simulator.core.times import Stopwatch
from offbeat.simulator.training.sample_loop import Loop, Next

if TYPE_CHECKING:
    from offbeat.simulator.training.cluster import Cluster
    from offbeat.simulator.training.exchange import Exchange

COMPUTING, EXCHANGING, APPLYING = "computing", "exchanging", "applying"
WAITING, TAKING, MEETING, FINISHED, ENDED = "waiting", "taking", "meeting", "finished", "ended"
WANTING, LEAVING = "wanting samples", "leaving"
_SAVES_EVERY = 13  # steps, where samples are dealt


class Parcel(NamedTuple):
    """What a donor sends to those who join."""

    generation: int
    state: Any
    round: int
    epoch: int


class SimulatedWorker:
    """One worker and its replica.

    Attributes:
        doing: one of the words above.
        state: the replica; None in a newcomer that has taken none yet.
        weight: 0 where the gradients are of other parameters than those of the group, else 1, or batches
            where samples are dealt.
        outside: how often it has computed since it last took part.
        steps_taken: optimizer steps that it took as a member.
        contributed: how many dealt blocks the gradients are of.
        active_s: when it last had gradients or took a step.
        computed: how many gradients it has computed.
        stopwatch: how long it takes for them.
        loop: its way through the samples, None where none are dealt.
        saved: states that it has taken down, where samples are dealt, by rounds that they have finished.
        told: what it has said to the coordinator, where samples are dealt.
        heard: how many messages of the coordinator have reached it.
        known: the members of all groups with which it has exchanged anything.
        place: where its process is.
    """

    place = "simulated"

    def __init__(self, cluster: Cluster, worker: int, stopwatch: Stopwatch, *, is_new: bool) -> None:
        self.cluster = cluster
        self.worker = worker
        self.follower = Follower(worker)
        self.doing = MEETING
        self.state: Any = None if is_new else cluster.problem.begin()
        self.gradient: Any = None
        self.weight = 1.0
        self.contributed = 0
        self.exchange: Exchange | None = None
        self.is_hung = False
        self.is_leaving = False
        self.outside = 0
        self.steps_taken = 0
        self.active_s = cluster.engine.now_s
        self.up_s = self.down_s = 0.0  # when the last message to and from the coordinator arrives
        self.last_ready: Ready | None = None
        self.last_halted: Halted | None = None
        self.has_heard_start = self.has_left = False
        self.last_finished: Finished | None = None
        self._is_dismissed = False
        self._is_new = is_new
        self.stopwatch = stopwatch
        samples = cluster.setting.samples
        self.loop = None if samples is None else Loop(samples, self.follower, self._tell_wants)
        self.saved: dict[int, Any] = {}
        self.told: list[Event] = []
        self.heard = 0
        self._means: list[Any] = []  # of the rounds of the step under way
        self.computed = 0
        self._compute_s = 0.0
        self._busy_until_s = 0.0
        self._busy = 0  # counts what it was busy with; who comes back with an older number comes too late
        self._given: Group | None = None  # the last group to whose newcomers it gave its state
        self._received: Parcel | None = None
        self.known: set[tuple[int, ...]] = set()
        self._queue: deque[tuple[bool, Callable[[Any], None], Any]] = deque()

    @property
    def is_alive(self) -> bool:
        """Whether it runs, if only hung."""
        return self.doing != ENDED

    # What comes from outside; a hung worker finds it when it goes on -----------------------------------

    def meet(self, _: Any = None) -> None:
        """Asks to take part."""
        if self.is_alive:
            self.tell_joined()

    def tell_joined(self) -> None:
        """Says that it wants to take part."""
        cluster = self.cluster
        cluster.tell(
            self,
            Joined(
                now_s=cluster.arrival_s(self),
                worker=self.worker,
                world=cluster.world,
                peer=f"worker-{self.worker}",
                place=self.place,
                addresses=(),
                model=(),
                strategy="",
            ),
        )

    def hear(self, actions: tuple[Action, ...]) -> None:
        """Hears from the coordinator."""
        if self.is_hung:
            self._queue.append((False, self.hear, actions))
            return
        for action in actions:
            if self.doing == ENDED:
                return
            self._hear_one(action)
        if self.doing == WANTING:
            self._compute()

    def _hear_one(self, action: Action) -> None:
        match action:
            case Start():
                self.has_heard_start = True
            case Halt():
                self._hear_halt(action)
            case Group():
                self.follower.hear_group(action)
                if self.doing != WANTING:  # it has its hands free only in an exchange
                    self._give()
                if self.doing == MEETING and self.state is not None:
                    self._compute()
                elif self.doing in (WAITING, TAKING, MEETING):
                    self._go_on()
            case EpochEnded():
                self._end_epoch(action.epoch)
            case Recall():
                recalled = self.follower.recall(action, self.cluster.arrival_s(self))
                self.cluster.tell(self, recalled)
            case Deal():
                if self.loop is not None:
                    self.loop.hear(action)
            case Dismiss():
                self._is_dismissed = True
                self._leave()
            case Stop() | Refuse():
                self.end()

    def receive(self, parcel: Parcel) -> None:
        """A donor's state has come."""
        if self.is_hung:
            self._queue.append((True, self.receive, parcel))
            return
        if self._received is None or self._received.generation < parcel.generation:
            self._received = parcel
        if self._is_dismissed:
            self._leave()
        elif self.doing in (TAKING, MEETING):
            self._go_on()

    def end_exchange(self, exchange: Exchange) -> None:
        """The mean of an exchange is there."""
        if self.is_hung:
            self._queue.append((True, self.end_exchange, exchange))
            return
        if self.exchange is not exchange:
            return
        cluster = self.cluster
        self.exchange = None
        if not self.follower.finish_round(exchange.contributions):
            cluster.violated(f"worker {self.worker} goes on with an exchange that it had abandoned")
        self._means.append(exchange.mean)
        if len(self._means) < cluster.rounds_per_step:
            self._compute()
        elif cluster.apply_s:
            self.doing = APPLYING
            self._be_busy(cluster.apply_s)
        else:
            self._apply()

    def hang(self) -> None:
        """Does nothing from now on."""
        self.is_hung = True
        self._busy += 1
        if self.exchange is not None:
            self.exchange.block(self)

    def resume(self, *, tensors_first: bool) -> None:
        """Goes on, and finds what has come meanwhile, from other workers first or in the order of time.

        What a worker was computing takes what it still took when it hung.
        """
        self.is_hung = False
        queue = list(self._queue)
        self._queue.clear()
        if tensors_first:
            queue.sort(key=lambda one: not one[0])
        before, exchange = self._busy, self.exchange
        for _, call, argument in queue:
            call(argument)
        if exchange is not None:  # also where its own end of it was in the queue
            exchange.unblock(self)
        if self._busy == before and self.doing in (COMPUTING, APPLYING):
            self._be_busy(max(0.0, self._busy_until_s - self.cluster.hung_at_s[self.worker]))

    def end(self) -> None:
        """Is no more."""
        if self.doing == ENDED:
            return
        if self.exchange is not None:
            self.exchange.block(self)
        self.exchange = None
        self._busy += 1
        self.doing = ENDED
        self.cluster.end_if_empty()

    def is_steady(self, exchange: Exchange) -> bool:
        """Whether it has begun this exchange, and the next one follows if nothing else happens."""
        cluster, follower = self.cluster, self.follower
        return (
            self.exchange is exchange
            and follower.group is self._given
            and not follower.will_change
            and follower.step + 1 < cluster.steps
            and self.weight == 1.0
            and not self.is_leaving
            and self.up_s <= cluster.engine.now_s + cluster.network.latency_s
        )

    def catch_up(
        self, exchange: Exchange, *, rounds: int, state: Any, gradient: Any, done_s: float, ready: Ready
    ) -> None:
        """Is where a worker is that has begun this exchange, `rounds` after the one that it had begun.

        Args:
            exchange: the one that it has begun.
            rounds: how many it has finished since; a step each.
            state: before the exchange.
            gradient: what it gives to it.
            done_s: when it had computed that.
            ready: what it then said.
        """
        follower = self.follower
        follower.step, follower.round = exchange.step, exchange.round
        follower.exchange_id = exchange.exchange_id + 1
        self.exchange = exchange
        self.state, self.gradient = state, gradient
        self.steps_taken += rounds
        self.computed += rounds
        self.active_s = self._busy_until_s = done_s
        self.up_s = done_s + self.cluster.network.latency_s
        self.last_ready = ready

    # The loop ------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        cluster = self.cluster
        if self.loop is not None:
            following = self.loop.next()
            if following is Next.WAIT:
                self.doing = WANTING
                return
            if following is Next.OVER:
                self._finish(self.loop.epoch - 1)
                return
            if following is Next.ROUND:
                self._say_ready()
                return
        self.doing = COMPUTING
        step = self.follower.step + self.outside
        epoch, step_in_epoch = divmod(step, cluster.steps_per_epoch)
        if self.loop is not None:
            epoch, step_in_epoch = self.loop.epoch, int(self.loop.share * cluster.steps_per_epoch)
        compute_s = self.stopwatch.next_s(epoch, step_in_epoch, cluster.steps_per_epoch, step)
        self._compute_s += compute_s
        self._be_busy(compute_s)

    def _be_busy(self, for_s: float) -> None:
        engine = self.cluster.engine
        self._busy += 1
        self._busy_until_s = until_s = engine.now_s + for_s
        engine.at(until_s, self._end_busy, self._busy)

    def _end_busy(self, number: int) -> None:
        if number != self._busy:
            return
        if self.doing == APPLYING:
            self._apply()
            return
        self.computed += 1
        if self.loop is None or self.loop.computed():
            self._say_ready()
        else:
            self._compute()

    def _say_ready(self) -> None:
        cluster, follower, loop = self.cluster, self.follower, self.loop
        self.active_s = cluster.engine.now_s
        self.weight = 1.0
        if loop is None:
            self.gradient = cluster.problem.gradient(self.state, self.worker, self.computed - 1)
            epoch = (follower.step + self.outside) // cluster.steps_per_epoch
            cluster.tell_ready(
                self, follower.generation, epoch, follower.step, follower.round, self._compute_s
            )
        else:
            self.gradient = cluster.problem.gradient(self.state, self.worker, self.computed - 1, loop.blocks)
            samples = sum(block.samples for block in loop.blocks)
            self.weight = samples / loop.samples.batch_size
            blocks = loop.contribute()
            self.contributed = len(blocks)
            self.last_ready = Ready(
                now_s=cluster.arrival_s(self),
                worker=self.worker,
                generation=follower.generation,
                epoch=loop.epoch,
                step=follower.step,
                round=follower.round,
                compute_s=self._compute_s,
                samples=samples,
                blocks=blocks,
            )
            cluster.tell(self, self.last_ready)
        self._compute_s = 0.0
        self._go_on()

    def _tell_wants(self, wants: Wants) -> None:
        self.cluster.tell(self, replace(wants, now_s=self.cluster.arrival_s(self)))

    def _go_on(self) -> None:
        """Asks the follower what to do with the gradients, or, in a newcomer, whether to take a state."""
        cluster, follower = self.cluster, self.follower
        turn = follower.turn()
        if follower.group is not self._given:
            self._give()
        if turn in (Turn.GO, Turn.TAKE):
            self._meet_members()
        if turn is Turn.GO:
            self.outside = 0
            self.doing = EXCHANGING
            cluster.exchange(self)
        elif turn is Turn.WAIT:
            self.doing = MEETING if self.gradient is None and self.state is None else WAITING
        elif turn is Turn.TAKE:
            self._take()
        elif self.state is None:
            self.doing = MEETING
        else:
            self.gradient = None
            self._means.clear()
            self.outside += 1
            self._count_step()

    def _meet_members(self) -> None:
        """Has sessions with all members from now on."""
        group = self.follower.group
        assert group is not None
        if group.members not in self.known:
            self.known.add(group.members)
            self.cluster.met()

    def _take(self) -> None:
        received, follower = self._received, self.follower
        if received is None or follower.group is None or received.generation != follower.group.generation:
            self.doing = TAKING
            return
        self.state, self._received = received.state, None
        follower.take(round=received.round)
        self.weight, self.contributed = 0.0, 0
        self.outside = 0
        self._means.clear()
        if self.gradient is None:  # a newcomer
            if self.loop is not None:
                self.loop.begin_at(received.epoch)
            self._compute()
        else:
            self._go_on()

    def _apply(self) -> None:
        cluster, follower = self.cluster, self.follower
        for mean in self._means:
            self.state = cluster.problem.step(self.state, mean)
        self._means.clear()
        follower.finish_step()
        self.steps_taken += 1
        cluster.progress_s = self.active_s = cluster.engine.now_s
        if follower.group is not self._given:
            self._give()
        self._count_step()

    def _count_step(self) -> None:
        """Computes the next step, unless this worker is through."""
        cluster, follower = self.cluster, self.follower
        if self.loop is not None:
            self.loop.end_round()
            if follower.is_member and follower.step % _SAVES_EVERY == self.worker % _SAVES_EVERY:
                self._save()
        if self.is_leaving or (cluster.lockstep and follower.step >= cluster.steps):
            self._say_left()
        elif follower.step + self.outside >= cluster.steps:
            self._finish((follower.step + self.outside - 1) // cluster.steps_per_epoch)
        else:
            self._compute()

    def _save(self) -> None:
        """Takes its state down, and goes on without waiting to hear what that holds."""
        cluster, round_ = self.cluster, self.follower.round
        self.saved[round_] = self.state
        cluster.tell(self, Saving(now_s=cluster.arrival_s(self), worker=self.worker, round=round_))

    def _finish(self, epoch: int) -> None:
        cluster = self.cluster
        self.doing = FINISHED
        self.last_finished = Finished(
            now_s=cluster.arrival_s(self), worker=self.worker, epoch=epoch, step=self.follower.step
        )
        cluster.tell(self, self.last_finished)

    def _leave(self) -> None:
        """Takes the final state if the last group says so, and leaves."""
        follower = self.follower
        if follower.group is not None and self.worker in follower.group.joining and not follower.is_member:
            received = self._received
            if received is None or received.generation != follower.group.generation:
                self.doing = TAKING
                return
            self.state = received.state
            follower.take(round=received.round)
        self._say_left()

    def _say_left(self) -> None:
        cluster = self.cluster
        cluster.tell(self, Left(now_s=cluster.arrival_s(self), worker=self.worker, step=self.follower.step))
        self.has_left = True
        if not cluster.is_numbered:
            self.end()
        else:
            self.doing = LEAVING  # until that is written down

    def _end_epoch(self, epoch: int) -> None:
        """Goes on to the next epoch with its next step, if no group counts on it."""
        if self.loop is not None:
            self.loop.epochs_ended = max(self.loop.epochs_ended, epoch + 1)
            return
        if not self.follower.is_member and self.state is not None:
            begins = (epoch + 1) * self.cluster.steps_per_epoch
            self.outside = max(self.outside, begins - self.follower.step - 1)

    # Changes -------------------------------------------------------------------------------------------

    def _hear_halt(self, halt: Halt) -> None:
        cluster = self.cluster
        answer = self.follower.hear_halt(halt, cluster.arrival_s(self))
        if answer is None:
            return
        self.last_halted = answer
        cluster.tell(self, answer)
        if halt.abandon and self.exchange is not None:
            if self.follower.finish_round():
                cluster.violated(f"worker {self.worker} counts an exchange that it has abandoned")
            self.exchange = None
            self._go_on()

    def _give(self) -> None:
        """Sends the state to those who join, once for each group."""
        follower = self.follower
        group = follower.group
        if group is None or group is self._given:
            return
        self._given = group
        for place, joiner in enumerate(follower.joiners):
            epoch = 0 if self.loop is None else self.loop.epoch
            parcel = Parcel(group.generation, self.state, follower.round, epoch)
            self.cluster.send_state(self, joiner, place, parcel)
