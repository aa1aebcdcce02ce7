"""Iterations of a client's requests: each begins when all iterations up to `tau` + 1 before it are finished.

`policies.ps.task_graph` decides when one may begin. Nothing here sends a request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from offbeat.errors import OffbeatError
from offbeat.policies.ps.task_graph import IterationScheduler, TaskAction, TaskGraph, TaskRun
from offbeat.runtime.ps.cluster_state import ClusterState
from offbeat.runtime.ps.future import Future
from offbeat.runtime.transport.endpoint import Endpoint

_CALLEE: Final = "servers"


@dataclass(slots=True, eq=False)
class Iteration:
    """Requests that belong together, and wait for earlier iterations.

    Attributes:
        begins: done when it may run.
        open_count: how many of its requests are not done, plus one while more may be added.
        number: of its task.
    """

    begins: Future
    open_count: int = 1
    number: int = -1


class _Current(threading.local):
    """The iteration to which the requests of a thread belong."""

    iteration: Iteration | None = None


class Iterations:
    """The iterations of one client.

    Args:
        endpoint: the client's links.
        cluster_state: knows whether the client is still connected.
        waiting: futures that fail when the client is disconnected, those of iterations' beginnings included.

    Attributes:
        tau: the latest value given to `set_tau`; None at first.
    """

    def __init__(self, endpoint: Endpoint, cluster_state: ClusterState, waiting: set[Future]) -> None:
        self._endpoint, self._cluster_state, self._waiting = endpoint, cluster_state, waiting
        self._graph = TaskGraph()
        self._scheduler = IterationScheduler(self._graph, None)
        self._unbegun: dict[int, Iteration] = {}  # by their task's number
        self._current = _Current()
        self.tau: int | None = None

    def set_tau(self, tau: int | None) -> None:
        """Bound the delay of iterations that begin later, see `PS.tau`.

        Raises:
            ValueError: it is negative.
        """
        if tau is not None and tau < 0:
            raise ValueError(f"expected a tau of at least 0, or None for no bound, got {tau}")
        self.tau = tau
        self._endpoint.call_soon(self._scheduler.set_tau, tau)

    @contextmanager
    def iteration(self) -> Iterator[Future]:
        """Make all requests of this thread in the block one iteration, see `PS.iteration`."""
        waits_for = "earlier iterations are not finished"
        iteration = Iteration(Future("an iteration", lambda: waits_for, self._endpoint.run_until))
        self._endpoint.call_soon(self._issue, iteration)
        self._current.iteration = iteration
        try:
            yield iteration.begins
        finally:
            self._current.iteration = None
            self._endpoint.call_soon(self._finish_one, iteration)

    @property
    def current(self) -> Iteration | None:
        """The iteration to which requests of the calling thread belong."""
        iteration = self._current.iteration
        if iteration is not None and self._endpoint.is_io_thread:
            return None  # the waiting thread is running the links, for requests of other threads
        return iteration

    # In the I/O thread --------------------------------------------------------------------------------

    def add(self, iteration: Iteration, future: Future) -> None:
        """Add a request to an iteration, which is not finished before it is done."""
        iteration.open_count += 1
        future.callbacks.append(lambda: self._finish_one(iteration))

    def _issue(self, iteration: Iteration) -> None:
        if self._cluster_state.failure is not None:
            iteration.begins.set_result(None, OffbeatError(self._cluster_state.failure))
            return
        self._waiting.add(iteration.begins)
        iteration.number, runs = self._scheduler.issue([_CALLEE])
        self._unbegun[iteration.number] = iteration
        self._run(runs)

    def _finish_one(self, iteration: Iteration) -> None:
        iteration.open_count -= 1
        if not iteration.open_count and iteration.begins.is_done and self._cluster_state.failure is None:
            self._finish(iteration)

    def _finish(self, iteration: Iteration) -> None:
        self._run(self._graph.on_returned(iteration.number, _CALLEE))

    def _run(self, runs: list[TaskAction]) -> None:
        for run in runs:
            if isinstance(run, TaskRun):
                iteration = self._unbegun.pop(run.task)
                self._graph.on_started(run.task, _CALLEE)
                self._waiting.discard(iteration.begins)
                iteration.begins.set_result(None)
                if not iteration.open_count:
                    self._finish(iteration)
