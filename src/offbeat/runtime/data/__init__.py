"""Which samples a worker trains on: equal shards, or batches that the coordinator assigns."""
