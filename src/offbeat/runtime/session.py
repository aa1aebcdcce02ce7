"""`join` makes an existing training loop one worker of a job, for as long as its `Session` lasts.

Theory of operation. A `Session` passes what its `StepHooks` on model and optimizers observe to a
`Synchronizer`, which the strategy makes and which keeps this worker's model in step with those of the other
workers. It exchanges events and actions with the coordinator through a `JobConnection`; a job of one worker
may do without a coordinator. One step of the user's loop:

1. `batches` asks the `BatchSource` for a batch. If an optimizer has stepped, the step before ends here (6).
   `RoundPairing` takes the next batch from `AssignedBatches` or from this worker's equal shard, and counts
   it. `set_batch_weight` sets what the gradients of this batch count, relative to a full batch.
2. Forward pass. In training mode a step that has not ended ends here. Where programs may skip batches,
   `RoundPairing` finds out whether this batch stands in for one that was skipped; its weight is 0 then. The
   synchronizer's hooks follow, which may wait for parameters.
3. Backward pass. The synchronizer's hooks collect the gradients and may begin to exchange them; it calls
   `on_computed`, which marks the batch as used and adds injected slowness.
4. `optimizer.step()`, before. Raises the job's failure and errors such as parameters added since `join`. A
   second step of one optimizer ends the step before. `before_step` lets the synchronizer complete what the
   optimizer is about to use.
5. `optimizer.step()`, after. Once every optimizer has stepped, the step ends.
6. `_on_step_end`, once per step: sends a preemption signal that has arrived, calls `after_step`, counts the
   step, reads whether the workers agree on a preemption, and queues its StepTimes, which travel with a later
   event. Where only some optimizers step, the next batch, training-mode forward pass, `validate`, `refresh`
   or `leave` ends the step.

Invariants. State (`state_dict`, with the `DataPosition`) is that of the last step that has ended; a batch
taken since is not in it. Hooks do nothing in a forked process. Methods that wait raise a WorkerError if a
signal handler calls them within a step.

Failures. The `CoordinatorClient`'s failure ends all waits of synchronizer and validator (`_abandon`) and is
raised by the next `raise_if_failed`, in (1), (4) or a wait. An exception of the loop leaves the session, and
the coordinator is sent Failed. After a loop that ends well, `_finish` ends the last step, sends what the
synchronizer still holds, sends Finished, and waits for the other workers, which may still need this worker's
state; then Left is sent, and the hooks are removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import Evaluated, Event, Finished, Preempted, StepTimes
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from offbeat.runtime.control.environment import Environment, environment_of_thread, read_environment
from offbeat.runtime.processes.interrupts import check_between_steps
from offbeat.runtime.processes.preemption_signals import PreemptionSignals
from offbeat.runtime.training.batch_source import BatchSource
from offbeat.runtime.training.checks import check_all_in_optimizers, check_arguments, check_trainable
from offbeat.runtime.training.data_position import DataPosition, check_state, outdated_state_error
from offbeat.runtime.training.ddp import sessions_of
from offbeat.runtime.training.interface import Strategy
from offbeat.runtime.training.job_connection import JobConnection
from offbeat.runtime.training.partial_step import optimizer_step_mode
from offbeat.runtime.training.session_loader import SessionLoader
from offbeat.runtime.training.state_copy import TrainingPosition
from offbeat.runtime.training.step_hooks import StepHooks
from offbeat.runtime.training.step_times import StepMeans
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.trained import SeveralModels, TrainingState
from offbeat.runtime.training.value_exchange import (
    REDUCTIONS,
    Number,
    Reduction,
    ValueExchange,
)
from offbeat.runtime.validation.evaluators import Evaluate
from offbeat.runtime.validation.parts import ValidationData
from offbeat.runtime.validation.result import Validation
from offbeat.runtime.validation.shared_validator import SharedValidator
from offbeat.runtime.validation.validator import Validator

_STATE_VERSION = 2


@dataclass
class LaunchedLoop:
    """A training loop that a launcher runs in a process of its own, as Ray Train does.

    Attributes:
        strategy: what `join` uses where the loop gives none.
        session: the one that the loop has joined last; None before.
    """

    strategy: Strategy
    session: Session | None = None


_launched_loops: list[LaunchedLoop] = []  # the last one is under way


@contextmanager
def launched_loop(strategy: Strategy) -> Iterator[LaunchedLoop]:
    """Surround a training loop; what the launcher says holds in all threads of this process."""
    loop = LaunchedLoop(strategy)
    _launched_loops.append(loop)
    try:
        yield loop
    finally:
        _launched_loops.remove(loop)


def join(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | None = None,
    *,
    run_log: str | os.PathLike[str] | None = None,
    run_log_bytes_max: int | None = None,
    thread: int = 0,
    threads: int = 1,
) -> Session:
    """Make this process a worker of the job that its launcher started.

    Puts hooks on the model and the optimizer; what they do is the strategy's. Where gradients are averaged,
    they are the mean over the workers after `backward()`. Copies rank 0's parameters, buffers and optimizer
    state to all workers. Leaving the `with` block removes the hooks.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun, Ray Train, Slurm or Kubeflow set them;
    with none of them set the job has one worker. With OFFBEAT_NEWCOMER=1 and the MASTER_ADDR and MASTER_PORT
    of a running job, this process joins that job as a new worker, with the current state and in the current
    epoch of its workers. OFFBEAT_JOB, or torchrun's run id, separates jobs that use one address.

    Args:
        model: the model to train; the same architecture on every worker, on one device. Or several, such as
            those of a GAN, which the program calls one by one; not with `Hybrid` and strategies on servers.
            `validate` then gets a list of them.
        optimizer: the optimizer of the model's parameters, or several, each for some of them. A step is over
            when each of them has stepped, or when one of them steps again, or the only model is called again,
            after some have.
        strategy: how the workers synchronize; equal on every worker. By default that of the launcher, if it
            has one, such as `offbeat.ray.OffbeatTrainer`.
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
    models: Sequence[nn.Module] = [model] if isinstance(model, nn.Module) else model
    if type(model) is nn.ModuleList:  # which has no forward pass of its own, as a subclass may have
        models = [*model]
    loop = _launched_loops[-1] if _launched_loops else None
    if strategy is None and loop is not None:
        strategy = loop.strategy
    strategy = check_arguments(models, optimizers, strategy)
    environment = read_environment()
    if run_log is not None:
        environment = replace(environment, run_log=os.path.abspath(run_log))
    if run_log_bytes_max is not None:
        environment = replace(environment, run_log_bytes_max=run_log_bytes_max)
    with optimizer_step_mode():
        session = Session(
            TrainingState(models[0] if len(models) == 1 else SeveralModels(models), list(optimizers)),
            strategy,
            environment_of_thread(environment, thread, threads),
        )
    if loop is not None:
        loop.session = session
    return session


class Session:
    """One worker's part in a job, from `join` until the `with` block ends.

    Attributes:
        worker: this worker's id.
        world: how many workers the job started with.
        is_newcomer: this worker joined when the job was running.
        local_workers: the ids of the workers in this process, including this one.
        servers: number of servers that the workers start, where the strategy has a parameter server.
        timer: splits the wall time into parts.
        tracer: records a timeline of the steps that OFFBEAT_TRACE names.
        validator: runs the validations of `validate`; None before its first call.

    Size: over 450 lines, of which 180 are the documentation of the public methods, which belongs to the class
    that users hold.
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
        if any(one in sessions_of for one in self._held):
            raise OffbeatError(
                "this optimizer, or a part of this model, is in a session already: leave that session before "
                "joining again"
            )
        self.worker, self.world = environment.rank, environment.world
        self.is_newcomer, self.local_workers = environment.is_newcomer, environment.threads
        self.servers = environment.servers if environment.starts_servers else 0
        self.timer = PartTimer(time.perf_counter)
        self.tracer: Tracer | None = None
        self.validator: Validator | None = None
        self._validation_arguments: tuple[Any, ...] = ()
        self._trained, self._strategy = trained, strategy
        self._steps_taken = 0  # by this worker alone, also while it is excluded from the group
        self._losses: list[float] = []
        self._means = StepMeans()
        self._slowness = _read_slowness(environment)
        self._signals = PreemptionSignals()
        self._is_preempted = self._has_seen_preemption = self._has_trained = False
        self._left = False
        self._pid = os.getpid()
        self._job = JobConnection(environment, strategy)
        self._values = ValueExchange(self._job, strategy.timeout_s)
        self._position = DataPosition(environment.seed)
        self._synchronizer = strategy.make_synchronizer(self, trained)
        self._hooks = StepHooks(
            trained,
            self._synchronizer,
            self.timer,
            raise_if_failed=self.raise_if_failed,
            before_forward=lambda: self._source.on_forward(),
            on_step_end=self._on_step_end,
        )
        self._source = BatchSource(
            self._job,
            self._synchronizer,
            self._position,
            self.timer,
            end_step=self._hooks.end_step,
            timeout_s=strategy.timeout_s,
        )
        try:
            self._enter(environment)
        except BaseException as error:
            self._leave(error)
            if isinstance(error, OffbeatError):
                self._job.wait_for_late_workers()
            raise
        sessions_of.update(dict.fromkeys(self._held, self))

    # Joining and leaving ---------------------------------------------------------------------------------

    def _enter(self, environment: Environment) -> None:
        job = self._job
        job.join(self._trained, self._abandon, steps_finished=lambda: self.step)
        self.worker, self.world, self.is_newcomer = job.worker, job.world, job.is_newcomer
        if self.is_newcomer:
            self.local_workers = (self.worker,)
            self._slowness = None  # rules cannot name it
        self._synchronizer.join_job(job.coordinator, job.rendezvous)
        if self.is_newcomer:
            self._steps_taken = self.step
        self._hooks.attach()
        self.timer.lap()
        if environment.trace is not None:
            folder, first_step = environment.trace
            self.tracer = Tracer(folder, self.worker, first_step)
            self.timer.on_part = partial(self.tracer.add_span, "loop")
            self._trace()

    def _trace(self) -> None:
        """Record in the trace that a step begins."""
        if self.tracer is not None and self.tracer.on_step_start(self.step):
            self._job.record_bytes_sent(self.tracer)

    def position(self, round_: int) -> TrainingPosition:
        """Return the position in the training that this worker's state belongs to."""
        return self._position.training_position(round_)

    def restore_position(self, position: TrainingPosition) -> None:
        """Continue at the position that another worker's state belongs to."""
        self._position.restore(position)

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._position.epoch

    @property
    def samples(self) -> int:
        """Number of samples taken from `batches` since the last optimizer step."""
        return self._source.samples

    @property
    def step(self) -> int:
        """Optimizer steps finished: the group's count where this worker belongs to one, else its own."""
        step = self._synchronizer.step
        return self._steps_taken if step is None else step

    @property
    def batch(self) -> int:
        """The batch of the current epoch, of those from `batches`, that training has reached, from 1."""
        return self._source.batch

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
        coordinator = self._job.coordinator
        is_announced = coordinator is not None and coordinator.preempt is not None
        return self._signals.signal_name is not None or is_announced

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    @property
    def has_left(self) -> bool:
        """Whether this worker has left the job."""
        return self._left

    def leave(self, error: BaseException | None = None) -> None:
        """Remove the hooks and leave the job; repeated calls have no effect.

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
        if error is not None:
            with suppress(OffbeatError):
                self._source.drop_rest()
        has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        self._job.send_end(error if has_failed else None)
        self._tear_down()

    def _finish(self) -> None:
        """Send what is still to be sent, and wait for the workers that may still need this one."""
        try:
            self._hooks.end_step()
            self._source.drop_rest()
            self._synchronizer.flush()
            self._wait_for_other_workers()
            if self.validator is not None:
                self.validator.finish()
        except BaseException as error:
            self._left = False
            self._leave(error)
            raise

    def _wait_for_other_workers(self) -> None:
        """Wait until all workers have finished.

        Workers that are behind copy the final state from workers that are not. In lockstep none is, unless
        workers had different numbers of batches; a worker that had fewer learns of it during a short wait.
        """
        coordinator, survives = self._job.coordinator, self._strategy.survives_worker_loss
        if self._job.is_alone or coordinator is None:
            return
        if coordinator.is_failure_raised and not survives:
            return  # the program caught the failure and leaves in order
        epoch = self._position.last_epoch_begun
        self.send_event(Finished(now_s=0.0, worker=self.worker, epoch=epoch, step=self.step))
        if survives:
            self._synchronizer.finish()
        self._job.wait_until_complete()
        if survives:
            self._synchronizer.receive_final_state()

    def _tear_down(self) -> None:
        if self.validator is not None:
            self.validator.close()
        self._hooks.remove()
        for one in self._held:
            sessions_of.pop(one, None)
        self._signals.restore()
        if self.tracer is not None:
            self.tracer.close()
        try:
            self._synchronizer.detach()
        finally:
            self._job.close()

    def _abandon(self, error: WorkerError) -> None:
        self._synchronizer.abandon(error)
        if isinstance(self.validator, SharedValidator):
            self.validator.fail_all(error)

    # The loop --------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from the first unfinished one to `count` - 1, or until `validate` stops the run.

        Also ends once the job is over, for a worker that joined after the others had stopped, and once
        `preempted` has been read as true.
        """
        return self._source.epochs(count, self._should_stop)

    def _should_stop(self) -> bool:
        has_stopped = self.validator is not None and self.validator.stopped
        return has_stopped or self._job.is_complete or self._has_seen_preemption

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        **loader_options: Any,
    ) -> Iterator[Any]:
        """Yield this worker's batches of the current epoch; over all workers each sample occurs once.

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
        return self._source.batches(
            dataset, batch_size, shuffle=shuffle, drop_last=drop_last, loader_options=loader_options
        )

    def loader(self, loader: DataLoader[Any], *, takes_ahead: bool = False) -> SessionLoader:
        """Return a loader of this worker's batches, for a program that iterates over a DataLoader.

        Samples are shared out as by `batches`; the program needs neither `epochs` nor a DistributedSampler:

            loader = session.loader(DataLoader(train_set, batch_size=32, shuffle=True))
            for epoch in range(session.epoch, 10):
                for x, y in loader:

        The order depends on the session's seed and the epoch, not on the DataLoader's generator. It is for
        training: evaluate with a loader of your own.

        Args:
            loader: a DataLoader with a map-style data set and a batch size, the same on every worker; with
                shuffle=True or False, or a SubsetRandomSampler or DistributedSampler of that set.
            takes_ahead: the program takes batches before it has used the ones before them, as frameworks do;
                it calls `begin_batch` of the loader for each, before its forward pass, and uses each. Not
                where samples are assigned on demand.

        Raises:
            OffbeatError: the samples cannot be shared out; says which kind of DataLoader can be used.
        """
        return SessionLoader(self._source, loader, self.world, takes_ahead=takes_ahead)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context backward passes only accumulate; the next one outside exchanges the sum.

        Without it accumulation gives the same result, at the cost of one exchange per backward pass.
        """
        return self._synchronizer.no_sync()

    def observe(self, loss: float | Tensor) -> None:
        """Record the mean training loss of a batch, or its accuracy, for strategies that use it.

        Args:
            loss: a number, or a tensor of one element.
        """
        self._losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def pop_mean_loss(self) -> float | None:
        """Return the mean of the values observed since the last call, None if there are none."""
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None

    def report(self, **metrics: float) -> None:
        """Write metrics of the current epoch (accuracy, loss, …) to the run log."""
        plain = {name: float(value) for name, value in metrics.items()}
        self.send_event(Evaluated(now_s=0.0, worker=self.worker, epoch=self.epoch, metrics=plain))

    def metrics(self) -> dict[str, float]:
        """Return the means of this worker's steps since the last call, for what logs a dict and a step.

        For MLflow, or Weights & Biases with `wandb.log`:

            if session.step % 100 == 0 and session.is_leader:
                mlflow.log_metrics(session.metrics(), step=session.step)

        Calls between two steps return the same. For figures of all workers, call it on all of them and reduce
        it: `session.reduce(session.metrics(), "max")`.

        Returns:
            By name, the same on all workers: `offbeat/step_s`, the wall time of a step in seconds, and its
            parts, which sum to it: `offbeat/compute_s`, `offbeat/wait_s`, …;
            `offbeat/samples_per_s` of this worker; and `offbeat/members`, the number of workers that train
            together now. Times are 0 before the first step.
        """
        figures = {**self._means.read(), "members": float(len(self.members))}
        return {f"offbeat/{name}": value for name, value in figures.items()}

    def barrier(self) -> None:
        """Wait until all workers have called this.

        This and the three methods below are for small things, such as a folder's name or a metric; call them
        on all workers, in the same order, between steps: before the loop, at the end of an epoch, or at a
        step that all workers take. They are among the workers that are in the job: who has been lost, or has
        finished, is not awaited. A newcomer takes part from its first batch or step on, and skips the calls
        before the loop (`is_newcomer`). They wait as long as the strategy's `timeout_s`.

        Where workers average gradients and samples are assigned on demand, epochs of `epochs` but the last do
        not end for all workers at the same time, and a call between two of them is refused.

        Raises:
            OffbeatError: this worker has left the job, or is a newcomer that has not trained yet; or the call
                is one between two epochs that is refused.
            WorkerError: the job failed; a worker called something else, or did not call this in time; or a
                signal handler or a hook calls it within a step.
        """
        check_between_steps("session.barrier()", self.worker, self.step)
        self._before_exchange("session.barrier()")
        self._values.wait_for_all("session.barrier()")

    def gather_objects(self, value: Any) -> dict[int, Any]:
        """Return the values of all workers, by worker, on each of them; see `barrier`.

        Args:
            value: of this worker: numbers, texts, tensors, or lists, tuples, sets and dicts of them; at most
                100 KB when saved by torch. Tensors arrive on the CPU.

        Raises:
            OffbeatError: the value is too large, or holds something else; or as `barrier`.
            WorkerError: as `barrier`.
        """
        check_between_steps("session.gather_objects()", self.worker, self.step)
        self._before_exchange("session.gather_objects()")
        return self._values.gather("session.gather_objects()", value)

    def gather_within_step(self, value: Any) -> dict[int, Any]:
        """Return what `gather_objects` does, also within a step, which it does not end.

        For frameworks, whose programs exchange metrics in the forward pass: all workers call it at the same
        place of the same step.

        Raises:
            OffbeatError: as `gather_objects`.
            WorkerError: as `barrier`, but for the place of the call.
        """
        return self._values.gather("session.gather_within_step()", value)

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of the worker with the smallest id, on all workers; see `gather_objects`."""
        check_between_steps("session.broadcast_object()", self.worker, self.step)
        self._before_exchange("session.broadcast_object()")
        gathered = self._values.gather("session.broadcast_object()", value, only_first=True)
        return next(iter(gathered.values()))

    def reduce(
        self, value: Number | Mapping[str, Number], op: Reduction = "mean"
    ) -> Number | dict[str, Number]:
        """Return the mean of all workers' values, or their sum, minimum or maximum; see `gather_objects`.

        Args:
            value: a real number, a tensor, or a dict of such; of the same names and shapes on all workers.
            op: "mean", "sum", "min" or "max"; element by element.

        Returns:
            The same on all workers; tensors are on the device of this worker's, and keep their type, but for
            the mean of integers.

        Raises:
            OffbeatError: not numbers, or of another kind on another worker; or as `barrier`.
            ValueError: another `op`.
            WorkerError: as `barrier`.
        """
        if op not in REDUCTIONS:
            raise ValueError(f"expected an op of {', '.join(REDUCTIONS)}, got {op!r}")
        check_between_steps("session.reduce()", self.worker, self.step)
        self._before_exchange("session.reduce()")
        return self._values.reduce(value, op)

    def _before_exchange(self, call: str) -> None:
        if self._left:
            raise OffbeatError(f"{call} was called after worker {self.worker} had left the job")
        if self.is_newcomer and not (self._has_trained or self._source.has_begun):
            raise OffbeatError(
                f"{call} was called by worker {self.worker}, which has joined a running job, before its "
                "first batch: the other workers have made the calls before the loop already; skip them where "
                "session.is_newcomer is true"
            )
        has_rounds = self._synchronizer.step is not None
        if has_rounds and self._synchronizer.assigns_samples and self._source.is_between_epochs:
            raise OffbeatError(
                f"{call} was called between two epochs of session.epochs, of which the first may not be over "
                "for the workers that it would wait for, while they need this worker's next batch: use "
                'shards="equal", or session.loader, whose epochs end for all workers together'
            )
        self._end_step()

    def validate(self, evaluate: Evaluate, dataset: ValidationData, **options: Any) -> Validation:
        """Validate the epoch that ends now while the next one trains; all workers call it.

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
        """Make the session's validator, which the workers share, or one of its own for a single worker.

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
        if self._job.coordinator is None or not is_shared:
            return Validator(self._trained.model, evaluate, dataset, **options)
        return SharedValidator(
            self._trained.model,
            evaluate,
            dataset,
            client=self._job.coordinator,
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
        """Send an event to the coordinator, after the times of the steps since the last one."""
        self._job.send_event(event)

    # What the synchronizer calls -------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raise the job's failure, if there is one.

        Raises:
            WorkerError: names the worker that caused it.
        """
        self._job.raise_if_failed()

    def on_computed(self, wait_for_compute_s: Callable[[], float]) -> None:
        """Mark the batch as used; wait a multiple of the compute time where slowness is configured."""
        self._source.on_computed()
        if self._slowness is None:
            return
        try:
            factor = self._slowness.factor(
                self.worker // len(self.local_workers),
                self.epoch,
                self._source.step_in_epoch,
                self._position.batches_in_epoch,
                self._steps_taken,
            )
        except ValueError as error:
            raise OffbeatError(
                f"{error}; use session.batches, which provides it, instead of your own loader"
            ) from error
        if factor > 1:
            self._job.pause((factor - 1) * wait_for_compute_s())

    # The step --------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """End the step that is under way, and the epoch if its batches were taken ahead and are used."""
        self._hooks.end_step()
        self._source.end_epoch_if_over()

    def _on_step_end(self) -> None:
        step = self.step
        if (signal := self._signals.take()) is not None:  # not from its handler, which must not send
            self.send_event(Preempted(now_s=0.0, worker=self.worker, step=self._steps_taken, signal=signal))
        self._synchronizer.after_step()
        self._steps_taken += 1
        self._has_trained = True
        self._is_preempted |= self._synchronizer.is_preempted
        wall_s, parts_s = self.timer.lap()
        times = StepTimes(
            step=step,
            samples=self.samples,
            wall_s=wall_s,
            **{f"{part}_s": spent_s for part, spent_s in parts_s.items()},
        )
        self._means.add(times)
        self._job.queue_times(times)
        self._source.on_step_end()
        self._losses.clear()
        self._trace()

    # Saving and restoring --------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring model and optimizer state up to date with all workers' steps, up to this worker's step.

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
            raise outdated_state_error(self.worker)
        self._synchronizer.complete_state()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to continue: model, optimizers, and the position in the data.

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
        data = self._source.state_dict()
        return {
            "version": _STATE_VERSION,
            "model": self._trained.model.state_dict(),
            "optimizers": self._trained.optimizer_states(),
            "step": self.step,
            "synchronizer": self._synchronizer.state_dict(),
            **data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; every worker calls it before its loop, with the same state.

        In a newcomer this does nothing: it has the current state of the other workers already. The number
        of workers may differ from the saved one, except within an epoch that was split equally.

        Raises:
            OffbeatError: the state is of another version, or was saved within an epoch with another number
                of workers, or with samples assigned in another way.
        """
        _check_version(state)
        check_state(state, self.world, assigns_samples=self._synchronizer.assigns_samples)
        if self.is_newcomer:
            return
        self._trained.model.load_state_dict(state["model"])
        self._trained.load_optimizer_states(state["optimizers"])
        self._steps_taken = state["step"]
        self._synchronizer.load_state_dict(state.get("synchronizer", {}), state["step"])
        self._source.load_state_dict(state)

    def local_state_dict(self) -> dict[str, Any]:
        """Return what a run needs to continue that no other worker has: parts of gradients yet to be sent.

        Where gradients, or the pseudo-gradients of `DiLoCo`, are compressed, each worker adds to its next one
        what it did not send of those before. To continue with it, each worker saves this to a file of its
        own, at the step at which the leader saves `state_dict`; under `DiLoCo` at the end of an epoch.
        Without it, a continued run lacks these parts. Elsewhere, and on an excluded worker, there are none.
        Later steps change its tensors.

        Raises:
            WorkerError: the job failed, or a signal handler or a hook calls it within a step.
        """
        check_between_steps("session.local_state_dict()", self.worker, self.step)
        self._end_step()
        local = self._synchronizer.local_state_dict()
        return {"version": _STATE_VERSION, "step": self.step, "synchronizer": local}

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where this worker has saved `state`; after `load_state_dict`, before the loop.

        In a newcomer this does nothing, as `load_state_dict` does.

        Raises:
            OffbeatError: the state is of another version or model, or was not saved at this step.
        """
        _check_version(state)
        if self.is_newcomer:
            return
        if self._synchronizer.replicas_identical and state["step"] != self.step:
            raise OffbeatError(
                f"expected worker {self.worker}'s state of step {self.step}, got that of step "
                f"{state['step']}: load the state of the session first, saved at the same step"
            )
        self._synchronizer.load_local_state_dict(state["synchronizer"])


def _check_version(state: dict[str, Any]) -> None:
    if state.get("version") != _STATE_VERSION:
        raise OffbeatError(
            f"expected a session's state of version {_STATE_VERSION}, got {state.get('version')!r}"
        )


def _modules_with_parameters(model: nn.Module) -> list[nn.Module]:
    """Return the modules that directly own parameters that require a gradient."""
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
