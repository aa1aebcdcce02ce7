"""Programs that leave batches out: training equals that of one process without these parts of the batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import offbeat
from offbeat.events import Ready
from offbeat.numerics.collectives.schedules import cut_segments
from offbeat.strategies import AllReduce, Hybrid
from support.parameters import flat
from support.processes import run, values
from support.run_logs import entries_of

WORKERS, BATCH, STEPS, EPOCHS = 2, 4, 5, 2
GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(WORKERS * BATCH * STEPS, 5, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(len(INPUTS), 2, generator=GENERATOR, dtype=torch.float64)
STRATEGIES = [AllReduce(), Hybrid()]


class OneByOne(Dataset):
    """Not a TensorDataset, so that it is loaded by a DataLoader."""

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, place):
        return INPUTS[place], TARGETS[place]


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def step(model, optimizer, scheduler):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()


def tools(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def trains(rank, emit, strategy, bad, has_workers):
    """Leaves out the batches `bad`, each given as (worker, epoch, step)."""
    model = a_model()
    optimizer, scheduler = tools(model)
    data, options = (OneByOne(), {"num_workers": 1}) if has_workers else (TensorDataset(INPUTS, TARGETS), {})
    steps = 0
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in session.epochs(EPOCHS):
            spoilt = {
                start for worker, at, step_ in bad if (worker, at) == (rank, epoch) for start in [step_]
            }
            for inputs, targets in session.batches(data, BATCH, shuffle=False, **options):
                place = int((inputs[0] == INPUTS).all(1).nonzero()) // (WORKERS * BATCH)
                loss = F.mse_loss(model(inputs), targets)
                if place in spoilt:
                    continue
                optimizer.zero_grad()
                loss.backward()
                step(model, optimizer, scheduler)
                steps += 1
            at_the_end = session.batch, session.state_dict()["batches_taken"]
    return flat(model).tolist(), session.step, at_the_end


def alone(bad):
    model = a_model()
    optimizer, scheduler = tools(model)
    for epoch in range(EPOCHS):
        for number in range(STEPS):
            start = number * WORKERS * BATCH
            parts = [
                (start + begin, start + end)
                for worker, (begin, end) in enumerate(cut_segments(WORKERS * BATCH, WORKERS))
                if (worker, epoch, number) not in bad
            ]
            if not parts:
                continue
            optimizer.zero_grad()
            rows = torch.cat([torch.arange(begin, end) for begin, end in parts])
            F.mse_loss(model(INPUTS[rows]), TARGETS[rows]).backward()
            step(model, optimizer, scheduler)
    return flat(model)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({(1, 0, 2)}, id="one in the midst"),
        pytest.param({(0, 0, 0), (1, 1, 0)}, id="the first ones"),
        pytest.param({(1, 0, 4), (0, 1, 3), (0, 1, 4)}, id="the last ones"),
        pytest.param({(0, 0, 1), (0, 0, 2), (1, 0, 2), (1, 1, 2)}, id="one that all leave out among them"),
    ],
)
def test_a_batch_left_out_by_one_worker_has_no_effect(strategy, bad):
    ended = values(run(trains, WORKERS, strategy, bad, False))
    for weights, _, _ in ended:
        torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), alone(bad))
    assert ended[0][0] == ended[1][0]
    assert ended[0][1:] == ended[1][1:]


def test_batches_of_a_data_loader_may_be_left_out():
    bad = {(1, 0, 2), (1, 0, 4)}
    for weights, _, _ in values(run(trains, WORKERS, AllReduce(), bad, True)):
        torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), alone(bad))


def steps_without_a_backward_pass(rank, emit, strategy, has_hook):
    """Worker 0 takes a step without a backward pass in the batch that worker 1 leaves out."""
    model = a_model()
    optimizer, _ = tools(model)
    if has_hook:
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with offbeat.join(model, optimizer, strategy) as session:
        batches = session.batches(TensorDataset(INPUTS, TARGETS), BATCH)
        for number, (inputs, targets) in enumerate(batches):
            if rank == 1 and number == 2:
                continue
            if rank == 1 or number != 2:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return flat(model).tolist(), session.step


@pytest.mark.parametrize("has_hook", [False, True], ids=["without a hook", "with a hook"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
def test_a_round_in_which_no_worker_has_weight_leaves_the_models_equal(strategy, has_hook):
    first, second = values(run(steps_without_a_backward_pass, WORKERS, strategy, has_hook))
    assert first == second


def uses_its_own_loader(rank, emit, bad):
    model = a_model()
    optimizer, _ = tools(model)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), BATCH)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for _ in session.epochs(EPOCHS):
            for number, (inputs, targets) in enumerate(loader):
                if rank == 1 and number == bad:
                    continue
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()


def test_a_batch_left_out_of_the_programs_own_loader_ends_the_job_in_the_next_epoch():
    for one in run(uses_its_own_loader, WORKERS, 2):
        assert one.error_type == "WorkerError"
        assert "worker 1 has gone on to epoch 1 while worker 0 is at epoch 0" in one.error


def test_a_left_out_batch_is_reported_with_0_samples(tmp_path):
    log = tmp_path / "log"
    values(
        run(trains, WORKERS, AllReduce(), {(1, 0, 2), (1, 0, 4)}, False, env={"OFFBEAT_RUN_LOG": str(log)})
    )
    samples = [one.samples for one in entries_of(log, Ready) if (one.worker, one.epoch) == (1, 0)]
    assert samples == [BATCH, BATCH, 0, BATCH, 0]


def accumulates(rank, emit, strategy):
    """Takes a step every two batches; worker 1 leaves the second batch out."""
    model = a_model()
    optimizer, _ = tools(model)
    with offbeat.join(model, optimizer, strategy) as session:
        for number, (inputs, targets) in enumerate(session.batches(TensorDataset(INPUTS, TARGETS), BATCH)):
            if rank == 1 and number == 1:
                continue
            F.mse_loss(model(inputs), targets).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
def test_leaving_out_the_last_batch_of_an_accumulated_step_is_rejected_with_a_clear_error(strategy):
    ended = run(accumulates, WORKERS, strategy)
    for one in ended:
        assert one.error_type == "WorkerError"
        assert "call backward and step equally often on every worker" in one.error
