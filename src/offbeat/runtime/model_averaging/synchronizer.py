"""The synchronizer of workers that own their models: a worker averages its model with others between steps.

Theory of operation. The optimizer steps the worker's own model, with the gradients of its own batch. After
each step the worker reports `Ready`. After as many steps as its last averaging said it is ready for the next
one, of snapshots (see `SnapshotAveraging`). With `overlap` it trains on meanwhile, unless it sends a state.

At the end of an epoch and of its loop a worker waits for the mean of all models. It packs its parameters and
buffers, times its weight, into vectors; the members sum these by a ring, and the sum becomes each member's
model. Until the sum is complete the model is unchanged, so that an averaging that is cancelled has no effect.
Optimizer state stays with its worker. The worker waits for the exchange, and for no copy between the host and
an accelerator (see `FlatTensors`).

Members without a state receive it from the first other member, which waits anyway. A new worker begins so,
and at the start all workers but the first.

Threads. The links' thread applies actions; it begins averagings of snapshots, and fails the exchange of
one that is cancelled. All else happens in the worker's thread. Nothing here decides which workers average.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import WorkerError
from offbeat.events import Action, AverageModels, CancelAveraging, EpochEnded, OuterStateLoaded, Ready
from offbeat.numerics.compressors.interface import CompressionMethod, EncodingMethod
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.policies.model_averaging.neighbour_pairs import Topology
from offbeat.policies.model_averaging.protocol import EXCHANGE_IDS, ModelAveragingProtocol
from offbeat.runtime.collectives.interface import Exchange, PendingExchange, TensorMemory
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.devices.host import Host
from offbeat.runtime.devices.interface import Device
from offbeat.runtime.devices.opening import open_device
from offbeat.runtime.model_averaging.cancelled import AveragingCancelledError
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors
from offbeat.runtime.model_averaging.outer_state import OuterState
from offbeat.runtime.model_averaging.pseudo_gradients import PseudoGradients
from offbeat.runtime.model_averaging.public_copies import Gamma, PublicCopies
from offbeat.runtime.model_averaging.snapshot_averaging import SnapshotAveraging
from offbeat.runtime.training.checks import ParameterFormCheck
from offbeat.runtime.training.hooks import HookFreeScripting, SessionForwardHook
from offbeat.runtime.training.interface import COORDINATOR_MARGIN_S, TrainingLoop
from offbeat.runtime.training.pass_timer import PassTimer
from offbeat.runtime.training.saved_gradients import SavedGradients
from offbeat.runtime.training.state_copy import StateCopier, check_can_copy
from offbeat.runtime.training.trained import TrainingState

_OUTER_STATE: Final = "outer_optimizer"  # in a checkpoint

_log = logging.getLogger("offbeat")


class ModelAveragingSynchronizer:
    """A worker that owns its model and averages it with others; see `Synchronizer`.

    Size: half of it is the interface, in one line each; an averaging itself is in parts that it owns.

    Args:
        loop: the worker's session.
        trained: the model and its optimizers.
        overlap: the worker trains on while its model is averaged; see `SnapshotAveraging`.
        has_epoch_means: all models are averaged at the end of each epoch.
        timeout_s: how long a worker may keep others waiting, in seconds.
        assigns_samples: samples are assigned as they are needed.
        outer_optimizer: steps from the mean of the models; None if that becomes the model.
        fragments: parts of the parameters that the outer optimizer steps by themselves.
        delay: see `SnapshotAveraging`.
        mixing: the share of its own model that a worker keeps, from 0 up to below 1.
        compression: of what the outer optimizer takes, None for none.
        residual_decay: see `PseudoGradients`.
        topology: which workers of a group are neighbours, that gossip in place of a mean; None for a mean.
        encoding: of the gossip, None without one.
        gamma: of the gossip, see `PublicCopies`.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        trained: TrainingState,
        *,
        overlap: bool,
        has_epoch_means: bool,
        timeout_s: float,
        assigns_samples: bool,
        outer_optimizer: OuterOptimizer | None = None,
        fragments: int = 1,
        delay: int | None = None,
        mixing: float = 0.0,
        compression: CompressionMethod | None = None,
        residual_decay: float = 1.0,
        topology: Topology | None = None,
        encoding: EncodingMethod | None = None,
        gamma: Gamma = 1.0,
    ) -> None:
        self._topology, self._encoding, self._gamma = topology, encoding, gamma
        self._loop, self._trained, self._timeout_s = loop, trained, timeout_s
        self._overlap, self._delay, self._assigns_samples = overlap, delay, assigns_samples
        self._has_epoch_means = has_epoch_means
        self._outer_optimizer, self._fragments, self._mixing = outer_optimizer, fragments, mixing
        self._compression, self._residual_decay = compression, residual_decay
        self._outer: OuterState | None = None
        self._forms = ParameterFormCheck(trained.model)
        self._client: CoordinatorClient | None = None
        self._protocol = ModelAveragingProtocol(loop.worker)  # until the client has one
        self._parameters: FlatTensors | None = None
        self._snapshots: SnapshotAveraging | None = None
        self._exchanges: Sequence[Exchange] = ()  # opened last
        self._handles: list[RemovableHandle | HookFreeScripting] = []
        self._saved_gradients = SavedGradients()
        self._device: Device = Host()  # until the worker joins a job; alone, it copies nothing
        self._passes = PassTimer(loop.timer, self._device, loop.on_computed)
        self._has_closure = False  # the step under way computes gradients within
        self._steps = 0
        self._has_position = True
        self._is_state_checked = self._is_preempted = False

    # Properties that a session reads ---------------------------------------------------------------------

    @property
    def assigns_samples(self) -> bool:
        """See `Synchronizer.assigns_samples`."""
        return self._client is not None and self._assigns_samples

    @property
    def step(self) -> int | None:
        """See `Synchronizer.step`."""
        return None

    @property
    def round(self) -> int:
        """See `Synchronizer.round`: averagings that this worker has ended."""
        return self._protocol.round

    @property
    def members(self) -> tuple[int, ...]:
        """See `Synchronizer.members`: the workers with which this one has averaged last."""
        last = self._protocol.last
        return (self._loop.worker,) if last is None else last.members

    @property
    def is_leader(self) -> bool:
        """See `Synchronizer.is_leader`."""
        last = self._protocol.last
        return last is None or last.leader == self._loop.worker

    @property
    def has_current_state(self) -> bool:
        """See `Synchronizer.has_current_state`: each worker's model is as good as any other."""
        return True

    @property
    def replicas_identical(self) -> bool:
        """See `Synchronizer.replicas_identical`."""
        return False

    @property
    def is_preempted(self) -> bool:
        """See `Synchronizer.is_preempted`: known to this worker when its last step ended."""
        return self._is_preempted

    @property
    def late_gradients(self) -> LateGradients | None:
        """See `Synchronizer.late_gradients`."""
        return None

    @property
    def blocks_per_round(self) -> int:
        """See `Synchronizer.blocks_per_round`."""
        return 0

    @property
    def traffic(self) -> Mapping[str, float]:
        """See `Synchronizer.traffic`."""
        return {}

    @property
    def has_no_pending_gradient(self) -> bool:
        """See `Synchronizer.has_no_pending_gradient`."""
        return all(parameter.grad is None for parameter in self._trained.model.parameters())

    # Joining and leaving ---------------------------------------------------------------------------------

    def join_job(self, client: CoordinatorClient | None, rendezvous: RendezvousInfo | None) -> None:
        """See `Synchronizer.join_job`."""
        if client is not None:
            self._join(client, open_device(self._trained.device, client.start_thread, self._timeout_s))

    def _join(self, client: CoordinatorClient, device: Device) -> None:
        assert isinstance(client.protocol, ModelAveragingProtocol)
        self._has_position = not self._loop.is_newcomer
        self._client, self._protocol, self._device = client, client.protocol, device
        self._passes = PassTimer(self._loop.timer, device, self._loop.on_computed)
        self._memory = TensorMemory(client.endpoint, device)
        parameters = [one for one in self._trained.model.parameters() if one.requires_grad]
        self._parameters = FlatTensors(lambda: parameters, self._memory)
        if self._outer_optimizer is not None:
            names = [str(self._trained.name_of(one)) for one in parameters if one.numel()]
            pseudo_gradients = None
            if self._compression is not None:
                pseudo_gradients = PseudoGradients(
                    self._compression, self._residual_decay, self._parameters, names
                )
            self._outer = OuterState(
                self._outer_optimizer,
                self._fragments,
                self._parameters,
                names,
                self._memory,
                pseudo_gradients,
            )
        copies = None
        if self._topology is not None and self._encoding is not None:
            copies = PublicCopies(
                self._parameters,
                self._loop.worker,
                self._topology,
                self._encoding,
                self._gamma,
                self._open_exchanges,
            )
        self._snapshots = SnapshotAveraging(
            self._parameters,
            client,
            self._protocol,
            self._open_exchange,
            overlap=self._overlap,
            delay=self._delay,
            outer=self._outer,
            share=1.0 - self._mixing,
            copies=copies,
        )
        client.on_action, client.find_due_work = self._on_action, self._find_due_work
        self._snapshots.begin_if_due()  # an averaging that has arrived before
        while self._average("the state of the other workers") is None:
            pass

    def attach(self) -> None:
        """See `Synchronizer.attach`."""
        model = self._trained.model
        self._handles.append(model.register_forward_pre_hook(SessionForwardHook(self._before_forward)))
        self._handles.append(HookFreeScripting(model))

    def detach(self) -> None:
        """See `Synchronizer.detach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._snapshots = None  # what arrives from now on begins nothing on a device that is closed
        self._device.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.state_dict`: the outer optimizer's state."""
        if self._outer is None:
            return {}
        self._device.synchronize()  # the anchor may be on its way to the host
        return {_OUTER_STATE: self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """See `Synchronizer.load_state_dict`; without an outer state the momentum begins at zero."""
        self._steps = step
        if self._outer is None:
            return
        if outer_state := state.get(_OUTER_STATE):
            self._outer.load_state_dict(outer_state)
            self._loop.send_event(
                OuterStateLoaded(now_s=0.0, worker=self._loop.worker, rounds=self._outer.rounds)
            )
        elif step and self.is_leader:
            _log.warning("the checkpoint has no state of an outer optimizer: its momentum begins at zero")

    def local_state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.local_state_dict`: residuals of compressed pseudo-gradients."""
        return {} if self._outer is None else self._outer.local_state_dict()

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_local_state_dict`."""
        if self._outer is not None:
            self._outer.load_local_state_dict(state)

    def complete_state(self) -> None:
        """See `Synchronizer.complete_state`."""

    def on_epoch_left_early(self) -> None:
        """See `Synchronizer.on_epoch_left_early`: no mean of all models follows."""
        if self._has_epoch_means and self._client is not None:
            self._send_epoch_ended(is_complete=False)

    def end_epoch(self) -> None:
        """See `Synchronizer.end_epoch`: takes part in the averaging of all models."""
        client = self._client
        if not self._has_epoch_means or client is None:
            return
        self._send_epoch_ended(is_complete=True)
        self._loop.timer.switch("wait")
        has_mean = False
        while not has_mean and not client.is_job_complete:
            ended = self._average("all workers to use up the epoch")
            has_mean = ended is not None and ended.includes_buffers

    def _send_epoch_ended(self, *, is_complete: bool) -> None:
        self._loop.send_event(
            EpochEnded(now_s=0.0, worker=self._loop.worker, epoch=self._loop.epoch, is_complete=is_complete)
        )

    def flush(self) -> None:
        """See `Synchronizer.flush`."""

    def finish(self) -> None:
        """See `Synchronizer.finish`: takes part in the averagings that follow the end of its loop.

        The coordinator rejects a worker that keeps the others waiting, so this wait has no limit of its own.
        """
        while self._client is not None and not self._client.is_job_complete:
            self._average("all workers to finish")

    def receive_final_state(self) -> None:
        """See `Synchronizer.receive_final_state`: `finish` has received it."""

    def abandon(self, error: Exception) -> None:
        """See `Synchronizer.abandon`."""
        assert isinstance(error, WorkerError)
        for exchange in self._exchanges:
            exchange.abandon(error)

    # A step ----------------------------------------------------------------------------------------------

    def set_batch_weight(self, batches: float) -> None:
        """See `Synchronizer.set_batch_weight`: a batch counts as it is, unless its weight is 0."""
        self._restore_gradients()
        if not batches:
            self._saved_gradients.save(self._trained.model.parameters())

    def _restore_gradients(self) -> None:
        """Remove the gradients of a backward pass that does not count."""
        self._saved_gradients.put_back()
        self._saved_gradients.forget()

    def agree_on_batch(self, batch: int, skipped: int) -> int:
        """See `Synchronizer.agree_on_batch`: a step is of any batch that its worker has computed."""
        return batch

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Synchronizer.no_sync`: only steps are followed by an averaging."""
        return nullcontext()

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        self._loop.raise_if_failed()
        if model.training and torch.is_grad_enabled():
            self._forms.check()
            self._device.check_not_capturing()
            self._loop.timer.switch("compute")
            self._passes.begin_pass()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """See `Synchronizer.before_step`."""
        self._restore_gradients()
        if self._outer is not None:
            self._outer.begin()
        if has_closure:
            self._has_closure = True
        else:
            self._end_pass()

    def _end_pass(self) -> None:
        self._passes.end_pass()
        self._loop.timer.switch("other")

    def after_step(self) -> None:
        """See `Synchronizer.after_step`: averages the model with those of the group that the policy names."""
        self._steps += 1
        if self._has_closure:
            self._end_pass()
            self._has_closure = False
        compute_s = self._passes.compute_s
        self._passes.end_round()
        client, timer = self._client, self._loop.timer
        if client is None:
            return
        if not self._is_state_checked:
            check_can_copy(self._trained)  # after the first step the optimizers' state is complete
            self._is_state_checked = True
        blocks: tuple[int, ...] = ()
        if self._assigns_samples:
            with client.lock:
                blocks = self._protocol.block_queue.pop_contribution(is_counted=True)
        assert self._snapshots is not None
        timer.switch("communicate")
        if (ended := self._snapshots.end_step(self._steps)) is not None:
            self._loop.send_event(ended)
        self._loop.send_event(
            Ready(
                now_s=0.0,
                worker=self._loop.worker,
                generation=0,
                epoch=self._loop.epoch,
                step=self._steps - 1,
                round=self._protocol.round,
                compute_s=compute_s,
                samples=self._loop.samples,
                blocks=blocks,
                batches_fetched=self._loop.batch,
            )
        )
        timer.switch("wait")
        if self._has_to_wait():
            self._average("the workers of its group")
        timer.switch("other")
        self._is_preempted = client.preempt is not None

    # An averaging ----------------------------------------------------------------------------------------

    def _has_to_wait(self) -> bool:
        """Whether this worker goes on only after an averaging."""
        assert self._client is not None
        assert self._snapshots is not None
        with self._client.lock:  # an averaging may arrive between the two looks
            averaging, is_ready = self._protocol.averaging, self._protocol.is_ready
        is_due = self._snapshots.is_due(self._steps)
        if averaging is None:
            return is_ready and is_due
        return is_due or not self._snapshots.trains_on(averaging)

    def _average(self, what: str) -> AverageModels | None:
        """Wait for an averaging or the end of the job, take part in it and report its end.

        The coordinator rejects workers that keep others waiting, so this wait has no limit of its own.

        Args:
            what: what is waited for, for the error message.

        Returns:
            The averaging, None if it was cancelled or the job is complete.

        Raises:
            WorkerError: the job failed, or this worker was rejected.
        """
        client = self._client
        assert client is not None
        client.wait_for(lambda: self._protocol.averaging is not None or client.is_job_complete, None, what)
        averaging = self._protocol.averaging
        if averaging is None:
            return None
        self._loop.timer.switch("communicate")
        try:
            has_mean = self._carry_out(averaging)
        except AveragingCancelledError:
            has_mean = False
        assert self._snapshots is not None
        is_of_snapshots = self._snapshots.is_of_snapshots(averaging)
        model_steps = self._snapshots.snapshot_steps if is_of_snapshots else self._steps
        with client.lock:
            event = self._protocol.finish(model_steps=model_steps, has_mean=has_mean)
        self._loop.send_event(event)
        return averaging if has_mean else None

    def _carry_out(self, averaging: AverageModels) -> bool:
        """Take part in an averaging; return whether it has a mean.

        Raises:
            AveragingCancelledError: it was cancelled.
        """
        worker, joining = self._loop.worker, averaging.joining
        group = averaging.group
        if worker in joining:
            self._copy_state(averaging, [group[0], *joining])
            return True
        has_mean = True
        assert self._snapshots is not None
        if self._snapshots.is_of_snapshots(averaging):
            has_mean = self._snapshots.wait(self._timeout_s + COORDINATOR_MARGIN_S)
        elif len(group) > 1 or self._outer is not None:
            self._average_models(averaging, group)
        if joining and worker == group[0]:
            with suppress(AveragingCancelledError):  # they receive it from the next group
                self._copy_state(averaging, [worker, *joining])
        return has_mean

    def _average_models(self, averaging: AverageModels, group: Sequence[int]) -> None:
        exchange = self._open_exchange(group)
        position = group.index(self._loop.worker)
        weight = averaging.weight_of(self._loop.worker)
        assert self._parameters is not None
        buffers = FlatTensors(lambda: list(self._trained.model.buffers()), self._memory)
        flats = [self._parameters, buffers]
        for one in flats:
            one.pack(weight, is_first=position == 0)
        pending: list[PendingExchange] = []
        for one in flats:
            pending += one.all_reduce(exchange, exchange_id=averaging.exchange_id, first_index=len(pending))
        for one_pending in pending:
            one_pending.wait(self._timeout_s)
        if self._outer is not None:
            self._outer.take_anchor(self._parameters.outputs)
        for one in flats:
            one.unpack()
        self._exchanges = ()

    def _copy_state(self, averaging: AverageModels, workers: Sequence[int]) -> None:
        """Copy the state of the first of these workers to the others."""
        exchange = self._open_exchange(workers)
        copier = StateCopier(
            exchange,
            self._trained,
            position=workers.index(self._loop.worker),
            timeout_s=self._timeout_s,
            exchange_id=averaging.exchange_id + 1,
        )
        place = copier.copy(self._loop.position(self._protocol.round))
        if not self._has_position:
            self._loop.restore_position(place)
            self._has_position = True
        self._exchanges = ()

    def _open_exchange(self, workers: Sequence[int]) -> Exchange:
        """Open an exchange over some workers; it fails at once if the averaging is cancelled already."""
        (exchange,) = self._open_exchanges([workers])
        return exchange

    def _open_exchanges(self, groups: Sequence[Sequence[int]]) -> Sequence[Exchange]:
        """Open an exchange over each of several groups of workers; see `_open_exchange`."""
        client = self._client
        assert client is not None
        assert self._protocol.averaging is not None
        ids_below = self._protocol.averaging.exchange_id + EXCHANGE_IDS
        self._exchanges = exchanges = [
            LinkExchange(
                client.endpoint,
                [client.link_name(worker) for worker in workers],
                workers.index(self._loop.worker),
                ids_below=ids_below,
                on_end=client.wake,
            )
            for workers in groups
        ]
        with client.lock:
            is_cancelled = self._protocol.is_cancelled
        for exchange in exchanges:
            if client.failure is not None:
                exchange.abandon(client.failure)
            elif is_cancelled:
                exchange.abandon(AveragingCancelledError())
        return exchanges

    def _find_due_work(self) -> Callable[[], None] | None:
        """See `CoordinatorClient.find_due_work`."""
        return None if self._snapshots is None else self._snapshots.find_due_work()

    def _on_action(self, action: Action) -> None:
        """Begin an averaging of snapshots, or fail one that is cancelled; called in the I/O thread."""
        if isinstance(action, AverageModels) and self._snapshots is not None:
            self._snapshots.on_averaging()
        elif isinstance(action, CancelAveraging) and self._protocol.is_cancelled:
            self.abandon(AveragingCancelledError())
