"""The synchronizer that averages gradients over a group: connects averager and group binding to a session.

This module never decides on membership.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from offbeat.errors import WorkerError
from offbeat.events import BatchesSkipped, Ready
from offbeat.numerics.collectives.hosts import hierarchy_of
from offbeat.runtime.averaging.exchange_choice import Candidate, choose_exchange
from offbeat.runtime.averaging.group_binding import GroupBinding, GroupChangedError, GroupHandle
from offbeat.runtime.averaging.interface import Averager, AveragerContext
from offbeat.runtime.collectives.interface import Exchange
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.collectives.torch_exchange import TorchExchange, open_nccl
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.devices.host import Host
from offbeat.runtime.devices.interface import Device
from offbeat.runtime.devices.opening import open_device
from offbeat.runtime.training.hyperparameters import ParameterGroup, find_numbers, read_numbers, write_numbers
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S, TrainingLoop
from offbeat.runtime.training.state_copy import StateCopier, check_can_copy
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.trained import TrainingState
from offbeat.runtime.training.writes import WriteDetector

_CLOSE_S = 30.0  # an abort of NCCL may hang
_log = logging.getLogger("offbeat")

AveragerFactory: TypeAlias = Callable[[GroupBinding | None, AveragerContext], Averager]
"""(group binding, None in a world of one; session's interface) -> the averager."""


class GroupSynchronizer:
    """Averages gradients over a group of workers; see `Synchronizer`.

    Args:
        loop: the worker's session.
        trained: model and optimizers.
        make_averager: makes the averager.
        timeout_s: how long a worker may delay the other members, in seconds.
        survives_worker_loss: the job continues when a worker is lost.
        allows_nccl: NCCL may carry the gradients, where it is faster: all workers take part in all exchanges,
            with tensors that lie where the model lies.
        assigns_samples: samples are assigned as they are needed.
        allows_hierarchy: workers on several hosts may sum gradients inside hosts and then between them, where
            that is faster.

    Attributes:
        binding: the binding to the group; None in a world of one.
        averager: averages the gradients.
        device: see `AveragerContext`; the CPU in a world of one.
        writes: tracks the program's writes between the steps.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        trained: TrainingState,
        *,
        make_averager: AveragerFactory,
        timeout_s: float,
        survives_worker_loss: bool,
        allows_nccl: bool,
        assigns_samples: bool,
        allows_hierarchy: bool,
    ) -> None:
        self._loop, self._trained = loop, trained
        self._make_averager, self._timeout_s = make_averager, timeout_s
        self._survives, self._assigns_samples = survives_worker_loss, assigns_samples
        self._allows_nccl, self._allows_hierarchy = allows_nccl, allows_hierarchy
        self._client: CoordinatorClient | None = None
        self._rendezvous: RendezvousInfo | None = None
        self._nccl: TorchExchange | None = None
        self.device: Device = Host()  # until the worker joins a group; alone, it copies nothing
        self._has_position = self._is_state_checked = False
        self._blocks_per_round = 0
        self.binding: GroupBinding | None = None
        self.averager: Averager
        self.writes = WriteDetector(trained)

    @property
    def timer(self) -> PartTimer:
        """See `AveragerContext`."""
        return self._loop.timer

    @property
    def tracer(self) -> Tracer | None:
        """See `AveragerContext`."""
        return self._loop.tracer

    @property
    def has_preemption_signal(self) -> bool:
        """See `AveragerContext`."""
        return self._loop.has_preemption_signal

    def raise_if_failed(self) -> None:
        """See `AveragerContext`."""
        self._loop.raise_if_failed()

    def on_computed(self, wait_for_compute_s: Callable[[], float]) -> None:
        """See `AveragerContext`."""
        self._loop.on_computed(wait_for_compute_s)

    @property
    def assigns_samples(self) -> bool:
        """See `Synchronizer.assigns_samples`."""
        return self.binding is not None and self._assigns_samples

    @property
    def step(self) -> int | None:
        """See `Synchronizer.step`."""
        return None if self.binding is None else self.binding.membership.step

    @property
    def round(self) -> int:
        """See `Synchronizer.round`."""
        return self.averager.round

    @property
    def members(self) -> tuple[int, ...]:
        """See `Synchronizer.members`."""
        group = None if self.binding is None else self.binding.membership.group
        return (self._loop.worker,) if group is None else group.members

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the first member that had the parameters when the group was formed.

        After every step this is true on exactly one worker.
        """
        if self.binding is None or self.binding.membership.group is None:
            return True
        return self.has_current_state and self.binding.membership.donor == self._loop.worker

    @property
    def has_current_state(self) -> bool:
        """See `Synchronizer.has_current_state`."""
        return self.binding is None or self.binding.membership.is_member

    @property
    def replicas_identical(self) -> bool:
        """See `Synchronizer.replicas_identical`."""
        return True

    @property
    def is_preempted(self) -> bool:
        """See `Synchronizer.is_preempted`."""
        return self.averager.is_preempted

    @property
    def late_gradients(self) -> LateGradients | None:
        """See `Synchronizer.late_gradients`."""
        return None if self.binding is None else self.binding.late_gradients

    @property
    def blocks_per_round(self) -> int:
        """See `Synchronizer.blocks_per_round`."""
        return self._blocks_per_round

    @property
    def traffic(self) -> Mapping[str, float]:
        """See `Synchronizer.traffic`."""
        return {}

    @property
    def has_no_pending_gradient(self) -> bool:
        """See `Synchronizer.has_no_pending_gradient`."""
        return self.averager.has_no_pending_gradient

    # Joining and leaving -------------------------------------------------------------------------------

    def join_job(self, client: CoordinatorClient | None, rendezvous: RendezvousInfo | None) -> None:
        """See `Synchronizer.join_job`."""
        self._client, self._rendezvous = client, rendezvous
        # Before numbers that a scheduler has added are read:
        self._shared_numbers = find_numbers(self._trained.groups)
        may_grow = self._survives and rendezvous is not None and rendezvous.is_service
        if client is not None and (self._loop.world > 1 or may_grow):
            self._join_group(client)
        self.averager = self._make_averager(self.binding, self)
        self._rendezvous = None

    def _start_thread(self, name: str, run: Callable[[], object]) -> threading.Thread:
        assert self._client is not None
        return self._client.start_thread(name, run)

    def _join_group(self, client: CoordinatorClient) -> None:
        self.device = open_device(self._trained.device, self._start_thread, self._timeout_s)
        self.binding = GroupBinding(
            client,
            self._open_exchange,
            self._copy_state,
            self._timeout_s,
            device=self.device,
            reports_progress=self._survives,
        )
        if self._loop.is_newcomer:
            self.binding.acquire_as_newcomer()
            self.binding.was_state_replaced = False
            self._has_position = True
            return
        with suppress(GroupChangedError):
            handle = self.binding.acquire_initial(self._loop.world)
            if handle is not None:
                self._copy_state(handle.exchange, handle.position, 0, 0)
                self._choose_exchange(client, self.binding, handle)
                return
        with client.lock:
            reason = self.binding.membership.change_reason
        raise WorkerError(
            f"worker {self._loop.worker} could not receive the initial state before the first step: "
            f"{reason}; nothing was trained yet: start the job again"
        )

    def _open_exchange(self, workers: Sequence[int]) -> Exchange:
        assert self._client is not None
        names = [self._client.link_name(one) for one in workers]
        return LinkExchange(self._client.endpoint, names, workers.index(self._loop.worker))

    def _agree_on_nccl(self) -> bool:
        """Agree with the other workers on NCCL; return whether each has a CUDA device of its own.

        Raises:
            WorkerError: a worker did not take part, as one whose model is on the CPU does not.
        """
        device, rendezvous = self._trained.device, self._rendezvous
        if device.type != "cuda" or not self._allows_nccl or rendezvous is None or rendezvous.store is None:
            return False
        name = str(torch.cuda.get_device_properties(device).uuid) if dist.is_nccl_available() else ""
        names = rendezvous.gather("device", name)
        return all(names) and len({*names}) == len(names)

    def _choose_exchange(self, client: CoordinatorClient, binding: GroupBinding, handle: GroupHandle) -> None:
        """Let gradients travel in the way that is fastest, as measured on all workers, if there are several.

        Raises:
            WorkerError: a worker was lost, or did not take part in time.
        """
        timeout_s, links = self._timeout_s + COORDINATOR_MARGIN_S, handle.exchange
        candidates = {"links": Candidate(links)}
        if self._agree_on_nccl():
            self._nccl = self._open_nccl(timeout_s)
            client.raise_if_failed()  # before `abandon` could know of it
            candidates = {"NCCL": Candidate(self._nccl), **candidates}
        if self._allows_hierarchy:
            hierarchy = hierarchy_of([client.host_of(worker) for worker in handle.members])
            if hierarchy is not None:
                candidates[f"links ({hierarchy})"] = Candidate(links, hierarchy)
        if len(candidates) == 1:
            return
        choice = choose_exchange(
            candidates,
            links,
            binding.memory,
            sum(parameter.nbytes for parameter in self._trained.model.parameters()),
            next_exchange_id=binding.next_exchange_id,
            timeout_s=timeout_s,
        )
        binding.pop_line_times()  # they are not those of a step
        if self._loop.worker == 0:
            _log.info(str(choice))
        chosen = candidates[choice.name]
        binding.replace_exchange(chosen.exchange, chosen.algorithm)
        if chosen.exchange is links:
            self._close_nccl()

    def _open_nccl(self, timeout_s: float) -> TorchExchange:
        assert self._rendezvous is not None
        assert self._rendezvous.store is not None
        return open_nccl(self._rendezvous.store, self._loop.worker, self._loop.world, self.device, timeout_s)

    def _close_nccl(self) -> None:
        if self._nccl is not None:
            self._nccl.close(_CLOSE_S)
            self._nccl = None

    def _copy_state(self, exchange: Exchange, position: int, exchange_id: int, round_: int) -> int:
        copier = StateCopier(
            exchange,
            self._trained,
            position=position,
            timeout_s=self._timeout_s,
            exchange_id=exchange_id,
        )
        place = copier.copy(self._loop.position(round_))
        if position:  # at 0 nothing has changed, and this may be another thread
            self.writes.mark()
        if self._loop.is_newcomer and not self._has_position:
            self._loop.restore_position(place)
        return place.round

    def attach(self) -> None:
        """See `Synchronizer.attach`."""
        self.writes.mark()
        self.averager.attach()

    def detach(self) -> None:
        """See `Synchronizer.detach`."""
        if hasattr(self, "averager"):
            self.averager.detach()
        self._close_nccl()
        self.device.close()

    def flush(self) -> None:
        """See `Synchronizer.flush`."""
        self.averager.flush()

    def finish(self) -> None:
        """See `Synchronizer.finish`: sends the state to workers that train on, until all have finished."""
        if self.binding is not None:
            self.binding.serve_state()

    def receive_final_state(self) -> None:
        """See `Synchronizer.receive_final_state`.

        Raises:
            WorkerError: this worker hung while the other members finished, and lacks the final state.
        """
        assert self.binding is not None
        self.binding.transfer_final_state()
        if not self.binding.membership.is_member:
            worker, step = self._loop.worker, self.binding.membership.step
            raise WorkerError(
                f"worker {worker} did not answer while the other workers finished: its model is that of step "
                f"{step}, not the final one",
                worker=worker,
                step=step,
            )

    def abandon(self, error: Exception) -> None:
        """See `Synchronizer.abandon`."""
        if self.binding is not None:
            assert isinstance(error, WorkerError)
            self.binding.abandon(error)
            if self._nccl is not None:
                self._nccl.abandon(error)

    # The loop ------------------------------------------------------------------------------------------

    def set_batch_weight(self, batches: float) -> None:
        """See `Synchronizer.set_batch_weight`."""
        self.averager.set_batch_weight(batches)

    def agree_on_batch(self, batch: int, skipped: int) -> int:
        """See `Synchronizer.agree_on_batch`: asks the coordinator where all are in every round."""
        if self._client is None or self.binding is None or self._survives:
            return batch
        protocol = self.binding.protocol
        round_, protocol.round_batch = self.averager.round, None
        self._loop.send_event(
            BatchesSkipped(
                now_s=0.0,
                worker=self._loop.worker,
                epoch=self._loop.epoch,
                step=self._loop.step,
                round=round_,
                batches_fetched=batch,
                skipped=skipped,
            )
        )
        what = f"the batch of round {round_}, after it left out {skipped} batches"
        timeout_s = self._timeout_s + COORDINATOR_MARGIN_S
        self._client.wait_for(lambda: protocol.round_batch is not None, timeout_s, what)
        answer = protocol.round_batch
        assert answer is not None
        return answer.batch

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Synchronizer.no_sync`."""
        return self.averager.no_sync() if self.binding is not None else nullcontext()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """See `Synchronizer.before_step`."""
        if not self.averager.has_deferred_step:
            self.writes.collect(optimizer)
        self.averager.before_step(has_closure=has_closure)

    def after_step(self) -> None:
        """See `Synchronizer.after_step`."""
        if self.binding is not None:
            if self._survives and not self._is_state_checked:
                check_can_copy(self._trained)  # after the first step the optimizers' state is complete
                self._is_state_checked = True
            self.binding.finish_step()
        self.averager.after_step()

    def state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.state_dict`."""
        return self.averager.state_dict()

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """See `Synchronizer.load_state_dict`."""
        self.averager.apply_deferred_step()
        self.averager.load_state_dict(state)
        if self.binding is not None:
            self.binding.membership.step = step

    def local_state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.local_state_dict`; nothing on an excluded worker, which drops it."""
        if not self.has_current_state:
            return {}
        self.averager.apply_deferred_step()
        return self.averager.local_state_dict()

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_local_state_dict`."""
        self.averager.load_local_state_dict(state)

    def complete_state(self) -> None:
        """See `Synchronizer.complete_state`."""
        self.averager.apply_deferred_step()

    def on_epoch_left_early(self) -> None:
        """See `Synchronizer.on_epoch_left_early`."""
        if self.binding is not None:
            self.binding.late_gradients.drop_all()

    def end_epoch(self) -> None:
        """See `Synchronizer.end_epoch`."""

    def announce_gradients(self, compute_s: float) -> tuple[int, int]:
        """Announce this worker's gradients to the coordinator; see `AveragerContext`."""
        blocks: tuple[int, ...] = ()
        own_blocks = 0
        if self.assigns_samples and self._client is not None and self.binding is not None:
            with self._client.lock:
                own_blocks = len(self.binding.protocol.block_queue.started)
                is_member = self.binding.membership.is_member
                blocks = self.binding.protocol.block_queue.pop_contribution(is_member)
            own_blocks = min(own_blocks, len(blocks))
            self._blocks_per_round = max(self._blocks_per_round, own_blocks)
        self._loop.send_event(
            Ready(
                now_s=0.0,
                worker=self._loop.worker,
                generation=0 if self.binding is None else self.binding.membership.generation,
                epoch=self._loop.epoch,
                step=self._loop.step,
                round=self.averager.round,
                compute_s=compute_s,
                samples=self._loop.samples,
                blocks=blocks,
                batches_fetched=self._loop.batch,
                line_s=self.binding.pop_line_times() if self._survives and self.binding is not None else (),
            )
        )
        return own_blocks, len(blocks) - own_blocks

    def hyperparameters(self) -> list[float]:
        """Return the numbers in the optimizers' groups, such as learning rates; see `AveragerContext`.

        Each worker has its own schedulers, and those of an excluded worker lag behind.
        """
        return read_numbers(self._trained.groups, self._shared_numbers)

    def apply_hyperparameters(
        self, values: list[float], groups: Sequence[ParameterGroup] | None = None
    ) -> None:
        """Apply the first member's hyperparameters; see `AveragerContext`."""
        write_numbers(self._trained.groups if groups is None else groups, self._shared_numbers, values)
