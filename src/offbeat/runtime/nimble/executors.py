"""Two ways to run a scheduled program: a thread per stream on the CPU, a captured graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.numerics.nimble.stream_assignment import StreamAssignment
from offbeat.runtime.nimble.program import ProgramRun, TracedProgram
from offbeat.runtime.nimble.stream_threads import StreamThreads


class Executor(Protocol):
    """Runs a program; one run at a time."""

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Return the outputs, flat, for inputs like those that were traced."""

    def close(self) -> None:
        """Release threads and memory."""


class ThreadExecutor:
    """Runs a program with a thread per stream.

    Args:
        program: on the CPU.
        assignment: of its operators.
    """

    def __init__(self, program: TracedProgram, assignment: StreamAssignment) -> None:
        self._program, self._releases = program, program.find_releases(assignment)
        self._threads = StreamThreads(assignment)

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """See `Executor.run`."""
        run = ProgramRun(self._program, self._releases, inputs)
        self._threads.run(run.call)
        return run.outputs()

    def close(self) -> None:
        """See `Executor.close`."""
        self._threads.close()


class DeviceStreams(Protocol):
    """Streams of a device, numbered from 0; what is queued on them runs later."""

    def use(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context in which operators are queued on a stream."""

    def record_event(self, stream: int) -> Hashable:
        """Return the event that what has been queued on a stream so far has been done."""

    def make_wait(self, stream: int, event: Any) -> None:
        """Make a stream wait for an event before what is queued on it next."""


def queue_on_streams(
    assignment: StreamAssignment, streams: DeviceStreams, call: Callable[[int], object]
) -> None:
    """Queue all operators: after what was queued on stream 0, which in the end waits for all streams.

    Args:
        assignment: of the operators.
        streams: at least as many as assigned.
        call: queues an operator on the current stream.
    """
    others = range(1, assignment.stream_count)
    begin = streams.record_event(0)
    for other in others:
        streams.make_wait(other, begin)
    events: dict[int, Hashable] = {}
    for launch in assignment.launches:
        for node in launch.waits_for:
            streams.make_wait(launch.stream, events[node])
        with streams.use(launch.stream):
            call(launch.node)
        if launch.is_awaited:
            events[launch.node] = streams.record_event(launch.stream)
    for other in others:
        streams.make_wait(0, streams.record_event(other))


class _CudaStreams:
    """See `DeviceStreams`."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(max(1, count))]

    def use(self, stream: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.streams[stream])

    def record_event(self, stream: int) -> Hashable:
        event: Hashable = self.streams[stream].record_event()
        return event

    def make_wait(self, stream: int, event: Any) -> None:
        self.streams[stream].wait_event(event)


@contextmanager
def _synchronizations_allowed(allowed: bool) -> Iterator[None]:
    """Context in which operators that wait for the device raise RuntimeError, unless they are allowed to.

    They cannot be captured, and a capture that fails may leave torch's generator and memory in its state.
    """
    before = torch.cuda.get_sync_debug_mode()
    if not allowed:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class GraphExecutor:
    """Replays a program as a CUDA graph whose branches were captured on several streams.

    The graph reads inputs, parameters and buffers where they were when it was captured, and has memory of its
    own. Nothing else may capture, or draw random numbers on the device, while this is made.

    Args:
        program: on a GPU.
        assignment: of its operators.
        inputs: an example of the inputs.

    Raises:
        OffbeatError: the program cannot be captured.
    """

    def __init__(
        self, program: TracedProgram, assignment: StreamAssignment, inputs: Sequence[Tensor]
    ) -> None:
        self._device = inputs[0].device
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        self._end = torch.cuda.Event()
        releases = program.find_releases(assignment)
        streams = _CudaStreams(self._device, assignment.stream_count)
        main = streams.streams[0]
        main.wait_stream(torch.cuda.current_stream(self._device))
        # A capture that fails leaves its stream the current one: this context does not.
        with torch.cuda.device(self._device), torch.cuda.stream(main):
            try:
                for may_synchronize in (True, False):  # at first, libraries are loaded and choose algorithms
                    run = ProgramRun(program, releases, self._inputs)
                    with _synchronizations_allowed(may_synchronize):
                        queue_on_streams(assignment, streams, run.call)
                    main.synchronize()  # before values that several streams use are dropped
                run = ProgramRun(program, releases, self._inputs)
                # Threads of the program's, such as one that pins memory, may go on meanwhile.
                with torch.cuda.graph(self._graph, stream=main, capture_error_mode="thread_local"):
                    queue_on_streams(assignment, streams, run.call)
                self._outputs = run.outputs()
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                raise OffbeatError(
                    f"the forward pass cannot be captured in a CUDA graph: {reason}"
                ) from error

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """See `Executor.run`; queued on the current stream, after an earlier run on whatever stream."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._end)
            for static, given in zip(self._inputs, inputs, strict=True):
                static.copy_(given, non_blocking=True)
            self._graph.replay()
            # The next run overwrites the graph's own outputs.
            outputs = [one.clone() if isinstance(one, Tensor) else one for one in self._outputs]
            self._end.record(stream)
        return outputs

    def close(self) -> None:
        """See `Executor.close`."""
        self._end.synchronize()
        self._outputs = []
        self._graph.reset()
