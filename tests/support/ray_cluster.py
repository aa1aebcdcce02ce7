"""A Ray cluster of several nodes on this machine, and a training that runs on it."""

import json
import os
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from offbeat.events import ClusterView, Ready
from support.jobs import MARK, command, marked, parent
from support.newcomer_training import GATE_STEP
from support.run_logs import entries_of, wait_until

WAIT_S = 240.0  # a worker takes some 20 s to start on a busy machine
SIZE = {"object_store_memory": 80 * 2**20}
ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}
# A dead node is noticed after 10 s.
SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 10,
}


class RayCluster:
    """A head node, which runs no worker, and others, each for one worker or for none."""

    def __init__(self):
        os.environ |= ENV
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**SIZE, "num_cpus": 0, "include_dashboard": False, "_system_config": SYSTEM},
        )
        self.address = self._cluster.address

    def add_node(self, cpus=1, **resources):
        return self._cluster.add_node(num_cpus=cpus, resources=resources, **SIZE)

    def kill_node(self, node):
        """Kills the processes of Ray of a node; its workers end with them."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self):
        self._cluster.shutdown()


class Run:
    """A run of `support.ray_training`.

    Attributes:
        folder: of its gate, for what it writes.
    """

    def __init__(self, cluster, gate, **settings):
        self.folder, self._log, self._address = gate.log.parent, gate.log, cluster.address
        path = self.folder / "settings.json"
        self._mark = uuid.uuid4().hex
        env = {**ENV, **gate.env, MARK: self._mark, **settings.pop("env", {})}
        path.write_text(
            json.dumps({"folder": str(self.folder), "address": cluster.address, "env": env, **settings})
        )
        self._output = self.folder / "output.txt"
        with self._output.open("wb") as output:
            command = [sys.executable, "-m", "support.ray_training", str(path)]
            self.process = subprocess.Popen(
                command, env={**os.environ, **ENV}, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_for(self, what, condition):
        """Waits until a condition holds; fails at once where the run has ended."""

        def holds():
            if condition():
                return True
            assert self.process.poll() is None, self.output()
            return False

        wait_until(holds, what, WAIT_S)

    def wait_for_entry(self, what, condition):
        self.wait_for(what, lambda: any(map(condition, entries_of(self._log))))

    def all_are_at_the_gate(self, workers):
        for worker in workers:
            self.wait_for_entry(
                f"worker {worker} at the gate",
                lambda one, worker=worker: (
                    isinstance(one, Ready) and one.worker == worker and one.step >= GATE_STEP - 1
                ),
            )

    def ring(self):
        """The parameter servers that have all data, none while that changes."""
        views = entries_of(self._log, ClusterView)
        return set(views[-1].ring) if views and not views[-1].next_ring else set()

    def scale_servers(self, servers):
        """Changes the number of parameter servers, from another process."""
        code = f"import ray, offbeat.ray; ray.init({self._address!r}); "
        code += f"offbeat.ray.scale_servers('run', {servers})"
        command = [sys.executable, "-c", code]
        subprocess.run(command, env={**os.environ, **ENV}, timeout=WAIT_S, check=True)

    def coordinator(self):
        """The process id of the coordinator's supervisor, which the actor has started; None without one."""
        found = self._processes("coordinator --state")
        return next((pid for pid in found if parent(pid) not in found), None)

    def servers(self):
        """The process ids of the parameter servers."""
        return self._processes("serve --host")

    def _processes(self, arguments):
        return [pid for pid in marked(self._mark) if arguments in command(pid)]

    def started(self):
        """The workers that have joined, on servers those that are about to, by job and id."""
        return _read(self.folder, "started")

    def results(self):
        """What the workers had at the end, by job and id."""
        return _read(self.folder, "result")

    def output(self):
        return self._output.read_text(errors="replace")

    def ends(self):
        """Waits for the run's end; returns Ray's last metrics and the path of the last checkpoint."""
        assert self.process.wait(WAIT_S) == 0, self.output()
        fit = json.loads((self.folder / "fit.json").read_text())
        return fit["metrics"], fit["checkpoint"]

    def close(self):
        self.process.kill()
        self.process.wait()


def _read(folder, kind):
    found = [json.loads(path.read_text()) for path in Path(folder).glob(f"{kind}-*.json")]
    return {(one["job"], one["worker"]): one for one in found}


@contextmanager
def ray_cluster():
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def ray_driver(cluster):
    """This process as one that is connected to a cluster."""
    ray.init(cluster.address)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def ray_run(cluster, gate, **settings):
    run = Run(cluster, gate, **settings)
    try:
        yield run
    finally:
        run.close()
