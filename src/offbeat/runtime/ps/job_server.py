"""A server that belongs to a training job and that no worker has started.

It finds the job where workers find it, at OFFBEAT_COORDINATOR; this module never starts a process.
"""

from __future__ import annotations

from offbeat.runtime.control.admission import ServerRequest
from offbeat.runtime.control.environment import DEFAULT_JOB, Environment, parse_coordinator, read_token
from offbeat.runtime.control.requesting import request_admission
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
    address = f"tcp://{environment.coordinator}"
    job, token = environment.job_name or DEFAULT_JOB, read_token(environment.token_file)
    request_admission(
        address,
        ServerRequest(attempt=environment.attempt),
        job=job,
        token=token,
        timeout_s=environment.start_s,
    )
    coordinator_host, _ = parse_coordinator(environment.coordinator, "the coordinator's address")
    cluster = ClusterFile(job=job, token=token, manager=(address,), is_service=True)
    return ServerConfiguration(cluster=cluster, host=host or own_address(coordinator_host))
