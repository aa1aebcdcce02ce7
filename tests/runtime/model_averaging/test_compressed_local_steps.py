"""Local steps with compressed pseudo-gradients in real jobs: models, checkpoints, a worker that is killed."""

import io
import os
import re
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.events import AssignBlocks, AverageModels, CancelAveraging, ModelsAveraged, SamplesRequested
from offbeat.numerics.compressors.topk import TopKCompressor
from offbeat.strategies import DiLoCo, LocalSGD, parse_strategy
from support.equal_batches import batches_in_step
from support.jobs import job
from support.processes import run, values
from support.run_logs import entries_of, wait_until

SAMPLES, BATCH, EPOCHS, WORKERS = 90, 5, 3, 2
IN_STEP = {"by_pace": False, "shards": "equal", "quorum": WORKERS, "global_every": None}
RATIO, DECAY = 0.2, 0.95


def data():
    chance = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.arange(SAMPLES),
        torch.randn(SAMPLES, 6, generator=chance, dtype=torch.float64),
        torch.randint(3, (SAMPLES,), generator=chance),
    )


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def train(rank, emit, strategy, save_at=None, saved=None):
    """The final parameters, the samples of all steps, and the session's two states after so many steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    used, states = [], None
    with offbeat.join(model, optimizer, strategy) as session:
        if saved is not None:
            whole, *own = (torch.load(io.BytesIO(one), weights_only=True) for one in saved)
            session.load_state_dict(whole)
            session.load_local_state_dict(own[rank])
        for _ in session.epochs(EPOCHS):
            for numbers, inputs, labels in session.batches(data(), BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                used.append(numbers.tolist())
                if len(used) == save_at:
                    states = [file_of(one) for one in (session.state_dict(), session.local_state_dict())]
    return [parameter.tolist() for parameter in model.parameters()], used, states


def file_of(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def in_one_process(every, delay):
    """The mean of the models under SparseLoCo; what is learnt while a snapshot is summed is kept."""
    models = [network() for _ in range(WORKERS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    vector = nn.utils.parameters_to_vector
    anchor = vector(models[0].parameters()).detach().clone()
    residuals, steps, snapshots = [torch.zeros_like(anchor)] * WORKERS, 0, []
    _, inputs, labels = data().tensors
    for epoch in range(EPOCHS):
        for batches in batches_in_step(SAMPLES, WORKERS, BATCH, epoch):
            for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
            steps += 1
            flats = [vector(model.parameters()).detach().clone() for model in models]
            if (steps + delay) % every == 0:
                snapshots = flats
            if steps % every:
                continue
            sums = [DECAY * own + anchor - one for own, one in zip(residuals, snapshots, strict=True)]
            sent = [chosen(one, models[0]) for one in sums]
            residuals = [one - part for one, part in zip(sums, sent, strict=True)]
            anchor = anchor - sum(sent) / WORKERS
            for model, flat, snapshot in zip(models, flats, snapshots, strict=True):
                nn.utils.vector_to_parameters(flat + anchor - snapshot, model.parameters())
    flat = sum(vector(model.parameters()).detach() for model in models) / WORKERS
    nn.utils.vector_to_parameters(flat, models[0].parameters())
    return [parameter.detach() for parameter in models[0].parameters()]


def chosen(values, model):
    """The largest values of each matrix, and all of each bias."""
    kept, start = torch.zeros_like(values), 0
    for parameter in model.parameters():
        count = parameter.numel() if parameter.dim() == 1 else -int(-RATIO * parameter.numel() // 1)
        largest = start + values[start : start + parameter.numel()].abs().topk(count).indices
        kept[largest] = values[largest]
        start += parameter.numel()
    return kept


@pytest.mark.parametrize(("every", "delay"), [(4, None), (6, 2)])
def test_the_steps_are_those_of_sparseloco_in_one_process(every, delay):
    """With a delay they are so while workers train on, though one of them is slow."""
    strategy = DiLoCo(
        every=every, compress=f"topk:{RATIO}", delay=delay, overlap=delay is not None, **IN_STEP
    )
    env = {} if delay is None else {"OFFBEAT_SLOW": "1:4"}
    results = values(run(train, WORKERS, strategy, env=env))
    assert results[0][0] == results[1][0]
    for mine, expected in zip(results[0][0], in_one_process(every, delay or 0), strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compress", [f"topk:{RATIO}", "powersgd:1", "randomk:0.2"])
def test_a_training_that_resumes_with_each_workers_state_equals_one_without_interruption(compress):
    """States of compressors are the same on all workers, residuals each worker's own."""
    strategy = DiLoCo(every=4, compress=compress, overlap=False, **IN_STEP)
    whole = values(run(train, WORKERS, strategy, 8))
    saved = [whole[0][2][0], *(states[1] for *_, states in whole)]
    assert torch.load(io.BytesIO(saved[1]), weights_only=True)["synchronizer"]
    resumed = values(run(train, WORKERS, strategy, None, saved))
    assert [one[0] for one in resumed] == [one[0] for one in whole]


@pytest.mark.parametrize(
    "strategy",
    [
        DiLoCo(every=4, compress="topk:0.1"),
        DiLoCo(every=6, compress="topk:0.1", fragments=2, overlap=False),
        DiLoCo(every=4, compress="powersgd:1"),
        DiLoCo(every=4, compress="chunks:0.1"),
        DiLoCo(every=6, compress="bf16", mixing=0.25),
        DiLoCo(every=4, compress="topk:0.1", delay=2),
    ],
    ids=lambda one: f"{one.compress} {one.delay}",
)
def test_workers_by_pace_use_each_sample_once_and_end_with_one_model(strategy):
    results = values(run(train, 4, strategy, env={"OFFBEAT_SLOW": "1:6"}))
    assert all(model == results[0][0] for model, *_ in results)
    used = sorted(number for _, steps, _ in results for batch in steps for number in batch)
    assert used == sorted([*range(SAMPLES)] * EPOCHS)


def dies_between_two_requests(rank, emit, strategy):
    """The last worker ends itself when it has the others' numbers, before the sum of the biases."""
    if rank == 3:
        summed = TopKCompressor.sum

        def sum_and_die(*arguments, **options):
            requests = summed(*arguments, **options)
            answer = yield next(requests)
            os.kill(os.getpid(), signal.SIGKILL)
            return answer

        TopKCompressor.sum = sum_and_die
    return train(rank, emit, strategy)


@pytest.mark.parametrize("delay", [None, 2])
def test_a_worker_that_is_killed_in_a_round_does_not_stop_the_others(tmp_path, delay):
    """With a delay workers train on during a round, and all take part in each."""
    log = tmp_path / "log"
    options = {**IN_STEP, "quorum": 4, "delay": delay, "overlap": delay is not None}
    strategy = DiLoCo(every=3, compress="topk:0.1", **options)
    with job(dies_between_two_requests, 4, strategy, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        results = values([one for one in running.ends() if one.rank != 3])
    assert all(model == results[0][0] for model, *_ in results)
    cancelled = {one.exchange_id for one in entries_of(log, CancelAveraging)}
    rounds = [one for one in entries_of(log, AverageModels) if one.outer_step is not None]
    assert any(one.exchange_id in cancelled and len(one.group) == 4 for one in rounds)
    assert any(one.exchange_id > max(cancelled) and len(one.group) == 3 for one in rounds)


def steps_by_gates(rank, emit, strategy, log):
    """Worker 1 is ready and has no samples, worker 0 waits for the round, worker 2 holds the last block."""

    def count(worker, kind):
        return sum(one.worker == worker for one in entries_of(log, kind))

    def blocks_of(worker):
        return sum(len(one.blocks) for one in entries_of(log, AssignBlocks) if one.worker == worker)

    gates = {
        (2, 0): lambda: any(one.worker == 0 and one.exchange_id in rounds_of(log) for one in ends_of(log)),
        (1, 0): lambda: blocks_of(0) == 2,
        (0, 0): lambda: blocks_of(1) == blocks_of(2) == 1,
        (0, 1): lambda: count(1, SamplesRequested) == 2,
    }
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    samples = TensorDataset(*(one[: 4 * BATCH] for one in data().tensors))
    steps = 0
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(1):
            for _, inputs, labels in session.batches(samples, BATCH):
                if (rank, steps) in gates:
                    wait_until(gates[rank, steps], f"what step {steps} of worker {rank} waits for")
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                steps += 1
    return [parameter.tolist() for parameter in model.parameters()], steps


def rounds_of(log):
    """The exchange ids of the rounds."""
    return [one.exchange_id for one in entries_of(log, AverageModels) if one.outer_step is not None]


def ends_of(log):
    return entries_of(log, ModelsAveraged)


def test_a_worker_that_waits_for_samples_takes_part_in_the_round_that_others_wait_for(tmp_path):
    log = tmp_path / "log"
    options = {**IN_STEP, "shards": "dynamic", "grace": 0.0, "timeout_s": 30.0}
    strategy = DiLoCo(every=2, compress="topk:0.2", delay=1, **options)
    results = values(run(steps_by_gates, 3, strategy, log, env={"OFFBEAT_RUN_LOG": str(log)}))
    assert all(model == results[0][0] for model, _ in results)
    assert [steps for _, steps in results] == [2, 1, 1]
    first = rounds_of(log)[0]
    assert {one.worker for one in ends_of(log) if one.exchange_id == first and one.has_mean} == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "topk:2"}, "expected a ratio of more than 0 and at most 1, got 2.0"),
        ({"compress": "gzip"}, "expected compress to be"),
        ({"compress": "dgc:0.1"}, "expected compress without momentum correction, got 'dgc:0.1'"),
        ({"compress": "topk:0.1", "mixing": 0.5}, "expected mixing 0 with compress=topk:0.1, got 0.5"),
        ({"residual_decay": 1.5}, "expected residual_decay from 0 to 1, got 1.5"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DiLoCo(**options)


def test_with_a_residual_the_outer_optimizer_takes_the_mean_and_has_no_momentum_by_default():
    found = [
        parse_strategy(text).worker_arguments()["outer_optimizer"]
        for text in ("diloco", "diloco:compress=bf16", "diloco:compress=topk:0.01")
    ]
    assert [(one.rate, one.momentum) for one in found] == [(0.7, 0.9), (0.7, 0.9), (1.0, 0.0)]


def test_local_sgd_has_no_common_model_whose_differences_could_be_compressed():
    with pytest.raises(TypeError, match="compress"):
        LocalSGD(compress="topk:0.1")
