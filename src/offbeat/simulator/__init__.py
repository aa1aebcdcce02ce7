"""The same policies under a virtual clock: clusters that are not there, with slow, dying and cut-off nodes.

Nothing here opens a socket, starts a thread, or reads a real clock; chance comes from seeds, so that a run
can be repeated exactly.
"""
