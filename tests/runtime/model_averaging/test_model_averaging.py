"""Averaging of models with real workers: the averaged tensors, one final model, and loss of a worker."""

import io
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.events import AverageModels, Joined, Lost
from offbeat.runtime.collectives.interface import TensorMemory
from offbeat.runtime.devices.host import Host
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.strategies import ADPSGD, DiLoCo, LocalSGD, Prague, PReduce, parse_strategy
from support.equal_batches import batches_in_step
from support.jobs import job
from support.processes import run, values
from support.run_logs import entries_of, wait_until

SAMPLES, BATCH = 90, 5


def data():
    chance = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.arange(SAMPLES),
        torch.randn(SAMPLES, 6, generator=chance),
        torch.randint(3, (SAMPLES,), generator=chance),
    )


def network(rank, *, normalizes):
    torch.manual_seed(rank)  # each worker has other parameters before join
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8)] if normalizes else [nn.Linear(6, 8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3))


def train(rank, emit, strategy, epochs=2, normalizes=True, momentum=0.9, state=None, before_step=None):
    """Returns the final state, the numbers of the samples in each step, and a saved session state."""
    model = network(rank, normalizes=normalizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    samples, saved = [], None
    with offbeat.join(model, optimizer, strategy) as session:
        if state is not None:
            session.load_state_dict(torch.load(io.BytesIO(state)))
        for _ in session.epochs(epochs):
            for numbers, inputs, labels in session.batches(data(), BATCH):
                if before_step is not None:
                    before_step(len(samples))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                samples.append(numbers.tolist())
                if before_step is None and state is None and session.is_leader and len(samples) == 4:
                    saved = io.BytesIO()
                    torch.save(session.state_dict(), saved)
    return (
        {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        samples,
        saved and saved.getvalue(),
    )


def equal_models(results):
    states = [state for state, *_ in results]
    assert all(state == states[0] for state in states)
    return states[0]


def test_with_all_workers_in_a_group_training_equals_one_process_with_all_batches():
    strategy = PReduce(P=3, shards="equal", overlap=False)
    (state, *_), *_ = results = values(run(train, 3, strategy, 2, False, 0.0))
    equal_models(results)
    alone = network(0, normalizes=False)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    _, inputs, labels = data().tensors
    for epoch in range(2):
        for batches in batches_in_step(SAMPLES, 3, BATCH, epoch):
            optimizer.zero_grad()
            for batch in batches:
                loss = nn.functional.cross_entropy(alone(inputs[batch]), labels[batch])
                (loss / 3).backward()
            optimizer.step()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(torch.tensor(state[name]), tensor, rtol=1e-4, atol=1e-6)


def train_in_double_precision(rank, emit, strategy):
    model = network(0, normalizes=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(3):
            for _, inputs, labels in session.batches(data(), BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs.double()), labels).backward()
                optimizer.step()
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def diloco_in_one_process(workers, every, fragments, delay):
    """DiLoCo, with torch's Nesterov momentum; returns the mean of the models.

    With a delay, what a worker learns while its snapshot is averaged is kept.
    """
    models = [network(0, normalizes=False).double() for _ in range(workers)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    vector = nn.utils.parameters_to_vector
    length = len(vector(models[0].parameters()))
    parts = [slice(length * one // fragments, length * (one + 1) // fragments) for one in range(fragments)]
    anchors = [nn.Parameter(vector(models[0].parameters()).detach()[part].clone()) for part in parts]
    outer = [torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True) for anchor in anchors]
    _, inputs, labels = data().tensors
    steps, snapshots = 0, []
    for epoch in range(3):
        for batches in batches_in_step(SAMPLES, workers, BATCH, epoch):
            for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[batch].double()), labels[batch]).backward()
                optimizer.step()
            steps += 1
            flats = [vector(model.parameters()).detach() for model in models]
            if (steps + delay) % (every // fragments) == 0:
                snapshots = [flat.clone() for flat in flats]
            if steps % (every // fragments):
                continue
            number = (steps // (every // fragments) - 1) % fragments
            anchor, part = anchors[number], parts[number]
            anchor.grad = anchor.detach() - sum(snapshot[part] for snapshot in snapshots) / workers
            outer[number].step()
            for model, flat, snapshot in zip(models, flats, snapshots, strict=True):
                flat[part] += anchor.detach() - snapshot[part]
                nn.utils.vector_to_parameters(flat, model.parameters())
    flat = sum(vector(model.parameters()).detach() for model in models) / workers
    nn.utils.vector_to_parameters(flat, models[0].parameters())
    return models[0].state_dict()


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("every", "delay"), [(4, None), (6, 2)])
def test_local_steps_with_an_outer_optimizer_equal_those_in_one_process(fragments, every, delay):
    """With a delay they do so while workers train on, though one of them is slow."""
    strategy = DiLoCo(
        every=every,
        fragments=fragments,
        delay=delay,
        by_pace=False,
        overlap=delay is not None,
        shards="equal",
        quorum=2,
        global_every=None,
    )
    env = {} if delay is None else {"OFFBEAT_SLOW": "1:4"}
    results = values(run(train_in_double_precision, 2, strategy, env=env))
    assert results[0] == results[1]
    for name, tensor in diloco_in_one_process(2, every, fragments, delay or 0).items():
        torch.testing.assert_close(
            torch.tensor(results[0][name], dtype=torch.float64), tensor, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    "strategy",
    [
        PReduce(P=2),
        PReduce(P=2, overlap=False),
        PReduce(weights="dynamic", apply="own_share"),
        PReduce(weights="dynamic", apply="own_share", overlap=False),
        ADPSGD(),
        ADPSGD(topology="complete", overlap=False),
        Prague(size=2),
        Prague(overlap=False),
        LocalSGD(every=4),
        LocalSGD(every=4, overlap=False, by_pace=False, global_every=None),
        DiLoCo(every=4),
        DiLoCo(every=4, fragments=2, mixing=0.25, overlap=False),
    ],
)
def test_workers_in_changing_groups_use_each_sample_once_and_end_with_one_model(strategy):
    results = values(run(train, 4, strategy, env={"OFFBEAT_SLOW": "1:6"}))
    final = equal_models(results)
    assert final["1.num_batches_tracked"] > 0
    used = sorted(number for _, samples, _ in results for batch in samples for number in batch)
    assert used == sorted([*range(SAMPLES)] * 2)


def train_epochs(rank, emit, strategy, leaves_early):
    """The states at the ends of epochs; a worker may leave the first epoch early."""
    model = network(rank, normalizes=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    states = []
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in session.epochs(3):
            for _, inputs, labels in session.batches(data(), BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if epoch == 0 and rank == leaves_early:
                    break
            states.append({name: tensor.tolist() for name, tensor in model.state_dict().items()})
    return states


@pytest.mark.parametrize(
    "strategy",
    [
        PReduce(P=2),
        ADPSGD(overlap=False),
        Prague(shards="equal"),
        LocalSGD(every=3),
        LocalSGD(every=100, overlap=False),
    ],
)
def test_after_an_epoch_all_models_and_their_buffers_are_equal(strategy):
    results = values(run(train_epochs, 3, strategy, None))
    for states in zip(*results, strict=True):
        assert states[0] == states[1] == states[2]
    assert results[0][0] != results[0][1] != results[0][2]


def test_between_the_ends_of_epochs_models_differ_where_only_the_last_averaging_is_of_all():
    results = values(run(train_epochs, 3, LocalSGD(every=100, global_every=None), None))
    for first, second, third in zip(*results, strict=True):
        assert first != second != third


@pytest.mark.parametrize("shards", ["dynamic", "equal"])
def test_a_worker_that_leaves_an_epoch_early_keeps_nobody_waiting(shards):
    results = values(run(train_epochs, 3, PReduce(P=2, shards=shards), 1))
    assert [len(states) for states in results] == [3, 3, 3]
    for states in [*zip(*results, strict=True)][1:]:
        assert states[0] == states[1] == states[2]


def train_with_fixed_gradients(rank, emit, strategy):
    """The final weights, where no gradient depends on them: that of a sample is the sample."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(4):
            for (samples,) in session.batches(TensorDataset(fixed_samples()), BATCH):
                optimizer.zero_grad()
                model(samples).sum().backward()
                optimizer.step()
    return model.weight.tolist()[0]


def fixed_samples():
    return torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "strategy",
    [
        PReduce(P=2),
        PReduce(P=3),
        PReduce(P=2, overlap=False),
        PReduce(P=2, weights="dynamic", apply="own_share"),
        PReduce(P=2, weights="dynamic", apply="own_share", overlap=False),
        ADPSGD(topology="complete"),
        Prague(),
    ],
)
def test_whatever_the_groups_each_gradient_counts_once_in_the_mean_of_all_models(strategy):
    """An averaging keeps the sum of the models; a difference that is lost or added twice would not.

    Two members that keep their own share each end with half of both models, whatever the weights.
    """
    expected = (-0.01 * 4 * fixed_samples().sum(0) / 4).tolist()  # rate, epochs, workers
    for weights in values(run(train_with_fixed_gradients, 4, strategy)):
        assert weights == pytest.approx(expected, rel=1e-9)


def killed_or_survives(rank, emit, strategy, victim, log):
    """The victim dies before its third step, and the others go on from theirs when it has."""

    def before_step(steps):
        if steps == 2 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        elif steps == 2:
            wait_until(lambda: entries_of(log, Lost), "the loss")

    return train(rank, emit, strategy, before_step=before_step)


@pytest.mark.parametrize(
    ("strategy", "victim"), [(PReduce(P=3), 0), (PReduce(P=3), 2), (ADPSGD(), 1), (Prague(), 3)]
)
def test_a_worker_that_is_killed_does_not_stop_the_others(tmp_path, strategy, victim):
    log = tmp_path / "log"
    arguments = strategy, victim, log
    with job(killed_or_survives, 4, *arguments, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        ended = [one for one in running.ends() if one.rank != victim]
    results = values(ended)
    equal_models(results)
    used = [number for _, samples, _ in results for batch in samples for number in batch]
    assert max(used.count(number) for number in range(SAMPLES)) == 2
    # All but the samples that the killed worker had reported, two batches at most:
    assert len(used) >= 2 * SAMPLES - 2 * BATCH


def newcomer(rank, emit, strategy, log):
    os.environ["OFFBEAT_NEWCOMER"] = "1"
    return train(7, emit, strategy, 6)


def established_worker(rank, emit, strategy, log):
    """Trains on from its third step when the newcomer is there."""

    def wait_for_newcomer(steps):
        if steps == 2:
            emit("trains")
            wait_until(lambda: any(one.worker == 2 for one in entries_of(log, Joined)), "the newcomer")

    return train(rank, emit, strategy, 6, before_step=wait_for_newcomer)


@pytest.mark.parametrize("strategy", [PReduce(P=2), PReduce(P=2, overlap=False), ADPSGD(), Prague()])
def test_a_newcomer_takes_part_and_ends_with_the_same_model(tmp_path, strategy):
    log = tmp_path / "log"
    with job(established_worker, 2, strategy, log, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.receive(1)
        running.add(newcomer, strategy, log)
        results = values(running.ends())
    assert any(2 in one.joining for one in entries_of(log, AverageModels))
    (host,) = {one.host for one in entries_of(log, Joined)}
    assert host  # all run here
    equal_models(results)
    used = sorted(number for _, samples, _ in results for batch in samples for number in batch)
    assert used == sorted([*range(SAMPLES)] * 6)


def test_the_leaders_checkpoint_continues_with_the_samples_that_are_left():
    results = values(run(train, 2, PReduce(P=2, overlap=False), 1))
    (saved,) = [saved for *_, saved in results if saved is not None]
    state = torch.load(io.BytesIO(saved))
    assert state["step"] == 4
    consumed = sum(stop - start for ranges in state["used"].values() for start, stop in ranges)
    assert 0 < consumed < SAMPLES
    again = values(run(train, 3, PReduce(P=2), 1, True, 0.9, saved))
    equal_models(again)
    assert sum(len(batch) for _, samples, _ in again for batch in samples) == SAMPLES - consumed


def test_the_command_line_names_the_size_of_a_group():
    assert parse_strategy("preduce:P=3") == PReduce(P=3)
    assert parse_strategy("preduce:weights=dynamic,apply=own_share") == PReduce(
        weights="dynamic", apply="own_share"
    )
    assert parse_strategy("adpsgd:topology=complete,overlap=false") == ADPSGD(
        topology="complete", overlap=False
    )
    with pytest.raises(ValueError, match="groups of at least 2 workers, got 1"):
        parse_strategy("preduce:P=1")


# Packing ----------------------------------------------------------------------------------------------------


def test_floats_are_averaged_in_float32_or_better_and_integers_are_the_first_members():
    tensors = [
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([[3.0]], dtype=torch.float64),
        torch.tensor([1 + 2j]),
        torch.tensor(5),
        torch.tensor([]),
    ]
    links = Endpoint("alone", job="job", token="secret", on_message=print, on_lost=print)
    try:
        flat = FlatTensors(lambda: tensors, TensorMemory(links, Host()))
        flat.pack(0.5, is_first=False)
        packed = {one.dtype: one.tolist() for one in flat.contributions}
        assert packed == {
            torch.float32: [0.5, 1.0, 0.5, 1.0],
            torch.float64: [1.5],
            torch.int64: [0],
        }
        flat.pack(0.5, is_first=True)
        assert {one.dtype: one.tolist() for one in flat.contributions}[torch.int64] == [5]
        for output, contribution in zip(flat.outputs, flat.contributions, strict=True):
            output.copy_(2 * contribution + 1)
        flat.unpack()
    finally:
        links.close()
    assert tensors[0].tolist() == [2.0, 3.0]
    assert tensors[1].tolist() == [[4.0]]
    assert tensors[2].tolist() == [2 + 3j]
    assert tensors[3].item() == 11
