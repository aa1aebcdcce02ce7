"""Training on a parameter server: one worker thread's side of bounded staleness.

A step computes on the thread's own copy of the model. Its gradients go to the servers, whose optimizer makes
the authoritative step; the thread's own optimizer steps its copy, so that it sees its own updates before the
servers' (*read my writes*). The coordinator permits every step, and sets how old the parameters may be that
it reads. Nothing here decides that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import Action, StepFinished, StepPermit
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.tables import Aggregate
from offbeat.numerics.ps.tensors import TensorTable
from offbeat.numerics.ps.translation import export_states, import_states, settings_of_group, update_for_group
from offbeat.policies.staleness.caches import CacheDirectory, PsOptions
from offbeat.policies.staleness.clock_protocol import ClockProtocol
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.ps.future import Future
from offbeat.runtime.staleness.process import ServedProcess
from offbeat.runtime.staleness.shared_model import (
    GroupGradient,
    PulledParameters,
    SharedModel,
    WorkerGradient,
)
from offbeat.runtime.training.checks import ParameterFormCheck, check_no_overlap
from offbeat.runtime.training.hooks import HookFreeScripting, SessionForwardHook
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.trained import TrainingState
from offbeat.runtime.training.writes import WriteDetector

Array = NDArray[Any]


class ServerSynchronizer:
    """A worker that trains on a parameter server; see `Synchronizer`.

    Source: the second paper, section 3 (SSP and its caches); specification 2.1 to 2.6. Deviations: buffers
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
        self._loop, self._trained, self._terms = loop, trained, options
        self._model = trained.model
        self._optimizers = trained.optimizer_of_group  # the following lists are by group, too
        try:
            self._updates = [
                update_for_group(group, type(optimizer))
                for group, optimizer in zip(trained.groups, self._optimizers, strict=True)
            ]
            self._groups = [
                {name: entry for name, entry in trained.parameters_of(group).items() if entry.requires_grad}
                for group in trained.groups
            ]
            self._offsets = [TensorTable.from_tensors(group.items()) for group in self._groups]
        except ValueError as error:
            raise OffbeatError(str(error)) from error
        self._check_disjoint()
        self._writes = WriteDetector(trained)
        self._forms = ParameterFormCheck(trained.model)
        self._handles: list[RemovableHandle | HookFreeScripting] = []
        self._has_begun = self._is_open = False  # this worker has begun; its step may compute
        self._is_reporting = False  # a step is reported, but not answered yet
        self._local_updates: list[Sequence[Array]] = []  # what each update in this thread's log has added
        self._unpushed: list[tuple[WorkerGradient, Sequence[Array]]] = []  # steps not pushed yet
        self._fetch: Future | None = None
        self._last_push: Future | None = None
        self._values_before: Sequence[Array] | None = None
        # By group that this step has stepped so far: gradients, and the ranges where there are none.
        self._step_gradients: dict[int, tuple[Array, frozenset[tuple[int, int]]]] = {}
        self._has_gradient = False  # one of these is from a backward pass, not filled with zeros
        self._batch_weight = 1.0  # of the last batch
        self._batch_weights: list[float] = []  # of each forward pass since the last step
        # Gradients before a pass that does not count, by parameter:
        self._kept_gradients: dict[torch.Tensor, torch.Tensor | None] = {}
        self._compute_s = self._compute_mark_s = 0.0
        self._steps = 0
        self._clock: int | None = None
        self._read_version = self._fetched = 0

    def _check_disjoint(self) -> None:
        """Reject parameters in several groups, or overlapping in memory: servers step each number once."""
        names = [self._trained.name_of(entry) for group in self._trained.groups for entry in group["params"]]
        if len({*names}) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise OffbeatError(
                f"{duplicate} is in several of the optimizers, or in one of them several times: servers keep "
                "each parameter once, with one of them"
            )
        check_no_overlap({name: entry for group in self._groups for name, entry in group.items()})

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
        return self._terms.assigns_samples

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
        grant = self._protocol.permit
        return self._loop.worker == 0 if grant is None else grant.is_leader

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
        grant = self._protocol.permit
        return grant is not None and grant.is_preempted

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
        self._is_open = False
        self._drop_gradients()

    def abandon(self, error: Exception) -> None:
        """See `Synchronizer.abandon`; all waiting checks for the job's failure by itself."""

    # Joining and leaving ---------------------------------------------------------------------------------

    def join_job(self, member: CoordinatorClient | None, rendezvous: RendezvousInfo | None) -> None:
        """See `Synchronizer.join_job`."""
        assert member is not None
        assert rendezvous is not None
        assert isinstance(member.protocol, ClockProtocol)
        self._member, self._protocol = member, member.protocol
        member.on_action = self._on_action
        self._process = ServedProcess.open_or_get(
            self._loop, rendezvous, self._terms.timeout_s, self._open_model
        )
        if self._loop.is_newcomer:
            self._process.restore_position(self._loop)
        self._reported_epoch = self._loop.epoch

    def _open_model(self, process: ServedProcess) -> SharedModel:
        """Open the model that the threads of a process share; the first thread calls it."""
        aggregate: Aggregate = "each" if self._terms.steps_per_process else "mean"
        tensors = [
            process.ps.tensors(
                f"parameters-{number}",
                group.items(),
                update=update,
                aggregate=aggregate if self._terms.is_versioned else None,
            )
            for number, (group, update) in enumerate(zip(self._groups, self._updates, strict=True))
        ]
        return SharedModel(
            process.ps,
            tensors,
            CacheDirectory(
                process.threads,
                is_versioned=self._terms.is_versioned,
                clears_threads=self._terms.clears_thread_cache,
            ),
            timeout_s=self._terms.timeout_s,
        )

    @property
    def _served(self) -> SharedModel:
        return self._process.model

    @property
    def _directory(self) -> CacheDirectory:
        return self._served.directory

    def attach(self) -> None:
        """See `Synchronizer.attach`."""
        self._handles.append(self._model.register_forward_pre_hook(SessionForwardHook(self._before_forward)))
        self._handles.append(HookFreeScripting(self._model))

    def detach(self) -> None:
        """See `Synchronizer.detach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if hasattr(self, "_process"):
            with suppress(OffbeatError):  # this process may be excluded already
                self._served.remove_failed(self._loop.worker)
            self._process.release()

    def on_state_loaded(self, step: int) -> None:
        """See `Synchronizer.on_state_loaded`."""
        if self._has_begun:
            raise OffbeatError("training has begun already: load a state before the first step")
        self._steps = step

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
        self._directory.invalidate(self._loop.worker)
        self._fetch = None  # it may lack later pushes of this worker, which are not replayed any more

    def _install_states(self) -> None:
        """Copy all that the servers keep into this worker's model and optimizers."""
        self._fetched, kept = self._served.pull_states(self._loop.raise_if_failed)
        for optimizer, group, offsets, states in zip(
            self._optimizers, self._groups, self._offsets, kept, strict=True
        ):
            offsets.scatter(Entries(0, states.pop("values")), group)
            for name, parameter in group.items():
                first, last = offsets.key_range_of(name)
                rows = {state: values[first:last] for state, values in states.items()}
                import_states(optimizer, parameter, rows)
        self._writes.mark()

    def flush(self) -> None:
        """See `Synchronizer.flush`: where each gradient counts by itself, all of them have arrived."""
        if self._unpushed and self._clock is not None:
            self._push(self._clock)
        if not self._terms.is_versioned and self._last_push is not None:
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
        self._restore(self._parameters())
        self._kept_gradients.clear()
        self._batch_weight = batches
        if not batches:
            self._kept_gradients = {
                entry: None if entry.grad is None else entry.grad.clone() for entry in self._parameters()
            }

    def _restore(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remove the gradients of a backward pass that does not count."""
        for parameter in parameters:
            if parameter in self._kept_gradients:
                parameter.grad = self._kept_gradients.pop(parameter)

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self._groups for parameter in group.values())

    def _copy_values(self) -> Sequence[Array]:
        """Return a copy of the thread cache's parameters, of each group, flat."""
        pairs = zip(self._groups, self._offsets, strict=True)
        return [np.array(offsets.gather(group)) for group, offsets in pairs]

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._loop.raise_if_failed()
        if not (model.training and torch.is_grad_enabled()):
            return
        self._forms.check()
        if not self._is_open:
            self._start()
        if self._batch_weight:
            self._batch_weights.append(self._batch_weight)
        self._loop.timer.switch("compute")

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
        grant = self._last_permit()
        while not self._may_start():  # each permit shows that the other workers go on
            self._member.wait_for(
                lambda last=grant: self._may_start() or self._last_permit() is not last,  # type: ignore[misc]
                self._terms.timeout_s,
                "the gate to open",
            )
            grant = self._last_permit()
        if self._clock is None and self._loop.worker:
            self._process.fetch_unserved(self._tensors_not_served())
        if self._loop.epoch > self._reported_epoch:
            self._reported_epoch = self._loop.epoch
            timer.switch("report")
            self._process.publish_position(self._loop)
        self._read(grant)
        self._writes.mark()
        self._clock = grant.clock
        self._is_open = True
        self._compute_mark_s, self._compute_s = timer.total_s("compute"), 0.0

    def _begin(self) -> int:
        """Join the parameter server: before the first step, or at the end if there was none.

        Worker 0 first stores its parameters and its optimizer's state there. Return the first clock to which
        this process can add.
        """
        self._has_begun = True
        initial = list(self._initial_states()) if self._loop.worker == 0 else None
        try:
            return self._process.begin_thread(initial, self._loop, self._tensors_not_served())
        except WorkerError:
            raise
        except OffbeatError as error:
            raise WorkerError(f"worker {self._loop.worker} could not begin: {error}") from error

    def _tensors_not_served(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the servers do not keep: buffers, and parameters frozen at join."""
        served = {id(entry) for entry in self._parameters()}
        return [
            *self._model.buffers(),
            *(entry for entry in self._model.parameters() if id(entry) not in served),
        ]

    def _initial_states(self) -> Iterator[Mapping[str, Array]]:
        """Yield parameters and optimizer state as the servers keep them, of each group."""
        for optimizer, group, offsets in zip(self._optimizers, self._groups, self._offsets, strict=True):
            states: dict[str, Array] = {"values": offsets.gather(group).copy()}
            kept = [export_states(optimizer, parameter) for parameter in group.values()]
            for name in kept[0] if kept else ():
                states[name] = np.concatenate([entry[name].reshape(-1) for entry in kept])
            yield states

    def _may_start(self) -> bool:
        grant = self._protocol.permit
        return grant is not None and grant.may_start

    def _last_permit(self) -> StepPermit:
        grant = self._protocol.permit
        assert grant is not None
        return grant

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
        timer.switch("compute")
        compute_s = timer.total_s("compute") - self._compute_mark_s
        self._loop.on_computed(compute_s)
        timer.switch("push")
        self._compute_s += timer.total_s("compute") - self._compute_mark_s
        self._compute_mark_s = timer.total_s("compute")
        if self._terms.applies_local_steps and self._values_before is None:
            self._values_before = self._copy_values()
        for number, entry in enumerate(self._optimizers):
            if entry is optimizer:
                self._collect_gradients(number)
        timer.switch("apply")

    def _collect_gradients(self, number: int) -> None:
        """Copy a group's gradients; where only the servers step, clear them for the optimizer."""
        group, offsets = self._groups[number], self._offsets[number]
        self._restore(group.values())
        absent = frozenset(offsets.key_range_of(name) for name, entry in group.items() if entry.grad is None)
        gradients = {
            name: torch.zeros_like(entry) if entry.grad is None else entry.grad
            for name, entry in group.items()
        }
        self._step_gradients[number] = np.array(offsets.gather(gradients)), absent
        self._has_gradient |= len(absent) < len(group)
        if not self._terms.applies_local_steps:
            for parameter in group.values():
                parameter.grad = None

    def _take_gradient(self) -> WorkerGradient:
        """Return and clear this step's gradients times the mean batch weight; None for groups not stepped."""
        weight = sum(self._batch_weights) / len(self._batch_weights) if self._batch_weights else 0.0
        counts = weight if self._has_gradient else 0.0
        groups: list[GroupGradient | None] = []
        for number, group in enumerate(self._trained.groups):
            if number not in self._step_gradients:
                groups.append(None)
                continue
            values, absent = self._step_gradients[number]
            if weight != 1.0:
                values *= weight
            groups.append(GroupGradient(counts, values, absent, settings_of_group(group)))
        self._drop_gradients()
        return WorkerGradient(groups)

    def _drop_gradients(self) -> None:
        self._batch_weights.clear()
        self._step_gradients.clear()
        self._has_gradient = False

    @torch.no_grad()
    def after_step(self) -> None:
        """See `Synchronizer.after_step`."""
        timer = self._loop.timer
        timer.switch("apply")
        clock = self._clock
        assert clock is not None
        self._unpushed.append((self._take_gradient(), self._local_update()))
        self._steps += 1
        self._is_open = False
        self._writes.mark()
        timer.switch("push")
        if len(self._unpushed) >= self._terms.push_every:
            self._push(clock)
        timer.switch("report")
        blocks: tuple[int, ...] = ()
        if self._terms.assigns_samples:
            with self._member.lock:
                blocks = self._protocol.block_queue.pop_contribution(is_counted=True)
        self._report(clock, self._read_version, self._loop.pop_mean_loss(), self._compute_s, blocks)
        timer.switch("push")
        self._served.finish_clocks(self._loop.worker, self._last_permit().clock)
        timer.switch("other")

    def _local_update(self) -> Sequence[Array]:
        """Return what the local step has added to the parameters, of each group."""
        before, self._values_before = self._values_before, None
        if before is None:
            return ()
        return [
            np.subtract(offsets.gather(group), old)
            for group, offsets, old in zip(self._groups, self._offsets, before, strict=True)
        ]

    def _push(self, clock: int) -> None:
        """Push what was computed since the last push; wait where only an applied gradient counts."""
        total, deltas = self._unpushed[0]
        for gradient, other_deltas in self._unpushed[1:]:
            total = total.add(gradient)
            deltas = [entry + another for entry, another in zip(deltas, other_deltas, strict=True)]
        self._unpushed.clear()
        time, push = self._served.add_gradient(self._loop.worker, clock, total)
        if deltas:
            self._directory.log_update(self._loop.worker, time)
            self._local_updates.append(deltas)
        awaited = push if self._terms.is_bounded else self._last_push
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
        self._member.wait_for(lambda: self._protocol.permit is not None, self._terms.timeout_s, what)
        self._is_reporting = False
        if clock is None:
            self._served.finish_clocks(loop.worker, self._last_permit().clock)

    def _on_action(self, action: Action) -> None:
        if isinstance(action, StepPermit):
            self._on_permit(action)

    def _on_permit(self, grant: StepPermit) -> None:
        """Process a permit, in the links' thread: clocks pass even while the worker waits for samples."""
        if self._has_begun and not self._is_open and not self._is_reporting:
            self._served.finish_clocks(self._loop.worker, grant.clock)

    # Reading ---------------------------------------------------------------------------------------------

    def _read(self, grant: StepPermit) -> None:
        """Make the thread cache fresh enough for this permit."""
        timer, version = self._loop.timer, grant.version_min
        if self._terms.fetch_every is not None:
            self._read_version = version
            timer.switch("pull")
            self._install_fetched()
            return
        worker, directory = self._loop.worker, self._directory
        match directory.read_source(worker, version) if self._terms.is_bounded else "server":
            case "thread":
                timer.switch("thread_cache")
            case "process":
                timer.switch("process_cache")
                self._install(self._served.process_cache)
            case "server":
                timer.switch("pull")
                is_bounded = self._terms.is_bounded
                complete = grant.complete_version if is_bounded else 0
                row = self._served.pull(
                    version, self._loop.raise_if_failed, complete=complete, fresh=not is_bounded
                )
                self._install(row)
        self._read_version = max(version, directory.version(worker))

    def _install_fetched(self) -> None:
        """Install a background fetch if it has arrived; start another when it is time."""
        if self._directory.version(self._loop.worker) < 0:
            self._install(self._served.pull(0, self._loop.raise_if_failed, fresh=True))
        elif self._fetch is not None and self._fetch.is_done:
            self._install(self._fetch.result(0.0))
            self._fetch = None
        if self._fetch is None and self._steps % (self._terms.fetch_every or 1) == 0:
            self._fetch = self._served.start_fetch()

    @torch.no_grad()
    def _install(self, row: PulledParameters) -> None:
        """Copy a row into the thread cache, and apply this thread's own updates that are not in it, once."""
        directory, worker = self._directory, self._loop.worker
        for index, (group, offsets) in enumerate(zip(self._groups, self._offsets, strict=True)):
            values = row.values[index]
            if self._local_updates:
                values = np.array(values)
                for piece in row.applied_times[index]:
                    key_range = slice(piece.start, piece.stop)
                    for deltas in self._local_updates[directory.count_included(worker, piece.time) :]:
                        values[key_range] += deltas[index][key_range]
            offsets.scatter(Entries(0, values), group)
        time = min((piece.time for some in row.applied_times for piece in some), default=0)
        del self._local_updates[: directory.on_thread_copied(worker, row.version, time)]
