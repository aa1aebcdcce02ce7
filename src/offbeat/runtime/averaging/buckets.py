"""Memory of gradient buckets, during an exchange and afterwards. This module sends nothing.

Theory of operation
-------------------

A bucket is a 1-D tensor of one dtype that is all-reduced at once. Its entries are, in this order, parameters'
gradients, model buffers and the trailer. A `BucketBuffer` is memory for one bucket, with a view for each
entry. A `GradientBucket` has two of them, or three:

- `contribution`: what this worker contributes. Gradients are scaled by the worker's weight and packed here.
  An exchange does not change its values, so that a round can be repeated with them after an exchange was
  abandoned.
- `output`: receives the sum. It is divided by the sum of weights in place, and its views become `param.grad`,
  so nothing is copied out.
- A second one for sums, where a round begins while the program still has means of the last one
  (`BucketBuffer.is_referenced`, by reference counts), so that they are not overwritten. A program that
  removes its gradients before each backward pass, as `zero_grad` does by default, needs none.

Workers on one host read each other's memory. After an exchange was abandoned, another worker may still be
reading. `replace_read_buffers` replaces memory that is read so; it must be called before anything is written.

Buffers need no mean: the first member contributes its values and all other members zeros, so the sum is the
first member's value.

The trailer is the last entry of all, and carries the numbers of a round that would otherwise need messages of
their own. Its dtype is float32, or float64 if a parameter has it. All of it is summed over the members:

- their weights (the sum is 0 if no member had a sample), flags and counts;
- with `GradientAverager`, lists with one number per member, to which that member alone adds;
- one number per parameter, not 0 if a member has a gradient of it;
- the hyperparameters, to which the first member alone adds, each split into three float32 numbers that hold a
  float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.buckets import Bucket
from offbeat.numerics.collectives.schedules import AUTO
from offbeat.runtime.collectives.contribution import ExternalElements
from offbeat.runtime.collectives.interface import Exchange, PendingExchange
from offbeat.runtime.devices.interface import CallWhenReady
from offbeat.torch_compat import storage_use_count


class ModelBuffers:
    """The buffers of a model, by module and name: layers may replace the tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._locations: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._absent: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None and name not in module._non_persistent_buffers_set:
                    self._absent.append((module, name))
                if buffer is not None and buffer.numel() and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._locations.append((module, name, torch.empty_like(buffer, device="meta")))

    def tensors(self) -> list[torch.Tensor]:
        """Return the current buffers.

        Raises:
            OffbeatError: one has changed its shape or dtype since join, or was None then and is persistent
                (those that are not persistent are caches).
        """
        for module, name in self._absent:
            if (buffer := module._buffers.get(name)) is not None:
                raise OffbeatError(
                    f"the buffer {name!r} was None at join and is {buffer.dtype} {list(buffer.shape)}: run "
                    "one batch through the model before join"
                )
        buffers = []
        for module, name, template in self._locations:
            buffer = getattr(module, name, None)
            if buffer is None or buffer.shape != template.shape or buffer.dtype != template.dtype:
                current = "gone" if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
                raise OffbeatError(
                    f"the buffer {name!r} was {template.dtype} {list(template.shape)} at join and is "
                    f"{current}: leave the session and join again"
                )
            buffers.append(buffer)
        return buffers


def summed_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed over the workers: float32 for half precision."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def write_scaled(
    gradient: torch.Tensor | None, scale: float, into: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """Write the sum of a gradient and a residual times this worker's factor; zeros where there is neither."""
    if residual is not None and scale:
        torch.mul(residual.view_as(into), scale, out=into)
        if gradient is not None:
            into.add_(gradient, alpha=scale)
    elif gradient is None or not scale:
        into.zero_()
    elif gradient.dtype != into.dtype:
        into.copy_(gradient).mul_(scale)  # unlike mul, which would round the product to the gradient's dtype
    else:
        torch.mul(gradient, scale, out=into)


ZerosFactory = Callable[[int, torch.dtype], torch.Tensor]
"""(elements, dtype) -> a new tensor of zeros, in memory that suits the exchange."""


class BucketBuffer:
    """A bucket's memory: first gradients, then buffers, then the trailer."""

    def __init__(self, bucket: Bucket, shapes: Sequence[torch.Size], zeros: ZerosFactory) -> None:
        self.flat = zeros(bucket.elements, bucket.dtype)
        self.views = [
            self.flat[offset : offset + shapes[entry].numel()].view(shapes[entry])
            for entry, offset in zip(bucket.entries, bucket.offsets, strict=True)
        ]
        self._initial_references = self._references()

    def is_referenced(self) -> bool:
        """Whether a view, or a view of one, is still referenced elsewhere."""
        return self._references() != self._initial_references

    def _references(self) -> list[int]:
        counts = [sys.getrefcount(view) for view in self.views]
        counts.append(storage_use_count(self.flat))
        return counts

    def means(self) -> Means:
        """Return the means of the round that is summed here."""
        return Means(self)


class Means:
    """The sums of one round, which `divide` makes means, in the memory in which they are summed.

    Args:
        sums: the memory.
    """

    def __init__(self, sums: BucketBuffer) -> None:
        self._sums = sums

    def fetch(self) -> None:
        """Begin to copy the sums, which have arrived, to the model's device: here, they are there."""

    def views(self) -> Sequence[torch.Tensor]:
        """Return by entry the tensor for the sum, once it was fetched, and then the mean."""
        return self._sums.views

    def divide(self, elements: int, divisor: float) -> None:
        """Divide the sums of the first elements, the gradients."""
        if elements:
            self._sums.flat[:elements].div_(divisor)


class GradientBucket:
    """A bucket: this worker's contribution to a round, and memory for its sums.

    The means of a round become the gradients where they were summed, without a copy. A round that begins
    while the program still has some uses other memory, so that these gradients stay unchanged.

    Args:
        bucket: what lies in it.
        shapes: by entry.
        parameters: the number of parameters, whose gradients are the first entries.
        zeros: allocates memory for the exchange.

    Attributes:
        entries, offsets: see `Bucket`.
        gradient_count, gradient_elements: of the entries that are gradients, which come first.
        missing_count: gradients that are not packed yet.
        pending: the exchange under way, or the last one.
        means: of the round under way, if its averager keeps them here.
    """

    allows_external: ClassVar[bool] = True  # `all_reduce` takes elements that lie elsewhere

    def __init__(
        self, bucket: Bucket, shapes: Sequence[torch.Size], parameters: int, zeros: ZerosFactory
    ) -> None:
        self.entries, self.offsets = bucket.entries, bucket.offsets
        self.gradient_count = sum(entry < parameters for entry in bucket.entries)
        self.gradient_elements = sum(shapes[entry].numel() for entry in bucket.entries[: self.gradient_count])
        self.missing_count = self.gradient_count
        self.pending: PendingExchange | None = None
        self.means: Means | None = None
        self._buffer_arguments = bucket, shapes, zeros
        self.contribution = BucketBuffer(*self._buffer_arguments)
        self.output = self._make_output()
        self._spare: BucketBuffer | None = None

    def _make_output(self) -> BucketBuffer:
        return BucketBuffer(*self._buffer_arguments)

    # Packing and exchanging ------------------------------------------------------------------------------

    def packing_view(self, position: int) -> torch.Tensor:
        """Return where this worker's contribution to an entry is written, by its position in the bucket.

        It holds what was written there in this round. On an accelerator, this thread's current stream has to
        write and read it.
        """
        return self.contribution.views[position]

    def all_reduce(
        self,
        exchange: Exchange,
        *,
        exchange_id: int,
        index: int,
        algorithm: str = AUTO,
        priority: int = 0,
        external: Sequence[ExternalElements] = (),
    ) -> PendingExchange:
        """Start to sum the contributions; see `Exchange.all_reduce`."""
        self._bring_to_host()
        return exchange.all_reduce(
            self.contribution.flat,
            self.output.flat,
            exchange_id=exchange_id,
            index=index,
            algorithm=algorithm,
            priority=priority,
            external=external,
            after=self._when_copied(),
        )

    @property
    def can_advance(self) -> bool:
        """Whether `advance` would begin an exchange without waiting."""
        return False

    def advance(self, timeout_s: float) -> bool:
        """Wait for one of several exchanges and begin the next; return whether there is yet another one.

        The last one, here the only one, is left to `wait` of what `all_reduce` has returned.

        Raises:
            WorkerError: see `PendingExchange.wait`.
        """
        return False

    def prepare(self, exchange: Exchange, *, exchange_id: int, index: int, algorithm: str = AUTO) -> None:
        """Let other members begin the next round; see `Exchange.prepare`."""
        exchange.prepare(
            self.output.flat,
            exchange_id=exchange_id,
            index=index,
            algorithm=algorithm,
            after=self._when_copied(),
        )

    def _bring_to_host(self) -> None:
        """Begin to copy what was packed to `contribution`: here, it was packed there."""

    def _when_copied(self) -> CallWhenReady | None:
        """Return what calls back when the memory may be sent and received into; None for now."""
        return None

    @property
    def keeps_residuals(self) -> bool:
        """Whether `commit` keeps what the sums lack of this worker's gradients: here, they lack nothing."""
        return False

    # Reusing the memory ----------------------------------------------------------------------------------

    def replace_read_buffers(self, is_read: Callable[[torch.Tensor], bool]) -> None:
        """Replace memory that another worker may still read (`TensorMemory.may_be_read`).

        To be called after an exchange was abandoned, before anything is written. This worker's contribution
        keeps its values.
        """
        if is_read(self.contribution.flat):
            before, self.contribution = self.contribution, BucketBuffer(*self._buffer_arguments)
            self.contribution.flat.copy_(before.flat)
        if is_read(self.output.flat):
            self.output = self._make_output()
        if self._spare is not None and is_read(self._spare.flat):
            self._spare = None

    def commit(self, *, own_weight: float, weight: float, used: Sequence[float]) -> None:
        """Keep what the next round needs of this one, whose sums are used: here, nothing.

        To be called before the sums are divided.

        Args:
            own_weight: of this worker's contribution; 0 where it has none.
            weight: of all members' contributions together, more than 0.
            used: by entry, not 0 where a member has a gradient.
        """

    def end_round(self) -> None:
        """Drop this worker's contribution and the means: the round is over."""
        self.means = None

    def begin_round(self) -> None:
        """Provide memory for the sums of a round; the program may still have means of the last one."""
        if self.output.is_referenced():
            self.swap_output()

    def swap_output(self) -> None:
        """Switch to the other memory for sums: a round that is over, or under way, uses the current one."""
        self.output, self._spare = self._spare or self._make_output(), self.output
        if self.output.is_referenced():
            self.output = self._make_output()
