"""Buckets are sent as they fill, in any order, and do not wait for gradients that never come."""

import pytest
import torch
from torch import nn

import offbeat
from offbeat.runtime.devices.host import Host
from offbeat.strategies import AllReduce
from support.processes import run, values
from support.staged_training import Training, gradient_averager

WORKERS = 3
WIDTH = 4
BLOCKS = 4
STEPS = 3


class Blocks(nn.Module):
    """Blocks in an order of their own on each worker, of which some workers leave some out.

    Attributes:
        order: the blocks.
        penalizes_first: the loss uses the first block also where the output does not.
        before_last_gradient: called when only the gradient of the first block in the order is missing.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)).double()
        self.order = range(BLOCKS)
        self.penalizes_first = False
        self.before_last_gradient = lambda _: None

    def forward(self, x):
        for number, block in enumerate(self.order):
            x = torch.tanh(self.blocks[block](x))
            if not number:
                x.register_hook(self.before_last_gradient)
        return x


def loss_of(model, x):
    """The gradients of what is computed first come last."""
    penalty = penalty_of(model) if model.penalizes_first else 0.0
    return model(x).square().mean() + penalty


def penalty_of(model):
    return model.blocks[0].weight.square().sum()


def inputs(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def gradients_of(model):
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def train(rank, emit, orders, penalizes_first=False):
    """Return the steps' gradients, buckets sent before the last gradient, and exchanges of all buckets."""
    model = Blocks()
    model.order, model.penalizes_first = orders[rank], penalizes_first
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients, sent, exchanges = [], [], []
    with offbeat.join(model, optimizer, AllReduce(bucket_bytes=1)) as session:
        averager = session._synchronizer.averager
        model.before_last_gradient = lambda _: sent.append(averager._buckets.launched)
        for step in range(STEPS):
            first_id = averager._binding.membership.exchange_id
            optimizer.zero_grad()
            loss_of(model, inputs(rank, step)).backward()
            gradients.append(gradients_of(model))
            optimizer.step()
            exchanges.append(averager._binding.membership.exchange_id - first_id)
    return gradients, sent, exchanges


def check_gradients(found, orders, penalizes_first=False):
    """All workers have the same gradients, the means of those that one process computes."""
    model = Blocks()
    model.penalizes_first = penalizes_first
    assert all(gradients == found[0] for gradients in found)
    for step, gradients in enumerate(found[0]):
        model.zero_grad()
        for rank, model.order in enumerate(orders):
            (loss_of(model, inputs(rank, step)) / len(orders)).backward()
        for gradient, expected in zip(gradients, gradients_of(model), strict=True):
            assert (gradient is None) == (expected is None)
            if gradient is not None:
                means = torch.tensor(gradient, dtype=torch.float64)
                assert torch.allclose(means, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_every_bucket_is_sent_when_it_is_full_in_whichever_order_the_workers_fill_them():
    """The block whose gradient comes last is another one on each worker; the others are sent before it."""
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]
    gradients, sent, _ = zip(*values(run(train, WORKERS, orders)), strict=True)
    check_gradients(gradients, orders)
    assert [*sent] == [[BLOCKS - 1] * STEPS] * WORKERS


def test_from_the_second_step_on_a_bucket_does_not_wait_for_a_gradient_that_never_comes():
    """Each worker uses the first block and one of its own."""
    orders = [(0, 1), (0, 2), (0, 3)]
    gradients, sent, exchanges = zip(*values(run(train, WORKERS, orders)), strict=True)
    check_gradients(gradients, orders)
    assert [*sent] == [[1] + [BLOCKS - 1] * (STEPS - 1)] * WORKERS
    assert [*exchanges] == [[1] * STEPS] * WORKERS


def test_a_gradient_that_was_not_expected_counts_and_is_expected_from_then_on():
    """The first worker's loss uses the first block, and the output of its model does not."""
    orders = [(1, 2), (0, 1), (0, 1)]
    gradients, _, exchanges = zip(*values(run(train, WORKERS, orders, True)), strict=True)
    check_gradients(gradients, orders, penalizes_first=True)
    assert [*exchanges] == [[1, 2, 1]] * WORKERS


@pytest.mark.parametrize("seed", range(20))
def test_where_calls_keep_their_order_buckets_are_sent_in_it_with_the_same_result(seed):
    """`SimulatedExchange` checks the order, while the group changes and passes fail."""
    states = []
    for keeps_order in (False, True):
        training = Training(seed, Host(), gradient_averager(bucket_bytes=1))
        training.group.keeps_order = keeps_order
        states.append(training.run())
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
