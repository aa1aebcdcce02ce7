"""An averaging of snapshots of models, which goes on while its worker trains, or for which the worker waits.

Theory of operation. At the end of a step after which it is ready for an averaging, and in none, a worker
takes a *snapshot* of its parameters, and then reports `Ready`. When an `AverageModels` arrives, the links'
thread begins to exchange the snapshot: the loop computes the next step meanwhile, and a slow worker keeps no
other waiting. At the end of the step in which the exchange has ended, the mean less the snapshot is added to
the parameters, and `ModelsAveraged` is reported. Until then this worker is in no other averaging, and its
snapshot does not change. Without `overlap` the worker waits instead, and the mean replaces its parameters.
With a `delay` the mean is added so many steps after the snapshot was taken, and the worker waits for it then.

With an outer optimizer, what that makes of the mean takes the mean's place (see `OuterState`). Where it takes
a compressed sum, the loop begins the exchange instead of the links' thread, and each later request of the
compressor: at the end of the first step after the averaging, or the exchange before, is there. A loop that
waits for this averaging, or for the coordinator (for another averaging, for samples), does so at once, as
work that `CoordinatorClient.wait_for` finds due. So such an averaging takes a few steps of its slowest
member, and none of one that waits.

In compressed gossip a worker exchanges with its neighbours of the group alone, and no mean is made (see
`PublicCopies`).

Threads. The loop calls `end_step`, `wait` and `find_due_work`, the links' thread `on_averaging`. The lock of
the client guards what they share. Nothing here decides which workers average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.events import AverageModels, ModelsAveraged
from offbeat.policies.model_averaging.protocol import ModelAveragingProtocol
from offbeat.policies.model_averaging.weights import mean_share
from offbeat.runtime.collectives.compressed_sum import CompressedSum
from offbeat.runtime.collectives.interface import Exchange, PendingExchange
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.model_averaging.cancelled import AveragingCancelledError
from offbeat.runtime.model_averaging.flat_tensors import WHOLE, FlatTensors, Fragment
from offbeat.runtime.model_averaging.outer_state import OuterState
from offbeat.runtime.model_averaging.public_copies import PublicCopies
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S


class SnapshotAveraging:
    """A worker's averagings of snapshots, one at a time.

    Args:
        parameters: the worker's.
        client: of the coordinator.
        protocol: the worker's, which keeps the averaging that it is in.
        open_exchange: opens an exchange over some workers; it fails at once if the averaging is cancelled.
        overlap: the worker trains on meanwhile; else it calls `wait`, and the mean replaces its model.
        delay: with `overlap`, steps from a snapshot until the worker calls `wait`; None where it does not.
        outer: the outer optimizer that follows, None without one.
        share: of the difference between mean and snapshot, what is added.
        copies: in compressed gossip, the public copies; None where groups average.

    Attributes:
        snapshot_steps: the steps that the model had made when the last snapshot of it was taken.
    """

    def __init__(
        self,
        parameters: FlatTensors,
        client: CoordinatorClient,
        protocol: ModelAveragingProtocol,
        open_exchange: Callable[[Sequence[int]], Exchange],
        *,
        overlap: bool = True,
        delay: int | None = None,
        outer: OuterState | None = None,
        share: float = 1.0,
        copies: PublicCopies | None = None,
    ) -> None:
        self._copies = copies
        self._parameters, self._client, self._protocol = parameters, client, protocol
        self._open_exchange, self._overlap = open_exchange, overlap
        self._delay, self._outer, self._share = delay, outer, share
        self._is_taking_snapshot = False
        self.snapshot_steps = 0
        self._begun: AverageModels | None = None  # the averaging whose exchange has begun, or is about to
        self._last_id = -1  # the exchange id of the last averaging that has begun
        self._pending: list[PendingExchange] | None = None  # its exchanges

    def trains_on(self, averaging: AverageModels) -> bool:
        """Whether the worker trains on during an averaging."""
        return self._overlap and not averaging.makes_wait(self._client.worker)

    def is_due(self, steps: int) -> bool:
        """Whether a worker that has made so many steps waits for the averaging of its snapshot."""
        if not self._overlap:
            return True
        return self._delay is not None and steps >= self.snapshot_steps + self._delay

    def is_of_snapshots(self, averaging: AverageModels) -> bool:
        """Whether snapshots are averaged, this worker's among them; else the models as they are."""
        return not averaging.includes_buffers and self._client.worker in averaging.group

    def on_averaging(self) -> None:
        """Begin an averaging that has arrived, unless the loop does; called in the links' thread."""
        if not self._loop_begins:
            self.begin_if_due()

    @property
    def _loop_begins(self) -> bool:
        """Whether the loop begins an exchange, and not the links' thread: it is a compressed sum."""
        return self._outer is not None and self._outer.is_compressed

    def begin_if_due(self) -> None:
        """Begin to exchange the snapshot if an averaging of snapshots has arrived."""
        with self._client.lock:
            averaging = self._averaging_to_begin()
            if averaging is None:
                return
            self._begun, self._last_id = averaging, averaging.exchange_id
        pending = self._begin(averaging)
        with self._client.lock:
            self._pending = pending
            self._client.lock.notify_all()

    def _averaging_to_begin(self) -> AverageModels | None:
        averaging = self._protocol.averaging
        if (
            averaging is None
            or self._begun is not None
            or averaging.exchange_id <= self._last_id  # begun before, and about to be reported
            or self._is_taking_snapshot
            or not self.is_of_snapshots(averaging)
        ):
            return None
        return averaging

    def _begin(self, averaging: AverageModels) -> list[PendingExchange]:
        group, worker = averaging.group, self._client.worker
        if len(group) == 1 and averaging.outer_step is None:
            return []
        if self._copies is not None:
            return self._copies.begin(averaging)
        exchange = self._open_exchange(group)
        if self._outer is not None and self._outer.is_compressed and averaging.outer_step is not None:
            return self._outer.sum_pseudo_gradients(exchange, averaging, worker)
        pending = self._parameters.all_reduce_snapshot(
            exchange,
            exchange_id=averaging.exchange_id,
            weight=averaging.weight_of(worker),
            fragment=self._fragment_of(averaging),
        )
        if self._outer is not None and averaging.outer_step is not None:
            pending += self._outer.send_to_members_behind(exchange, averaging, worker, len(pending))
        return pending

    def _fragment_of(self, averaging: AverageModels) -> Fragment:
        step = averaging.outer_step
        return WHOLE if self._outer is None or step is None else self._outer.fragment_of(step)

    def end_step(self, steps: int) -> ModelsAveraged | None:
        """End a step: add what an averaging has yielded; take a snapshot if the worker is ready for another.

        Args:
            steps: that the worker has made.

        Returns:
            The event that reports the end of an averaging, None if none has ended.

        Raises:
            WorkerError: the job failed.
        """
        ended = None
        if self._loop_begins:
            self._carry_on()
        if self._has_mean_to_add():
            has_mean = self.wait(COORDINATOR_MARGIN_S)  # so that what ends the exchanges may return
            with self._client.lock:
                ended = self._protocol.finish(model_steps=self.snapshot_steps, has_mean=has_mean)
        with self._client.lock:
            keeps_snapshot = self._delay is not None and self._protocol.is_ready
            self._protocol.count_step()
            self._is_taking_snapshot = self._protocol.is_ready and not keeps_snapshot
        if self._is_taking_snapshot:
            self._parameters.take_snapshot()
            if self._copies is not None:
                self._copies.encode()
            self.snapshot_steps = steps
            self._is_taking_snapshot = False
            self.begin_if_due()
        return ended

    def find_due_work(self) -> Callable[[], None] | None:
        """Return what carries a compressed averaging on, None if nothing is due; called under the lock."""
        if not self._loop_begins:
            return None
        is_due = self._averaging_to_begin() is not None or any(
            one.can_advance and one.ended_s is None for one in self._compressed_sums()
        )
        return self._carry_on if is_due else None

    def _carry_on(self) -> None:
        """Begin a compressed averaging that is due, and the requests of compressors that are."""
        self.begin_if_due()
        for one in self._compressed_sums():
            one.advance_if_ended(COORDINATOR_MARGIN_S)

    def _compressed_sums(self) -> list[CompressedSum]:
        return [one for one in self._pending or () if isinstance(one, CompressedSum)]

    def _has_mean_to_add(self) -> bool:
        """Whether an averaging during which the worker trains on has ended, without a fixed delay."""
        pending, averaging = self._pending, self._begun
        if pending is None or averaging is None or self._delay is not None or not self.trains_on(averaging):
            return False
        return all(one.ended_s is not None for one in pending)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the mean of the averaging of snapshots that the worker is in, and apply it.

        Its exchange has begun, or the links' thread is about to begin it; a compressed one begins here.

        Returns:
            Whether there is a mean: the averaging was not cancelled, and its numbers are finite where that is
            needed (see `PublicCopies`).

        Raises:
            WorkerError: the job failed.
        """
        if self._loop_begins:
            self.begin_if_due()
        self._client.wait_for(lambda: self._pending is not None, timeout_s, "an averaging to begin")
        pending, averaging, has_mean = self._pending, self._begun, True
        assert pending is not None
        assert averaging is not None
        try:
            for one in pending:
                one.wait(timeout_s)
        except AveragingCancelledError:
            has_mean = False
        if pending and has_mean:
            has_mean = self._apply(averaging)
        with self._client.lock:
            self._begun = self._pending = None
        return has_mean

    def _apply(self, averaging: AverageModels) -> bool:
        """Change the parameters by what the exchange has yielded; whether that has succeeded."""
        if self._copies is not None:
            return self._copies.apply(averaging)
        parameters, fragment, before = self._parameters, self._fragment_of(averaging), None
        share = mean_share(averaging, self._client.worker)
        if self._outer is not None and averaging.outer_step is not None:
            before = self._outer.step(averaging, self._client.worker, parameters.outputs)
        if before is None:  # else all of it is new to this worker
            share *= self._share
        if before is None and share == 1.0 and not self._overlap:
            parameters.replace(fragment)
        else:
            parameters.add_difference(before or parameters.snapshots, fragment, share)
        return True
