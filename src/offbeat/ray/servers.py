"""The parameter servers of a job: each in an actor of its own, and as many as are asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from offbeat.errors import OffbeatError
from offbeat.ray.actors import RESTARTED, ProcessActor
from offbeat.ray.workers import Job, variables_of

NAMESPACE: Final = "offbeat"  # Ray's, of the actors that are found by name
_LEAVE_S: Final = 90.0  # for a server to hand its data over, which gives up after 60 s, and to end


class ServerActor(ProcessActor):
    """Runs `offbeat serve` in a job."""

    def __init__(self, job: Job) -> None:
        os.environ |= variables_of(job)
        super().__init__("a parameter server", "serve", "--host", ray.util.get_node_ip_address())

    def leave(self) -> None:
        """Ask the process to hand its data over to other servers, for up to 60 s, and wait for its end."""
        self._has_finished = True
        self._process.terminate()
        self._process.wait()


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
        self._servers: list[Any] = []  # the newest is the last

    def scale(self, servers: int) -> None:
        """Start servers, or remove the newest ones; return when these have ended.

        A server hands its data over before it ends. One that does not end in time, or has not started, is
        killed, and its data are lost where no other server has replicas.
        """
        while len(self._servers) < servers:
            self._servers.append(self._kind.remote(self._job))
        while len(self._servers) > servers:
            server = self._servers.pop()
            with suppress(RayError):
                ray.get(server.leave.remote(), timeout=_LEAVE_S)
            ray.kill(server)


def server_group_name(run: str, job: str) -> str:
    """Return the name of the actor with the servers of a job, one of a run's; no other actor has it."""
    return f"servers {job} of {run}"


def scale_servers(run: str, servers: int) -> None:
    """Change the number of a run's parameter servers while its workers train.

    Any process that is connected to the Ray cluster may call this. Added servers start as soon as Ray has
    room for them. Removed ones hand their data over, for up to 60 s each, and have ended when this returns.
    Where Ray starts all workers again, the job begins with the number of servers given to the trainer.

    Args:
        run: the `name` of its `ray.train.RunConfig`.
        servers: how many there are to be, at least 1.

    Raises:
        ValueError: fewer than one.
        OffbeatError: no such run is training with servers of its own, or several of this name are.
    """
    if servers < 1:
        raise ValueError(f"expected at least 1 parameter server, got {servers}")
    ray.get(_server_group(run).scale.remote(servers))


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
