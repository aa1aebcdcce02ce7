"""`join`: an existing training loop becomes one worker of a job, and is itself again afterwards."""

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
from offbeat.events import Evaluated, Event, Finished, Preempted, Saving, StepTimed
from offbeat.policies.data.block_scheduler import batches_in_words
from offbeat.policies.stragglers.injection import Slowness, parse
from offbeat.runtime.control.client import Member
from offbeat.runtime.control.coordinator import Configuration, PolicySpec
from offbeat.runtime.control.environment import Environment, of_thread, read_environment
from offbeat.runtime.control.rendezvous import Meeting, meet
from offbeat.runtime.data.assigned_batches import DealtBatches
from offbeat.runtime.data.equal_shards import EqualShards, epoch_order, load_batches
from offbeat.runtime.data.pairing import Pairing
from offbeat.runtime.processes.interrupts import check_between_steps
from offbeat.runtime.processes.preemption_signals import PreemptionSignals
from offbeat.runtime.training.checks import Watch, check_all_stepped, check_trainable, describe
from offbeat.runtime.training.hooks import ForwardHook, Hook
from offbeat.runtime.training.interface import Loop, Synchronizer
from offbeat.runtime.training.partial_step import out_of_inference_mode, plainly
from offbeat.runtime.training.state_copy import Place
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.trained import Trained
from offbeat.runtime.validation.evaluators import Evaluate
from offbeat.runtime.validation.parts import Data
from offbeat.runtime.validation.result import Validation
from offbeat.runtime.validation.shared_validator import SharedValidator
from offbeat.runtime.validation.validator import Validator

_STATE_VERSION = 2
_SILENT_S = 10.0
_STAY_S = 10.0  # at most, for others to finish, where nobody needs this worker any more
_COUNT_EVERY_S = 0.005
_SILENT_AND_TAKEN_BACK_S = 300.0
_VALIDATION = PolicySpec(path="offbeat.policies.validation.shared_schedule:SharedValidation")
_PREEMPTION = PolicySpec(path="offbeat.policies.membership.preemption:Preemption")
_joined: weakref.WeakSet[Optimizer | nn.Module] = weakref.WeakSet()


class Strategy(Protocol):
    """How a job is kept together; its constructor arguments are its whole configuration."""

    @property
    def deadline_s(self) -> float:
        """How long a worker may keep the others waiting, in seconds."""

    @property
    def survives(self) -> bool:
        """Whether the others go on when a worker is lost."""

    @property
    def takes_back(self) -> bool:
        """Whether nobody waits for a worker that falls silent, so that it may come back; else it is lost."""

    @property
    def shards(self) -> Literal["dynamic", "equal"]:
        """Whether samples are dealt as they are needed, or shared out before."""

    @property
    def needs_coordinator(self) -> bool:
        """Whether there is something to decide also where there is one worker."""

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """The policies that the coordinator asks, in order.

        Args:
            world: how many workers make up the job at its start.
            start_s: how long after the first the last one may come, in seconds.
            servers: of the parameter server, where the strategy has one.
        """

    def synchronizer(self, loop: Loop, trained: Trained) -> Synchronizer:
        """What keeps this worker's model in step with the others'."""


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

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun, Ray Train, Slurm or Kubeflow set them;
    with none of them set it is a world of one. With OFFBEAT_NEWCOMER=1 and the MASTER_ADDR and MASTER_PORT of
    a job that runs, this process becomes a new worker of that one, with the state that the others have and in
    the epoch in which they are. OFFBEAT_JOB, or torchrun's run id, keeps jobs apart that meet at one address.
    Else copies rank 0's parameters, buffers and optimizer state to
    everybody. Puts hooks on the model and the optimizer: after `backward()` the gradients are the mean
    over the workers. Leaving the `with` block takes the hooks off again.

    Args:
        model: what is trained; the same architecture on every worker, on one device.
        optimizer: steps the model's parameters; or several that do, each some of them. A step is over when
            each of them has stepped, or when the model is called again after some have.
        strategy: how the workers keep together, equal on every worker.
        run_log: where rank 0's coordinator writes the run log; by default where the launcher said, if it did.
        run_log_bytes_max: what the log may take, at least 1 MiB: it is written in parts then, of which the
            oldest are removed. By default what the launcher said; without that, one file without a bound.
        thread, threads: with a parameter server, a process may have several worker threads, each with a
            model, an optimizer and a loop of its own: which one this is, from 0, and how many each process
            has.

    Returns:
        The session, to be used in a `with` statement.

    Raises:
        OffbeatError: model, optimizer or environment are not fit for it; says what to do.
        WorkerError: the job did not come together within 30 s (or OFFBEAT_START_S); names who is missing or
            differs. Or it takes no newcomers, or not this one; says why.
    """
    environment = read_environment()
    if run_log is not None:
        environment = replace(environment, run_log=os.path.abspath(run_log))
    if run_log_bytes_max is not None:
        environment = replace(environment, run_log_bytes_max=run_log_bytes_max)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    with plainly():
        return Session(Trained(model, optimizers), strategy, of_thread(environment, thread, threads))


class Session:
    """One worker's part in a job, from `join` until the `with` block ends.

    Attributes:
        worker: this worker's id.
        world: how many workers the job started with.
        epoch: the epoch under way, from 0.
        is_newcomer: this worker came when the job was running.
        threads: the workers of this process, this one among them.
        servers: how many the parameter server begins with, where the strategy has one.
        timer: splits the wall time into parts.
        samples: taken from `batches` since the last optimizer step.
        tracer: takes note of what happens when, in the steps that OFFBEAT_TRACE names.
        validator: validates for `validate`, from its first call on; None before.
    """

    def __init__(
        self,
        trained: Trained,
        strategy: Strategy,
        environment: Environment,
    ) -> None:
        check_trainable(trained)
        if strategy.survives:
            check_all_stepped(trained)
        self._joins: list[Optimizer | nn.Module] = [*trained.optimizers, *_trained_parts(trained.model)]
        if not _joined.isdisjoint(self._joins):
            raise OffbeatError(
                "this optimizer, or a part of this model, is in a session already: leave that one before you "
                "join again"
            )
        self.worker, self.world = environment.rank, environment.world
        self.is_newcomer, self.threads = environment.is_newcomer, environment.threads
        self.servers = environment.servers
        self.epoch = 0
        self._steps_taken = 0  # by this worker's own count, also where no group counts on it
        self.timer = PartTimer(time.perf_counter)
        self.tracer: Tracer | None = None
        self._trained, self._strategy = trained, strategy
        self._stepped: set[Optimizer] = set()  # since the last step was over
        self._seed, self._start_s = environment.seed, environment.start_s
        self._is_dealing = False
        self._slowness = _read_slowness(environment)
        self._pairing = Pairing(lambda batch, left_out: self._synchronizer.batch_of_round(batch, left_out))
        self._batches_used = 0  # in the epoch, by the last step
        self._batches_in_epoch: int | None = None
        self._samples_in_epoch = self._batch_size = 0
        self._drop_last = False
        self._joined_at: Place | None = None  # a newcomer, until it has begun its first epoch
        # By epoch: ranges of positions that the state has used that was loaded.
        self._used: dict[int, tuple[tuple[int, int], ...]] = {}
        self._samples_loaded = 0  # in an epoch, when that was saved
        self._is_used_up = False  # the epoch's batches
        self._last_epoch: int | None = None
        self._has_given_up = False  # the rest of the epoch before
        self.samples = 0
        self._losses: list[float] = []
        self._timed: list[StepTimed] = []  # told with the next event, to spare messages
        self._left = False
        self._pid = os.getpid()
        self._signals = PreemptionSignals()
        self._has_told_signal = self._is_preempted = self._has_seen_preemption = False
        self.validator: Validator | None = None
        self._validated_with: tuple[Any, ...] = ()
        self._meeting: Meeting | None = None
        self._member: Member | None = None
        self._synchronizer = strategy.synchronizer(self, trained)
        self._silent_s = _SILENT_AND_TAKEN_BACK_S if strategy.takes_back else _SILENT_S
        self._handles: list[RemovableHandle] = []
        try:
            self._enter(environment)
        except BaseException as error:
            if self._meeting is not None and self._member is None:
                self._meeting.tell_failure(error)
            self._leave(error)
            if self._meeting is not None and isinstance(error, OffbeatError):
                self._meeting.outlast_the_late()
            raise
        self._meeting = None
        _joined.update(self._joins)

    # Coming and going ----------------------------------------------------------------------------------

    def _enter(self, environment: Environment) -> None:
        has_log = environment.run_log is not None
        if self.world > 1 or has_log or self.is_newcomer or self._strategy.needs_coordinator:
            meeting = self._meeting = meet(environment, partial(self._configure, environment))
            self.worker, self.world = meeting.worker, meeting.world
            if self.is_newcomer:
                self.threads = (self.worker,)
            self._member = Member(
                meeting,
                self.worker,
                self._abandon,
                step=lambda: self.step,
                survives=self._strategy.survives,
                silent_s=self._silent_s,
            )
            self._member.join(
                world=self.world,
                place=f"{socket.gethostname()}, process {os.getpid()}",
                model=describe(self._trained),
                strategy=str(self._strategy),
            )
            if self.worker == 0:
                meeting.announce()
        self._synchronizer.enter(self._member, self._meeting)
        if self.is_newcomer:
            self._steps_taken = self.step
        self._watch = Watch(self._trained)
        hook = ForwardHook(self._before_forward)  # before those of the synchronizer, to which a step begins
        self._handles.append(self._trained.model.register_forward_pre_hook(hook))
        self._synchronizer.attach()
        self._handles += [
            handle
            for optimizer in self._trained.optimizers
            for handle in (
                optimizer.register_step_pre_hook(Hook(self._before_step)),
                optimizer.register_step_post_hook(Hook(self._after_step)),
            )
        ]
        self.timer.lap()
        if environment.trace is not None:
            folder, first_step = environment.trace
            self.tracer = Tracer(folder, self.worker, first_step)
            self.timer.on_part = partial(self.tracer.add, "loop")
            self._trace()

    def _trace(self) -> None:
        """A step begins."""
        if self.tracer is None:
            return
        was_on = self.tracer.is_on
        self.tracer.step(self.step)
        if self.tracer.is_on and not was_on and self._member is not None:
            self._member.endpoint.call(self._count_bytes)

    def _count_bytes(self) -> None:
        assert self.tracer is not None
        assert self._member is not None
        self.tracer.count(self._member.endpoint.bytes_sent)
        if self.tracer.is_on:
            self._member.endpoint.later(_COUNT_EVERY_S, self._count_bytes)

    def _configure(self, environment: Environment, job: str, token: str, host: str) -> Configuration:
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
        return Configuration(
            job=job,
            token=token,
            host=host,
            policies=policies,
            log_path=None if log is None else os.path.abspath(log),
            log_bytes_max=environment.run_log_bytes_max,
            about=about,
            silent_s=self._silent_s,
            stay_s=self._start_s,
        )

    def place(self, round_: int) -> Place:
        """Where in the training the state belongs that this worker has."""
        return Place(
            round=round_,
            epoch=self.epoch,
            seed=self._seed,
            samples=self._samples_in_epoch,
            batch_size=self._batch_size,
            drop_last=self._drop_last,
        )

    def take_place(self, place: Place) -> None:
        """Goes on where another worker's state belongs."""
        self.epoch, self._seed = place.epoch, place.seed
        self._joined_at = place

    @property
    def step(self) -> int:
        """Optimizer steps finished, by the group where this worker belongs to one."""
        step = self._synchronizer.step
        return self._steps_taken if step is None else step

    @property
    def batch(self) -> int:
        """The batch of the epoch under way that training has come to, of those from `batches`, from 1."""
        return self._pairing.batch

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that train with one another now; this one is not always among them."""
        return self._synchronizer.members

    @property
    def leads(self) -> bool:
        """Whether this worker is the one to evaluate, print and save for all."""
        return self._synchronizer.leads

    @property
    def preempted(self) -> bool:
        """Whether a worker's process will soon be taken away: SIGTERM or SIGUSR1 has reached it.

        The first time that it is read, in the main thread, it installs handlers of these signals, which
        take note, and then run those that were there before; on leaving the session these are put back. Read
        it after every optimizer step, on all workers alike:

            optimizer.step()
            if session.preempted:
                if session.leads:
                    torch.save(session.state_dict(), path)
                break

        `epochs` ends, too, once it was seen to be true. It changes as an optimizer step ends, and stays true:

        - where gradients are averaged, as the same step ends for all members of the group, which is the step
          in whose exchange the first of them told of the signal. Under `Hybrid` the step after that one:
          what is told there arrives along with what is put off. A member whose exchange was broken off by
          the loss of another one may see it one step later.
        - for a worker that is left out of the group, as a step of its own ends, soon; when it is back, or is
          a newcomer, with its first step at the latest.
        - on a parameter server with a bound on staleness, as each worker ends its last step at the latest
          clock that was under way when the coordinator heard of the signal, so that all stop at the same
          clock. One that waits for samples then may take another step.
        - on a parameter server without a bound, as each worker ends its next step after that.
        - in a world of one, as the step ends in which the signal has come.

        A worker that ends its step tells of its signal then; while it waits for others it does not end, and
        goes on waiting. A worker whose session is not in its process's main thread hears no signals of its
        own.
        """
        if not self._left:
            self._signals.install()
        self._has_seen_preemption |= self._is_preempted
        return self._is_preempted

    @property
    def is_signalled(self) -> bool:
        """Whether this worker knows of a preemption signal, its own or another's; not all know at once."""
        hears = self._member is not None and self._member.preempt is not None
        return self._signals.name is not None or hears

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Takes the hooks off and says goodbye to the others; again is harmless.

        Args:
            error: why, where this worker leaves because it failed; the others then end naming it.

        Raises:
            WorkerError: a signal handler or a hook calls it in the midst of a step.
        """
        if not self._left:
            check_between_steps("session.leave()", self.worker, self.step)
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if self._left or os.getpid() != self._pid:  # a forked process leaves its parent's session alone
            return
        self._left = True
        if error is None:
            self._finish()
        if self._member is not None:
            has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
            self._member.tell_end(error if has_failed else None, *self._timed)
        self._disband()

    def _finish(self) -> None:
        """Gives what is still to be given, and stays for those who may still need this worker."""
        try:
            self._end_step()
            self._synchronizer.flush()
            self._wait_for_the_others()
            if self.validator is not None:
                self.validator.finish()
        except BaseException as error:
            self._left = False
            self._leave(error)
            raise

    def _wait_for_the_others(self) -> None:
        """Stays until everybody has finished.

        Who is behind takes the final state from who is not. In lockstep nobody is, unless workers have had
        different numbers of batches; whoever had fewer hears of it if it stays a little.
        """
        is_alone = self.world == 1 and not self._strategy.needs_coordinator
        if is_alone or self._member is None:
            return
        if self._member.has_raised and not self._strategy.survives:
            return  # the program has caught that, and leaves in order
        epoch = max(0, self.epoch - 1) if self._batches_in_epoch is None else self.epoch
        self.tell(Finished(now_s=0.0, worker=self.worker, epoch=epoch, step=self.step))
        if not self._strategy.survives:
            until_s = time.monotonic() + _STAY_S
            self._member.wait_for(
                lambda: self._dismissed() or time.monotonic() >= until_s, 2 * _STAY_S, "everybody to finish"
            )
            return
        self._synchronizer.finish()
        what = "everybody to finish"
        self._member.wait_for(self._dismissed, self._strategy.deadline_s, what)
        self._synchronizer.settle()

    def _dismissed(self) -> bool:
        return self._member is not None and self._member.is_dismissed

    def _disband(self) -> None:
        if self.validator is not None:
            self.validator.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _joined.difference_update(self._joins)
        self._signals.restore()
        if self.tracer is not None:
            self.tracer.close()
        try:
            self._synchronizer.detach()
        finally:
            if self._member is not None:
                self._member.close()

    def _abandon(self, error: WorkerError) -> None:
        self._synchronizer.abandon(error)
        if isinstance(self.validator, SharedValidator):
            self.validator.abandon(error)

    # The loop ------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the first unfinished one to `count` - 1, or until `validate` says stop.

        Also ends where all others have finished, for who came when they had stopped, and where `preempted`
        was seen to be true.
        """
        self._last_epoch = count - 1
        while self.epoch < count and not self._is_to_stop():
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                self._finish_epoch()

    def _is_to_stop(self) -> bool:
        has_stopped = self.validator is not None and self.validator.stopped
        return has_stopped or self._dismissed() or self._has_seen_preemption

    def _finish_epoch(self) -> None:
        self.epoch += 1
        self._pairing.begin(0)
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
        """Yields this worker's batches of the current epoch; over all workers each sample comes once.

        Where the strategy deals samples as they are needed, a worker gets as many as it has time for, and
        what a lost one had goes to others; one that is left out, or that others wait for at the end, gets a
        batch that it had before, which counts for nothing. Else every worker gets the same number of batches,
        and which samples they hold depends on the seed and the epoch alone.

        The last batches of an epoch may be smaller. With a batch size of 2 or more and at least two samples a
        worker none holds a single sample, with which BatchNorm cannot train; for that, what is left over may
        join batches of 2 or 3, which then hold up to two more.

        A batch may be left out, with `continue` before the backward pass: where its loss is not finite, say.
        Where all take part in every round, the others use theirs, and this worker takes the same step with
        the batch that follows, or, at the epoch's end, with one that it has used: it counts for nothing there
        and comes again. Where all workers leave the same batch out, there is no step.

        A batch that is smaller than others counts for less in the mean; which one a backward pass belongs to
        is taken to be the last one that was taken, so do not take batches ahead. A loop that breaks off gives
        up the rest of the epoch. Where samples are dealt as they are needed, workers may get one batch more
        or less than others: a loop that takes a step every few batches wants `no_sync`, or shards="equal".

        Args:
            dataset: map-style, the same on every worker.
            batch_size: samples in this worker's batch, the same on every worker.
            shuffle: draw a new order every epoch.
            drop_last: every batch holds `batch_size` samples. The end of the epoch's order that does not fill
                a batch of each worker is left out; where samples are dealt as they are needed, what does not
                fill one batch. So with `shuffle` other samples are left out every epoch.
            loader_options: for torch's DataLoader, such as `num_workers` or `collate_fn`.

        Raises:
            ValueError: fewer samples than workers, or with `drop_last` than a batch each, or a batch size
                below 1.
            OffbeatError: the data set has no length, an option is the session's own to decide, or the epoch's
                batches are being dealt already or are used up.
        """
        if not hasattr(dataset, "__len__"):
            raise OffbeatError(
                "session.batches needs a data set with a length; for an iterable one use your own loader, "
                "with the same number of batches on every worker"
            )
        if self._is_dealing:
            raise OffbeatError("session.batches is being iterated already: finish that one first")
        if self._is_used_up:
            raise OffbeatError(
                f"the samples of epoch {self.epoch} are used up: begin the next one with session.epochs"
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
        taken = (
            self._dealt(dataset, batch_size, shuffle, drop_last, loader_options)
            if self._synchronizer.deals
            else self._shared_out(dataset, shards, loader_options)
        )
        self._is_dealing = True
        try:
            self._begin_batch()
            for batch, samples in self._pairing.each(taken):
                self.check()
                before = self.samples
                self.samples += samples
                self._synchronizer.weigh(samples / batch_size)
                self.timer.switch("compute")
                yield batch
                self._begin_batch()
                if not self._pairing.is_used:
                    self.samples = before
            self.check()
            self._is_used_up = True
        finally:
            self._is_dealing = False
            self._synchronizer.weigh(1.0)
            self.timer.switch("other")
            if not self._is_used_up:
                self._give_up_the_rest()

    def _begin_batch(self) -> None:
        self._end_step()
        self.timer.switch("batch")

    def _check_data(self, samples: int, batch_size: int, drop_last: bool) -> None:
        """Fails a worker that has other data than what it goes on from, before anybody hears of its own."""
        if self._used.get(self.epoch) and samples != self._samples_loaded:
            raise OffbeatError(
                f"the state was taken in the middle of an epoch of {self._samples_loaded} samples, and the "
                f"data set has {samples}: use the same one, or a state from an epoch's end"
            )
        place, self._joined_at = self._joined_at, None
        if place is None or not place.samples or place.epoch != self.epoch:
            return
        if (samples, batch_size, drop_last) != (place.samples, place.batch_size, place.drop_last):
            theirs = batches_in_words(place.batch_size, place.drop_last)
            own = batches_in_words(batch_size, drop_last)
            raise OffbeatError(
                f"expected the data of the job that worker {self.worker} joins, {place.samples} samples in "
                f"batches of {theirs}, got {samples} in batches of {own}: start newcomers with the same data "
                "set, batch size and drop_last"
            )

    def _shared_out(
        self, dataset: Dataset[Any], shards: EqualShards, loader_options: dict[str, Any]
    ) -> Iterator[tuple[Any, int]]:
        """Yields this worker's equal part, with sizes."""
        indices = shards.batches(self.worker)[self._pairing.taken :]
        seed = (self._seed, self.epoch, self.worker)
        loaded = load_batches(dataset, indices, seed=seed, loader_options=loader_options)
        for taken in indices:
            if self._member is not None and self._member.epochs_ended > self.epoch:
                break
            yield next(loaded), len(taken)

    def _dealt(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        loader_options: dict[str, Any],
    ) -> Iterator[tuple[Any, int]]:
        """Yields what this worker is dealt, with sizes."""
        assert self._member is not None
        samples = len(dataset)  # type: ignore[arg-type]
        dealt = DealtBatches(
            self._member,
            lambda epoch: epoch_order(samples, seed=self._seed, epoch=epoch, shuffle=shuffle),
            dataset,
            batch_size,
            drop_last=drop_last,
            epoch=self.epoch,
            loader_options=loader_options,
            seed=(self._seed, self.epoch, self.worker),
            is_last=self._last_epoch is None or self.epoch >= self._last_epoch,
            skips=self._has_given_up,
            used=self._used.get(self.epoch, ()),
            late=self._synchronizer.late,
            is_clear=lambda: self._synchronizer.is_clear,
            blocks_per_round=self._synchronizer.blocks_per_round,
            deadline_s=self._strategy.deadline_s,
        )
        self._has_given_up = False
        return iter(dealt)

    def _give_up_the_rest(self) -> None:
        """The loop has left the epoch early."""
        if self._synchronizer.deals and self._member is not None:
            self._has_given_up = True
            with self._member.lock:
                self._member.hand.throw_away()
                self._synchronizer.give_up_the_rest()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate gradients; the next one outside exchanges them all.

        Accumulation is right without it too, at the price of an exchange a backward pass.
        """
        return self._synchronizer.quiet()

    def observe(self, loss: float | Tensor) -> None:
        """Says the mean training loss of a batch, or its accuracy, for strategies that go by it.

        Args:
            loss: a number, or a tensor that holds one.
        """
        self._losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def take_loss(self) -> float | None:
        """The mean of what was observed since the last call, None where that is nothing."""
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None

    def report(self, **metrics: float) -> None:
        """Puts numbers about the current epoch (accuracy, loss, …) into the run log."""
        plain = {name: float(value) for name, value in metrics.items()}
        self.tell(Evaluated(now_s=0.0, worker=self.worker, epoch=self.epoch, metrics=plain))

    def validate(self, evaluate: Evaluate, dataset: Data, **options: Any) -> Validation:
        """Has the epoch validated that ends now, while the next one trains; all workers call it.

        With several workers each evaluates the parts of the set that it is dealt, as many as it has time for,
        with the same snapshot of the model; all get the metrics of the whole set. No exchange of the training
        is used. Leaving the session waits for what is under way.

        Args:
            evaluate, dataset: see `Validator`; the same, and the same options, at every epoch.
            options: of `Validator`. With several workers "auto" is "thread"; metrics are means and counts;
                metrics are acted on once `max_pending` + 1 further epochs have been validated, by all workers
                at the same point; "skip" is refused. "rollback" is for early stopping alone, and for
                strategies that leave nobody out.

        Returns:
            What will come of it. `session.validator` has the history, `stopped` and the best snapshot;
            `session.epochs` ends when a monitor says that it is time to stop.

        Raises:
            ValueError: an option out of range, or one that does not go with several workers.
            OffbeatError: what is given is not fit for it, or another than at the last epoch.
            WorkerError: the job failed, or a signal handler or a hook calls it in the midst of a step.
            Exception: what `evaluate` raised for an earlier epoch.
        """
        check_between_steps("session.validate()", self.worker, self.step)
        given = (evaluate, dataset, options)
        if self.validator is None:
            self.validator = self._validator(evaluate, dataset, options)
            self._validated_with = given
        same = self._validated_with
        if evaluate != same[0] or dataset is not same[1] or options != same[2]:
            raise OffbeatError(
                "expected session.validate to be called with the same evaluate, data set and options at "
                "every epoch, got others: make them before the loop"
            )
        self.check()
        self._end_step()
        if self._is_validated_with():
            self._synchronizer.refresh()
        return self.validator.validate(self.epoch)

    def _validator(self, evaluate: Evaluate, dataset: Data, options: dict[str, Any]) -> Validator:
        common = self._synchronizer.is_common
        if options.get("decision") == "rollback" and options.get("plateau") is not None:
            raise ValueError(
                "expected a decision of sync or lag with a plateau in a session, got 'rollback': an epoch "
                "whose samples were dealt is not dealt again"
            )
        is_shared = self.world > 1 or self.is_newcomer or self._strategy.survives
        if self._member is None or not is_shared:
            return Validator(self._trained.model, evaluate, dataset, **options)
        return SharedValidator(
            self._trained.model,
            evaluate,
            dataset,
            member=self._member,
            is_current=self._is_validated_with,
            goes_back=common and not self._strategy.survives,
            has_rates=common,
            is_alone=len(self.threads) == 1,
            **options,
        )

    def _is_validated_with(self) -> bool:
        """Whether this worker's model is one to validate with: the others', or that of the one that leads."""
        one = self._synchronizer
        return one.is_current if one.is_common else one.leads

    @property
    def traffic(self) -> Mapping[str, float]:
        """What has gone between this process, all its worker threads together, and a parameter server.

        `pulls_count` and `pulled_bytes` are parameters that a step waited for, `traffic_bytes` all that was
        sent and received; empty without a parameter server.
        """
        return self._synchronizer.traffic

    def tell(self, event: Event) -> None:
        """Tells the coordinator, together with where the time of steps went."""
        if self._member is not None:
            self._member.tell(*self._timed, event)
            self._timed.clear()

    # What the synchronizer asks for ------------------------------------------------------------------------

    def check(self) -> None:
        """Raises the job's failure, if there is one.

        Raises:
            WorkerError: names the worker that caused it.
        """
        if self._member is not None:
            self._member.check()

    def computed(self, compute_s: float) -> None:
        """Makes this worker as slow as it was told to be, by waiting a multiple of what it computed."""
        self._pairing.is_used = True
        if self._slowness is None:
            return
        try:
            factor = self._slowness.factor(
                self.worker // len(self.threads),
                self.epoch,
                self._step_in_epoch(),
                self._batches_in_epoch,
                self._steps_taken,
            )
        except ValueError as error:
            raise OffbeatError(f"{error}; session.batches knows it, your own loader does not") from error
        if factor > 1 and self._member is not None:
            self._member.pause((factor - 1) * compute_s)
        elif factor > 1:
            time.sleep((factor - 1) * compute_s)

    def _step_in_epoch(self) -> int:
        """How far the epoch is, in steps of all workers; by what all have done where samples are dealt."""
        if not self._synchronizer.deals or self._batches_in_epoch is None or self._member is None:
            return max(0, self._pairing.batch - 1)
        return self._member.hand.used * self._batches_in_epoch // self._samples_in_epoch

    @out_of_inference_mode
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.check()
        self._watch.check()
        if torch._C._current_graph_task_id() != -1:
            raise OffbeatError(
                "expected optimizer.step() after the backward pass, got it within one, before gradients are "
                "averaged: take the step when backward() has returned"
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
        if self._is_dealing and self._pairing.begins_to_stand_in():
            self.samples = 0
            self._synchronizer.weigh(0)

    def _end_step(self) -> None:
        """Ends the step under way, if an optimizer has stepped."""
        if not self._stepped:
            return
        self._stepped.clear()
        step = self.step
        self._tell_signal()
        self._synchronizer.after_step()
        self._steps_taken += 1
        self._pairing.is_used = True
        self._batches_used = self._pairing.batch
        self._is_preempted |= self._synchronizer.is_preempted
        wall_s, parts_s = self.timer.lap()
        if self._member is not None:
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

    def _tell_signal(self) -> None:
        """Tells the coordinator of a signal that has come; here, for in a handler nothing may be told."""
        if self._signals.name is not None and not self._has_told_signal:
            self._has_told_signal = True
            self.tell(
                Preempted(now_s=0.0, worker=self.worker, step=self._steps_taken, signal=self._signals.name)
            )

    # Saving and restoring ------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Makes model and optimizer state what all workers have made of them, up to where this worker is.

        Call it before evaluating or saving the model in the midst of training on a parameter server, where a
        worker's own copy lacks the others' latest steps. It waits for those who are behind, and what it
        fetches goes up to the clock of this worker's next step. Under `Hybrid` it takes what is put off of
        the last step. Else, and after training, the model is that already. `state_dict` calls it.

        Raises:
            OffbeatError: this worker is left out of the group, so that its parameters are old ones.
            WorkerError: the job failed, or a signal handler or a hook calls it in the midst of a step.
        """
        check_between_steps("session.refresh()", self.worker, self.step)
        self._refresh()

    def _refresh(self) -> None:
        self._end_step()
        if not self._synchronizer.is_current:
            raise OffbeatError(self._why_old())
        self._synchronizer.refresh()

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on: model, optimizer, and where in the data it is.

        Call it between optimizer steps, on the worker that `leads`: that of every other member is the same
        but for the order of the bytes on disk. It is the state of the last finished step: of a batch that was
        taken since it knows nothing. To save when a signal comes, read `preempted`.

        Raises:
            OffbeatError: this worker is left out of the group, so that its parameters are old ones.
            WorkerError: the job failed, or a signal handler or a hook calls it in the midst of a step.
        """
        check_between_steps("session.state_dict()", self.worker, self.step)
        self._refresh()
        whole = self._is_used_up or self._batches_used == self._batches_in_epoch
        if self._synchronizer.deals:
            epoch, used = self._ask_what_is_used()
            taken = 0
        else:
            epoch, used, taken = self.epoch + whole, {}, 0 if whole else self._batches_used
        return {
            "version": _STATE_VERSION,
            "model": self._trained.model.state_dict(),
            "optimizers": self._trained.optimizers_state(),
            "epoch": epoch,
            "batches_taken": taken,
            "used": {str(epoch): list(map(list, ranges)) for epoch, ranges in used.items()},
            "samples": self._samples_in_epoch or self._samples_loaded,
            "step": self.step,
            "seed": self._seed,
            "world": self.world,
        }

    def _ask_what_is_used(self) -> tuple[int, dict[int, tuple[tuple[int, int], ...]]]:
        """The epoch in which the state is, and which positions of that and later ones it has used."""
        assert self._member is not None
        if self._member.hand.epoch < 0:  # nothing since the start
            return self.epoch, self._used
        member, round_ = self._member, self._synchronizer.round

        def has_heard() -> bool:
            return member.used is not None and member.used.round == round_

        member.used = None
        self.tell(Saving(now_s=0.0, worker=self.worker, round=round_))
        what = "the coordinator to say which samples the state holds"
        member.wait_for(has_heard, self._strategy.deadline_s, what)
        assert member.used is not None
        if not member.used.is_current:
            raise OffbeatError(self._why_old())
        return member.used.epoch, dict(member.used.used)

    def _why_old(self) -> str:
        return (
            f"worker {self.worker} is left out of the group, and its parameters are old ones: save on the "
            "worker on which session.leads is true"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; every worker calls it before its loop, with the same state.

        In a newcomer this does nothing: it has taken the state that the others have now. There may be
        another number of workers than there was, except in the middle of an epoch that was shared out
        equally.

        Raises:
            OffbeatError: the state is of another version, or in the middle of an epoch with another number
                of workers, or with samples that were dealt in another way.
        """
        if state.get("version") != _STATE_VERSION:
            raise OffbeatError(
                f"expected a session's state of version {_STATE_VERSION}, got {state.get('version')!r}"
            )
        if state["batches_taken"] and state["world"] != self.world:
            raise OffbeatError(
                f"the state was taken in the middle of an epoch with {state['world']} workers and there are "
                f"{self.world} now: use as many, or a state from an epoch's end"
            )
        if (state["batches_taken"] and self._synchronizer.deals) or (
            any(state["used"].values()) and not self._synchronizer.deals
        ):
            how = "shared out equally" if self._synchronizer.deals else "dealt as they were needed"
            raise OffbeatError(
                f"the state was taken in the middle of an epoch whose samples were {how}: use a strategy "
                "that does the same, or a state from an epoch's end"
            )
        if self.is_newcomer:
            return
        self._trained.model.load_state_dict(state["model"])
        self._trained.load_optimizers_state(state["optimizers"])
        self.epoch = state["epoch"]
        self._steps_taken = state["step"]
        self._synchronizer.resume(state["step"])
        self._batches_used = state["batches_taken"]
        self._pairing.begin(self._batches_used)
        self._seed = state["seed"]
        self._used = {
            int(epoch): tuple((start, stop) for start, stop in ranges)
            for epoch, ranges in state["used"].items()
        }
        self._samples_loaded = state["samples"]


def _trained_parts(model: nn.Module) -> list[nn.Module]:
    """The modules that have parameters of their own that require a gradient."""
    return [
        module
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def _read_slowness(environment: Environment) -> Slowness | None:
    if not environment.slow or environment.is_newcomer:  # which no rule can name
        return None
    try:
        rules = [parse(text) for text in environment.slow]
        processes = environment.world // len(environment.threads)
        return Slowness(rules, workers=processes, seed=environment.seed)
    except ValueError as error:
        raise OffbeatError(str(error)) from error
