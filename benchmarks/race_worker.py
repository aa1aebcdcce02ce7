"""One worker of `python -m benchmarks race`: trains, and records its model at regular times.

Gradients are computed on real data. A step is stretched (see `benchmarks.timed.Stretch`), so that workers
need the cores only for a small part of it. Copies of the model stay in memory until the training has ended;
nothing is evaluated here.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import runs
from benchmarks.gloo import GlooSide
from benchmarks.namespaces import bytes_sent
from benchmarks.peers import MOMENTUM, PEERS, PeerJob, equal_shards
from benchmarks.timed import Stretch
from benchmarks.workers import read_settings, send_result
from offbeat.models import build_model
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

_WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class RaceSettings:
    """Settings of one run, for every worker; either `strategy` or `peer` is given.

    Attributes:
        data: path of the samples and labels of an epoch, as a list for `torch.load`.
        model, sample_shape, classes: see `build_model`.
        steps: of each worker, if all make as many.
        every: see `PeerJob`.
        step_s: length of a step without slowness.
        interval_s: time between two copies of the model.
        slow: slowness rules in the format of `--slow`, for a peer; a session has them from its environment.
        addresses: of the workers' hosts, by rank.
        interface: of each host.
        folder: where each worker writes its `Recording`, as `RANK.pt`.
    """

    strategy: str | None
    peer: str | None
    data: str
    model: str
    sample_shape: tuple[int, ...]
    classes: int
    epochs: int
    steps: int
    batch_size: int
    lr: float
    every: int
    seed: int
    step_s: float
    interval_s: float
    slow: tuple[str, ...]
    addresses: tuple[str, ...]
    interface: str
    folder: str

    def build_model(self) -> nn.Module:
        """Return the model that all workers begin with."""
        return build_model(self.model, sample_shape=self.sample_shape, classes=self.classes, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What one worker recorded of its N steps, and M copies of its model: at begin, marks and end.

    All times are of the machine's monotonic clock, float64. A mark is a multiple of the interval on it, so
    all workers have the same marks; a copy is taken at the end of the first step that ends after one.

    Attributes:
        step_times_s: (N,); when a step ended.
        step_samples: (N,), int64; used by this worker by then.
        times_s: (M,); when a copy was taken.
        bytes_sent: (M,), int64; by this worker's host since the begin.
        models: (M, D), see `flat_model`.
        late_share: share of the steps that took longer than they should.
    """

    step_times_s: Tensor
    step_samples: Tensor
    times_s: Tensor
    bytes_sent: Tensor
    models: Tensor
    late_share: float

    def copy_at(self, mark_s: float) -> int:
        """Return the number of the copy for a mark; of the last one for a mark after that."""
        return min(int(torch.searchsorted(self.times_s, mark_s)), len(self.times_s) - 1)

    def samples_at(self, now_s: float) -> int:
        """Return how many samples this worker had used at a time."""
        steps = int(torch.searchsorted(self.step_times_s, now_s, right=True))
        return int(self.step_samples[steps - 1]) if steps else 0


def flat_model(model: nn.Module) -> Tensor:
    """Return a copy (D,) of all floating-point parameters and buffers."""
    values = (value for value in model.state_dict().values() if value.is_floating_point())
    return torch.cat([value.detach().flatten() for value in values])


def load_flat_model(model: nn.Module, flat: Tensor) -> None:
    """Give a model the values (D,) of `flat_model`."""
    start = 0
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(flat[start : start + value.numel()].view_as(value))
                start += value.numel()


def read_recording(path: Path) -> Recording:
    """Read what a worker wrote."""
    return Recording(**torch.load(path, weights_only=True))


class Recorder:
    """Records this worker's model; the training begins with its creation.

    Args:
        model: this worker's.
        interval_s: time between two copies.
        interface: network interface whose bytes are counted.
    """

    def __init__(self, model: nn.Module, interval_s: float, interface: str) -> None:
        self._model, self._interval_s, self._interface = model, interval_s, interface
        self._first_bytes = bytes_sent(interface)
        self._steps: list[tuple[float, int]] = []
        self._copies: list[tuple[float, int]] = []
        self._models: list[Tensor] = []
        self._copy(time.monotonic())

    def on_step(self, samples: int) -> None:
        """Count the samples of a step that has ended; copy the model at the first one after a mark."""
        now_s = time.monotonic()
        used = self._steps[-1][1] if self._steps else 0
        self._steps.append((now_s, used + samples))
        if now_s >= self._next_s:
            self._copy(now_s)

    def write(self, path: Path, stretch: Stretch) -> None:
        """Copy the model a last time; write the recording."""
        self._copy(time.monotonic())
        step_times_s, step_samples = zip(*self._steps, strict=True)
        times_s, sent = zip(*self._copies, strict=True)
        recording = {
            "step_times_s": torch.tensor(step_times_s, dtype=torch.float64),
            "step_samples": torch.tensor(step_samples),
            "times_s": torch.tensor(times_s, dtype=torch.float64),
            "bytes_sent": torch.tensor(sent) - self._first_bytes,
            "models": torch.stack(self._models),
            "late_share": stretch.late_steps / max(1, stretch.steps),
        }
        torch.save(recording, path)

    def _copy(self, now_s: float) -> None:
        self._copies.append((now_s, bytes_sent(self._interface)))
        self._models.append(flat_model(self._model))
        self._next_s = (now_s // self._interval_s + 1) * self._interval_s


def main() -> None:
    """Train as one worker."""
    settings = msgspec.convert(read_settings(sys.argv), RaceSettings)
    torch.set_num_threads(1)
    train = TensorDataset(*torch.load(settings.data, weights_only=True))
    model = settings.build_model()
    rank = int(os.environ["RANK"])
    stretch = Stretch(model, settings.step_s)
    run = _run_strategy if settings.peer is None else _run_peer
    run(settings, model, train, stretch, Path(settings.folder) / f"{rank}.pt")
    if rank == 0:
        send_result(None)


def _run_strategy(
    settings: RaceSettings, model: nn.Module, train: TensorDataset, stretch: Stretch, path: Path
) -> None:
    assert settings.strategy is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=MOMENTUM)
    with join(model, optimizer, parse_strategy(settings.strategy)) as session:
        torch.manual_seed(settings.seed + session.worker)
        model.train()
        recorder = Recorder(model, settings.interval_s, settings.interface)
        for _ in session.epochs(settings.epochs):
            for inputs, labels in session.batches(train, settings.batch_size):
                runs.step(model, optimizer, inputs, labels)
                recorder.on_step(len(inputs) if session.worker in session.members else 0)
        recorder.write(path, stretch)


def _run_peer(
    settings: RaceSettings, model: nn.Module, train: TensorDataset, stretch: Stretch, path: Path
) -> None:
    assert settings.peer is not None
    rank, world = int(os.environ["RANK"]), len(settings.addresses)
    rules = [parse_slow_rule(text) for text in settings.slow]
    slowness = InjectedSlowness(rules, workers=world, seed=settings.seed)
    job = PeerJob(
        rank=rank,
        addresses=settings.addresses,
        batch_size=settings.batch_size,
        steps=settings.steps,
        every=settings.every,
        lr=settings.lr,
    )
    batches = equal_shards(train.tensors, rank, world, settings.batch_size, settings.seed)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    torch.manual_seed(settings.seed + rank)
    model.train()
    with (
        GlooSide(rank, world, address, port, limit_s=_WAIT_S),
        PEERS[settings.peer].train(model, job) as loop,
    ):
        dist.barrier()
        recorder = Recorder(model, settings.interval_s, settings.interface)
        for step, (inputs, labels) in enumerate(batches):
            if loop.has_ended(step):
                break
            stretch.factor = slowness.factor(rank, 0, step, None, step)
            loop.step(inputs, labels)
            recorder.on_step(len(inputs))
        recorder.write(path, stretch)
        dist.barrier()


if __name__ == "__main__":
    main()
