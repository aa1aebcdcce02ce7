"""A small network learns handwritten digits; each epoch is validated while the next one trains.

    python examples/validation.py

The digits are part of scikit-learn. Training stops when the loss has not fallen for three epochs, with
exactly the weights of a run that waits for each validation.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import offbeat
from offbeat.data import load_data_set


def evaluate(model, part):
    """Metrics of a part: floats are averaged over its samples, integers are summed."""
    images, labels = part.tensors
    logits = model(images)
    right = int((logits.argmax(1) == labels).sum())
    return {"loss": F.cross_entropy(logits, labels), "right": right}


def train(model, optimizer, loader):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--backend", default="auto", help="auto, inline, thread, process or stream")
    parser.add_argument("--decision", default="rollback", help="sync, lag or rollback")
    options = parser.parse_args()

    data = load_data_set("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data.train, batch_size=32, shuffle=True)
    monitor = offbeat.EarlyStopping("loss", patience=3)
    with offbeat.Validator(
        model,
        evaluate,
        data.test,
        workers=2,
        backend=options.backend,
        monitor=monitor,
        decision=options.decision,
        restores=[optimizer],
    ) as validator:
        for _ in validator.epochs(options.epochs):
            train(model, optimizer, loader)
            validator.validate()
    for epoch, metrics in validator.history.items():
        accuracy = metrics["right"] / len(data.test)
        print(f"epoch {epoch + 1}: loss {metrics['loss']:.4f}, accuracy {accuracy:.2%}")
    print(f"best: epoch {monitor.best_epoch + 1}; validated {validator.backend}: {validator.reason}")
    model.load_state_dict(validator.best_state_dict())


if __name__ == "__main__":
    main()
