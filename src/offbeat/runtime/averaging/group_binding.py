"""Binds a worker to a group that changes: opens exchanges, and transfers state to joining workers.

Theory of operation
-------------------

The `GroupMembership` is pure and decides what this worker may do. The links' thread passes it the
coordinator's `Halt` and `Group` actions, under `CoordinatorClient.lock`. This module carries the decisions
out in the worker's thread: it waits, opens exchanges and transfers state. It never decides on membership.

A handle (`GroupHandle`) belongs to one group: an exchange over its members, with this worker's position and
weight. It is current while its generation is that of `membership`. `GroupBinding.acquire` asks
`GroupMembership.begin_exchange` before an exchange:

- `ExchangeDecision.EXCHANGE`: return the handle, opened first if the group is new. The worker has begun its
  step's exchange: a `Halt` that does not abandon the exchange lets it finish.
- `ExchangeDecision.WAIT`: a change is under way; wait for the next `Group`.
- `ExchangeDecision.FETCH_STATE`: this worker joins; receive the donor's state, then ask again.
- `ExchangeDecision.KEEP_LOCAL`: no group has this worker; it exchanges nothing.

A group names its first exchange id. The first `StateCopier.EXCHANGE_IDS` ids are for the transfer of state;
the following ones are counted by `next_exchange_id`, in the same order on every member.

State transfer: a new group takes effect at the step that it names. When the donor has finished the step
before, it opens its handle of the new group and starts a thread that sends the state, over a separate
exchange of the donor and the joining workers. The donor goes on, but no round of the new group can finish
without the joining workers, so its state cannot change before they have received it. A worker whose loop has
ended waits in `serve_state` and sends its state to those that train on without it. The receiver sets
`was_state_replaced`: gradients that it has are those of other parameters.

Failures:

- A `Halt` with `abandon` ends the handle's exchange and the transfer with a `GroupChangedError`, and
  `finish_round` returns False: the caller repeats the round with the same gradients in the next group, and a
  joining worker waits for that group.
- A round that the loop is too late for is skipped in another thread (`SkippedRounds`), with the handle that
  the loop has opened: `wait_for_skipped_round` begins it, `finish_skipped_round` counts it.
- If the job has failed, or the group was abandoned, before a new exchange was registered here, the exchange
  fails immediately.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from offbeat.errors import LinkError, WorkerError
from offbeat.events import (
    Action,
    AssignBlocks,
    AssignLateBlock,
    ExchangeUnderWay,
    Group,
    Halt,
    ResolveLateBlock,
    SkipRound,
)
from offbeat.numerics.collectives.schedules import AUTO
from offbeat.policies.membership.group_membership import ExchangeDecision, GroupMembership
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.runtime.collectives.interface import Exchange, TensorMemory
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.devices.interface import Device
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S
from offbeat.runtime.training.state_copy import StateCopier


class GroupChangedError(WorkerError):
    """An exchange was abandoned because the group has changed; to be repeated in the next group."""


@dataclass(frozen=True, kw_only=True)
class GroupHandle:
    """A worker's handle of one group.

    Attributes:
        exchange: over the group's members.
        algorithm: of its all-reduces, the same on all members; see `Exchange.all_reduce`.
        members: their ids.
        position: this worker's position among them.
        weight: this worker's weight in the mean, times `size`.
        generation: the group's generation.
    """

    exchange: Exchange
    algorithm: str
    members: tuple[int, ...]
    position: int
    weight: float
    generation: int

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)


class GroupBinding:
    """Holds this worker's exchange over its current group, and replaces it when the group changes.

    Where the new group has joining workers, it also transfers the state from the donor to them.

    Args:
        client: the connection to the coordinator; its protocol is a `GroupProtocol`.
        open_exchange: makes an exchange over a list of workers.
        copy_state: copies the state of an exchange's first member to all other members, blocking; gets the
            exchange, this worker's position in it, the first of `StateCopier.EXCHANGE_IDS` exchange ids and,
            at position 0, the number of finished exchanges, which it returns on every member.
        timeout_s: the longest time to wait for a group, in seconds.
        device: holds the model.
        reports_progress: report exchanges that take long to the coordinator (`ExchangeUnderWay`).

    Attributes:
        protocol: the worker's side of the group protocol.
        memory: allocates tensors for exchanges, independent of the group.
        exchange_device: `Exchange.device` of the gradients' exchanges.
        was_state_replaced: this worker's state has been replaced since this was last set to False.
        late_gradients: the late blocks that this worker computes or is the proxy for.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        open_exchange: Callable[[Sequence[int]], Exchange],
        copy_state: Callable[[Exchange, int, int, int], int],
        timeout_s: float,
        *,
        device: Device,
        reports_progress: bool,
    ) -> None:
        assert isinstance(client.protocol, GroupProtocol)
        self._client, self.protocol = client, client.protocol
        self._membership: GroupMembership = client.protocol.membership
        self._open_exchange = open_exchange
        self._copy_state = copy_state
        self._timeout_s = timeout_s
        self._reports_progress = reports_progress
        self._handle: GroupHandle | None = None
        self._handle_generation = -1
        self._exchange_id = 0  # the first unused one of this handle
        self._algorithm_of: dict[tuple[int, ...], str] = {}  # by members; else `AUTO`
        self._skip_due_s = 0.0  # end of the grace of the last SkipRound
        self._stops_skipping = False
        self._transfer: Exchange | None = None
        self._transfer_thread: threading.Thread | None = None
        self.memory, self.exchange_device = TensorMemory(client.endpoint, device), torch.device("cpu")
        self.was_state_replaced = False
        self.late_gradients = LateGradients(client, client.protocol, device)
        client.on_action = self._on_action

    def start_thread(self, name: str, run: Callable[[], object]) -> threading.Thread:
        """See `CoordinatorClient.start_thread`."""
        return self._client.start_thread(name, run)

    @property
    def membership(self) -> GroupMembership:
        """The state of the group protocol, to be read; `finish_round` and `finish_step` here advance it."""
        return self._membership

    @property
    def handle(self) -> GroupHandle | None:
        """The last handle that was opened."""
        return self._handle

    def acquire(self, *, wait: bool, may_replace_state: bool = False) -> GroupHandle | None:
        """Return this worker's handle for the next exchange, or None if no group has this worker.

        Args:
            wait: wait for the next group and, if `may_replace_state`, receive its state where needed;
                otherwise return None in these cases.
            may_replace_state: this worker's state may be replaced now.

        Raises:
            WorkerError: the job failed, or no group was named within the deadline.
        """
        while True:
            with self._client.lock:
                turn, group = self._membership.begin_exchange(), self._membership.group
            if turn is ExchangeDecision.WAIT and wait:
                self._client.wait_for(
                    lambda: self._membership.begin_exchange() is not ExchangeDecision.WAIT,
                    self._timeout_s,
                    "the next group",
                )
            elif turn is ExchangeDecision.FETCH_STATE and wait and may_replace_state:
                self._receive_state()
            elif turn is ExchangeDecision.EXCHANGE:
                assert group is not None
                return self._enter(group)
            else:
                return None

    def acquire_initial(self, world: int) -> GroupHandle | None:
        """Return the first handle of a worker that started with the job; None if one of the `world` is lost.

        Raises:
            WorkerError: the job failed, or no group was named within the deadline.
        """
        handle = self.acquire(wait=True)
        with self._client.lock:
            group = self._membership.group
        is_complete = group is not None and group.members[:world] == tuple(range(world))
        return handle if is_complete else None

    def replace_exchange(self, exchange: Exchange, algorithm: str) -> None:
        """Use an exchange over the current group's members, and an algorithm of its all-reduces.

        All members have to call it with the same algorithm. A later group of the same members uses the
        algorithm too, since each of them knows it: no worker that joins later has the id of an earlier one.
        Any other group uses a ring. An exchange that is not the handle's needs a group that never changes.
        """
        assert self._handle is not None
        self._algorithm_of = {self._handle.members: algorithm}
        self._handle = replace(self._handle, exchange=exchange, algorithm=algorithm)
        self.exchange_device = exchange.device
        self._fail_if_job_failed(exchange)

    def acquire_as_newcomer(self) -> GroupHandle:
        """Return the first handle of a worker that joins a running job, after it has received the state.

        Raises:
            WorkerError: the job failed or ended, or no group accepted this worker within the deadline.
        """

        def is_accepted() -> bool:
            return self._membership.begin_exchange() in (
                ExchangeDecision.FETCH_STATE,
                ExchangeDecision.EXCHANGE,
            )

        while True:
            self._client.wait_for(
                lambda: is_accepted() or self._client.is_job_complete,
                self._timeout_s,
                "a group that accepts it",
            )
            with self._client.lock:
                if not is_accepted():
                    worker = self._membership.worker
                    raise WorkerError(f"worker {worker} joined too late: the job has ended without it")
            handle = self.acquire(wait=True, may_replace_state=True)
            if handle is not None:
                return handle

    def next_exchange_id(self) -> int:
        """Return the next exchange id, the same on all members for the same exchange.

        If the group has changed since this handle was opened, its exchanges are abandoned. Then the id is an
        unused one, not one of the new group.
        """
        with self._client.lock:
            if self._is_current():
                self._membership.exchange_id += 1
                self._exchange_id = self._membership.exchange_id
            else:
                self._exchange_id += 1
            return self._exchange_id - 1

    def pop_line_times(self) -> tuple[tuple[int, float], ...]:
        """Return how long data took to other members since the last call: see `Ready.line_s`."""
        handle = self._handle
        if handle is None:
            return ()
        times_s = handle.exchange.pop_line_times()
        return tuple((handle.members[position], times_s[position]) for position in sorted(times_s))

    @property
    def is_stable(self) -> bool:
        """Whether no change of the group is known before the next exchange."""
        with self._client.lock:
            return self._is_current() and not self._membership.is_change_pending

    def finish_round(self, contributions: Sequence[tuple[int, int]]) -> bool:
        """Count an exchange as finished; return False if it was abandoned and has to be repeated.

        Args:
            contributions: see `GroupMembership.finish_round`.
        """
        with self._client.lock:
            return self._is_current() and self._membership.finish_round(contributions)

    # Skipped rounds ------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether the job has failed."""
        return self._client.failure is not None

    def allow_skipping(self, is_allowed: bool) -> None:
        """Allow rounds to be skipped after this step, or not; see `GroupMembership.may_skip`."""
        with self._client.lock:
            self._membership.may_skip = is_allowed

    def begin_contribution(self) -> None:
        """Let no round be skipped until the next step, and wait for the end of one that is under way.

        Raises:
            WorkerError: the job failed, or that round did not end within the deadline.
        """
        what = "the end of the round that it skips"
        self._client.wait_for(
            self._membership.begin_contribution, self._timeout_s + COORDINATOR_MARGIN_S, what
        )

    def wait_for_skipped_round(self) -> GroupHandle | None:
        """Wait until a round is to be skipped, begin it, and return its handle; None at the end of the job.

        It waits without a limit, as no other thread waits for it.
        """
        with self._client.lock:
            while not (self._stops_skipping or self.has_failed):
                left_s = self._skip_due_s - time.monotonic() if self._membership.is_skip_due else None
                if left_s is not None and left_s <= 0:
                    if self._is_current() and self._membership.begin_skipped_round():
                        return self._handle
                    left_s = None  # until the group has changed
                self._client.lock.wait(left_s)
        return None

    def finish_skipped_round(
        self, contributions: Sequence[tuple[int, int]] | None, keep: Callable[[], object]
    ) -> None:
        """Count a skipped round, unless it was abandoned.

        Args:
            contributions: see `GroupMembership.finish_skipped_round`.
            keep: called if the round counts, before `begin_contribution` returns in the loop.
        """
        with self._client.lock:
            if self._membership.finish_skipped_round(contributions if self._is_current() else None):
                keep()
            self._client.lock.notify_all()

    def stop_skipping(self) -> None:
        """Let `wait_for_skipped_round` return None."""
        with self._client.lock:
            self._stops_skipping = True
            self._client.lock.notify_all()

    def finish_step(self) -> None:
        """Count an optimizer step, and open the exchange of a new group that is in force from here on.

        If this worker is the donor, it first starts to send its state to the joining workers, in the
        background.
        """
        with self._client.lock:
            self._membership.finish_step()
            step = self._membership.step
            if self._membership.is_skip_due:
                self._client.lock.notify_all()
        self.late_gradients.finish_step(step)
        with self._client.lock:
            group = self._membership.group
            if not self._membership.is_member or self._is_current():
                return
        assert group is not None
        self._enter(group)

    def serve_state(self) -> None:
        """Send the state to all workers that join with this one as the donor, until the job is complete.

        To be called once the loop has ended: the state does not change any more.

        Raises:
            WorkerError: the job failed, or the other workers did not finish within the deadline.
        """
        with self._client.lock:
            self._membership.end_step_outside()

        def is_donor() -> bool:
            return bool(self._membership.state_recipients) and not self._is_current()

        while True:
            self._client.wait_for(
                lambda: is_donor() or self._client.is_job_complete, self._timeout_s, "all workers to finish"
            )
            if self._client.is_job_complete:
                return
            with self._client.lock:
                group = self._membership.group
            assert group is not None
            self._enter(group)

    def transfer_final_state(self) -> None:
        """Send or receive the final state if the last group requires it, and wait until that is done."""
        self.acquire(wait=True, may_replace_state=True)
        if self._transfer_thread is not None:
            self._transfer_thread.join(self._timeout_s)

    def abandon(self, error: WorkerError) -> None:
        """Fail all exchanges with `error`; thread-safe."""
        for exchange in (self._handle.exchange if self._handle else None, self._transfer):
            if exchange is not None:
                exchange.abandon(error)

    # Internal ------------------------------------------------------------------------------------------

    def _is_current(self) -> bool:
        """Whether the handle is one of the current generation."""
        return self._handle_generation == self._membership.generation

    def _enter(self, group: Group) -> GroupHandle:
        """Return the handle of a group read under the lock just before; open it if it is new."""
        if group.generation != self._handle_generation:
            self._close_handle()
            joiners: tuple[int, ...] = ()
            with self._client.lock:
                if self._membership.group is group:
                    self._membership.exchange_id += StateCopier.EXCHANGE_IDS
                    joiners = self._membership.state_recipients
            if joiners:
                self._send_state(group)
            self._open_handle(group)
        assert self._handle is not None
        return self._handle

    def _open_handle(self, group: Group) -> None:
        position = group.members.index(self._membership.worker)
        exchange = self._open_exchange(group.members)
        if self._reports_progress:
            exchange.report_progress(self._send_progress)
        weight = group.weights[position] * len(group.members)
        self._handle = GroupHandle(
            exchange=exchange,
            algorithm=self._algorithm_of.get(group.members, AUTO),
            members=group.members,
            position=position,
            weight=weight,
            generation=group.generation,
        )
        self._handle_generation = group.generation
        self._fail_if_job_failed(exchange)
        self._fail_if_superseded(exchange, group)

    def _send_progress(self, has_moved: bool) -> None:
        membership = self._membership
        with suppress(LinkError):
            self._client.send_event(
                ExchangeUnderWay(
                    now_s=0.0, worker=membership.worker, round=membership.round, has_moved=has_moved
                )
            )

    def _close_handle(self) -> None:
        if self._handle is not None:
            self._handle.exchange.abandon(_regrouped_error())
            self._handle = None

    def _send_state(self, group: Group) -> None:
        """Send the state in the background; it cannot change before the joining workers have received it."""
        exchange = self._open_exchange([self._membership.worker, *group.joining])
        self._transfer = exchange
        self._fail_if_job_failed(exchange)
        self._fail_if_superseded(exchange, group)
        round_ = self._membership.round
        self.memory.device.synchronize()  # its last step: another thread copies what it has written

        def send() -> None:
            with suppress(WorkerError, LinkError):  # the next group handles losses
                self._copy_state(exchange, 0, group.exchange_id, round_)

        self._transfer_thread = self.start_thread("offbeat-state", send)

    def _receive_state(self) -> None:
        """Receive the donor's state; return early if the group changes in that time."""
        with self._client.lock:
            group = self._membership.group
            assert group is not None
            donor = self._membership.donor
        exchange = self._open_exchange([donor, *group.joining])
        self._transfer = exchange
        self._fail_if_job_failed(exchange)
        self._fail_if_superseded(exchange, group)
        position = 1 + group.joining.index(self._membership.worker)
        with suppress(GroupChangedError):
            round_ = self._copy_state(exchange, position, group.exchange_id, 0)
            with self._client.lock:
                if self._membership.group is group:
                    self._membership.on_state_received(round=round_)
                    self.was_state_replaced = True
        self._transfer = None

    def _fail_if_job_failed(self, exchange: Exchange) -> None:
        """Fail a new exchange if the job failed before the exchange was registered."""
        if self._client.failure is not None:
            exchange.abandon(self._client.failure)

    def _fail_if_superseded(self, exchange: Exchange, group: Group) -> None:
        """Fail a new exchange if its group was abandoned before the exchange was registered."""
        with self._client.lock:
            has_changed = self._membership.is_aborted or self._membership.group is not group
        if has_changed:
            exchange.abandon(_regrouped_error())

    def _on_action(self, action: Action) -> None:
        """Carry out what follows from an action; called in the I/O thread."""
        match action:
            case Halt() if self._membership.is_aborted:
                self.abandon(_regrouped_error())
            case SkipRound():
                with self._client.lock:
                    self._skip_due_s = time.monotonic() + action.grace_s
            case AssignLateBlock() | ResolveLateBlock():
                self.late_gradients.on_action(action)
            case AssignBlocks() if action.replaces_queue or not self._membership.is_member:
                self.late_gradients.on_action(action)


def _regrouped_error() -> GroupChangedError:
    return GroupChangedError("the exchange was abandoned: the group has changed")
