"""Launchers as real processes, each with a log, and the workers that they start."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

from offbeat.events import Ready
from support.jobs import MARK, gone, marked
from support.newcomer_training import GATE_STEP
from support.run_logs import entries_of, wait_until

LIMIT_S = 120.0
TORCHRUN = ["-m", "torch.distributed.run"]
OFFBEAT_RUN = ["-m", "offbeat", "run"]
TESTS = str(Path(__file__).parents[1])


class Launchers:
    """The launchers of one job.

    Attributes:
        processes: of the launchers, in the order in which they were started.
    """

    def __init__(self, folder, gate, mark, env):
        self.folder, self.gate, self.processes = folder, gate, []
        path = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._env = {**os.environ, **gate.env, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}

    def start(self, *command):
        """Starts a launcher, with the options that come before the program."""
        with self._log(len(self.processes)).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *command, "-m", "support.launched_training", str(self.folder)],
                cwd=self.folder,
                env=self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)

    def _log(self, place):
        return self.folder / f"launcher-{place}.txt"

    def output(self, place=0):
        return self._log(place).read_text()

    def code(self, place=0):
        """Waits for the end of a launcher; returns its exit code."""
        return self.processes[place].wait(LIMIT_S)

    def started(self, rank, attempt=0):
        """The ids of the processes that had a rank, in no order."""
        paths = self.folder.glob(f"process-{attempt}-{rank}-*")
        return {int(re.sub(r".*-", "", path.name)) for path in paths}

    def wait_until_all_are_at_the_gate(self, workers=3):
        def are_there():
            there = {one.worker for one in entries_of(self.gate.log, Ready) if one.step >= GATE_STEP - 1}
            return there >= set(range(workers))

        wait_until(are_there, f"{workers} workers at the gate")

    def kill(self, rank):
        """Kills a worker with signal 9."""
        (pid,) = self.started(rank)
        os.kill(pid, signal.SIGKILL)

    def results(self, attempt=0):
        """Of the workers that left an attempt in order, by their ids; all end with the same bits."""
        found = [json.loads(path.read_text()) for path in self.folder.glob(f"result-{attempt}-*.json")]
        assert len({(one["digest"], one["step"]) for one in found}) <= 1
        return {one["worker"]: one for one in found}


@contextmanager
def launchers(folder, gate, **env):
    """The launchers of one job; afterwards none of its processes may be left."""
    mark = uuid.uuid4().hex
    running = Launchers(folder, gate, mark, env)
    try:
        yield running
        gone(mark)
    finally:
        for process in running.processes:
            process.kill()
            process.wait()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
