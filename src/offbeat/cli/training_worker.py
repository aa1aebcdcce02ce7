"""One worker of a built-in training, as started by `offbeat train` and `offbeat compare`.

Run as `python -m offbeat.cli.training_worker SETTINGS`, with the settings as one JSON object. It is an
ordinary user of `offbeat.join`: it reports its results into the run log, from which the process that started
it reads them. It prints nothing and downloads nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import offbeat
from offbeat.data import DATA_SETS, DEFAULT_DIR, load_data_set
from offbeat.models import MODELS, build_model
from offbeat.strategies import parse_strategy

SEED_MAX: Final = 2**32 - 1
OPTIMIZERS: Final[Mapping[str, Callable[[Iterable[nn.Parameter], TrainingSettings], Optimizer]]] = {
    "sgd": lambda parameters, settings: torch.optim.SGD(
        parameters, lr=settings.lr, momentum=settings.momentum
    ),
    "adagrad": lambda parameters, settings: torch.optim.Adagrad(parameters, lr=settings.lr),
    "adam": lambda parameters, settings: torch.optim.Adam(
        parameters, lr=settings.lr, betas=(settings.momentum, _BETA_SQUARES)
    ),
    "adamw": lambda parameters, settings: torch.optim.AdamW(
        parameters, lr=settings.lr, betas=(settings.momentum, _BETA_SQUARES)
    ),
}
_EVALUATION_BATCH: Final = 512
_BETA_SQUARES: Final = 0.999


class TrainingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a training, the same on every worker.

    Attributes:
        model: a key of `offbeat.models.MODELS`.
        data: a key of `offbeat.data.DATA_SETS`.
        strategy: as on the command line, `name` or `name:key=value,key=value`.
        epochs: passes over the data, at least 1.
        batch_size: samples per worker and step, at least 1.
        lr: learning rate, above 0.
        decays_lr: the learning rate falls linearly, by the same amount after every epoch, to 0 after the
            last.
        momentum: momentum of SGD, or the first of Adam's betas; at least 0 and below 1.
        optimizer: a key of `OPTIMIZERS`.
        threads: worker threads in each process, at least 1; more than one only with a parameter server.
        seed: seed of the weights and of the order of samples.
        repeat: how often each sample is repeated in its batch, at least 1. The gradient stays the same and
            takes this many times the computation, which emulates a model that is as many times costlier.
        data_dir: folder with the data set's files.
        evaluates_each_epoch: rank 0 measures the test accuracy after every epoch, not only after the last; in
            lockstep the other workers wait for it.

    Raises:
        ValueError: a value is out of range.
    """

    model: str
    data: str
    strategy: str
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    seed: int
    decays_lr: bool = False
    repeat: int = 1
    optimizer: str = "sgd"
    threads: int = 1
    data_dir: str = str(DEFAULT_DIR)
    evaluates_each_epoch: bool = True

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}: expected one of {', '.join(MODELS)}")
        if self.data not in DATA_SETS:
            raise ValueError(f"unknown data set {self.data!r}: expected one of {', '.join(DATA_SETS)}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
        strategy = parse_strategy(self.strategy)
        if self.threads > 1 and not strategy.always_needs_coordinator:
            raise ValueError(
                f"expected one worker thread per process with the strategy {self.strategy}, got "
                f"{self.threads}: more need a strategy on a parameter server"
            )
        for name in ("epochs", "batch_size", "repeat", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"the learning rate must be above 0, got {self.lr:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum:g}")
        if not 0 <= self.seed <= SEED_MAX:
            raise ValueError(f"the seed must be from 0 to {SEED_MAX}, got {self.seed}")


def train(settings: TrainingSettings, thread: int = 0) -> None:
    """Train as one worker of the job that the environment variables describe.

    After every epoch each worker that had a sample reports its mean training loss; rank 0 also reports the
    test accuracy.

    Raises:
        OffbeatError: the data are missing, or the job failed.
    """
    splits = load_data_set(settings.data, settings.data_dir)
    model = build_model(
        settings.model, sample_shape=splits.sample_shape, classes=splits.classes, seed=settings.seed
    )
    optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), settings)
    strategy = parse_strategy(settings.strategy)
    with offbeat.join(model, optimizer, strategy, thread=thread, threads=settings.threads) as session:
        torch.manual_seed(settings.seed + session.worker)  # dropout masks differ between workers
        for epoch in session.epochs(settings.epochs):
            model.train()
            for group in optimizer.param_groups if settings.decays_lr else ():
                group["lr"] = settings.lr * (1 - epoch / settings.epochs)
            loss_sum, samples = torch.zeros(()), 0
            for inputs, labels in session.batches(splits.train, settings.batch_size):
                optimizer.zero_grad()
                loss = batch_loss(model, inputs, labels, settings.repeat)
                loss.backward()
                session.observe(loss)
                optimizer.step()
                loss_sum += loss.detach() * len(labels)
                samples += len(labels)
            metrics = {"loss": float(loss_sum) / samples} if samples else {}  # an epoch may have no samples
            is_last = epoch == settings.epochs - 1
            if session.is_leader and (is_last or settings.evaluates_each_epoch):
                session.refresh()
                metrics["accuracy"] = accuracy(model, splits.test)
            session.report(**metrics)


def batch_loss(model: nn.Module, inputs: Tensor, labels: Tensor, repeat: int = 1) -> Tensor:
    """Return the mean cross-entropy of a batch in which each sample is repeated `repeat` times.

    Args:
        model: maps (B, ...) to logits (B, K).
        inputs: samples (B, ...).
        labels: int64 (B,).
        repeat: at least 1; the value and its gradient do not depend on it, up to rounding.
    """
    if repeat > 1:
        inputs, labels = torch.cat([inputs] * repeat), labels.repeat(repeat)
    return F.cross_entropy(model(inputs), labels)


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of the test samples, 0 to 1, whose highest logit is that of their label."""
    model.eval()
    inputs, labels = test.tensors
    right = 0
    for start in range(0, len(labels), _EVALUATION_BATCH):
        chunk = slice(start, start + _EVALUATION_BATCH)
        right += int((model(inputs[chunk]).argmax(1) == labels[chunk]).sum())
    return right / len(labels)


def main(arguments: Sequence[str]) -> int:
    """Train with the settings given as JSON in the only argument."""
    (text,) = arguments
    settings = msgspec.json.decode(text, type=TrainingSettings)
    with ThreadPoolExecutor(settings.threads, thread_name_prefix="offbeat worker") as workers:
        runs = [workers.submit(train, settings, thread) for thread in range(1, settings.threads)]
        train(settings)
        for run in runs:
            run.result()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
