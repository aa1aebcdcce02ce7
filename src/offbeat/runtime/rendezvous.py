"""How the workers of a job find one another: rank 0 starts the coordinator and says where it is.

The address travels through the job's torch TCPStore, the one thing that every launcher sets up. Nothing
but that address, the job's token and size and the ids that newcomers were given is ever put there.
"""

from __future__ import annotations

import datetime
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from offbeat.errors import OffbeatError
from offbeat.runtime.addresses import own_address
from offbeat.runtime.coordinator import Configuration
from offbeat.runtime.environment import Environment
from offbeat.runtime.starting import new_secrets, start_coordinator

_KEY = "meeting"
_COUNT = "workers"
_RUNNING = "offbeat/running"  # where the job meets that has started last; no prefix, for newcomers know none
_NEWCOMERS = "offbeat/newcomers"  # how many ids were drawn; likewise, so that none comes twice
# How often each rank of this process has joined a job, by how many threads of it did so, too.
_joins: Counter[tuple[int, int]] = Counter()
_inside = HashStore()  # where the threads of a world of one process meet
_hosted: dict[int, Store] = {}  # by port; kept, for a worker quick to join again may be connected already
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where a worker's job meets.

    Attributes:
        worker: this worker's id.
        world: how many workers the job has at the start.
        host: the address at which this worker's host is reached by the others.
        coordinator: the coordinator's addresses, best first.
        store: the job's store, under a prefix of this join's own; None in a world of one.
        hosts_store: this process has the store, and takes it with it when it ends.
        start_s: how long the start may take, in seconds.
        limit_s: until when the others may still come, on the monotonic clock.
    """

    worker: int
    world: int
    job: str
    token: str
    host: str
    coordinator: tuple[str, ...]
    store: Store | None
    hosts_store: bool
    start_s: float
    limit_s: float

    def announce(self) -> None:
        """Says where the job is that has started, to those who will be new in it."""
        if self.store is not None:
            place = {
                "job": self.job,
                "token": self.token,
                "coordinator": self.coordinator,
                "world": self.world,
            }
            _root(self.store).set(_RUNNING, json.dumps(place))

    def outlast_the_late(self) -> None:
        """Waits until every worker has met the coordinator, where the store would go with this process.

        Rank 0 does this before it fails, so that who comes later learns from the coordinator why the job
        cannot start, instead of finding nobody.
        """
        if self.hosts_store and self.store is not None:
            _wait_for_everybody(self.store, self.limit_s, self.start_s)


def meet(environment: Environment, configure: Callable[[str, str, str], Configuration]) -> Meeting:
    """Brings a worker to its job's coordinator; rank 0 starts it first.

    Args:
        environment: this worker's place.
        configure: makes the coordinator's configuration from job, token and host.

    Raises:
        OffbeatError: the store or the coordinator could not be reached or started in time.
    """
    limit_s = time.monotonic() + environment.start_s
    host = own_address(environment.master_addr)
    if environment.is_newcomer:
        return _meet_as_newcomer(environment, host, limit_s)
    hosts_store = environment.rank == 0 and not environment.agent_hosts_store and not dist.is_initialized()
    store = None if environment.world == 1 else _open_store(environment, hosts_store, limit_s)
    found: dict[str, Any]
    if environment.rank == 0:
        job, token = new_secrets()
        try:
            addresses = start_coordinator(configure(job, token, host))
            found = {"job": job, "token": token, "coordinator": addresses}
        except OffbeatError as error:
            if store is not None:
                store.set(_KEY, json.dumps({"error": str(error)}))
                _count(store, environment)
                if hosts_store:
                    _wait_for_everybody(store, limit_s, environment.start_s)
            raise
        if store is not None:
            store.set(_KEY, json.dumps(found))
            _count(store, environment)
    else:
        assert store is not None
        found = _ask(store, environment, limit_s)
    if "error" in found:
        raise OffbeatError(f"rank 0 could not open the job: {found['error']}")
    return Meeting(
        worker=environment.rank,
        world=environment.world,
        job=found["job"],
        token=found["token"],
        host=host,
        coordinator=tuple(found["coordinator"]),
        store=store,
        hosts_store=hosts_store,
        start_s=environment.start_s,
        limit_s=limit_s,
    )


def open_store(host: str, port: int, *, hosts_it: bool, timeout_s: float = Environment.start_s) -> Store:
    """Opens a job's store, or makes it; what is asked of it takes at most `timeout_s` seconds."""
    return TCPStore(
        host,
        port,
        is_master=hosts_it,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def has_started(store: Store) -> bool:
    """Whether a job has started that meets in this store."""
    return bool(store.check([_RUNNING]))


def draw_id(store: Store, world: int) -> int:
    """Draws an id for a newcomer, which nobody else gets from this store."""
    return world + int(store.add(_NEWCOMERS, 1)) - 1


def _meet_as_newcomer(environment: Environment, host: str, limit_s: float) -> Meeting:
    """Finds the job that runs now, how many workers that began with, and an id of its own.

    Raises:
        OffbeatError: there is no store, or no job that has started.
    """
    where = f"{environment.master_addr}:{environment.master_port}"

    def find() -> tuple[Store, dict[str, Any], int]:
        store = _reach_store(environment, hosts_it=False)
        store.wait([_RUNNING], datetime.timedelta(seconds=environment.start_s))
        found: dict[str, Any] = json.loads(store.get(_RUNNING))
        worker = draw_id(store, found["world"]) if environment.rank < 0 else environment.rank
        return store, found, worker

    try:
        store, found, worker = _in_time(find, limit_s)
    except (RuntimeError, TimeoutError) as error:
        raise OffbeatError(
            f"a newcomer found no running job at {where} within {environment.start_s:g} s: have all its "
            "workers come, does the process live that hosts its store (the launcher, or rank 0), and are "
            "MASTER_ADDR and MASTER_PORT what they are in the job?"
        ) from error
    return Meeting(
        worker=worker,
        world=found["world"],
        job=found["job"],
        token=found["token"],
        host=host,
        coordinator=tuple(found["coordinator"]),
        store=store,
        hosts_store=False,
        start_s=environment.start_s,
        limit_s=limit_s,
    )


def _root(store: Store) -> Store:
    """The store itself, whatever prefixes it is used with."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _reach_store(environment: Environment, *, hosts_it: bool) -> Store:
    return open_store(
        environment.master_addr, environment.master_port, hosts_it=hosts_it, timeout_s=environment.start_s
    )


def _open_store(environment: Environment, hosts_it: bool, limit_s: float) -> Store:
    threads = len(environment.threads)
    prefix = f"offbeat/{environment.attempt}/{threads}/{_joins[threads, environment.rank]}"
    _joins[threads, environment.rank] += 1
    if len(environment.threads) == environment.world:
        return PrefixStore(prefix, _inside)
    if dist.is_initialized():
        return PrefixStore(prefix, _get_default_store())
    where = f"{environment.master_addr}:{environment.master_port}"

    try:
        store = _in_time(lambda: _reach_store(environment, hosts_it=hosts_it), limit_s)
    except (RuntimeError, TimeoutError) as error:
        if hosts_it:
            raise OffbeatError(
                f"rank 0 cannot listen on port {environment.master_port}: it is taken, or another process "
                "has rank 0 too; choose another MASTER_PORT (torchrun --master-port), or give each worker a "
                "rank of its own"
            ) from error
        raise OffbeatError(
            f"rank {environment.rank} cannot reach the job's store at {where} within "
            f"{environment.start_s:g} s: is rank 0 running, and are MASTER_ADDR and MASTER_PORT its own?"
        ) from error
    if hosts_it:
        _hosted.setdefault(environment.master_port, store)
    return PrefixStore(prefix, store)


def _ask(store: Store, environment: Environment, limit_s: float) -> dict[str, Any]:
    """What rank 0 has put into the store, waited for."""

    def wait() -> dict[str, Any]:
        store.wait([_KEY], datetime.timedelta(seconds=environment.start_s))
        found: dict[str, Any] = json.loads(store.get(_KEY))
        _count(store, environment)
        return found

    where = f"{environment.master_addr}:{environment.master_port}"
    try:
        return _in_time(wait, limit_s)
    except TimeoutError as error:
        raise OffbeatError(
            f"rank 0 has not opened the job at {where} within {environment.start_s:g} s "
            f"(rank {environment.rank} waits): is rank 0 running, and does it call offbeat.join?"
        ) from error
    except RuntimeError as error:
        raise OffbeatError(
            f"rank {environment.rank} lost the job's store at {where} before rank 0 opened the job: "
            "see what rank 0 wrote"
        ) from error


def _count(store: Store, environment: Environment) -> None:
    """Notes that one more worker knows where to go, and how many it believes there are."""
    place = store.add(_COUNT, 1)
    store.set(f"{_COUNT}/{place}", str(environment.world))


def _wait_for_everybody(store: Store, limit_s: float, start_s: float) -> None:
    """Waits for as many as the one says who believes in the most."""

    def wait() -> None:
        come, world = 0, 1
        while come < world:
            come += 1
            place = f"{_COUNT}/{come}"
            store.wait([place], datetime.timedelta(seconds=start_s))
            world = max(world, int(store.get(place)))

    with suppress(RuntimeError, TimeoutError):
        _in_time(wait, limit_s)


def _in_time(function: Callable[[], _T], limit_s: float) -> _T:
    """Runs what blocks deaf to Ctrl-C, and longer than the timeout that it was given.

    A TCPStore that connects to a stranger who says nothing waits for ever (torch 2.13); to nobody, twice its
    timeout. The thread is left behind then.

    Raises:
        TimeoutError: it was not done at `limit_s` of the monotonic clock.
    """
    results: queue.SimpleQueue[tuple[_T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, name="offbeat meets", daemon=True).start()
    try:
        result, error = results.get(timeout=max(0.0, limit_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(_T, result)
