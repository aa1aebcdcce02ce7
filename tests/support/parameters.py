"""Parameters of a model in one vector."""

import torch


def flat(model):
    return torch.cat([p.detach().reshape(-1).double() for p in [*model.parameters(), *model.buffers()]])
