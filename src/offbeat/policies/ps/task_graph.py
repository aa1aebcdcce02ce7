"""A graph of tasks and subtasks over nodes, and the iterations of bounded delay on top of it.

Nothing here knows what a task does, how calls travel or how the loss of a node is detected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from offbeat.errors import ProtocolError


class State(StrEnum):
    """The state of a task at one callee."""

    ISSUED = "issued"  # waits for other tasks
    READY = "ready"
    RUNNING = "running"
    RETURNED = "returned"  # waits for its subtasks
    FINISHED = "finished"


class Run(NamedTuple):
    """A task at one of its callees; as an action, it may run there now."""

    number: int
    callee: str


class TaskFinished(NamedTuple):
    """A task has finished at all its callees, except those it was dropped from."""

    number: int


class IssueAgain(NamedTuple):
    """A task has lost all its callees before any finished it: it needs new ones, see `issue_again`."""

    number: int


class Withdrawn(NamedTuple):
    """A subtask is cancelled, since the call that issued it is gone. It never finishes."""

    number: int


Told: TypeAlias = Run | TaskFinished | IssueAgain | Withdrawn


@dataclass(slots=True, eq=False)
class _Call:
    """A task at one callee.

    Attributes:
        subtasks: those that have not finished.
    """

    state: State
    subtasks: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Task:
    """A task that has not finished.

    Attributes:
        parent: the call that issued it, None if it is not a subtask.
        waits: the tasks before it that have not finished.
        calls: by callee; a callee that is lost before it has finished is removed.
        unfinished: how many of the calls have not finished.
        followers: the tasks that wait for it; none of them has begun.
    """

    number: int
    parent: Run | None
    waits: set[int]
    calls: dict[str, _Call]
    unfinished: int
    followers: list[int] = field(default_factory=list)


class TaskGraph:
    """Tasks that wait for each other, each run at one node or at a group of nodes.

    A task is ready when all tasks that it waits for have finished; then it may run at each of its callees at
    once. It has finished at a callee when the call has returned there and all subtasks that this call issued
    have finished, and it has finished when it has at every callee that is alive. Tasks can be added ahead or
    while others run. Numbers are given in ascending order and a task can only wait for one that already has
    its number, from the same caller: a task cannot wait for itself, nor for a task that it is a part of.

    A node that is lost before it has finished a task is dropped from the task, and the subtasks that it
    issued for it are withdrawn: a node that runs the task instead issues them again. A task without callees
    has to be issued again, and waits until it is.

    A finished task is removed: a number that was given and is not in the graph is over, so a task that waits
    for it later does not have to. Memory grows with the unfinished tasks and the lost nodes, not with the
    finished tasks.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server", OSDI, section
    3.4 ("asynchronous tasks and dependency": execute-after-finished, done when all subtasks are). Deviations:
    a task waits until those before it have finished at all their callees, not at its own only, since bounded
    delay counts iterations that are finished everywhere; withdrawing, which the paper does not describe.
    """

    def __init__(self) -> None:
        self._next = 0
        self._tasks: dict[int, _Task] = {}  # ascending
        self._down: set[str] = set()

    def add(
        self, callees: Iterable[str], *, after: Iterable[int] = (), parent: Run | None = None
    ) -> tuple[int, list[Told]]:
        """Issue a task at these nodes; return its number and the actions that follow.

        Args:
            callees: one node or a group.
            after: the tasks that have to finish before; those that have finished already are ignored.
            parent: the call that issues it, which is running. One that was dropped or withdrawn, which a
                callee may not know yet, is not running: see `state`.

        Raises:
            ValueError: no callee, or one that is down; a number in `after` that no task has yet, or that
                belongs to a task of another caller; a parent that is not running.
        """
        number = self._next
        waits = self._unfinished(after, parent)
        calls = self._calls(callees)
        if parent is not None:
            parent_call = self._call(parent)
            if parent_call is None or parent_call.state is not State.RUNNING:
                raise ValueError(
                    f"expected a parent that is running, got {parent}: {self._describe_state(parent)}"
                )
            parent_call.subtasks.add(number)
        self._next += 1
        task = self._tasks[number] = _Task(number, parent, waits, calls, len(calls))
        for earlier in waits:
            self._tasks[earlier].followers.append(number)
        return number, self._run(task)

    def issue_again(self, number: int, callees: Iterable[str]) -> list[Told]:
        """Give new callees to a task that has lost all of its own; return the actions that follow.

        Raises:
            ValueError: it has callees or is over; no callee, or one that is down.
        """
        task = self._tasks.get(number)
        if task is None or task.calls:
            raise ValueError(f"expected a task that has lost all its callees, got {number}")
        task.calls = self._calls(callees)
        task.unfinished = len(task.calls)
        return self._run(task)

    def started(self, number: int, callee: str) -> None:
        """A task has begun to run at a callee; ignored if it was dropped or withdrawn.

        Raises:
            ProtocolError: it was not ready there.
        """
        call = self._expect_call(Run(number, callee), State.READY)
        if call is not None:
            call.state = State.RUNNING

    def returned(self, number: int, callee: str) -> list[Told]:
        """A call has returned; return the actions that follow. Ignored if it was dropped or withdrawn.

        Raises:
            ProtocolError: it was not running there.
        """
        call = self._expect_call(Run(number, callee), State.RUNNING)
        if call is None:
            return []
        call.state = State.RETURNED
        return self._settle(Run(number, callee))

    def node_down(self, node: str) -> list[Told]:
        """A node is lost for good; return tasks to issue again, withdrawn tasks and the actions that follow.

        What the node has finished stays finished.
        """
        self._down.add(node)
        actions: list[Told] = []
        affected = []
        for task in list(self._tasks.values()):  # parents before their subtasks
            call = task.calls.get(node)
            if call is not None and call.state is not State.FINISHED and task.number in self._tasks:
                actions += self._withdraw(call.subtasks)
                del task.calls[node]
                task.unfinished -= 1
                affected.append(task)
        for task in affected:
            if not task.calls:
                actions.append(IssueAgain(task.number))
            elif not task.unfinished:
                actions += self._finish(task)
        return actions

    def is_open(self, number: int) -> bool:
        """Return whether a task exists that has not finished."""
        return number in self._tasks

    def waits_for(self, number: int) -> tuple[int, ...]:
        """Return the tasks that a task still waits for, ascending; none if it is over."""
        task = self._tasks.get(number)
        return () if task is None else tuple(sorted(task.waits))

    def state(self, number: int, callee: str) -> State | None:
        """Return the state of a task at a callee; None if the task is over, or not at this callee."""
        call = self._call(Run(number, callee))
        return None if call is None else call.state

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as plain data."""
        tasks = [
            [
                task.number,
                None if task.parent is None else list(task.parent),
                sorted(task.waits),
                [[callee, call.state.value] for callee, call in task.calls.items()],
            ]
            for task in self._tasks.values()
        ]
        return {"next": self._next, "tasks": tasks, "down": sorted(self._down)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._next = state["next"]
        self._down = set(state["down"])
        self._tasks = {}
        for number, parent, waits, states in state["tasks"]:
            calls = {callee: _Call(State(one)) for callee, one in states}
            unfinished = sum(call.state is not State.FINISHED for call in calls.values())
            parent_run = None if parent is None else Run(*parent)
            self._tasks[number] = _Task(number, parent_run, set(waits), calls, unfinished)
            for earlier in waits:
                self._tasks[earlier].followers.append(number)
            if parent_run is not None:
                self._tasks[parent_run.number].calls[parent_run.callee].subtasks.add(number)

    def _unfinished(self, after: Iterable[int], parent: Run | None) -> set[int]:
        waits = set()
        for earlier in after:
            if not 0 <= earlier < self._next:
                raise ValueError(
                    f"expected task {self._next} to wait for tasks that were issued before it, got {earlier}"
                )
            task = self._tasks.get(earlier)
            if task is None:
                continue
            if task.parent != parent:
                raise ValueError(
                    f"expected task {self._next}, {_issued_by(parent)}, to wait for tasks of its caller, "
                    f"got {earlier}, {_issued_by(task.parent)}"
                )
            waits.add(earlier)
        return waits

    def _calls(self, callees: Iterable[str]) -> dict[str, _Call]:
        calls = {callee: _Call(State.ISSUED) for callee in callees}
        down = sorted(self._down & calls.keys())
        if not calls or down:
            raise ValueError(f"expected one callee or more that are up, got {', '.join(calls) or 'none'}")
        return calls

    def _call(self, run: Run) -> _Call | None:
        task = self._tasks.get(run.number)
        return None if task is None else task.calls.get(run.callee)

    def _expect_call(self, run: Run, expected: State) -> _Call | None:
        is_over = run.number < self._next and run.number not in self._tasks
        if is_over or run.callee in self._down:
            return None
        call = self._call(run)
        if call is None or call.state is not expected:
            raise ProtocolError(f"expected {run} to be {expected}: {self._describe_state(run)}")
        return call

    def _describe_state(self, run: Run) -> str:
        state = self.state(*run)
        return "it is not there" if state is None else f"it is {state}"

    def _run(self, task: _Task) -> list[Told]:
        if task.waits:
            return []
        for call in task.calls.values():
            call.state = State.READY
        return [Run(task.number, callee) for callee in task.calls]

    def _settle(self, run: Run) -> list[Told]:
        """Finish a call if it has returned and has no subtasks left, and with its last call the task."""
        task = self._tasks[run.number]
        call = task.calls[run.callee]
        if call.state is not State.RETURNED or call.subtasks:
            return []
        call.state = State.FINISHED
        task.unfinished -= 1
        return [] if task.unfinished else self._finish(task)

    def _finish(self, task: _Task) -> list[Told]:
        """Remove a finished task, make its followers ready, and settle the call that it was a subtask of."""
        del self._tasks[task.number]
        actions: list[Told] = [TaskFinished(task.number)]
        for number in task.followers:
            follower = self._tasks[number]
            follower.waits.discard(task.number)
            actions += self._run(follower)
        if task.parent is not None:
            parent_call = self._tasks[task.parent.number].calls[task.parent.callee]
            parent_call.subtasks.discard(task.number)
            actions += self._settle(task.parent)
        return actions

    def _withdraw(self, subtasks: Iterable[int]) -> list[Told]:
        """Remove these tasks with their subtasks, recursively; only such tasks wait for them."""
        actions: list[Told] = []
        for number in sorted(subtasks):
            actions.append(Withdrawn(number))
            for call in self._tasks.pop(number).calls.values():
                actions += self._withdraw(call.subtasks)
        return actions


def _issued_by(parent: Run | None) -> str:
    return "which is nobody's subtask" if parent is None else f"issued by {parent}"


class IterationScheduler:
    """Issues iterations 0, 1, 2, ... as tasks of a graph; a limited number of them may overlap.

    Iteration t may start when all iterations up to t - tau - 1 have finished, tau being the one in force when
    t is issued. Hence, while t runs, at most tau + 1 iterations up to t are in flight. With a tau of 0
    iterations run one after the other (sequential), with None none waits for another (eventual), and between
    them the delay is bounded. It does not bound how far apart workers are: that is the threshold of stale
    synchronous parallel, which compares their clocks.

    Redundant edges are not added: t waits for those up to u = t - tau - 1 that u itself did not wait for.
    With a constant tau these are t - 2 tau - 1 to t - tau - 1, as in the authors' code.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server", OSDI, section
    3.5 ("flexible consistency"), also for a tau that changes. Deviation: the paper says that a task is
    blocked until "all previous tasks tau times ago" have finished, which is read here such that 0 is
    sequential.

    Args:
        graph: may be shared with code that adds subtasks or other tasks; its owner saves it.
        tau: iterations, at least 0; None for no bound.

    Attributes:
        tau: of the iterations issued from now on.
        issued: how many iterations there have been; the next one's t.

    Raises:
        ValueError: a tau that is negative.
    """

    def __init__(self, graph: TaskGraph, tau: int | None) -> None:
        self.graph = graph
        self.set_tau(tau)
        self.issued = 0
        # By t: its task's number, and how many iterations, counted from 0, have to finish before it.
        self._open: dict[int, tuple[int, int]] = {}

    def set_tau(self, tau: int | None) -> None:
        """Bound the delay of iterations that are issued later; those issued keep theirs.

        Raises:
            ValueError: it is negative.
        """
        if tau is not None and tau < 0:
            raise ValueError(f"expected a tau of at least 0 iterations, or None for no bound, got {tau}")
        self.tau = tau

    def issue(self, callees: Iterable[str]) -> tuple[int, list[Told]]:
        """Issue the next iteration at these nodes; return its task's number and the actions that follow.

        Raises:
            ValueError: no callee, or one that is down.
        """
        self._open = {t: known for t, known in self._open.items() if self.graph.is_open(known[0])}
        t = self.issued
        before = 0 if self.tau is None else max(0, t - self.tau)
        _, implied = self._open.get(before - 1, (0, 0))
        after = [number for earlier, (number, _) in self._open.items() if implied <= earlier < before]
        number, actions = self.graph.add(callees, after=after)
        self._open[t] = (number, before)
        self.issued += 1
        return number, actions

    @property
    def in_flight(self) -> dict[int, int]:
        """The iterations that may run and have not finished, ascending: t and its task's number."""
        return {
            t: number
            for t, (number, _) in self._open.items()
            if self.graph.is_open(number) and not self.graph.waits_for(number)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state except the graph, as plain data."""
        held = [[t, *known] for t, known in self._open.items()]
        return {"tau": self.tau, "issued": self.issued, "open": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; the graph has its own."""
        self.tau = state["tau"]
        self.issued = state["issued"]
        self._open = {t: (number, before) for t, number, before in state["open"]}
