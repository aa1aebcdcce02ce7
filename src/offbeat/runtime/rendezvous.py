"""How the workers of a job find one another: rank 0 starts the coordinator and says where it is.

The address travels through the job's torch TCPStore, the one thing that every launcher sets up. Nothing
but that address and the job's token is ever put there.
"""

from __future__ import annotations

import datetime
import itertools
import json
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from offbeat.errors import OffbeatError
from offbeat.runtime.coordinator import Configuration
from offbeat.runtime.environment import Environment

START_DEADLINE_S = 30.0
_COORDINATOR_START_S = 20.0
_joins = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where a worker's job meets.

    Attributes:
        host: the address at which this worker's host is reached by the others.
        coordinator: the coordinator's addresses, best first.
        store: the job's store, under a prefix of this join's own; None in a world of one.
    """

    job: str
    token: str
    host: str
    coordinator: tuple[str, ...]
    store: Store | None


def meet(environment: Environment, configure: Callable[[str, str, str], Configuration]) -> Meeting:
    """Brings a worker to its job's coordinator; rank 0 starts it first.

    Args:
        environment: this worker's place.
        configure: makes the coordinator's configuration from job, token and host.

    Raises:
        OffbeatError: the store or the coordinator could not be reached or started within 30 s.
    """
    limit_s = time.monotonic() + START_DEADLINE_S
    host = _own_address(environment.master_addr)
    store = None if environment.world == 1 else _open_store(environment, limit_s)
    if environment.rank == 0:
        job, token = secrets.token_hex(8), secrets.token_hex(32)
        addresses = start_coordinator(configure(job, token, host))
        if store is not None:
            store.set("meeting", json.dumps({"job": job, "token": token, "coordinator": addresses}))
        return Meeting(job=job, token=token, host=host, coordinator=addresses, store=store)
    assert store is not None
    try:
        store.wait(["meeting"], datetime.timedelta(seconds=max(1.0, limit_s - time.monotonic())))
    except (dist.DistError, RuntimeError) as error:
        raise OffbeatError(
            f"rank 0 has not opened the job at {environment.master_addr}:{environment.master_port} within "
            f"{START_DEADLINE_S:g} s (rank {environment.rank} waits): is rank 0 running, and does it call "
            "offbeat.join?"
        ) from error
    found = json.loads(store.get("meeting"))
    return Meeting(
        job=found["job"],
        token=found["token"],
        host=host,
        coordinator=tuple(found["coordinator"]),
        store=store,
    )


def start_coordinator(configuration: Configuration) -> tuple[str, ...]:
    """Starts the coordinator as a process of its own, which outlives its starter, and returns its addresses.

    Raises:
        OffbeatError: it did not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat.runtime.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(configuration) + b"\n")
    process.stdin.close()
    if not select.select([process.stdout], [], [], _COORDINATOR_START_S)[0]:
        process.kill()
        raise OffbeatError(f"the coordinator did not answer within {_COORDINATOR_START_S:g} s of its start")
    line = process.stdout.readline()
    process.stdout.close()
    answer = json.loads(line) if line else {"error": "it ended without a word"}
    if "error" in answer:
        raise OffbeatError(f"the coordinator did not start: {answer['error']}")
    return tuple(answer["addresses"])


def _open_store(environment: Environment, limit_s: float) -> Store:
    prefix = f"offbeat/{environment.attempt}/{next(_joins)}"
    if dist.is_initialized():
        return PrefixStore(prefix, _get_default_store())
    where = f"{environment.master_addr}:{environment.master_port}"
    hosts_it = environment.rank == 0 and not environment.agent_hosts_store
    try:
        store = TCPStore(
            environment.master_addr,
            environment.master_port,
            is_master=hosts_it,
            timeout=datetime.timedelta(seconds=max(1.0, limit_s - time.monotonic())),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError) as error:
        if hosts_it:
            raise OffbeatError(
                f"rank 0 cannot listen on port {environment.master_port}: it is taken, or another process "
                "has rank 0 too; choose another MASTER_PORT (torchrun --master-port), or give each worker a "
                "rank of its own"
            ) from error
        raise OffbeatError(
            f"rank {environment.rank} cannot reach the job's store at {where} within {START_DEADLINE_S:g} s: "
            "is rank 0 running, and are MASTER_ADDR and MASTER_PORT its own?"
        ) from error
    return PrefixStore(prefix, store)


def _own_address(master_addr: str) -> str:
    """The address of the interface that leads to the master; connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master_addr, 1))
        except OSError as error:
            raise OffbeatError(
                f"MASTER_ADDR {master_addr!r} leads nowhere from this host: {error}"
            ) from error
        address: str = probe.getsockname()[0]
        return address
