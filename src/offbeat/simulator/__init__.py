"""The policies under a virtual clock: simulated clusters with slow, dying and partitioned nodes.

Nothing here opens a socket, starts a thread, or reads a real clock; all randomness is seeded, so that a run
can be repeated exactly.
"""
