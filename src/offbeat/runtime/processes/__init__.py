"""Child processes, threads, locks and signals of this process. Imports nothing of offbeat but its errors."""
