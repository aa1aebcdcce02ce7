"""offbeat: train PyTorch models on many workers without keeping to the beat of the slowest one."""
