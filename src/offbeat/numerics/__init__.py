"""Computations on tensors and their plans: pure functions, without communication or clocks."""
