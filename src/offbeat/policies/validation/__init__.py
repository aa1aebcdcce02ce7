"""When a snapshot is evaluated, by which worker, and what follows from its metrics."""
