"""Which workers take part in a job and in its groups."""
