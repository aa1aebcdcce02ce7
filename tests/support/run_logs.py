"""What the run log of a job shows, while the job runs and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from offbeat.events import Action, Event, Group, StepsTimed, StepTimes
from offbeat.wire.log_file import read_log

WAIT_S = 60.0


def entries_of(log: Path, *kinds: type) -> list[Any]:
    """The entries of these kinds, or all; none as long as the log has not been begun."""
    if not log.exists() or log.stat().st_size == 0:
        return []
    return [entry for entry in read_log(log).entries if not kinds or isinstance(entry, kinds)]


def groups_of(log: Path) -> list[Group]:
    return entries_of(log, Group)


def step_times(entries: Iterable[Event | Action], worker: int | None = None) -> list[StepTimes]:
    """The times of the steps of a worker, or of all workers, in the order of the log."""
    events = [entry for entry in entries if isinstance(entry, StepsTimed) and worker in (None, entry.worker)]
    return [times for event in events for times in event.steps]


def wait_until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    """Waits until the condition holds, which may read logs, and leaves the machine to who is waited for."""
    limit_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < limit_s, f"there never was {what}"
        time.sleep(0.01)


def wait_for_entry(log: Path, what: str, condition: Callable[[Any], bool]) -> None:
    """Waits until the log has an entry for which the condition holds."""
    wait_until(lambda: any(map(condition, entries_of(log))), what)


def wait_for_group_without(log: Path, worker: int) -> None:
    wait_until(
        lambda: any(worker not in group.members for group in groups_of(log)),
        f"a group without worker {worker}",
    )
