"""Updates as a user would write them, for servers to import."""

import numpy as np


class Picky:
    """Adds what is pushed, but changes rows before it looks whether it can."""

    states = ("count",)

    def apply(self, values, states, pushed):
        states["count"] += 1
        values += pushed
        if (values < 0).any():
            raise ArithmeticError("what is below zero")


class Meddler:
    """Changes what was pushed."""

    states = ()

    def apply(self, values, states, pushed):
        pushed += 1
        values += pushed


class Clipped:
    """Adds what is pushed, and keeps values within a limit."""

    states = ()

    def __init__(self, limit):
        self.limit = limit

    def apply(self, values, states, pushed):
        np.clip(values + pushed, -self.limit, self.limit, out=values)
