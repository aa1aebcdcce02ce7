"""Members that sum their gradients with momentum correction, in one process."""

import torch

from offbeat.numerics.compressors.momentum import MomentumCorrection
from support.compression import sum_compressed


class MomentumGroup:
    """Members that step together, as a job's workers do with one bucket, in float64.

    Args:
        method: of compression.
        shapes: of the tensors in a vector.
        settings: of SGD.
        weights: of the members.
        clip: see `MomentumCorrecting`.
        masks: whether the momentum of what is sent is dropped, where the method says so.

    Attributes:
        residuals: by member, v as one vector.
        sent_bytes: of one member's requests in the last round.
    """

    def __init__(self, method, shapes, settings, *, weights, clip=None, masks=True):
        self.compressor, self.settings, self.shapes = method.compressor(shapes, seed=0), settings, shapes
        self.sizes = [shape.numel() for shape in shapes]
        self.masks, self.weights = masks, weights
        self.corrections = [MomentumCorrection(clip) for _ in weights]
        self.residuals = [torch.zeros(sum(self.sizes), dtype=torch.float64) for _ in weights]
        self.states, self.members = [], ()

    def momenta(self):
        """By member, the momentum as one vector."""
        return [
            torch.cat([one._momenta[entry] for entry in range(len(self.shapes))]) for one in self.corrections
        ]

    def round(self, gradients, parameters, members=None):
        """The mean that these members get, by default all; each gives its gradients as one vector."""
        members = range(len(self.weights)) if members is None else members
        if list(members) != list(self.members):
            self.members, self.states = list(members), [None] * len(members)
        written = [self._write(m, g, parameters) for m, g in zip(members, gradients, strict=True)]
        masked = self.compressor.masks_momentum(self.states[0], members=len(members))
        outs, ended, self.sent_bytes = sum_compressed(self.compressor, written, self.states)
        assert all(torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs)
        for member, vector, one in zip(members, written, ended, strict=True):
            after = one.residual / self.weights[member]
            for entry, is_masked in enumerate(masked):
                self.corrections[member].advance(
                    entry,
                    vector.split(self.sizes)[entry],
                    weight=self.weights[member],
                    residual=self.residuals[member].split(self.sizes)[entry],
                    next_residual=after.split(self.sizes)[entry],
                    is_masked=is_masked and self.masks,
                )
            self.residuals[member] = after
        self.states = [one.state for one in ended]
        return outs[0] / sum(self.weights[member] for member in members)

    def _write(self, member, gradient, parameters):
        into = torch.empty_like(self.residuals[member])
        vectors = (gradient, parameters, into, self.residuals[member])
        for entry, pieces in enumerate(zip(*(vector.split(self.sizes) for vector in vectors), strict=True)):
            gradient_piece, parameter, view, residual = (piece.view(self.shapes[entry]) for piece in pieces)
            self.corrections[member].write(
                entry,
                gradient_piece,
                parameter,
                self.settings,
                view,
                scale=self.weights[member],
                residual=residual.flatten(),
                members=len(self.members),
            )
        return into
