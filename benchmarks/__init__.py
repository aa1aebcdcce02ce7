"""The benchmarks, each runnable by name with `python -m benchmarks NAME`."""
