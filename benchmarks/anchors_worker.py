"""One worker of `python -m benchmarks diloco-anchors`: trains with DiLoCo, and writes all common models."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import runs
from benchmarks.gloo import GlooSide
from benchmarks.peers import MOMENTUM, PEERS, PeerJob, equal_shards
from benchmarks.race_worker import flat_model
from benchmarks.workers import read_settings, send_result
from offbeat.models import build_model
from offbeat.runtime.session import join
from offbeat.strategies import DiLoCo

_WAIT_S = 600.0
_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class AnchorSettings:
    """Settings of one training, for every worker.

    Attributes:
        peer: a key of `PEERS`; None for offbeat.
        data: path of samples and labels, as a list for `torch.load`.
        sample_shape, classes: see `build_model`.
        dtype: of samples and parameters, a name in torch.
        every: steps of a round.
        folder: where each worker writes its common models (R + 1, D), from the first one on, as `RANK.pt`.
    """

    peer: str | None
    data: str
    sample_shape: tuple[int, ...]
    classes: int
    dtype: str
    workers: int
    rounds: int
    every: int
    batch_size: int
    lr: float
    seed: int
    folder: str


def main() -> None:
    """Train as one worker."""
    settings = msgspec.convert(read_settings(sys.argv), AnchorSettings)
    torch.set_num_threads(1)
    rank, dtype = int(os.environ["RANK"]), getattr(torch, settings.dtype)
    samples, labels = torch.load(settings.data, weights_only=True)
    model = build_model(
        "mlp", sample_shape=settings.sample_shape, classes=settings.classes, seed=settings.seed
    ).to(dtype)
    shards = equal_shards(
        (samples.to(dtype), labels), rank, settings.workers, settings.batch_size, settings.seed
    )
    anchors = [flat_model(model)]
    run = _offbeat if settings.peer is None else _peer
    with run(settings, rank, model) as step:
        for number, batch in enumerate(islice(shards, settings.rounds * settings.every), start=1):
            step(*batch)
            if number % settings.every == 0:
                anchors.append(flat_model(model))
    torch.save(torch.stack(anchors), Path(settings.folder) / f"{rank}.pt")
    if rank == 0:
        send_result(None)


@contextmanager
def _offbeat(
    settings: AnchorSettings, rank: int, model: nn.Module
) -> Iterator[Callable[[Tensor, Tensor], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=MOMENTUM)
    strategy = DiLoCo(
        every=settings.every,
        overlap=False,
        by_pace=False,
        quorum=settings.workers,
        shards="equal",
        global_every=None,
    )
    with join(model, optimizer, strategy) as session:

        def step(inputs: Tensor, labels: Tensor) -> None:
            runs.step(model, optimizer, inputs, labels)
            session.refresh()  # ends the step, and with it a round

        yield step


@contextmanager
def _peer(
    settings: AnchorSettings, rank: int, model: nn.Module
) -> Iterator[Callable[[Tensor, Tensor], None]]:
    assert settings.peer is not None
    job = PeerJob(
        rank=rank,
        addresses=(_ADDRESS,) * settings.workers,
        batch_size=settings.batch_size,
        steps=settings.rounds * settings.every,
        every=settings.every,
        lr=settings.lr,
    )
    port = int(os.environ["MASTER_PORT"])
    with (
        GlooSide(rank, settings.workers, os.environ["MASTER_ADDR"], port, limit_s=_WAIT_S),
        PEERS[settings.peer].train(model, job) as loop,
    ):
        dist.barrier()
        yield loop.step


if __name__ == "__main__":
    main()
