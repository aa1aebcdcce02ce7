"""Sends parameters to workers outside the group, and late gradients back to the members they are for.

The coordinator assigns late blocks to workers outside, each with a member as proxy, and decides whether a
late gradient counts (see `offbeat.policies.data.late_blocks`). Nothing here waits for a member, or delays
one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from offbeat.errors import LinkError
from offbeat.events import AssignBlocks, AssignLateBlock, Block, LateGradientArrived, ResolveLateBlock
from offbeat.runtime.devices.interface import Accelerator, Device
from offbeat.runtime.devices.memory import DeviceMemory

if TYPE_CHECKING:
    from offbeat.policies.membership.group_protocol import GroupProtocol
    from offbeat.runtime.control.client import CoordinatorClient

_FIRST_TAG = 1 << 63  # exchanges use the tags below
_WORKER_SHIFT, _NUMBER_SHIFT = 33, 1
_ALIGNED_BYTES = 16
_LOW_PRIORITY = 1 << 20  # a priority after all exchanges


class _TensorMessage:
    """A message of some float64 numbers and tensors, which are sent bit for bit.

    Args:
        numbers: how many.
        like: tensors of the same shapes and dtypes.
        device: holds the model.

    Attributes:
        memory: the whole message on the host, as bytes.
        numbers_N: float64.
    """

    def __init__(self, numbers: int, like: Sequence[torch.Tensor], device: Device) -> None:
        self._accelerator = cast(Accelerator, device) if device.has_streams else None
        self._like = [(one.dtype, one.shape, one.numel() * one.element_size()) for one in like]
        self._padded = [_padded(size) for *_, size in self._like]
        begin = _padded(8 * numbers)
        flat = device.pinned_zeros(begin + sum(self._padded), torch.uint8)
        self.numbers_N = flat[: 8 * numbers].view(torch.float64)
        self._flat = flat[begin:]
        self._views = self._views_of(self._flat)
        raw: Any = flat.numpy()
        self.memory = memoryview(raw)
        self._missing = len(self.memory)
        self._copied_out: Any = None
        self._received: DeviceMemory | None = None

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            section[:size].view(dtype).view(shape)
            for section, (dtype, shape, size) in zip(flat.split(self._padded), self._like, strict=True)
        ]

    def _allocate(self, device: Accelerator) -> DeviceMemory:
        flat = torch.empty(self._flat.shape, dtype=torch.uint8, device=device.torch_device)
        return DeviceMemory(device, flat, self._views_of(flat))

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Write tensors, nothing for None; an accelerator does so later, and then copies them out."""
        memory = None if self._accelerator is None else self._allocate(self._accelerator)
        views = self._views if memory is None else memory.views
        for view, tensor in zip(views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        if memory is not None:
            self._copied_out = memory.copy_out(self._flat)

    def call_when_packed(self, send: Callable[[], object]) -> None:
        """Call `send` once the message may be sent: now, or in another thread after the copy out."""
        if self._accelerator is None:
            send()
        else:
            self._accelerator.call_after([self._copied_out], send)

    def add_received(self, length: int) -> bool:
        """Count received bytes; return whether these were the last."""
        self._missing -= length
        return not self._missing

    def received(self) -> Sequence[torch.Tensor]:
        """Return the received tensors where the model lies.

        On an accelerator they are copied in, once, and this thread's current stream waits for that.
        """
        if self._accelerator is None:
            return self._views
        if self._received is None:
            self._received = self._allocate(self._accelerator)
            self._received.copy_in(self._flat)
        self._received.use()
        return self._received.views


def _padded(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


class _LateGradient:
    """A gradient that a worker outside the group computes for this member.

    Attributes:
        number: the assignment's number.
        block: the block of samples.
        is_due: the parameters are still to be sent.
        weight: of the gradient.
        has: by parameter, whether it has a gradient.
    """

    def __init__(self, assigned: AssignLateBlock, message: _TensorMessage, parameters: int) -> None:
        self.number, self.block, self._message = assigned.assignment, assigned.block.id, message
        self.is_due = True
        self.weight, self.has = 0.0, [False] * parameters

    def open(self) -> None:
        """Read weight and flags from the received message."""
        _, self.weight, *has = self._message.numbers_N.tolist()
        self.has = [bool(one) for one in has]

    def gradient(self, entry: int) -> torch.Tensor:
        """Return the gradient of a parameter, on the model's device: the current stream waits for it."""
        return self._message.received()[entry]


@dataclass
class _LateBlock:
    """A late block that this worker, outside the group, computes.

    Attributes:
        message: parameters and buffers, and their step; None once they have been loaded.
        step: of the parameters that were loaded.
        is_here: the parameters have arrived.
        is_begun: the block is being computed.
        is_sent: its gradient has been sent.
    """

    assigned: AssignLateBlock
    message: _TensorMessage | None
    step: float = 0.0
    is_here: bool = False
    is_begun: bool = False
    is_sent: bool = False

    def load_into(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy the received parameters and buffers into tensors, and free their memory."""
        assert self.message is not None
        self.step = float(self.message.numbers_N[0])
        for tensor, value in zip(targets, self.message.received(), strict=True):
            tensor.data.copy_(value)
        self.message = None


class LateGradients:
    """One worker's late blocks: those that it computes, and those that it is the proxy for.

    The proxy copies its parameters at the end of a step and sends the copy in the background. The gradient is
    received into separate memory. Once it is complete and the coordinator accepts it, it is added to the
    proxy's contribution to the next round, with its own weight. All state is kept by
    assignment, so that a revoked one can be dropped at any time.

    On an accelerator, messages lie in pinned memory of the host. Tensors are packed on the device and copied
    out, and the message is sent when that copy has ended; received ones are copied in, and the current stream
    waits for that. The host waits for neither. Each message has memory of its own, which exists as long as a
    link, a copy or this object uses it.

    Args:
        client: the control side; its lock guards this object.
        protocol: this worker's side of the group protocol.
        device: holds the model.

    Attributes:
        active: the late gradients that count in the round under way.
    """

    def __init__(self, client: CoordinatorClient, protocol: GroupProtocol, device: Device) -> None:
        self._device = device
        self._client, self._membership, self._block_queue = client, protocol.membership, protocol.block_queue
        self._parameters: list[torch.Tensor] = []
        self._get_buffers: Callable[[], list[torch.Tensor]] = list
        self._late_block: _LateBlock | None = None
        self._has_had_late_block = False
        self._is_requesting = False
        self._awaited: dict[int, _LateGradient] = {}  # by worker, until resolved
        self._accepted: list[_LateGradient] = []  # accepted, for the next round
        self.active: list[_LateGradient] = []

    @property
    def is_excluded(self) -> bool:
        """Whether this worker is outside the group."""
        return not self._membership.is_member

    def set_tensors(
        self, parameters: Sequence[torch.Tensor], get_buffers: Callable[[], list[torch.Tensor]]
    ) -> None:
        """Set the tensors to send: the same, in the same order, on every worker."""
        self._parameters, self._get_buffers = list(parameters), get_buffers

    # Actions of the coordinator, in the I/O thread ---------------------------------------------------

    def on_action(self, action: AssignLateBlock | ResolveLateBlock | AssignBlocks) -> None:
        """Carry out an action about late blocks or, in a worker outside the group, about its samples."""
        with self._client.lock:
            match action:
                case AssignLateBlock() if action.worker == self._client.worker:
                    self._accept_block(action)
                case AssignLateBlock():
                    self._expect_gradient(action)
                case ResolveLateBlock():
                    self._resolve(action)
                case AssignBlocks(replaces_queue=True):
                    self._is_requesting = False
                    self._late_block = None
                    self._accepted = []
                case AssignBlocks():
                    self._is_requesting = False

    def _accept_block(self, assigned: AssignLateBlock) -> None:
        self._has_had_late_block, self._is_requesting = True, False
        self._forget(assigned.worker, assigned.assignment)
        if self._block_queue.ignores_assignments:
            self._late_block = None
            return
        message = _TensorMessage(1, [*self._parameters, *self._get_buffers()], self._device)
        late_block = self._late_block = _LateBlock(assigned, message)

        def on_data(_: int, length: int) -> None:
            if message.add_received(length):
                with self._client.lock:
                    late_block.is_here = True
                    self._client.lock.notify_all()

        self._expect(assigned.proxy, _tag(assigned.worker, assigned.assignment), message, on_data)

    def _expect_gradient(self, assigned: AssignLateBlock) -> None:
        self._forget(assigned.worker, assigned.assignment)
        message = _TensorMessage(2 + len(self._parameters), self._parameters, self._device)
        self._awaited[assigned.worker] = _LateGradient(assigned, message, len(self._parameters))

        def on_data(_: int, length: int) -> None:
            if message.add_received(length):
                self._client.send_event(
                    LateGradientArrived(
                        now_s=0.0,
                        worker=self._client.worker,
                        late_worker=assigned.worker,
                        assignment=assigned.assignment,
                        step=int(message.numbers_N[0]),
                    )
                )

        self._expect(assigned.worker, _tag(assigned.worker, assigned.assignment) + 1, message, on_data)

    def _resolve(self, resolved: ResolveLateBlock) -> None:
        late_gradient = self._awaited.get(resolved.late_worker)
        if late_gradient is None or late_gradient.number != resolved.assignment:
            return
        del self._awaited[resolved.late_worker]
        self._forget(resolved.late_worker, resolved.assignment + 1)
        if resolved.is_contributed and not self._block_queue.ignores_assignments:
            late_gradient.open()
            self._accepted.append(late_gradient)

    def _expect(
        self, worker: int, tag: int, message: _TensorMessage, on_data: Callable[[int, int], None]
    ) -> None:
        self._client.endpoint.post_receive(self._client.link_name(worker), tag, message.memory, on_data)

    def _forget(self, worker: int, number: int) -> None:
        """Discard messages of a worker's assignments before this one."""
        self._client.endpoint.cancel(_tag(worker, 0), _tag(worker, number))

    # On the worker outside -------------------------------------------------------------------------------

    @property
    def has_block(self) -> bool:
        """Whether a block and its parameters are there, and its computation has not begun."""
        return self._late_block is not None and self._late_block.is_here and not self._late_block.is_begun

    @property
    def is_expecting(self) -> bool:
        """Whether an assignment, its parameters, or the decision on a sent gradient is to arrive soon."""
        late_block = self._late_block
        if late_block is None:
            return self._is_requesting
        return late_block.is_sent if late_block.is_begun else not late_block.is_here

    def on_samples_requested(self) -> None:
        """Record that samples were requested; the coordinator answers a worker with late blocks."""
        self._is_requesting = self._has_had_late_block

    @torch.no_grad()
    def begin_block(self) -> Block | None:
        """Load the received parameters; return the block to compute, or None if it was revoked."""
        with self._client.lock:
            late_block = self._late_block
            if late_block is None or not self.has_block or self._membership.is_member:
                return None
            late_block.is_begun = True
        late_block.load_into([*self._parameters, *self._get_buffers()])
        return late_block.assigned.block

    @torch.no_grad()
    def send_gradient(self, weight: float) -> None:
        """Send the gradients of the late block, if any, to the proxy."""
        with self._client.lock:
            late_block = self._late_block
            if late_block is None or not late_block.is_begun or late_block.is_sent:
                return
            late_block.is_sent = True
        gradients = [parameter.grad for parameter in self._parameters]
        message = _TensorMessage(2 + len(gradients), self._parameters, self._device)
        numbers = [late_block.step, weight, *(float(one is not None) for one in gradients)]
        message.numbers_N.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        message.pack(gradients)
        assigned = late_block.assigned
        self._send(assigned.proxy, _tag(assigned.worker, assigned.assignment) + 1, message)

    # On the proxy ----------------------------------------------------------------------------------------

    @property
    def has_accepted(self) -> bool:
        """Whether a late gradient waits for this worker's next round."""
        return bool(self._accepted)

    def finish_step(self, step: int) -> None:
        """Send a copy of the parameters, after a step, to workers that wait for it.

        Args:
            step: optimizer steps in the parameters; `GroupMembership.step` may be ahead, where a round is
                skipped meanwhile.
        """
        if not self._awaited:
            return
        with self._client.lock:
            due = [
                (worker, late_gradient)
                for worker, late_gradient in self._awaited.items()
                if late_gradient.is_due
            ]
        if due and self._membership.is_member:
            self._send_parameters(due, step)

    @torch.no_grad()
    def _send_parameters(self, due: list[tuple[int, _LateGradient]], step: int) -> None:
        tensors = [*self._parameters, *self._get_buffers()]
        message = _TensorMessage(1, tensors, self._device)
        message.numbers_N[0] = step
        message.pack(tensors)
        for worker, late_gradient in due:
            late_gradient.is_due = False
            self._send(worker, _tag(worker, late_gradient.number), message)

    def activate_accepted(self) -> None:
        """Add the accepted late gradients to the round that begins."""
        if not self._accepted:
            return
        with self._client.lock:
            self.active += self._accepted
            for late_gradient in self._accepted:
                self._block_queue.adopt(late_gradient.block)
            self._accepted = []

    def clear_active(self) -> None:
        """Drop the round's late gradients: it is over, or this worker is not part of it."""
        if self.active:
            self.active = []

    def drop_all(self) -> None:
        """Drop the late block and the accepted late gradients: the loop has left its epoch early."""
        self._late_block = None
        self._accepted = []

    def _send(self, worker: int, tag: int, message: _TensorMessage) -> None:
        """Send a message once it is packed; it may have been revoked by then, and the link drops it."""

        def send() -> None:
            with suppress(LinkError):  # then the job has failed, which is reported elsewhere
                self._client.endpoint.send_tensor(
                    self._client.link_name(worker),
                    tag,
                    message.memory,
                    priority=_LOW_PRIORITY,
                    on_done=partial(_keep_alive, message),
                )

        message.call_when_packed(send)


def _tag(worker: int, number: int) -> int:
    """Return the tag of an assignment's parameters; its gradients have the next one."""
    return _FIRST_TAG | worker << _WORKER_SHIFT | number << _NUMBER_SHIFT


def _keep_alive(_: _TensorMessage) -> None:
    """Keep a message alive until it has been sent."""
