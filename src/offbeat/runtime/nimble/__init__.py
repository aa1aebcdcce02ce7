"""Forward passes of fixed shape, scheduled ahead of time: by threads on the CPU, as a graph on a GPU."""
