"""A meeting of the workers with which a job would start: they exchange texts, and no coordinator is needed.

The texts are in the job's store, under keys of their own, so that a training may follow in the same job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from torch.distributed.distributed_c10d import PrefixStore, Store

from offbeat.errors import WorkerError
from offbeat.runtime.control.environment import Environment
from offbeat.runtime.control.rendezvous import gather_values, hosts_job_store, open_job_store
from offbeat.runtime.control.starting import new_job_id_and_token
from offbeat.runtime.transport.addresses import own_address

_HOST_STAYS_S: Final = 3.0  # after a worker was missing, so that the others see it in the store, too

# By process, worker, attempt, job and its address: kept for the next meeting, as torch sometimes takes 5 s to
# close the connection to a store.
_stores: dict[tuple[int | str | None, ...], Store] = {}


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One worker's view of a meeting.

    Attributes:
        worker: this worker's id.
        world: number of workers.
        host: the address at which other workers reach this worker's host.
        job: an id that all workers of the meeting have, drawn at random.
        token: a secret that all of them have.
    """

    worker: int
    world: int
    host: str
    job: str
    token: str
    _store: Store = field(repr=False)
    _hosts_store: bool = field(repr=False)

    def gather(self, key: str, value: str, within_s: float) -> list[str]:
        """Return what the workers have given for a key, by worker; each has to call it, once for each key.

        Args:
            key: what is given, in one word or two.
            value: of this worker.
            within_s: how long to wait for the others, in seconds.

        Raises:
            WorkerError: a worker did not call it in time, or has left.
        """
        return _gather(self._store, self.worker, self.world, key, value, within_s, hosts=self._hosts_store)


@contextmanager
def meet(environment: Environment) -> Iterator[Meeting]:
    """Context of a meeting, which all workers leave together.

    Args:
        environment: of a worker of a job with several, whose workers start the coordinator.

    Raises:
        OffbeatError: the store could not be reached in time.
        WorkerError: a worker did not come in time; where the store is, also to the end.
    """
    rank, world, start_s = environment.rank, environment.world, environment.start_s
    host = own_address(environment.master_addr)
    of_job = PrefixStore("meeting", _open_store(environment))
    number = of_job.add(f"of/{rank}", 1)  # a later process of this rank does not find the texts of this one
    store = PrefixStore(str(number), of_job)
    hosts, own = hosts_job_store(environment), json.dumps(new_job_id_and_token())
    job, token = json.loads(_gather(store, rank, world, "arrival", own, start_s, hosts=hosts)[0])
    yield Meeting(worker=rank, world=world, host=host, job=job, token=token, _store=store, _hosts_store=hosts)
    try:
        gather_values(store, rank, world, "end", "", start_s)
    except WorkerError:
        if hosts:  # to another worker it means that the host has seen them all
            raise


def _open_store(environment: Environment) -> Store:
    place = (
        *(os.getpid(), environment.rank, environment.attempt),
        *(environment.job_name, environment.master_addr, environment.master_port),
    )
    if place not in _stores:
        _stores[place] = open_job_store(environment, time.monotonic() + environment.start_s)
    return _stores[place]


def _gather(
    store: Store, rank: int, world: int, key: str, value: str, within_s: float, *, hosts: bool
) -> list[str]:
    try:
        return gather_values(store, rank, world, key, value, within_s)
    except WorkerError:
        if hosts:
            time.sleep(_HOST_STAYS_S)
        raise
