"""The only layer with sockets, threads, processes, files and clocks."""
