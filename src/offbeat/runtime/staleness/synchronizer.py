"""Training on a parameter server: one worker thread's side of bounded staleness.

A step computes on the thread's own copy of the model. Its gradients go to the servers, whose optimizer makes
the step that counts; the thread's own optimizer makes one on its copy, so that it sees its own updates before
the servers' (*read my writes*). The coordinator grants every step, and says how old the parameters may be
that it reads. Nothing here decides that.
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
from offbeat.events import Clocked, Grant
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.tables import Aggregate
from offbeat.numerics.ps.tensors import Offsets
from offbeat.numerics.ps.translation import settings_of, states_of, take_states, translate
from offbeat.policies.staleness.caches import CacheDirectory, Terms
from offbeat.runtime.control.client import Member
from offbeat.runtime.control.rendezvous import Meeting
from offbeat.runtime.data.late_gradients import LateGradients
from offbeat.runtime.ps.future import Future
from offbeat.runtime.staleness.process import Process
from offbeat.runtime.staleness.shared_model import Gradient, GroupGradient, Row, ServedModel
from offbeat.runtime.training.checks import Forms, check_apart
from offbeat.runtime.training.hooks import ForwardHook, Scripting
from offbeat.runtime.training.interface import Loop
from offbeat.runtime.training.trained import Trained
from offbeat.runtime.training.writes import Writes

Array = NDArray[Any]


class ServerSynchronizer:
    """A worker that trains on a parameter server; see `Synchronizer`.

    Source: the second paper, section 3 (SSP and its caches); specification 2.1 to 2.6. Deviations: buffers
    and frozen parameters are the worker's own, those of the first worker to begin with. Where the servers
    take one step of the mean, a local step is a whole one all the same: until they have taken theirs, it
    stands for what the others do as well. (As this worker's share of the mean alone it leaves parameters
    behind by the bound, at which Adam hardly learns.)

    Args:
        loop: the worker's session.
        trained: what is trained.
        terms: how.

    Raises:
        OffbeatError: an optimizer that servers cannot take the place of, or parameters that they cannot keep.
    """

    def __init__(self, loop: Loop, trained: Trained, *, terms: Terms) -> None:
        self._loop, self._trained, self._terms = loop, trained, terms
        self._model = trained.model
        self._optimizers = trained.optimizer_of_group  # and so on, each by group
        try:
            self._updates = [
                translate(group, type(optimizer))
                for group, optimizer in zip(trained.groups, self._optimizers, strict=True)
            ]
            self._groups = [
                {name: one for name, one in trained.parameters_of(group).items() if one.requires_grad}
                for group in trained.groups
            ]
            self._offsets = [Offsets.of(group.items()) for group in self._groups]
        except ValueError as error:
            raise OffbeatError(str(error)) from error
        self._check_disjoint()
        self._writes = Writes(trained)
        self._forms = Forms(trained.model)
        self._handles: list[RemovableHandle | Scripting] = []
        self._has_begun = self._is_open = False  # the job for this worker; a step that may compute
        self._is_reporting = False  # a step is done, and the answer to that is still to come
        self._own: list[Sequence[Array]] = []  # of each update in this thread's log: what it has added
        self._waiting: list[tuple[Gradient, Sequence[Array]]] = []  # steps whose gradients are not pushed yet
        self._fetch: Future | None = None
        self._last_push: Future | None = None
        self._before: Sequence[Array] | None = None
        # Of the groups that this step has stepped so far: gradients, and the ranges where there are none.
        self._packed: dict[int, tuple[Array, frozenset[tuple[int, int]]]] = {}
        self._has_gradient = False  # one of these is of a backward pass, not zero for want of one
        self._weight = 1.0  # of the batch that was taken last
        self._weights: list[float] = []  # of each forward pass since the last step
        # Gradients before a pass that does not count, by parameter:
        self._kept: dict[torch.Tensor, torch.Tensor | None] = {}
        self._compute_s = self._compute_mark_s = 0.0
        self._steps = 0
        self._clock: int | None = None
        self._read_version = self._fetched = 0

    def _check_disjoint(self) -> None:
        """Refuses parameters that are not one number for each of a server's: each is stepped there once."""
        names = [self._trained.name_of(one) for group in self._trained.groups for one in group["params"]]
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise OffbeatError(
                f"{twice} is in several of the optimizers, or in one of them several times: servers keep "
                "each parameter with one of them, once"
            )
        check_apart({name: one for group in self._groups for name, one in group.items()})

    def _check_writes(self, optimizer: Optimizer | None = None) -> None:
        """Refuses what the program has written to its copy, which the servers' state replaces."""
        if self._has_begun and (found := self._writes.found(optimizer)):
            raise OffbeatError(
                f"the program has changed {found[0]} ({len(found)} such changes), and on a parameter server "
                "that would be lost: the servers' state counts. Change it before the first step, or use a "
                "strategy without servers"
            )

    # What a session asks ---------------------------------------------------------------------------------

    @property
    def deals(self) -> bool:
        """See `Synchronizer.deals`."""
        return self._terms.is_dealt

    @property
    def step(self) -> int | None:
        """See `Synchronizer.step`."""
        return None

    @property
    def round(self) -> int:
        """See `Synchronizer.round`: of what `refresh` has fetched."""
        return self._fetched

    @property
    def members(self) -> tuple[int, ...]:
        """See `Synchronizer.members`."""
        return tuple(range(self._loop.world))

    @property
    def leads(self) -> bool:
        """See `Synchronizer.leads`."""
        grant = self._member.grant
        return self._loop.worker == 0 if grant is None else grant.leads

    @property
    def is_current(self) -> bool:
        """See `Synchronizer.is_current`."""
        return True

    @property
    def is_common(self) -> bool:
        """See `Synchronizer.is_common`."""
        return False

    @property
    def is_preempted(self) -> bool:
        """See `Synchronizer.is_preempted`."""
        grant = self._member.grant
        return grant is not None and grant.is_preempted

    @property
    def late(self) -> LateGradients | None:
        """See `Synchronizer.late`."""
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
    def is_clear(self) -> bool:
        """See `Synchronizer.is_clear`."""
        return not self._is_open

    def batch_of_round(self, batch: int, left_out: int) -> int:
        """See `Synchronizer.batch_of_round`: a step is of whatever its worker has computed."""
        return batch

    def quiet(self) -> AbstractContextManager[None]:
        """See `Synchronizer.quiet`."""
        return nullcontext()

    def give_up_the_rest(self) -> None:
        """See `Synchronizer.give_up_the_rest`: a step that has begun begins anew, for its clock may pass."""
        self._is_open = False
        self._forget_gradients()

    def abandon(self, error: Exception) -> None:
        """See `Synchronizer.abandon`; all waiting looks for the job's failure by itself."""

    # Coming and going ------------------------------------------------------------------------------------

    def enter(self, member: Member | None, meeting: Meeting | None) -> None:
        """See `Synchronizer.enter`."""
        assert member is not None
        assert meeting is not None
        self._member = member
        member.on_grant = self._hear
        self._process = Process.of(self._loop, meeting, self._terms.deadline_s, self._open)
        if self._loop.is_newcomer:
            self._process.take_place(self._loop)
        self._epoch_told = self._loop.epoch

    def _open(self, process: Process) -> ServedModel:
        """What the first thread of a process opens for all."""
        aggregate: Aggregate = "each" if self._terms.is_sequential else "mean"
        tensors = [
            process.ps.tensors(
                f"parameters-{number}",
                group.items(),
                update=update,
                aggregate=aggregate if self._terms.is_versioned else None,
            )
            for number, (group, update) in enumerate(zip(self._groups, self._updates, strict=True))
        ]
        return ServedModel(
            process.ps,
            tensors,
            CacheDirectory(
                process.threads,
                is_versioned=self._terms.is_versioned,
                clears_threads=self._terms.clears_thread_cache,
            ),
            deadline_s=self._terms.deadline_s,
        )

    @property
    def _served(self) -> ServedModel:
        return self._process.model

    @property
    def _directory(self) -> CacheDirectory:
        return self._served.directory

    def attach(self) -> None:
        """See `Synchronizer.attach`."""
        self._handles.append(self._model.register_forward_pre_hook(ForwardHook(self._before_forward)))
        self._handles.append(Scripting(self._model))

    def detach(self) -> None:
        """See `Synchronizer.detach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if hasattr(self, "_process"):
            with suppress(OffbeatError):  # this process may be out of the parameter server
                self._served.give_up(self._loop.worker)
            self._process.leave()

    def resume(self, step: int) -> None:
        """See `Synchronizer.resume`."""
        if self._has_begun:
            raise OffbeatError("training has begun already: load a state before the first step")
        self._steps = step

    def refresh(self) -> None:
        """See `Synchronizer.refresh`.

        Where gradients are summed clock by clock, all is in it that anybody has done at clocks before that of
        this worker's next step, and nothing else unless it rests, for that clock waits for it. (Where samples
        are dealt, its last steps may be of the same clock; they are not in it.) Where each counts by itself,
        all is in it that this worker has done, and every number is as it was at some time during the call.
        """
        if not self._has_begun:
            return
        self._check_writes()
        self.flush()
        if self._clock is not None:
            self._served.wait_for_version(self._granted().clock, self._loop.check)
        self._install_states()
        self._directory.drop(self._loop.worker)
        self._fetch = None  # it may lack what this worker has pushed since, which is replayed no more

    def _install_states(self) -> None:
        """Takes all that the servers keep into this worker's model and optimizers."""
        self._fetched, kept = self._served.states(self._loop.check)
        for optimizer, group, offsets, states in zip(
            self._optimizers, self._groups, self._offsets, kept, strict=True
        ):
            offsets.scatter(Entries(0, states.pop("values")), group)
            for name, parameter in group.items():
                first, last = offsets.range_of(name)
                rows = {state: values[first:last] for state, values in states.items()}
                take_states(optimizer, parameter, rows)
        self._writes.note()

    def flush(self) -> None:
        """See `Synchronizer.flush`: where each gradient counts by itself, all of them have arrived."""
        if self._waiting and self._clock is not None:
            self._push(self._clock)
        if not self._terms.is_versioned and self._last_push is not None:
            self._served.wait_for(self._last_push, "the last gradients to be applied", self._loop.check)

    def finish(self) -> None:
        """See `Synchronizer.finish`."""
        if not self._has_begun:
            self._take_part()
        self._served.leave(self._loop.worker, self._loop.check)

    def settle(self) -> None:
        """See `Synchronizer.settle`."""
        self._check_writes()
        self._served.wait_until_alone(self._loop.check)
        self._install_states()

    # A step ----------------------------------------------------------------------------------------------

    def weigh(self, batches: float) -> None:
        """See `Synchronizer.weigh`."""
        self._restore(self._parameters())
        self._kept.clear()
        self._weight = batches
        if not batches:
            self._kept = {one: None if one.grad is None else one.grad.clone() for one in self._parameters()}

    def _restore(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leaves no trace of a backward pass that does not count."""
        for parameter in parameters:
            if parameter in self._kept:
                parameter.grad = self._kept.pop(parameter)

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self._groups for parameter in group.values())

    def _values(self) -> Sequence[Array]:
        """The thread cache's parameters, of each group, flat; a copy."""
        pairs = zip(self._groups, self._offsets, strict=True)
        return [np.array(offsets.gather(group)) for group, offsets in pairs]

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._loop.check()
        if not (model.training and torch.is_grad_enabled()):
            return
        self._forms.check()
        if not self._is_open:
            self._start()
        if self._weight:
            self._weights.append(self._weight)
        self._loop.timer.switch("compute")

    def _start(self) -> None:
        """Waits until the step may start, and reads parameters for it.

        Before the first step everybody waits for the first parameters, which is no waiting at the gate.
        """
        timer = self._loop.timer
        self._check_writes()
        if not self._has_begun:
            timer.switch("pull")
            self._report(None, self._take_part(), None, 0.0, ())
        elif not self._may_start():
            timer.switch("wait")
        grant = self._granted()
        while not self._may_start():  # each Grant says that the others go on
            self._member.wait_for(
                lambda last=grant: self._may_start() or self._granted() is not last,  # type: ignore[misc]
                self._terms.deadline_s,
                "the gate to open",
            )
            grant = self._granted()
        if self._clock is None and self._loop.worker:
            self._process.take_unserved(self._unserved())
        if self._loop.epoch > self._epoch_told:
            self._epoch_told = self._loop.epoch
            timer.switch("report")
            self._process.tell_place(self._loop)
        self._read(grant)
        self._writes.note()
        self._clock = grant.clock
        self._is_open = True
        self._compute_mark_s, self._compute_s = timer.total_s("compute"), 0.0

    def _take_part(self) -> int:
        """Takes part: with the first worker's parameters, once everybody does; returns the first clock."""
        self._has_begun = True
        initial = list(self._initial()) if self._loop.worker == 0 else None
        try:
            return self._process.begin(initial, self._loop, self._unserved())
        except WorkerError:
            raise
        except OffbeatError as error:
            raise WorkerError(f"worker {self._loop.worker} could not begin: {error}") from error

    def _unserved(self) -> Sequence[torch.Tensor]:
        """What the servers do not keep: buffers, and parameters that were frozen at join."""
        served = {id(one) for one in self._parameters()}
        return [*self._model.buffers(), *(one for one in self._model.parameters() if id(one) not in served)]

    def _initial(self) -> Iterator[Mapping[str, Array]]:
        """Parameters and optimizer state as the servers keep them, of each group."""
        for optimizer, group, offsets in zip(self._optimizers, self._groups, self._offsets, strict=True):
            states: dict[str, Array] = {"values": offsets.gather(group).copy()}
            kept = [states_of(optimizer, parameter) for parameter in group.values()]
            for name in kept[0] if kept else ():
                states[name] = np.concatenate([one[name].reshape(-1) for one in kept])
            yield states

    def _may_start(self) -> bool:
        grant = self._member.grant
        return grant is not None and grant.may_start

    def _granted(self) -> Grant:
        grant = self._member.grant
        assert grant is not None
        return grant

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """See `Synchronizer.before_step`."""
        if has_closure:
            raise OffbeatError(
                "expected optimizer.step() without a closure: on a parameter server the step is the "
                "servers'; compute the gradients before it"
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
        self._loop.computed(compute_s)
        timer.switch("push")
        self._compute_s += timer.total_s("compute") - self._compute_mark_s
        self._compute_mark_s = timer.total_s("compute")
        if self._terms.steps_locally and self._before is None:
            self._before = self._values()
        for number, one in enumerate(self._optimizers):
            if one is optimizer:
                self._pack(number)
        timer.switch("apply")

    def _pack(self, number: int) -> None:
        """Copies a group's gradients; where only the servers step, the optimizer finds none."""
        group, offsets = self._groups[number], self._offsets[number]
        self._restore(group.values())
        absent = frozenset(offsets.range_of(name) for name, one in group.items() if one.grad is None)
        gradients = {
            name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in group.items()
        }
        self._packed[number] = np.array(offsets.gather(gradients)), absent
        self._has_gradient |= len(absent) < len(group)
        if not self._terms.steps_locally:
            for parameter in group.values():
                parameter.grad = None

    def _gradient(self) -> Gradient:
        """What this step gives: the gradients of the groups that were stepped, weighted by samples."""
        weight = sum(self._weights) / len(self._weights) if self._weights else 0.0
        counts = weight if self._has_gradient else 0.0
        groups: list[GroupGradient | None] = []
        for number, group in enumerate(self._trained.groups):
            if number not in self._packed:
                groups.append(None)
                continue
            values, absent = self._packed[number]
            if weight != 1.0:
                values *= weight
            groups.append(GroupGradient(counts, values, absent, settings_of(group)))
        self._forget_gradients()
        return Gradient(groups)

    def _forget_gradients(self) -> None:
        self._weights.clear()
        self._packed.clear()
        self._has_gradient = False

    @torch.no_grad()
    def after_step(self) -> None:
        """See `Synchronizer.after_step`."""
        timer = self._loop.timer
        timer.switch("apply")
        clock = self._clock
        assert clock is not None
        self._waiting.append((self._gradient(), self._applied()))
        self._steps += 1
        self._is_open = False
        self._writes.note()
        timer.switch("push")
        if len(self._waiting) >= self._terms.push_every:
            self._push(clock)
        timer.switch("report")
        blocks: tuple[int, ...] = ()
        if self._terms.is_dealt:
            with self._member.lock:
                blocks = self._member.hand.contribute(counts=True)
        self._report(clock, self._read_version, self._loop.take_loss(), self._compute_s, blocks)
        timer.switch("push")
        self._served.passed(self._loop.worker, self._granted().clock)
        timer.switch("other")

    def _applied(self) -> Sequence[Array]:
        """What the local step has added to the parameters, of each group."""
        before, self._before = self._before, None
        if before is None:
            return ()
        return [
            np.subtract(offsets.gather(group), old)
            for group, offsets, old in zip(self._groups, self._offsets, before, strict=True)
        ]

    def _push(self, clock: int) -> None:
        """Gives what was computed since the last push; what only counts when it is there is waited for."""
        total, deltas = self._waiting[0]
        for gradient, more in self._waiting[1:]:
            total = total.plus(gradient)
            deltas = [one + another for one, another in zip(deltas, more, strict=True)]
        self._waiting.clear()
        time, push = self._served.give(self._loop.worker, clock, total)
        if deltas:
            self._directory.log(self._loop.worker, time)
            self._own.append(deltas)
        awaited = push if self._terms.is_bounded else self._last_push
        self._last_push = push
        if awaited is not None:
            self._served.wait_for(awaited, "gradients to be applied", self._loop.check)

    def _report(
        self, clock: int | None, version: int, loss: float | None, compute_s: float, blocks: tuple[int, ...]
    ) -> None:
        """Tells the coordinator that a step is done, and waits until it has said which clock is next."""
        self._member.grant, self._is_reporting = None, True
        loop = self._loop
        loop.tell(
            Clocked(
                now_s=0.0,
                worker=loop.worker,
                clock=clock,
                version=version,
                epoch=loop.epoch,
                step=self._steps,
                compute_s=compute_s,
                samples=loop.samples,
                loss=loss,
                blocks=blocks,
            )
        )
        what = "the coordinator to say which clock is next"
        self._member.wait_for(lambda: self._member.grant is not None, self._terms.deadline_s, what)
        self._is_reporting = False
        if clock is None:
            self._served.passed(loop.worker, self._granted().clock)

    def _hear(self, grant: Grant) -> None:
        """Hears a Grant, in the links' thread: while it waits for samples, clocks pass all the same."""
        if self._has_begun and not self._is_open and not self._is_reporting:
            self._served.passed(self._loop.worker, grant.clock)

    # Reading ---------------------------------------------------------------------------------------------

    def _read(self, grant: Grant) -> None:
        """Makes the thread cache fresh enough."""
        timer, version = self._loop.timer, grant.version
        if self._terms.fetch_every is not None:
            self._read_version = version
            timer.switch("pull")
            self._install_what_came()
            return
        worker, directory = self._loop.worker, self._directory
        match directory.read(worker, version) if self._terms.is_bounded else "server":
            case "thread":
                timer.switch("thread_cache")
            case "process":
                timer.switch("process_cache")
                self._install(self._served.row)
            case "server":
                timer.switch("pull")
                is_bounded = self._terms.is_bounded
                complete = grant.complete if is_bounded else 0
                row = self._served.pull(version, self._loop.check, complete=complete, fresh=not is_bounded)
                self._install(row)
        self._read_version = max(version, directory.version(worker))

    def _install_what_came(self) -> None:
        """Takes in what was fetched in the background, if it has come; fetches anew when it is time."""
        if self._directory.version(self._loop.worker) < 0:
            self._install(self._served.pull(0, self._loop.check, fresh=True))
        elif self._fetch is not None and self._fetch.is_done:
            self._install(self._fetch.result(0.0))
            self._fetch = None
        if self._fetch is None and self._steps % (self._terms.fetch_every or 1) == 0:
            self._fetch = self._served.fetch()

    @torch.no_grad()
    def _install(self, row: Row) -> None:
        """Takes a row into the thread cache, and this thread's own updates that are not in it, once."""
        directory, worker = self._directory, self._loop.worker
        for place, (group, offsets) in enumerate(zip(self._groups, self._offsets, strict=True)):
            values = row.values[place]
            if self._own:
                values = np.array(values)
                for piece in row.pieces[place]:
                    stretch = slice(piece.first, piece.last)
                    for deltas in self._own[directory.held(worker, piece.time) :]:
                        values[stretch] += deltas[place][stretch]
            offsets.scatter(Entries(0, values), group)
        time = min((piece.time for some in row.pieces for piece in some), default=0)
        del self._own[: directory.installed(worker, row.version, time)]
