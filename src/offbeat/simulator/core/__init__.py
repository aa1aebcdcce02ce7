"""Simulated time, networks, compute times and faults."""
