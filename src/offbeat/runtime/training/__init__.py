"""What every synchronizer needs of a training loop: its model, hooks, timing, copies of its state."""
