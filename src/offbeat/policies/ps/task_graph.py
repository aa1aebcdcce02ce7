"""A graph of tasks and subtasks over nodes, and the iterations of bounded delay on top of it.

Nothing here knows what a task does, how calls travel or how the loss of a node is detected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from offbeat.errors import ProtocolError


class CallState(StrEnum):
    """The state of a task at one callee."""

    ISSUED = "issued"  # waits for other tasks
    READY = "ready"
    RUNNING = "running"
    RETURNED = "returned"  # waits for its subtasks
    FINISHED = "finished"


class TaskRun(NamedTuple):
    """A task at one of its callees; as an action, it may run there now."""

    task: int
    callee: str


class TaskFinished(NamedTuple):
    """A task has finished at all its callees, except those it was dropped from."""

    number: int


class TaskNeedsCallees(NamedTuple):
    """A task has lost all its callees before any finished it: it needs new ones, see `reassign`."""

    number: int


class TaskWithdrawn(NamedTuple):
    """A subtask is cancelled, since the call that issued it is gone. It never finishes."""

    number: int


TaskAction: TypeAlias = TaskRun | TaskFinished | TaskNeedsCallees | TaskWithdrawn


@dataclass(slots=True, eq=False)
class _Call:
    """A task at one callee.

    Attributes:
        subtasks: those that have not finished.
    """

    state: CallState
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
    parent: TaskRun | None
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
        self, callees: Iterable[str], *, after: Iterable[int] = (), parent: TaskRun | None = None
    ) -> tuple[int, list[TaskAction]]:
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
            if parent_call is None or parent_call.state is not CallState.RUNNING:
                raise ValueError(
                    f"expected a parent that is running, got {parent}: {self._describe_state(parent)}"
                )
            parent_call.subtasks.add(number)
        self._next += 1
        task = self._tasks[number] = _Task(number, parent, waits, calls, len(calls))
        for earlier in waits:
            self._tasks[earlier].followers.append(number)
        return number, self._run(task)

    def reassign(self, number: int, callees: Iterable[str]) -> list[TaskAction]:
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

    def on_started(self, number: int, callee: str) -> None:
        """Note that a task runs at a callee; ignored if it was dropped or withdrawn.

        Raises:
            ProtocolError: it was not ready there.
        """
        call = self._expect_call(TaskRun(number, callee), CallState.READY)
        if call is not None:
            call.state = CallState.RUNNING

    def on_returned(self, number: int, callee: str) -> list[TaskAction]:
        """Finish a call that has returned; return the actions that follow, none if it was withdrawn.

        Raises:
            ProtocolError: it was not running there.
        """
        call = self._expect_call(TaskRun(number, callee), CallState.RUNNING)
        if call is None:
            return []
        call.state = CallState.RETURNED
        return self._settle(TaskRun(number, callee))

    def on_node_lost(self, node: str) -> list[TaskAction]:
        """Remove a lost node; return tasks to issue again, withdrawn tasks and resulting actions.

        What the node has finished stays finished.
        """
        self._down.add(node)
        actions: list[TaskAction] = []
        affected = []
        for task in list(self._tasks.values()):  # parents before their subtasks
            call = task.calls.get(node)
            if call is not None and call.state is not CallState.FINISHED and task.number in self._tasks:
                actions += self._withdraw(call.subtasks)
                del task.calls[node]
                task.unfinished -= 1
                affected.append(task)
        for task in affected:
            if not task.calls:
                actions.append(TaskNeedsCallees(task.number))
            elif not task.unfinished:
                actions += self._finish(task)
        return actions

    def is_unfinished(self, number: int) -> bool:
        """Return whether a task exists that has not finished."""
        return number in self._tasks

    def pending_tasks(self, number: int) -> tuple[int, ...]:
        """Return the tasks that a task still waits for, ascending; none if it is over."""
        task = self._tasks.get(number)
        return () if task is None else tuple(sorted(task.waits))

    def state(self, number: int, callee: str) -> CallState | None:
        """Return the state of a task at a callee; None if the task is over, or not at this callee."""
        call = self._call(TaskRun(number, callee))
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
            calls = {callee: _Call(CallState(one)) for callee, one in states}
            unfinished = sum(call.state is not CallState.FINISHED for call in calls.values())
            parent_run = None if parent is None else TaskRun(*parent)
            self._tasks[number] = _Task(number, parent_run, set(waits), calls, unfinished)
            for earlier in waits:
                self._tasks[earlier].followers.append(number)
            if parent_run is not None:
                self._tasks[parent_run.task].calls[parent_run.callee].subtasks.add(number)

    def _unfinished(self, after: Iterable[int], parent: TaskRun | None) -> set[int]:
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
        calls = {callee: _Call(CallState.ISSUED) for callee in callees}
        down = sorted(self._down & calls.keys())
        if not calls or down:
            raise ValueError(f"expected one callee or more that are up, got {', '.join(calls) or 'none'}")
        return calls

    def _call(self, run: TaskRun) -> _Call | None:
        task = self._tasks.get(run.task)
        return None if task is None else task.calls.get(run.callee)

    def _expect_call(self, run: TaskRun, expected: CallState) -> _Call | None:
        is_over = run.task < self._next and run.task not in self._tasks
        if is_over or run.callee in self._down:
            return None
        call = self._call(run)
        if call is None or call.state is not expected:
            raise ProtocolError(f"expected {run} to be {expected}: {self._describe_state(run)}")
        return call

    def _describe_state(self, run: TaskRun) -> str:
        state = self.state(*run)
        return "it is not there" if state is None else f"it is {state}"

    def _run(self, task: _Task) -> list[TaskAction]:
        if task.waits:
            return []
        for call in task.calls.values():
            call.state = CallState.READY
        return [TaskRun(task.number, callee) for callee in task.calls]

    def _settle(self, run: TaskRun) -> list[TaskAction]:
        """Finish a call if it has returned and has no subtasks left, and with its last call the task."""
        task = self._tasks[run.task]
        call = task.calls[run.callee]
        if call.state is not CallState.RETURNED or call.subtasks:
            return []
        call.state = CallState.FINISHED
        task.unfinished -= 1
        return [] if task.unfinished else self._finish(task)

    def _finish(self, task: _Task) -> list[TaskAction]:
        """Remove a finished task, make its followers ready, and settle the call that it was a subtask of."""
        del self._tasks[task.number]
        actions: list[TaskAction] = [TaskFinished(task.number)]
        for number in task.followers:
            follower = self._tasks[number]
            follower.waits.discard(task.number)
            actions += self._run(follower)
        if task.parent is not None:
            parent_call = self._tasks[task.parent.task].calls[task.parent.callee]
            parent_call.subtasks.discard(task.number)
            actions += self._settle(task.parent)
        return actions

    def _withdraw(self, subtasks: Iterable[int]) -> list[TaskAction]:
        """Remove these tasks with their subtasks, recursively; only such tasks wait for them."""
        actions: list[TaskAction] = []
        for number in sorted(subtasks):
            actions.append(TaskWithdrawn(number))
            for call in self._tasks.pop(number).calls.values():
                actions += self._withdraw(call.subtasks)
        return actions


def _issued_by(parent: TaskRun | None) -> str:
    return "which is no task's subtask" if parent is None else f"issued by {parent}"


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
        issued_count: how many iterations there have been; the next one's t.

    Raises:
        ValueError: a tau that is negative.
    """

    def __init__(self, graph: TaskGraph, tau: int | None) -> None:
        self.graph = graph
        self.set_tau(tau)
        self.issued_count = 0
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

    def issue(self, callees: Iterable[str]) -> tuple[int, list[TaskAction]]:
        """Issue the next iteration at these nodes; return its task's number and the actions that follow.

        Raises:
            ValueError: no callee, or one that is down.
        """
        self._open = {t: known for t, known in self._open.items() if self.graph.is_unfinished(known[0])}
        t = self.issued_count
        before = 0 if self.tau is None else max(0, t - self.tau)
        _, implied = self._open.get(before - 1, (0, 0))
        after = [number for earlier, (number, _) in self._open.items() if implied <= earlier < before]
        number, actions = self.graph.add(callees, after=after)
        self._open[t] = (number, before)
        self.issued_count += 1
        return number, actions

    @property
    def in_flight(self) -> dict[int, int]:
        """The iterations that may run and have not finished, ascending: t and its task's number."""
        return {
            t: number
            for t, (number, _) in self._open.items()
            if self.graph.is_unfinished(number) and not self.graph.pending_tasks(number)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state except the graph, as plain data."""
        held = [[t, *known] for t, known in self._open.items()]
        return {"tau": self.tau, "issued_count": self.issued_count, "open": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; the graph has its own."""
        self.tau = state["tau"]
        self.issued_count = state["issued_count"]
        self._open = {t: (number, before) for t, number, before in state["open"]}
