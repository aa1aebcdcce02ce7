"""The coordinator's process, and what connects a worker with it: rendezvous, channel, client."""
