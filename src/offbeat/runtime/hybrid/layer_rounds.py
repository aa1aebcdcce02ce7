"""Rounds in which layers' gradients are packed, sent and waited for bucket by bucket.

This module never decides when a bucket is sent or waited for, nor what is in it (`BucketLayout`), and never
touches the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch import nn

from offbeat.errors import OffbeatError, WorkerError
from offbeat.numerics.collectives.costs import LinkModel, all_reduce_cost, fit_link_model
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.runtime.averaging.buckets import GradientBucket, Means, ModelBuffers, write_scaled
from offbeat.runtime.averaging.compressed_buckets import make_compressed_buckets
from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.averaging.interface import (
    FLOAT32_PER_FLOAT64,
    AveragerContext,
    join_float64,
    split_float64,
)
from offbeat.runtime.averaging.staged_buckets import make_buckets
from offbeat.runtime.averaging.trailer import decode_used, used_counts
from offbeat.runtime.collectives.compressed_sum import EXCHANGES_MAX
from offbeat.runtime.collectives.contribution import Contribution, ExternalElements
from offbeat.runtime.collectives.interface import PendingExchange
from offbeat.runtime.hybrid.layer_layout import BucketLayout, BucketPlan, SendOrder
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S
from offbeat.runtime.training.partial_step import OptimizerSettings, optimizer_step_mode
from offbeat.runtime.training.writes import check_all_wrote

_PROBE_BYTES = tuple(1 << power for power in range(12, 20))
_PROBES = 3
_EXTERNAL_BYTES_MIN = 1 << 17  # gradients of at least this size are sent without a copy


class LayerRounds:
    """The state that a worker's rounds share: the buckets' memory and the exchange.

    Args:
        model: its buffers are exchanged too.
        parameters: the parameters whose gradients are averaged.
        binding: the binding to the group, which has more than one member.
        context: the session.
        order: see `BucketLayout`.
        timeout_s: the longest duration of an exchange, in seconds.
        compression: of gradients; None for none.

    Attributes:
        names: by parameter.
        buffers: the model's.
        exchange: over the members.
        position, size: this worker's position among them, and their number.
        layout: the layout of the buckets; set by the first `apply_plan`.
        buckets: by bucket of the layout, its memory.
        residuals: by entry, of compressed buckets.
        gradients_per_pass: by parameter, how often its gradient is computed in a backward pass; 0 before that
            is known.
        has_failed: an error of the job was raised here.
        exchange_timeout_s: how long a worker waits for an exchange, in seconds.
        preemption_step: the first step in whose rounds a member reported a preemption signal.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        binding: GroupBinding,
        context: AveragerContext,
        *,
        order: SendOrder,
        timeout_s: float,
        compression: CompressionMethod | None = None,
    ) -> None:
        self._compression = compression
        self.residuals: dict[int, torch.Tensor] = {}
        self.parameters, self.binding, self.context = parameters, binding, context
        self._order: SendOrder = order
        self.exchange_timeout_s = timeout_s + COORDINATOR_MARGIN_S
        handle = binding.acquire(wait=True)
        assert handle is not None  # the group is complete
        self.exchange, self.position, self.size = handle.exchange, handle.position, handle.size
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names = [name_of[id(parameter)] for parameter in parameters]
        self.buffers = ModelBuffers(model)
        self._zeros = binding.memory.zeros
        self.layout: BucketLayout
        self.buckets: list[GradientBucket] = []
        self.gradients_per_pass = [0] * len(parameters)
        self.has_failed = False
        self.preemption_step: int | None = None

    def apply_plan(self, plan: BucketPlan) -> None:
        """Allocate the buckets of a plan; while no round is under way, and on all members at once."""
        hyperparameter_length = FLOAT32_PER_FLOAT64 * len(self.context.hyperparameters())
        self.layout = BucketLayout(
            plan,
            self.parameters,
            self.buffers.tensors(),
            hyperparameter_length=hyperparameter_length,
            order=self._order,
        )
        self.buckets = []  # frees their memory
        arguments = self.layout.buckets, self.layout.shapes, len(self.parameters)
        if self._compression is None:
            self.buckets = make_buckets(*arguments, self.binding.memory, self.exchange.device)
        else:
            self.buckets = make_compressed_buckets(
                *arguments, self._zeros, method=self._compression, residuals=self.residuals
            )

    def measure_message_cost(self, workers: int) -> LinkModel:
        """Return the cost of a message, fitted to the shortest times of ring all-reduces of several sizes.

        All members have to call it at once.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        ring = all_reduce_cost("ring", workers)
        samples = []
        for size in _PROBE_BYTES:
            own, into = (self._zeros(size // 4, torch.float32) for _ in range(2))
            durations_s = []
            for _ in range(_PROBES):
                began_s = time.perf_counter()
                self.wait(self.exchange.all_reduce(own, into, exchange_id=self.binding.next_exchange_id()))
                durations_s.append(time.perf_counter() - began_s)
            samples.append((ring, size, min(durations_s)))
        return fit_link_model(samples)

    def broadcast_plan(self, make: Callable[[], BucketPlan]) -> BucketPlan:
        """Return the plan that the first member makes; all members have to call it at once.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        content = b"" if self.position else msgspec.msgpack.encode(make())
        length = torch.tensor([len(content)], device="cpu")
        self._broadcast(length)
        flat = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if content:
            flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._broadcast(flat)
        return msgspec.msgpack.decode(flat.numpy().tobytes(), type=BucketPlan)

    def _broadcast(self, flat: torch.Tensor) -> None:
        exchange_id = self.binding.next_exchange_id()
        self.wait(self.exchange.broadcast(flat, root=0, exchange_id=exchange_id))

    def wait(self, pending: PendingExchange) -> None:
        """Wait for an exchange.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        with self._noting_failure():
            pending.wait(self.exchange_timeout_s)

    def advance_ended(self) -> None:
        """Begin the exchanges that follow from others that have ended; see `GradientBucket.advance`.

        Raises:
            WorkerError: a member was lost.
        """
        with self._noting_failure():
            for bucket in self.buckets:
                if bucket.can_advance:
                    bucket.advance(self.exchange_timeout_s)

    def advance_all(self) -> None:
        """Begin the last exchange of every bucket; wait for those before it. All buckets have been launched.

        After that no member waits for another one's loop: the program may let members wait for each other.

        Raises:
            WorkerError: a member was lost, or did not join an exchange within the deadline.
        """
        with self._noting_failure():
            while sum(bucket.advance(self.exchange_timeout_s) for bucket in self.buckets):
                pass

    def raise_if_failed(self) -> None:
        """See `AveragerContext.raise_if_failed`.

        Raises:
            WorkerError: the job has failed.
        """
        with self._noting_failure():
            self.context.raise_if_failed()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except WorkerError:
            self.has_failed = True
            raise

    def exchange_index(self, bucket: int) -> int:
        """Return the first index of a bucket's exchanges, the same on all members."""
        return bucket if self._compression is None else bucket * EXCHANGES_MAX

    def swap_buffers(self, *, prepare_next: bool) -> None:
        """Switch to the other memory for sums: that of the last round holds its means.

        Args:
            prepare_next: the next round has the same layout, so other members may send for it already.
        """
        for index, bucket in enumerate(self.buckets):
            bucket.end_round()
            bucket.swap_output()
            if prepare_next:
                bucket.prepare(
                    self.exchange,
                    exchange_id=self.binding.membership.exchange_id,
                    index=self.exchange_index(index),
                    algorithm=self.layout.algorithms[index],
                )


class GradientRound:
    """The exchange of one backward pass's gradients.

    Args:
        rounds: the state that all rounds share.
        scale: the factor of this worker's gradients.
        step: the number of steps before this round.

    Attributes:
        gradient_counts: by parameter, how often its gradient has been computed.
        is_sent: all buckets have been launched.
        weight: the sum of all members' factors, None before it is known.
        used: see `RoundSums`; empty before that is known.
        was_read: the program has read one of its means.
        settings: by parameter group, the hyperparameters when the optimizer stepped; empty before.
    """

    def __init__(self, rounds: LayerRounds, scale: float, step: int) -> None:
        self._rounds, self._scale, self._step = rounds, scale, step
        buckets = rounds.buckets
        self._exchange_id: int | None = None  # None before anything is sent
        self._means: list[Means | None] = [bucket.output.means() for bucket in buckets]
        self._external: list[dict[int, ExternalElements]] = [
            {} for _ in buckets
        ]  # gradients sent without a copy, by entry
        self._missing = [len(bucket.entries) for bucket in buckets]  # gradients still to be computed
        self._pending: list[PendingExchange | None] = [None] * len(buckets)
        self._launched_s = [0.0] * len(buckets)
        self._has_arrived = [False] * len(buckets)
        self._is_final = [False] * len(buckets)
        self._written: list[str] = []  # by the program, since the last round
        self._has_gradient: list[bool] = []  # by parameter, whether this worker has a gradient
        self._copies: dict[int, torch.Tensor] = {}  # of means whose strides differ from their parameters'
        self._is_packed = [False] * len(rounds.parameters)
        self.gradient_counts = [0] * len(rounds.parameters)
        self.is_sent = False
        self.weight: float | None = None
        self.used: list[bool] = []
        self.was_read = False
        self.settings: OptimizerSettings = []

    # Sending -------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether a bucket has been launched."""
        return any(pending is not None for pending in self._pending)

    def add_gradient(self, entry: int) -> int | None:
        """Pack a parameter's new gradient, or keep it in place to be sent from there.

        Returns:
            Its bucket, if this gradient completes it.

        Raises:
            OffbeatError: its bucket has been launched already.
        """
        rounds = self._rounds
        index, _ = rounds.layout.location_of[entry]
        if self._pending[index] is not None:
            raise OffbeatError(
                f"a gradient of {rounds.names[entry]} was computed after its bucket had been sent: it is "
                "computed more often in this backward pass than in the first steps; use overlap=none"
            )
        with torch.no_grad():
            if not self._leave_external(entry):
                self._pack(entry, add=self._is_packed[entry])
        self.gradient_counts[entry] += 1
        self._is_packed[entry] = True
        if self.gradient_counts[entry] != rounds.gradients_per_pass[entry]:
            return None
        self._missing[index] -= 1
        return None if self._missing[index] else index

    def count_gradient(self, entry: int) -> None:
        """Count a new gradient, which stays in `param.grad` until `send_rest`."""
        self.gradient_counts[entry] += 1

    def _leave_external(self, entry: int) -> bool:
        """Leave a large gradient outside the bucket, if it is computed once per pass and contiguous."""
        rounds = self._rounds
        gradient, (index, position) = rounds.parameters[entry].grad, rounds.layout.location_of[entry]
        assert gradient is not None
        bucket, external = rounds.buckets[index], self._external[index]
        if entry in external:  # computed more often than in the first steps
            Contribution(bucket.contribution.flat, [external.pop(entry)]).materialize()
        stays_external = (
            bucket.allows_external
            and rounds.gradients_per_pass[entry] == 1
            and not self._is_packed[entry]
            and gradient.nbytes >= _EXTERNAL_BYTES_MIN
            and gradient.is_contiguous()
            and gradient.dtype == bucket.contribution.flat.dtype
            and self._scale != 0.0
        )
        if stays_external:
            external[entry] = ExternalElements(
                bucket.offsets[position], gradient.detach().view(-1), self._scale
            )
        return stays_external

    def _pack(self, entry: int, *, add: bool = False) -> None:
        """Write or add a scaled gradient to its bucket.

        Dividing before the sum avoids overflow in half precision.
        """
        index, position = self._rounds.layout.location_of[entry]
        view = self._rounds.buckets[index].packing_view(position)
        gradient = self._rounds.parameters[entry].grad
        if add:
            assert gradient is not None
            view.add_(gradient, alpha=self._scale)
        else:
            write_scaled(gradient, self._scale, view, self._rounds.residuals.get(entry))

    def launch(self, index: int) -> None:
        """Start the all-reduce of a bucket."""
        rounds, bucket = self._rounds, self._rounds.buckets[index]
        if self._exchange_id is None:
            self._exchange_id = rounds.binding.next_exchange_id()
        self._launched_s[index] = time.perf_counter()
        self._pending[index] = bucket.all_reduce(
            rounds.exchange,
            exchange_id=self._exchange_id,
            index=rounds.exchange_index(index),
            algorithm=rounds.layout.algorithms[index],
            priority=rounds.layout.priorities[index],
            external=[*self._external[index].values()],
        )
        self._external[index].clear()

    def send_rest(self, compute_s: float) -> None:
        """Launch the remaining buckets, with gradients as they are now, and notify the session.

        Args:
            compute_s: this worker's compute time for the round, in seconds.
        """
        rounds = self._rounds
        self._written = rounds.context.writes.pop()
        self._has_gradient = [
            (bool(self._scale) and is_packed) or parameter.grad is not None
            for is_packed, parameter in zip(self._is_packed, rounds.parameters, strict=True)
        ]
        with torch.no_grad():
            for index in range(rounds.layout.gradient_buckets):
                if self._pending[index] is None:
                    for entry in rounds.buckets[index].entries:
                        if not self._is_packed[entry]:
                            self._pack(entry)
                    self.launch(index)
            self._send_auxiliary()
        rounds.context.announce_gradients(compute_s)
        self.is_sent = True
        rounds.binding.finish_round([])
        rounds.advance_all()

    def _send_auxiliary(self) -> None:
        """Launch the auxiliary buckets: buffers, zero on all but the first member, and the trailer."""
        rounds = self._rounds
        buffers, count = rounds.buffers.tensors(), len(rounds.parameters)
        for index in range(rounds.layout.gradient_buckets, len(rounds.buckets)):
            bucket = rounds.buckets[index]
            for position, entry in enumerate(bucket.entries):
                view = bucket.packing_view(position)
                if entry == count + len(buffers):
                    parts = split_float64(rounds.context.hyperparameters())
                    shared = [0.0] * len(parts) if rounds.position else parts
                    flags = [self._scale, len(self._written), rounds.context.has_preemption_signal]
                    used = used_counts(self._has_gradient, self._scale, rounds.size)
                    view.copy_(torch.tensor([*flags, *used, *shared], dtype=view.dtype, device="cpu"))
                elif rounds.position:
                    view.zero_()
                else:
                    view.copy_(buffers[entry - count])
            self.launch(index)

    # Receiving -----------------------------------------------------------------------------------------

    def wait(self, index: int) -> None:
        """Wait for a bucket's sum, and before that for the auxiliary buckets.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        if self._has_arrived[index]:
            return
        rounds = self._rounds
        rounds.context.timer.switch("communicate")
        self._wait_for_auxiliary()
        if index < rounds.layout.gradient_buckets:
            self._wait(index)
            self._has_arrived[index] = True

    def wait_for_bucket(self, index: int) -> bool:
        """Wait for a bucket's sum; return False where that failed. Thread-safe."""
        pending = self._pending[index]
        assert pending is not None
        try:
            pending.wait(self._rounds.exchange_timeout_s)
        except WorkerError:
            return False
        return True

    def finalize(self, index: int) -> None:
        """Turn a bucket's sum, once it has arrived, into means."""
        if self._is_final[index]:
            return
        assert self.weight is not None
        rounds = self._rounds
        means, bucket = self._means_of(index), rounds.buckets[index]
        with optimizer_step_mode():
            if self.weight:
                bucket.commit(own_weight=self._scale, weight=self.weight, used=self.used)
            if self.weight not in (0.0, 1.0):
                means.divide(bucket.gradient_elements, self.weight)
            for entry, view in zip(bucket.entries, means.views(), strict=True):
                if entry in self._copies:
                    self._copies[entry].copy_(view)
        self._is_final[index] = True

    def wait_for_used(self) -> list[bool]:
        """Return `used`.

        If this worker lacks a gradient, or has no weight, it waits for the trailer.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        if self._scale and all(self._has_gradient):
            return self._has_gradient
        self._wait_for_auxiliary()
        return self.used

    def mean(self, entry: int) -> torch.Tensor:
        """Return the tensor for a parameter's mean, with the parameter's strides; filled by `finalize`."""
        index, position = self._rounds.layout.location_of[entry]
        view, parameter = self._means_of(index).views()[position], self._rounds.parameters[entry]
        if view.stride() == parameter.stride() and view.dtype == parameter.dtype:
            return view
        if entry not in self._copies:
            self._copies[entry] = torch.empty_like(parameter, requires_grad=False)
        return self._copies[entry]

    def release(self, index: int) -> None:
        """Leave the means of a bucket to the program, which may still have them as gradients."""
        self._means[index] = None

    def _means_of(self, index: int) -> Means:
        means = self._means[index]
        assert means is not None
        return means

    def _wait_for_auxiliary(self) -> None:
        for index in range(self._rounds.layout.gradient_buckets, len(self._rounds.buckets)):
            self._apply_auxiliary(index)

    def _apply_auxiliary(self, index: int) -> None:
        """Wait for an auxiliary bucket (see `BucketLayout`) and apply what it holds, once.

        Every member takes the weight and the flags from the trailer; all but the first also take the first
        member's hyperparameters and buffers.
        """
        if self._has_arrived[index]:
            return
        self._wait(index)
        self._has_arrived[index] = True
        rounds = self._rounds
        count, buffers = len(rounds.parameters), rounds.buffers.tensors()
        for entry, view in zip(rounds.buckets[index].entries, self._means_of(index).views(), strict=True):
            if entry == count + len(buffers):
                weight, written, signalled, *rest = view.tolist()
                check_all_wrote(self._written, written, rounds.size)
                if signalled and rounds.preemption_step is None:
                    rounds.preemption_step = self._step
                self.weight, self.used = weight, decode_used(rest[:count], rounds.size)
                if rounds.position:
                    rounds.context.apply_hyperparameters(join_float64(rest[count:]), self.settings or None)
            elif rounds.position:
                # Through .data: as with the layers' own writes, autograd does not count this as a change.
                with optimizer_step_mode():
                    buffers[entry - count].data.copy_(view)

    def _wait(self, index: int) -> None:
        """Wait for a bucket's exchange, and record its duration in the trace."""
        rounds, pending = self._rounds, self._pending[index]
        assert pending is not None
        rounds.wait(pending)
        if (means := self._means[index]) is not None:  # else the step was applied ahead, with these means
            means.fetch()
        if rounds.context.tracer is not None and pending.ended_s is not None:
            what = "buffers and trailer"
            if index < rounds.layout.gradient_buckets:
                bucket = rounds.buckets[index]
                size = f"{bucket.contribution.flat.nbytes / 1e6:.2f} MB"
                what = f"{rounds.names[bucket.entries[0]]}, {size} by {rounds.layout.algorithms[index]}"
            rounds.context.tracer.add_span(what, what, self._launched_s[index], pending.ended_s)
