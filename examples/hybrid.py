"""Hybrid all-reduce: a layer's gradients are awaited when the next forward pass comes to the layer.

    torchrun --standalone --nproc-per-node 4 examples/hybrid.py

The loop is that of one process. After `optimizer.step()` a layer has its new parameters once it is used;
`session.refresh()` brings all of them up to date, for code that reads them otherwise.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import offbeat
from offbeat.data import load_data_set
from offbeat.strategies import Hybrid


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_data_set("digits")
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with offbeat.join(model, optimizer, Hybrid()) as session:
        for epoch in session.epochs(options.epochs):
            for images, labels in session.batches(data.train, batch_size=16):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()  # returns while gradients are under way
                optimizer.step()  # each layer steps when its mean is there
            session.refresh()
            if session.is_leader:
                norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm()
                images, labels = data.test.tensors
                with torch.no_grad():
                    accuracy = (model(images).argmax(1) == labels).float().mean().item()
                print(f"epoch {epoch + 1}: norm {norm:.3f}, test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
