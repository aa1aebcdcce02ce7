"""Training with other libraries, beside offbeat's strategies: `python -m benchmarks race`.

Every worker is on a host of its own and in the default process group of torch.distributed (gloo), which
libraries without torch.distributed use only to begin and to end together. An ordinary step is SGD on the mean
loss of one batch. Libraries are imported where they are used: each has an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

MOMENTUM = 0.9
_WAIT = timedelta(seconds=600)  # for a worker that is late
_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.9  # Douillard et al. 2023, "DiLoCo", section 3
_MATCHMAKING_S, _AVERAGING_S = 0.5, 30.0
_WARM_UP_SHARE = 0.1

Step: TypeAlias = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class PeerJob:
    """What a library has to know of the training.

    Attributes:
        rank: of this worker.
        addresses: IPv4 addresses of all workers' hosts, by rank.
        batch_size: samples of a step of one worker.
        steps: of each worker, if all make as many.
        every: steps between two averagings, where workers take local steps.
        lr: learning rate of a worker's SGD.
    """

    rank: int
    addresses: tuple[str, ...]
    batch_size: int
    steps: int
    every: int
    lr: float

    @property
    def world(self) -> int:
        """Number of workers."""
        return len(self.addresses)

    def optimizer(self, parameters: Any) -> SGD:
        """Return the optimizer of ordinary steps."""
        return SGD(parameters, lr=self.lr, momentum=MOMENTUM)


@dataclass(frozen=True, kw_only=True)
class PeerLoop:
    """A training that has begun.

    Attributes:
        step: trains on one batch of samples (B, ...) and labels (B,).
        has_ended: whether to stop, by the number of steps that this worker has made.
    """

    step: Step
    has_ended: Callable[[int], bool]


Train: TypeAlias = Callable[[nn.Module, PeerJob], AbstractContextManager[PeerLoop]]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library and a way to train with it.

    Attributes:
        train: begins the training of a model, whose parameters it keeps in place.
        requirement: the library and its version, in pip's form; None for torch itself.
        workers_multiple: what the number of workers must be a multiple of.
        needs_power_of_two: the number of workers must be a power of 2.
    """

    train: Train
    requirement: str | None = None
    workers_multiple: int = 1
    needs_power_of_two: bool = False

    def check_workers(self, name: str, workers: int) -> None:
        """Raise a ValueError if the library cannot train with so many workers."""
        if self.needs_power_of_two and workers & (workers - 1):
            raise ValueError(f"{name} needs a number of workers that is a power of 2, got {workers}")
        if workers % self.workers_multiple:
            raise ValueError(
                f"{name} needs a number of workers that is a multiple of {self.workers_multiple}, "
                f"got {workers}"
            )


def _train_step(model: nn.Module, optimizer: Any, inputs: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def _equal_steps(job: PeerJob, step: Step) -> PeerLoop:
    return PeerLoop(step=step, has_ended=lambda steps: steps >= job.steps)


@contextmanager
def _ddp(model: nn.Module, job: PeerJob) -> Iterator[PeerLoop]:
    """PyTorch's DistributedDataParallel: the mean gradient of all workers in each step."""
    optimizer = job.optimizer(model.parameters())
    yield _equal_steps(job, partial(_train_step, DistributedDataParallel(model), optimizer))


@contextmanager
def _post_local_sgd(model: nn.Module, job: PeerJob) -> Iterator[PeerLoop]:
    """PyTorch's post-local SGD: mean gradients in the first tenth of the steps, then periodic mean models."""
    warm_up = round(_WARM_UP_SHARE * job.steps)
    optimizer = job.optimizer(model.parameters())
    averager = PeriodicModelAverager(period=job.every, warmup_steps=warm_up)
    wrapped = DistributedDataParallel(model)
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=warm_up,
        post_local_gradient_allreduce=False,  # a host has one worker
    )
    wrapped.register_comm_hook(state, post_localSGD_hook)

    def step(inputs: Tensor, labels: Tensor) -> None:
        _train_step(wrapped, optimizer, inputs, labels)
        averager.average_parameters(model.parameters())

    yield _equal_steps(job, step)


@contextmanager
def _decent(model: nn.Module, job: PeerJob, *, topology: str) -> Iterator[PeerLoop]:
    """decent-dp: each step averages with one neighbour, whose place in the topology depends on the step."""
    from decent_dp.ddp import DecentralizedDataParallel

    job.optimizer(
        model.parameters()
    )  # torch takes seconds to make the first one; decent-dp does it in a step
    wrapped = DecentralizedDataParallel(
        model,
        optim_fn=lambda named: job.optimizer([parameter for _, parameter in named]),
        topology=topology,
        _local_world_size=1,
    )

    def step(inputs: Tensor, labels: Tensor) -> None:
        F.cross_entropy(wrapped(inputs), labels).backward()  # its hooks step and average

    yield _equal_steps(job, step)
    wrapped.global_avg(will_revert=False)  # and waits for what is under way


@contextmanager
def _torchft(model: nn.Module, job: PeerJob, *, method: str) -> Iterator[PeerLoop]:
    """torchft: mean models (LocalSGD), or an outer Nesterov step with their mean change (DiLoCo)."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    address = job.addresses[job.rank]
    lighthouse = None
    place: list[Any] = [None]
    if job.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=job.world, join_timeout_ms=60_000)
        place = [f"http://{address}:{lighthouse.address().rpartition(':')[2]}"]
    dist.broadcast_object_list(place)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_WAIT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=job.world,
        use_async_quorum=False,
        timeout=_WAIT,
        quorum_timeout=_WAIT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=place[0],
        replica_id=f"worker{job.rank}",
        hostname=address,
        init_sync=False,  # all begin with the same model
    )
    optimizer = job.optimizer(model.parameters())
    outer = SGD(model.parameters(), lr=_OUTER_LR, momentum=_OUTER_MOMENTUM, nesterov=True)
    try:
        with (
            LocalSGD(manager, model, optimizer, job.every)
            if method == "localsgd"
            else DiLoCo(manager, [model], optimizer, outer, job.every)
        ):
            yield _equal_steps(job, partial(_train_step, model, optimizer))
        dist.barrier()  # others may still average
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


@contextmanager
def _hivemind(model: nn.Module, job: PeerJob) -> Iterator[PeerLoop]:
    """hivemind: local steps; mean models whenever all workers together have used so many samples."""
    import hivemind

    maddrs = [f"/ip4/{job.addresses[job.rank]}/tcp/0"]
    peers: list[Any] = [None]
    dht = hivemind.DHT(host_maddrs=maddrs, start=True) if job.rank == 0 else None
    if dht is not None:
        peers = [[str(one) for one in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(peers)
    if dht is None:
        dht = hivemind.DHT(host_maddrs=maddrs, initial_peers=peers[0], start=True)
    rounds = max(1, job.steps // job.every)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="race",
        params=model.parameters(),
        optimizer=job.optimizer,
        use_local_updates=True,
        target_batch_size=job.every * job.world * job.batch_size,
        batch_size_per_step=job.batch_size,
        matchmaking_time=_MATCHMAKING_S,
        averaging_timeout=_AVERAGING_S,
    )
    try:
        yield PeerLoop(
            step=partial(_train_step, model, optimizer),
            has_ended=lambda steps: optimizer.local_epoch >= rounds,
        )
        dist.barrier()  # others may still average
    finally:
        optimizer.shutdown()
        dht.shutdown()


_DECENT, _TORCHFT, _HIVEMIND = "decent-dp==0.2.3", "torchft==0.2.0", "hivemind==1.1.12"
PEERS: dict[str, Peer] = {
    "ddp": Peer(train=_ddp),
    "post_local_sgd": Peer(train=_post_local_sgd),
    "decent_ring": Peer(train=partial(_decent, topology="ring"), requirement=_DECENT, workers_multiple=2),
    "decent_one_peer": Peer(
        train=partial(_decent, topology="one-peer-exp"), requirement=_DECENT, needs_power_of_two=True
    ),
    "torchft_localsgd": Peer(train=partial(_torchft, method="localsgd"), requirement=_TORCHFT),
    "torchft_diloco": Peer(train=partial(_torchft, method="diloco"), requirement=_TORCHFT),
    "hivemind": Peer(train=_hivemind, requirement=_HIVEMIND),
}
"""By the name in figures: what offbeat is compared with."""


def equal_shards(
    tensors: tuple[Tensor, ...], rank: int, world: int, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of a worker's shard without end, shuffled and shared out anew in each epoch.

    Args:
        tensors: samples (N, ...) and what belongs to them, each with N rows.
        rank, world: this worker's, and how many workers there are.
        batch_size: samples of a batch; an incomplete one at an epoch's end is left out.
        seed: of the order, the same on all workers.
    """
    samples = len(tensors[0])
    generator = torch.Generator().manual_seed(seed)
    while True:
        own = torch.randperm(samples, generator=generator)[rank : samples - samples % world : world]
        for chosen in own.split(batch_size):
            if len(chosen) == batch_size:
                yield tuple(tensor[chosen] for tensor in tensors)
