"""`python -m benchmarks NAME [--json FILE]`, from a checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.commands import bench
from offbeat.cli import entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; return the exit code.

    Args:
        arguments: without the program's name; None for the process's own.
    """
    return entry.run_app(bench, "python -m benchmarks", arguments)


if __name__ == "__main__":
    sys.exit(main())
