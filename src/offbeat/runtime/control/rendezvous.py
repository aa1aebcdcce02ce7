"""Rendezvous of the workers of a job: rank 0 starts the coordinator and publishes its address.

The address is published in the job's torch TCPStore, the one thing that every launcher sets up. The store
holds that address, the job's name and size, its token unless the workers have that in a file, the ids given
to newcomers, and why a worker could not start; nothing else.

Several jobs may use one store, by intention (a launcher's store serves them all) or by mistake (two jobs
were given the same MASTER_PORT). All keys of a job begin with its name, so that its workers find only each
other. Each rank 0 lists its job's name under a key that all jobs share, so that the error of a worker of
another job can name the jobs that are there.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import quote

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # documented, all the same
from torch.distributed.distributed_c10d import PrefixStore, Store

from offbeat.errors import OffbeatError, WorkerError, describe_os_error
from offbeat.runtime.control.admission import JobRequest
from offbeat.runtime.control.configuration import CoordinatorConfiguration
from offbeat.runtime.control.environment import (
    COORDINATOR_VARIABLE,
    DEFAULT_JOB,
    NEWCOMER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    Environment,
    coordinator_address,
    load_tls,
    read_token,
)
from offbeat.runtime.control.requesting import find_host, request_admission
from offbeat.runtime.control.starting import new_job_id_and_token, start_coordinator
from offbeat.runtime.processes.threads import run_with_deadline
from offbeat.runtime.transport import descriptors
from offbeat.runtime.transport.addresses import own_address
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.torch_compat import default_store

_COORDINATOR = "coordinator"
_FAILED = "failed"  # why a worker that has reached the store cannot join
_ARRIVALS = "workers"
_RANKS = "ranks"  # followed by a rank: how many processes had it
_JOBS = "offbeat/jobs"  # how many jobs have been opened here; followed by a number, the name of each
# Coordinator of the job started last; followed by a job's name, of that job. Without the prefix of a join,
# which newcomers do not know.
_RUNNING = "offbeat/running"
_NEWCOMERS = "offbeat/newcomers"  # how many ids were drawn; without a prefix, so that each is unique
# How often this process has joined a job, by (number of its worker threads, rank).
_joins: Counter[tuple[int, int]] = Counter()
_local_store = HashStore()  # the store of a job whose workers are threads of this process
_hosted_stores: dict[
    int, Store
] = {}  # by port; kept, since workers may already be connected for the next join
_NAMED_MAX = 8
_DIAL_EVERY_S = 0.1
_STORE_MARGIN_S = 2.0  # a wait that the store ends itself leaves no thread behind
_LOOKUP_S = 5.0  # how long to look up which job uses the port
_T = TypeVar("_T")
_log = logging.getLogger("offbeat")


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """The result of a worker's rendezvous.

    Attributes:
        worker: this worker's id.
        world: number of workers with which the job starts.
        job: the id of the job, drawn at random.
        token: the secret that authenticates connections within the job.
        host: the address at which other workers reach this worker's host.
        coordinator: the coordinator's addresses, best first.
        store: the job's store, under a prefix of this join; None in a job of one worker.
        hosts_store: this process hosts the store, which ends with it.
        start_s: how long the start may take, in seconds.
        deadline_s: until when workers may still join, on the monotonic clock.
        attempt: how often the launcher has started the whole job again.
        is_newcomer: this worker joins a running job.
        is_service: the coordinator belongs to no worker, and may be started again on another host.
        job_name: the job's name in the store, None where it has none.
        shares_token: newcomers find the token in the store, and not in a file.
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
    deadline_s: float
    attempt: int = 0
    is_newcomer: bool = False
    is_service: bool = False
    job_name: str | None = None
    shares_token: bool = True

    def publish_coordinator(self) -> None:
        """Publish the coordinator's address of the started job, for newcomers."""
        if self.store is not None:
            place = {
                "job": self.job,
                "token": self.token if self.shares_token else None,
                "coordinator": self.coordinator,
                "world": self.world,
                "attempt": self.attempt,
            }
            for key in {_RUNNING, _running_key(self.job_name)}:
                _root(self.store).set(key, json.dumps(place))

    def publish_failure(self, error: BaseException) -> None:
        """Publish why this worker cannot join, for workers that wait (see `published_failure`)."""
        if self.store is not None:
            _set_failed(self.store, self.worker, error)

    def published_failure(self) -> str | None:
        """Why a worker that could not reach the coordinator cannot join; None while none has failed."""
        with suppress(RuntimeError):
            if self.store is not None and self.store.check([_FAILED]):
                reason: str = json.loads(self.store.get(_FAILED))
                return reason
        return None

    def gather(self, key: str, value: str) -> list[str]:
        """Return what the workers of the job's start have given for a key, by worker; each has to call it.

        Raises:
            WorkerError: a worker did not call it within the time that the start may take.
        """
        assert self.store is not None
        return gather_values(self.store, self.worker, self.world, key, value, self.start_s)

    def wait_for_late_workers(self) -> None:
        """Wait until every worker knows the coordinator, if this process hosts the store.

        Rank 0 does this before it fails, so that workers that come later learn from the coordinator why the
        job cannot start, instead of finding no store.
        """
        if self.hosts_store and self.store is not None:
            _wait_for_all_workers(self.store, self.deadline_s, self.start_s)


def rendezvous(
    environment: Environment, make_configuration: Callable[[str, str, str], CoordinatorConfiguration]
) -> RendezvousInfo:
    """Find the coordinator of a worker's job; rank 0 starts it first.

    Args:
        environment: rank, world and addresses of this worker.
        make_configuration: makes the coordinator's configuration from job, token and host.

    Raises:
        OffbeatError: the store or the coordinator could not be reached or started in time, or a file with a
            secret is not what it should be.
    """
    limit_s = time.monotonic() + environment.start_s
    _check_files(environment, limit_s)
    if environment.coordinator is not None:
        return _ask_coordinator(environment, make_configuration, limit_s)
    if environment.is_newcomer:
        return _find_job_as_newcomer(environment, own_address(environment.master_addr), limit_s)
    hosts_store = hosts_job_store(environment)
    store = None if environment.world == 1 else open_job_store(environment, limit_s)
    if store is not None and _returns(store, environment):
        return _find_job_as_newcomer(
            replace(environment, rank=-1, is_newcomer=True), own_address(environment.master_addr), limit_s
        )
    found: dict[str, Any] = {}
    try:
        if environment.rank == 0 and store is not None:
            _list_job(store, environment, hosts_store)
        load_tls()  # raises before anything is started that needs it
        host = own_address(environment.master_addr)
        if environment.rank == 0:
            job, drawn = new_job_id_and_token()
            token = drawn if environment.token_file is None else read_token(environment.token_file)
            found = {
                "job": job,
                "token": drawn if environment.token_file is None else None,
                "coordinator": start_coordinator(make_configuration(job, token, host)),
            }
    except Exception as error:
        reported = as_offbeat_error(error)
        if store is not None:
            _publish_failure(store, environment, reported, limit_s)
        raise reported from error
    if environment.rank == 0:
        if store is not None:
            store.set(_COORDINATOR, json.dumps(found))
            _record_arrival(store, environment)
            if isinstance(_root(store), TCPStore) and found["token"] and not ip_address(host).is_loopback:
                _log.warning(_token_travels_message(environment))
    else:
        assert store is not None
        found = _wait_for_coordinator(store, environment, limit_s)
    if "error" in found:
        raise OffbeatError(f"rank 0 could not open the job: {found['error']}")
    return RendezvousInfo(
        worker=environment.rank,
        world=environment.world,
        job=found["job"],
        token=_token(found, environment),
        host=host,
        coordinator=tuple(found["coordinator"]),
        store=store,
        hosts_store=hosts_store,
        start_s=environment.start_s,
        deadline_s=limit_s,
        attempt=environment.attempt,
        job_name=environment.job_name,
        shares_token=environment.token_file is None,
    )


def gather_values(store: Store, worker: int, world: int, key: str, value: str, within_s: float) -> list[str]:
    """Return what the workers of a job's start have given for a key, by worker; each has to call it.

    Args:
        store: the job's store.
        worker: this worker's id.
        world: number of workers.
        key: what is given, in one word or two.
        value: of this worker.
        within_s: how long to wait for the others, in seconds.

    Raises:
        WorkerError: a worker did not call it in time, or the store was lost.
    """
    names = [f"{key}/{worker}" for worker in range(world)]

    def exchange() -> list[str]:
        store.set(names[worker], value)
        store.wait(names, datetime.timedelta(seconds=within_s))
        return [value.decode() for value in store.multi_get(names)]

    try:
        return run_with_deadline(exchange, time.monotonic() + within_s + _STORE_MARGIN_S)
    except (RuntimeError, TimeoutError) as error:
        raise WorkerError(_why_not_gathered(store, worker, key, names, within_s)) from error


def _why_not_gathered(store: Store, worker: int, key: str, names: list[str], within_s: float) -> str:
    def look() -> list[int]:
        return [other for other, name in enumerate(names) if not store.check([name])]

    try:
        missing = run_with_deadline(look, time.monotonic() + _STORE_MARGIN_S)
    except (RuntimeError, TimeoutError):
        return (
            f"worker {worker} lost the job's store while it waited for the {key} of all workers: "
            "see the output of rank 0"
        )
    return (
        f"worker {worker} waited {within_s:g} s for the {key} of workers {missing}; look for workers that "
        f"are stuck, were lost while they joined, or have no {key} to give"
    )


def _token(found: dict[str, Any], environment: Environment) -> str:
    """Return the job's token, from this worker's file or, where no worker has one, from the store.

    Raises:
        OffbeatError: rank 0 has such a file and this worker not, or the other way round.
    """
    has_file = environment.token_file is not None
    if has_file == bool(found["token"]):
        here, there = ("is set", "is not") if has_file else ("is not set", "is")
        raise OffbeatError(
            f"{TOKEN_FILE_VARIABLE} {here} for this worker and {there} for rank 0: set it for all workers, "
            "to a file with the same content, or for none"
        )
    token: str = read_token(environment.token_file) if has_file else found["token"]
    return token


def _token_travels_message(environment: Environment) -> str:
    return (
        f"the job's secret is in the store at {_store_address(environment)}, unencrypted: any process that "
        f"reaches that port can read it and join; start 'offbeat coordinator' and set {COORDINATOR_VARIABLE}"
        f", or set {TOKEN_FILE_VARIABLE} for all workers to a file with a secret"
    )


def _ask_coordinator(
    environment: Environment,
    make_configuration: Callable[[str, str, str], CoordinatorConfiguration],
    limit_s: float,
) -> RendezvousInfo:
    """Get this worker's id from a coordinator that no worker has started.

    Raises:
        OffbeatError: the coordinator was not reached or did not answer in time, or refuses this worker.
    """
    assert environment.coordinator is not None
    address = coordinator_address(environment.coordinator)
    job, token = environment.job_name or DEFAULT_JOB, read_token(environment.token_file)
    host = own_address(find_host(address, limit_s))
    configuration = make_configuration(job, token, host)
    request = JobRequest(
        rank=environment.rank,
        world=environment.world,
        attempt=environment.attempt,
        is_newcomer=environment.is_newcomer,
        policies=configuration.policies,
        log_header=configuration.log_header,
        silent_s=configuration.silent_s,
        start_s=environment.start_s,
    )
    answer = request_admission(address, request, job=job, token=token, timeout_s=limit_s - time.monotonic())
    if answer.is_newcomer and not (environment.is_newcomer or environment.may_return):
        raise OffbeatError(
            f"rank {environment.rank} has been used in the running job: set {NEWCOMER_VARIABLE}=auto to let "
            "this process join as a newcomer"
        )
    if answer.is_newcomer and len(environment.threads) > 1:
        threads = len(environment.threads)
        raise OffbeatError(f"the job runs already, and a newcomer must have one worker thread, got {threads}")
    return RendezvousInfo(
        worker=answer.worker,
        world=answer.world,
        job=job,
        token=token,
        host=host,
        coordinator=(address,),
        store=None,
        hosts_store=False,
        start_s=environment.start_s,
        deadline_s=limit_s,
        attempt=environment.attempt,
        is_newcomer=answer.is_newcomer,
        is_service=True,
        job_name=environment.job_name,
    )


def _returns(store: Store, environment: Environment) -> bool:
    """Whether a process with this worker's rank has been in the job before, and the job has started."""
    is_first = store.add(f"{_RANKS}/{environment.rank}", 1) == 1
    if is_first or not environment.may_return or len(environment.threads) > 1:
        return False
    root, key = _root(store), _running_key(environment.job_name)
    return bool(root.check([key])) and json.loads(root.get(key))["attempt"] == environment.attempt


def _check_files(environment: Environment, limit_s: float) -> None:
    """Check, before any file is opened, that this worker may open as many as its start needs.

    Raises:
        OffbeatError: it may not; the reason is published in the store, if that can be reached.
    """
    try:
        descriptors.require_descriptors(descriptors_needed(environment))
    except OffbeatError as error:
        if environment.world > 1 and not environment.is_newcomer:
            with descriptors.raised_descriptor_limit(), suppress(OffbeatError):  # the store cannot be reached
                descriptors.require_descriptors(_files_of_store(environment))
                store = open_job_store(environment, limit_s)
                if environment.rank == 0:
                    _list_job(store, environment, hosts_job_store(environment))
                _publish_failure(store, environment, error, limit_s)
        name = "this newcomer" if environment.is_newcomer else f"worker {environment.rank}"
        raise OffbeatError(f"{name} cannot start: {error}") from error


def descriptors_needed(environment: Environment) -> int:
    """Return the number of files that this process, or one that it starts, has to open for a start."""
    world, threads = environment.world, len(environment.threads)
    # As a member of a group; or with servers, which it starts before it opens its client.
    rest = max(
        min(world - 1, descriptors.PEER_DESCRIPTORS),
        descriptors.CHILD_DESCRIPTORS,
        descriptors.NODE_DESCRIPTORS + environment.servers,
    )
    own = (
        _files_of_store(environment)
        + descriptors.NODE_DESCRIPTORS * threads
        + rest
        + descriptors.START_DESCRIPTORS
    )
    if environment.rank:
        return own
    return max(own, descriptors.NODE_DESCRIPTORS + descriptors.COORDINATOR_DESCRIPTORS + world)


def _files_of_store(environment: Environment) -> int:
    """Return the number of files that this process has to open for the job's store."""
    if environment.coordinator is not None:
        return 0
    is_hosted = hosts_job_store(environment) and len(environment.threads) < environment.world
    return descriptors.STORE_DESCRIPTORS + (
        descriptors.HOSTED_STORE_DESCRIPTORS + environment.world if is_hosted else 0
    )


def hosts_job_store(environment: Environment) -> bool:
    """Whether this process hosts the job's store, which then ends with it."""
    return environment.rank == 0 and not environment.agent_hosts_store and not dist.is_initialized()


def as_offbeat_error(error: Exception) -> OffbeatError:
    """Return an error in the form that all workers of a job receive."""
    if isinstance(error, OffbeatError):
        return error
    return OffbeatError(
        describe_os_error(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    )


def open_store(host: str, port: int, *, is_host: bool, timeout_s: float = Environment.start_s) -> TCPStore:
    """Connect to a job's store, or host it; each operation on it times out after `timeout_s` seconds."""
    return TCPStore(
        host,
        port,
        is_master=is_host,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def reach_store(host: str, port: int, timeout_s: float, read: Callable[[Store], _T]) -> tuple[Store, _T]:
    """Connect to a store that another process hosts, or will host soon, and read something from it.

    Raises:
        TimeoutError: that took longer than `timeout_s` seconds.
        RuntimeError: the store was lost.
    """
    limit_s = time.monotonic() + timeout_s

    def reach() -> tuple[Store, _T]:
        _wait_for_listener(host, port, limit_s)
        store = open_store(host, port, is_host=False, timeout_s=max(1.0, limit_s - time.monotonic()))
        return store, read(store)

    return run_with_deadline(reach, limit_s)


def _wait_for_listener(host: str, port: int, limit_s: float) -> None:
    """Wait until a process listens: a TCPStore waits longer than it should, and reports each try."""
    while (left_s := limit_s - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left_s).close()
            return
        except OSError:
            time.sleep(min(_DIAL_EVERY_S, left_s))
    raise TimeoutError


def has_job_started(store: Store, timeout_s: float) -> bool:
    """Whether a job that uses this store has started; not if the store does not answer in time."""
    with suppress(RuntimeError, TimeoutError):
        return run_with_deadline(lambda: bool(store.check([_RUNNING])), time.monotonic() + timeout_s)
    return False


def draw_newcomer_id(store: Store, world: int) -> int:
    """Draw an id for a newcomer, unique within this store."""
    return world + int(store.add(_NEWCOMERS, 1)) - 1


def _find_job_as_newcomer(environment: Environment, host: str, limit_s: float) -> RendezvousInfo:
    """Find the running job, the number of workers that it started with, and an id for this worker.

    Without a job's name it joins the job started last.

    Raises:
        OffbeatError: there is no store, or no started job, or only jobs of other names.
    """
    where = _store_address(environment)

    def find() -> tuple[Store, dict[str, Any], int]:
        store = _reach_store(environment, hosts_it=False)
        found = _wait_for(store, _running_key(environment.job_name), environment, limit_s)
        worker = draw_newcomer_id(store, found["world"]) if environment.rank < 0 else environment.rank
        return store, found, worker

    try:
        store, found, worker = run_with_deadline(find, limit_s)
    except (RuntimeError, TimeoutError) as error:
        raise OffbeatError(
            f"a newcomer found no running job at {where} within {environment.start_s:g} s: have all its "
            "workers joined, is the process alive that hosts its store (the launcher, or rank 0), and are "
            "MASTER_ADDR and MASTER_PORT those of the job?"
        ) from error
    return RendezvousInfo(
        worker=worker,
        world=found["world"],
        job=found["job"],
        token=_token(found, environment),
        host=host,
        coordinator=tuple(found["coordinator"]),
        store=store,
        hosts_store=False,
        start_s=environment.start_s,
        deadline_s=limit_s,
        attempt=environment.attempt,
        is_newcomer=True,
        job_name=environment.job_name,
        shares_token=environment.token_file is None,
    )


def _root(store: Store) -> Store:
    """Return the store without its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _reach_store(environment: Environment, *, hosts_it: bool) -> Store:
    return open_store(
        environment.master_addr, environment.master_port, is_host=hosts_it, timeout_s=environment.start_s
    )


def open_job_store(environment: Environment, limit_s: float) -> Store:
    """Connect to the store of a worker's job, or host it; return it under a prefix of this join.

    Raises:
        OffbeatError: it was not reached by `limit_s` of the monotonic clock, or its port cannot be used.
    """
    hosts_it = hosts_job_store(environment)
    threads = len(environment.threads)
    join = _joins[threads, environment.rank]
    prefix = f"offbeat/job/{_url_quoted(environment.job_name)}/{environment.attempt}/{threads}/{join}"
    _joins[threads, environment.rank] += 1
    if len(environment.threads) == environment.world:
        return PrefixStore(prefix, _local_store)
    if dist.is_initialized():
        return PrefixStore(prefix, default_store())
    try:
        store = run_with_deadline(lambda: _reach_store(environment, hosts_it=hosts_it), limit_s)
    except (RuntimeError, TimeoutError) as error:
        if is_out_of_descriptors(error):
            cause = describe_os_error(OSError(errno.EMFILE, ""))
            raise OffbeatError(f"rank {environment.rank} cannot open the job's store: {cause}") from error
        if hosts_it:
            raise OffbeatError(_why_port_unusable(environment, limit_s)) from error
        raise OffbeatError(
            f"rank {environment.rank} cannot reach the job's store at {_store_address(environment)} within "
            f"{environment.start_s:g} s: is rank 0 running, and are MASTER_ADDR and MASTER_PORT its own? "
            "If so, see the output of rank 0"
        ) from error
    if hosts_it:
        _hosted_stores.setdefault(environment.master_port, store)
    return PrefixStore(prefix, store)


def _wait_for_coordinator(store: Store, environment: Environment, limit_s: float) -> dict[str, Any]:
    """Wait for what rank 0 publishes in the store, and return it."""

    def wait() -> dict[str, Any]:
        found = _wait_for(store, _COORDINATOR, environment, limit_s)
        _record_arrival(store, environment)
        return found

    where = _store_address(environment)
    try:
        return run_with_deadline(wait, limit_s)
    except TimeoutError as error:
        raise OffbeatError(
            f"rank 0 has not opened the job at {where} within {environment.start_s:g} s "
            f"(reported by rank {environment.rank}): is rank 0 running, and does it call offbeat.join?"
        ) from error
    except RuntimeError as error:
        raise OffbeatError(
            f"rank {environment.rank} lost the job's store at {where} before rank 0 opened the job: "
            "see the output of rank 0"
        ) from error


def _publish_failure(store: Store, environment: Environment, error: OffbeatError, limit_s: float) -> None:
    """Publish in the store why this worker cannot join."""
    if environment.rank:
        _set_failed(store, environment.rank, error)
    with suppress(RuntimeError):  # the store is lost, which other workers notice themselves
        if not environment.rank:
            store.set(_COORDINATOR, json.dumps({"error": str(error)}))
        _record_arrival(store, environment)
    if hosts_job_store(environment):
        _wait_for_all_workers(store, limit_s, environment.start_s)


def _set_failed(store: Store, worker: int, error: BaseException) -> None:
    with suppress(RuntimeError):  # the store is lost, and with it all that would read it
        store.set(_FAILED, json.dumps(f"worker {worker}: {error}"))


def _list_job(store: Store, environment: Environment, hosts_store: bool) -> None:
    """List this job's name in the store, once, and whether the job hosts the store itself."""
    root = _root(store)
    if root.add(f"{_JOBS}/of/{_url_quoted(environment.job_name)}", 1) > 1:
        return
    place = root.add(_JOBS, 1)
    root.set(f"{_JOBS}/{place}", json.dumps({"name": environment.job_name, "hosts_store": hosts_store}))


def _wait_for(store: Store, key: str, environment: Environment, limit_s: float) -> dict[str, Any]:
    """Wait for what the worker's job publishes under a key, and return it.

    Raises:
        OffbeatError: the store belongs to another job, or only other jobs were opened in time.
        TimeoutError: no job was opened in time, or this one was and did not publish the key.
        RuntimeError: the store was lost.
    """
    root = _root(store)
    if not _is_set_in_time(root, f"{_JOBS}/1", limit_s):
        raise TimeoutError
    first = json.loads(root.get(f"{_JOBS}/1"))
    takes_any = environment.is_newcomer and environment.job_name is None
    if first["hosts_store"] and first["name"] != environment.job_name and not takes_any:
        raise OffbeatError(_wrong_job_message(environment, [first["name"]]))
    left_s = limit_s - time.monotonic()
    if not _is_set_in_time(
        store, key, limit_s - min(1.0, left_s / 4)
    ):  # leaves some time to look up which jobs are there
        names = [json.loads(root.get(f"{_JOBS}/{place + 1}"))["name"] for place in range(root.add(_JOBS, 0))]
        if environment.job_name in names or takes_any:
            raise TimeoutError
        raise OffbeatError(_wrong_job_message(environment, names))
    found: dict[str, Any] = json.loads(store.get(key))
    return found


def _is_set_in_time(store: Store, key: str, limit_s: float) -> bool:
    """Wait for a key; return whether it was set in time.

    Raises:
        RuntimeError: the store was lost.
    """
    try:
        store.wait([key], datetime.timedelta(seconds=max(0.001, limit_s - time.monotonic())))
    except RuntimeError:
        return bool(store.check([key]))
    return True


def _why_port_unusable(environment: Environment, limit_s: float) -> str:
    """Return why rank 0 cannot listen, from what answers at its port."""

    def look() -> str | None:
        root = _reach_store(environment, hosts_it=False)
        root.wait([f"{_JOBS}/1"], datetime.timedelta(seconds=_LOOKUP_S))
        name: str | None = json.loads(root.get(f"{_JOBS}/1"))["name"]
        return name

    port = environment.master_port
    with suppress(RuntimeError, TimeoutError):
        name = run_with_deadline(look, min(limit_s, time.monotonic() + _LOOKUP_S))
        if name != environment.job_name:
            return f"rank 0 cannot listen on port {port}: {_wrong_job_message(environment, [name])}"
    return (
        f"rank 0 cannot listen on port {port}: it is in use, or another process has rank 0, too; choose "
        "another MASTER_PORT (torchrun --master-port), or give each worker a different rank"
    )


def _wrong_job_message(environment: Environment, names: list[str | None]) -> str:
    there = " and ".join(map(_quoted_name, names[:_NAMED_MAX])) + (
        " and others" if len(names) > _NAMED_MAX else ""
    )
    return (
        f"expected {_quoted_name(environment.job_name)} at {_store_address(environment)}, but {there} "
        f"{'uses' if len(names) == 1 else 'use'} that address: choose another MASTER_PORT for one of them; "
        "if they are one job, give all its workers the same OFFBEAT_JOB (or torchrun --rdzv-id)"
    )


def _quoted_name(name: str | None) -> str:
    return "a job without a name" if name is None else f"job {name!r}"


def _url_quoted(name: str | None) -> str:
    return quote(name or "", safe="", errors="surrogateescape")


def _running_key(name: str | None) -> str:
    return _RUNNING if name is None else f"{_RUNNING}/{_url_quoted(name)}"


def _store_address(environment: Environment) -> str:
    return f"{environment.master_addr}:{environment.master_port}"


def _record_arrival(store: Store, environment: Environment) -> None:
    """Record that one more worker knows the coordinator, and the world size that it expects."""
    place = store.add(_ARRIVALS, 1)
    store.set(f"{_ARRIVALS}/{place}", str(environment.world))


def _wait_for_all_workers(store: Store, limit_s: float, start_s: float) -> None:
    """Wait until as many workers are recorded as the largest world size that one of them expects."""

    def wait() -> None:
        arrived, world = 0, 1
        while arrived < world:
            arrived += 1
            place = f"{_ARRIVALS}/{arrived}"
            store.wait([place], datetime.timedelta(seconds=start_s))
            world = max(world, int(store.get(place)))

    with suppress(RuntimeError, TimeoutError):
        run_with_deadline(wait, limit_s)
