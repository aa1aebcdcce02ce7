"""A group of workers, from one of them: which shards of the data are its own, and which task comes next.

This module decides nothing: the manager's `ShardScheduler` does. It loads no data either.
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
    Event,
    GroupAction,
    GroupViewed,
    PassesEnded,
    ProgressWanted,
    TaskDone,
    TaskIssued,
    TaskWanted,
    TauSet,
    WorkerJoins,
    WorkerLeaves,
    WorkerRefused,
)
from offbeat.runtime.processes.waiting import Condition
from offbeat.runtime.ps.future import TIMEOUT_S, Future

_ASK_S: Final = 5.0  # for an answer to what is asked for an error's text


@dataclass(slots=True, eq=False)
class Task:
    """A pass over some shards.

    Attributes:
        number: no other task of the group has or had it.
        pass_number: from 0 on.
        shards: which to go through; they are the worker's own until the task is done.
    """

    number: int
    pass_number: int
    shards: tuple[int, ...]
    _report: Callable[[Task, list[Future]], None] = field(repr=False)
    is_reported: bool = False

    def done(self, after: Iterable[Future] = ()) -> None:
        """Report it done, when these requests are; the first time counts. Returns at once."""
        if not self.is_reported:
            self.is_reported = True
            self._report(self, list(after))


class WorkerGroup:
    """A client's membership in a group of workers; `PS.join_group` makes it.

    Every shard of the data is one member's at a time, and every pass over every shard is counted once, by
    whichever member. What a lost worker had is given to others, as the group's `on_worker_loss` says.

    `tasks` is for one thread at a time.

    Args:
        name: of the group.
        node: the client's name.
        tell: says something to the manager.
        when_done: see `PS.when_done`.
        on_left: called once it is no member any more.

    Attributes:
        name, node: as given.
    """

    def __init__(
        self,
        name: str,
        node: str,
        tell: Callable[[Event], None],
        when_done: Callable[[Iterable[Future], Callable[[], Any]], Future],
        on_left: Callable[[], None],
    ) -> None:
        self.name, self.node = name, node
        self._tell, self._when_done, self._on_left = tell, when_done, on_left
        self._changed = Condition()  # guards what follows, up to the empty line
        self._view: GroupViewed | None = None
        self._answers = 0  # views for this worker alone
        self._issued: deque[Task] = deque()
        self._ended = 0  # passes that all shards have been through, as far as this worker was told
        self._has_left = False
        self._refused: str | None = None
        self._failure: str | None = None

        self._current: Task | None = None
        self._reports: list[Future] = []

    def join(self, shards: int, on_loss: str, patience_s: float, timeout_s: float) -> None:
        """Become a member.

        Raises:
            ValueError: an argument that cannot be told to the manager.
            OffbeatError: there is another group with this name, or the arguments are out of range; the
                manager has not answered within `timeout_s` seconds.
        """
        if not (math.isfinite(patience_s) and patience_s >= 0):
            raise ValueError(f"expected a patience_s of 0 or more seconds, got {patience_s}")
        joins = WorkerJoins(
            now_s=0.0,
            node=self.node,
            group=self.name,
            shards=_count("shards", shards, 1),
            on_loss=on_loss,
            patience_s=patience_s,
        )
        self._tell(joins)
        try:
            self._wait_for(lambda: self.node in self._members(), "the manager to take it in", timeout_s)
        except BaseException:
            self._tell(WorkerLeaves(now_s=0.0, node=self.node, group=self.name))
            raise

    @property
    def members(self) -> list[str]:
        """The workers of the group, by name, as of what this one was told last."""
        with self._changed:
            return self._members()

    @property
    def shards(self) -> list[int]:
        """This worker's own shards, ascending, as of what it was told last; data of others may be freed."""
        with self._changed:
            workers = () if self._view is None else self._view.workers
            own = [one.shards for one in workers if one.node == self.node]
            return [shard for ranges in own for first, last in ranges for shard in range(first, last + 1)]

    @property
    def tau(self) -> int | None:
        """How many passes a shard may be ahead of any other: 0 for none, None for no bound.

        It is the group's, and holds for tasks that are issued later.
        """
        with self._changed:
            return None if self._view is None else self._view.tau

    @tau.setter
    def tau(self, tau: int | None) -> None:
        """Bound the delay, for all workers of the group, from when the manager has heard it.

        Raises:
            ValueError: it is negative.
        """
        bound = None if tau is None else _count("passes as tau", tau, 0)
        self._tell(TauSet(now_s=0.0, node=self.node, group=self.name, tau=bound))

    def progress(self, timeout_s: float = TIMEOUT_S) -> GroupViewed:
        """Ask who has which shards and is how far, which shards wait for a worker, and which are lost.

        Raises:
            OffbeatError: this worker is no member any more; the manager has not answered within `timeout_s`
                seconds.
        """
        with self._changed:
            before = self._answers
        self._tell(ProgressWanted(now_s=0.0, node=self.node, group=self.name))
        self._wait_for(lambda: self._answers > before, "the manager to say who is how far", timeout_s)
        with self._changed:
            assert self._view is not None
            return self._view

    def tasks(self, passes: int, *, shards_per_task: int = 1, timeout_s: float = TIMEOUT_S) -> Iterator[Task]:
        """Yield this worker's tasks until all shards of the group have been through `passes` passes.

        Passes are counted from the group's beginning. A task counts as done when the next one is asked for,
        or when its `done` says so: what was pushed for it has to be done by then. The loop ends when the last
        worker's tasks are done, because they come here if that one is lost. A loop that is left in the midst
        of a task begins with that task the next time.

        Args:
            passes: how many, at least 1.
            shards_per_task: at most, at least 1.
            timeout_s: how long to wait for a task, in seconds.

        Raises:
            ValueError: an argument out of range.
            OffbeatError: there was no task for `timeout_s` seconds, and says who is waited for; this worker
                was dropped; a request has failed after which a task was to be reported done.
        """
        wanted = TaskWanted(
            now_s=0.0,
            node=self.node,
            group=self.name,
            passes=_count("passes", passes, 1),
            shards_max=_count("shards in a task", shards_per_task, 1),
        )
        return self._each_task(wanted, timeout_s)

    def leave(self, timeout_s: float = TIMEOUT_S) -> None:
        """Hand the shards, and the tasks that are not reported done, back to the group.

        Raises:
            OffbeatError: the manager has not answered within `timeout_s` seconds.
        """
        with self._changed:
            has_left, self._has_left, before = self._has_left, True, self._answers
        if has_left:
            return
        try:
            self._tell(WorkerLeaves(now_s=0.0, node=self.node, group=self.name))
            self._wait_for(
                lambda: self._answers > before or self._failure is not None,
                "the manager to let it go",
                timeout_s,
            )
        finally:
            self.end("it has left")
            self._on_left()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _each_task(self, wanted: TaskWanted, timeout_s: float) -> Iterator[Task]:
        while True:
            if self._current is None or self._current.is_reported:
                self._current = self._next_task(wanted, timeout_s)
            if self._current is None:
                return
            yield self._current
            self._current.done()

    def _next_task(self, wanted: TaskWanted, timeout_s: float) -> Task | None:
        self._check_reports()
        with self._changed:
            has_to_ask = not self._issued
        if has_to_ask:
            self._tell(wanted)
        try:
            self._wait_for(lambda: self._issued or self._ended >= wanted.passes, "a task", timeout_s)
        except OffbeatError as error:
            self._check_reports()
            if self._refused is not None or self._failure is not None:
                raise
            raise OffbeatError(f"{error}: {self._who_is_behind()}") from None
        with self._changed:
            return self._issued.popleft() if self._issued else None

    def _report(self, task: Task, after: list[Future]) -> None:
        done = TaskDone(now_s=0.0, node=self.node, group=self.name, task=task.number)
        if after:
            self._reports.append(self._when_done(after, lambda: self._tell(done)))
        else:
            self._tell(done)

    def _check_reports(self) -> None:
        """Say why a task could not be reported done."""
        self._reports = [one for one in self._reports if not one.is_done or one.error is not None]
        for one in self._reports:
            if one.error is not None:
                raise one.error

    def _who_is_behind(self) -> str:
        try:
            view = self.progress(_ASK_S)
        except OffbeatError:
            return f"the manager has not said within {_ASK_S:g} s who is waited for"
        behind = [one.node for one in view.workers if one.shards and one.passes == view.passes]
        if view.waiting:
            behind.append(f"a worker for shards {view.waiting[0][0]} to {view.waiting[-1][1]}")
        return f"after {view.passes} passes, it is waited for {', '.join(behind)}"

    def _members(self) -> list[str]:
        return [] if self._view is None else [one.node for one in self._view.workers]

    def _wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float) -> None:
        def cause() -> str | None:
            return self._failure or (None if self._has_left else self._refused)

        with self._changed:
            self._changed.wait_for(lambda: condition() or cause(), timeout_s)
            if condition():
                return
            if why := cause():
                raise OffbeatError(f"{self.node} cannot take part in the group {self.name}: {why}")
            raise OffbeatError(
                f"in the group {self.name}, {self.node} waited {timeout_s:g} s in vain for {what}"
            )

    # In the links' thread --------------------------------------------------------------------------------

    def hear(self, action: GroupAction) -> None:
        """The manager has said something of this group."""
        with self._changed:
            match action:
                case GroupViewed():
                    self._view = action
                    self._answers += action.node == self.node
                case TaskIssued():
                    self._issued.append(Task(action.task, action.pass_number, action.shards, self._report))
                case PassesEnded():
                    self._ended = max(self._ended, action.passes)
                case WorkerRefused():
                    self._refused = self._refused or action.reason  # the first says why
            self._changed.notify_all()

    def end(self, cause: str) -> None:
        """The client is out of the parameter server."""
        with self._changed:
            self._failure = self._failure or cause
            self._changed.notify_all()


def _count(what: str, value: int, least: int) -> int:
    if not (isinstance(value, int) and least <= value < 2**63):
        raise ValueError(f"expected {least} to 2**63 - 1 {what}, got {value!r}")
    return value
