"""What is computed on tensors and in which order: pure, no communication, no clocks."""
