"""A training script for the ConfigMap of the manifests; it counts how often each sample is used.

It uses nothing of the tests. Next to it lie a file with the strategy, and one that the test has locked: a
gate in the middle of the training. What the worker holds at the end is one line of JSON.
"""

import fcntl
import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.strategies import parse_strategy

SAMPLES, BATCH, EPOCHS, GATE_STEP = 101, 4, 10, 40
GATE, STRATEGY = (Path(__file__).with_name(name) for name in ("gate", "strategy"))


class Model(nn.Module):
    """A number for each sample, whose gradient adds one when the sample is used, and a layer that learns."""

    def __init__(self):
        super().__init__()
        self.uses_N = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.layer = nn.Linear(1, 8)

    def forward(self, numbers):
        outputs = self.layer(numbers[:, None] / SAMPLES)
        return outputs.square().mean() - self.uses_N[numbers].mean()


def digest(model, optimizer):
    tensors = [*model.state_dict().values()]
    tensors += [row["momentum_buffer"] for row in optimizer.state.values() if "momentum_buffer" in row]
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


def main():
    model = Model()
    counts = {"params": [model.uses_N], "lr": 1.0, "momentum": 0.0}
    optimizer = torch.optim.SGD([counts, {"params": model.layer.parameters(), "lr": 0.01, "momentum": 0.9}])
    has_passed, used = False, {}
    with offbeat.join(model, optimizer, parse_strategy(STRATEGY.read_text())) as session:
        for epoch in session.epochs(EPOCHS):
            for (numbers,) in session.batches(TensorDataset(torch.arange(SAMPLES)), BATCH):
                if session.step >= GATE_STEP and not has_passed:
                    has_passed = True
                    with GATE.open() as lock:
                        fcntl.flock(lock, fcntl.LOCK_SH)
                optimizer.zero_grad()
                model(numbers).backward()
                grad = model.uses_N.grad
                if grad is not None and grad.any():  # samples count alike, however many a round has
                    grad.div_(grad.abs()[grad != 0].min()).round_()
                optimizer.step()
                used.setdefault(epoch, []).extend(numbers.tolist())
    result = {"worker": session.worker, "uses": model.uses_N.tolist(), "digest": digest(model, optimizer)}
    result["used"] = used
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
