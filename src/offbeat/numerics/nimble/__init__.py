"""Which operations of a computation share a stream, and where streams wait for one another."""
