"""An operation whose backward pass fails."""

import torch


class Fails(torch.autograd.Function):
    """Makes a backward pass fail when it reaches the operation's input."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("on purpose")
