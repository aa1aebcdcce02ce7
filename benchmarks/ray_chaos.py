"""`python -m benchmarks ray-chaos`: the coordinator, workers and nodes of a run under Ray are killed in turn.

The nodes are raylets on this machine (`ray.cluster_utils.Cluster`): one for the driver and the coordinator's
actor, and one for each worker. Model, trials and figures are those of `benchmarks.chaos`.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos import ChaosSettings, ChaosTrial, Fault, compare_trials, current_epoch, read_trial
from benchmarks.commands import RayChaosOptions
from benchmarks.workers import print_progress
from offbeat.cli.result import Result
from offbeat.errors import OffbeatError
from offbeat.runtime.processes import child

_KINDS: Final = ("coordinator", "worker", "node")
_LAST_EPOCHS: Final = 6  # without faults, about a minute, for the last worker to come back
_ENDS_S: Final = 300.0  # added to the time limit of a run
_POLL_S: Final = 0.2
_SIZE: Final = {"object_store_memory": 80 * 2**20}  # of a node, in bytes: nothing is kept there


def run(options: RayChaosOptions, *, command: str) -> Result:
    """Run the job without faults for a fifth of the time, then with faults.

    A fault follows the last one after 0.5 to 1.5 times the mean time between two, and not before the
    coordinator and all workers are there.

    Raises:
        ValueError: an unknown strategy.
        OffbeatError: Ray is not installed, or a run failed or did not end.
    """
    try:
        import ray.cluster_utils  # noqa: F401
    except ImportError as error:
        raise OffbeatError(
            f"this benchmark needs Ray, an extra: pip install 'offbeat[ray]' ({error})"
        ) from error

    def trial(settings: ChaosSettings, chance: random.Random | None) -> ChaosTrial:
        with tempfile.TemporaryDirectory() as folder:
            job = _Run(settings, options.workers, Path(folder))
            try:
                job.wait(chance, options.every_s)
            finally:
                job.close()
            return job.trial()

    return compare_trials("ray_chaos", options, trial, command=command)


class _Run:
    """One run on a cluster of its own."""

    def __init__(self, settings: ChaosSettings, workers: int, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self._settings, self._workers, self._folder = settings, workers, folder
        self._log = folder / "log.jsonl"
        self._faults: list[Fault] = []
        self._killed: set[int] = set()  # workers
        self._killed_actors: set[int] = set()  # processes of the coordinator's
        os.environ |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        head: dict[str, Any] = {**_SIZE, "num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add_node() for _ in range(workers)]
        arguments = {
            "address": self._cluster.address,
            "folder": str(folder),
            "workers": workers,
            "job": vars(settings),
        }
        command = child.module_command("benchmarks.ray_training", json.dumps(arguments))
        self._output = folder / "output.txt"
        with self._output.open("wb") as output:
            self._driver = subprocess.Popen(
                child.tied_command(command), stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self, chance: random.Random | None, every_s: float) -> None:
        """Wait for the end of the run; inject faults where there are random numbers for them."""
        settings = self._settings
        epoch_s = settings.samples / settings.batch_size / self._workers * settings.step_ms / 1e3
        limit_s = time.monotonic() + 3 * settings.epochs * epoch_s + _ENDS_S
        kinds, next_s = cycle(_KINDS), math.inf  # until training has started
        while self._driver.poll() is None:
            now_s = time.monotonic()
            if now_s > limit_s:
                raise OffbeatError(f"the run did not end in time: {self._last_output()}")
            if chance is not None and next_s == math.inf and current_epoch(self._log) >= 0:
                next_s = now_s + every_s * chance.uniform(0.5, 1.5)
            if (
                chance is not None
                and now_s >= next_s
                and current_epoch(self._log) < settings.epochs - _LAST_EPOCHS
            ):
                living, coordinator = self._living(), self._coordinator_actor()
                if len(living) == self._workers and coordinator is not None:
                    self._inject_fault(next(kinds), coordinator, living, chance)
                    next_s = time.monotonic() + every_s * chance.uniform(0.5, 1.5)
            time.sleep(_POLL_S)
        if self._driver.returncode:
            raise OffbeatError(f"the run failed: {self._last_output()}")

    def trial(self) -> ChaosTrial:
        """Return the measurements from the workers' results and the run log."""
        uses = [json.loads(path.read_text()) for path in self._folder.glob("uses-*.json")]
        return read_trial(self._log, uses, self._faults)

    def close(self) -> None:
        """End all processes."""
        self._driver.kill()
        self._driver.wait()
        self._cluster.shutdown()

    def _add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=1, **_SIZE)

    def _inject_fault(
        self, kind: str, coordinator: int, living: dict[int, Any], chance: random.Random
    ) -> None:
        worker, now_s = None, time.monotonic()
        if kind == "coordinator":
            self._killed_actors.add(coordinator)
            os.kill(coordinator, signal.SIGKILL)
        else:
            worker = chance.choice(sorted(living))
            place = living[worker]
            self._killed.add(worker)
            if kind == "worker":
                os.kill(place["pid"], signal.SIGKILL)
            else:
                (node,) = [one for one in self._nodes if one.node_id == place["node"]]
                self._nodes.remove(node)
                self._cluster.remove_node(node, allow_graceful=False)
                self._nodes.append(self._add_node())
        self._faults.append(Fault(kind=kind, worker=worker, at_s=now_s, until_s=now_s))
        print_progress(f"a {kind} is killed" if worker is None else f"a {kind} is killed: worker {worker}")

    def _living(self) -> dict[int, Any]:
        """Return the process and the node of each worker that has joined and was not killed."""
        places = {
            int(path.stem.rpartition("-")[2]): json.loads(path.read_text())
            for path in self._folder.glob("place-*.json")
        }
        return {worker: place for worker, place in places.items() if worker not in self._killed}

    def _coordinator_actor(self) -> int | None:
        """Return the process of the coordinator's actor, if it is there and was not killed.

        It has started the one with the run's state, the supervisor, which has forked another one.
        """
        state = f"{self._folder}/run/offbeat-".encode()
        parents: dict[int, int] = {}  # of the processes with the run's state
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if any(argument.startswith(state) for argument in path.read_bytes().split(b"\0")):
                    stat = path.with_name("stat").read_text()
                    parents[int(path.parent.name)] = int(stat.rpartition(")")[2].split()[1])
        for actor in set(parents.values()) - parents.keys() - self._killed_actors:
            with suppress(FileNotFoundError, ProcessLookupError):
                # Another process adopts the supervisor, for a moment, when the actor has ended.
                if b"CoordinatorActor" in Path(f"/proc/{actor}/cmdline").read_bytes():
                    return actor
        return None

    def _last_output(self) -> str:
        return self._output.read_text(errors="replace")[-2000:]
