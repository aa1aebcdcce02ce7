"""Streams of the CPU: threads that call operations in the order of a schedule, and wait for one another."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import torch

from offbeat.errors import OffbeatError
from offbeat.numerics.nimble.stream_assignment import Launch, StreamAssignment
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeEvent

TIMEOUT_S: Final = 600.0
_Work: TypeAlias = "queue.SimpleQueue[_Run | None]"


class StreamThreads:
    """Runs schedules with a thread per stream; the calling thread is that of stream 0.

    Gradients are off in the other threads.

    Args:
        assignment: of the operations.
        timeout_s: the longest time that a stream waits for an operation on another one.
    """

    def __init__(self, assignment: StreamAssignment, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._awaited = [launch.node for launch in assignment.launches if launch.is_awaited]
        self._streams = [
            [launch for launch in assignment.launches if launch.stream == stream]
            for stream in range(assignment.stream_count)
        ]
        self._queues: list[_Work] = [queue.SimpleQueue() for _ in self._streams[1:]]
        for number, (work, launches) in enumerate(zip(self._queues, self._streams[1:], strict=True), 1):
            start_thread(f"offbeat stream {number}", partial(_work, work, number, launches), _raise)
        self.close = weakref.finalize(self, _end_threads, self._queues)

    def run(self, call: Callable[[int], object]) -> None:
        """Call every operation once, each after those that it depends on.

        Args:
            call: is called with the number of an operation, by the thread of its stream.

        Raises:
            OffbeatError: an operation did not end in time.
            Exception: what `call` raised first; operations that depend on the failed one are not called.
        """
        run = _Run(call, self._awaited, len(self._streams), self._timeout_s)
        for work in self._queues:
            work.put(run)
        if self._streams:
            run.follow(0, self._streams[0])
        run.wait_for_streams()


class _Run:
    """The state of one run of a schedule."""

    def __init__(
        self, call: Callable[[int], object], awaited: Sequence[int], streams: int, timeout_s: float
    ) -> None:
        self._call, self._timeout_s = call, timeout_s
        self._done = {node: SignalSafeEvent() for node in awaited}
        self._ended = [SignalSafeEvent() for _ in range(streams)]
        self._error: BaseException | None = None

    def follow(self, stream: int, launches: Sequence[Launch]) -> None:
        """Call the operations of a stream, until one of any stream fails."""
        try:
            for launch in launches:
                for node in launch.waits_for:
                    self._wait(self._done[node], f"stream {stream} for operation {node}")
                if self._error is not None:
                    return
                self._call(launch.node)
                if launch.is_awaited:
                    self._done[launch.node].set()
        except BaseException as error:
            if self._error is None:
                self._error = error
            for event in self._done.values():  # of streams that wait
                event.set()
        finally:
            self._ended[stream].set()

    def wait_for_streams(self) -> None:
        """Wait for the end of all streams; raises what the first failure raised."""
        try:
            for stream, ended in enumerate(self._ended):
                self._wait(ended, f"a run for the end of stream {stream}")
        finally:
            if self._error is not None:
                raise self._error

    def _wait(self, event: SignalSafeEvent, what: str) -> None:
        if not event.wait(self._timeout_s):
            raise OffbeatError(
                f"{what} waited for longer than {self._timeout_s:g} s: an operation before it hangs, or "
                "takes longer than that"
            )


def _work(work: _Work, stream: int, launches: Sequence[Launch]) -> None:
    with torch.no_grad():
        while (run := work.get()) is not None:
            run.follow(stream, launches)
            del run  # a waiting thread keeps no values alive


def _end_threads(queues: Sequence[_Work]) -> None:
    for work in queues:
        work.put(None)


def _raise(error: BaseException) -> None:
    """Let an error that is no operation's be reported by Python: `follow` passes on those."""
    raise error
