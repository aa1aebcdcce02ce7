"""Modules with branches, in evaluation mode; each is at the top level, so that it can be pickled."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Branches(nn.Module):
    """Branches of different length over one input, joined like an Inception cell."""

    def __init__(self, channels=4):
        super().__init__()
        self.one = nn.Conv2d(channels, 4, 1)
        self.three = nn.Sequential(
            nn.Conv2d(channels, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3, padding=1)
        )
        self.pool = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), nn.Conv2d(channels, 4, 1))
        self.norm = nn.BatchNorm2d(12)
        self.classify = nn.Linear(12, 3)

    def forward(self, x):
        joined = torch.cat([self.one(x), self.three(x), self.pool(x)], 1)
        return self.classify(F.relu(self.norm(joined), inplace=True).mean((2, 3)))


class Residual(nn.Module):
    """Adds in place to what another branch reads, too."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        skip = y * 2
        y += x
        y.relu_()
        return y + skip, y.sum()


class Written(nn.Module):
    """Writes in place to memory that others have read before, read later, and see through views."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        before = y.exp()
        same = self.dropout(y)  # in evaluation mode the same memory
        same.relu_()
        after = y.exp()
        view = y.view(-1)
        view[:6] = 1
        top, bottom = y.chunk(2)
        bottom += top
        return {"before": before, "after": after, "y": self.second(y), "top": top * 2}


class Shared(nn.Module):
    """Calls one module twice, reads buffers, and has outputs in a structure, with an input and a number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.tied = self.layer
        self.register_buffer("scale", torch.linspace(1, 2, 6))
        self.register_buffer("shift", torch.ones(6), persistent=False)
        self.plain = torch.full((6,), 0.5)

    def forward(self, x):
        one, other = self.layer(x) * self.scale, self.tied(x.flip(0)) + self.shift
        return [one, (other, one @ other.T)], x, 3, torch.arange(6) * self.plain


class TwoInputs(nn.Module):
    """Attends from one input to another of another dtype."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.query = nn.Linear(6, 8)

    def forward(self, x, tokens):
        keys = self.embed(tokens)
        found, weights = self.attend(self.query(x)[None], keys[None], keys[None])
        return found.squeeze(0), weights


def images(seed=0):
    return (torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed)),)


def rows(seed=0):
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)),)


def rows_and_tokens(seed=0):
    return (*rows(seed), torch.arange(seed, seed + 5) % 10)


MODELS = {
    "branches": (Branches, images),
    "residual": (Residual, images),
    "written": (Written, rows),
    "shared": (Shared, rows),
    "two inputs": (TwoInputs, rows_and_tokens),
}


def a_model(name):
    """A model in evaluation mode, whose statistics are not the initial ones, and a function of its inputs."""
    kind, inputs = MODELS[name]
    torch.manual_seed(0)
    model = kind()
    with torch.no_grad():
        model.train()(*inputs(7))
    return model.eval(), inputs
