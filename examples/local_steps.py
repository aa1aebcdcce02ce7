"""Local steps (DiLoCo): workers train by themselves, and an outer optimizer steps from the mean of models.

    offbeat run --slow 1:5 --nproc-per-node 4 examples/local_steps.py

Models are averaged every 16 steps of the fastest worker, while all train on. With --slow 1:5 the computation
of worker 1 takes five times as long: it makes a fifth of the steps, and no other worker waits for it.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import offbeat
from offbeat.data import load_data_set
from offbeat.strategies import DiLoCo


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_data_set("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # the inner one, of each worker
    images, labels = data.test.tensors

    with offbeat.join(model, optimizer, DiLoCo(every=16)) as session:
        for epoch in session.epochs(options.epochs):
            for inputs, targets in session.batches(data.train, batch_size=16):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            if session.is_leader:  # after an epoch every worker has the mean of all models
                accuracy = (model(images).argmax(1) == labels).float().mean().item()
                print(f"epoch {epoch}: test accuracy {accuracy:.2%}", flush=True)
    print(f"worker {session.worker}: {session.step} steps", flush=True)


if __name__ == "__main__":
    main()
