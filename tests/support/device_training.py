"""A training that is the same on every device: its loop, its model, and the bits that it ends with."""

import hashlib
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat

CLASSES, SAMPLES, BATCH, EPOCHS = 4, 96, 4, 3


class Net(nn.Module):
    """Convolutions, batch norm with its buffers, a parameter that is used twice and one of another layout."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.features(x).mean((2, 3))
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


def dataset():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 1, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def digest(model, optimizer):
    """The bits of all that has to be the same on all members."""
    tensors = [*model.state_dict().values()]
    tensors += [
        value
        for row in optimizer.state_dict()["state"].values()
        for value in row.values()
        if isinstance(value, torch.Tensor)
    ]
    return hashlib.sha256(b"".join(t.contiguous().cpu().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def train(rank, emit, device, strategy, epochs=EPOCHS, before_step=None):
    """The state at the end as a dictionary of lists, and its digest."""
    torch.manual_seed(rank)
    model = Net().double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(epochs):
            for x, y in session.batches(dataset(), BATCH):
                if before_step is not None:
                    before_step(session)
                inputs, labels = x.to(device), y.to(device)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return state, digest(model, optimizer)


def kill_in_step(step, victim):
    """Lets this process be killed in the middle of its training, if it is the victim."""

    def before_step(session):
        if session.step == step and session.worker == victim:
            os.kill(os.getpid(), 9)

    return before_step
