"""Unusual models, optimizers and loops: they train as in one process with the whole batch, or are refused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import AllReduce, Hybrid, PartialAllReduce, ServerBSP
from support.processes import run, values

STRATEGIES = {
    "bsp": AllReduce(bucket_bytes=64),
    "partial": PartialAllReduce(bucket_bytes=64, limit=10**6, shards="equal"),
    "hybrid": Hybrid(policy="ring", fuse_bytes=0),
    "ps-bsp": ServerBSP(shards="equal"),
}
IN_GROUPS = ("bsp", "partial", "hybrid")
WORKERS, STEPS = 2, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 2)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(output):
    return output.square().sum(1).mean()


class Worker:
    """A worker of two, or, without a strategy, the one process that trains on the batches of both."""

    def __init__(self, rank=None, strategy=None):
        self.rank, self._strategy, self.session = rank, strategy, None

    def join(self, model, optimizer):
        if self._strategy is None:
            return nullcontext()
        self.session = offbeat.join(model, optimizer, STRATEGIES[self._strategy])
        return self.session

    def refresh(self):
        if self.session is not None:
            self.session.refresh()

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(WORKERS, 4, 5, generator=generator, dtype=torch.float64, device="cpu")
        return batches.reshape(-1, 5) if self.rank is None else batches[self.rank]

    @property
    def is_first(self):
        return self.rank in (None, 0)

    def step(self, model, optimizer, number):
        optimizer.zero_grad()
        loss(model(self.batch(number))).backward()
        optimizer.step()

    def train(self, model, optimizer):
        with self.join(model, optimizer):
            for number in range(STEPS):
                self.step(model, optimizer, number)


def numbers(*modules):
    """All parameters and buffers, flat."""
    tensors = [one for module in modules for one in module.state_dict().values()]
    parts = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    return torch.cat([part.detach().reshape(-1).double() for part in parts]).tolist()


# Models --------------------------------------------------------------------------------------------------


def tied(worker):
    model = Net()
    model.first, model.last = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
    model.last.weight = model.first.weight
    worker.train(model, sgd(model))
    return numbers(model)


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(2, 2, dtype=torch.complex128))

    def forward(self, x):
        return (super().forward(x).to(torch.complex128) @ self.turn).abs()


def complex_numbers(worker):
    model = Complex()
    worker.train(model, sgd(model))
    return numbers(model)


class Sizes(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.none = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(2, 2, dtype=torch.float64).t())

    def forward(self, x):
        return self.scale * super().forward(x) @ self.turned + self.none.sum()


def scalars_and_empty(worker):
    model = Sizes()
    worker.train(model, sgd(model))
    return numbers(model)


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("is_odd", torch.tensor(False))

    def forward(self, x):
        self.calls, self.is_odd = self.calls + 1, ~self.is_odd
        return super().forward(x) / self.calls + self.is_odd


def buffers_replaced(worker):
    model = Counting()
    worker.train(model, sgd(model))
    return numbers(model)


def parametrized(worker):
    model = Net()
    parametrizations.weight_norm(model.first)
    parametrizations.orthogonal(model.last)
    worker.train(model, sgd(model))
    return numbers(model)


def pruned(worker):
    model = Net()
    prune.l1_unstructured(model.first, "weight", amount=0.4)
    worker.train(model, sgd(model))
    return numbers(model)


def pruned_in_the_midst(worker):
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            if number == 2:
                worker.refresh()
                prune.l1_unstructured(model.first, "weight", amount=0.4)
            worker.step(model, optimizer, number)
    return numbers(model)


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrized_in_the_midst(worker):
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            if number == 2:
                worker.refresh()
                parametrize.register_parametrization(model.first, "weight", Half())
            worker.step(model, optimizer, number)
    return numbers(model)


def set_to_evaluate(worker):
    model = Net().eval()
    worker.train(model, sgd(model))
    return numbers(model)


def fused(worker):
    model = Net()
    worker.train(model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True))
    return numbers(model)


# Loops ---------------------------------------------------------------------------------------------------


@dataclass
class Output:
    values: torch.Tensor


class Reentrant(Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return Output(checkpoint(self.last, hidden, use_reentrant=True))


def an_output_of_its_own_kind(worker):
    """No tensor is found in it, and an inner backward pass is the first to reach a parameter."""
    model = Reentrant()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss(model(worker.batch(number)).values).backward()
            optimizer.step()
    return numbers(model)


def kept_gradients(worker):
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            output = loss(model(worker.batch(number)))
            optimizer.zero_grad(set_to_none=False)
            output.backward()
            optimizer.step()
    return numbers(model)


def some_inputs(worker):
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss(model(worker.batch(number))).backward(inputs=list(model.last.parameters()))
            optimizer.step()
    return numbers(model)


def set_by_hand(worker):
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            named = {name: one.detach() for name, one in model.named_parameters()}
            x = worker.batch(number)
            found = torch.func.grad(lambda named, x=x: loss(torch.func.functional_call(model, named, (x,))))(
                named
            )
            for name, one in model.named_parameters():
                one.grad = found[name]
            optimizer.step()
    return numbers(model)


def learning_to_learn(worker):
    """MAML: the loss is that after a step, and its gradient goes through the step."""
    model = Net()
    optimizer = sgd(model)
    ones = torch.ones(1, 5, dtype=torch.float64)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            optimizer.zero_grad()
            named = dict(model.named_parameters())
            slopes = torch.autograd.grad(loss(model(ones)), list(named.values()), create_graph=True)
            fast = {name: one - 0.1 * slope for (name, one), slope in zip(named.items(), slopes, strict=True)}
            loss(torch.func.functional_call(model, fast, (worker.batch(number),))).backward()
            optimizer.step()
    return numbers(model)


def sharpness_aware(worker):
    """SAM: two backward passes a step, with other parameters in the second."""
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss(model(worker.batch(number))).backward()
            moves = [0.05 * one.grad.clone() for one in model.parameters()]
            with torch.no_grad():
                for one, move in zip(model.parameters(), moves, strict=True):
                    one.add_(move)
            optimizer.zero_grad()
            loss(model(worker.batch(number))).backward()
            with torch.no_grad():
                for one, move in zip(model.parameters(), moves, strict=True):
                    one.sub_(move)
            optimizer.step()
    return numbers(model)


def a_closure(worker):
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):

            def compute(number=number):
                optimizer.zero_grad()
                found = loss(model(worker.batch(number)))
                found.backward()
                return found

            optimizer.step(compute)
    return numbers(model)


def rates_that_differ(worker):
    """ReduceLROnPlateau by each worker's own loss: the first one's rates count."""
    model = Net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            worker.step(model, optimizer, number)
            schedule.step(float(number if worker.is_first else -number))
    return numbers(model)


def averaged_weights(worker):
    model = Net()
    optimizer = sgd(model)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    with worker.join(model, optimizer):
        for number in range(STEPS):
            worker.step(model, optimizer, number)
            worker.refresh()
            average.update_parameters(model)
    return numbers(model, average)


def copies_trained_apart(worker):
    """Copies and pickles of model and optimizer, on one worker alone."""
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            if number == 2:
                worker.refresh()
                pair = (model, optimizer)
                if worker.is_first:
                    for other in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
                        worker.step(*other, number)
            worker.step(model, optimizer, number)
    return numbers(model)


def in_a_thread(worker):
    found = []

    def train():
        model = Net()
        worker.train(model, sgd(model))
        found.append(numbers(model))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return found[0]


def strictly(worker):
    """Warnings are errors, anomalies are detected, and no garbage is collected."""
    gc.disable()
    try:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
            model = Net()
            worker.train(model, sgd(model))
            return numbers(model)
    finally:
        gc.enable()


def drawn_numbers(worker):
    """The global generator draws what it draws without a session."""
    model = Net()
    torch.manual_seed(1)
    worker.train(model, sgd(model))
    return torch.rand(3, dtype=torch.float64).tolist()


def on_another_default_device(worker):
    model = Net()
    optimizer = sgd(model)
    torch.set_default_device("meta")
    try:
        with worker.join(model, optimizer):
            for number in range(STEPS):
                worker.step(model, optimizer, number)
            worker.refresh()
    finally:
        torch.set_default_device(None)
    return numbers(model)


def joined_in_inference_mode(worker):
    model = Net()
    optimizer = sgd(model)
    with torch.inference_mode():
        entered = worker.join(model, optimizer)
    with entered:
        for number in range(STEPS):
            worker.step(model, optimizer, number)
    return numbers(model)


def stepped_in_inference_mode(worker):
    model = Net()
    optimizer = sgd(model)
    with worker.join(model, optimizer):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss(model(worker.batch(number))).backward()
            with torch.inference_mode():
                optimizer.step()
                model(worker.batch(number))
    return numbers(model)


def joined_again(worker):
    """The second session continues with the optimizer as the first one left it."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(2):
        worker.train(model, optimizer)
    moments = [optimizer.state[one]["exp_avg"].tolist() for one in model.last.parameters()]
    return [*numbers(model), *moments[1]]


class Backbone(Net):
    """Values that no gradient changes differ at first between the workers."""

    def __init__(self, other):
        super().__init__()
        self.whole = nn.Parameter(torch.full((5,), 1 + other, dtype=torch.int8), requires_grad=False)
        self.bfloat = nn.Parameter(torch.full((5,), 1.5 + other, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("turn", torch.full((2,), 1 + 2j + other, dtype=torch.complex64))
        self.register_buffer("large", torch.tensor(2**62 + 1 + other))
        self.register_buffer("is_other", torch.tensor(bool(other)))

    def forward(self, x):
        shift = (self.large - 2**62) + self.is_other
        return super().forward(x * self.whole * self.bfloat) * self.turn.imag.double() + shift


def frozen(worker):
    model = Backbone(0 if worker.is_first else 1)
    worker.train(model, sgd(model))
    assert int(model.large) == 2**62 + 1
    return numbers(model)


class Cached(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.ones(5, dtype=torch.float64)
        return super().forward(x - self.cache)


def caches_made_late(worker):
    model = Cached()
    worker.train(model, sgd(model))
    return numbers(model)


EVERYWHERE = (
    tied,
    scalars_and_empty,
    buffers_replaced,
    parametrized,
    pruned,
    pruned_in_the_midst,
    fused,
    an_output_of_its_own_kind,
    kept_gradients,
    some_inputs,
    set_by_hand,
    learning_to_learn,
    averaged_weights,
    copies_trained_apart,
    in_a_thread,
    strictly,
    drawn_numbers,
    on_another_default_device,
    joined_in_inference_mode,
    stepped_in_inference_mode,
    joined_again,
    frozen,
    caches_made_late,
)
GROUPS_ALONE = (
    complex_numbers,
    parametrized_in_the_midst,
    set_to_evaluate,
    sharpness_aware,
    a_closure,
    rates_that_differ,
)


OF_ALL_GROUPS = {complex_numbers, a_closure, rates_that_differ, sharpness_aware, learning_to_learn}
EVERY_WAY = {frozen, joined_again, on_another_default_device, stepped_in_inference_mode}


def situations(strategy):
    """Each costs a join: under bsp all, elsewhere those that take another path there."""
    if strategy == "bsp":
        return EVERYWHERE + GROUPS_ALONE
    chosen = EVERY_WAY | (OF_ALL_GROUPS if strategy in IN_GROUPS else {tied, fused, joined_in_inference_mode})
    return tuple(one for one in EVERYWHERE + GROUPS_ALONE if one in chosen)


def do_all(rank, emit, strategy):
    return [situation(Worker(rank, strategy)) for situation in situations(strategy)]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unusual_models_and_loops_train_as_in_one_process(strategy):
    results = zip(*values(run(do_all, WORKERS, strategy)), strict=True)
    for situation, (first, second) in zip(situations(strategy), results, strict=True):
        assert first == second, situation.__name__
        expected, found = torch.tensor(situation(Worker())), torch.tensor(first)
        assert torch.allclose(found, expected, rtol=0, atol=1e-9), situation.__name__


# Refusals ------------------------------------------------------------------------------------------------


def refusal(model, optimizer, strategy="bsp"):
    with pytest.raises(OffbeatError) as caught:
        offbeat.join(model, optimizer, STRATEGIES[strategy]).leave()
    return str(caught.value)


def test_a_model_of_many_long_names_trains_on_servers():
    """The signature of a layout is no longer than a text that the coordinator accepts."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(
        "a_rather_long_name_of_an_encoder", nn.Sequential(*[nn.Linear(2, 2) for _ in range(150)])
    )
    model.double()
    optimizer, expected = sgd(model), copy.deepcopy(model)
    Worker(0).step(nn.Sequential(nn.Linear(5, 2).double(), expected), sgd(expected), 0)
    outer = nn.Sequential(nn.Linear(5, 2).double().requires_grad_(False), model)
    with offbeat.join(outer, optimizer, STRATEGIES["ps-bsp"]):
        Worker(0).step(outer, optimizer, 0)
    assert all(torch.isfinite(one).all() for one in model.parameters())


class Shared(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.a, self.b = nn.Parameter(first), nn.Parameter(second)


def test_parameters_that_share_memory_are_refused_on_servers_by_name():
    base = torch.randn(40)
    for model in (
        Shared(base[:25].view(5, 5), base[10:35].view(5, 5)),
        Shared(base.view(4, 10)[:, ::2], base.view(4, 10)[:, 1:6]),
    ):
        assert "a and b share memory" in refusal(model, sgd(model), "ps-bsp")
    model = Shared(torch.randn(2), base.as_strided((5, 5), (1, 1)))
    assert "several elements of b share memory" in refusal(model, sgd(model), "ps-bsp")
    apart = Shared(base[:20].view(4, 5).t(), base[20:])
    with offbeat.join(apart, sgd(apart), STRATEGIES["ps-bsp"]):
        pass


def test_a_parameter_that_is_twice_in_a_group_is_refused_on_servers():
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the same
        optimizer = torch.optim.SGD([*model.parameters(), model.first.weight], lr=0.1)
    assert "first.weight is in several of the optimizers, or in one of them several" in refusal(
        model, optimizer, "ps-bsp"
    )


def add_parameter(model):
    model.added = nn.Parameter(torch.zeros(2))


def add_module(model):
    model.first.register_module("added", nn.Linear(2, 2))


def replace_module(model):
    model.last = nn.Linear(6, 2).double()


def adds(model, optimizer, add, strategy):
    with offbeat.join(model, optimizer, STRATEGIES[strategy]):
        Worker(0).step(model, optimizer, 0)
        add(model)
        Worker(0).step(model, optimizer, 1)


@pytest.mark.long(after=2)
@pytest.mark.parametrize("strategy", ["bsp", "ps-bsp"])
@pytest.mark.parametrize(
    ("add", "name"),
    [(add_parameter, "added"), (add_module, "first.added.weight"), (replace_module, "last.weight")],
)
def test_a_parameter_that_the_model_gets_after_join_is_refused_by_name(add, name, strategy):
    model = Net()
    optimizer = sgd(model)
    with pytest.raises(OffbeatError, match=f"a parameter '{name}' that it did not have at join"):
        adds(model, optimizer, add, strategy)


def test_a_frozen_module_added_after_join_is_accepted():
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES["bsp"]):
        model.added = nn.Linear(2, 2).requires_grad_(False)
        Worker(0).step(model, optimizer, 0)


class Late(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        self.mean = x.mean(0).detach()
        return super().forward(x - self.mean)


def trains_late(rank, emit, strategy):
    model = Late()
    Worker(rank, strategy).train(model, sgd(model))


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", IN_GROUPS)
def test_a_buffer_that_was_none_at_join_and_is_saved_is_refused_by_name(strategy):
    ended = run(trains_late, WORKERS, strategy)
    assert any("the buffer 'mean' was None at join and is" in one.error for one in ended), ended


def test_a_model_of_which_a_part_is_in_a_session_is_refused():
    model = Net()
    with offbeat.join(model, sgd(model), STRATEGIES["bsp"]):
        for other in (model, model.first, nn.Sequential(nn.Linear(2, 5), model.first)):
            assert "a part of this model, is in a session already" in refusal(other, sgd(other))
    with offbeat.join(model.first, sgd(model.first), STRATEGIES["bsp"]):
        pass


def keeps_graphs(rank, emit, strategy):
    warnings.simplefilter("ignore")  # torch's own, of graphs that are kept
    model = Net()
    with Worker(rank, strategy).join(model, sgd(model)):
        loss(model(Worker(rank).batch(0))).backward(create_graph=True)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", IN_GROUPS)
def test_a_backward_pass_that_keeps_its_graph_is_refused(strategy):
    ended = run(keeps_graphs, WORKERS, strategy)
    assert all("create_graph=True) leaves gradients with a graph" in one.error for one in ended), ended


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_made_in_inference_mode_is_refused_by_name(strategy):
    with torch.inference_mode():
        model = Net()
    assert "first.weight was made in inference mode" in refusal(model, sgd(model), strategy)


def test_models_without_anything_to_train_are_refused():
    own = [nn.Parameter(torch.ones(2))]
    assert "there is nothing to train" in refusal(nn.ReLU(), torch.optim.SGD(own, lr=0.1))
    model = Net().requires_grad_(False)
    assert "there is nothing to train" in refusal(model, sgd(model))


def test_a_module_whose_buffers_alone_are_lazy_is_refused_by_name():
    model = nn.Sequential(nn.Linear(5, 5), nn.LazyBatchNorm1d(affine=False))
    assert "1.running_mean is not initialised yet" in refusal(model, sgd(model))


def steps_unequally(rank, emit, strategy, fault):
    model = Net()
    worker, optimizer = Worker(rank), sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES[strategy]):
        for number in range(STEPS):
            optimizer.zero_grad()
            loss(model(worker.batch(number))).backward()
            is_odd = number == 2 and rank == 1
            if is_odd and fault == "backward twice":
                loss(model(worker.batch(number))).backward()
            if not (is_odd and fault == "no step"):
                optimizer.step()


@pytest.mark.long(after=2)
@pytest.mark.parametrize("fault", ["no step", "backward twice"])
@pytest.mark.parametrize("strategy", IN_GROUPS)
def test_a_worker_that_steps_after_another_number_of_backward_passes_is_named(strategy, fault):
    ended = run(steps_unequally, WORKERS, strategy, fault)
    assert all(one.error_type == "WorkerError" and "both in round 3" in one.error for one in ended) or all(
        "all in round 3: workers call step() after different numbers" in one.error for one in ended
    ), ended
