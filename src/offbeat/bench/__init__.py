"""The benchmarks, each runnable by name with `offbeat bench NAME`."""
