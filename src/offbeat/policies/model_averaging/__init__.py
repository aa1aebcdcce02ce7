"""Workers that own their models: which of them average, and when."""
