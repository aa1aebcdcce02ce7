"""Validating a snapshot of an epoch while the next epoch trains."""
