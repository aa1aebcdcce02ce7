"""Compressors of vectors that are summed over the members of a group."""
