"""Checkpoints of local steps with an outer optimizer: a resumed training continues as if uninterrupted."""

import io
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.policies.model_averaging.local_steps import LocalSteps
from offbeat.strategies import DiLoCo, LocalSGD
from support.averaging_job import Job
from support.processes import run, values

SAMPLES, BATCH, EPOCHS = 90, 5, 2
IN_STEP = {"by_pace": False, "overlap": False, "shards": "equal", "quorum": 2}


class Messages(logging.Handler):
    """Keeps what the library logs."""

    def __init__(self):
        super().__init__()
        self.texts = []
        logging.getLogger("offbeat").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def train(rank, emit, strategy, are_samples_equal, save_at=None, saved=None):
    """Returns the final parameters, the leader's checkpoint after so many steps, and what was logged.

    Where all samples are equal, so are the models of workers that make as many steps.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randint(3, (SAMPLES,))
    if are_samples_equal:
        inputs, labels = inputs[:1].expand(SAMPLES, 6), labels[:1].expand(SAMPLES)
    messages, steps, checkpoint = Messages(), 0, None
    with offbeat.join(model, optimizer, strategy) as session:
        if saved is not None:
            session.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
        for _ in session.epochs(EPOCHS):
            for batch_inputs, batch_labels in session.batches(TensorDataset(inputs, labels), BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch_inputs), batch_labels).backward()
                optimizer.step()
                steps += 1
                if steps == save_at and session.is_leader:
                    file = io.BytesIO()
                    torch.save(session.state_dict(), file)
                    checkpoint = file.getvalue()
    return [parameter.tolist() for parameter in model.parameters()], checkpoint, messages.texts


def train_and_resume(strategy, save_at, *, are_samples_equal=False, change=lambda state: None):
    """The final parameters of a training, those of one that continues from its checkpoint, and its log."""
    whole = values(run(train, 2, strategy, are_samples_equal, save_at))
    (saved,) = [saved for _, saved, _ in whole if saved is not None]
    state = torch.load(io.BytesIO(saved), weights_only=True)
    change(state)
    file = io.BytesIO()
    torch.save(state, file)
    resumed = values(run(train, 2, strategy, are_samples_equal, None, file.getvalue()))
    assert whole[0][0] == whole[1][0]
    assert resumed[0][0] == resumed[1][0]
    return whole[0][0], resumed[0][0], [text for *_, texts in resumed for text in texts]


@pytest.mark.parametrize("momentum_every", [1, 2])
def test_a_training_that_resumes_after_a_round_equals_one_without_interruption(momentum_every):
    strategy = DiLoCo(every=4, momentum_every=momentum_every, **IN_STEP)
    whole, resumed, messages = train_and_resume(strategy, save_at=4)
    assert resumed == whole
    assert messages == []


def test_a_training_in_parts_resumes_with_the_part_that_is_next():
    strategy = DiLoCo(every=6, fragments=3, mixing=0.25, **IN_STEP)
    whole, resumed, _ = train_and_resume(strategy, save_at=4, are_samples_equal=True)
    assert resumed == whole


def test_a_checkpoint_without_the_outer_optimizer_begins_with_its_momentum_at_zero_and_says_so_once():
    def forget(state):
        del state["synchronizer"]  # as in checkpoints of earlier versions

    whole, resumed, messages = train_and_resume(DiLoCo(every=4, **IN_STEP), save_at=8, change=forget)
    assert resumed != whole
    assert messages == ["the checkpoint has no state of an outer optimizer: its momentum begins at zero"]


def test_without_an_outer_optimizer_a_checkpoint_of_one_loads():
    def add(state):
        state["synchronizer"] = {"outer_optimizer": {"rounds": 9, "anchor": {}, "buffers": []}}

    whole, resumed, messages = train_and_resume(LocalSGD(every=4, **IN_STEP), save_at=8, change=add)
    assert resumed == whole
    assert messages == []


def test_the_coordinator_counts_rounds_on_from_those_of_the_checkpoint():
    job = Job(2, policy=LocalSteps, every=2, by_pace=False, fragments=2, quorum=2)
    job.end_all()
    for worker in range(2):
        job.load_outer_state(worker, rounds=5)
    for worker in range(2):
        job.ready(worker)
    step = job.averagings[-1].outer_step
    assert (step.fragment, step.number) == (1, 2)
