"""Averaging gradients layer by layer, overlapped with the backward and the next forward pass."""
