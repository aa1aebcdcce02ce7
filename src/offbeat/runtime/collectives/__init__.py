"""Sums of tensors over the members of a group: the interface and its implementations."""
