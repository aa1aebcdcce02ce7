"""`join` makes an existing training loop one worker of a job, for as long as its `Session` lasts.

Theory of operation. A `Session` puts hooks on the model and on each optimizer and passes what they observe to
a `Synchronizer`, which the strategy makes and which keeps this worker's model in step with those of the other
workers. It exchanges events and actions with the coordinator through a `CoordinatorClient`; a job of one
worker may do without. One step of the user's loop:

1. `batches` asks for a batch. If an optimizer has stepped, the step before ends here (6). `RoundPairing`
   takes the next batch from `AssignedBatches` or from this worker's equal shard, and counts it.
   `set_batch_weight` sets what the gradients of this batch count, relative to a full batch.
2. Forward pass. In training mode a step that has not ended ends here. Where programs may skip batches,
   `RoundPairing` finds out whether this batch stands in for one that was skipped; its weight is 0 then. The
   synchronizer's hooks follow, which may wait for parameters.
3. Backward pass. The synchronizer's hooks collect the gradients and may begin to exchange them; it calls
   `on_computed`, which marks the batch as used and adds injected slowness.
4. `optimizer.step()`, before. Raises the job's failure and errors such as parameters added since `join`. A
   second step of one optimizer ends the step before. `before_step` lets the synchronizer complete what the
   optimizer is about to use.
5. `optimizer.step()`, after. Once every optimizer has stepped, the step ends.
6. `_end_step`, once per step: sends a preemption signal that has arrived, calls `after_step`, counts the
   step, reads whether the workers agree on a preemption, and queues a StepTimed, which travels with the next
   event. Where only some optimizers step, the next batch, training-mode forward pass, `validate`, `refresh`
   or `leave` ends the step.

Invariants. State (`state_dict`) is that of the last step that has ended; a batch taken since is not in it.
Hooks do nothing in a forked process. Methods that wait raise a WorkerError if a signal handler calls them
within a step.

Failures. The `CoordinatorClient`'s failure ends all waits of synchronizer and validator (`_abandon`) and is
raised by the next `raise_if_failed`, in (1), (4) or a wait. An exception of the loop leaves the session, and
the coordinator is sent Failed. After a loop that ends well, `_finish` ends the last step, sends what the
synchronizer still holds, sends Finished, and waits for the other workers, which may still need this worker's
state; then Left is sent, and the hooks are removed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import CheckpointQuery, Evaluated, Event, Finished, Preempted, StepTimed
from offbeat.policies import WorkerProtocol
from offbeat.policies.data.block_scheduler import describe_batches
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.configuration import CoordinatorConfiguration, PolicySpec
from offbeat.runtime.control.environment import Environment, environment_of_thread, read_environment
from offbeat.runtime.control.rendezvous import RendezvousInfo, rendezvous
from offbeat.runtime.data.assigned_batches import AssignedBatches
from offbeat.runtime.data.equal_shards import EqualShards, epoch_order, load_batches
from offbeat.runtime.data.pairing import RoundPairing
from offbeat.runtime.processes.interrupts import check_between_steps
from offbeat.runtime.processes.preemption_signals import PreemptionSignals
from offbeat.runtime.training.checks import (
    ParameterSetCheck,
    check_all_in_optimizers,
    check_arguments,
    check_trainable,
    describe_training,
)
from offbeat.runtime.training.hooks import SessionForwardHook, SessionHook
from offbeat.runtime.training.interface import Synchronizer, TrainingLoop
from offbeat.runtime.training.partial_step import optimizer_step_mode, out_of_inference_mode
from offbeat.runtime.training.state_copy import TrainingPosition
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.trained import TrainingState
from offbeat.runtime.validation.evaluators import Evaluate
from offbeat.runtime.validation.parts import ValidationData
from offbeat.runtime.validation.result import Validation
from offbeat.runtime.validation.shared_validator import SharedValidator
from offbeat.runtime.validation.validator import Validator
from offbeat.torch_compat import backward_pass_id

_STATE_VERSION = 2
_SILENT_S = 10.0
_STAY_S = 10.0  # longest wait for other workers to finish where none of them needs this one
_COUNT_EVERY_S = 0.005
_SILENT_RETURNING_S = 300.0
_VALIDATION = PolicySpec(path="offbeat.policies.validation.shared_schedule:SharedValidation")
_PREEMPTION = PolicySpec(path="offbeat.policies.membership.preemption:PreemptionBroadcast")
_in_session: weakref.WeakSet[Optimizer | nn.Module] = weakref.WeakSet()


class Strategy(Protocol):
    """How the workers of a job synchronize; the constructor arguments are the whole configuration."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def timeout_s(self) -> float:
        """How long a worker may keep other workers waiting, in seconds."""

    @property
    def survives_worker_loss(self) -> bool:
        """Whether training continues when a worker is lost."""

    @property
    def readmits_workers(self) -> bool:
        """Whether a worker that falls silent may return, since no worker waits for it; else it is lost."""

    @property
    def shards(self) -> Literal["dynamic", "equal"]:
        """Whether samples are assigned on demand ("dynamic") or split equally in advance ("equal")."""

    @property
    def always_needs_coordinator(self) -> bool:
        """Whether a job of one worker needs a coordinator, too."""

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """The policies that the coordinator runs, in order.

        Args:
            world: number of workers with which the job starts.
            start_s: how long after the first worker the last one may join, in seconds.
            servers: number of server processes of the parameter server, where the strategy has one.
        """

    def make_worker_protocol(self, worker: int) -> WorkerProtocol:
        """Makes the object that applies the policies' actions in a worker, and answers them."""

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> Synchronizer:
        """Makes the object that keeps this worker's model in step with those of other workers."""


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy,
    *,
    run_log: str | os.PathLike[str] | None = None,
    run_log_bytes_max: int | None = None,
    thread: int = 0,
    threads: int = 1,
) -> Session:
    """Makes this process a worker of the job that its launcher started.

    Puts hooks on the model and the optimizer; what they do is the strategy's. Where gradients are averaged,
    they are the mean over the workers after `backward()`. Copies rank 0's parameters, buffers and optimizer
    state to all workers. Leaving the `with` block removes the hooks.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun, Ray Train, Slurm or Kubeflow set them;
    with none of them set the job has one worker. With OFFBEAT_NEWCOMER=1 and the MASTER_ADDR and MASTER_PORT
    of a running job, this process joins that job as a new worker, with the current state and in the current
    epoch of its workers. OFFBEAT_JOB, or torchrun's run id, separates jobs that use one address.

    Args:
        model: the model to train; the same architecture on every worker, on one device.
        optimizer: the optimizer of the model's parameters, or several, each for some of them. A step is over
            when each of them has stepped, or when the model is called again after some have.
        strategy: how the workers synchronize; equal on every worker.
        run_log: path of the run log, which rank 0's coordinator writes; by default the launcher's setting.
        run_log_bytes_max: size limit of the log in bytes, at least 1 MiB: the log is then written in parts,
            and the oldest are removed. By default the launcher's setting; without that, one file without
            a limit.
        thread, threads: with a parameter server, a process may run several worker threads, each with its own
            model, optimizer and loop: the index of this one, from 0, and how many each process has.

    Returns:
        The session, to be used in a `with` statement.

    Raises:
        OffbeatError: model, optimizer or environment are not usable; says what to do.
        WorkerError: the job did not start within 30 s (or OFFBEAT_START_S); names the workers that are
            missing or that differ. Or the job does not accept newcomers, or not this one; says why.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    check_arguments(model, optimizers, strategy)
    environment = read_environment()
    if run_log is not None:
        environment = replace(environment, run_log=os.path.abspath(run_log))
    if run_log_bytes_max is not None:
        environment = replace(environment, run_log_bytes_max=run_log_bytes_max)
    with optimizer_step_mode():
        return Session(
            TrainingState(model, list(optimizers)),
            strategy,
            environment_of_thread(environment, thread, threads),
        )


class Session:
    """One worker's part in a job, from `join` until the `with` block ends.

    Attributes:
        worker: this worker's id.
        world: how many workers the job started with.
        epoch: the epoch under way, from 0.
        is_newcomer: this worker joined when the job was running.
        local_workers: the ids of the workers in this process, including this one.
        servers: number of server processes at the start, where the strategy has a parameter server.
        timer: splits the wall time into parts.
        samples: number of samples taken from `batches` since the last optimizer step.
        tracer: records a timeline of the steps that OFFBEAT_TRACE names.
        validator: runs the validations of `validate`; None before its first call.
    """

    def __init__(
        self,
        trained: TrainingState,
        strategy: Strategy,
        environment: Environment,
    ) -> None:
        check_trainable(trained)
        if strategy.survives_worker_loss:
            check_all_in_optimizers(trained)
        self._held: list[Optimizer | nn.Module] = [
            *trained.optimizers,
            *_modules_with_parameters(trained.model),
        ]
        if not _in_session.isdisjoint(self._held):
            raise OffbeatError(
                "this optimizer, or a part of this model, is in a session already: leave that session before "
                "joining again"
            )
        self.worker, self.world = environment.rank, environment.world
        self.is_newcomer, self.local_workers = environment.is_newcomer, environment.threads
        self.servers = environment.servers
        self.epoch = 0
        self._steps_taken = 0  # by this worker alone, also while it is excluded from the group
        self.timer = PartTimer(time.perf_counter)
        self.tracer: Tracer | None = None
        self._trained, self._strategy = trained, strategy
        self._stepped: set[Optimizer] = set()  # since the last step ended
        self._seed, self._start_s = environment.seed, environment.start_s
        self._is_iterating = False
        self._slowness = _read_slowness(environment)
        self._pairing = RoundPairing(
            lambda batch, left_out: self._synchronizer.agree_on_batch(batch, left_out)
        )
        self._batches_used = 0  # of the epoch, up to the last step that ended
        self._batches_in_epoch: int | None = None
        self._samples_in_epoch = self._batch_size = 0
        self._drop_last = False
        self._joined_at: TrainingPosition | None = None  # of a newcomer, until its first epoch begins
        # By epoch: ranges of positions that the loaded state has consumed.
        self._used: dict[int, tuple[tuple[int, int], ...]] = {}
        self._samples_loaded = 0  # per epoch, in the loaded state
        self._is_used_up = False  # no batch of the epoch is left
        self._last_epoch: int | None = None
        self._has_left_epoch_early = False  # the loop left the epoch before early
        self.samples = 0
        self._losses: list[float] = []
        self._timed: list[StepTimed] = []  # sent with the next event, to save messages
        self._left = False
        self._pid = os.getpid()
        self._signals = PreemptionSignals()
        self._has_sent_signal = self._is_preempted = self._has_seen_preemption = False
        self.validator: Validator | None = None
        self._validation_arguments: tuple[Any, ...] = ()
        self._meeting: RendezvousInfo | None = None
        self._coordinator: CoordinatorClient | None = None
        self._synchronizer = strategy.make_synchronizer(self, trained)
        self._silent_s = _SILENT_RETURNING_S if strategy.readmits_workers else _SILENT_S
        self._handles: list[RemovableHandle] = []
        try:
            self._enter(environment)
        except BaseException as error:
            if self._meeting is not None and self._coordinator is None:
                self._meeting.publish_failure(error)
            self._leave(error)
            if self._meeting is not None and isinstance(error, OffbeatError):
                self._meeting.wait_for_late_workers()
            raise
        self._meeting = None
        _in_session.update(self._held)

    # Joining and leaving ---------------------------------------------------------------------------------

    def _enter(self, environment: Environment) -> None:
        has_log = environment.run_log is not None
        if self.world > 1 or has_log or self.is_newcomer or self._strategy.always_needs_coordinator:
            meeting = self._meeting = rendezvous(environment, partial(self._configure, environment))
            self.worker, self.world = meeting.worker, meeting.world
            if self.is_newcomer:
                self.local_workers = (self.worker,)
            self._coordinator = CoordinatorClient(
                meeting,
                self.worker,
                self._strategy.make_worker_protocol(self.worker),
                self._abandon,
                steps_finished=lambda: self.step,
                survives_worker_loss=self._strategy.survives_worker_loss,
                silent_s=self._silent_s,
            )
            self._coordinator.join(
                world=self.world,
                location=f"{socket.gethostname()}, process {os.getpid()}",
                model=describe_training(self._trained),
                strategy=str(self._strategy),
            )
            if self.worker == 0:
                meeting.publish_coordinator()
        self._synchronizer.join_job(self._coordinator, self._meeting)
        if self.is_newcomer:
            self._steps_taken = self.step
        self._watch = ParameterSetCheck(self._trained)
        hook = SessionForwardHook(self._before_forward)  # before the synchronizer's hooks, which begin a step
        self._handles.append(self._trained.model.register_forward_pre_hook(hook))
        self._synchronizer.attach()
        self._handles += [
            handle
            for optimizer in self._trained.optimizers
            for handle in (
                optimizer.register_step_pre_hook(SessionHook(self._before_step)),
                optimizer.register_step_post_hook(SessionHook(self._after_step)),
            )
        ]
        self.timer.lap()
        if environment.trace is not None:
            folder, first_step = environment.trace
            self.tracer = Tracer(folder, self.worker, first_step)
            self.timer.on_part = partial(self.tracer.add_span, "loop")
            self._trace()

    def _trace(self) -> None:
        """Records in the trace that a step begins."""
        if self.tracer is None:
            return
        was_on = self.tracer.is_on
        self.tracer.on_step_start(self.step)
        if self.tracer.is_on and not was_on and self._coordinator is not None:
            self._coordinator.endpoint.call_soon(self._count_bytes)

    def _count_bytes(self) -> None:
        assert self.tracer is not None
        assert self._coordinator is not None
        self.tracer.record_bytes_sent(self._coordinator.endpoint.bytes_sent)
        if self.tracer.is_on:
            self._coordinator.endpoint.call_later(_COUNT_EVERY_S, self._count_bytes)

    def _configure(
        self, environment: Environment, job: str, token: str, host: str
    ) -> CoordinatorConfiguration:
        log = environment.run_log
        about = {
            "world": self.world,
            "strategy": str(self._strategy),
            "model": type(self._trained.model).__name__,
            "seed": self._seed,
            "command": os.path.basename(sys.argv[0]),
        }
        policies = (
            *self._strategy.policies(self.world, self._start_s, self.servers),
            _VALIDATION,
            _PREEMPTION,
        )
        return CoordinatorConfiguration(
            job=job,
            token=token,
            host=host,
            policies=policies,
            log_path=None if log is None else os.path.abspath(log),
            log_bytes_max=environment.run_log_bytes_max,
            log_header=about,
            silent_s=self._silent_s,
            linger_s=self._start_s,
        )

    def position(self, round_: int) -> TrainingPosition:
        """The position in the training that this worker's state belongs to."""
        return TrainingPosition(
            round=round_,
            epoch=self.epoch,
            seed=self._seed,
            samples=self._samples_in_epoch,
            batch_size=self._batch_size,
            drop_last=self._drop_last,
        )

    def restore_position(self, place: TrainingPosition) -> None:
        """Continues at the position that another worker's state belongs to."""
        self.epoch, self._seed = place.epoch, place.seed
        self._joined_at = place

    @property
    def step(self) -> int:
        """Optimizer steps finished: the group's count where this worker belongs to one, else its own."""
        step = self._synchronizer.step
        return self._steps_taken if step is None else step

    @property
    def batch(self) -> int:
        """The batch of the current epoch, of those from `batches`, that training has reached, from 1."""
        return self._pairing.batch

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that train together now; this one is not always among them."""
        return self._synchronizer.members

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the one to evaluate, print and save for the job."""
        return self._synchronizer.is_leader

    @property
    def preempted(self) -> bool:
        """Whether a worker's process is about to be preempted: it has received SIGTERM or SIGUSR1.

        The first read, in the main thread, installs handlers of these signals, which record the signal and
        then run the handlers installed before; leaving the session restores those. Read it after every
        optimizer step, on all workers:

            optimizer.step()
            if session.preempted:
                if session.is_leader:
                    torch.save(session.state_dict(), path)
                break

        `epochs` ends, too, once this has been read as true. The value changes when an optimizer step ends,
        and stays true:

        - where gradients are averaged: when the same step ends for all members of the group, the one in
          whose exchange the first of them announced the signal. Under `Hybrid` one step later: the
          announcement arrives with the deferred part. A member whose exchange was aborted by the loss of
          another may see it one step later.
        - for a worker excluded from the group: soon, when one of its own steps ends; for one that returns, or
          a newcomer, with its first step at the latest.
        - on a parameter server with a bound on staleness: when each worker ends its last step at the latest
          clock that was under way when the coordinator received the signal, so that all stop at the same
          clock. A worker that is waiting for samples at that time may take another step.
        - on a parameter server without a bound: when each worker ends its next step after that.
        - in a job of one worker: when the step ends in which the signal arrived.

        A worker announces its signal when its step ends; the signal does not interrupt a wait for other
        workers. A worker whose session is not in its process's main thread receives no signals of its own.
        """
        if not self._left:
            self._signals.install()
        self._has_seen_preemption |= self._is_preempted
        return self._is_preempted

    @property
    def has_preemption_signal(self) -> bool:
        """Whether this worker knows of a preemption signal, its own or another's; others may not know yet."""
        is_announced = self._coordinator is not None and self._coordinator.preempt is not None
        return self._signals.signal_name is not None or is_announced

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Removes the hooks and leaves the job; repeated calls have no effect.

        Args:
            error: why this worker failed, None if it did not; other workers then fail with an error that
                names it.

        Raises:
            WorkerError: a signal handler or a hook calls it within a step.
        """
        if not self._left:
            check_between_steps("session.leave()", self.worker, self.step)
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if self._left or os.getpid() != self._pid:  # a forked process does not touch its parent's session
            return
        self._left = True
        if error is None:
            self._finish()
        if self._coordinator is not None:
            has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
            self._coordinator.send_end(error if has_failed else None, *self._timed)
        self._tear_down()

    def _finish(self) -> None:
        """Sends what is still to be sent, and waits for the workers that may still need this one."""
        try:
            self._end_step()
            self._synchronizer.flush()
            self._wait_for_other_workers()
            if self.validator is not None:
                self.validator.finish()
        except BaseException as error:
            self._left = False
            self._leave(error)
            raise

    def _wait_for_other_workers(self) -> None:
        """Waits until all workers have finished.

        Workers that are behind copy the final state from workers that are not. In lockstep none is, unless
        workers had different numbers of batches; a worker that had fewer learns of it during a short wait.
        """
        is_alone = self.world == 1 and not self._strategy.always_needs_coordinator
        if is_alone or self._coordinator is None:
            return
        if self._coordinator.is_failure_raised and not self._strategy.survives_worker_loss:
            return  # the program caught the failure and leaves in order
        epoch = max(0, self.epoch - 1) if self._batches_in_epoch is None else self.epoch
        self.send_event(Finished(now_s=0.0, worker=self.worker, epoch=epoch, step=self.step))
        if not self._strategy.survives_worker_loss:
            until_s = time.monotonic() + _STAY_S
            self._coordinator.wait_for(
                lambda: self._is_dismissed() or time.monotonic() >= until_s,
                2 * _STAY_S,
                "all workers to finish",
            )
            return
        self._synchronizer.finish()
        what = "all workers to finish"
        self._coordinator.wait_for(self._is_dismissed, self._strategy.timeout_s, what)
        self._synchronizer.receive_final_state()

    def _is_dismissed(self) -> bool:
        return self._coordinator is not None and self._coordinator.is_job_complete

    def _tear_down(self) -> None:
        if self.validator is not None:
            self.validator.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _in_session.difference_update(self._held)
        self._signals.restore()
        if self.tracer is not None:
            self.tracer.close()
        try:
            self._synchronizer.detach()
        finally:
            if self._coordinator is not None:
                self._coordinator.close()

    def _abandon(self, error: WorkerError) -> None:
        self._synchronizer.abandon(error)
        if isinstance(self.validator, SharedValidator):
            self.validator.fail_all(error)

    # The loop --------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the first unfinished one to `count` - 1, or until `validate` stops the run.

        Also ends once the job is over, for a worker that joined after the others had stopped, and once
        `preempted` has been read as true.
        """
        self._last_epoch = count - 1
        while self.epoch < count and not self._should_stop():
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                self._finish_epoch()

    def _should_stop(self) -> bool:
        has_stopped = self.validator is not None and self.validator.stopped
        return has_stopped or self._is_dismissed() or self._has_seen_preemption

    def _finish_epoch(self) -> None:
        self.epoch += 1
        self._pairing.begin_epoch(0)
        self._batches_used = 0
        self._batches_in_epoch = None
        self._is_used_up = False

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        **loader_options: Any,
    ) -> Iterator[Any]:
        """Yields this worker's batches of the current epoch; over all workers each sample occurs once.

        Where the strategy assigns samples on demand, a worker gets as many as it has time for, and those of a
        lost worker go to others; a worker that is excluded, or that others wait for at the end, gets one of
        its earlier batches, with weight 0. Else every worker gets the same number of batches, and their
        samples depend on the seed and the epoch alone.

        The last batches of an epoch may be smaller. With a batch size of 2 or more and at least two samples
        per worker none holds a single sample, with which BatchNorm cannot train; for that, the remainder may
        be added to batches of 2 or 3, which then hold up to two more.

        A batch may be skipped, with `continue` before the backward pass: where its loss is not finite, say.
        Where all workers take part in every round, the others use their batches, and this worker takes the
        same step with the batch that follows, or, at the epoch's end, with one that it has used: that batch
        has weight 0 there and is yielded again. Where all workers skip the same batch, there is no step.

        A batch that is smaller than others has a smaller weight in the mean. A backward pass is assumed to
        belong to the batch taken last, so do not take batches ahead. A loop that breaks off skips the rest
        of the epoch. Where samples are assigned on demand, workers may get one batch more or less than
        others: a loop that steps every few batches needs `no_sync`, or shards="equal".

        Args:
            dataset: map-style, the same on every worker.
            batch_size: samples in this worker's batch, the same on every worker.
            shuffle: draw a new order every epoch.
            drop_last: every batch holds `batch_size` samples. The end of the epoch's order that does not fill
                a batch of each worker is dropped; where samples are assigned on demand, what does not fill
                one batch. So with `shuffle` other samples are dropped every epoch.
            loader_options: for torch's DataLoader, such as `num_workers` or `collate_fn`.

        Raises:
            ValueError: fewer samples than workers, or with `drop_last` than a batch each, or a batch size
                below 1.
            OffbeatError: the data set has no length, an option is one that the session sets itself, or the
                epoch's batches are being iterated already or are used up.
        """
        if not hasattr(dataset, "__len__"):
            raise OffbeatError(
                "session.batches needs a data set with a length; for an iterable one use your own loader, "
                "with the same number of batches on every worker"
            )
        if self._is_iterating:
            raise OffbeatError("session.batches is being iterated already: finish that one first")
        if self._is_used_up:
            raise OffbeatError(
                f"the samples of epoch {self.epoch} are used up: begin the next epoch with session.epochs"
            )
        shards = EqualShards(
            samples=len(dataset),
            workers=self.world,
            batch_size=batch_size,
            seed=self._seed,
            epoch=self.epoch,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self._check_data(len(dataset), batch_size, drop_last)
        self._batches_in_epoch, self._samples_in_epoch = shards.steps, shards.samples
        self._batch_size, self._drop_last = batch_size, drop_last
        source = (
            self._assigned_batches(dataset, batch_size, shuffle, drop_last, loader_options)
            if self._synchronizer.assigns_samples
            else self._equal_batches(dataset, shards, loader_options)
        )
        self._is_iterating = True
        try:
            self._begin_batch()
            for batch, samples in self._pairing.iterate(source):
                self.raise_if_failed()
                before = self.samples
                self.samples += samples
                self._synchronizer.set_batch_weight(samples / batch_size)
                self.timer.switch("compute")
                yield batch
                self._begin_batch()
                if not self._pairing.is_batch_used:
                    self.samples = before
            self.raise_if_failed()
            self._is_used_up = True
        finally:
            self._is_iterating = False
            self._synchronizer.set_batch_weight(1.0)
            self.timer.switch("other")
            if not self._is_used_up:
                self._drop_rest_of_epoch()

    def _begin_batch(self) -> None:
        self._end_step()
        self.timer.switch("batch")

    def _check_data(self, samples: int, batch_size: int, drop_last: bool) -> None:
        """Refuses data that differ from those of the state to continue from, before any are announced."""
        if self._used.get(self.epoch) and samples != self._samples_loaded:
            raise OffbeatError(
                f"the state was saved within an epoch of {self._samples_loaded} samples, and the "
                f"data set has {samples}: use the same data set, or a state from an epoch's end"
            )
        place, self._joined_at = self._joined_at, None
        if place is None or not place.samples or place.epoch != self.epoch:
            return
        if (samples, batch_size, drop_last) != (place.samples, place.batch_size, place.drop_last):
            job_batches = describe_batches(place.batch_size, place.drop_last)
            own_batches = describe_batches(batch_size, drop_last)
            raise OffbeatError(
                f"expected the data of the job that worker {self.worker} joins, {place.samples} samples in "
                f"batches of {job_batches}, got {samples} in batches of {own_batches}: start "
                "newcomers with the same data set, batch size and drop_last"
            )

    def _equal_batches(
        self, dataset: Dataset[Any], shards: EqualShards, loader_options: dict[str, Any]
    ) -> Iterator[tuple[Any, int]]:
        """Yields the batches of this worker's equal shard, with their sizes."""
        indices = shards.batches(self.worker)[self._pairing.batches_taken :]
        seed = (self._seed, self.epoch, self.worker)
        loaded = load_batches(dataset, indices, seed=seed, loader_options=loader_options)
        for batch in indices:
            if self._coordinator is not None and self._coordinator.epochs_ended > self.epoch:
                break
            yield next(loaded), len(batch)

    def _assigned_batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        loader_options: dict[str, Any],
    ) -> Iterator[tuple[Any, int]]:
        """Yields the batches assigned to this worker, with their sizes."""
        assert self._coordinator is not None
        samples = len(dataset)  # type: ignore[arg-type]
        assigned = AssignedBatches(
            self._coordinator,
            lambda epoch: epoch_order(samples, seed=self._seed, epoch=epoch, shuffle=shuffle),
            dataset,
            batch_size,
            drop_last=drop_last,
            epoch=self.epoch,
            loader_options=loader_options,
            seed=(self._seed, self.epoch, self.worker),
            is_last=self._last_epoch is None or self.epoch >= self._last_epoch,
            has_left_epoch_early=self._has_left_epoch_early,
            consumed=self._used.get(self.epoch, ()),
            late_gradients=self._synchronizer.late_gradients,
            has_no_pending_gradient=lambda: self._synchronizer.has_no_pending_gradient,
            blocks_per_round=self._synchronizer.blocks_per_round,
            timeout_s=self._strategy.timeout_s,
        )
        self._has_left_epoch_early = False
        return iter(assigned)

    def _drop_rest_of_epoch(self) -> None:
        """Drops the rest of the epoch, which the loop has left early."""
        if self._synchronizer.assigns_samples and self._coordinator is not None:
            self._has_left_epoch_early = True
            with self._coordinator.lock:
                self._coordinator.protocol.block_queue.discard()
                self._synchronizer.on_epoch_left_early()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context backward passes only accumulate; the next one outside exchanges the sum.

        Without it accumulation gives the same result, at the cost of one exchange per backward pass.
        """
        return self._synchronizer.no_sync()

    def observe(self, loss: float | Tensor) -> None:
        """Records the mean training loss of a batch, or its accuracy, for strategies that use it.

        Args:
            loss: a number, or a tensor of one element.
        """
        self._losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def pop_mean_loss(self) -> float | None:
        """Returns the mean of the values observed since the last call, None if there are none."""
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None

    def report(self, **metrics: float) -> None:
        """Writes metrics of the current epoch (accuracy, loss, …) to the run log."""
        plain = {name: float(value) for name, value in metrics.items()}
        self.send_event(Evaluated(now_s=0.0, worker=self.worker, epoch=self.epoch, metrics=plain))

    def validate(self, evaluate: Evaluate, dataset: ValidationData, **options: Any) -> Validation:
        """Validates the epoch that ends now while the next one trains; all workers call it.

        With several workers each evaluates the parts of the set assigned to it, as many as it has time for,
        with the same snapshot of the model; all get the metrics of the whole set. The exchanges of the
        training are not used. Leaving the session waits for validations under way.

        Args:
            evaluate, dataset: see `Validator`; the same, and the same options, at every epoch.
            options: of `Validator`. With several workers "auto" is "thread"; metrics are means and counts;
                metrics take effect once `max_pending` + 1 further epochs have been validated, on all workers
                at the same point; "skip" is refused. "rollback" is for early stopping alone, and for
                strategies that exclude no worker.

        Returns:
            The result, available later. `session.validator` has the history, `stopped` and the best snapshot;
            `session.epochs` ends when a monitor stops the run.

        Raises:
            ValueError: an option is out of range, or not available with several workers.
            OffbeatError: an argument is not usable, or not the same as at the last epoch.
            WorkerError: the job failed, or a signal handler or a hook calls it within a step.
            Exception: what `evaluate` raised for an earlier epoch.
        """
        check_between_steps("session.validate()", self.worker, self.step)
        given = (evaluate, dataset, options)
        if self.validator is None:
            self.validator = self._validator(evaluate, dataset, options)
            self._validation_arguments = given
        same = self._validation_arguments
        if evaluate != same[0] or dataset is not same[1] or options != same[2]:
            raise OffbeatError(
                "expected session.validate to be called with the same evaluate, data set and options at "
                "every epoch, got others: make them before the loop"
            )
        self.raise_if_failed()
        self._end_step()
        if self._has_model_to_validate():
            self._synchronizer.complete_state()
        return self.validator.validate(self.epoch)

    def _validator(self, evaluate: Evaluate, dataset: ValidationData, options: dict[str, Any]) -> Validator:
        """Makes the session's validator, which the workers share, or one of its own for a single worker.

        Raises:
            ValueError: a decision of rollback with a plateau.
        """
        common = self._synchronizer.replicas_identical
        if options.get("decision") == "rollback" and options.get("plateau") is not None:
            raise ValueError(
                "expected a decision of sync or lag with a plateau in a session, got 'rollback': the samples "
                "of an epoch are assigned once"
            )
        is_shared = self.world > 1 or self.is_newcomer or self._strategy.survives_worker_loss
        if self._coordinator is None or not is_shared:
            return Validator(self._trained.model, evaluate, dataset, **options)
        return SharedValidator(
            self._trained.model,
            evaluate,
            dataset,
            member=self._coordinator,
            is_current=self._has_model_to_validate,
            can_roll_back=common and not self._strategy.survives_worker_loss,
            has_learning_rates=common,
            is_only_thread=len(self.local_workers) == 1,
            **options,
        )

    def _has_model_to_validate(self) -> bool:
        """Whether to validate this worker's model: a current replica, or the leader's where copies differ."""
        synchronizer = self._synchronizer
        return synchronizer.has_current_state if synchronizer.replicas_identical else synchronizer.is_leader

    @property
    def traffic(self) -> Mapping[str, float]:
        """Traffic between this process, all its worker threads together, and the parameter server.

        `pulls_count` and `pulled_bytes` count the parameters that a step waited for, `traffic_bytes` all
        bytes sent and received; empty without a parameter server.
        """
        return self._synchronizer.traffic

    def send_event(self, event: Event) -> None:
        """Sends an event to the coordinator, after the times of the steps since the last one."""
        if self._coordinator is not None:
            self._coordinator.send_event(*self._timed, event)
            self._timed.clear()

    # What the synchronizer calls -------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raises the job's failure, if there is one.

        Raises:
            WorkerError: names the worker that caused it.
        """
        if self._coordinator is not None:
            self._coordinator.raise_if_failed()

    def on_computed(self, compute_s: float) -> None:
        """Marks the batch as used; waits a multiple of `compute_s` where slowness is configured."""
        self._pairing.is_batch_used = True
        if self._slowness is None:
            return
        try:
            factor = self._slowness.factor(
                self.worker // len(self.local_workers),
                self.epoch,
                self._step_in_epoch(),
                self._batches_in_epoch,
                self._steps_taken,
            )
        except ValueError as error:
            raise OffbeatError(
                f"{error}; use session.batches, which provides it, instead of your own loader"
            ) from error
        if factor > 1 and self._coordinator is not None:
            self._coordinator.pause((factor - 1) * compute_s)
        elif factor > 1:
            time.sleep((factor - 1) * compute_s)

    def _step_in_epoch(self) -> int:
        """Steps of the epoch done; derived from the samples used where these are assigned on demand."""
        if (
            not self._synchronizer.assigns_samples
            or self._batches_in_epoch is None
            or self._coordinator is None
        ):
            return max(0, self._pairing.batch - 1)
        return (
            self._coordinator.protocol.block_queue.samples_used
            * self._batches_in_epoch
            // self._samples_in_epoch
        )

    @out_of_inference_mode
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.raise_if_failed()
        self._watch.check()
        if backward_pass_id() != -1:
            raise OffbeatError(
                "expected optimizer.step() after the backward pass, got it within one, before gradients are "
                "averaged: call it when backward() has returned"
            )
        if optimizer in self._stepped:
            self._end_step()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._synchronizer.before_step(optimizer, has_closure=closure is not None)
        self.timer.switch("apply")

    @out_of_inference_mode
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.timer.switch("other")
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._trained.optimizers):
            self._end_step()

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if model.training:
            self._end_step()
        if self._is_iterating and self._pairing.try_stand_in():
            self.samples = 0
            self._synchronizer.set_batch_weight(0)

    def _end_step(self) -> None:
        """Ends the current step, if an optimizer has stepped."""
        if not self._stepped:
            return
        self._stepped.clear()
        step = self.step
        self._send_signal()
        self._synchronizer.after_step()
        self._steps_taken += 1
        self._pairing.is_batch_used = True
        self._batches_used = self._pairing.batch
        self._is_preempted |= self._synchronizer.is_preempted
        wall_s, parts_s = self.timer.lap()
        if self._coordinator is not None:
            self._timed.append(
                StepTimed(
                    now_s=0.0,
                    worker=self.worker,
                    step=step,
                    samples=self.samples,
                    wall_s=wall_s,
                    **{f"{part}_s": spent_s for part, spent_s in parts_s.items()},
                )
            )
        self.samples = 0
        self._losses.clear()
        self._trace()

    def _send_signal(self) -> None:
        """Reports a signal that has arrived; not from its handler, which must not send."""
        if self._signals.signal_name is not None and not self._has_sent_signal:
            self._has_sent_signal = True
            self.send_event(
                Preempted(
                    now_s=0.0, worker=self.worker, step=self._steps_taken, signal=self._signals.signal_name
                )
            )

    # Saving and restoring --------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Brings model and optimizer state up to date with all workers' steps, up to this worker's step.

        Call it before evaluating or saving the model during training on a parameter server, where a worker's
        copy lacks the other workers' latest steps. It waits for workers that are behind, and fetches the
        parameters up to the clock of this worker's next step. Under `Hybrid` it applies the deferred part of
        the last step. Else, and after training, the model is up to date already. `state_dict` calls it.

        Raises:
            OffbeatError: this worker is excluded from the group, so that its parameters are outdated.
            WorkerError: the job failed, or a signal handler or a hook calls it within a step.
        """
        check_between_steps("session.refresh()", self.worker, self.step)
        self._refresh()

    def _refresh(self) -> None:
        self._end_step()
        if not self._synchronizer.has_current_state:
            raise OffbeatError(self._outdated_message())
        self._synchronizer.complete_state()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a run needs to continue: model, optimizers, and the position in the data.

        Call it between optimizer steps, on the worker where `is_leader` is true. Where gradients are
        averaged, the state of every other member is equal, though its file may differ in bytes; where models
        are, it stands for all models, and the samples of all workers count as used. It is the state after the
        last finished step; batches fetched after it are not counted as used. The call may wait for the
        coordinator to report which samples the state has consumed. To save when a signal arrives, read
        `preempted`.

        Raises:
            OffbeatError: this worker is excluded from the group, so that its parameters are outdated.
            WorkerError: the job failed, or a signal handler or a hook calls it within a step.
        """
        check_between_steps("session.state_dict()", self.worker, self.step)
        self._refresh()
        whole = self._is_used_up or self._batches_used == self._batches_in_epoch
        if self._synchronizer.assigns_samples:
            epoch, used = self._query_consumed()
            taken = 0
        else:
            epoch, used, taken = self.epoch + whole, {}, 0 if whole else self._batches_used
        return {
            "version": _STATE_VERSION,
            "model": self._trained.model.state_dict(),
            "optimizers": self._trained.optimizer_states(),
            "epoch": epoch,
            "batches_taken": taken,
            "used": {str(epoch): list(map(list, ranges)) for epoch, ranges in used.items()},
            "samples": self._samples_in_epoch or self._samples_loaded,
            "step": self.step,
            "seed": self._seed,
            "world": self.world,
        }

    def _query_consumed(self) -> tuple[int, dict[int, tuple[tuple[int, int], ...]]]:
        """Returns the state's epoch, and the positions that it has consumed of that and later epochs."""
        assert self._coordinator is not None
        if self._coordinator.protocol.block_queue.epoch < 0:  # nothing since the start
            return self.epoch, self._used
        member, round_ = self._coordinator, self._synchronizer.round

        def has_heard() -> bool:
            return member.consumed_samples is not None and member.consumed_samples.round == round_

        member.consumed_samples = None
        self.send_event(CheckpointQuery(now_s=0.0, worker=self.worker, round=round_))
        what = "the coordinator to report which samples the state has consumed"
        member.wait_for(has_heard, self._strategy.timeout_s, what)
        assert member.consumed_samples is not None
        if not member.consumed_samples.is_current:
            raise OffbeatError(self._outdated_message())
        return member.consumed_samples.epoch, dict(member.consumed_samples.consumed)

    def _outdated_message(self) -> str:
        return (
            f"worker {self.worker} is excluded from the group, and its parameters are outdated: save on the "
            "worker on which session.is_leader is true"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was saved; every worker calls it before its loop, with the same state.

        In a newcomer this does nothing: it has the current state of the other workers already. The number
        of workers may differ from the saved one, except within an epoch that was split equally.

        Raises:
            OffbeatError: the state is of another version, or was saved within an epoch with another number
                of workers, or with samples assigned in another way.
        """
        if state.get("version") != _STATE_VERSION:
            raise OffbeatError(
                f"expected a session's state of version {_STATE_VERSION}, got {state.get('version')!r}"
            )
        if state["batches_taken"] and state["world"] != self.world:
            raise OffbeatError(
                f"the state was saved within an epoch with {state['world']} workers and there are "
                f"{self.world} now: use as many, or a state from an epoch's end"
            )
        if (state["batches_taken"] and self._synchronizer.assigns_samples) or (
            any(state["used"].values()) and not self._synchronizer.assigns_samples
        ):
            how = "split equally" if self._synchronizer.assigns_samples else "assigned on demand"
            raise OffbeatError(
                f"the state was saved within an epoch whose samples were {how}: use a strategy "
                "that does the same, or a state from an epoch's end"
            )
        if self.is_newcomer:
            return
        self._trained.model.load_state_dict(state["model"])
        self._trained.load_optimizer_states(state["optimizers"])
        self.epoch = state["epoch"]
        self._steps_taken = state["step"]
        self._synchronizer.on_state_loaded(state["step"])
        self._batches_used = state["batches_taken"]
        self._pairing.begin_epoch(self._batches_used)
        self._seed = state["seed"]
        self._used = {
            int(epoch): tuple((start, stop) for start, stop in ranges)
            for epoch, ranges in state["used"].items()
        }
        self._samples_loaded = state["samples"]


def _modules_with_parameters(model: nn.Module) -> list[nn.Module]:
    """The modules that directly own parameters that require a gradient."""
    return [
        module
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def _read_slowness(environment: Environment) -> InjectedSlowness | None:
    if not environment.slowdowns or environment.is_newcomer:  # rules cannot name it
        return None
    try:
        rules = [parse_slow_rule(text) for text in environment.slowdowns]
        processes = environment.world // len(environment.threads)
        return InjectedSlowness(rules, workers=processes, seed=environment.seed)
    except ValueError as error:
        raise OffbeatError(str(error)) from error
