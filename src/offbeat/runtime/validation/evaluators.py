"""Those who evaluate parts of a validation set, one part each at a time, in threads."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.numerics.metrics import Value, plain
from offbeat.policies.validation.schedule import Take
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import Flag
from offbeat.runtime.validation.isolation import OwnRandomness, Watch
from offbeat.runtime.validation.parts import Data, part_of
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.runtime.validation.throttle import Pacer

Evaluate: TypeAlias = Callable[[nn.Module, Any], Mapping[str, Any]]
AtOneMoment = TypeVar("AtOneMoment")
"""A model's values at one moment: a `Snapshot` of a module of torch, or what another framework has for it."""


class CancelledError(OffbeatError):
    """Nobody wants to know any more what is being evaluated."""


@dataclass(frozen=True, kw_only=True)
class Part(Generic[AtOneMoment]):
    """What is to be evaluated: the model of a snapshot, on some positions of the set.

    Attributes:
        epoch: of the snapshot.
        number: of the part, from 0.
        positions: in the validation set.
        snapshot: nobody writes to it while it is being evaluated.
        cancelled: nobody wants to know any more; one for all parts of an epoch.
    """

    epoch: int
    number: int
    positions: range
    snapshot: AtOneMoment
    cancelled: Flag

    @property
    def seed(self) -> int:
        """Of the random numbers that are drawn for it; the same wherever it is evaluated."""
        return self.epoch * 1_000_003 + self.number


def parts_of(take: Take, snapshot: AtOneMoment, cancelled: Flag) -> list[Part[AtOneMoment]]:
    """Return the parts of an epoch, in the order of the set; they have `cancelled` in common."""
    return [
        Part(epoch=take.epoch, number=number, positions=positions, snapshot=snapshot, cancelled=cancelled)
        for number, positions in enumerate(take.parts)
    ]


class Evaluator(Protocol[AtOneMoment]):
    """Evaluates one part at a time."""

    def evaluate(self, part: Part[AtOneMoment]) -> dict[str, Value]:
        """Return the part's metrics; raises what evaluating raises."""

    def close(self) -> None:
        """Give back what evaluating has taken; ends what is under way where it can."""


def outcome(evaluator: Evaluator[AtOneMoment], part: Part[AtOneMoment]) -> dict[str, Value] | BaseException:
    """Return a part's metrics, or what evaluating has raised, for whoever asks for the result."""
    try:
        return evaluator.evaluate(part)
    except BaseException as error:
        return error


def evaluated(
    model: nn.Module,
    evaluate: Evaluate,
    data: Data,
    positions: range,
    *,
    seed: int,
    watch: Watch | None = None,
) -> dict[str, Value]:
    """Return what `evaluate` says of `model` on a part of `data`; torch's global generator stays as it is.

    Args:
        watch: is shown the arguments of every function of torch that is called, and may raise.
    """
    with torch.no_grad(), OwnRandomness(seed, watch):
        return plain(evaluate(model, part_of(data, positions, seed)))


class InThisThread:
    """Evaluates with the snapshot in the thread that asks.

    Args:
        evaluate: the user's function.
        data: the whole set.
        device: of the model.
        has_stream: on a GPU, a stream of its own, so that it computes beside the training.
        pacer: lets it rest where it holds the training up, or others that evaluate; None for none.

    Attributes:
        calls: of functions of torch so far.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        data: Data,
        device: torch.device,
        *,
        has_stream: bool,
        pacer: Pacer | None = None,
    ) -> None:
        self._evaluate, self._data, self._device, self._pacer = evaluate, data, device, pacer
        self.calls = 0
        self._stream = torch.cuda.Stream(device) if has_stream else None

    def evaluate(self, part: Part[Snapshot]) -> dict[str, Value]:
        """Return the part's metrics; ends soon after the part is cancelled, at the next call of torch."""

        def watch(*_: Any) -> None:
            self.calls += 1
            called()
            if part.cancelled.is_set():
                raise CancelledError(f"part {part.number} of epoch {part.epoch} is not needed any more")

        turn = nullcontext(_do_nothing) if self._pacer is None else self._pacer.evaluating()
        with turn as called, self._on_device():
            for event in part.snapshot.ready:
                event.wait()
            found = evaluated(
                part.snapshot.model(),
                self._evaluate,
                self._data,
                part.positions,
                seed=part.seed,
                watch=watch,
            )
            if self._stream is not None:
                self._stream.synchronize()  # nobody reads the snapshot any more, and metrics are there
            return found

    def _on_device(self) -> AbstractContextManager[Any]:
        if self._stream is not None:
            return torch.cuda.stream(self._stream)
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def close(self) -> None:
        """There is nothing to give back."""
        if self._pacer is not None:
            self._pacer.open()


def _do_nothing() -> None:
    return


class Crew(Generic[AtOneMoment]):
    """Threads that evaluate parts in the order in which they are given.

    They are daemons: a set that never ends does not keep the interpreter from ending.

    Args:
        evaluators: one a thread.
        done: called in these threads with a part and its metrics, or the error.
        on_failure: called in a thread with what has killed it; no more parts come from there.
    """

    def __init__(
        self,
        evaluators: Sequence[Evaluator[AtOneMoment]],
        done: Callable[[Part[AtOneMoment], dict[str, Value] | BaseException], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._evaluators, self._done = list(evaluators), done
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[Part[AtOneMoment] | None] = queue.SimpleQueue()
        self._under_way: dict[int, Part[AtOneMoment]] = {}
        self._is_closed = Flag()
        self._threads = [
            start_thread(f"offbeat validation {number}", partial(self._work, number), on_failure)
            for number in range(len(evaluators))
        ]

    def give(self, parts: Sequence[Part[AtOneMoment]]) -> None:
        """Have parts evaluated when it is their turn."""
        for part in parts:
            self._queue.put(part)

    def _work(self, number: int) -> None:
        evaluator = self._evaluators[number]
        while (part := self._queue.get()) is not None:
            if self._is_closed.is_set() or part.cancelled.is_set():
                continue
            self._under_way[number] = part
            result = outcome(evaluator, part)
            del self._under_way[number]
            self._done(part, result)
            del part, result  # a thread that waits keeps no model

    def close(self, wait_s: float) -> list[str]:
        """End the threads; what waits is not evaluated, and what is under way ends as soon as it can.

        In a forked process, which has none of the threads, this does nothing.

        Returns:
            The names of threads that still evaluate after `wait_s` seconds.
        """
        if os.getpid() != self._pid:
            return []
        self._is_closed.set()
        for part in list(self._under_way.values()):
            part.cancelled.set()
        for evaluator in self._evaluators:
            evaluator.close()
        for _ in self._threads:
            self._queue.put(None)
        limit_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, limit_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]
