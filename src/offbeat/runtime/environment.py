"""What the launcher put into the environment; read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.errors import OffbeatError

SLOW = "OFFBEAT_SLOW"
RUN_LOG = "OFFBEAT_RUN_LOG"
SEED = "OFFBEAT_SEED"
NEWCOMER = "OFFBEAT_NEWCOMER"
START_S = "OFFBEAT_START_S"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A worker's place in the job and what its launcher asked for.

    Attributes:
        rank: 0 <= rank < world; of a newcomer, its id, or -1 where that is still to be drawn.
        world: workers in all; a newcomer learns from the job how many those are.
        is_newcomer: this process joins a job that runs.
        master_addr: the host of the job's TCPStore.
        master_port: its port, 0 in a world of one.
        agent_hosts_store: the launcher hosts the TCPStore, not rank 0.
        attempt: how often the launcher has restarted the workers.
        slow: slowness to inject, as `--slow` spells it.
        run_log: where the run log goes, None for no log.
        seed: the seed of the data order.
        start_s: how long the job's start may take, in seconds: the last worker may come so long after the
            first.
    """

    rank: int = 0
    world: int = 1
    is_newcomer: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    agent_hosts_store: bool = False
    attempt: int = 0
    slow: tuple[str, ...] = ()
    run_log: str | None = None
    seed: int = 0
    start_s: float = 30.0


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Reads what torchrun, Ray Train, Slurm's torch launchers or Kubeflow set.

    With none of RANK and WORLD_SIZE set it is a world of one. With OFFBEAT_NEWCOMER=1 it is a worker that
    joins the job whose store is at MASTER_ADDR and MASTER_PORT, whatever RANK may be; only a RANK that is
    not below WORLD_SIZE is a newcomer's own, which its launcher has drawn.

    Raises:
        OffbeatError: a variable is missing or is not what it should be.
    """
    rank, world = _whole(environ, "RANK", 0), _whole(environ, "WORLD_SIZE", 1)
    if ("RANK" in environ) != ("WORLD_SIZE" in environ):
        there, missing = ("RANK", "WORLD_SIZE") if "RANK" in environ else ("WORLD_SIZE", "RANK")
        raise OffbeatError(
            f"{there} is set and {missing} is not: set both, "
            "or start the script with torchrun or 'offbeat run'"
        )
    is_newcomer = _is_newcomer(environ)
    if world < 1 or not (0 <= rank < world or is_newcomer):
        raise OffbeatError(f"expected 0 <= RANK < WORLD_SIZE, got RANK={rank} and WORLD_SIZE={world}")
    if world > 1 or is_newcomer:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                why, what = f"WORLD_SIZE is {world}", "rank 0's address"
                if is_newcomer:
                    why, what = f"{NEWCOMER} is set", "what it is in the job"
                raise OffbeatError(
                    f"{name} is not set although {why}: "
                    f"start the script with torchrun or 'offbeat run', or set it to {what}"
                )
    port = _whole(environ, "MASTER_PORT", 0) if world > 1 or is_newcomer else 0
    if not 0 <= port < 65536:
        raise OffbeatError(f"MASTER_PORT must be a port from 1 to 65535, got {port}")
    return Environment(
        rank=-1 if is_newcomer and not ("RANK" in environ and rank >= world) else rank,
        world=world,
        is_newcomer=is_newcomer,
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_whole(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        slow=tuple(text for text in environ.get(SLOW, "").split(";") if text),
        run_log=environ.get(RUN_LOG) or None,
        seed=_whole(environ, SEED, 0),
        start_s=_seconds(environ, START_S, Environment.start_s),
    )


def _is_newcomer(environ: Mapping[str, str]) -> bool:
    text = environ.get(NEWCOMER, "0")
    if text not in ("", "0", "1"):
        raise OffbeatError(f"{NEWCOMER} must be 1, or not be set, got {text!r}")
    return text == "1"


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise OffbeatError(f"{name} must be a number of seconds above 0, got {text!r}")
    return seconds


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise OffbeatError(f"{name} must be a whole number, got {text!r}") from None
