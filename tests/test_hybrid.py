"""Layers that are averaged behind both passes: to the last bit what comes out if everything is waited for."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offbeat
from cluster import run, values
from offbeat.strategies import Hybrid

STEPS = 6


class Plain(nn.Module):
    """Convolutions, a normalisation with buffers, two dense layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 36, 300)
        self.head = nn.Linear(300, 3)

    def forward(self, x):
        return self.head(F.relu(self.hidden(F.relu(self.norm(self.conv(x))).flatten(1))))


class Tied(nn.Module):
    """The head's weight is the embedding's; a parameter of the whole model is used at the end."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        tokens = (x.flatten(1)[:, :5].abs() * 4).long() % 16
        return self.head(torch.tanh(self.mix(self.embedding(tokens)))).mean(1) * self.scale


class Borrowed(nn.Module):
    """A weight is used by a function, and never by the module that owns it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 16)
        self.store = nn.Linear(16, 3)

    def forward(self, x):
        return F.linear(torch.tanh(self.first(x.flatten(1))), self.store.weight, self.store.bias)


class Unused(nn.Module):
    """One layer that nobody ever uses, one that is used in every other step, and frozen ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 16)
        self.never = nn.Linear(7, 7)
        self.sometimes = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 3)
        self.count = 0

    def forward(self, x):
        self.count += 1
        x = self.frozen(torch.tanh(self.first(x.flatten(1))))
        return self.head(self.sometimes(x) if self.count % 2 else x)


class Twice(nn.Module):
    """Two forward passes of the inner layers a step."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(self.inner(x) * self.inner(x.flip(1)))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first = nn.Linear(128, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.shared = nn.Linear(32, 32)
        self.head = nn.Linear(32, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.head(checkpoint(self.shared, torch.tanh(x), use_reentrant=self.reentrant))


class Unhooked(Plain):
    """Called past the hooks of the whole model."""

    def __call__(self, x):
        return self.forward(x)


MODELS = {
    "plain": Plain,
    "tied": Tied,
    "borrowed": Borrowed,
    "unused": Unused,
    "twice": Twice,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "unhooked": Unhooked,
}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
}


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 2, 8, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def bits(model):
    return [(name, tensor.numpy().tobytes()) for name, tensor in sorted(model.state_dict().items())]


def made(model, optimizer="sgd"):
    torch.manual_seed(0)
    one = MODELS[model]()
    return one, OPTIMIZERS[optimizer]([p for p in one.parameters() if p.requires_grad])


def plain_step(session, model, optimizer, step):
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained(model, optimizer, strategy, step=plain_step, steps=STEPS):
    """The bits of a model after training, and how much of the last steps was put off."""
    one, stepper = made(model, optimizer)
    with offbeat.join(one, stepper, strategy) as session:
        put_off = 0
        for number in range(steps):
            step(session, one, stepper, number)
            round_ = session._synchronizer.averager._round
            put_off += round_ is not None and round_.settings is not None
    return bits(one), put_off


def same_bits(rank, say, model, optimizer, options):
    torch.set_num_threads(1)
    found = {
        overlap: trained(model, optimizer, Hybrid(overlap=overlap, **options))
        for overlap in ("none", "backward", "forward")
    }
    assert found["none"][1] == found["backward"][1] == 0
    assert found["forward"][1] == STEPS - 2, "all steps but the first two are put off"
    assert found["none"][0] == found["backward"][0] == found["forward"][0]
    return found["none"][0]


@pytest.mark.parametrize(
    ("model", "optimizer", "options"),
    [
        *((model, "sgd", {"policy": "conv_butterfly_fc_ring", "fuse_bytes": 2000}) for model in MODELS),
        ("plain", "adam", {"policy": "conv_butterfly_fc_ring", "fuse_bytes": 4000, "order": "fifo"}),
        ("plain", "foreach", {"policy": "table4", "fuse_bytes": 0}),
        ("tied", "adam", {"policy": "ring", "fuse_bytes": 10**9}),
    ],
)
def test_what_is_put_off_changes_no_bit(model, optimizer, options):
    first, second, third = values(run(same_bits, 3, model, optimizer, options))
    assert first == second == third
