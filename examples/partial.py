"""Partial all-reduce: training goes on at the pace of the workers that keep up.

    offbeat run --slow 1:5 --nproc-per-node 4 examples/partial.py

With --slow 1:5 the computation of worker 1 takes five times as long, as on a shared or failing machine.
After some ten slow steps the worker is excluded, and the others take its samples; once it is fast again, it
is readmitted. Each epoch's line names the members of the group at its end.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import offbeat
from offbeat.data import load_data_set
from offbeat.strategies import PartialAllReduce


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_data_set("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with offbeat.join(model, optimizer, PartialAllReduce()) as session:
        for epoch in session.epochs(options.epochs):
            for images, labels in session.batches(data.train, batch_size=16):  # assigned as they are needed
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()  # the mean over the members
                optimizer.step()
            if session.is_leader:
                members = ", ".join(map(str, session.members))
                print(f"epoch {epoch + 1}: workers {members} of {session.world}", flush=True)

    images, labels = data.test.tensors  # after the session every worker has the members' model
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"worker {session.worker}: test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
