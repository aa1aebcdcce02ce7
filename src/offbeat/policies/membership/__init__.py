"""Who takes part in a job and in its groups."""
