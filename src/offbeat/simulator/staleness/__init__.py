"""Simulated workers that train on a parameter server with bounded staleness."""
