"""The parameter servers of a job: each in an actor of its own, and as many as are asked for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import list_named_actors

from offbeat.errors import OffbeatError
from offbeat.ray.actors import RESTARTED, ProcessActor
from offbeat.ray.workers import Job, variables_of
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.job_server import request_configuration

NAMESPACE: Final = "offbeat"  # Ray's, of the actors that are found by name
_LEAVE_S: Final = 90.0  # for a server to hand its data over, which gives up after 60 s, and to end
_LEFT_IN_ORDER: Final = (0, 128 + signal.SIGTERM, -signal.SIGTERM)  # the last one: before it joined
_FIRST_S: Final = 10.0  # for the first servers to be there, before servers are removed


class ServerActor(ProcessActor):
    """Runs `offbeat serve` in a job."""

    def __init__(self, job: Job) -> None:
        os.environ |= variables_of(job)
        super().__init__("a parameter server", "serve", "--host", ray.util.get_node_ip_address())

    def leave(self) -> bool:
        """Ask the process to hand its data over to other servers, for up to 60 s, and wait for its end.

        Returns:
            Whether it had no data or has handed all of it over.
        """
        self._has_finished = True
        self._process.terminate()
        return self._process.wait() in _LEFT_IN_ORDER


class ServerGroup:
    """Starts the servers of a job, and changes their number while workers train.

    Servers end with the actor of this group.

    Args:
        job: which they serve.
        options: Ray's, of each server's actor; it takes one CPU by default.
    """

    def __init__(self, job: Job, options: Mapping[str, Any]) -> None:
        self._job = job
        self._kind = ray.remote(**{"num_cpus": 1, **RESTARTED, **options})(ServerActor)
        self._servers: list[tuple[Any, Any]] = []  # with what is ready when it starts; the newest is the last

    def scale(self, servers: int) -> None:
        """Start servers, or remove the newest ones; return when these have ended.

        A server hands its data over before it ends; one that has not started has none.

        Raises:
            OffbeatError: servers are to be removed before the first ones are all there; or a server did not
                hand its data over, has ended, and no other one was removed after it.
        """
        if servers < len(self._servers):
            self._wait_for_first_servers()
        while len(self._servers) < servers:
            server = self._kind.remote(self._job)
            self._servers.append((server, server.__ray_ready__.remote()))
        while len(self._servers) > servers:
            self._remove_newest()

    def _remove_newest(self) -> None:
        server, is_ready = self._servers.pop()
        has_started = bool(ray.wait([is_ready], timeout=0)[0])
        try:
            if not has_started or ray.get(server.leave.remote(), timeout=_LEAVE_S):
                return
            problem = "did not hand its parameters over to other servers within 60 s, and has ended"
        except RayError as error:
            problem = f"did not leave within {_LEAVE_S:g} s, and was killed ({error})"
        finally:
            ray.kill(server)
        raise OffbeatError(
            f"the parameter server in actor {server._actor_id.hex()} {problem}. Servers that are left: "
            f"{len(self._servers)}. They have its parameters if the strategy's `replicas` is at least 1; "
            "otherwise the workers fail, and Ray starts them again from the last checkpoint. See the output "
            "of this actor, and call scale_servers again to remove more"
        )

    def _wait_for_first_servers(self) -> None:
        """Wait until the job's first servers are all there: until then, it would wait for a removed one."""
        limit_s = time.monotonic() + _FIRST_S
        environment = read_environment(os.environ | variables_of(self._job))
        try:
            configuration = request_configuration(
                replace(environment, start_s=_FIRST_S), ray.util.get_node_ip_address()
            )
            PS(configuration.cluster, host=configuration.host, start_s=limit_s - time.monotonic()).close()
        except OffbeatError as error:
            raise OffbeatError(
                "expected all parameter servers with which the job begins to be there before one is removed, "
                f"which they were not within {_FIRST_S:g} s: call scale_servers when the workers train; no "
                f"server was removed ({error})"
            ) from error


def server_group_name(run: str, job: str) -> str:
    """Return the name of the actor with the servers of a job, one of a run's; no other actor has it."""
    return f"servers {job} of {run}"


def scale_servers(run: str, servers: int) -> None:
    """Change the number of a run's parameter servers while its workers train.

    Any process that is connected to the Ray cluster may call this. Added servers start as soon as Ray has
    room for them. Removed ones, the newest, hand their data over, for up to 60 s each, and have ended when
    this returns. Where Ray starts all workers again, the job begins with the number of servers given to the
    trainer.

    Args:
        run: the `name` of its `ray.train.RunConfig`.
        servers: how many there are to be, at least 1.

    Raises:
        ValueError: fewer than one.
        OffbeatError: no such run is training with servers of its own, or several of this name are; servers
            are to be removed while those with which the job begins are not all there, and none was removed; a
            server did not hand its data over in time, and was the last one to be removed.
    """
    if servers < 1:
        raise ValueError(f"expected at least 1 parameter server, got {servers}")
    group = _server_group(run)
    try:
        ray.get(group.scale.remote(servers))
    except RayTaskError as error:
        if isinstance(error.cause, OffbeatError):
            raise error.cause from None
        raise
    except RayActorError:
        raise OffbeatError(
            f"the run {run!r} has ended, or begins again, before it had {servers} servers: if it begins "
            "again, call this when its workers train"
        ) from None


def _server_group(run: str) -> Any:
    """Return the actor with the servers of a run."""
    actors = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    found = [name for name in actors if name.partition(" of ")[2] == run]
    if len(found) > 1:
        raise OffbeatError(
            f"expected one run named {run!r} (RunConfig) with servers of its own on this Ray cluster, got "
            f"{len(found)}: call this when only one of them is left, and give each run a name of its own"
        )
    with suppress(ValueError):  # it has just ended
        if found:
            return ray.get_actor(found[0], namespace=NAMESPACE)
    raise OffbeatError(
        f"expected the name (RunConfig) of a run that trains on this Ray cluster with servers of its own "
        f"(OffbeatTrainer(servers=N)), got {run!r}: call this while its workers train"
    )
