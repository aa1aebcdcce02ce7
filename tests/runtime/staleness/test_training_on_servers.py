"""Promises of training on a parameter server with bounded staleness, with real workers and servers."""

import math
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.events import StepFinished, StepPermit
from offbeat.runtime.data.equal_shards import EqualShards, epoch_order
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies import ASP, DTSSP, SSP, AllReduce, Downpour, ServerBSP
from offbeat.wire.job_view import TIME_PARTS
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.group_training import compute
from support.jobs import MARK, gone, marked
from support.processes import run, values
from support.run_logs import step_times
from support.server_training import (
    BATCH,
    SAMPLES,
    WORKERS,
    Numbers,
    check_eager,
    check_versioned,
    count_steps,
    violations,
)

EQUAL = ServerBSP(shards="equal")

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.95), weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.01),
}


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x):
        return self.layers(x)


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def train(strategy, optimizer="momentum", *, rank=0, epochs=3, state=None, saves_at=None):
    """A user's training loop; returns the final parameters, and the state after `saves_at` steps."""
    model = Net(seed=rank)  # every worker has other parameters; all continue from the first worker's
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    saved = None
    with offbeat.join(model, optimizer, strategy) as session:
        if state is not None:
            session.load_state_dict(state)
        scheduler = halving(optimizer, session.step)
        for _ in session.epochs(epochs):
            for x, y in session.batches(data(), BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                if session.step == saves_at:
                    saved = session.state_dict() if rank == 0 else "elsewhere"
                    break
            if saved is not None:
                break
    return flat(model), saved


def halving(optimizer, step):
    """A scheduler that continues after `step` steps and halves the learning rate after every three."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 3), last_epoch=step - 1)


def alone(optimizer, epochs=3, samples=SAMPLES, state=None, joins=True):
    """The same in one process with torch alone; the batches of all workers at a clock are one batch.

    Without `joins`, each worker's gradient is a step, all computed with the same parameters.
    """
    model, dataset = Net(seed=0), data(samples)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if state is not None:
        model.load_state_dict(state["model"])
        TrainingState(model, [optimizer]).load_optimizer_states(state["optimizers"])
    skipped = 0 if state is None else state["step"]
    scheduler = halving(optimizer, skipped)
    for epoch in range(epochs):
        shards = EqualShards(
            samples=samples, workers=WORKERS, batch_size=BATCH, seed=0, epoch=epoch, shuffle=True
        )
        for batches in zip(*[shards.batches(worker) for worker in range(WORKERS)], strict=True):
            if skipped:
                skipped -= 1
                continue
            if joins:
                batches = [[index for batch in batches for index in batch]]
            gradients = [
                torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
                for x, y in (dataset[batch] for batch in batches)
            ]
            for of_one in gradients:
                for parameter, gradient in zip(model.parameters(), of_one, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            scheduler.step()
    return flat(model)


# Bulk-synchronous ---------------------------------------------------------------------------------------


def trajectories(rank, emit, strategy=EQUAL):
    return {name: train(strategy, name, rank=rank)[0] for name in OPTIMIZERS}


def test_training_equals_one_process_with_the_batches_joined():
    """With each optimizer that servers support, weight decay, a changing learning rate, uneven batches."""
    results = values(run(trajectories, WORKERS))
    assert results[1] == results[2] == results[0]
    for name, got in results[0].items():
        assert torch.allclose(torch.tensor(got), torch.tensor(alone(name)), rtol=0, atol=1e-10), name


@pytest.mark.long
def test_with_server_step_sequential_training_equals_one_process_in_worker_order():
    strategy = replace(EQUAL, server_step="sequential")
    results = values(run(trajectories, WORKERS, strategy, env={"OFFBEAT_SERVERS": "2"}))
    assert results[1] == results[2] == results[0]
    for name, got in results[0].items():
        expected = torch.tensor(alone(name, joins=False))
        assert torch.allclose(torch.tensor(got), expected, rtol=0, atol=1e-10), name
        assert not torch.allclose(torch.tensor(got), torch.tensor(alone(name)), rtol=0, atol=1e-3), name


def in_other_orders(rank, emit):
    found = []
    for strategy, slow in [(EQUAL, ""), (EQUAL, "0:20"), (EQUAL, "2:20"), (SSP(s=0, shards="equal"), "1:20")]:
        os.environ["OFFBEAT_SLOW"] = slow
        found.append(train(strategy, "adam", rank=rank)[0])
    return found


@pytest.mark.long
def test_the_order_of_arrival_changes_no_bit_and_ssp_with_s_0_equals_ps_bsp():
    for found in values(run(in_other_orders, WORKERS, env={"OFFBEAT_SERVERS": "2"})):
        assert found[1:] == found[:1] * 3


# Read my writes -----------------------------------------------------------------------------------------


def counts_steps(rank, emit, strategies, threads, **options):
    """The results of `count_steps`, by strategy and by thread."""
    world = threads * int(os.environ["WORLD_SIZE"])
    found = []
    for strategy in strategies:

        def work(thread, strategy=strategy):
            where = {"thread": thread, "threads": threads}
            return count_steps(strategy, world, rank * threads + thread, **where, **options)

        found.append(in_threads(threads, work))
    return found


def by_worker(ended, strategy):
    """The results of a job's workers under one strategy."""
    return [one for of_process in values(ended) for one in of_process[strategy]]


VERSIONED = (
    SSP(s=0, shards="equal"),
    SSP(s=3, shards="equal"),
    SSP(thread_cache="per_clock", shards="equal"),
)
EAGER = (SSP(s=2, apply="eager", shards="equal"), ASP(shards="equal"))


@pytest.mark.long
@pytest.mark.parametrize(("processes", "threads"), [(4, 1), (2, 2)])
def test_a_worker_reads_its_own_steps_once_and_the_others_steps_of_the_read_version(processes, threads):
    """Invariants (ii) and (iii) of SSP, in lockstep and otherwise."""
    ended = run(counts_steps, processes, VERSIONED + EAGER, threads, env={"OFFBEAT_SLOW": "1:4"})
    for number, strategy in enumerate(VERSIONED):
        check_versioned(by_worker(ended, number), strategy._bound())
    for number in range(len(VERSIONED), len(VERSIONED) + len(EAGER)):
        check_eager(by_worker(ended, number))


# Workers without steps ----------------------------------------------------------------------------------


def steps_for_some(rank, emit, strategies, steps):
    return [count_steps(strategy, WORKERS, rank, steps=steps[rank]) for strategy in strategies]


@pytest.mark.long
def test_a_worker_without_steps_ends_with_the_parameters_of_the_others():
    """The final state contains the last gradients of the others, also where workers do not wait."""
    strategies = [EQUAL, SSP(s=2, shards="equal"), ASP(shards="equal"), Downpour(n_push=4, n_fetch=3)]
    for idle in ({0: 9, 1: 6, 2: 0}, {0: 0, 1: 3, 2: 6}):
        ended = values(run(steps_for_some, WORKERS, strategies, idle, env={"OFFBEAT_SLOW": "1:5"}))
        for number, strategy in enumerate(strategies):
            last = [one[number][1] for one in ended]
            if strategy.ps_options().is_versioned:  # the mean over the workers of the clock
                assert last[1] == last[2] == last[0]
                assert sum(last[0]) == pytest.approx(max(idle.values()))
            else:
                assert last == [[float(idle[worker]) for worker in range(WORKERS)]] * WORKERS


# Run logs -----------------------------------------------------------------------------------------------


def recorded(rank, emit, jobs, folder):
    """Trains one job after the other, each with its own log; returns the samples used in each epoch."""
    found = []
    for number, (strategy, slow, threads) in enumerate(jobs):
        os.environ["OFFBEAT_SLOW"] = slow
        log = folder / f"{number}.jsonl"

        def work(thread, strategy=strategy, log=log, threads=threads):
            return use_samples(strategy, log, thread=thread, threads=threads)

        found.append(in_threads(threads, work))
    return found


def in_threads(threads, work):
    """Calls `work(thread)` in so many threads; raises the error of any of them."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(threads)))


def use_samples(strategy, log=None, epochs=3, samples=SAMPLES, **where):
    """Trains; returns the samples that this worker used, by epoch."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    used = {}
    with offbeat.join(model, optimizer, strategy, run_log=log, **where) as session:
        for epoch in session.epochs(epochs):
            for numbers, x in session.batches(Numbers(samples), BATCH):
                optimizer.zero_grad()
                compute(0.004)
                loss = model(x).square().mean()
                loss.backward()
                session.observe(loss)
                optimizer.step()
                used.setdefault(epoch, []).extend(numbers.tolist())
    return used


JOBS = [
    (SSP(s=2, shards="equal"), "", 1),
    (SSP(s=2, shards="equal"), "1:4", 1),
    (SSP(s=2), "1:4", 1),
    (DTSSP(shards="equal", s=1, s_min=0, s_max=4, limit=1.0), "2:3@burst=3/6", 1),
    (DTSSP(s=1, s_min=0, s_max=4, limit=1.0), "2:3@burst=3/6", 1),
    (ASP(shards="equal"), "0:4", 1),
    (ASP(), "0:4", 1),
    (SSP(s=2, shards="equal", thread_cache="per_clock"), "1:3", 2),
    (SSP(s=2, apply="eager"), "1:3", 2),
    (SSP(s=2, apply="eager", shards="equal"), "1:4", 1),
]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """The logs of these jobs, and the samples that each of their workers used."""
    folder = tmp_path_factory.mktemp("logs")
    used = values(run(recorded, WORKERS, JOBS, folder))
    logs = [read_log(folder / f"{number}.jsonl") for number in range(len(JOBS))]
    return logs, [[one for of_process in used for one in of_process[job]] for job in range(len(JOBS))]


@pytest.mark.long
def test_every_run_keeps_the_rules_and_is_replayed(recordings):
    logs, _ = recordings
    for log in logs:
        assert violations(log) == []
        assert replay(log) is None
    bounds = {one.staleness_bound for one in logs[3].entries if isinstance(one, StepPermit)}
    assert len(bounds) > 1, "the bound never changed"


# Warm start and slow workers -----------------------------------------------------------------------------

WARM_STEPS = 5
DETECTING = DTSSP(shards="equal", s=1, s_min=1, s_max=6, limit=math.inf, detector="on")


def with_special_rules(rank, emit, folder):
    for name, strategy, slow, samples in [
        ("warm", Downpour(warm_start=WARM_STEPS), "", SAMPLES),
        ("detecting", DETECTING, "1:10", 40 * WORKERS * BATCH),
    ]:
        os.environ["OFFBEAT_SLOW"] = slow
        use_samples(strategy, folder / f"{name}.jsonl", epochs=2, samples=samples)


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    folder = tmp_path_factory.mktemp("special")
    values(run(with_special_rules, WORKERS, folder))
    return {name: read_log(folder / f"{name}.jsonl") for name in ("warm", "detecting")}


@pytest.mark.long
def test_in_a_warm_start_the_first_worker_steps_alone_and_then_the_others_begin(special):
    log = special["warm"]
    steps = [one for one in log.entries if isinstance(one, StepFinished) and one.clock is not None]
    assert {one.worker for one in steps[:WARM_STEPS]} == {0}
    assert {one.worker for one in steps} == set(range(WORKERS))
    assert sum(one.samples for one in steps) == 2 * SAMPLES
    assert replay(log) is None


@pytest.mark.long
def test_a_worker_classified_as_slow_delays_the_others_only_beyond_s_max(special):
    log = special["detecting"]
    started = [one for one in log.entries if isinstance(one, StepPermit) and one.may_start]
    beyond = [one for one in started if "for a straggler" in one.reason]
    assert beyond, "worker 1 was never classed as slow"
    assert {one.worker for one in beyond} <= {0, 2}
    assert {one.staleness_bound for one in started} == {1, 6}
    steps = [one for one in log.entries if isinstance(one, StepFinished) and one.clock is not None]
    assert 1 < max(one.clock - one.parameter_version for one in steps) <= 6
    assert replay(log) is None


def edited(log, change):
    """A log in which the first entry for which `change` returns an entry is replaced by it."""
    entries = list(log.entries)
    for place, entry in enumerate(entries):
        if (other := change(entry)) is not None:
            entries[place] = other
            return replace(log, entries=entries)
    raise AssertionError("expected an entry to change")


@pytest.mark.long
def test_violations_of_the_staleness_rules_are_found(recordings):
    logs, _ = recordings

    def is_ahead(entry, clock=3):
        return isinstance(entry, StepPermit) and entry.may_start and entry.clock >= clock

    def is_step(entry, clock=3):
        return isinstance(entry, StepFinished) and entry.clock is not None and entry.clock >= clock

    for number, change, words in [
        (1, lambda one: replace(one, clock=one.clock + 3) if is_ahead(one) else None, "others are at"),
        (
            1,
            lambda one: replace(one, parameter_version=one.clock - 3) if is_step(one) else None,
            "3 clocks old",
        ),
        (1, lambda one: replace(one, clock=one.clock + 1) if is_step(one) else None, "without leave"),
        (
            3,
            lambda one: replace(one, staleness_bound=one.staleness_bound + 20) if is_ahead(one) else None,
            "after a bound",
        ),
        (5, lambda one: replace(one, may_start=False) if is_ahead(one) else None, "without a bound"),
    ]:
        assert any(words in one for one in violations(edited(logs[number], change))), words


@pytest.mark.long
def test_a_read_version_is_used_for_s_more_clocks(recordings):
    """Invariant (viii): after version v a worker pulls at clock v + s + 1, not before."""
    logs, _ = recordings
    for log in (logs[0], logs[1], logs[-1]):
        for worker in range(WORKERS):
            steps = [one for one in log.entries if isinstance(one, StepFinished) and one.worker == worker]
            timed = step_times(log.entries, worker)
            held = -1
            for clocked, times in zip(steps[1:], timed, strict=True):
                assert (times.pull_s > 0) == (clocked.clock == 0 or held < clocked.clock - 2)
                assert clocked.parameter_version == held or times.pull_s > 0
                held = clocked.parameter_version
    for log in (logs[1], logs[-1]):  # the last worker to reach clock 3 has read a newer version than required
        steps = [one for one in log.entries if isinstance(one, StepFinished) and one.clock == 3]
        assert any(one.parameter_version > 1 for one in steps)


@pytest.mark.long
def test_the_parts_of_every_step_sum_to_its_wall_time(recordings):
    logs, _ = recordings
    for (strategy, _, threads), log in zip(JOBS, logs, strict=True):
        steps = step_times(log.entries)
        assert steps
        for one in steps:
            parts = {part: getattr(one, f"{part}_s") for part in TIME_PARTS}
            assert min(parts.values()) >= 0
            assert math.isclose(sum(parts.values()), one.wall_s, abs_tol=1e-9)
            if isinstance(strategy, ASP):
                assert one.wait_s == 0
            if one.step:
                assert sum(parts[level] > 0 for level in ("pull", "process_cache", "thread_cache")) == 1
            if threads > 1 and one.step in (1, 2) and strategy.thread_cache == "per_clock":
                assert one.process_cache_s > 0  # the values pulled for clock 0 are used up to clock s


@pytest.mark.long
def test_every_sample_of_an_epoch_is_used_once_over_all_workers(recordings):
    for used in recordings[1]:
        for epoch in range(3):
            assert sorted(number for one in used for number in one.get(epoch, [])) == list(range(SAMPLES))


def breaks_off(rank, emit, strategies):
    """Leaves every epoch early, with a gradient that was not used in a step."""
    steps = []
    for strategy in strategies:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.join(model, optimizer, strategy) as session:
            for _ in session.epochs(3):
                for number, (_, x) in enumerate(session.batches(Numbers(SAMPLES), BATCH)):
                    model(x).square().mean().backward()
                    if number == 1 + rank:
                        break
                    optimizer.step()
                    optimizer.zero_grad()
            steps.append(session.step)
    return steps


@pytest.mark.long
def test_a_loop_may_leave_an_epoch_with_a_gradient_that_no_step_used():
    strategies = [SSP(s=1), ASP(), ServerBSP(shards="equal")]
    for steps in values(run(breaks_off, 2, strategies)):
        assert min(steps) > 0


# Accumulation, buffers, states --------------------------------------------------------------------------


def test_accumulated_gradients_are_pushed_once_per_step():
    """A step pushes accumulated gradients once."""
    ended = run(partial(counts_steps, every=3), 2, (SSP(s=1, shards="equal"), ASP(shards="equal")), 1)
    check_versioned(by_worker(ended, 0), 1, gradients=3)
    check_eager(by_worker(ended, 1), gradients=3)


class Buffered(nn.Module):
    """Its buffers differ between workers; records their values in each forward pass."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean += 1 + rank
        self.norm.num_batches_tracked += 10**12 + rank
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.seen = []

    def forward(self, x):
        self.seen.append(
            (self.norm.running_mean.tolist(), self.norm.num_batches_tracked.item(), self.flag.item())
        )
        return self.norm(x).sum()


def buffered(rank, emit):
    model = Buffered(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, SSP(shards="equal")):
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 3), float(rank + step))).backward()
            optimizer.step()
    return model.seen


def test_buffers_start_as_the_first_workers_and_then_change_on_each_worker():
    results = values(run(buffered, WORKERS))
    assert all(seen[0] == ([1.0] * 3, 10**12, True) for seen in results)
    assert len({tuple(seen[1][0]) for seen in results}) == WORKERS


SAVED_AT = 6  # in the middle of an epoch


def saves(rank, emit, folder):
    """Saves in the middle of training, resumes under several strategies, and trains without a break, too."""
    found = {}
    for name in ("momentum", "adam"):
        path = folder / f"{name}.pt"
        _, saved = train(EQUAL, name, rank=rank, saves_at=SAVED_AT)
        if rank == 0:
            torch.save(saved, path)
        whole, _ = train(EQUAL, name, rank=rank)
        resuming = [EQUAL, SSP(s=0, shards="equal"), AllReduce()]
        resumed = [train(one, name, rank=rank, state=torch.load(path))[0] for one in resuming]
        found[name] = whole, resumed
    return found


@pytest.mark.long
def test_a_saved_state_resumes_equally_with_the_same_another_and_no_strategy(tmp_path):
    for found in values(run(saves, WORKERS, tmp_path, env={"OFFBEAT_SLOW": "1:3"})):
        for name, (whole, (same, other, all_reduced)) in found.items():
            assert same == whole
            assert other == whole
            state = torch.load(tmp_path / f"{name}.pt")
            assert state["step"] == SAVED_AT
            for close in (all_reduced, alone(name, state=state)):
                assert torch.allclose(torch.tensor(close), torch.tensor(whole), rtol=0, atol=1e-10)


def saves_often(rank, emit):
    """The states that worker 0 saves hold all of its own steps, and later reads contain them, too."""
    return [count_steps(one, 2, rank, saves=rank == 0, steps=6) for one in SAVING]


SAVING = (SSP(s=2, shards="equal"), SSP(s=2, apply="eager", shards="equal"), ASP(shards="equal"))


@pytest.mark.long
def test_saving_while_others_train_loses_nothing():
    ended = values(run(saves_often, 2, env={"OFFBEAT_SLOW": "1:3"}))
    check_versioned([one[0] for one in ended], 2, steps=6)
    check_eager([one[1] for one in ended], steps=6)
    check_eager([one[2] for one in ended], steps=6)


class Uses(nn.Module):
    """A number for each sample that grows when a gradient of the sample is applied."""

    def __init__(self, samples):
        super().__init__()
        self.uses_N = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, numbers):
        return -self.uses_N[numbers].sum()


def saves_uses(rank, emit, strategies):
    """Worker 0 saves after every step; returns the samples listed as used and those applied in each state."""
    found = []
    for strategy in strategies:
        model = Uses(SAMPLES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.join(model, optimizer, strategy) as session:
            for _ in session.epochs(2):
                for (numbers,) in session.batches(TensorDataset(torch.arange(SAMPLES)), 1):
                    optimizer.zero_grad()
                    compute(0.002)
                    model(numbers).backward()
                    optimizer.step()
                    if rank == 0 and session.epoch == 0:
                        state = session.state_dict()
                        order = epoch_order(SAMPLES, seed=state["seed"], epoch=0, shuffle=True)
                        ranges = state["used"].get("0", [[0, SAMPLES]])
                        listed = {int(order[at]) for first, last in ranges for at in range(first, last)}
                        held = state["model"]["uses_N"].nonzero().flatten().tolist()
                        found.append((sorted(listed), held))
    return found


@pytest.mark.long
def test_a_saved_state_lists_as_used_exactly_the_samples_whose_gradients_it_holds():
    strategies = [ServerBSP(), SSP(s=2), SSP(s=2, server_step="sequential")]
    states, *_ = values(run(saves_uses, WORKERS, strategies, env={"OFFBEAT_SLOW": "0:3"}))
    assert len(states) > len(strategies)
    assert any(0 < len(held) < SAMPLES for _, held in states)
    for listed, held in states:
        assert listed == held


# Rejected input -----------------------------------------------------------------------------------------


@pytest.fixture
def mark(monkeypatch):
    """Marks the processes that this one starts; checks that none is left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    gone(mark)


@pytest.mark.parametrize(
    ("optimize", "words"),
    [
        (torch.optim.LBFGS, "LBFGS"),
        (torch.optim.RMSprop, "SGD, Adagrad, Adam, AdamW of torch.optim, without dampening.*got RMSprop"),
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.1), "SGD, Adagrad, .*dampening=0.1"),
        (partial(torch.optim.Adam, amsgrad=True), "SGD, Adagrad, .*amsgrad=True"),
    ],
)
def test_an_unsupported_optimizer_is_rejected_before_a_process_is_started(mark, optimize, words):
    model = nn.Linear(2, 2)
    with pytest.raises(OffbeatError, match=words):
        offbeat.join(model, optimize(model.parameters()), EQUAL)
    assert not marked(mark)


def test_parameters_of_half_precision_are_rejected(mark):
    model = nn.Linear(2, 2).half()
    with pytest.raises(OffbeatError, match="float16"):
        offbeat.join(model, torch.optim.SGD(model.parameters(), lr=1), EQUAL)
    assert not marked(mark)


def closure(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(lambda: 0.0)


def parts_only(model, optimizer):
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("misuse", "words"), [(closure, "without a closure"), (parts_only, r"call model\(\.\.\.\) itself")]
)
def test_an_unsupported_step_ends_the_job_with_one_clear_error(mark, misuse, words):
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(OffbeatError, match=words), offbeat.join(model, optimizer, EQUAL):
        misuse(model, optimizer)
    optimizer.zero_grad()
    optimizer.step()  # the session's hooks are removed
