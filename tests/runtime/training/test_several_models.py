"""Several models and optimizers in one session, as of a GAN: as one process trains them."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import (
    SSP,
    AllReduce,
    DiLoCo,
    Hybrid,
    LocalSGD,
    PartialAllReduce,
)
from support.parameters import flat
from support.processes import run, values

WORKERS, BATCH, STEPS, EPOCHS = 2, 8, 6, 2
SAMPLES = WORKERS * BATCH * STEPS
loss = nn.functional.binary_cross_entropy_with_logits


class Networks:
    """A generator and a discriminator, each with an optimizer, which step in turn."""

    def __init__(self):
        torch.manual_seed(0)
        layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.generator = nn.Sequential(*layers).double()
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.models = [self.generator, self.discriminator]
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in self.models
        ]

    def train(self, real, noise):
        ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        step_generator, step_discriminator = self.optimizers
        step_discriminator.zero_grad()
        loss(self.discriminator(real), ones).backward()
        loss(self.discriminator(self.generator(noise).detach()), zeros).backward()
        step_discriminator.step()
        step_generator.zero_grad()
        loss(self.discriminator(self.generator(noise)), ones).backward()
        step_generator.step()

    def parameters(self):
        return torch.cat([flat(model) for model in self.models])


def data():
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    return TensorDataset(torch.randn(SAMPLES, 3, **draw), torch.randn(SAMPLES, 4, **draw))


def train(rank, emit, strategy, as_module):
    networks = Networks()
    for norm in networks.generator.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.eval()  # its statistics are each worker's own
    models = nn.ModuleList(networks.models) if as_module else networks.models
    with offbeat.join(models, networks.optimizers, strategy) as session:
        for _ in session.epochs(EPOCHS):
            for real, noise in session.batches(data(), BATCH, shuffle=False):
                networks.train(real, noise)
        steps, state = session.step, session.state_dict()
    assert set(state["model"]) == {*nn.ModuleList(networks.models).state_dict()}
    return networks.parameters().tolist(), steps


def train_alone():
    networks = Networks()
    networks.generator[1].eval()
    for _ in range(EPOCHS):
        for real, noise in zip(*(tensor.split(WORKERS * BATCH) for tensor in data().tensors), strict=True):
            networks.train(real, noise)
    return networks.parameters()


@pytest.mark.parametrize("as_module", [False, True], ids=["list", "ModuleList"])
def test_a_gan_in_lockstep_is_trained_as_by_one_process(as_module):
    expected = train_alone()
    for found, steps in values(run(train, WORKERS, AllReduce(), as_module)):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-12)
        assert steps == EPOCHS * STEPS  # both optimizers step in each


@pytest.mark.parametrize(
    "strategy", [PartialAllReduce(), LocalSGD(every=3), DiLoCo(every=3)], ids=lambda one: type(one).__name__
)
def test_with_other_strategies_workers_end_with_equal_models(strategy):
    first, *others = [found for found, _ in values(run(train, WORKERS, strategy, False))]
    assert all(found == first for found in others)
    assert not torch.equal(torch.tensor(first, dtype=torch.float64), Networks().parameters())


@pytest.mark.parametrize("strategy", [Hybrid(), SSP(s=2)], ids=lambda one: type(one).__name__)
def test_a_strategy_that_trains_one_model_refuses_several(strategy):
    networks = Networks()
    with pytest.raises(OffbeatError, match=rf"{type(strategy).__name__} trains one model, got 2: join a"):
        offbeat.join(networks.models, networks.optimizers, strategy)


@pytest.mark.parametrize(
    ("models", "got"), [([], "an empty list"), ((), "an empty list"), ([1], "a list of int"), ("ab", "'ab'")]
)
def test_what_is_no_model_is_refused(models, got):
    with pytest.raises(OffbeatError, match=f"expected a model .* or a list of them, got {got}"):
        offbeat.join(models, Networks().optimizers, AllReduce())


def test_a_model_twice_is_refused():
    networks = Networks()
    with pytest.raises(OffbeatError, match="a list of different models, got one of them twice"):
        offbeat.join([networks.generator] * 2, networks.optimizers, AllReduce())


class Summed(nn.ModuleList):
    def forward(self, x):
        return sum(layer(x) for layer in self)


def test_a_module_list_with_a_forward_pass_is_one_model():
    model = Summed([nn.Linear(2, 1), nn.Linear(2, 1)])
    with offbeat.join(model, torch.optim.SGD(model.parameters(), lr=0.1), Hybrid()) as session:
        model(torch.ones(3, 2)).sum().backward()
    assert session.worker == 0
