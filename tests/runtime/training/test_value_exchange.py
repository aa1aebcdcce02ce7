"""Values that real workers give to each other, at any time of a training."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.events import ValueGiven
from offbeat.strategies import SSP, AllReduce, Hybrid, LocalSGD, PartialAllReduce
from support.newcomer_training import GATE, STEADY, Gate, pass_gate
from support.processes import run, start, values
from support.run_logs import wait_for_entry

WORKERS = 3
EPOCHS = 2


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_an_epoch(session, model, optimizer, after_step=lambda: None):
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 2))
    for x, y in session.batches(data, 4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        after_step()


def exchange_in_each_epoch(rank, emit, strategy):
    model, optimizer = model_and_optimizer()
    found = []
    with offbeat.join(model, optimizer, strategy) as session:
        found.append(session.broadcast_object({"folder": f"of {rank}", "ids": (rank, 1)}))
        for epoch in session.epochs(EPOCHS):
            train_an_epoch(session, model, optimizer)
            session.barrier()
            found.append(session.gather_objects([rank, epoch, "é", None]))
            named = {"loss": rank + 0.1, "steps": rank, "sums": torch.tensor([rank, 2.0])}
            reduced = [session.reduce(named, op) for op in ("mean", "sum", "min", "max")]
            found.append([{**one, "sums": one["sums"].tolist()} for one in reduced])
        found.append(session.reduce(10**30 + rank, "sum"))
        found.append(session.reduce(torch.full((2,), 40000.0, dtype=torch.float16)).tolist())
        found.append(session.gather_objects(torch.zeros(10**6)[:2])[1].shape)  # not of the whole storage
    return found


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), PartialAllReduce(shards="equal"), Hybrid(), LocalSGD(every=4), SSP(s=2)],
    ids=lambda one: type(one).__name__,
)
def test_all_workers_get_the_same_values_in_each_epoch(strategy):
    for found in values(run(exchange_in_each_epoch, WORKERS, strategy)):
        assert found[0] == {"folder": "of 0", "ids": (0, 1)}
        for epoch in range(EPOCHS):
            assert found[1 + 2 * epoch] == {rank: [rank, epoch, "é", None] for rank in range(WORKERS)}
            mean, total, least, most = found[2 + 2 * epoch]
            assert mean["loss"] == pytest.approx(1.1, rel=1e-15)
            assert (total["steps"], least["steps"], most["steps"], mean["steps"]) == (3, 0, 2, 1.0)
            assert [one["sums"] for one in (mean, total, least, most)] == [
                [1, 2],
                [3, 6],
                [0, 2],
                [2, 2],
            ]
        assert found[-3:] == [3 * 10**30 + 3, [40000.0, 40000.0], (2,)]


def test_a_job_of_one_worker_has_its_own_values():
    model, optimizer = model_and_optimizer()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        session.barrier()
        assert session.gather_objects("x") == {0: "x"}
        assert session.broadcast_object("x") == "x"
        assert session.reduce(3) == 3.0
        assert session.reduce(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
        assert session.reduce(np.float64(0.5)) == 0.5
        mine = torch.ones(2, requires_grad=True)
        assert not session.gather_objects(mine)[0].requires_grad
        with pytest.raises(OffbeatError, match="got a Linear that is, or holds, something else"):
            session.gather_objects(model)
    with pytest.raises(OffbeatError, match="called after worker 0 had left the job"):
        session.barrier()


def call_differently(rank, emit):
    model, optimizer = model_and_optimizer()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        if rank:
            session.barrier()
        else:
            session.reduce(1.0, "max")


def test_different_calls_name_two_workers():
    ended = run(call_differently, 2)
    assert all(one.was_ended_by("WorkerError") for one in ended)
    calls = {"session.barrier()", "session.reduce(op='max')"}
    assert all(calls <= set(one.error.replace(":", " ").split()) for one in ended if "called" in one.error)
    assert any("called" in one.error for one in ended)


def miss_a_call(rank, emit):
    model, optimizer = model_and_optimizer()
    with offbeat.join(model, optimizer, AllReduce(timeout_s=3.0)) as session:
        if rank:
            session.barrier()
        else:
            pass_gate()


def test_a_worker_that_does_not_call_is_named_in_time(tmp_path):
    with Gate(tmp_path) as gate, start(miss_a_call, 3, env={GATE: gate.env[GATE]}) as cluster:
        late = [cluster.end(rank) for rank in (1, 2)]
        gate.open()
        cluster.end(0)
    assert any(
        "workers [0] did not call session.barrier() within 3 s, and workers [1, 2] did" in one.error
        for one in late
    )


def refuse(rank, emit):
    model, optimizer = model_and_optimizer()
    messages = []
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for call in (
            lambda: session.gather_objects(model),
            lambda: session.broadcast_object(torch.zeros(30_000)),
            lambda: session.reduce("3"),
            lambda: session.reduce(3, "median"),
            lambda: session.reduce(torch.zeros(2 + rank)),
        ):
            try:
                call()
            except (OffbeatError, ValueError) as error:
                messages.append(str(error))
        session.barrier()  # nothing was left behind
    return messages


def test_what_cannot_be_given_is_refused_before_anybody_waits():
    for unsuitable, large, text, other, unlike in values(run(refuse, 2)):
        assert unsuitable.startswith("session.gather_objects() needs numbers, texts, tensors")
        assert "got a Linear" in unsuitable
        assert "at most 104,857 bytes when saved, got 12" in large
        assert "got a str for the value" in text
        assert other == "expected an op of mean, sum, min, max, got 'median'"
        shapes = [f"(the value: a tensor of shape ({size},)) from worker" for size in (2, 3)]
        assert f"got {shapes[0]} 0 and {shapes[1]} 1" in unlike


def wait_for_others(rank, emit):
    model, optimizer = model_and_optimizer()
    with offbeat.join(model, optimizer, PartialAllReduce(limit=10**6)) as session:
        train_an_epoch(session, model, optimizer)
        emit("trained")
        if rank == 2:
            pass_gate()  # it is killed here
        return session.gather_objects(rank)


def test_a_worker_that_is_killed_is_not_awaited(tmp_path):
    with Gate(tmp_path) as gate, start(wait_for_others, 3, env=gate.env) as cluster:
        for rank in range(3):
            assert cluster.receive(rank) == "trained"
        cluster.processes[2].kill()
        ended = [cluster.end(rank) for rank in (0, 1)]
    assert [one.value for one in ended] == [{0: 0, 1: 1}] * 2


def go_on_with_a_newcomer(rank, emit):
    model, optimizer = model_and_optimizer()
    refused = ""
    with offbeat.join(model, optimizer, STEADY) as session:
        if session.is_newcomer:
            with pytest.raises(OffbeatError) as error:
                session.broadcast_object("folder")
            refused = str(error.value)
        else:
            assert session.broadcast_object("folder") == "folder"

        def wait_for_the_newcomer():
            if not session.is_newcomer and session.step == 3:  # all members of the group are there
                emit("waiting")
                pass_gate()

        for _ in session.epochs(10):
            train_an_epoch(session, model, optimizer, wait_for_the_newcomer)
        found = session.gather_objects(session.worker)
    return refused, found


def come_late(rank, emit, log):
    wait_for_entry(log, "a value", lambda one: isinstance(one, ValueGiven))
    return go_on_with_a_newcomer(rank, emit)


def test_a_newcomer_skips_the_calls_before_the_loop_and_takes_part_in_the_others(tmp_path):
    with Gate(tmp_path) as gate, start(go_on_with_a_newcomer, 2, env=gate.env) as cluster:
        for rank in range(2):
            assert cluster.receive(rank) == "waiting"
        cluster.add(come_late, (gate.log,), gate.env)
        gate.open_for(2)
        first, second, newcomer = values(cluster.ends(90))
    assert newcomer[0].startswith("session.broadcast_object() was called by worker 2, which has joined a")
    assert first == second == ("", {0: 0, 1: 1, 2: 2})
    assert newcomer[1] == {0: 0, 1: 1, 2: 2}


def call_between_epochs(rank, emit):
    model, optimizer = model_and_optimizer()
    refused = []
    with offbeat.join(model, optimizer, STEADY) as session:
        for _ in session.epochs(2):
            if session.epoch:
                with pytest.raises(OffbeatError) as error:
                    session.barrier()
                refused.append(str(error.value))
            train_an_epoch(session, model, optimizer)
            if not session.epoch:
                with pytest.raises(OffbeatError) as error:
                    session.gather_objects(rank)
                refused.append(str(error.value))
        found = session.gather_objects(rank)
    return refused, found


def test_a_call_between_epochs_that_do_not_end_for_all_together_is_refused():
    for (after, before), found in values(run(call_between_epochs, 2)):
        assert after.startswith("session.gather_objects() was called between two epochs of session.epochs")
        assert before.startswith("session.barrier() was called between two epochs of session.epochs")
        assert found == {0: 0, 1: 1}
