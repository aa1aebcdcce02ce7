"""What workers of a job's start exchange through its store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from offbeat.errors import WorkerError
from offbeat.runtime.control.rendezvous import RendezvousInfo

WORLD = 3


def information(store, worker, start_s):
    return RendezvousInfo(
        job="job",
        token="secret",
        host="127.0.0.1",
        coordinator=(),
        store=store,
        hosts_store=False,
        worker=worker,
        world=WORLD,
        start_s=start_s,
        deadline_s=0.0,
    )


def test_each_worker_gets_what_all_have_given_by_worker():
    store = HashStore()
    workers = [information(store, worker, 20.0) for worker in range(WORLD)]
    with ThreadPoolExecutor(WORLD) as threads:
        given = threads.map(lambda one: one.gather("device", f"GPU {one.worker}"), workers)
        assert [*given] == [["GPU 0", "GPU 1", "GPU 2"]] * WORLD


def test_a_worker_that_gives_nothing_is_named():
    with pytest.raises(WorkerError, match=r"worker 1 waited 0\.1 s for the device of workers \[0, 2\]"):
        information(HashStore(), 1, 0.1).gather("device", "GPU 1")
