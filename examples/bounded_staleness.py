"""Training on a parameter server, where workers may drift apart as far as the strategy permits.

    torchrun --standalone --nproc-per-node 4 examples/bounded_staleness.py --strategy ssp:s=3

The strategies are ps-bsp, ssp, dtssp, asp and downpour; OFFBEAT_SERVERS=2 starts two servers. The loop is
the same under all of them. The optimizer has no momentum, which harms where gradients are some clocks old.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import offbeat
from offbeat.data import load_data_set
from offbeat.strategies import parse_strategy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ssp:s=3", help="name, or name:key=value,key=value")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_data_set("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # the servers take its steps

    with offbeat.join(model, optimizer, parse_strategy(options.strategy)) as session:
        for _ in session.epochs(options.epochs):
            for images, labels in session.batches(data.train, batch_size=16):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                session.observe(loss)  # the bound of dtssp follows it
                optimizer.step()  # pushes the gradients, and pulls parameters when these are too old

    images, labels = data.test.tensors  # after the session every worker has the servers' model
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"worker {session.worker}: test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
