"""A run of two workers, as the coordinator records it."""

from pathlib import Path
from typing import get_args

from offbeat.events import (
    Event,
    Lost,
    Ready,
    Tick,
)
from offbeat.policies import dispatch_event
from offbeat.wire.log_file import LOG_VERSION, LogWriter, RunRecord
from offbeat.wire.replay import build_policy
from support.every_event import HEADER
from support.joined_events import joined


def recorded_run() -> RunRecord:
    """Two workers train three rounds, then one is lost; entries as the coordinator records them."""
    policies = [build_policy(policy["path"], policy["arguments"]) for policy in HEADER["policies"]]
    events: list[Event] = [joined(worker) for worker in (0, 1)]
    events += [
        Ready(
            now_s=2.0 + round_,
            worker=worker,
            generation=0,
            epoch=0,
            step=round_,
            round=round_,
            compute_s=0.1,
            samples=1,
            blocks=(),
        )
        for round_ in range(3)
        for worker in (1, 0)
    ]
    events += [Lost(now_s=9.0, worker=1, cause="closed"), Tick(now_s=10.0)]
    entries = [thing for event in events for thing in (event, *dispatch_event(policies, event))]
    return RunRecord(header={"offbeat_log": LOG_VERSION, **HEADER}, entries=entries)


def write_log(log: RunRecord, path: Path) -> None:
    """Writes a log as the coordinator does, entry by entry."""
    writer = LogWriter(path, log.header)
    for entry in log.entries:
        if isinstance(entry, get_args(Event)):
            writer.add_event(entry)
        else:
            writer.add_actions([entry])
    writer.close()
