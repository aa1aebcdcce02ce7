"""Training loops that once failed, each compared with the result of a single process."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import AllReduce, Hybrid, PartialAllReduce
from support.failing_backward import Fails
from support.processes import run, values

WORKERS = 2


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

    def loss(self, x):
        """Bypasses the hooks of the module, like a model that is called by a method of its own."""
        return self.forward(x).square().mean()


def inputs(rank, step=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def gradients(model):
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def mean_gradients(step=0):
    model = Small()
    sum(model.loss(inputs(rank, step)) / WORKERS for rank in range(WORKERS)).backward()
    return [p.grad for p in model.parameters()]


def assert_are_the_means(found, step=0):
    for gradient, expected in zip(found, mean_gradients(step), strict=True):
        assert torch.allclose(torch.tensor(gradient, dtype=torch.float64), expected, rtol=0, atol=1e-12)


def set_by_hand(rank, emit):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    with offbeat.join(model, optimizer, AllReduce()):
        for step in range(2):
            computed = torch.autograd.grad(model.loss(inputs(rank, step)), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), computed, strict=True):
                parameter.grad = gradient
            optimizer.step()
            found.append(gradients(model))
    return found


def test_gradients_that_were_set_by_hand_are_averaged_at_the_step():
    for found in values(run(set_by_hand, WORKERS)):
        for step in range(2):
            assert_are_the_means(found[step], step)


class Failing(Small):
    fails = False

    def forward(self, x):
        hidden = self.a(x)
        return self.b(torch.tanh(Fails.apply(hidden) if self.fails else hidden))


def failed_backward(rank, emit, failing, through_model):
    """The workers in `failing` fail halfway through a backward pass, clear the gradients and continue."""
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offbeat.join(model, optimizer, AllReduce(bucket_bytes=1)) as session:
        if rank in failing:
            model.fails = True
            loss = model(inputs(rank)).square().mean() if through_model else model.forward(inputs(rank)).sum()
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            model.fails = False
            optimizer.zero_grad()
        found = []
        for step in range(2):
            optimizer.zero_grad()
            (
                model.loss(inputs(rank, step))
                if not through_model
                else model(inputs(rank, step)).square().mean()
            ).backward()
            optimizer.step()
            found.append(gradients(model))
        assert session._synchronizer.averager.round == 2
    return found


@pytest.mark.parametrize("through_model", [True, False])
@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_a_failed_backward_pass_does_not_affect_later_gradients(failing, through_model):
    for found in values(run(failed_backward, WORKERS, failing, through_model)):
        for step in range(2):
            assert_are_the_means(found[step], step)


def failed_and_skipped(rank, emit):
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offbeat.join(model, optimizer, AllReduce(bucket_bytes=1)):
        model.fails = rank == 1
        try:
            model(inputs(rank)).square().mean().backward()
        except ZeroDivisionError:
            optimizer.zero_grad()
        optimizer.step()
    return gradients(model)


def test_a_worker_that_skips_a_step_after_a_failed_pass_has_no_weight():
    alone = Small()
    alone.loss(inputs(0)).backward()
    for found in values(run(failed_and_skipped, WORKERS)):
        for gradient, parameter in zip(found, alone.parameters(), strict=True):
            expected = parameter.grad
            assert torch.allclose(torch.tensor(gradient, dtype=torch.float64), expected, rtol=0, atol=1e-12)


def stepping_again(rank, emit):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    with offbeat.join(model, optimizer, AllReduce()):
        model.loss(inputs(rank)).backward()
        for _ in range(4):
            optimizer.step()
            found.append(gradients(model))
    return found


def test_further_steps_keep_the_gradients():
    for found in values(run(stepping_again, WORKERS)):
        for one in found:
            assert_are_the_means(one)


def dropping(rank, emit, strategy, dropped_by, doubled_by):
    """Takes a further step without some gradients of the last one, which a worker drops or doubles."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with offbeat.join(model, optimizer, strategy) as session:
        for step in range(4):  # under hybrid the third is the first one whose end is deferred
            optimizer.zero_grad()
            model(inputs(rank, step)).square().mean().backward()
            optimizer.step()
        session.refresh()
        before = [p.tolist() for p in model.parameters()]
        if rank in dropped_by:
            model.a.weight.grad = model.b.bias.grad = None
        if rank in doubled_by:
            model.b.weight.grad *= 2
        optimizer.step()
    changed = [one != p.tolist() for one, p in zip(before, model.parameters(), strict=True)]
    return changed, [p.tolist() for p in model.parameters()], gradients(model)


@pytest.mark.long(after=4)
@pytest.mark.parametrize("doubled_by", [(), (0,), (1,)])
@pytest.mark.parametrize("dropped_by", [(1,), (0, 1)])
@pytest.mark.parametrize("strategy", [AllReduce(), Hybrid(), PartialAllReduce()], ids=lambda one: one.name)
def test_a_mean_that_one_worker_drops_is_applied_by_none(strategy, dropped_by, doubled_by):
    first, second = values(run(dropping, WORKERS, strategy, dropped_by, doubled_by))
    assert first == second
    is_dropped = not doubled_by or doubled_by == dropped_by or len(dropped_by) == WORKERS
    assert first[0] == [not is_dropped, True, True, not is_dropped]


def kept(rank, emit):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tasks, views = [], []
    with offbeat.join(model, optimizer, AllReduce()):
        for step in range(5):
            optimizer.zero_grad()
            model.loss(inputs(rank, step)).backward()
            tasks.append([p.grad for p in model.parameters()])
            views.append(model.b.weight.grad.flatten())
            optimizer.step()
    return [[gradient.tolist() for gradient in task] for task in tasks], [view.tolist() for view in views]


def test_gradients_with_live_references_are_not_overwritten():
    for tasks, views in values(run(kept, WORKERS)):
        for step, task in enumerate(tasks):
            assert_are_the_means(task, step)
            assert views[step] == [value for row in task[2] for value in row]


def count_gradient_buffers(rank, emit, removes_gradients):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    places = set()
    with offbeat.join(model, optimizer, AllReduce()):
        for step in range(6):
            optimizer.zero_grad(set_to_none=removes_gradients)
            model.loss(inputs(rank, step)).backward()
            optimizer.step()
            places.add(model.a.weight.grad.data_ptr())
    return len(places)


@pytest.mark.parametrize("removes_gradients", [True, False])
def test_the_memory_of_gradients_of_which_no_reference_is_kept_is_used_again(removes_gradients):
    # The links' thread may keep the first round's memory for a moment: then there is a second one, as with
    # gradients that are set to zero in place.
    assert max(values(run(count_gradient_buffers, WORKERS, removes_gradients))) <= 2


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    def forward(self, x):
        return self.net(x * self.mask)


def two_forwards_two_backwards(rank, emit):
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, AllReduce()):
        for _ in range(2):
            optimizer.zero_grad()
            first, second = model(inputs(rank).float()).mean(), model(inputs(rank, 1).float()).square().mean()
            first.backward(retain_graph=True)
            second.backward()
            first.backward()
            optimizer.step()
    return [t.tolist() for t in [*model.parameters(), *model.buffers()]]


def test_several_backward_passes_through_buffers_are_allowed():
    one, other = values(run(two_forwards_two_backwards, WORKERS))
    assert one == other


def with_closure(rank, emit):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for step in range(3):

            def closure():
                optimizer.zero_grad()
                loss = model.loss(inputs(rank, step))  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
        assert session._synchronizer.averager.round == 3
    return gradients(model)


def test_a_closure_costs_one_round_a_step():
    for found in values(run(with_closure, WORKERS)):
        assert_are_the_means(found, 2)


class Scaled(nn.Module):
    """Returns a parameter as an output, such as a learned temperature."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x), self.scale


def test_a_parameter_that_is_an_output_gets_no_hooks():
    model = Scaled()
    with offbeat.join(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce()):
        for _ in range(3):
            output, scale = model(torch.ones(1, 4))
            (output * scale).sum().backward()
    assert not model.scale._backward_hooks


def half_with_precise_state(rank, emit):
    model = nn.Linear(4, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0:
        for number, parameter in enumerate(model.parameters()):
            optimizer.state[parameter]["master"] = parameter.detach().float() + 1e-5 * number
            optimizer.state[parameter]["note"] = "plain"
    with offbeat.join(model, optimizer, AllReduce()):
        rows = [optimizer.state[parameter] for parameter in model.parameters()]
        return [(str(row["master"].dtype), row["master"].tolist(), row["note"]) for row in rows]


def test_optimizer_state_is_copied_bit_for_bit_whatever_its_type():
    one, other = values(run(half_with_precise_state, WORKERS))
    assert one == other
    assert one[0][0] == "torch.float32"


HALF_WORKERS, HALF_SIZE = 4, 256


def half_inputs(rank):
    return torch.randn(1, HALF_SIZE, generator=torch.Generator().manual_seed(rank)).bfloat16()


def in_half_precision(rank, emit, strategy):
    torch.manual_seed(0)
    model = nn.Linear(HALF_SIZE, 1, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offbeat.join(model, optimizer, strategy):
        for _ in range(4):
            optimizer.zero_grad()
            model(half_inputs(rank)).sum().backward()
            optimizer.step()
        assert model.weight.grad.dtype == torch.bfloat16
        return model.weight.grad.tolist()


@pytest.mark.parametrize("strategy", [AllReduce(), Hybrid()], ids=["bsp", "hybrid"])
def test_half_precision_gradients_are_summed_in_single_precision(strategy):
    mean = torch.cat([half_inputs(rank).float() for rank in range(HALF_WORKERS)]).mean(0, keepdim=True)
    for seen in values(run(in_half_precision, HALF_WORKERS, strategy)):
        assert seen == mean.bfloat16().tolist()


class Drawing(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(())


def alone():
    model = nn.Linear(4, 2)
    return offbeat.join(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce())


def test_loader_workers_draw_again_every_epoch():
    with alone() as session:
        drawn = [[float(x) for x in session.batches(Drawing(), 1, num_workers=1)] for _ in session.epochs(3)]
    assert len({tuple(epoch) for epoch in drawn}) == 3


def test_batches_without_epochs_and_two_at_once_are_refused():
    dataset = TensorDataset(torch.arange(8.0))
    with alone() as session:
        first = session.batches(dataset, 2)
        next(first)
        with pytest.raises(OffbeatError, match="iterated already"):
            next(session.batches(dataset, 2))
        assert len(list(first)) == 3
        with pytest.raises(OffbeatError, match=r"used up: begin the next epoch with session\.epochs"):
            next(session.batches(dataset, 2))


@pytest.mark.parametrize(
    ("buffer", "text"),
    [(torch.ones(1).expand(3), "is expanded"), (torch.ones(2).to(torch.uint16), "torch cannot add")],
)
def test_buffers_that_cannot_be_exchanged_are_refused_at_join(buffer, text):
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer)
    with pytest.raises(OffbeatError, match=text):
        offbeat.join(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce())


def late(rank, emit):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offbeat.join(model, optimizer, AllReduce(timeout_s=1)) as session:
        if rank == 1:
            session._job.coordinator.pause(60)
        model.loss(inputs(rank)).backward()


def test_at_the_deadline_the_late_worker_is_named():
    for ended in run(late, WORKERS):
        assert ended.error_type == "WorkerError"
        assert "worker 1 did not finish computing step 1 within 1 s after worker 0 had" in ended.error
