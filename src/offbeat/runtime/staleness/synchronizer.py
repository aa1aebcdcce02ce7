"""Training on a parameter server: one worker thread's side of bounded staleness.

A step computes on the thread's own copy of the model. Its gradients go to the servers, whose optimizer makes
the authoritative step; the thread's own optimizer steps its copy, so that it sees its own updates before the
servers' (*read my writes*). The coordinator permits every step, and sets how old the parameters may be that
it reads. Nothing here decides that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import Action, StepFinished, StepPermit
from offbeat.numerics.ps.tables import Aggregate
from offbeat.policies.staleness.caches import CacheDirectory, PsOptions
from offbeat.policies.staleness.clock_protocol import ClockProtocol
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.devices.host import Host
from offbeat.runtime.devices.interface import Device
from offbeat.runtime.devices.opening import open_device
from offbeat.runtime.ps.future import Future
from offbeat.runtime.staleness.process import ServedProcess
from offbeat.runtime.staleness.served_parameters import ServedParameters
from offbeat.runtime.staleness.shared_model import SharedModel, WorkerGradient
from offbeat.runtime.staleness.staging import ValueStaging
from offbeat.runtime.staleness.step_gradient import StepGradient
from offbeat.runtime.staleness.thread_cache import ThreadCache
from offbeat.runtime.training.checks import ParameterFormCheck
from offbeat.runtime.training.hooks import HookFreeScripting, SessionForwardHook
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.pass_timer import PassTimer
from offbeat.runtime.training.trained import TrainingState
from offbeat.runtime.training.writes import WriteDetector


class ServerSynchronizer:
    """A worker that trains on a parameter server; see `Synchronizer`.

    Source: the DTSSP paper (Kim and Rhee 2019), section 3 (SSP and its caches). Deviations: buffers
    and frozen parameters are the worker's own, initially those of the first worker. Where the servers make
    one step with the mean, a local step is nevertheless a whole one: until the servers have made theirs, it
    stands for the other workers' contributions as well. (Scaled to this worker's share of the mean it leaves
    parameters behind by the bound, at which Adam hardly learns.)

    Args:
        loop: the worker's session.
        trained: the model and its optimizers.
        options: how the parameter server is used.

    Raises:
        OffbeatError: an optimizer that servers cannot replace, or parameters that they cannot keep.
    """

    def __init__(self, loop: TrainingLoop, trained: TrainingState, *, options: PsOptions) -> None:
        self._loop, self._trained, self._options = loop, trained, options
        self._parameters = ServedParameters(trained)
        self._gradient = StepGradient(trained, self._parameters, keeps_gradients=options.applies_local_steps)
        self._writes = WriteDetector(trained)
        self._forms = ParameterFormCheck(trained.model)
        self._device: Device = Host()  # until the worker joins the job
        self._handles: list[RemovableHandle | HookFreeScripting] = []
        self._has_begun = self._is_open = False  # this worker has begun; its step may compute
        self._is_reporting = False  # a step is reported, but not answered yet
        # Of the steps that are not pushed yet: the sums of their gradients and their changes; their number.
        self._unpushed: tuple[WorkerGradient, Sequence[torch.Tensor]] | None = None
        self._unpushed_steps = 0
        self._last_push: Future | None = None
        self._steps = 0
        self._clock: int | None = None
        self._fetched = 0

    def _check_writes(self, optimizer: Optimizer | None = None) -> None:
        """Reject changes of the program to its copy, which the servers' state replaces."""
        if self._has_begun and (found := self._writes.written_since_mark(optimizer)):
            raise OffbeatError(
                f"the program has changed {found[0]} ({len(found)} such changes), which would be lost: on a "
                "parameter server the servers' state replaces it. Change it before the first step, or use a "
                "strategy without servers"
            )

    # Properties that a session reads ---------------------------------------------------------------------

    @property
    def assigns_samples(self) -> bool:
        """See `Synchronizer.assigns_samples`."""
        return self._options.assigns_samples

    @property
    def step(self) -> int | None:
        """See `Synchronizer.step`."""
        return None

    @property
    def round(self) -> int:
        """See `Synchronizer.round`: that of the state which `complete_state` has fetched."""
        return self._fetched

    @property
    def members(self) -> tuple[int, ...]:
        """See `Synchronizer.members`."""
        return tuple(range(self._loop.world))

    @property
    def is_leader(self) -> bool:
        """See `Synchronizer.is_leader`."""
        permit = self._protocol.permit
        return self._loop.worker == 0 if permit is None else permit.is_leader

    @property
    def has_current_state(self) -> bool:
        """See `Synchronizer.has_current_state`."""
        return True

    @property
    def replicas_identical(self) -> bool:
        """See `Synchronizer.replicas_identical`."""
        return False

    @property
    def is_preempted(self) -> bool:
        """See `Synchronizer.is_preempted`."""
        permit = self._protocol.permit
        return permit is not None and permit.is_preempted

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
        return self._served.traffic

    @property
    def has_no_pending_gradient(self) -> bool:
        """See `Synchronizer.has_no_pending_gradient`."""
        return not self._is_open

    def agree_on_batch(self, batch: int, skipped: int) -> int:
        """See `Synchronizer.agree_on_batch`: a step is of any batch that its worker has computed."""
        return batch

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Synchronizer.no_sync`."""
        return nullcontext()

    def on_epoch_left_early(self) -> None:
        """See `Synchronizer.on_epoch_left_early`: a step that has begun is restarted; its clock may pass."""
        if self.assigns_samples:
            self._is_open = False
            self._gradient.drop()

    def end_epoch(self) -> None:
        """See `Synchronizer.end_epoch`."""

    def abandon(self, error: Exception) -> None:
        """See `Synchronizer.abandon`; all waiting checks for the job's failure by itself."""

    # Joining and leaving ---------------------------------------------------------------------------------

    def join_job(self, client: CoordinatorClient | None, rendezvous: RendezvousInfo | None) -> None:
        """See `Synchronizer.join_job`."""
        assert client is not None
        assert rendezvous is not None
        device = open_device(self._trained.device, client.start_thread, self._options.timeout_s)
        process = ServedProcess.open_or_get(self._loop, rendezvous, self._options.timeout_s, self._open_model)
        self._connect(client, device, process)
        if self._loop.is_newcomer:
            self._process.restore_position(self._loop)
        self._reported_epoch = self._loop.epoch

    def _connect(self, client: CoordinatorClient, device: Device, process: ServedProcess) -> None:
        """Train on a device, with the clocks of the coordinator and the parameters of a process."""
        assert isinstance(client.protocol, ClockProtocol)
        self._client, self._protocol, self._device, self._process = client, client.protocol, device, process
        client.on_action = self._on_action
        self._parameters.device = device
        self._staging = ValueStaging(device)
        self._passes = PassTimer(self._loop.timer, device, self._loop.on_computed)
        self._cache = ThreadCache(
            self._loop.worker,
            self._parameters,
            self._staging,
            self._served,
            self._options,
            self._loop.timer,
            self._loop.raise_if_failed,
        )

    def _open_model(self, process: ServedProcess) -> SharedModel:
        """Open the model that the threads of a process share; the first thread calls it."""
        aggregate: Aggregate = "each" if self._options.steps_per_process else "mean"
        tensors = [
            process.ps.tensors(
                f"parameters-{number}",
                group.items(),
                update=update,
                aggregate=aggregate if self._options.is_versioned else None,
            )
            for number, (group, update) in enumerate(
                zip(self._parameters.groups, self._parameters.updates, strict=True)
            )
        ]
        return SharedModel(
            process.ps,
            tensors,
            CacheDirectory(
                process.threads,
                is_versioned=self._options.is_versioned,
                clears_threads=self._options.clears_thread_cache,
            ),
            timeout_s=self._options.timeout_s,
        )

    @property
    def _served(self) -> SharedModel:
        return self._process.model

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
        if hasattr(self, "_process"):
            with suppress(OffbeatError):  # this process may be excluded already
                self._served.remove_failed(self._loop.worker)
            self._process.release()
        self._device.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """See `Synchronizer.load_state_dict`."""
        if self._has_begun:
            raise OffbeatError("training has begun already: load a state before the first step")
        self._steps = step

    def local_state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.local_state_dict`."""
        return {}

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_local_state_dict`."""

    def complete_state(self) -> None:
        """See `Synchronizer.complete_state`.

        Where gradients are summed clock by clock, the state holds all that any worker has done at clocks
        before that of this worker's next step, and nothing else unless this worker rests, since that clock
        waits for it. (Where samples are assigned, its last steps may belong to the same clock; they are not
        in the state.) Where each gradient counts by itself, the state holds all that this worker has done,
        and every number is as it was at some time during the call.
        """
        if not self._has_begun:
            return
        self._check_writes()
        self.flush()
        if self._clock is not None:
            self._served.wait_for_version(self._last_permit().clock, self._loop.raise_if_failed)
        self._install_states()
        self._cache.invalidate()

    def _install_states(self) -> None:
        """Copy all that the servers keep into this worker's model and optimizers."""
        self._fetched, kept = self._served.pull_states(self._loop.raise_if_failed)
        self._parameters.load_states(kept)
        self._writes.mark()

    def flush(self) -> None:
        """See `Synchronizer.flush`: where each gradient counts by itself, all of them have arrived."""
        if self._clock is not None:
            self._push(self._clock)
        if not self._options.is_versioned and self._last_push is not None:
            self._served.wait_for(
                self._last_push, "the last gradients to be applied", self._loop.raise_if_failed
            )

    def finish(self) -> None:
        """See `Synchronizer.finish`."""
        if not self._has_begun:
            self._begin()
        self._served.leave(self._loop.worker, self._loop.raise_if_failed)

    def receive_final_state(self) -> None:
        """See `Synchronizer.receive_final_state`."""
        self._check_writes()
        self._served.wait_until_alone(self._loop.raise_if_failed)
        self._install_states()

    # A step ----------------------------------------------------------------------------------------------

    def set_batch_weight(self, batches: float) -> None:
        """See `Synchronizer.set_batch_weight`."""
        self._gradient.set_batch_weight(batches)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._loop.raise_if_failed()
        if not (model.training and torch.is_grad_enabled()):
            return
        self._forms.check()
        self._device.check_not_capturing()
        if not self._is_open:
            self._start()
        self._gradient.count_batch()
        self._loop.timer.switch("compute")
        self._passes.begin_pass()

    def _start(self) -> None:
        """Wait until the step may start, and read parameters for it.

        Before the first step all workers wait for the initial parameters, which is not waiting at the gate.
        """
        timer = self._loop.timer
        self._check_writes()
        if not self._has_begun:
            timer.switch("pull")
            self._report(None, self._begin(), None, 0.0, ())
        elif not self._may_start():
            timer.switch("wait")
        permit = self._last_permit()
        while not self._may_start():  # each permit shows that the other workers go on
            self._client.wait_for(
                lambda last=permit: self._may_start() or self._last_permit() is not last,  # type: ignore[misc]
                self._options.timeout_s,
                "the gate to open",
            )
            permit = self._last_permit()
        if self._clock is None and self._loop.worker:
            self._process.fetch_unserved(self._parameters.tensors_not_served())
        if self._loop.epoch > self._reported_epoch:
            self._reported_epoch = self._loop.epoch
            timer.switch("report")
            self._process.publish_position(self._loop)
        self._cache.read(permit, self._steps)
        self._writes.mark()
        self._clock = permit.clock
        self._is_open = True
        self._passes.begin_round()

    def _begin(self) -> int:
        """Join the parameter server: before the first step, or at the end if there was none.

        Worker 0 first stores its parameters and its optimizer's state there. Return the first clock to which
        this process can add.
        """
        self._has_begun = True
        initial = list(self._parameters.states()) if self._loop.worker == 0 else None
        try:
            unserved = self._parameters.tensors_not_served()
            return self._process.begin_thread(initial, self._loop, unserved)
        except WorkerError:
            raise
        except OffbeatError as error:
            raise WorkerError(f"worker {self._loop.worker} could not begin: {error}") from error

    def _may_start(self) -> bool:
        permit = self._protocol.permit
        return permit is not None and permit.may_start

    def _last_permit(self) -> StepPermit:
        permit = self._protocol.permit
        assert permit is not None
        return permit

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """See `Synchronizer.before_step`."""
        if has_closure:
            raise OffbeatError(
                "expected optimizer.step() without a closure: on a parameter server the servers make the "
                "step; compute the gradients before it"
            )
        if not self._is_open:
            raise OffbeatError(
                "expected the model to be called in training mode before optimizer.step(): call model(...) "
                "itself, not its parts, so that the step can read parameters first"
            )
        self._check_writes(optimizer)
        timer = self._loop.timer
        self._passes.end_pass()
        timer.switch("push")
        if self._options.applies_local_steps:
            self._cache.begin_update()
        for number, entry in enumerate(self._parameters.optimizers):
            if entry is optimizer:
                self._gradient.collect(number)
        timer.switch("apply")

    @torch.no_grad()
    def after_step(self) -> None:
        """See `Synchronizer.after_step`."""
        timer = self._loop.timer
        timer.switch("apply")
        clock = self._clock
        assert clock is not None
        self._add_unpushed(self._gradient.pop(), self._cache.end_update())
        self._steps += 1
        self._writes.mark()
        timer.switch("push")
        if self._unpushed_steps >= self._options.push_every:
            self._push(clock)
        self._is_open = False  # from here on, the clock may pass
        timer.switch("report")
        blocks: tuple[int, ...] = ()
        if self._options.assigns_samples:
            with self._client.lock:
                blocks = self._protocol.block_queue.pop_contribution(is_counted=True)
        compute_s = self._passes.compute_s
        self._passes.end_round()
        self._report(clock, self._cache.read_version, self._loop.pop_mean_loss(), compute_s, blocks)
        timer.switch("push")
        self._served.finish_clocks(self._loop.worker, self._last_permit().clock)
        timer.switch("other")

    def _add_unpushed(self, gradient: WorkerGradient, changes: Sequence[torch.Tensor]) -> None:
        """Add a step to those that are not pushed yet."""
        if self._unpushed is not None:
            total, earlier = self._unpushed
            gradient = total.add(gradient)
            changes = [one.add_(another) for one, another in zip(earlier, changes, strict=True)]
        self._unpushed = gradient, changes
        self._unpushed_steps += 1

    def _push(self, clock: int) -> None:
        """Push what was computed since the last push, if anything; wait where only an applied one counts."""
        if self._unpushed is None:
            return
        (gradient, changes), self._unpushed, self._unpushed_steps = self._unpushed, None, 0
        gradient = gradient.with_values(self._staging.to_host(gradient.values))
        time, push = self._served.add_gradient(self._loop.worker, clock, gradient)
        if changes:
            self._cache.log_update(time, changes)
        awaited = push if self._options.is_bounded else self._last_push
        self._last_push = push
        if awaited is not None:
            self._served.wait_for(awaited, "gradients to be applied", self._loop.raise_if_failed)

    def _report(
        self, clock: int | None, version: int, loss: float | None, compute_s: float, blocks: tuple[int, ...]
    ) -> None:
        """Report a finished step to the coordinator, and wait for the clock of the next one."""
        self._protocol.permit, self._is_reporting = None, True
        loop = self._loop
        loop.send_event(
            StepFinished(
                now_s=0.0,
                worker=loop.worker,
                clock=clock,
                parameter_version=version,
                epoch=loop.epoch,
                step=self._steps,
                compute_s=compute_s,
                samples=loop.samples,
                loss=loss,
                blocks=blocks,
            )
        )
        what = "the coordinator to name the next clock"
        self._client.wait_for(lambda: self._protocol.permit is not None, self._options.timeout_s, what)
        self._is_reporting = False
        if clock is None:
            self._served.finish_clocks(loop.worker, self._last_permit().clock)

    def _on_action(self, action: Action) -> None:
        if isinstance(action, StepPermit):
            self._on_permit(action)

    def _on_permit(self, permit: StepPermit) -> None:
        """Process a permit, in the I/O thread: clocks pass even while the worker waits for samples."""
        if self._has_begun and not self._is_open and not self._is_reporting:
            self._served.finish_clocks(self._loop.worker, permit.clock)
