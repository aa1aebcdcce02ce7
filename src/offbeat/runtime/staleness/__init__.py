"""Training on the parameter server with bounded staleness."""
