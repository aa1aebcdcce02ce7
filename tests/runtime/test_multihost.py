"""Promises of a job on several hosts, started by torchrun; network namespaces stand for hosts.

Needs root, `ip` and `tc`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.namespaces import hosts, missing
from offbeat.runtime.processes.waiting import wait_until_readable
from support.jobs import MARK, command, gone, marked

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(missing() is not None, reason=f"making hosts on this machine needs {missing()}"),
]

LIMIT_S = 120.0
SCRIPT = """
import hashlib, json, os, signal, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import offbeat
from offbeat.strategies import AllReduce

folder, steps, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(0)
x = torch.randn(4 * 8 * 10, 20, generator=generator)
data = TensorDataset(x, x[:, :5].argmax(1))


def report(**what):
    path = os.path.join(folder, f"{rank}.json")
    with open(path + ".part", "w") as file:
        json.dump(what, file)
    os.rename(path + ".part", path)


losses = []
try:
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for epoch in session.epochs(1000):
            for x, y in session.batches(data, 8):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if rank == victim and session.step == 5:
                    with open(os.path.join(folder, "computes"), "w") as pipe:
                        pipe.write("now")
                    signal.pause()
                if session.step == 3:  # all workers have joined and sent messages to their neighbours
                    links = session._job.coordinator.endpoint
                    families = {
                        name.partition(".")[0]: peer.link.sock.family.name
                        for name, peer in links._sessions.peers.items()
                        if peer.link is not None
                    }
                    addresses = list(links.addresses)
                    algorithm = session._synchronizer.binding.handle.algorithm
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
            if session.step >= steps:
                break
except offbeat.WorkerError as error:
    report(worker=error.worker, step=error.step, text=str(error), ended_s=time.monotonic())
    raise
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
report(
    step=session.step,
    digest=digest,
    first=losses[0],
    last=losses[-1],
    families=families,
    addresses=addresses,
    algorithm=algorithm,
)
"""


class Launch:
    """torchrun on every host; each worker reports into a folder."""

    def __init__(self, places, folder, mark, *, steps, victim=-1, master=None, prepare=lambda node: ":"):
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self.folder, self.mark = folder, mark
        self.agents = []
        for node, place in enumerate(places):
            line = [
                *place.prefix,
                *("sh", "-c", f'{prepare(node)}; exec "$@"', "sh"),
                sys.executable,
                "-m",
                "torch.distributed.run",
                *("--nnodes", str(len(places)), "--nproc-per-node", "2", "--node-rank", str(node)),
                *(
                    "--master-addr",
                    master or places[0].address,
                    "--master-port",
                    "29517",
                    "--monitor-interval",
                    "0.1",
                ),
                *(str(script), str(folder), str(steps), str(victim)),
            ]
            env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
            with (folder / f"agent{node}.txt").open("w") as log:
                self.agents.append(
                    subprocess.Popen(line, env=env, stdout=log, stderr=log, start_new_session=True)
                )

    def codes(self):
        """Waits for the agents; returns their exit codes."""
        return [agent.wait(LIMIT_S) for agent in self.agents]

    def reports(self):
        return {int(path.stem): json.loads(path.read_text()) for path in sorted(self.folder.glob("?.json"))}

    def output(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent*.txt")))

    def worker(self, rank):
        """The process id of a worker."""
        wanted = f"RANK={rank}".encode()
        for pid in marked(self.mark):
            if "script.py" in command(pid) and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            ):
                return pid
        raise AssertionError(f"worker {rank} does not run")


@contextmanager
def launch(tmp_path, *, rate_bit_per_s=None, **options):
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        places = stack.enter_context(hosts(2, rate_bit_per_s=rate_bit_per_s))
        launched = Launch(places, tmp_path, mark, **options)
        try:
            yield launched
            gone(mark)
        finally:
            for agent in launched.agents:
                agent.kill()
                agent.wait()
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)


def test_torchrun_on_two_hosts_trains_to_the_end_with_equal_replicas(tmp_path):
    with launch(tmp_path, steps=30) as launched:
        assert launched.codes() == [0, 0], launched.output()
    reports = launched.reports()
    assert sorted(reports) == [0, 1, 2, 3]
    for rank, result in reports.items():
        assert result["step"] == 30
        assert result["digest"] == reports[0]["digest"]
        assert result["last"] < result["first"]
        host = "10.90.0.1" if rank < 2 else "10.90.0.2"
        assert result["addresses"][1].startswith(f"tcp://{host}:")
        for peer, family in result["families"].items():
            number = 0 if peer == "coordinator" else int(peer.removeprefix("worker-"))
            expected = "AF_UNIX" if number // 2 == rank // 2 else "AF_INET"
            assert family == expected, f"worker {rank} to {peer}"
    # Worker 0 is connected to 1 on its host and, by the trial of a hierarchy, to the first of the other host.
    assert {"coordinator", "worker-1", "worker-2"} <= set(reports[0]["families"])


def test_on_a_slow_line_between_hosts_all_workers_choose_a_hierarchy_and_have_equal_replicas(tmp_path):
    with launch(tmp_path, steps=10, rate_bit_per_s=5_000_000) as launched:
        assert launched.codes() == [0, 0], launched.output()
    reports = launched.reports()
    assert [result["algorithm"] for result in reports.values()] == ["torus:2"] * 4
    assert len({result["digest"] for result in reports.values()}) == 1


def test_a_master_whose_own_name_resolves_to_a_loopback_address_is_reached(tmp_path):
    """As on Debian, where /etc/hosts gives a host's own name the address 127.0.1.1."""

    def prepare(node):  # only this command sees the mounts
        names = tmp_path / f"hosts{node}"
        names.write_text(f"127.0.0.1 localhost\n{'127.0.1.1' if node == 0 else '10.90.0.1'} head\n")
        no_name_server = "mount --bind /dev/null /etc/resolv.conf"
        return f"mount --bind {names} /etc/hosts; {no_name_server}; ip route add default dev eth0"

    with launch(tmp_path, steps=10, master="head", prepare=prepare) as launched:
        assert launched.codes() == [0, 0], launched.output()
    reports = launched.reports()
    assert len({result["digest"] for result in reports.values()}) == 1
    assert reports[0]["addresses"][1].startswith("tcp://10.90.0.1:")


@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_killed_on_one_host_is_named_on_the_other(tmp_path, victim):
    """The workers on the other host end by themselves; torchrun then ends the victim's sibling.

    The victim's agent is paused meanwhile: otherwise the sibling may be dead as well before any worker has
    noticed the first death.
    """
    others = [2, 3] if victim < 2 else [0, 1]
    computes = tmp_path / "computes"
    os.mkfifo(computes)
    pipe = os.open(computes, os.O_RDONLY | os.O_NONBLOCK)
    with launch(tmp_path, steps=1000, victim=victim) as launched:
        assert wait_until_readable(pipe, LIMIT_S), launched.output()
        os.close(pipe)
        agent = launched.agents[victim // 2]
        agent.send_signal(signal.SIGSTOP)
        ends = [os.pidfd_open(launched.worker(rank)) for rank in others]
        killed_s = time.monotonic()
        os.kill(launched.worker(victim), signal.SIGKILL)
        for end in ends:
            assert wait_until_readable(end, LIMIT_S), launched.output()
            os.close(end)
        agent.send_signal(signal.SIGCONT)
        assert all(code != 0 for code in launched.codes())
    reports = launched.reports()
    assert set(others) <= set(reports), launched.output()
    for rank in others:
        result = reports[rank]
        print(f"worker {rank} ended {result['ended_s'] - killed_s:.2f} s after")
        assert result["worker"] == victim
        assert result["step"] in (4, 5)  # the others may not have reported yet that they are in step 6
        assert f"worker {victim} was lost after {result['step']} steps" in result["text"]
