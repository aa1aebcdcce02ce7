"""CHOCO-Gossip and CHOCO-SGD of all workers in one process, in float64, straight from the formulas."""

import numpy as np
import torch

from offbeat.numerics.compressors.registry import parse_encoding


def ring(workers):
    """The mixing matrix of a ring, 1/3 for each neighbour."""
    matrix = np.zeros((workers, workers))
    for place in range(workers):
        for other in {(place - 1) % workers, place, (place + 1) % workers}:
            matrix[place, other] = 1 / min(workers, 3)
    return matrix


class Choco:
    """Models `x`, public copies `x_hat` and sums `s`, a row for each worker.

    `gradient(row, worker)` returns a worker's gradient; without it, this is CHOCO-Gossip.
    """

    def __init__(self, x, matrix, compress, *, gamma, shapes=None, eta=0.0, gradient=None, seed=0):
        self.x, self.matrix, self.gamma, self.eta, self.gradient = x.copy(), matrix, gamma, eta, gradient
        self.x_hat, self.s, self.number = np.zeros_like(x), np.zeros_like(x), 0
        shapes = shapes or [torch.Size((1, x.shape[1]))]
        self.encoders = [parse_encoding(compress).encoder(shapes, seed + row) for row in range(len(x))]

    def step(self):
        """Make one round on all workers."""
        if self.gradient is not None:
            gradients = np.stack([self.gradient(row, worker) for worker, row in enumerate(self.x)])
            self.x -= self.eta * gradients
            self.mean_gradient = gradients.mean(0)
        q = np.stack([self.decoded(i) for i in range(len(self.x))])
        self.x_hat += q
        self.s += self.matrix @ q
        self.x += self.gamma * (self.s - self.x_hat)
        self.number += 1

    def decoded(self, worker):
        """What the code of a worker's difference stands for."""
        difference = torch.from_numpy(self.x[worker] - self.x_hat[worker])
        out = torch.full_like(difference, torch.nan)
        self.encoders[worker].decode(self.encoders[worker].encode(difference, self.number), out)
        return out.numpy()

    def distance(self):
        """The consensus distance: of the models from their mean, squared and summed."""
        return float(((self.x - self.x.mean(0)) ** 2).sum())
