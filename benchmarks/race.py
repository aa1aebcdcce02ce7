"""Time to lockstep's accuracy of offbeat's strategies and of other libraries, side by side.

Theory of operation. All of one *case* (workers, slowness, line, seed) begin with the same model, use the same
samples, batches, optimizer and learning rate, and the same length of a step. Each worker is on a host of its
own (`benchmarks.namespaces`), so that a line has the same rate for everyone and the bytes of everyone are
counted at the same place, the host's interface. Gradients are computed on real data; a step is stretched
(`benchmarks.timed.Stretch`) to longer than all workers together need the cores for. What is slow takes a
multiple of that. The rows contain the share of steps for which the stretched time was too short.

Each worker keeps a copy of its model from the first step that ends after each of several *marks*, times that
are the same for all workers; after the training, a *curve* is computed from them. At each of its points every
worker's model is the copy for one mark, or its last one, and the point's time is that of the latest of these
copies. The accuracy is that of the mean of these models, and the *consensus distance* the root mean square of
their distances to it. The time begins when all workers have begun.

The *time to lockstep's accuracy* is when the line through a curve's points first reaches the accuracy that
lockstep (`bsp`) has at its end. All but lockstep train for one more epoch, so that one which needs some more
samples reaches it too. *Accuracy below lockstep's* is compared after as many samples as lockstep used in all,
and *pace* is the number of samples per second until then.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

import msgspec
import torch
from torch.utils.data import TensorDataset

from benchmarks.accuracy import Point, accuracy_after, time_to
from benchmarks.commands import RaceOptions
from benchmarks.namespaces import FREE, Host, hosts, parse_rate
from benchmarks.peer_environments import interpreter_with
from benchmarks.peers import PEERS
from benchmarks.race_worker import RaceSettings, Recording, load_flat_model, read_recording
from benchmarks.workers import print_progress, run_workers
from offbeat.cli.result import Result, figure_part, machine
from offbeat.cli.training_worker import accuracy
from offbeat.data import Splits, load_data_set, resolve_data_dir
from offbeat.runtime.control import environment
from offbeat.strategies import parse_strategy

LOCKSTEP: Final = "bsp"
STRATEGIES: Final = ("preduce", "adpsgd", "prague", "partial")
_QUIET: Final = {"RUST_LOG": "error", "LOGURU_LEVEL": "WARNING", "HIVEMIND_LOGLEVEL": "ERROR"}
_SPARE_EPOCHS = 1
_START_S, _LONGEST = 600.0, 4.0  # a run may take this long to start, and then so many times lockstep's time


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Which steps take `factor` times as long.

    Attributes:
        probability: of each step of each worker; None for all steps of the last worker.
    """

    factor: float
    probability: float | None = None

    def rules(self, workers: int) -> tuple[str, ...]:
        """Return the rules in the format of `--slow`."""
        if self.factor == 1:
            return ()
        if self.probability is None:
            return (f"{workers - 1}:{self.factor:g}",)
        return tuple(f"{worker}:{self.factor:g}@p={self.probability:g}" for worker in range(workers))

    def paces(self, workers: int) -> float:
        """Return the sum of all workers' paces, in those of a worker that is never slow."""
        if self.probability is None:
            return workers - 1 + 1 / self.factor
        return workers / (1 + self.probability * (self.factor - 1))

    def lockstep_factor(self, workers: int) -> float:
        """Return how many times as long a step takes on average in which all wait for the slowest."""
        is_slow = 1.0 if self.probability is None else 1 - (1 - self.probability) ** workers
        return 1 + is_slow * (self.factor - 1)


SLOWNESS: Final = {
    "none": Slowness(factor=1.0),
    "one5x": Slowness(factor=5.0),
    "one2x": Slowness(factor=2.0),
    "p05": Slowness(factor=5.0, probability=0.05),
}
"""By the name in figures."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is the same for all that are compared.

    Attributes:
        slow: a key of `SLOWNESS`.
        line: rate of each host's line in Mbit/s; None for no limit.
    """

    workers: int
    slow: str
    line: int | None
    seed: int

    @property
    def name(self) -> str:
        """As in figures, without the seed."""
        return f"{self.workers}w_{self.slow}" + ("" if self.line is None else f"_{self.line}mbit")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One that takes part: a strategy of offbeat, or a key of `PEERS`."""

    strategy: str | None = None
    peer: str | None = None

    @property
    def name(self) -> str:
        """As in figures."""
        if self.peer is not None:
            return f"peer_{self.peer}"
        return figure_part(str(self.strategy))


@dataclass(frozen=True, kw_only=True)
class RacePoint(Point):
    """One point of a curve.

    Attributes:
        bytes_sent: by all hosts so far, headers included.
        distance: consensus distance.
    """

    bytes_sent: int
    distance: float


@dataclass(frozen=True, kw_only=True)
class RaceCurve:
    """One training.

    Attributes:
        late_share: share of all workers' steps that took longer than they should.
    """

    method: Method
    case: Case
    points: tuple[RacePoint, ...]
    late_share: float


def curve_points(
    recordings: Sequence[Recording], interval_s: float, evaluate: Callable[[torch.Tensor], float]
) -> tuple[RacePoint, ...]:
    """Return the points of a curve, one for the begin, one for each mark and one for the end.

    Args:
        recordings: of all workers.
        interval_s: time between two marks.
        evaluate: returns the accuracy of a model, given as in `Recording.models`.
    """
    begin_s = max(float(one.times_s[0]) for one in recordings)
    end_s = max(float(one.times_s[-1]) for one in recordings)
    first_mark = math.floor(begin_s / interval_s) + 1
    marks = [mark * interval_s for mark in range(first_mark, math.ceil(end_s / interval_s))]
    points = []
    for mark_s in (-math.inf, *marks, math.inf):
        copies = [one.copy_at(mark_s) for one in recordings]
        models = torch.stack([one.models[copy] for one, copy in zip(recordings, copies, strict=True)])
        center = models.mean(0)
        now_s = max(float(one.times_s[copy]) for one, copy in zip(recordings, copies, strict=True))
        points.append(
            RacePoint(
                time_s=now_s - begin_s,
                samples=sum(one.samples_at(now_s) for one in recordings),
                bytes_sent=sum(
                    int(one.bytes_sent[copy]) for one, copy in zip(recordings, copies, strict=True)
                ),
                accuracy=evaluate(center),
                distance=float((models - center).square().sum(1).mean().sqrt()),
            )
        )
    return tuple(points)


def time_of_samples(points: Sequence[Point], samples: int) -> float | None:
    """Return when the line through the points reaches a number of samples, None if never."""
    before = points[0]
    for point in points[1:]:
        if point.samples >= samples:
            part = (samples - before.samples) / (point.samples - before.samples)
            return before.time_s + part * (point.time_s - before.time_s)
        before = point
    return None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a curve shows beside lockstep's of the same case.

    Attributes:
        time_ratio: to lockstep's accuracy, to lockstep's own time; None if it was not reached.
        below: accuracy below lockstep's, 0 to 1.
        paces_share: of the sum of all workers' paces, until as many samples as lockstep's were used; None if
            they were not.
    """

    time_ratio: float | None
    below: float
    paces_share: float | None


def compare(curve: RaceCurve, lockstep: RaceCurve, batch_size: int, step_s: float) -> Finding:
    """Compare a curve with lockstep's."""
    last = lockstep.points[-1]
    lockstep_s = time_to(lockstep.points, last.accuracy)
    time_s = time_to(curve.points, last.accuracy)
    used_s = time_of_samples(curve.points, last.samples)
    paces = SLOWNESS[curve.case.slow].paces(curve.case.workers) * batch_size / step_s
    return Finding(
        time_ratio=None if time_s is None or not lockstep_s else time_s / lockstep_s,
        below=last.accuracy - accuracy_after(curve.points, last.samples),
        paces_share=None if used_s is None else last.samples / used_s / paces,
    )


def figures(curves: Sequence[RaceCurve], batch_size: int, step_s: float) -> dict[str, float]:
    """Return means over the seeds; one is omitted where a seed has no value."""
    ratios: dict[str, list[float | None]] = {}
    shares: dict[str, list[float | None]] = {}
    below: dict[str, list[float]] = {}
    final: dict[str, list[float]] = {}
    lockstep = {curve.case: curve for curve in curves if curve.method.strategy == LOCKSTEP}
    for curve in curves:
        found = compare(curve, lockstep[curve.case], batch_size, step_s)
        name = f"{curve.method.name}_{curve.case.name}"
        shares.setdefault(f"sum_of_paces_share_{name}", []).append(found.paces_share)
        if curve is lockstep[curve.case]:
            final.setdefault(f"final_accuracy_{name}", []).append(curve.points[-1].accuracy)
            continue
        ratios.setdefault(f"time_ratio_to_bsp_{name}", []).append(found.time_ratio)
        below.setdefault(f"accuracy_below_bsp_percent_{curve.method.name}", []).append(100 * found.below)
    return {
        name: mean(value for value in values if value is not None)
        for group in (ratios, below, shares, final)
        for name, values in group.items()
        if None not in values
    }


def run(options: RaceOptions, *, command: str) -> Iterator[Result]:
    """Train with every method in every case; yield the result of all cases so far after each of them.

    Raises:
        OffbeatError: no root, the data are missing, a library could not be installed, or a worker failed.
        ValueError: an option out of range.
    """
    methods = _methods(options)
    cases = list(_cases(options))
    for method in methods:
        for case in cases:
            if method.peer is not None:
                PEERS[method.peer].check_workers(method.peer, case.workers)
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise ValueError(f"the learning rate must be above 0, got {options.lr:g}")
    data_dir = resolve_data_dir(options.data_dir)
    splits = load_data_set(options.data, data_dir, download=options.download)
    for case in cases:
        if min(options.samples, len(splits.train)) < case.workers * options.batch_size:
            raise ValueError(f"expected at least {case.workers * options.batch_size} samples for one step")
    interpreters = {
        peer.requirement: interpreter_with(peer.requirement)
        for peer in (PEERS[method.peer] for method in methods if method.peer is not None)
        if peer.requirement is not None
    }
    curves = []
    with tempfile.TemporaryDirectory() as folder:
        torch.save([tensor[: options.samples].clone() for tensor in splits.train.tensors], _data(folder))
        for case in cases:
            rate = None if case.line is None else case.line * 1_000_000
            with hosts(case.workers, rate_bit_per_s=rate) as places:
                for method in methods:
                    print_progress(f"{method.name}, {case.name}, seed {case.seed}")
                    requirement = None if method.peer is None else PEERS[method.peer].requirement
                    interpreter = None if requirement is None else interpreters[requirement]
                    settings = _settings(options, folder, splits, case, method, places)
                    curves.append(_train(options, settings, splits.test, method, case, places, interpreter))
            yield _result(options, command, curves, ", ".join(interpreters))


def _result(options: RaceOptions, command: str, curves: Sequence[RaceCurve], peers: str) -> Result:
    step_s = options.step_ms / 1000
    return Result(
        name="race",
        command=command,
        kind="real",
        seed=0,
        figures=figures(curves, options.batch_size, step_s),
        rows=[
            *_summaries(curves, options.batch_size, step_s),
            *({**_labels(curve), **msgspec.to_builtins(point)} for curve in curves for point in curve.points),
        ],
        machine=machine(
            model=options.model,
            data=options.data,
            batch_size=options.batch_size,
            stretched_step_ms=options.step_ms,
            peers=peers,
        ),
    )


def _methods(options: RaceOptions) -> list[Method]:
    strategies = options.strategy or STRATEGIES
    for strategy in strategies:
        parse_strategy(strategy)
    peers = options.peer or tuple(PEERS)
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"unknown peer {peer!r}: expected one of {', '.join(PEERS)}")
    return [
        Method(strategy=LOCKSTEP),
        *(Method(strategy=strategy) for strategy in dict.fromkeys(strategies) if strategy != LOCKSTEP),
        *(Method(peer=peer) for peer in dict.fromkeys(peers) if options.peers),
    ]


def _cases(options: RaceOptions) -> Iterator[Case]:
    for slow in options.slow or ():
        if slow not in SLOWNESS:
            raise ValueError(f"unknown slowness {slow!r}: expected one of {', '.join(SLOWNESS)}")
    lines = [parse_rate(line) for line in options.line or (FREE, "1000")]
    for workers in options.workers or (4, 8):
        for line in lines:
            for slow in options.slow or SLOWNESS:
                for seed in range(options.seeds):
                    yield Case(workers=workers, slow=slow, line=line, seed=seed)


def _data(folder: str) -> str:
    return str(Path(folder) / "train.pt")


def _settings(
    options: RaceOptions, folder: str, splits: Splits, case: Case, method: Method, places: Sequence[Host]
) -> RaceSettings:
    samples = min(options.samples, len(splits.train))
    epochs = options.epochs + _SPARE_EPOCHS * (method.strategy != LOCKSTEP)
    steps = options.epochs * (samples // (case.workers * options.batch_size))
    slowness, step_s = SLOWNESS[case.slow], options.step_ms / 1000
    return RaceSettings(
        strategy=method.strategy,
        peer=method.peer,
        data=_data(folder),
        model=options.model,
        sample_shape=splits.sample_shape,
        classes=splits.classes,
        epochs=epochs,
        steps=steps * epochs // options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        every=options.every,
        seed=case.seed,
        step_s=step_s,
        interval_s=steps * step_s * slowness.lockstep_factor(case.workers) / options.points,
        slow=slowness.rules(case.workers),
        addresses=tuple(place.address for place in places),
        interface=places[0].interface,
        folder=folder,
    )


def _train(
    options: RaceOptions,
    settings: RaceSettings,
    test: TensorDataset,
    method: Method,
    case: Case,
    places: Sequence[Host],
    interpreter: Path | None,
) -> RaceCurve:
    variables = {
        **_QUIET,
        "GLOO_SOCKET_IFNAME": settings.interface,
        environment.SEED_VARIABLE: str(case.seed),
    }
    if method.strategy is not None:
        variables[environment.SLOW_VARIABLE] = ";".join(settings.slow)
    run_workers(
        "benchmarks.race_worker",
        msgspec.to_builtins(settings),
        case.workers,
        env=variables,
        prefix=[place.prefix for place in places],
        master_addr=places[0].address,
        interpreter=interpreter,
        timeout_s=_START_S + _LONGEST * options.points * settings.interval_s,
    )
    recordings = [read_recording(Path(settings.folder) / f"{rank}.pt") for rank in range(case.workers)]
    model = settings.build_model()

    def evaluate(flat: torch.Tensor) -> float:
        load_flat_model(model, flat)
        return accuracy(model, test)

    return RaceCurve(
        method=method,
        case=case,
        points=curve_points(recordings, settings.interval_s, evaluate),
        late_share=mean(one.late_share for one in recordings),
    )


def _labels(curve: RaceCurve) -> dict[str, Any]:
    case = curve.case
    return {
        "method": curve.method.name,
        "workers": case.workers,
        "slow": case.slow,
        "line_mbit": case.line,
        "seed": case.seed,
    }


def _summaries(curves: Sequence[RaceCurve], batch_size: int, step_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each training."""
    lockstep = {curve.case: curve for curve in curves if curve.method.strategy == LOCKSTEP}
    for curve in curves:
        found = compare(curve, lockstep[curve.case], batch_size, step_s)
        last = curve.points[-1]
        yield {
            **_labels(curve),
            "time_ratio": found.time_ratio,
            "below_percent": 100 * found.below,
            "paces_share": found.paces_share,
            "run_s": last.time_s,
            "run_samples": last.samples,
            "bytes_per_sample": last.bytes_sent / last.samples,
            "distance_mean": mean(point.distance for point in curve.points),
            "late_share": curve.late_share,
        }
