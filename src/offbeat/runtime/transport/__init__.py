"""Connections between nodes: framing, handshake, sessions, shared memory, and the thread that serves them."""
