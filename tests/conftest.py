"""One thread a process computes in all tests: several run at a time, and their processes share the cores.

Threads of torch that wait for each other burn the cores on which the others run.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and numpy are imported
