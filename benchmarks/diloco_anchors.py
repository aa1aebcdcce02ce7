"""The common models of offbeat's `diloco` beside those of torchft's DiLoCo.

Both train with the same seeds, batches in the same order, inner SGD with momentum, and outer Nesterov steps.
The *anchor*, the common model after each outer step, then differs by rounding alone. A worker's model is the
anchor there, since all wait for the outer step and take its whole result.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from benchmarks.anchors_worker import AnchorSettings
from benchmarks.commands import DilocoAnchorsOptions
from benchmarks.peer_environments import interpreter_with
from benchmarks.peers import PEERS
from benchmarks.workers import print_progress, run_workers
from offbeat.cli.result import Result, machine
from offbeat.data import load_data_set, resolve_data_dir
from offbeat.errors import OffbeatError

PEER: Final = "torchft_diloco"
DTYPES: Final = ("float64", "float32")


@dataclass(frozen=True, kw_only=True)
class Round:
    """Two anchors after the same outer step.

    Attributes:
        number: of the outer step, from 1.
        difference_ratio: the largest difference of an element, to the largest change of one since the start.
    """

    number: int
    difference_ratio: float


def compare(anchors: Tensor, others: Tensor) -> list[Round]:
    """Compare the anchors (R + 1, D) of two trainings, the models that they began with first.

    Raises:
        ValueError: they began with different models, or made another number of rounds.
    """
    if anchors.shape != others.shape or not torch.equal(anchors[0], others[0]):
        raise ValueError(f"expected the same first model and rounds, got {anchors.shape} and {others.shape}")
    differences = (anchors - others).abs().amax(1)
    changes = (anchors - anchors[0]).abs().amax(1)
    ratios = (differences[1:] / changes[1:]).tolist()
    return [Round(number=number, difference_ratio=ratio) for number, ratio in enumerate(ratios, start=1)]


def train(settings: AnchorSettings, interpreter: Path | None) -> Tensor:
    """Train, and return the anchors (R + 1, D).

    Raises:
        OffbeatError: a worker failed, or workers have different anchors.
    """
    run_workers(
        "benchmarks.anchors_worker",
        msgspec.to_builtins(settings),
        settings.workers,
        env={"RUST_LOG": "error"},
        interpreter=interpreter,
    )
    files = (Path(settings.folder) / f"{rank}.pt" for rank in range(settings.workers))
    anchors: Tensor
    anchors, *others = (torch.load(file, weights_only=True) for file in files)
    for rank, other in enumerate(others, start=1):
        if not torch.equal(anchors, other):
            raise OffbeatError(f"workers 0 and {rank} have different models after an outer step")
    return anchors


def run(options: DilocoAnchorsOptions, *, command: str) -> Result:
    """Train with both in each precision.

    Raises:
        OffbeatError: the data are missing, the library could not be installed, or a worker failed.
    """
    requirement = PEERS[PEER].requirement
    assert requirement is not None
    interpreter = interpreter_with(requirement)
    splits = load_data_set("digits", resolve_data_dir(None), download=False)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "train.pt")
        torch.save([tensor.clone() for tensor in splits.train.tensors], data)
        for dtype in DTYPES:
            settings = AnchorSettings(
                peer=None,
                data=data,
                sample_shape=splits.sample_shape,
                classes=splits.classes,
                dtype=dtype,
                workers=options.workers,
                rounds=options.rounds,
                every=options.every,
                batch_size=options.batch_size,
                lr=options.lr,
                seed=options.seed,
                folder=folder,
            )
            print_progress(f"offbeat, {dtype}")
            anchors = train(settings, None)
            print_progress(f"{requirement}, {dtype}")
            found = compare(anchors, train(replace(settings, peer=PEER), interpreter))
            rows += [{"dtype": dtype, **msgspec.to_builtins(one)} for one in found]
            figures[f"anchor_difference_max_ratio_{dtype}"] = max(one.difference_ratio for one in found)
    return Result(
        name="diloco-anchors",
        command=command,
        kind="real",
        seed=options.seed,
        figures=figures,
        rows=rows,
        machine=machine(model="mlp", data="digits", batch_size=options.batch_size, peers=requirement),
    )
