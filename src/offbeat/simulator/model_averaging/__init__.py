"""Simulated jobs whose workers own their models and average them in groups."""
