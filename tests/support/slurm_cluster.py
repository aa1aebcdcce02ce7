"""A Slurm cluster on this machine: slurmctld, a slurmd per node and munged, for one test.

The nodes are slurmds with `-N`, and munged has its own key and socket. All files are in one folder, all ports
are free ones, and the numbers of jobs begin at random, since the ports of jobs follow from them. By default
Slurm goes on when a task fails; here it ends the step (KillOnBadExit, WaitTime) unless the script says
otherwise. The machine's own Slurm, if there is one, is not touched.
"""

import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.events import Joined
from offbeat.runtime.launch import find_free_port
from support.jobs import MARK, command, gone, marked
from support.run_logs import entries_of, wait_for_entry, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "sinfo")
COMMAND_S = 60.0
FINAL_STATES = ("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "TIMEOUT")

CONFIGURATION = """
ClusterName=offbeat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=0
KillOnBadExit=1
WaitTime=1
KillWait=20
MinJobAge=3600
FirstJobId={first_job}
SlurmctldDebug=debug
SlurmdDebug=debug
"""


def missing():
    """What this machine lacks to run a Slurm cluster, in words; None if nothing."""
    if os.geteuid() != 0:
        return "root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"{', '.join(absent)} (Debian: apt-get install slurm-wlm munge)" if absent else None


class SlurmCluster:
    """A running cluster.

    Attributes:
        folder: of its files.
        nodes: their names.
    """

    def __init__(self, folder, nodes):
        self.folder, self.nodes = folder, [f"node{number}" for number in range(1, nodes + 1)]
        self._mark = uuid.uuid4().hex
        self._env = {
            **os.environ,
            MARK: self._mark,
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._daemons = {}

    def start(self):
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        lines = [
            CONFIGURATION.format(
                folder=self.folder, host=host, port=find_free_port(), first_job=random.randrange(1, 10000)
            )
        ]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={find_free_port()} CPUs=2"
            for node in self.nodes
        ]
        lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP", ""]
        (self.folder / "slurm.conf").write_text("\n".join(lines))
        own = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in own.items()]
        self._spawn("munged", "munged", "--foreground", "--force", *options)  # root may not run it without
        wait_until((self.folder / "munge.socket").exists, "a munged")
        self._spawn("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self._spawn(node, "slurmd", "-D", "-N", node)
        wait_until(lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"), "a cluster of idle nodes")

    def _spawn(self, name, *arguments):
        with (self.folder / f"{name}.txt").open("a") as output:
            self._daemons[name] = subprocess.Popen(
                arguments, env=self._env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def run(self, *arguments, env=None):
        """Runs a command of Slurm; returns what it printed."""
        done = subprocess.run(
            arguments,
            env={**self._env, **(env or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def node_states(self):
        """Short names of the states, by node; none while slurmctld does not answer."""
        with suppress(AssertionError):
            lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").split("\n")
            return dict(line.split() for line in lines if line)
        return {}

    def submit(self, *arguments, nodes, tasks_per_node=1, env=None):
        """Submits the script with a command for the workers, on so many nodes, of which one is spare."""
        options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks_per_node}", "--cpus-per-task=1"]
        options += ["--time=10", "--parsable"]
        return Job(self, int(self.run("sbatch", *options, str(SCRIPT), *arguments, env=env)))

    def kill_node(self, node):
        """Kills a node's daemon and all that runs on it, and reports nothing, as if it lost power."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        place = f"SLURMD_NODENAME={node}".encode()
        tasks = [pid for pid in marked(self._mark) if place in environ_of(pid)]
        kill(self._step_daemons(self.folder / f"slurmd-{node}.log"))
        kill(tasks)

    def _step_daemons(self, path):
        """The slurmstepds that have a file open; what shows their titles overwrites their environment."""
        return [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if command(pid).startswith("slurmstepd") and path in files_of(pid)
        ]

    def close(self):
        """Ends every process of the cluster and of its jobs."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        logs = [self.folder / f"slurmd-{node}.log" for node in self.nodes]
        for log in logs:
            kill(self._step_daemons(log))
        kill(marked(self._mark))
        gone(self._mark)
        wait_until(lambda: not any(map(self._step_daemons, logs)), "an end of all slurmstepds")


class Job:
    """A job of the script.

    Attributes:
        number: Slurm's.
    """

    def __init__(self, cluster, number):
        self._cluster, self.number = cluster, number

    def log(self):
        """The run log of the first attempt."""
        return self._cluster.folder / f"offbeat-{self.number}" / "attempt-0" / "log.jsonl"

    def output(self):
        """What the job has printed, and Slurm about it."""
        path = self._cluster.folder / f"offbeat-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def shown(self, field):
        """A field of `scontrol show job`."""
        text = self._cluster.run("scontrol", "show", "job", str(self.number))
        return re.search(rf"\b{field}=(\S*)", text)[1]

    def wait_for_state(self, state):
        """Waits until the job is in a state; the error has its output."""
        last = None

        def is_there():
            nonlocal last
            last = self.shown("JobState")
            assert last == state or last not in FINAL_STATES, (
                f"expected {state}, got {last}:\n{self.output()}"
            )
            return last == state

        try:
            wait_until(is_there, f"a job in state {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last}:\n{self.output()}") from error

    def wait_for(self, what, condition):
        """Waits until the run log has such an entry; the error has the job's output."""
        try:
            wait_for_entry(self.log(), what, condition)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.output()}") from error

    def kill_worker(self, worker):
        """Kills the process of a worker that has joined."""
        (joined,) = (one for one in entries_of(self.log(), Joined) if one.worker == worker)
        os.kill(int(re.search(r"process (\d+)", joined.location)[1]), signal.SIGKILL)


def environ_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def files_of(pid):
    """The files that a process has open."""
    found = []
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(descriptor.readlink())
    return found


def kill(pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def slurm(folder, nodes):
    """A running cluster of so many nodes."""
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
