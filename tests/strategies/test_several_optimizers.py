"""Several optimizers in one session: their steps are those of one process, and none of them is forgotten."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.runtime.training.checks import describe_training
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies import ASP, SSP, AllReduce, Hybrid, PartialAllReduce, ServerBSP
from support.group_training import compute
from support.processes import run, values
from support.run_logs import groups_of

WORKERS, STEPS, BATCH = 2, 6, 4
STRATEGIES = {
    "bsp": AllReduce(),
    "partial": PartialAllReduce(limit=10**6, shards="equal"),
    "hybrid": Hybrid(),
    "ps-bsp": ServerBSP(shards="equal"),
}


class Pair(nn.Module):
    """A generator and a critic, or a body and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
        self.second = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x, through=True):
        return self.second(self.first(x) if through else x)


def make(seed=0):
    torch.manual_seed(seed)
    model = Pair().double()
    return model, [
        torch.optim.Adam(model.first.parameters(), lr=torch.tensor(0.05, dtype=torch.float64)),
        torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9),
    ]


def together(model, optimizers, x):
    """One loss, two optimizers."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def in_turn(model, optimizers, x):
    """Each optimizer has a loss of its own, and takes its step before the other's is computed."""
    generator, critic = optimizers
    critic.zero_grad()
    (model(x).mean() - model(x, through=False).square().mean()).backward()
    critic.step()
    generator.zero_grad()
    model(x).square().mean().backward()
    generator.step()


LOOPS = {"together": together, "in turn": in_turn}


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, WORKERS, BATCH, 5, generator=generator, dtype=torch.float64)


def trains(rank, emit, strategy, loop):
    model, optimizers = make(seed=rank)
    with offbeat.join(model, optimizers, strategy) as session:
        for x in batches():
            LOOPS[loop](model, optimizers, x[rank])
        session.refresh()
        assert session.step == STEPS * (1 if loop == "together" else 2)
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.long(after=2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_optimizers_step_as_in_one_process(strategy, loop):
    first, second = values(run(trains, WORKERS, STRATEGIES[strategy], loop))
    assert first == second
    model, optimizers = make()
    for x in batches():
        LOOPS[loop](model, optimizers, x.reshape(-1, 5))
    for name, value in model.state_dict().items():
        found = torch.tensor(first[name], dtype=torch.float64)
        assert torch.allclose(found, value, rtol=0, atol=1e-10), name


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", [ASP(), SSP(s=1)])
def test_optimizers_that_step_in_turn_train_under_asynchronous_strategies(strategy):
    first, second = values(run(trains, WORKERS, strategy, "in turn"))
    assert first == second
    assert torch.tensor(first["first.0.weight"]).isfinite().all()
    assert first["first.0.weight"] != make()[0].first[0].weight.tolist()


def bits(model, optimizers):
    """Everything that has to be the same on all members when they have stepped."""
    kept = [row for one in optimizers for row in one.state_dict()["state"].values()]
    tensors = [*model.state_dict().values(), *(value for row in kept for value in row.values())]
    return [one.tolist() for one in tensors if one is not None]


def falls_behind(rank, emit):
    model, optimizers = make(seed=rank)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=5, gamma=0.9)
    data = TensorDataset(batches().reshape(-1, 5).repeat(2, 1))
    states = {}
    with offbeat.join(model, optimizers, PartialAllReduce(limit=3, n_profile=2)) as session:
        for _ in session.epochs(12):
            for (x,) in session.batches(data, BATCH):
                before = session.step
                compute(0.01)
                together(model, optimizers, x)
                if session.step > before:
                    states[session.step] = bits(model, optimizers), float(optimizers[0].param_groups[0]["lr"])
                scheduler.step()  # by each worker's own count
    return states, bits(model, optimizers)


@pytest.mark.long
def test_a_worker_that_returns_has_the_state_and_the_rates_of_all_optimizers(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20@burst=8/100000", "OFFBEAT_RUN_LOG": str(log)}
    results = values(run(falls_behind, 3, env=env))
    assert any(1 in group.joining for group in groups_of(log))
    for (states, end), (others, other_end) in itertools.combinations(results, 2):
        assert all(states[step] == others[step] for step in states.keys() & others.keys())
        assert end == other_end


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", [PartialAllReduce(), SSP(), ServerBSP()])
def test_a_parameter_without_an_optimizer_is_refused_where_its_state_would_be_needed(strategy):
    model, (one, _) = make()
    with pytest.raises(OffbeatError, match=r"^second\.0\.weight requires a gradient and is in no optimizer"):
        offbeat.join(model, one, strategy)
    model.second.requires_grad_(False)
    with offbeat.join(model, one, strategy):
        pass


def trains_all_but_the_second(model, optimizer, x):
    """Takes a step; the gradients of parameters without an optimizer are recorded and reset, too."""
    model.zero_grad()
    model(x).square().mean().backward()
    gradients = [one.grad.tolist() for one in model.second.parameters()]
    optimizer.step()
    return gradients


def trains_with_one_optimizer(rank, emit, strategy):
    model, (optimizer, _) = make(seed=rank)
    with offbeat.join(model, optimizer, strategy) as session:
        gradients = [trains_all_but_the_second(model, optimizer, x[rank]) for x in batches()]
        session.refresh()
    return {name: value.tolist() for name, value in model.state_dict().items()}, gradients


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", [AllReduce(), Hybrid()])
def test_a_model_with_parameters_without_an_optimizer_trains_as_in_one_process(strategy):
    """These parameters are rank 0's on all workers and stay so; their gradients are averaged like others."""
    first, second = values(run(trains_with_one_optimizer, WORKERS, strategy))
    assert first == second
    model, (optimizer, _) = make()
    expected = [trains_all_but_the_second(model, optimizer, x.reshape(-1, 5)) for x in batches()]
    state, gradients = first
    for name, value in model.state_dict().items():
        assert torch.allclose(torch.tensor(state[name], dtype=torch.float64), value, rtol=0, atol=1e-10), name
    for found, in_one_process in zip(gradients, expected, strict=True):
        for one, other in zip(found, in_one_process, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-6)


def test_a_parameter_of_two_optimizers_is_refused_on_servers():
    model, optimizers = make()
    both = [*optimizers, torch.optim.SGD(model.first[0].parameters(), lr=0.1)]
    with pytest.raises(OffbeatError, match=r"first\.0\.weight is in several of the optimizers"):
        offbeat.join(model, both, SSP())


def test_joining_without_an_optimizer_is_refused():
    with pytest.raises(OffbeatError, match="expected one optimizer or several, got none"):
        offbeat.join(make()[0], [], AllReduce())


# By name -------------------------------------------------------------------------------------------------


def in_groups(*groups):
    """A model, and an optimizer with groups of these parameters, which has taken a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = dict(model.named_parameters())
    settings = [
        {"params": [named[name] for name in names], "weight_decay": 0.1 * number}
        for number, names in enumerate(groups)
    ]
    optimizer = torch.optim.SGD(settings, lr=0.1, momentum=0.9)
    model(torch.randn(2, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_checkpoint_of_reordered_groups_is_loaded_by_parameter_names():
    model, optimizer = in_groups(NAMES[:2], NAMES[2:])
    with offbeat.join(model, optimizer, AllReduce()) as session:
        state = session.state_dict()
    momentum = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    other, reordered = in_groups(NAMES[1::-1], NAMES[:1:-1])
    for one in other.parameters():
        reordered.state[one]["momentum_buffer"].zero_()
    with offbeat.join(other, reordered, AllReduce()) as session:
        session.load_state_dict(state)
    for name, parameter in other.named_parameters():
        assert torch.equal(reordered.state[parameter]["momentum_buffer"], momentum[name]), name
    assert [
        group["params"][0] is dict(other.named_parameters())[name]
        for group, name in zip(reordered.param_groups, ("0.bias", "1.bias"), strict=True)
    ] == [True, True]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([NAMES[:3], NAMES[3:]], r"in group 0, 1\.weight is new"),
        ([NAMES[2:], NAMES[:2]], r"in group 0, 0\.bias is missing"),
        ([NAMES], "it has 2 groups, the optimizer has 1"),
    ],
)
def test_a_checkpoint_of_groups_with_other_parameters_is_refused(groups, text):
    model, optimizer = in_groups(NAMES[:2], NAMES[2:])
    with offbeat.join(model, optimizer, AllReduce()) as session:
        state = session.state_dict()
    other, regrouped = in_groups(*groups)
    with (
        offbeat.join(other, regrouped, AllReduce()) as session,
        pytest.raises(OffbeatError, match=f"other parameters in its groups: {text}"),
    ):
        session.load_state_dict(state)


def test_a_checkpoint_of_another_number_of_optimizers_is_refused():
    model, optimizers = make()
    with offbeat.join(model, optimizers, AllReduce()) as session:
        state = session.state_dict()
    with (
        offbeat.join(model, optimizers[:1], AllReduce()) as session,
        pytest.raises(OffbeatError, match="the state has 2 optimizers and 1 were given to join"),
    ):
        session.load_state_dict(state)


def test_workers_are_described_by_names_whatever_the_order_within_groups():
    def described(*groups):
        model, optimizer = in_groups(*groups)
        return describe_training(TrainingState(model, [optimizer]))

    assert described(NAMES[:2], NAMES[2:]) == described(NAMES[1::-1], NAMES[:1:-1])
    assert described(NAMES[:2], NAMES[2:]) != described(NAMES[2:], NAMES[:2])
    assert described(NAMES[:2], NAMES[2:])[0] == "parameter 0.weight float32 [3, 3], in group 0"


def momentum_of_a_group_in_another_order(rank, emit):
    model, optimizer = in_groups(NAMES if rank == 0 else NAMES[::-1])
    for name, parameter in model.named_parameters():
        optimizer.state[parameter]["momentum_buffer"].fill_(NAMES.index(name) + 10 * rank)
    with offbeat.join(model, optimizer, AllReduce()):
        pass
    return [float(optimizer.state[one]["momentum_buffer"].mean()) for one in model.parameters()]


def test_a_state_is_copied_to_the_parameters_of_the_same_names():
    first, second = values(run(momentum_of_a_group_in_another_order, WORKERS))
    assert first == second == [0.0, 1.0, 2.0, 3.0]


def keeps_containers(rank, emit):
    model, optimizer = in_groups(NAMES)
    for number, parameter in enumerate(model.parameters()):
        value = torch.full((2,), float(number + 10 * rank))
        optimizer.state[parameter]["factors"] = [value, (value + 1, {"a": value + 2, 3: None}), []]
    with offbeat.join(model, optimizer, AllReduce()):
        pass
    return [str(optimizer.state[parameter]["factors"]) for parameter in model.parameters()]


def test_a_state_of_lists_tuples_and_dicts_is_copied_as_it_is():
    first, second = values(run(keeps_containers, WORKERS))
    assert first == second
    assert first[1] == "[tensor([1., 1.]), (tensor([2., 2.]), {'a': tensor([3., 3.]), 3: None}), []]"


def keeps_a_rate_of_its_own(rank, emit):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1 * (1 + rank)))
    with offbeat.join(model, optimizer, AllReduce()):
        pass


def test_rates_in_tensors_that_differ_are_refused():
    for one in run(keeps_a_rate_of_its_own, WORKERS):
        assert one.error_type == "WorkerError"
        assert "lr=0.1" in one.error
        assert "lr=0.2" in one.error
