"""`python -m benchmarks slow-line`: a job in which the line of one worker becomes slow.

In a group, its worker is left out; where groups of workers average their models, the others average less
often while one of them waits for the slow line, and the detector is to prevent that.

Each worker is on a host of its own (`benchmarks.namespaces`) and waits for the time of a step instead of
computing, so that two cores can stand for all hosts. What happened is read from the run log.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.commands import SlowLineOptions
from benchmarks.namespaces import Host, hosts, slow_down
from benchmarks.workers import print_progress, read_settings
from offbeat.cli.result import Result
from offbeat.errors import OffbeatError
from offbeat.events import Action, AverageModels, Event, Group, Ready
from offbeat.runtime.control import environment
from offbeat.runtime.launch import launch
from offbeat.runtime.launching.outcomes import outcome_summary
from offbeat.runtime.processes import child
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy
from offbeat.strategies.model_averaging import AveragesModels
from offbeat.wire.log_file import read_log

_FEATURES = 64
_BYTES_PER_UNIT = 4 * (_FEATURES + 2)  # of a hidden unit: weights of both layers, and a bias
_LIMIT_S = 600.0  # for the group to change
_POLL_S = 0.2
_SAMPLES = 100_000


def run(options: SlowLineOptions, *, command: str) -> Result:
    """Train on fast lines, then slow one down; measure until some time after its worker is left out.

    Raises:
        OffbeatError: the worker was not left out of a group in time, or a worker failed.
    """
    with tempfile.TemporaryDirectory() as name, hosts(options.workers) as places:
        log = Path(name) / "log.jsonl"
        with _training(options, places, log) as check:
            _wait_for(lambda: _steps_done(_entries(log)) >= options.steps, "steps on fast lines", check)
            slowed_s = time.monotonic()
            slow_down(places[options.slow], round(options.rate_mbit * 1e6))
            print_progress(f"worker {options.slow} has {options.rate_mbit:g} Mbit/s from now on")
            if isinstance(parse_strategy(options.strategy), AveragesModels):
                time.sleep(60 * options.minutes)
                return _averagings_result(options, command, _entries(log), slowed_s)
            _wait_for(lambda: _left_out_s(_entries(log), options.slow) is not None, "a smaller group", check)
            print_progress("it is left out")
            time.sleep(60 * options.minutes)
            entries = _entries(log)
    return _result(options, command, entries, slowed_s)


@contextmanager
def _training(options: SlowLineOptions, places: list[Host], log: Path) -> Iterator[Callable[[], None]]:
    """Run the workers; yield a function that raises an OffbeatError if one has ended."""
    settings = {
        "strategy": options.strategy,
        "step_ms": options.step_ms,
        "units": max(1, options.kilobytes * 1000 // _BYTES_PER_UNIT),
    }
    with launch(
        child.module_command("benchmarks.slow_line", json.dumps(settings)),
        options.workers,
        env={environment.RUN_LOG_VARIABLE: str(log), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        prefix=[place.prefix for place in places],
        master_addr=places[0].address,
        grace_s=None,
    ) as running:

        def check() -> None:
            if len(running.running_ranks()) < options.workers:
                running.close()
                raise OffbeatError(outcome_summary(running.wait()))

        yield check


def _entries(log: Path) -> list[Event | Action]:
    return list(read_log(log).entries) if log.exists() and log.stat().st_size else []


def _wait_for(condition: Callable[[], bool], what: str, check: Callable[[], None]) -> None:
    limit_s = time.monotonic() + _LIMIT_S
    while not condition():
        check()
        if time.monotonic() > limit_s:
            raise OffbeatError(f"there never were {what} within {_LIMIT_S:g} s")
        time.sleep(_POLL_S)


def _steps_done(entries: list[Event | Action]) -> int:
    return max((one.step for one in entries if isinstance(one, Ready)), default=0)


def _left_out_s(entries: list[Event | Action], slow: int) -> float | None:
    """Return when the group first had no worker behind the slow line, by the log's clock; None if never."""
    now_s = 0.0
    for one in entries:
        now_s = getattr(one, "now_s", now_s)
        if isinstance(one, Group) and slow not in one.members:
            return now_s
    return None


def _result(options: SlowLineOptions, command: str, entries: list[Event | Action], slowed_s: float) -> Result:
    watched = next(worker for worker in range(options.workers) if worker != options.slow)
    readies = [one for one in entries if isinstance(one, Ready) and one.worker == watched]
    left_out_s = _left_out_s(entries, options.slow)
    assert left_out_s is not None
    before = [b.now_s - a.now_s for a, b in pairwise(readies) if b.now_s < slowed_s]
    after = [one for one in readies if one.now_s > left_out_s]
    groups = [one for one in entries if isinstance(one, Group)]
    others = set(range(options.workers)) - {options.slow}
    pace_s = median(before[len(before) // 4 :])
    after_s = (after[-1].now_s - after[0].now_s) / (after[-1].step - after[0].step)
    slow_s = [b.now_s - a.now_s for a, b in pairwise(readies) if slowed_s < a.now_s and b.now_s < left_out_s]
    return Result(
        name="slow_line",
        command=command,
        kind="timed",
        seed=0,
        figures={
            "steps_until_left_out": sum(slowed_s < one.now_s <= left_out_s for one in readies),
            "step_s_before": pace_s,
            "step_s_slow": mean(slow_s),
            "step_s_after": after_s,
            "after_to_before_ratio": after_s / pace_s,
            "others_left_out_count": sum(not others <= {*group.members} for group in groups),
            "tried_again_count": sum(options.slow in group.joining for group in groups),
        },
    )


def _averagings_result(
    options: SlowLineOptions, command: str, entries: list[Event | Action], slowed_s: float
) -> Result:
    """Compare how often the other workers average, before and in the last half of the time afterwards."""
    joint: dict[int, list[float]] = {worker: [] for worker in range(options.workers)}
    readies: dict[int, list[float]] = {worker: [] for worker in range(options.workers)}
    mistaken: set[int] = set()
    now_s = 0.0
    for one in entries:
        now_s = getattr(one, "now_s", now_s)
        if isinstance(one, Ready):
            readies[one.worker].append(now_s)
        elif isinstance(one, AverageModels) and len(one.members) > 1:
            for worker in one.members:
                joint[worker].append(now_s)
            mistaken |= {
                worker
                for worker in range(options.workers)
                if worker != options.slow and f"worker {worker}: its line is slow" in one.reason
            }
    others = [worker for worker in range(options.workers) if worker != options.slow]
    before = (min(map(min, readies.values())), slowed_s)
    after = ((slowed_s + now_s) / 2, now_s)

    def each_second(times_s: dict[int, list[float]], workers: list[int], span: tuple[float, float]) -> float:
        inside = [one for worker in workers for one in times_s[worker] if span[0] < one < span[1]]
        return len(inside) / len(workers) / (span[1] - span[0])

    return Result(
        name="slow_line",
        command=command,
        kind="timed",
        seed=0,
        figures={
            "averagings_before_per_s": each_second(joint, others, before),
            "averagings_after_per_s": each_second(joint, others, after),
            "averagings_after_to_before_ratio": each_second(joint, others, after)
            / each_second(joint, others, before),
            "averagings_of_slow_after_per_s": each_second(joint, [options.slow], after),
            "steps_after_to_before_ratio": each_second(readies, others, after)
            / each_second(readies, others, before),
            "others_classed_count": len(mistaken),
        },
    )


def main() -> None:
    """Train until this process is ended."""
    settings = read_settings(sys.argv)
    torch.manual_seed(0)
    units = settings["units"]
    model = nn.Sequential(nn.Linear(_FEATURES, units), nn.Tanh(), nn.Linear(units, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(_SAMPLES, _FEATURES))
    with join(model, optimizer, parse_strategy(settings["strategy"])) as session:
        for _ in session.epochs(10**6):
            for (x,) in session.batches(data, 4):
                optimizer.zero_grad()
                outputs = model(x)
                time.sleep(settings["step_ms"] / 1000)
                outputs.square().mean().backward()
                optimizer.step()


if __name__ == "__main__":
    main()
