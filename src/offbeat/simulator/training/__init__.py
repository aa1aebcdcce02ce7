"""Simulated workers that average gradients in groups."""
