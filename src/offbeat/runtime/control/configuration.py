"""The configuration of a coordinator, as its starter writes it and its process reads it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from offbeat.runtime.monitoring.settings import MonitoringSettings

COORDINATOR: Final = "coordinator"  # the name of its node
PARAMETER_SERVER_PATH: Final = "offbeat.policies.ps.manager:PsManager"  # the policy of a job that has one


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The policy to build: `path` is `module:Class` inside `offbeat.policies`."""

    path: str
    arguments: dict[str, Any] = {}


class CoordinatorConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a coordinator.

    Attributes:
        host: the address on which it listens and is reached.
        policies: the job's policies, in order; none where the first worker brings them (see
            `offbeat.runtime.control.service`).
        log_path: path of the run log, None for no log.
        log_bytes_max: size limit of the log in bytes, all parts together; None for one file without a limit.
        log_header: further plain data for the log's header.
        monitoring: where it shows the running job.
        tick_s: interval of the policies' Tick events, in seconds.
        silent_s: a worker from which nothing was received for this many seconds is lost.
        linger_s: how long after its start, in seconds, a coordinator that has not started the job stays for
            workers that may still join, to send them the reason; as long as it waits for them.
        journal_events_max: after this many events the journal is replaced by the state of the policies; with
            more than 256 peers, after more events in proportion. At most so many are replayed when the
            coordinator is restarted (10 000 took 0.2 s on one core).
    """

    job: str
    token: str
    host: str
    policies: tuple[PolicySpec, ...]
    log_path: str | None = None
    log_bytes_max: int | None = None
    log_header: dict[str, Any] = {}
    monitoring: MonitoringSettings = MonitoringSettings()
    tick_s: float = 0.25
    silent_s: float = 10.0
    linger_s: float = 30.0
    journal_events_max: int = 10_000
