"""The command line: what each command checks, runs and shows."""
