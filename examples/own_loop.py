"""An existing loop with its own DataLoader, gradient clipping, learning rate schedule and checkpoints.

    torchrun --standalone --nproc-per-node 4 examples/own_loop.py --checkpoint checkpoint.pt

With more --epochs, a second run continues from the checkpoint. The workers' gradients are averaged before
`backward()` returns, so clipping applies to the same gradients as in one process with the large batch.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import offbeat
from offbeat.data import load_data_set
from offbeat.strategies import AllReduce


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_data_set("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    with offbeat.join(model, optimizer, AllReduce()) as session:
        sampler = DistributedSampler(data.train, num_replicas=session.world, rank=session.worker)
        loader = DataLoader(data.train, batch_size=32, sampler=sampler)
        first_epoch = 0
        if options.checkpoint and options.checkpoint.exists():  # every worker reads it
            saved = torch.load(options.checkpoint)
            session.load_state_dict(saved["session"])
            schedule.load_state_dict(saved["schedule"])
            first_epoch = saved["epochs_done"]

        for epoch in range(first_epoch, options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            schedule.step()

            if session.is_leader:
                with torch.no_grad():
                    images, labels = data.test.tensors
                    test_loss = F.cross_entropy(model(images), labels).item()
                print(f"epoch {epoch + 1}: test loss {test_loss:.6f}", flush=True)
                if options.checkpoint:
                    state = {"session": session.state_dict(), "schedule": schedule.state_dict()}
                    torch.save(state | {"epochs_done": epoch + 1}, options.checkpoint)


if __name__ == "__main__":
    main()
