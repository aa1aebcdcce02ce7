"""The choice of how gradients travel, measured between real processes: torch.distributed's gloo and links."""

import itertools

import pytest
import torch
import torch.distributed as dist

from offbeat.runtime.averaging.exchange_choice import (
    Candidate,
    ExchangeChoice,
    choose_by_slowest,
    choose_exchange,
    next_trial,
)
from offbeat.runtime.collectives.interface import TensorMemory
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.collectives.torch_exchange import TorchExchange
from offbeat.runtime.devices.host import Host
from offbeat.runtime.transport.endpoint import Endpoint
from support.processes import run, values

DEADLINE_S = 30.0
WORKERS = 4


def gathered(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def links_between_all(rank):
    """An endpoint of this process that knows those of the others."""
    endpoint = Endpoint(
        f"worker-{rank}", job="job", token="secret", on_message=print, on_lost=print, on_error=print
    )
    for other, addresses in enumerate(gathered(endpoint.addresses)):
        if other != rank:
            endpoint.add_peer(f"worker-{other}", addresses)
    return endpoint


class Recorded:
    """Another exchange; records the bytes that it sums, by algorithm, and what this worker gathers."""

    def __init__(self, exchange):
        self._exchange, self.device = exchange, exchange.device
        self.size, self.position = exchange.size, exchange.position
        self.summed, self.given = {}, []

    def all_reduce(self, flat, into, *, algorithm, **options):
        self.summed.setdefault(algorithm, []).append(flat.nbytes)
        return self._exchange.all_reduce(flat, into, algorithm=algorithm, **options)

    def all_gather(self, flat, **options):
        self.given.append(flat.chunk(self.size)[self.position].tolist())
        return self._exchange.all_gather(flat, **options)


def chosen(rank, emit, model_bytes):
    """The choice of this worker, what was summed in each way, what it had measured, and its next id."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    endpoint = links_between_all(rank)
    links = Recorded(LinkExchange(endpoint, [f"worker-{other}" for other in range(WORKERS)], rank))
    gloo = Recorded(TorchExchange(dist.group.WORLD, Host()))
    candidates = {
        "gloo": Candidate(gloo),
        "links": Candidate(links),
        "links (torus:2)": Candidate(links, "torus:2"),
    }
    ids = itertools.count()
    choice = choose_exchange(
        candidates,
        links,
        TensorMemory(endpoint, Host()),
        model_bytes,
        next_exchange_id=ids.__next__,
        timeout_s=DEADLINE_S,
    )
    dist.barrier()
    endpoint.close()
    dist.destroy_process_group()
    return choice, [*gloo.summed.values(), *links.summed.values()], links.given, next(ids)


@pytest.mark.parametrize("model_bytes", [4_000, 9_000_000, 10**9])
def test_all_workers_choose_the_same_by_times_that_they_have_measured(model_bytes):
    seen = values(run(chosen, WORKERS, model_bytes))
    choice, summed, *_ = seen[0]
    assert all(other == choice for other, *_ in seen)
    assert len({next_id for *_, next_id in seen}) == 1  # all go on with the same id
    assert choice.size_bytes <= min(model_bytes, 2**24)
    assert len(summed) == 3
    assert summed[0] == summed[1] == summed[2]  # each candidate has the same work
    assert summed[0][0] == min(model_bytes, 2**16) + 4  # and a trailer of one number
    assert [*choice.times_s.values()] == [max(given[-1][i] for *_, given, _ in seen) for i in range(3)]
    assert len({str(given) for *_, given, _ in seen}) == WORKERS  # each has measured for itself


def test_the_slowest_worker_decides():
    workers_s = [{"NCCL": 0.001, "links": 0.003}, {"NCCL": 0.005, "links": 0.004}]
    choice = choose_by_slowest(8_000_000, workers_s)
    assert choice.name == "links"
    assert choice.times_s == {"NCCL": 0.005, "links": 0.004}
    assert str(choice) == "gradients travel by links: 8.0 MB took 5.00 ms by NCCL, 4.00 ms by links"


@pytest.mark.parametrize(
    ("nccl_s", "ring_s", "hierarchy_s", "name"),
    [
        (2.0, 2.0, 2.0, "NCCL"),
        (2.0, 1.85, 1.85, "NCCL"),
        (2.0, 1.75, 1.6, "ring"),
        (2.0, 1.75, 1.5, "hierarchy"),
        (2.0, 1.95, 1.75, "hierarchy"),
        (1.0, 1.9, 1.0, "NCCL"),
    ],
)
def test_a_candidate_has_to_save_a_tenth_of_the_time_of_the_one_before_it(nccl_s, ring_s, hierarchy_s, name):
    times_s = {"NCCL": nccl_s, "ring": ring_s, "hierarchy": hierarchy_s}
    assert choose_by_slowest(8, [times_s]).name == name


def test_more_is_measured_while_that_takes_at_most_three_seconds():
    def after(total_s, size_bytes_max):
        choice = ExchangeChoice("a", 1 << 16, {"a": total_s / 2, "b": total_s / 2})
        return next_trial(choice, size_bytes_max)

    # Sixteen times the bytes, by all candidates two to five times.
    assert after(0.02, 1 << 24) == (1 << 20, 5)
    assert after(0.02, 100_000) == (100_000, 5)
    assert after(0.02, 1 << 16) is None
    assert after(0.06, 1 << 24) == (1 << 20, 3)
    assert after(0.09, 1 << 24) == (1 << 20, 2)
    assert after(0.095, 1 << 24) is None
