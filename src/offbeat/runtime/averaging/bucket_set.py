"""The buckets of a worker's rounds, and which of their gradients are packed and sent.

This module never decides when a round begins, nor whether it is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import nn

from offbeat.numerics.collectives.buckets import plan_buckets
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.runtime.averaging.buckets import GradientBucket, ModelBuffers, summed_dtype, write_scaled
from offbeat.runtime.averaging.compressed_buckets import CompressedBucket, make_compressed_buckets
from offbeat.runtime.averaging.group_binding import GroupBinding, GroupHandle
from offbeat.runtime.averaging.local_state import by_name, by_number
from offbeat.runtime.averaging.sgd_momentum import SGDMomentum
from offbeat.runtime.averaging.staged_buckets import make_buckets
from offbeat.runtime.averaging.trailer import RoundSums, TrailerLayout
from offbeat.runtime.collectives.compressed_sum import EXCHANGES_MAX


class CompressorState(TypedDict):
    """What a checkpoint holds of one bucket's compressor.

    Attributes:
        compression: the method with its options.
        parameters: names of those in the bucket.
        state: see `Compressor.sum`.
    """

    compression: str
    parameters: list[str]
    state: Any


class BucketSet:
    """Gradients are packed in any order, and each bucket is sent when it is full.

    Exchanges over links have numbers, so that members may begin them in different orders: a bucket that lacks
    a gradient on one member holds up no other bucket, and no order has to be negotiated. Where calls have to
    be in one order (`Exchange.keeps_order`), a full bucket waits for those before it.

    What is packed stays, scaled by one factor, until the round is over: so the round can be repeated with the
    same gradients, even in a group for which the trailer has to be longer. Late gradients are added to this
    worker's own.

    Args:
        model: its buffers are sent, too.
        parameters: gradients of these are packed.
        binding: the binding to the group; None in a world of one, which needs no bucket.
        hyperparameters: returns this worker's.
        workers: the number of members at the job's start.
        bucket_bytes: the largest size of a bucket of several parameters, in bytes.
        compression: of gradients; None for none.
        momentum: of a compression with momentum correction.

    Attributes:
        group: for the round under way, None before it is bound.
        scale: factor of the gradients of the round under way, None before the first is packed.
        buffers: of the model.

    Size: which gradients are packed, sent or expected is one state; packing, sending and repeating change it.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[torch.Tensor],
        binding: GroupBinding | None,
        hyperparameters: Callable[[], list[float]],
        *,
        workers: int,
        bucket_bytes: int,
        compression: CompressionMethod | None = None,
        momentum: SGDMomentum | None = None,
    ) -> None:
        self._model, self._compression, self._momentum = model, compression, momentum
        self._residuals: dict[int, torch.Tensor] = {}  # by entry, of compressed buckets
        self._parameters, self._binding, self._hyperparameters = parameters, binding, hyperparameters
        self._workers, self._bucket_bytes = workers, bucket_bytes
        self.group: GroupHandle | None = None
        self.scale: float | None = None
        self.buffers = ModelBuffers(model)
        self._own_weight = 0.0  # of this worker's contribution to the round under way
        self._exchange_id: int | None = None  # of the buckets that are being sent
        self._ready_entries: set[int] = set()  # packed during a backward pass
        self._unused_entries: set[int] = set()  # no gradient is expected of them in the pass under way
        self._is_stale = False  # a gradient was packed after its bucket had been sent
        self._make_buckets(workers)

    def _make_buckets(self, capacity: int) -> None:
        self._index_stride = 1 if self._compression is None else EXCHANGES_MAX
        self._trailer = TrailerLayout(capacity, len(self._parameters), len(self._hyperparameters()))
        self._trailer_entry = len(self._parameters) + len(self.buffers.tensors())
        self._buckets = [] if self._binding is None else self._planned_buckets(self._binding)
        self._location_of = {
            entry: (index, position)
            for index, bucket in enumerate(self._buckets)
            for position, entry in enumerate(bucket.entries)
        }
        self._unsent = [*range(len(self._buckets))]
        # Buckets that are launched only after the backward pass: those that hold more than gradients, and
        # those of which a gradient has come twice in one pass.
        self._held = {
            index for index, bucket in enumerate(self._buckets) if len(bucket.entries) > bucket.gradient_count
        }

    def _planned_buckets(self, binding: GroupBinding) -> list[GradientBucket]:
        tensors = [*self._parameters, *self.buffers.tensors()]
        shapes = [t.shape for t in tensors] + [torch.Size([self._trailer.length])]
        precise = any(t.dtype == torch.float64 for t in self._parameters)
        # NCCL rounds half precision less often than a ring does, and its bytes matter more.
        is_on_host = binding.exchange_device.type == "cpu"
        dtypes = [summed_dtype(t) if is_on_host else t.dtype for t in tensors]
        dtypes += [torch.float64 if precise else torch.float32]
        sizes = [shape.numel() for shape in shapes]
        plan = plan_buckets(sizes, dtypes, bucket_bytes=self._bucket_bytes)
        parameters, zeros = len(self._parameters), binding.memory.zeros
        if self._compression is None:
            return make_buckets(plan, shapes, parameters, binding.memory, binding.exchange_device)
        return make_compressed_buckets(
            plan,
            shapes,
            parameters,
            zeros,
            method=self._compression,
            residuals=self._residuals,
            momentum=None if self._momentum is None else self._momentum.correction,
        )

    def bind(self, group: GroupHandle) -> None:
        """Bind the round under way to a group, and make room for its sums and its members' numbers."""
        self.group = group
        size = group.size
        capacity = self._workers if size <= self._workers else 1 << (size - 1).bit_length()
        if capacity != self._trailer.capacity:
            self._resize_trailer(capacity)
        for bucket in self._buckets:
            bucket.begin_round()

    def _resize_trailer(self, capacity: int) -> None:
        """Make buckets for another group size, and copy the packed gradients into them."""
        old_buckets, old_location_of = self._buckets, self._location_of
        factor = self._trailer.capacity / capacity
        self._make_buckets(capacity)
        if self.scale is not None:
            self.scale *= factor
        for entry in self._ready_entries:
            (old_index, old_position), (index, position) = old_location_of[entry], self._location_of[entry]
            torch.mul(
                old_buckets[old_index].packing_view(old_position),
                factor,
                out=self._buckets[index].packing_view(position),
            )
            self._buckets[index].missing_count -= 1

    # Packing -------------------------------------------------------------------------------------------

    def add_gradient(self, entry: int, weight: float) -> None:
        """Pack a gradient during the backward pass, and send the buckets that this completes.

        Args:
            entry: the parameter, whose memory for the gradient is freed for the next layer's.
            weight: of this worker's gradients of the round, 1 for a whole batch.
        """
        index, _ = self._location_of[entry]
        is_first = entry not in self._ready_entries
        self._fix_scale(weight)
        with torch.no_grad():
            self._pack_gradient(entry, add=not is_first)
        self._parameters[entry].grad = None
        if index not in self._unsent and (not is_first or entry in self._unused_entries):
            self._is_stale = True
        if not is_first:
            self._held.add(index)
            return
        self._ready_entries.add(entry)
        if entry not in self._unused_entries:
            self._buckets[index].missing_count -= 1
            if not self._buckets[index].missing_count:
                self._launch_full()

    def begin_pass(self, unused: Iterable[int], weight: float) -> None:
        """Let other members begin the round, and buckets be sent without parameters that are not used.

        To be called before the first `add_gradient` of the pass. A gradient that comes nonetheless is packed,
        and its bucket sent again.

        Args:
            unused: the parameters; those that have a gradient, of an earlier pass, count as used.
            weight: see `add_gradient`.
        """
        if self.scale is None:
            self._prepare()
        self._fix_scale(weight)
        for entry in unused:
            if self._parameters[entry].grad is None and entry not in self._ready_entries:
                self._unused_entries.add(entry)
                self._buckets[self._location_of[entry][0]].missing_count -= 1
        self._launch_full()

    def _launch_full(self) -> None:
        """Send the buckets that are full, where calls have an order up to the first that is not."""
        assert self.group is not None
        for index in self._unsent.copy():
            if index not in self._held and not self._buckets[index].missing_count:
                self._launch(index)
            elif self.group.exchange.keeps_order:
                return

    def _prepare(self) -> None:
        """Let other members begin the round before this worker's first bucket is complete."""
        assert self.group is not None
        assert self._binding is not None
        if self._exchange_id is not None or not self._binding.is_stable:
            return
        for index, bucket in enumerate(self._buckets):
            bucket.prepare(
                self.group.exchange,
                exchange_id=self._binding.membership.exchange_id,
                index=index * self._index_stride,
                algorithm=self.group.algorithm,
            )

    def _fix_scale(self, weight: float) -> float:
        """Return this worker's weight in the mean, rounded to the trailer's dtype.

        Dividing before the sum avoids overflow in half precision. The divisor is not the group's size: then
        members that packed before and after a change of the group would be weighted differently.
        """
        if self.scale is None:
            assert self.group is not None
            exact = weight * self.group.weight / self._trailer.capacity
            self.scale = float(
                torch.tensor(exact, dtype=self._buckets[-1].contribution.flat.dtype, device="cpu")
            )
        return self.scale

    def _pack_gradient(self, entry: int, *, add: bool = False) -> None:
        """Write or add a scaled gradient to its bucket."""
        assert self._binding is not None
        index, position = self._location_of[entry]
        view = self._buckets[index].packing_view(position)
        gradient, scale = self._parameters[entry].grad, self.scale
        if self._momentum is not None:
            assert self.group is not None
            self._momentum.pack(
                entry,
                self._parameters[entry],
                view,
                scale=scale or 0.0,
                residuals=self._residuals,
                members=self.group.size,
                add=add,
            )
        elif add and gradient is not None and scale:
            view.add_(gradient, alpha=scale)
        else:
            write_scaled(gradient, scale or 0.0, view, self._residuals.get(entry))
        if not add:
            for late in self._binding.late_gradients.active:
                if late.has[entry]:
                    view.add_(late.gradient(entry), alpha=late.weight / self._trailer.capacity)

    def fill_trailer(
        self, *, weight: float, writes: int, is_preempted: bool, round_s: float, offset_s: float
    ) -> None:
        """Write this worker's numbers, except its blocks, which `launch_last` gets: see `RoundSums`."""
        assert self.group is not None
        assert self._binding is not None
        if any(self._parameters[entry].grad is not None for entry in self._unused_entries):
            self._is_stale = True  # the program has set one by hand
        late = self._binding.late_gradients.active
        scale = self._fix_scale(weight)
        self._own_weight = scale + sum(one.weight for one in late) / self._trailer.capacity
        counts_own = bool(scale) or not self._own_weight
        values = self._trailer.encode(
            self.group.position,
            weight=self._own_weight,
            is_stale=self._is_stale,
            writes=writes,
            is_preempted=is_preempted,
            round_s=round_s,
            offset_s=offset_s,
            has_gradient=[
                (bool(scale) and entry in self._ready_entries)
                or (counts_own and parameter.grad is not None)
                or any(one.has[entry] for one in late)
                for entry, parameter in enumerate(self._parameters)
            ],
            hyperparameters=self._hyperparameters(),
        )
        trailer = self._buckets[-1].contribution.views[-1]
        trailer.copy_(torch.tensor(values, dtype=trailer.dtype, device="cpu"))

    # The exchange --------------------------------------------------------------------------------------

    def launch_all_but_last(self) -> None:
        """Send all buckets but the one with the trailer."""
        for index in self._unsent[:-1]:
            self._launch(index)

    def launch_last(self, blocks: tuple[int, int]) -> None:
        """Send the last bucket.

        Args:
            blocks: behind this worker's gradients: its own, other workers' for it.
        """
        assert self.group is not None
        trailer = self._buckets[-1].contribution.views[-1]
        for index, count in zip(self._trailer.block_indices(self.group.position), blocks, strict=True):
            if count:  # else it is 0 already
                trailer[index] = count
        self._launch(len(self._buckets) - 1)
        self._exchange_id = None

    def _launch(self, index: int) -> None:
        assert self.group is not None
        assert self._binding is not None
        bucket = self._buckets[index]
        with torch.no_grad():
            self._pack_rest(bucket)
        if self._exchange_id is None:
            self._exchange_id = self._binding.next_exchange_id()
        bucket.pending = bucket.all_reduce(
            self.group.exchange,
            exchange_id=self._exchange_id,
            index=index * self._index_stride,
            algorithm=self.group.algorithm,
        )
        self._unsent.remove(index)

    def _pack_rest(self, bucket: GradientBucket) -> None:
        """Pack what no hook has: gradients, and on the first member buffers."""
        assert self.group is not None
        for entry in bucket.entries[: bucket.gradient_count]:
            if entry not in self._ready_entries:
                self._pack_gradient(entry)
        buffer_entries = [e for e in bucket.entries[bucket.gradient_count :] if e != self._trailer_entry]
        if buffer_entries:
            buffers = self.buffers.tensors()
            for position, entry in enumerate(buffer_entries, bucket.gradient_count):
                view = bucket.packing_view(position)
                if self.group.position == 0:
                    view.copy_(buffers[entry - len(self._parameters)])
                else:
                    view.zero_()

    def wait(self, timeout_s: float) -> RoundSums:
        """Wait for all exchanges, begin those that follow from others, and return the sums of the trailers.

        Raises:
            WorkerError: a member was lost, or did not join the exchange in time.
            GroupChangedError: the group has changed.
        """
        assert self.group is not None
        deadline_s = time.monotonic() + timeout_s
        # An exchange of one bucket is under way while the next one of another is computed.
        while sum(bucket.advance(max(0.0, deadline_s - time.monotonic())) for bucket in self._buckets):
            pass
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait(max(0.0, deadline_s - time.monotonic()))
            bucket.means = bucket.output.means()
            bucket.means.fetch()
        return self._trailer.decode(self._buckets[-1].output.views[-1].tolist(), self.group.size)

    def unpack(self, sums: RoundSums, set_gradient: Callable[[int, torch.Tensor], None]) -> None:
        """Turn the received sums into means, and copy the first member's buffers.

        Args:
            sums: what `wait` has returned.
            set_gradient: gets each parameter of which a member has a gradient, and the mean.
        """
        assert self.group is not None
        buffers = self.buffers.tensors()
        for bucket in self._buckets:
            assert bucket.means is not None
            if sums.weight:
                bucket.commit(own_weight=self._own_weight, weight=sums.weight, used=sums.used)
                self._forget_sent_residuals(bucket, sums)
            if sums.weight not in (0.0, 1.0):
                bucket.means.divide(bucket.gradient_elements, sums.weight)
            for entry, view in zip(bucket.entries, bucket.means.views(), strict=True):
                if entry < len(self._parameters):
                    if sums.used[entry] and sums.weight:
                        set_gradient(entry, view)
                elif entry < len(self._parameters) + len(buffers) and self.group.position:
                    # Through .data: as with the layers' own writes, autograd does not count this as a change.
                    buffers[entry - len(self._parameters)].data.copy_(view)

    def _forget_sent_residuals(self, bucket: GradientBucket, sums: RoundSums) -> None:
        """Forget residuals of before the compression changed, which a bucket that keeps none has sent."""
        if self._residuals and self._own_weight and not bucket.keeps_residuals:
            for entry in bucket.entries[: bucket.gradient_count]:
                if sums.used[entry]:
                    self._residuals.pop(entry, None)

    # A round begins again, or is over ------------------------------------------------------------------

    def relaunch(self) -> None:
        """Let all buckets be sent again, as a member had changed a gradient after it sent its bucket."""
        self._unsent, self._is_stale = [*range(len(self._buckets))], False
        self._unused_entries.clear()

    def abandon(self) -> None:
        """Let the round be repeated in the next group, with the same gradients."""
        assert self._binding is not None
        self.group = self._exchange_id = None
        self._unsent = [*range(len(self._buckets))]
        for bucket in self._buckets:
            bucket.replace_read_buffers(self._binding.memory.may_be_read)

    def discard_gradients(self) -> None:
        """Forget packed gradients, residuals and momentum of a worker, which contributes with weight 0."""
        self._ready_entries.clear()
        self.scale = 0.0
        self._residuals.clear()
        if self._momentum is not None:
            self._momentum.correction.clear()

    def forget_pass(self) -> None:
        """Forget what was packed in a backward pass that failed; its buckets are sent again."""
        self._ready_entries.clear()
        self.scale = None
        self._unused_entries.clear()
        self._is_stale = self.launched > 0
        self._expect_all()

    def change_compression(self, compression: CompressionMethod | None) -> None:
        """Compress in another way from the next round on; to be called before `end_round`, on all members."""
        self._compression = compression
        self._make_buckets(self._trailer.capacity)

    def end_round(self) -> None:
        """End a round."""
        self.relaunch()
        self._ready_entries.clear()
        self._expect_all()
        for bucket in self._buckets:
            bucket.end_round()
        self.group = self.scale = None

    @property
    def launched(self) -> int:
        """The number of buckets that have been sent."""
        return len(self._buckets) - len(self._unsent)

    @property
    def ready_entries(self) -> Collection[int]:
        """The parameters of which a gradient was packed during the backward pass."""
        return self._ready_entries

    def _expect_all(self) -> None:
        for bucket in self._buckets:
            bucket.missing_count = bucket.gradient_count

    # Checkpoints ---------------------------------------------------------------------------------------

    def compressor_states(self) -> list[CompressorState]:
        """Return the compressors' states, which are the same on all members."""
        return [
            {"compression": str(self._compression), "parameters": self._names_in(bucket), "state": state}
            for bucket in self._buckets
            if isinstance(bucket, CompressedBucket) and (state := bucket.state) is not None
        ]

    def load_compressor_states(self, states: Sequence[CompressorState]) -> None:
        """Restore `compressor_states`, the same on all members of the current group.

        A bucket begins without a state if the saved buckets hold other parameters, or another compression.
        """
        handle = None if self._binding is None else self._binding.handle
        if handle is None:
            return
        state_of = {(one["compression"], *one["parameters"]): one["state"] for one in states}
        for bucket in self._buckets:
            if isinstance(bucket, CompressedBucket):
                key = (str(self._compression), *self._names_in(bucket))
                bucket.load_state(state_of.get(key), handle.exchange)

    def local_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this worker's residuals and momentum by the parameters' names; later rounds change them."""
        kinds: dict[str, Mapping[int, torch.Tensor]] = {"residuals": self._residuals}
        if self._momentum is not None:
            kinds["momenta"] = self._momentum.correction.momenta
        return {kind: by_name(values, self._names) for kind, values in kinds.items() if values}

    def load_local_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace this worker's residuals, which are added to its next gradients, and its momentum.

        Residuals are used however the next gradients are sent; momentum is left without momentum correction.

        Raises:
            OffbeatError: it is not that of a parameter, or has another number of elements.
        """
        residuals = by_number(state.get("residuals", {}), self._names, self._parameters)
        momenta = by_number(state.get("momenta", {}), self._names, self._parameters)
        self._residuals.clear()
        self._residuals.update(residuals)
        if self._momentum is not None:
            self._momentum.correction.clear()
            for entry, momentum in momenta.items():
                self._momentum.correction.take_over(entry, momentum, momentum.dtype)

    @cached_property
    def _names(self) -> list[str]:
        """The parameters' names in the model."""
        name_of: dict[torch.Tensor, str] = {one: name for name, one in self._model.named_parameters()}
        return [name_of[parameter] for parameter in self._parameters]

    def _names_in(self, bucket: GradientBucket) -> list[str]:
        return [self._names[entry] for entry in bucket.entries[: bucket.gradient_count]]
