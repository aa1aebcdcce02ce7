"""Takes part in the rounds that this worker's loop is too late for, and applies their means later.

Theory of operation
-------------------

The coordinator lets a late member skip a round (`SkipRound`). Then a thread of this module, the *stand-in*,
takes part in its exchange with weight 0, while the loop computes on: the other members get the mean of their
gradients, and this worker gets it too. `GroupMembership` counts the round and its step as finished once the
mean is here, so this worker's position is that of the other members, though the model is behind.

The loop calls `catch_up` when it has gradients, before it announces them, and when its state is read. From
then on no round is skipped until its next step. It applies the missed steps one by one, each as the other
members have: the optimizer's own step with the same means and hyperparameters. So the model has the same
bits as theirs. The gradients that the loop has just computed stay, and go into the next round.

This is right only if a step is nothing but the optimizer's step with the means of one round: if the program
changes gradients in between, as clipping does, or parameters, the means do not say what the step was. The
averager checks that in each step (`allow`); rounds are skipped only after a step that was so.

Memory: each missed round keeps its sums until the loop has applied it, and this worker's zeros. It is reused.

This module never decides which rounds are skipped.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import NamedTuple

import torch

from offbeat.errors import OffbeatError, WorkerError
from offbeat.runtime.averaging.averaged_gradients import as_gradient
from offbeat.runtime.averaging.bucket_set import BucketSet
from offbeat.runtime.averaging.buckets import ModelBuffers
from offbeat.runtime.averaging.group_binding import GroupBinding, GroupChangedError, GroupHandle
from offbeat.runtime.averaging.interface import AveragerContext
from offbeat.runtime.averaging.trailer import RoundSums
from offbeat.runtime.training.hooks import do_nothing
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S
from offbeat.runtime.training.partial_step import PartialOptimizer
from offbeat.runtime.training.trained import TrainingState

_JOIN_TIMEOUT_S = 1.0  # if the job has failed, the thread may still wait for an exchange
_log = logging.getLogger("offbeat")


class _KeptBuffers(ModelBuffers):
    """Copies of a model's buffers, as they were after a round: the loop may be changing the model's own."""

    def keep(self) -> None:
        """Copy the model's buffers."""
        self._copies = [buffer.detach().clone() for buffer in super().tensors()]

    def restore(self) -> None:
        """Copy the kept values to the model's buffers."""
        for buffer, kept in zip(super().tensors(), self._copies, strict=True):
            buffer.data.copy_(kept)

    def tensors(self) -> list[torch.Tensor]:
        """Return the copies."""
        return self._copies


class _MissedRound(NamedTuple):
    """A round that has been skipped, and that the loop has not applied.

    Attributes:
        buckets: hold the sums.
        sums: of the trailer.
        position: this worker's position in the group.
    """

    buckets: BucketSet
    sums: RoundSums
    position: int


class CaughtUp(NamedTuple):
    """What `SkippedRounds.catch_up` has done.

    Attributes:
        rounds: whose steps it has applied.
        is_preempted: one of them has reported a preemption signal.
    """

    rounds: int
    is_preempted: bool


class SkippedRounds:
    """Rounds that close without this worker's loop: their exchanges, and the steps that follow from them.

    Args:
        trained: the model, on the CPU, and one optimizer of `torch.optim`.
        binding: the binding to the group.
        context: the session.
        workers: the number of members at the job's start.
        bucket_bytes: the largest size of a bucket of several parameters, in bytes.
        timeout_s: the longest duration of an exchange, in seconds.

    Raises:
        OffbeatError: a model on an accelerator, or several optimizers.
    """

    def __init__(
        self,
        trained: TrainingState,
        binding: GroupBinding,
        context: AveragerContext,
        *,
        workers: int,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        if trained.device.type != "cpu":
            raise OffbeatError(
                f"expected a model on the CPU with a quorum, got one on {trained.device}: use partial "
                "without a quorum"
            )
        if len(trained.optimizers) != 1:
            raise OffbeatError(
                f"expected one optimizer with a quorum, got {len(trained.optimizers)}: use partial without "
                "a quorum"
            )
        self._model, self._binding, self._context = trained.model, binding, context
        self._workers, self._bucket_bytes, self._timeout_s = workers, bucket_bytes, timeout_s
        self._parameters = [p for p in trained.model.parameters() if p.requires_grad][::-1]
        self._optimizer = PartialOptimizer(trained.optimizers[0])
        self._held = {id(one) for group in trained.groups for one in group["params"]}
        self._buffers = _KeptBuffers(trained.model)
        self._missed: list[_MissedRound] = []
        self._free: list[BucketSet] = []
        self._steps_allowed = 0  # in a row
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the stand-in."""
        self.keep_buffers()
        self._thread = self._binding.start_thread("offbeat skipped rounds", self._run)

    def stop(self) -> None:
        """End the stand-in, if it was started."""
        if self._thread is not None:
            self._binding.stop_skipping()
            self._thread.join(_JOIN_TIMEOUT_S)

    # In the loop -----------------------------------------------------------------------------------------

    def keep_buffers(self) -> None:
        """Note the model's buffers, which are those of all members: a round is over."""
        self._buffers.keep()

    def allow(self, obstacle: str) -> None:
        """Allow that rounds are skipped after the step that begins, or not.

        Args:
            obstacle: why this step is more than the optimizer's step with the means of one round, as one
                clause; empty if it is not. Two steps have to be so: what the program writes after a step is
                known in the next one.
        """
        if not obstacle and not self._optimizer.is_possible:
            obstacle = "the optimizer is not one of torch.optim without hooks"
        self._steps_allowed = 0 if obstacle else self._steps_allowed + 1
        self._binding.allow_skipping(self._steps_allowed > 1)
        if obstacle and not self._has_warned:
            self._has_warned = True
            _log.warning("the quorum has no effect on this worker: %s", obstacle)

    def catch_up(self) -> CaughtUp:
        """Let no further round be skipped until the next step, and apply the steps that were missed.

        Raises:
            WorkerError: the job failed, or a skipped round did not end within the deadline.
        """
        self._binding.begin_contribution()
        missed, self._missed = self._missed, []
        if not missed:
            return CaughtUp(0, is_preempted=False)
        own = self._context.hyperparameters()
        for one in missed:
            self._apply(one)
        if missed[-1].position == 0:  # all others use the first member's
            self._context.apply_hyperparameters(own)
        self._buffers.restore()
        self._context.writes.mark()
        return CaughtUp(len(missed), is_preempted=any(one.sums.preempted for one in missed))

    @torch.no_grad()
    def _apply(self, missed: _MissedRound) -> None:
        """Apply the step of one round as the other members did."""
        means: dict[int, torch.Tensor] = {}
        missed.buckets.unpack(missed.sums, means.__setitem__)
        self._context.apply_hyperparameters(missed.sums.hyperparameters)
        entries = [entry for entry in means if id(self._parameters[entry]) in self._held]
        parameters = [self._parameters[entry] for entry in entries]
        gradients = [as_gradient(self._parameters[entry], means[entry]) for entry in entries]
        if entries:
            self._optimizer.apply(parameters, gradients, self._optimizer.settings())
        missed.buckets.abandon()
        self._free.append(missed.buckets)

    # In the stand-in -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (group := self._binding.wait_for_skipped_round()) is not None:
            self._skip(group)

    def _skip(self, group: GroupHandle) -> None:
        """Take part in a round with weight 0, and keep its sums."""
        buckets = self._free.pop() if self._free else self._make_buckets()
        buckets.bind(group)
        buckets.discard_gradients()
        try:
            sums = self._exchange(buckets)
        except WorkerError as error:
            if not (isinstance(error, GroupChangedError) or self._binding.has_failed):
                raise
            self._binding.finish_skipped_round(None, keep=do_nothing)
            return
        missed = _MissedRound(buckets, sums, group.position)
        self._binding.finish_skipped_round(sums.contributions, keep=partial(self._missed.append, missed))

    def _exchange(self, buckets: BucketSet) -> RoundSums:
        buckets.fill_trailer(
            weight=0.0,
            writes=0,
            is_preempted=self._context.has_preemption_signal,
            round_s=0.0,
            offset_s=0.0,
        )
        buckets.launch_all_but_last()
        buckets.launch_last((0, 0))
        return buckets.wait(self._timeout_s + COORDINATOR_MARGIN_S)

    def _make_buckets(self) -> BucketSet:
        without_gradients = [parameter.detach() for parameter in self._parameters]
        buckets = BucketSet(
            self._model,
            without_gradients,
            self._binding,
            self._context.hyperparameters,
            workers=self._workers,
            bucket_bytes=self._bucket_bytes,
        )
        buckets.buffers = self._buffers
        return buckets
