"""The nodes of a job: hosts whose workers are started by one launcher each, and the store that all share.

The launcher of node 0 hosts the job's torch TCPStore, as torchrun's agent does, so that a worker that is
started again finds the job whichever worker has died. The launchers of other nodes connect to that store
before they start a worker, compare what the job is, and get its name from there; later they only ask it
whether the job has started. With the process of node 0's launcher the store ends: running workers do not need
it, but none can be started again.

Where the workers find a coordinator that belongs to no worker (OFFBEAT_COORDINATOR), there is no store: the
launchers know nothing of each other.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import JOB_VARIABLE, Environment

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_JOB: Final = "offbeat/launch"  # what node 0's launcher starts
_NODES: Final = "offbeat/launch/node"  # followed by a node's rank: how many launchers had it
DEFAULT_PORT: Final = 29500  # torchrun's
_STARTED_S: Final = 2.0  # how long the store of a host that is gone may delay the launcher


@dataclass(frozen=True, kw_only=True)
class Node:
    """This host's place in the job, and what its workers need to find the job.

    Attributes:
        rank: of this host, 0 <= rank < count.
        count: number of hosts.
        workers: on each host.
        env: variables for the workers; without those of a single worker.
        store: the job's store, hosted by this process on node 0; None where no store is needed.
    """

    rank: int
    count: int
    workers: int
    env: dict[str, str]
    store: Store | None

    @property
    def world(self) -> int:
        """Number of workers with which the job starts."""
        return self.count * self.workers

    def can_join_again(self) -> bool:
        """Whether a worker that is started again now finds the job running.

        A coordinator that belongs to no worker decides that itself, and lets the worker wait.
        """
        from offbeat.runtime.control.rendezvous import has_job_started

        return self.store is None or has_job_started(self.store, _STARTED_S)


def open_node(
    environment: Environment,
    *,
    rank: int,
    count: int,
    workers: int,
    master_addr: str | None,
    master_port: int | None,
) -> Node:
    """Host the job's store on node 0, or connect to it on another; where one is needed.

    Args:
        environment: the launcher's settings.
        rank: of this host.
        count: number of hosts.
        workers: on each host.
        master_addr: address of node 0; None for this host, where there is only one.
        master_port: port of the store; None for a free one, or with several hosts `DEFAULT_PORT`.

    Raises:
        ValueError: an invalid argument.
        OffbeatError: the port is in use, node 0 was not reached in time, or it has started another job.
    """
    if count < 1:
        raise ValueError(f"expected at least 1 node, got {count}")
    if not 0 <= rank < count:
        raise ValueError(f"expected a node rank from 0 to {count - 1}, got {rank}")
    if workers < 1:
        raise ValueError(f"expected at least 1 worker per node, got {workers}")
    place = {
        "WORLD_SIZE": str(count * workers),
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(count),
    }
    if environment.coordinator is not None:
        master = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
        place |= {name: str(value) for name, value in master.items() if value is not None}
        return Node(rank=rank, count=count, workers=workers, env=place, store=None)
    if master_addr is None and count > 1:
        raise ValueError("expected --master-addr, the address of node 0, where there are several nodes")
    host = master_addr or "127.0.0.1"
    port = (0 if count == 1 else DEFAULT_PORT) if master_port is None else master_port
    job = {"nodes": count, "workers": workers, "name": environment.job_name}
    if rank == 0:
        store, port, name = _host_store(host, port, job)
    else:
        store, name = _join_store(host, port, job, rank, environment)
    found = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        JOB_VARIABLE: name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # for torch too: no worker hosts the store
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return Node(rank=rank, count=count, workers=workers, env=place | found, store=store)


def _host_store(host: str, port: int, job: dict[str, Any]) -> tuple[Store, int, str]:
    from offbeat.runtime.control.rendezvous import open_store

    try:
        store = open_store(host, port, is_host=True)
    except RuntimeError as error:
        raise OffbeatError(
            f"cannot listen at {host}:{port} for the job's store: is the address this host's own? If so, the "
            "port is in use: choose another --master-port"
        ) from error
    name = job["name"] or secrets.token_hex(4)  # two launches may use the same port
    store.set(_JOB, json.dumps(job | {"name": name}))
    return store, store.port, name


def _join_store(
    host: str, port: int, job: dict[str, Any], rank: int, environment: Environment
) -> tuple[Store, str]:
    from offbeat.runtime.control.rendezvous import reach_store

    def read(store: Store) -> tuple[dict[str, Any], bool]:
        found: dict[str, Any] = json.loads(store.get(_JOB))
        return found, store.add(f"{_NODES}/{rank}", 1) == 1

    try:
        store, (found, is_first) = reach_store(host, port, environment.start_s, read)
    except (RuntimeError, TimeoutError) as error:
        raise OffbeatError(
            f"node {rank} has not reached the launcher of node 0 at {host}:{port} within "
            f"{environment.start_s:g} s: does 'offbeat run --node-rank 0' run there, and are --master-addr "
            "and --master-port its own?"
        ) from error
    expected = job | {"name": environment.job_name or found["name"]}
    if found != expected:
        raise OffbeatError(f"node 0 starts {_described(found)}, and node {rank} {_described(expected)}")
    if not is_first:
        raise OffbeatError(f"another launcher has --node-rank {rank}: give each node a rank of its own")
    return store, found["name"]


def _described(job: dict[str, Any]) -> str:
    return f"job {job['name']!r} on {job['nodes']} nodes with {job['workers']} workers each"
