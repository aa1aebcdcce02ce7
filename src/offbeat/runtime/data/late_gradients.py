"""Carries parameters to workers outside the group, and their gradients to the members that they compute for.

Who computes what for whom, and whether what comes late counts, is the coordinator's to say (see
`offbeat.policies.lending`). Nothing here waits for a member, and no member waits for anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import LinkError
from offbeat.events import Block, Brought, Deal, Lend, Settle

if TYPE_CHECKING:
    from offbeat.runtime.averaging.buckets import BufferList
    from offbeat.runtime.control.client import Member

_FIRST_TAG = 1 << 63  # exchanges use what is below
_WORKER_SHIFT, _NUMBER_SHIFT = 33, 1
_ALIGNED_BYTES = 16
_LATER = 1 << 20  # priority: after all exchanges


class _Parcel:
    """A message: a few numbers, and tensors bit for bit.

    Attributes:
        memory: all of it, as bytes.
        numbers_N: float64.
        tensors: views of the memory.
    """

    def __init__(self, numbers: int, like: Sequence[torch.Tensor]) -> None:
        sizes = [8 * numbers] + [one.numel() * one.element_size() for one in like]
        padded = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
        flat = torch.zeros(sum(padded), dtype=torch.uint8, device="cpu")
        places = flat.split(padded)
        self.numbers_N = places[0][: sizes[0]].view(torch.float64)
        self.tensors = [
            place[:size].view(one.dtype).view(one.shape)
            for place, size, one in zip(places[1:], sizes[1:], like, strict=True)
        ]
        raw: Any = flat.numpy()
        self.memory = memoryview(raw)
        self._missing = len(self.memory)

    def came(self, length: int) -> bool:
        """Counts bytes that have come; whether these were the last."""
        self._missing -= length
        return not self._missing


class _Guest:
    """A gradient that another worker computes for this one.

    Attributes:
        number: of the loan.
        block: whose gradient it is.
        is_due: its worker has no parameters yet.
        gradients: one a parameter.
    """

    def __init__(self, lend: Lend, parcel: _Parcel) -> None:
        self.number, self.block, self.parcel = lend.number, lend.block.id, parcel
        self.is_due = True
        self.gradients = parcel.tensors
        self.weight, self.has = 0.0, [False] * len(parcel.tensors)

    def open(self) -> None:
        """Reads the numbers that have come."""
        _, self.weight, *has = self.parcel.numbers_N.tolist()
        self.has = [bool(one) for one in has]


@dataclass
class _Loan:
    """What this worker is lent.

    Attributes:
        parcel: parameters and buffers, and the step that they are of.
        is_here: the parcel has come.
        is_begun: it is being computed.
        is_sent: its gradient is on its way.
    """

    lend: Lend
    parcel: _Parcel
    is_here: bool = False
    is_begun: bool = False
    is_sent: bool = False


class LateGradients:
    """One worker's part in loans, as who computes and as a patron.

    The patron copies its parameters when a step is over and sends the copy while it goes on. The gradient
    comes into memory of its own; when all of it is there and the coordinator lets it count, it is added to
    the patron's part of the next round, with its own weight. All that is needed is remembered for a loan, so
    that what is void can be dropped at any time.

    Args:
        member: the control side; its lock guards all of this.

    Attributes:
        guests: what counts in the round under way.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._parameters: list[torch.Tensor] = []
        self._buffers: Callable[[], list[torch.Tensor]] = list
        self._loan: _Loan | None = None
        self._has_borrowed = False
        self._is_asking = False
        self._awaited: dict[int, _Guest] = {}  # by who computes; until they are settled
        self._brought: list[_Guest] = []  # they count, from the next round on
        self.guests: list[_Guest] = []
        member.on_loan = self._hear

    def bind(self, parameters: Sequence[torch.Tensor], buffers: BufferList) -> None:
        """Says what travels: the same, in the same order, on every worker."""
        self._parameters, self._buffers = list(parameters), buffers.tensors

    # What is said, in the links' thread ------------------------------------------------------------------

    def _hear(self, action: Lend | Settle | Deal) -> None:
        with self._member.lock:
            match action:
                case Lend() if action.worker == self._member.worker:
                    self._borrow(action)
                case Lend():
                    self._look_after(action)
                case Settle():
                    self._settle(action)
                case Deal(anew=True):
                    self._is_asking = False
                    self._loan = None
                    self._brought = []
                case Deal():
                    self._is_asking = False

    def _borrow(self, lend: Lend) -> None:
        self._has_borrowed, self._is_asking = True, False
        self._forget(lend.worker, lend.number)
        if self._member.hand.is_deaf:
            self._loan = None
            return
        parcel = _Parcel(1, [*self._parameters, *self._buffers()])
        loan = self._loan = _Loan(lend, parcel)

        def came(_: int, length: int) -> None:
            if parcel.came(length):
                with self._member.lock:
                    loan.is_here = True
                    self._member.lock.notify_all()

        self._expect(lend.patron, _tag(lend.worker, lend.number), parcel, came)

    def _look_after(self, lend: Lend) -> None:
        self._forget(lend.worker, lend.number)
        parcel = _Parcel(2 + len(self._parameters), self._parameters)
        self._awaited[lend.worker] = _Guest(lend, parcel)

        def came(_: int, length: int) -> None:
            if parcel.came(length):
                self._member.tell(
                    Brought(
                        now_s=0.0,
                        worker=self._member.worker,
                        late=lend.worker,
                        number=lend.number,
                        step=int(parcel.numbers_N[0]),
                    )
                )

        self._expect(lend.worker, _tag(lend.worker, lend.number) + 1, parcel, came)

    def _settle(self, settle: Settle) -> None:
        guest = self._awaited.get(settle.late)
        if guest is None or guest.number != settle.number:
            return
        del self._awaited[settle.late]
        self._forget(settle.late, settle.number + 1)
        if settle.counts and not self._member.hand.is_deaf:
            guest.open()
            self._brought.append(guest)

    def _expect(self, worker: int, tag: int, parcel: _Parcel, came: Callable[[int, int], None]) -> None:
        self._member.endpoint.expect(self._member.name_of(worker), tag, parcel.memory, came)

    def _forget(self, worker: int, number: int) -> None:
        """Drops what comes of a worker's loans before this one."""
        self._member.endpoint.forget(_tag(worker, 0), _tag(worker, number))

    # Who computes ----------------------------------------------------------------------------------------

    @property
    def is_lent(self) -> bool:
        """Whether there is a block to compute, and parameters to do it with."""
        return self._loan is not None and self._loan.is_here and not self._loan.is_begun

    @property
    def is_awaited(self) -> bool:
        """Whether something is to come soon: a loan, its parameters, or word of what was sent."""
        loan = self._loan
        if loan is None:
            return self._is_asking
        return loan.is_sent if loan.is_begun else not loan.is_here

    def ask(self) -> None:
        """Takes note that the coordinator has been asked for samples; it answers who it lends to."""
        self._is_asking = self._has_borrowed

    @torch.no_grad()
    def begin(self) -> Block | None:
        """Puts the parameters that came in place; returns the block to compute, None if it is void."""
        with self._member.lock:
            loan = self._loan
            if loan is None or not self.is_lent or self._member.follower.is_member:
                return None
            loan.is_begun = True
        targets = [*self._parameters, *self._buffers()]
        for tensor, value in zip(targets, loan.parcel.tensors, strict=True):
            tensor.data.copy_(value)
        return loan.lend.block

    @torch.no_grad()
    def bring(self, weight: float) -> None:
        """Sends the gradients of what was lent, if any, to the patron."""
        with self._member.lock:
            loan = self._loan
            if loan is None or not loan.is_begun or loan.is_sent:
                return
            loan.is_sent = True
        gradients = [parameter.grad for parameter in self._parameters]
        parcel = _Parcel(2 + len(gradients), self._parameters)
        numbers = [float(loan.parcel.numbers_N[0]), weight, *(float(one is not None) for one in gradients)]
        parcel.numbers_N.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        for tensor, gradient in zip(parcel.tensors, gradients, strict=True):
            if gradient is not None:
                tensor.copy_(gradient)
        lend = loan.lend
        self._send(lend.patron, _tag(lend.worker, lend.number) + 1, parcel)

    # The patron ------------------------------------------------------------------------------------------

    @property
    def has_brought(self) -> bool:
        """Whether there is something that only this worker's next round can count."""
        return bool(self._brought)

    def finish_step(self) -> None:
        """Sends who needs them a copy of the parameters, which are now those of a step."""
        if not self._awaited:
            return
        with self._member.lock:
            due = [(worker, guest) for worker, guest in self._awaited.items() if guest.is_due]
        if due and self._member.follower.is_member:
            self._give(due)

    @torch.no_grad()
    def _give(self, due: list[tuple[int, _Guest]]) -> None:
        tensors = [*self._parameters, *self._buffers()]
        parcel = _Parcel(1, tensors)
        parcel.numbers_N[0] = self._member.follower.step
        for place, tensor in zip(parcel.tensors, tensors, strict=True):
            place.copy_(tensor)
        for worker, guest in due:
            guest.is_due = False
            self._send(worker, _tag(worker, guest.number), parcel)

    def take_in(self) -> None:
        """Lets what was brought count in the round that begins."""
        if not self._brought:
            return
        with self._member.lock:
            self.guests += self._brought
            for guest in self._brought:
                self._member.hand.take_over(guest.block)
            self._brought = []

    def forget_guests(self) -> None:
        """Their round is over, or is not this worker's."""
        if self.guests:
            self.guests = []

    def throw_away(self) -> None:
        """Forgets what is lent and what was brought: the loop has left its epoch early."""
        self._loan = None
        self._brought = []

    def _send(self, worker: int, tag: int, parcel: _Parcel) -> None:
        with suppress(LinkError):  # then the job has failed, and says so elsewhere
            self._member.endpoint.put(
                self._member.name_of(worker), tag, parcel.memory, priority=_LATER, done=partial(_keep, parcel)
            )


def _tag(worker: int, number: int) -> int:
    """Of a loan's parameters; its gradients have the next one."""
    return _FIRST_TAG | worker << _WORKER_SHIFT | number << _NUMBER_SHIFT


def _keep(_: _Parcel) -> None:
    """Holds what is sent for as long as it is being sent."""
