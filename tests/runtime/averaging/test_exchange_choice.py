"""The choice between exchanges, measured between real processes: torch.distributed's gloo and links."""

import itertools

import pytest
import torch
import torch.distributed as dist

from offbeat.runtime.averaging.exchange_choice import choose_by_slowest, choose_exchange
from offbeat.runtime.collectives.interface import TensorMemory
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.collectives.torch_exchange import TorchExchange
from offbeat.runtime.devices.host import Host
from offbeat.runtime.transport.endpoint import Endpoint
from support.processes import run, values

DEADLINE_S = 30.0
WORKERS = 2


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


class Counted:
    """Another exchange, and how many bytes it has summed."""

    def __init__(self, exchange):
        self._exchange, self.device, self.bytes = exchange, exchange.device, 0

    def all_reduce(self, flat, into, **options):
        self.bytes += flat.nbytes
        return self._exchange.all_reduce(flat, into, **options)


def chosen(rank, emit, model_bytes):
    """The choice of this worker, what each exchange has summed, and what the workers had measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    endpoint = links_between_all(rank)
    links = LinkExchange(endpoint, [f"worker-{other}" for other in range(WORKERS)], rank)
    exchanges = {"gloo": Counted(TorchExchange(dist.group.WORLD, Host())), "links": Counted(links)}
    told = []

    def gather(text):
        told.extend(gathered(text))
        return told

    choice = choose_exchange(
        exchanges,
        TensorMemory(endpoint, Host()),
        model_bytes,
        next_exchange_id=itertools.count().__next__,
        gather=gather,
        timeout_s=DEADLINE_S,
    )
    dist.barrier()
    endpoint.close()
    dist.destroy_process_group()
    return choice, [one.bytes for one in exchanges.values()], told


@pytest.mark.parametrize(
    ("model_bytes", "measured_bytes"), [(4_000, 4_000), (9_000_000, 9_000_000), (10**9, 2**24)]
)
def test_all_workers_choose_the_same_exchange_by_times_that_they_have_measured(model_bytes, measured_bytes):
    seen = values(run(chosen, WORKERS, model_bytes))
    (choice, summed, told), (other, _, _) = seen
    assert choice == other
    assert choice.size_bytes == measured_bytes
    rounds = summed[0] // measured_bytes
    assert rounds > 1
    assert summed == [rounds * (measured_bytes + 4)] * 2  # a trailer of one number
    assert len(set(told)) == WORKERS  # each has measured for itself
    assert choice.times_s[choice.name] == min(choice.times_s.values())
    assert min(choice.times_s.values()) > 0


def test_the_slowest_worker_decides():
    workers_s = [{"NCCL": 0.001, "links": 0.003}, {"NCCL": 0.005, "links": 0.004}]
    choice = choose_by_slowest(8_000_000, workers_s)
    assert choice.name == "links"
    assert choice.times_s == {"NCCL": 0.005, "links": 0.004}
    assert str(choice) == "gradients travel by links: 8.0 MB took 5.00 ms by NCCL, 4.00 ms by links"


def test_of_two_that_are_equally_fast_all_choose_the_first():
    assert choose_by_slowest(8, [{"NCCL": 0.002, "links": 0.002}]).name == "NCCL"
