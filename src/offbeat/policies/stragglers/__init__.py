"""Which workers are slow, and whether leaving them out pays."""
