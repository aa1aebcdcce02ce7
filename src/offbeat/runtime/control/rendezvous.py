"""How the workers of a job find one another: rank 0 starts the coordinator and says where it is.

The address travels through the job's torch TCPStore, the one thing that every launcher sets up. Nothing
but that address, the job's name, token and size and the ids that newcomers were given is ever put there.

Several jobs may come to one store, by intention (a launcher's store serves them all) or by mistake (two jobs
were given the same MASTER_PORT). All keys of a job begin with its name, so that its workers find only each
other. Each rank 0 lists its job's name under a key that all jobs share, so that a worker of another job is
told which jobs are there instead.
"""

from __future__ import annotations

import datetime
import errno
import json
import queue
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import quote

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from offbeat.errors import OffbeatError, explain
from offbeat.runtime.control.coordinator import Configuration
from offbeat.runtime.control.environment import Environment
from offbeat.runtime.control.starting import new_secrets, start_coordinator
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport import descriptors
from offbeat.runtime.transport.addresses import own_address
from offbeat.runtime.transport.descriptors import is_none_left

_KEY = "meeting"
_FAILED = "failed"  # why a worker that has reached the store cannot take part
_COUNT = "workers"
_JOBS = "offbeat/jobs"  # how many jobs have been opened here; with a number, the name of each
# Where the job meets that has started last, and with a job's name, where that one does; without the prefix of
# a join, for newcomers know none.
_RUNNING = "offbeat/running"
_NEWCOMERS = "offbeat/newcomers"  # how many ids were drawn; likewise, so that none comes twice
# How often each rank of this process has joined a job, by how many threads of it did so, too.
_joins: Counter[tuple[int, int]] = Counter()
_inside = HashStore()  # where the threads of a world of one process meet
_hosted: dict[int, Store] = {}  # by port; kept, for a worker quick to join again may be connected already
_NAMED_MAX = 8
_LOOK_S = 5.0  # how long to look which job has taken the port
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
        job_name: the job's name in the store, None where it has none.
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
    job_name: str | None = None

    def announce(self) -> None:
        """Says where the job is that has started, to those who will be new in it."""
        if self.store is not None:
            place = {
                "job": self.job,
                "token": self.token,
                "coordinator": self.coordinator,
                "world": self.world,
            }
            for key in {_RUNNING, _running(self.job_name)}:
                _root(self.store).set(key, json.dumps(place))

    def tell_failure(self, error: BaseException) -> None:
        """Says to all who still wait for the start why this worker cannot take part; see `failure`."""
        if self.store is not None:
            _set_failed(self.store, self.worker, error)

    def failure(self) -> str | None:
        """Why a worker cannot take part that could not tell the coordinator; None as far as is known."""
        with suppress(RuntimeError):
            if self.store is not None and self.store.check([_FAILED]):
                told: str = json.loads(self.store.get(_FAILED))
                return told
        return None

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
    _check_files(environment, limit_s)
    if environment.is_newcomer:
        return _meet_as_newcomer(environment, own_address(environment.master_addr), limit_s)
    hosts_store = _hosts_store(environment)
    store = None if environment.world == 1 else _open_store(environment, hosts_store, limit_s)
    found: dict[str, Any] = {}
    try:
        if environment.rank == 0 and store is not None:
            _list_job(store, environment, hosts_store)
        host = own_address(environment.master_addr)
        if environment.rank == 0:
            job, token = new_secrets()
            found = {
                "job": job,
                "token": token,
                "coordinator": start_coordinator(configure(job, token, host)),
            }
    except Exception as error:
        told = as_told(error)
        if store is not None:
            _tell_failure(store, environment, told, limit_s)
        raise told from error
    if environment.rank == 0:
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
        job_name=environment.job_name,
    )


def _check_files(environment: Environment, limit_s: float) -> None:
    """Sees that this worker may open as many files as its start needs, before it opens any.

    Raises:
        OffbeatError: it may not; all workers that can reach the store are told.
    """
    try:
        descriptors.check(_files_needed(environment))
    except OffbeatError as error:
        if environment.world > 1 and not environment.is_newcomer:
            with descriptors.as_many_as_allowed(), suppress(OffbeatError):  # where the store is out of reach
                descriptors.check(_files_of_store(environment))
                store = _open_store(environment, _hosts_store(environment), limit_s)
                if environment.rank == 0:
                    _list_job(store, environment, _hosts_store(environment))
                _tell_failure(store, environment, error, limit_s)
        who = "this newcomer" if environment.is_newcomer else f"worker {environment.rank}"
        raise OffbeatError(f"{who} cannot begin: {error}") from error


def _files_needed(environment: Environment) -> int:
    """How many files this process, or one that it starts, has to open for a start."""
    world, threads = environment.world, len(environment.threads)
    # As one of a group; or on servers, which it starts before it opens its client of them.
    rest = max(min(world - 1, descriptors.PEERS), descriptors.CHILD, descriptors.NODE + environment.servers)
    own = _files_of_store(environment) + descriptors.NODE * threads + rest + descriptors.START
    if environment.rank:
        return own
    return max(own, descriptors.NODE + descriptors.COORDINATOR + world)


def _files_of_store(environment: Environment) -> int:
    """How many files this process has to open for the job's store."""
    is_hosted = _hosts_store(environment) and len(environment.threads) < environment.world
    return descriptors.STORE + (descriptors.HOSTED_STORE + environment.world if is_hosted else 0)


def _hosts_store(environment: Environment) -> bool:
    """Whether this process has the job's store, and takes it with it when it ends."""
    return environment.rank == 0 and not environment.agent_hosts_store and not dist.is_initialized()


def as_told(error: Exception) -> OffbeatError:
    """Return an error as all workers of a job are told of it."""
    if isinstance(error, OffbeatError):
        return error
    return OffbeatError(explain(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")


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

    Without a job's name it takes the job that has started last.

    Raises:
        OffbeatError: there is no store, or no job that has started, or only those of other names.
    """
    where = _where(environment)

    def find() -> tuple[Store, dict[str, Any], int]:
        store = _reach_store(environment, hosts_it=False)
        found = _wait_for(store, _running(environment.job_name), environment, limit_s)
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
        job_name=environment.job_name,
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
    join = _joins[threads, environment.rank]
    prefix = f"offbeat/job/{_quoted(environment.job_name)}/{environment.attempt}/{threads}/{join}"
    _joins[threads, environment.rank] += 1
    if len(environment.threads) == environment.world:
        return PrefixStore(prefix, _inside)
    if dist.is_initialized():
        return PrefixStore(prefix, _get_default_store())
    try:
        store = _in_time(lambda: _reach_store(environment, hosts_it=hosts_it), limit_s)
    except (RuntimeError, TimeoutError) as error:
        if is_none_left(error):
            cause = explain(OSError(errno.EMFILE, ""))
            raise OffbeatError(f"rank {environment.rank} cannot open the job's store: {cause}") from error
        if hosts_it:
            raise OffbeatError(_why_taken(environment, limit_s)) from error
        raise OffbeatError(
            f"rank {environment.rank} cannot reach the job's store at {_where(environment)} within "
            f"{environment.start_s:g} s: is rank 0 running, and are MASTER_ADDR and MASTER_PORT its own? "
            "If so, see what rank 0 wrote"
        ) from error
    if hosts_it:
        _hosted.setdefault(environment.master_port, store)
    return PrefixStore(prefix, store)


def _ask(store: Store, environment: Environment, limit_s: float) -> dict[str, Any]:
    """What rank 0 has put into the store, waited for."""

    def wait() -> dict[str, Any]:
        found = _wait_for(store, _KEY, environment, limit_s)
        _count(store, environment)
        return found

    where = _where(environment)
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


def _tell_failure(store: Store, environment: Environment, error: OffbeatError, limit_s: float) -> None:
    """Says to all who come to the store why this worker cannot take part."""
    if environment.rank:
        _set_failed(store, environment.rank, error)
    with suppress(RuntimeError):  # the store is lost, which the others see
        if not environment.rank:
            store.set(_KEY, json.dumps({"error": str(error)}))
        _count(store, environment)
    if _hosts_store(environment):
        _wait_for_everybody(store, limit_s, environment.start_s)


def _set_failed(store: Store, worker: int, error: BaseException) -> None:
    with suppress(RuntimeError):  # the store is lost, and with it those who would look
        store.set(_FAILED, json.dumps(f"worker {worker}: {error}"))


def _list_job(store: Store, environment: Environment, hosts_store: bool) -> None:
    """Lists this job's name, once, among those that meet in the store; and whether the store is its own."""
    root = _root(store)
    if root.add(f"{_JOBS}/of/{_quoted(environment.job_name)}", 1) > 1:
        return
    place = root.add(_JOBS, 1)
    root.set(f"{_JOBS}/{place}", json.dumps({"name": environment.job_name, "hosts_store": hosts_store}))


def _wait_for(store: Store, key: str, environment: Environment, limit_s: float) -> dict[str, Any]:
    """What the worker's job has put under a key.

    Raises:
        OffbeatError: another job has the store to itself, or only other jobs have come in time.
        TimeoutError: no job has come in time, or this one has and has not put it there.
        RuntimeError: the store was lost.
    """
    root = _root(store)
    if not _comes(root, f"{_JOBS}/1", limit_s):
        raise TimeoutError
    first = json.loads(root.get(f"{_JOBS}/1"))
    takes_any = environment.is_newcomer and environment.job_name is None
    if first["hosts_store"] and first["name"] != environment.job_name and not takes_any:
        raise OffbeatError(_another_job(environment, [first["name"]]))
    left_s = limit_s - time.monotonic()
    if not _comes(store, key, limit_s - min(1.0, left_s / 4)):  # some time is left to see who is there
        names = [json.loads(root.get(f"{_JOBS}/{place + 1}"))["name"] for place in range(root.add(_JOBS, 0))]
        if environment.job_name in names or takes_any:
            raise TimeoutError
        raise OffbeatError(_another_job(environment, names))
    found: dict[str, Any] = json.loads(store.get(key))
    return found


def _comes(store: Store, key: str, limit_s: float) -> bool:
    """Waits for a key; returns whether it came in time.

    Raises:
        RuntimeError: the store was lost.
    """
    try:
        store.wait([key], datetime.timedelta(seconds=max(0.001, limit_s - time.monotonic())))
    except RuntimeError:
        return bool(store.check([key]))
    return True


def _why_taken(environment: Environment, limit_s: float) -> str:
    """Why rank 0 cannot listen, by what is found at its port."""

    def look() -> str | None:
        root = _reach_store(environment, hosts_it=False)
        root.wait([f"{_JOBS}/1"], datetime.timedelta(seconds=_LOOK_S))
        name: str | None = json.loads(root.get(f"{_JOBS}/1"))["name"]
        return name

    port = environment.master_port
    with suppress(RuntimeError, TimeoutError):
        name = _in_time(look, min(limit_s, time.monotonic() + _LOOK_S))
        if name != environment.job_name:
            return f"rank 0 cannot listen on port {port}: {_another_job(environment, [name])}"
    return (
        f"rank 0 cannot listen on port {port}: it is taken, or another process has rank 0 too; choose "
        "another MASTER_PORT (torchrun --master-port), or give each worker a rank of its own"
    )


def _another_job(environment: Environment, names: list[str | None]) -> str:
    there = " and ".join(map(_called, names[:_NAMED_MAX])) + (
        " and others" if len(names) > _NAMED_MAX else ""
    )
    return (
        f"expected {_called(environment.job_name)} at {_where(environment)}, but {there} "
        f"{'meets' if len(names) == 1 else 'meet'} there: choose another MASTER_PORT for one of them; where "
        "they are one job, give all its workers one OFFBEAT_JOB (or torchrun --rdzv-id)"
    )


def _called(name: str | None) -> str:
    return "a job without a name" if name is None else f"job {name!r}"


def _quoted(name: str | None) -> str:
    return quote(name or "", safe="", errors="surrogateescape")


def _running(name: str | None) -> str:
    return _RUNNING if name is None else f"{_RUNNING}/{_quoted(name)}"


def _where(environment: Environment) -> str:
    return f"{environment.master_addr}:{environment.master_port}"


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
    results: queue.SimpleQueue[tuple[_T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
    start_thread(
        "offbeat meets",
        lambda: results.put((function(), None)),
        on_failure=lambda error: results.put((None, error)),
    )
    try:
        result, error = results.get(timeout=max(0.0, limit_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(_T, result)
