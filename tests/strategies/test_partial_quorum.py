"""Promises of a quorum, with real workers: the late ones hold the same bits, and each sample is used once."""

from __future__ import annotations

import collections
import itertools
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.events import Group, Ready, SkipRound
from offbeat.strategies import PartialAllReduce
from offbeat.strategies.registry import parse_strategy
from support.group_training import BATCH, SAMPLES, agree, compute, digest, make, train
from support.jobs import job
from support.processes import run, values
from support.run_logs import entries_of, wait_until

WORLD, COUNTED = 4, 400
QUORUM = PartialAllReduce(quorum="n-1", limit=10**6)  # no worker is excluded as slow
SLOW_STEPS = "10@burst=1/5"  # every fifth step takes ten times as long


def plain(rank, emit, before_step=None, epochs=4):
    """A loop whose steps are the optimizer's, with the means of one round: no clipping."""
    model, optimizer = make(rank)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    states = set()
    with offbeat.join(model, optimizer, QUORUM) as session:
        for _ in session.epochs(epochs):
            for x, y in session.batches(dataset, BATCH):
                if before_step is not None:
                    before_step(session)
                    states.add(state_of(model, optimizer))
                optimizer.zero_grad()
                compute(0.01)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                states.add(state_of(model, optimizer))
    return states, digest(model, optimizer)


def state_of(model, optimizer):
    """The steps in the state, and its bits.

    `session.step` may be ahead of the steps, as a round may be skipped at any time.
    """
    steps = max((int(row["step"]) for row in optimizer.state.values()), default=0)
    return steps, digest(model, optimizer)


def agree_on_states(results):
    """Checks that no worker was alone in a state, and that all are in the same one in the end.

    The loops of all workers but one contribute to a round, and are in its state then. There may be several
    with the same steps: a round in which no member has weight changes buffers alone.
    """
    times = collections.Counter(state for states, _ in results for state in states)
    assert [state for state, workers in times.items() if workers == 1] == []
    assert len({final for _, final in results}) == 1


def rounds_of(log, worker):
    return [ready.round for ready in entries_of(log, Ready) if ready.worker == worker]


@pytest.mark.parametrize("late", [0, 2])
def test_a_worker_that_is_late_now_and_then_holds_the_same_bits_as_the_others(late, tmp_path):
    """Worker 0's buffers and learning rate are those of all members, in rounds that it skips, too."""
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": f"{late}:{SLOW_STEPS}", "OFFBEAT_RUN_LOG": str(log)}
    results = values(run(plain, WORLD, env=env))
    agree_on_states(results)
    assert any(skip.worker == late for skip in entries_of(log, SkipRound))
    rounds = rounds_of(log, late)
    assert any(after - before > 1 for before, after in itertools.pairwise(rounds))
    assert len(results[late][0]) < max(len(states) for states, _ in results)
    assert all(group.members == tuple(range(WORLD)) for group in entries_of(log, Group)[:1])


def dies(rank, emit, victim):
    def before_step(session):
        if rank == victim and session.step >= 9:  # a worker that has skipped rounds skips numbers of steps
            os.kill(os.getpid(), signal.SIGKILL)

    return plain(rank, emit, before_step)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_continue_when_a_worker_is_killed_while_rounds_are_skipped(victim):
    """Worker 1 is late most of the time."""
    with job(dies, WORLD, victim, env={"OFFBEAT_SLOW": "1:8"}) as running:
        ended = running.ends()
    assert [one.rank for one in ended if one.exitcode == -signal.SIGKILL] == [victim]
    agree_on_states(values([one for one in ended if one.rank != victim]))


def reads_its_state(rank, emit):
    """Worker 2 does something else before every other pass, and then looks at its model."""
    places = itertools.count()

    def before_step(session):
        if rank == 2 and next(places) % 2:
            compute(0.1)
            session.refresh()

    return plain(rank, emit, before_step)


def test_a_worker_that_reads_its_state_after_rounds_that_it_has_skipped_has_that_of_its_step(tmp_path):
    log = tmp_path / "log.jsonl"
    results = values(run(reads_its_state, WORLD, env={"OFFBEAT_RUN_LOG": str(log)}))
    agree_on_states(results)
    rounds = rounds_of(log, 2)
    assert any(after - before > 1 for before, after in itertools.pairwise(rounds))


def steps_with_old_means(rank, emit, folder):
    """Worker 2 skips the last rounds, and then all take a step without a backward pass.

    Without worker 2 the quorum needs all the others, so that none of them skips a round then.
    """
    log, is_away, last = folder / "log.jsonl", folder / "is_away", folder / "last"
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    own_steps = itertools.count()
    with offbeat.join(model, optimizer, QUORUM) as session:

        def has_ended(worker):
            """Whether a worker's last step has ended, or it skipped the round and waits in the next one."""
            skipped_to = int(last.read_text()) + 1
            return (folder / f"ended-{worker}").exists() or skipped_to in rounds_of(log, worker)

        def is_over():
            if rank == 2:
                return next(own_steps) == 4
            if rank == 0 and is_away.exists() and not last.exists():
                write(last, str(max(session.step, int(is_away.read_text())) + 3))
            return last.exists() and session.step >= int(last.read_text())

        while not is_over():
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        if rank == 2:
            write(is_away, str(session.step))
            wait_until(last.exists, "that the last round is known")
            wait_until(lambda: session.step >= int(last.read_text()), "that worker 2 has skipped it")
        else:
            wait_until(lambda: int(last.read_text()) in rounds_of(log, 2), "that worker 2 has come back")
        optimizer.step()
        write(folder / f"ended-{rank}", "")
        for worker in range(WORLD):
            wait_until(lambda: has_ended(worker), f"the end of worker {worker}'s last step")  # noqa: B023
        session.refresh()
        return {*model.weight.flatten().tolist()}, int(last.read_text())


def write(path, text):
    """Write a file that is there as a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def rounds_skipped(log, worker):
    return [skip.round for skip in entries_of(log, SkipRound) if skip.worker == worker]


def test_a_step_without_a_backward_pass_applies_no_mean_that_a_worker_has_missed(tmp_path):
    """The others hold the means of the last round then, and the late worker those of an earlier one."""
    log = tmp_path / "log.jsonl"
    for weights, rounds in values(
        run(steps_with_old_means, WORLD, tmp_path, env={"OFFBEAT_RUN_LOG": str(log)})
    ):
        assert weights == {-rounds}
        assert rounds - 1 in rounds_skipped(log, 2)


class Counter(nn.Module):
    """Adam without memory subtracts 1 from the count of each sample in a round."""

    def __init__(self):
        super().__init__()
        self.uses_N = nn.Parameter(torch.zeros(COUNTED, dtype=torch.float64))

    def forward(self, numbers):
        return self.uses_N[numbers].mean()


def count(rank, emit):
    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1e-30)
    with offbeat.join(model, optimizer, QUORUM) as session:
        for _ in session.epochs(1):
            for (numbers,) in session.batches(TensorDataset(torch.arange(COUNTED)), BATCH):
                optimizer.zero_grad()
                compute(0.01)
                model(numbers).backward()
                optimizer.step()
    return [round(-uses, 9) for uses in model.uses_N.tolist()]


def test_each_sample_is_used_once_though_a_worker_is_late_now_and_then(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": f"1:{SLOW_STEPS}", "OFFBEAT_RUN_LOG": str(log)}
    assert values(run(count, WORLD, env=env)) == [[1.0] * COUNTED] * WORLD
    rounds = rounds_of(log, 1)
    assert any(after - before > 1 for before, after in itertools.pairwise(rounds))


def test_a_quorum_waits_for_late_workers_whose_program_clips_gradients(tmp_path):
    """The means alone do not say what a step is then; all replicas stay equal."""
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": f"1:{SLOW_STEPS}", "OFFBEAT_RUN_LOG": str(log)}
    agree(values(run(train, 3, QUORUM, 2, env=env)))
    assert entries_of(log, SkipRound)
    rounds = rounds_of(log, 1)
    assert rounds == list(range(len(rounds)))


def test_the_quorum_is_read_from_the_command_line():
    strategy = parse_strategy("partial:quorum=n-2,grace=0.25")
    assert (strategy.quorum, strategy.grace) == ("n-2", 0.25)
    (arguments,) = [spec.arguments for spec in strategy.policies(8, 10.0, 0) if "quorum" in spec.arguments]
    assert arguments["quorum"] == {"size": "n-2", "grace_s": 0.25, "staleness_steps_max": 8}
    (arguments,) = [spec.arguments for spec in parse_strategy("partial:quorum=6").policies(8, 10.0, 0)[1:]]
    assert str(arguments["quorum"]["size"]) == "6"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quorum": "most"}, "expected a quorum such as 6"),
        ({"quorum": 0}, "at least 1 worker, got 0"),
        ({"quorum": "n-1", "shards": "equal"}, "a quorum needs shards=dynamic"),
        ({"grace": 0.1}, "grace is for a quorum"),
        ({"quorum": "n-1", "grace": -1.0}, "a grace of at least 0 s"),
        ({"quorum": "n-1", "staleness": 1}, "at least 2 steps, got 1"),
    ],
)
def test_a_quorum_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PartialAllReduce(**arguments)


def with_two_optimizers(rank, emit):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    with offbeat.join(model, optimizers, QUORUM):
        pass


def test_a_quorum_with_two_optimizers_is_refused():
    for ended in run(with_two_optimizers, 2):
        assert "expected one optimizer with a quorum, got 2" in (ended.error or "")
