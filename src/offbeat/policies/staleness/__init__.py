"""How far workers may be apart, and what their caches may serve."""
