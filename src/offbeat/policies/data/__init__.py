"""Which worker gets which samples of an epoch."""
