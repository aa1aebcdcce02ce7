"""Averaging gradients of a group at the end of the backward pass."""
