"""Applications built on the parameter server."""
