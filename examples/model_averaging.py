"""Partial reduce: each worker trains its own model, and the first ones that are ready average theirs.

    offbeat run --slow 1:5 --nproc-per-node 4 examples/model_averaging.py

With --slow 1:5 the computation of worker 1 takes five times as long. It takes fewer steps, and no other
worker waits for it. When all have finished, all models are averaged once.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import offbeat
from offbeat.data import load_data_set
from offbeat.strategies import PReduce


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_data_set("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # the rate of one worker

    with offbeat.join(model, optimizer, PReduce(P=2)) as session:
        for _ in session.epochs(options.epochs):
            for images, labels in session.batches(data.train, batch_size=16):  # assigned as they are needed
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()  # and averages the model with those of the group
    steps = session.step

    images, labels = data.test.tensors  # after the session every worker has the mean of all models
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"worker {session.worker}: {steps} steps, test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
