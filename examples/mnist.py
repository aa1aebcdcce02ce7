"""A convolutional network on MNIST, trained by as many workers as the launcher starts.

    torchrun --standalone --nproc-per-node 4 examples/mnist.py

MNIST is read from ~/.cache/offbeat (--download fetches it). `--data digits` needs no download: it uses the
small handwritten digits of scikit-learn. With plain `python` it is ordinary training in one process.
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset

import offbeat
from offbeat.data import DataError, load_data_set
from offbeat.strategies import AllReduce


def network(height, width):
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def evaluate(model, part):
    """Count the right answers in a part of the test set; parts are evaluated by workers that have time."""
    images, labels = part.tensors
    right = [model(x).argmax(1) == y for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return {"right": int(torch.cat(right).sum())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=["mnist", "digits"], default="mnist")
    parser.add_argument("--download", action="store_true", help="download MNIST if it is missing")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, help="use at most this many training samples")
    options = parser.parse_args()
    try:
        data = load_data_set(options.data, download=options.download)
    except DataError as error:
        sys.exit(f"{error} (or use --data digits)")
    train_set = Subset(data.train, range(min(options.limit or len(data.train), len(data.train))))

    torch.manual_seed(0)
    model = network(*data.sample_shape[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with offbeat.join(model, optimizer, AllReduce()) as session:  # averages gradients over all workers
        for _ in session.epochs(options.epochs):
            for images, labels in session.batches(train_set, batch_size=32):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
            session.validate(evaluate, data.test)  # while the next epoch trains
    if session.is_leader:
        for epoch, metrics in session.validator.history.items():
            print(f"epoch {epoch + 1}: test accuracy {metrics['right'] / len(data.test):.2%}")


if __name__ == "__main__":
    main()
