"""An optimizer's step that is put off: taken with each parcel of gradients when its mean is there.

The loop takes it where the forward pass comes to a parcel. While the pass is on its way there a thread does:
a step with the largest layers takes as long as they compute. Before the pass begins nothing changes behind
the loop's back. This module never decides whether a step may be put off, nor when a pass begins and ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from offbeat.errors import OffbeatError
from offbeat.runtime.hybrid.layer_rounds import LayerRounds, Round
from offbeat.runtime.training.partial_step import PartialSteps

_JOIN_S = 1.0  # where the job has failed, the thread may still wait for what will not come


class DeferredStep:
    """The step with the means of one round, called for now.

    Args:
        steps: of the optimizer.
        rounds: whose parameters they are.
        round_: all of it is on its way.
        is_held: by parameter, whether the optimizer steps it.

    Attributes:
        round: whose means it is taken with.
        is_ahead: the thread takes it where the forward pass is still on its way.
    """

    def __init__(
        self, steps: PartialSteps, rounds: LayerRounds, round_: Round, is_held: Sequence[bool]
    ) -> None:
        self._steps, self._rounds, self._is_held = steps, rounds, is_held
        self._parameters = rounds.parameters
        self.round = round_
        round_.settings = steps.settings()
        # By parameter, how often it had been changed now, or when it was stepped:
        self._versions = [parameter._version for parameter in self._parameters]
        self._is_taken = [False] * len(rounds.slots)  # by bucket
        self._is_reached = [False] * len(rounds.slots)  # by bucket, whether the loop has waited for it
        self._failure: Exception | None = None  # of the thread
        self._taking = threading.Lock()
        self.is_ahead = False

    def is_reached(self, index: int) -> bool:
        """Whether the loop has been here with a bucket (`reach`)."""
        return self._is_reached[index]

    def reach(self, index: int) -> None:
        """The loop needs a bucket: waits for it, and takes the step with it if the thread has not.

        Raises:
            WorkerError: a member was lost, or did not come within the deadline.
            OffbeatError: its parameters were changed since the step was called for, or the step cannot be
                taken.
        """
        if self._is_reached[index]:
            return
        self.round.wait(index)
        if index < self._rounds.layout.parcels and self.round.weight:
            self._rounds.host.timer.switch("apply")
            with self._taking:
                if self._failure is not None:
                    raise self._failure
                self._take(index)
        self._is_reached[index] = True

    def reach_all(self) -> None:
        """The loop needs every parcel (`reach`)."""
        for index in range(self._rounds.layout.parcels):
            self.reach(index)

    def end_ahead(self) -> list[int]:
        """Takes nothing ahead any more; returns the parameters stepped that the loop has not reached."""
        with self._taking:
            self.is_ahead = False
        return [
            entry
            for index, is_taken in enumerate(self._is_taken)
            if is_taken and not self._is_reached[index]
            for entry in self._entries(index)
        ]

    def take_ahead(self) -> None:
        """Takes the step parcel by parcel as they come, while it may (`is_ahead`); for one thread."""
        for index in range(self._rounds.layout.parcels):
            if not self.round.comes(index):
                return  # which the loop hears when it waits for it
            with self._taking:
                if not self.is_ahead:
                    return
                if self._is_taken[index]:
                    continue
                began_s = time.perf_counter()
                try:
                    self._take(index)
                except Exception as error:
                    self._failure = error
                    return
            if self._rounds.host.tracer is not None:
                name = self._rounds.names[self._rounds.slots[index].entries[0]]
                self._rounds.host.tracer.add("steps ahead", name, began_s, time.perf_counter())

    def _take(self, index: int) -> None:
        """Takes the step with the parameters of a parcel that has come, if nobody has."""
        entries = self._entries(index)
        for entry in entries:
            if self._parameters[entry]._version != self._versions[entry]:
                raise OffbeatError(
                    f"{self._rounds.names[entry]} was changed between optimizer.step() and its next use, "
                    "when the step may not have reached it yet: call session.refresh() before you change "
                    "parameters"
                )
        if self._is_taken[index]:
            return
        self.round.settle(index)
        self._steps.take(
            [self._parameters[entry] for entry in entries],
            [self.round.mean(entry) for entry in entries],
            self.round.settings,
        )
        for entry in entries:
            self._versions[entry] = self._parameters[entry]._version
        self._is_taken[index] = True

    def _entries(self, index: int) -> list[int]:
        """The parameters of a parcel that are stepped."""
        entries = self._rounds.slots[index].entries
        return [entry for entry in entries if self.round.used[entry] and self._is_held[entry]]


class StepsAhead:
    """The thread that takes deferred steps where the loop has not come to yet.

    Args:
        start: starts it, as `Member.start_thread`.
    """

    def __init__(self, start: Callable[[str, Callable[[], object]], threading.Thread]) -> None:
        self._steps: queue.SimpleQueue[DeferredStep | None] = queue.SimpleQueue()
        self._thread = start("offbeat steps ahead", self._run)

    def begin(self, step: DeferredStep) -> None:
        """Takes a step until it is told to end (`DeferredStep.end_ahead`)."""
        step.is_ahead = True
        self._steps.put(step)

    def stop(self) -> None:
        """Takes no more; what is under way has to have been told to end."""
        self._steps.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            step.take_ahead()
            del step  # whose memory may be taken again
