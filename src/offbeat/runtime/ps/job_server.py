"""A server that belongs to a training job and that no worker has started.

It finds the job where workers find it, at OFFBEAT_COORDINATOR; this module never starts a process.
"""

from __future__ import annotations

import time

from offbeat.runtime.control.admission import ServerRequest
from offbeat.runtime.control.environment import DEFAULT_JOB, Environment, coordinator_address, read_token
from offbeat.runtime.control.requesting import find_host, request_admission
from offbeat.runtime.ps.node import ClusterFile
from offbeat.runtime.ps.server import ServerConfiguration
from offbeat.runtime.transport.addresses import own_address


def request_configuration(environment: Environment, host: str | None) -> ServerConfiguration:
    """Wait until the job has begun, and return the configuration of a server in it.

    Args:
        environment: has the coordinator, the name and the secret of the job, the attempt, and how long the
            job's start may take.
        host: the address to listen on and to be reached at; None for the one that reaches the coordinator.

    Raises:
        OffbeatError: no coordinator was reached or no job has begun in time, or the job has no parameter
            server.
    """
    assert environment.coordinator is not None
    limit_s = time.monotonic() + environment.start_s
    address = coordinator_address(environment.coordinator)
    job, token = environment.job_name or DEFAULT_JOB, read_token(environment.token_file)
    coordinator_host = find_host(address, limit_s)
    request_admission(
        address,
        ServerRequest(attempt=environment.attempt),
        job=job,
        token=token,
        timeout_s=limit_s - time.monotonic(),
    )
    cluster = ClusterFile(job=job, token=token, manager=(address,), is_service=True)
    return ServerConfiguration(cluster=cluster, host=host or own_address(coordinator_host))
