"""Three workers share data and a parameter server; one is killed, and a new one replaces it.

    python examples/worker_group.py

The data are rows of a linear function without noise, so the right weights are known. A gradient that the
killed worker pushed but did not report is pushed again by the next owner of its shards; here that is no harm.
"""

import os
import signal
from multiprocessing import get_context

import numpy as np

import offbeat
from offbeat.ps import SGD

SHARDS, ROWS, PASSES = 12, 64, 20
WEIGHTS = np.linspace(-1.0, 1.0, 10)
SPACE = {"name": "w", "keys": len(WEIGHTS), "update": SGD(lr=0.1), "dtype": "float64"}
processes = get_context("spawn")


def load(shard):
    x = np.random.default_rng(shard).normal(size=(ROWS, len(WEIGHTS)))
    return x, x @ WEIGHTS  # as they would be read from a file


def work(cluster, barrier, is_killed):
    with offbeat.PS(cluster) as ps, ps.join_group("train", SHARDS, on_worker_loss="replace") as group:
        w = ps.namespace(**SPACE)
        group.tau = 1  # no shard is more than one pass ahead of another
        barrier.wait()  # otherwise the first worker would do most of the work before the last has joined
        data = {}
        for task in group.tasks(PASSES):
            if is_killed and task.pass_number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            data = {shard: data[shard] if shard in data else load(shard) for shard in group.shards}
            for x, y in map(data.get, task.shards):
                w.push(x.T @ (x @ w.pull().result() - y) / ROWS).result()  # before the task is done


def main():
    with offbeat.PS.local(servers=2) as ps:
        barrier_of_three, barrier_of_one = processes.Barrier(3), processes.Barrier(1)
        workers = [
            processes.Process(target=work, args=(ps.cluster, barrier_of_three, rank == 0))
            for rank in range(3)
        ]
        for worker in workers:
            worker.start()
        workers[0].join()
        print("worker 0 was killed, and another takes its place")
        workers[0] = processes.Process(target=work, args=(ps.cluster, barrier_of_one, False))
        workers[0].start()
        for worker in workers:
            worker.join()
        found = ps.namespace(**SPACE).pull().result()
        print(f"the largest error of a weight is {abs(found - WEIGHTS).max():.0e}")


if __name__ == "__main__":
    main()
