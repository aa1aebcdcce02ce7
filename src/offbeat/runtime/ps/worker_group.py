"""A worker's membership in a group of workers: its shards of the data and its tasks.

The manager's `ShardScheduler` makes all decisions. This module loads no data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from offbeat.errors import OffbeatError
from offbeat.events import (
    AssignTask,
    Event,
    PassesEnded,
    ProgressRequested,
    TaskDone,
    TaskRequested,
    TauSet,
    WorkerGroupAction,
    WorkerGroupJoined,
    WorkerGroupLeft,
    WorkerGroupRejected,
    WorkerGroupView,
)
from offbeat.runtime.processes.waiting import SignalSafeCondition
from offbeat.runtime.ps.future import TIMEOUT_S, Future

_PROGRESS_TIMEOUT_S: Final = 5.0  # timeout of the request for details of an error message


@dataclass(slots=True, eq=False)
class ShardTask:
    """A pass over some shards.

    Attributes:
        number: unique in the group.
        pass_number: from 0 on.
        shards: the shards to process; they belong to the worker until the task is done.
    """

    number: int
    pass_number: int
    shards: tuple[int, ...]
    _report: Callable[[ShardTask, list[Future]], None] = field(repr=False)
    is_done_reported: bool = False

    def done(self, after: Iterable[Future] = ()) -> None:
        """Report the task as done once these requests are, without blocking; further calls do nothing."""
        if not self.is_done_reported:
            self.is_done_reported = True
            self._report(self, list(after))


class WorkerGroup:
    """A client's membership in a group of workers; `PS.join_group` makes it.

    A shard of the data belongs to one member at a time, and each pass over it is counted once, whichever
    member makes it. The shards of a lost worker are reassigned according to the group's `on_worker_loss`.

    `tasks` must be called by one thread at a time.

    Args:
        name: the group's name.
        node: the client's name.
        send: sends an event to the manager.
        when_done: see `PS.when_done`.
        on_left: called when the membership has ended.

    Attributes:
        name, node: as given.
    """

    def __init__(
        self,
        name: str,
        node: str,
        send: Callable[[Event], None],
        when_done: Callable[[Iterable[Future], Callable[[], Any]], Future],
        on_left: Callable[[], None],
    ) -> None:
        self.name, self.node = name, node
        self._send, self._when_done, self._on_left = send, when_done, on_left
        self._changed = SignalSafeCondition()  # guards the attributes below, up to the empty line
        self._view: WorkerGroupView | None = None
        self._own_views = 0  # views that were sent to this worker alone
        self._issued: deque[ShardTask] = deque()
        self._passes_ended = 0  # passes over all shards, as last reported
        self._has_left = False
        self._refused: str | None = None
        self._failure: str | None = None

        self._current: ShardTask | None = None
        self._reports: list[Future] = []

    def join(self, shards: int, on_loss: str, patience_s: float, timeout_s: float) -> None:
        """Join the group.

        Raises:
            ValueError: an argument that cannot be sent to the manager.
            OffbeatError: another group has this name, or the arguments are out of range; or the manager did
                not answer within `timeout_s` seconds.
        """
        if not (math.isfinite(patience_s) and patience_s >= 0):
            raise ValueError(f"expected a patience_s of 0 or more seconds, got {patience_s}")
        joins = WorkerGroupJoined(
            now_s=0.0,
            node=self.node,
            group=self.name,
            shards=_checked_count("shards", shards, 1),
            on_loss=on_loss,
            wait_timeout_s=patience_s,
        )
        self._send(joins)
        try:
            self._wait_for(lambda: self.node in self._members(), "the manager to accept it", timeout_s)
        except BaseException:
            self._send(WorkerGroupLeft(now_s=0.0, node=self.node, group=self.name))
            raise

    @property
    def members(self) -> list[str]:
        """The names of the group's workers, as last reported."""
        with self._changed:
            return self._members()

    @property
    def shards(self) -> list[int]:
        """This worker's shards, ascending, as last reported; the data of all other shards may be freed."""
        with self._changed:
            workers = () if self._view is None else self._view.workers
            own = [worker.shards for worker in workers if worker.node == self.node]
            return [shard for ranges in own for first, last in ranges for shard in range(first, last + 1)]

    @property
    def tau(self) -> int | None:
        """How many passes a shard may be ahead of any other: 0 for none, None for no bound.

        The value is common to the group, and applies to tasks that are issued later.
        """
        with self._changed:
            return None if self._view is None else self._view.tau

    @tau.setter
    def tau(self, tau: int | None) -> None:
        """Bound the delay for all workers of the group, from when the manager receives it.

        Raises:
            ValueError: `tau` is negative.
        """
        bound = None if tau is None else _checked_count("passes as tau", tau, 0)
        self._send(TauSet(now_s=0.0, node=self.node, group=self.name, tau=bound))

    def progress(self, timeout_s: float = TIMEOUT_S) -> WorkerGroupView:
        """Request each worker's shards and progress, the shards without a worker, and the lost ones.

        Raises:
            OffbeatError: this worker has left the group, or the manager did not answer within `timeout_s`
                seconds.
        """
        with self._changed:
            before = self._own_views
        self._send(ProgressRequested(now_s=0.0, node=self.node, group=self.name))
        self._wait_for(lambda: self._own_views > before, "the manager to report the progress", timeout_s)
        with self._changed:
            assert self._view is not None
            return self._view

    def tasks(
        self, passes: int, *, shards_per_task: int = 1, timeout_s: float = TIMEOUT_S
    ) -> Iterator[ShardTask]:
        """Yield this worker's tasks until the group has made `passes` passes over all its shards.

        Passes are counted from the group's beginning. A task counts as done when the next one is requested,
        or when its `done` is called; pushes for the task must be done by then. The loop ends when the tasks
        of all workers are done, because this worker receives those of a lost one. A loop that is left during
        a task begins with that task the next time.

        Args:
            passes: the number of passes, at least 1.
            shards_per_task: the largest number of shards in a task, at least 1.
            timeout_s: how long to wait for a task, in seconds.

        Raises:
            ValueError: an argument is out of range.
            OffbeatError: there was no task for `timeout_s` seconds (the message names the workers that the
                group waits for); this worker was dropped; or a request failed that a task's `done` depended
                on.
        """
        wanted = TaskRequested(
            now_s=0.0,
            node=self.node,
            group=self.name,
            passes_max=_checked_count("passes", passes, 1),
            shards_max=_checked_count("shards in a task", shards_per_task, 1),
        )
        return self._iterate_tasks(wanted, timeout_s)

    def leave(self, timeout_s: float = TIMEOUT_S) -> None:
        """Leave the group, which reassigns this worker's shards and the tasks that are not reported done.

        Raises:
            OffbeatError: the manager did not answer within `timeout_s` seconds.
        """
        with self._changed:
            has_left, self._has_left, before = self._has_left, True, self._own_views
        if has_left:
            return
        try:
            self._send(WorkerGroupLeft(now_s=0.0, node=self.node, group=self.name))
            self._wait_for(
                lambda: self._own_views > before or self._failure is not None,
                "the manager to confirm that it leaves",
                timeout_s,
            )
        finally:
            self.on_end("it has left")
            self._on_left()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _iterate_tasks(self, wanted: TaskRequested, timeout_s: float) -> Iterator[ShardTask]:
        while True:
            if self._current is None or self._current.is_done_reported:
                self._current = self._next_task(wanted, timeout_s)
            if self._current is None:
                return
            yield self._current
            self._current.done()

    def _next_task(self, wanted: TaskRequested, timeout_s: float) -> ShardTask | None:
        self._check_reports()
        with self._changed:
            needs_request = not self._issued
        if needs_request:
            self._send(wanted)
        try:
            self._wait_for(
                lambda: self._issued or self._passes_ended >= wanted.passes_max, "a task", timeout_s
            )
        except OffbeatError as error:
            self._check_reports()
            if self._refused is not None or self._failure is not None:
                raise
            raise OffbeatError(f"{error}: {self._describe_behind()}") from None
        with self._changed:
            return self._issued.popleft() if self._issued else None

    def _report(self, task: ShardTask, after: list[Future]) -> None:
        done = TaskDone(now_s=0.0, node=self.node, group=self.name, task=task.number)
        if after:
            self._reports.append(self._when_done(after, lambda: self._send(done)))
        else:
            self._send(done)

    def _check_reports(self) -> None:
        """Raise the error of a request because of which a task could not be reported as done."""
        self._reports = [report for report in self._reports if not report.is_done or report.error is not None]
        for report in self._reports:
            if report.error is not None:
                raise report.error

    def _describe_behind(self) -> str:
        try:
            view = self.progress(_PROGRESS_TIMEOUT_S)
        except OffbeatError:
            return f"the manager did not report within {_PROGRESS_TIMEOUT_S:g} s which workers are behind"
        behind = [worker.node for worker in view.workers if worker.shards and worker.passes == view.passes]
        if view.unassigned:
            behind.append(f"a worker for shards {view.unassigned[0][0]} to {view.unassigned[-1][1]}")
        return f"after {view.passes} passes, the group waits for {', '.join(behind)}"

    def _members(self) -> list[str]:
        return [] if self._view is None else [worker.node for worker in self._view.workers]

    def _wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float) -> None:
        def cause() -> str | None:
            return self._failure or (None if self._has_left else self._refused)

        with self._changed:
            self._changed.wait_for(lambda: condition() or cause(), timeout_s)
            if condition():
                return
            if why := cause():
                raise OffbeatError(f"{self.node} cannot participate in the group {self.name}: {why}")
            raise OffbeatError(
                f"{self.node} in the group {self.name}: timed out after {timeout_s:g} s waiting for {what}"
            )

    # In the I/O thread --------------------------------------------------------------------------------

    def on_action(self, action: WorkerGroupAction) -> None:
        """Process an action of the manager for this group."""
        with self._changed:
            match action:
                case WorkerGroupView():
                    self._view = action
                    self._own_views += action.node == self.node
                case AssignTask():
                    self._issued.append(
                        ShardTask(action.task, action.pass_number, action.shards, self._report)
                    )
                case PassesEnded():
                    self._passes_ended = max(self._passes_ended, action.passes)
                case WorkerGroupRejected():
                    self._refused = self._refused or action.reason  # the first one has the cause
            self._changed.notify_all()

    def on_end(self, cause: str) -> None:
        """End the membership: the client is disconnected from the parameter server, or has left the group."""
        with self._changed:
            self._failure = self._failure or cause
            self._changed.notify_all()


def _checked_count(what: str, value: int, least: int) -> int:
    if not (isinstance(value, int) and least <= value < 2**63):
        raise ValueError(f"expected {least} to 2**63 - 1 {what}, got {value!r}")
    return value
