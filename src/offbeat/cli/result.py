"""The result of a benchmark: plain data, its validation, its table and its JSON.

A result describes the machine without identifying it: it contains no host name, user name or path.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.text import Text

from offbeat.cli import output
from offbeat.cli.entry import file_errors
from offbeat.runtime.control.environment import available_cores

Kind = Literal["real", "timed", "simulated"]
UNITS = (
    *("s", "ms", "us", "bytes", "kb", "mb", "gb", "bit", "mbit", "per_s", "ratio", "share", "percent"),
    *("count", "steps", "rounds", "epochs", "workers", "samples", "accuracy", "loss"),
    *("slowdown", "kept", "saving", "lost", "doubled"),  # a factor; shares; counts
    *("alarms", "missed", "recoveries"),  # counts
    *("to_tcp",),  # a factor
)
_SHOWN_ROWS = 40
_NAME = re.compile(r"[a-z][A-Za-z0-9_]*(?<!_)")
_UNIT = re.compile(rf"(^|_)({'|'.join(UNITS)})(_|$)")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run of a benchmark.

    Attributes:
        name: of the benchmark.
        command: the command line that repeats the run.
        kind: `real` computed gradients, `timed` waited for measured times instead, `simulated` ran no
            workers.
        seed: of all random numbers.
        figures: the findings: finite plain numbers. Each name contains its unit (see `UNITS`), which a
            qualifier may follow (`step_s_p99`, `ratio_to_bound_35KB`).
        rows: the underlying measurements, each a flat object of plain values; numbers must be finite.
        machine: where it ran (see `machine`).
        duration_s: how long the run took; None where it was not measured.

    Raises:
        ValueError: a figure or row is not as described.
    """

    name: str
    command: str
    kind: Kind
    seed: int | None
    figures: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    duration_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.figures.items():
            if not (_NAME.fullmatch(name) and _UNIT.search(name)):
                raise ValueError(f"the figure {name!r} must name its unit, one of {', '.join(UNITS)}")
            if not _is_number(value):
                raise ValueError(f"the figure {name!r} must be a finite plain number, not {value!r}")
        for at, row in enumerate(self.rows):
            for name, value in row.items():
                if not (value is None or isinstance(value, str | bool) or _is_number(value)):
                    raise ValueError(
                        f"{name!r} in row {at} must be text, a boolean, None or a finite plain number, "
                        f"not {value!r}"
                    )

    def to_json(self) -> bytes:
        """Return the result as the JSON object of `--json`, indented, with a final line feed."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def write(self, path: str | os.PathLike[str] | None) -> None:
        """Write the JSON object to `path` atomically; nothing without a path.

        Raises:
            OffbeatError: `path` cannot be written.
        """
        if path is None:
            return
        target = Path(path)
        data = self.to_json()
        with file_errors("write", target):
            if _is_stream(target):
                with open(target, "ab") as file:
                    file.write(data)
                return
            with _temporary_next_to(target) as (file_descriptor, temporary):
                with open(file_descriptor, "wb") as file:
                    file.write(data)
                temporary.replace(target.resolve())

    def print(self) -> None:
        """Print the results and the first 40 rows as tables, then the kind, seed and machine in one line.

        Raises:
            OutputError: the output cannot be written.
        """
        shown: list[output.TextTable | str | Text] = []
        if self.rows:
            shown.append(self._table_of_rows())
            if len(self.rows) > _SHOWN_ROWS:
                shown.append(Text(f"and {len(self.rows) - _SHOWN_ROWS:,} more rows", style="dim"))
        if self.figures:
            figures = [(name, _format_value(value)) for name, value in self.figures.items()]
            shown.append(output.TextTable(title="" if self.rows else self.name, rows=figures))
        where = f"{self.machine.get('cores', '?')} cores, {self.machine.get('cpu', '?')}"
        took = "" if self.duration_s is None else f", {self.duration_s:.0f} s"
        output.print_output(*shown, Text(f"{self.kind}, seed {self.seed}, {where}{took}", style="dim"))

    def _table_of_rows(self) -> output.TextTable:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        words = {
            at for at, name in enumerate(names) if any(isinstance(row.get(name), str) for row in self.rows)
        }
        return output.TextTable(
            title=self.name,
            headers=tuple(names),
            rows=[tuple(_format_value(row.get(name)) for name in names) for row in self.rows[:_SHOWN_ROWS]],
            text_columns=frozenset(words),
        )


def figure_part(words: str) -> str:
    """Return a text, such as a strategy with its options, as a part of a figure's name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", words).strip("_")


def machine(**more: str | float | None) -> dict[str, Any]:
    """Describe this machine without identifying it.

    Args:
        more: further properties, such as `congestion_control` inside the benchmark's own hosts.

    Returns:
        cores available to this process, cpu, memory_gb, accelerator (None without one), kernel, python,
        torch, congestion_control, and `more`.
    """
    import torch  # a local import: it takes two seconds, and some workers do not need it

    described: dict[str, Any] = {
        "cores": available_cores(),
        "cpu": _cpu(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": f"{platform.system()} {'.'.join(re.findall(r'[0-9]+', platform.release())[:2])}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "congestion_control": _congestion_control(),
    }
    return described | more


def check_writable(path: str | os.PathLike[str] | None) -> None:
    """Check that `Result.write` will be able to write `path`; for use before a long benchmark.

    It neither changes an existing file nor creates one.

    Raises:
        OffbeatError: `path` cannot be written.
    """
    if path is None:
        return
    target = Path(path)
    with file_errors("write", target):
        if target.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, "it is not writable")
        if _is_stream(target):
            return
        with _temporary_next_to(target) as (file_descriptor, _):
            os.close(file_descriptor)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of `values` that at least `percent` % of them do not exceed (nearest rank).

    The result is always one of the values: the p99 of fewer than 100 values is therefore their maximum.

    Raises:
        ValueError: no values, or a percentage not in (0, 100].
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, not {percent}")
    rank = math.ceil(percent * len(values) / 100 - 1e-9)  # 64.4 % of 250 is a little above 161 in floats
    return sorted(values)[rank - 1]


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the p50 and p99 of `values` as figures `name`_p50 and `name`_p99 (see `percentile`)."""
    return {f"{name}_p{p}": float(percentile(values, p)) for p in (50, 99)}


def _is_stream(path: Path) -> bool:
    """Return whether `path` must be written in place: a pipe, a terminal, /dev/stdout."""
    return path.is_relative_to("/dev") or (path.exists() and not path.is_file())


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # nor numpy's kinds


def _format_value(value: object) -> str:
    if value is None:
        return output.NO_VALUE
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


@contextlib.contextmanager
def _temporary_next_to(target: Path) -> Iterator[tuple[int, Path]]:
    """Create an empty temporary file next to `target`, with its mode; remove it at the end if it is left."""
    file_descriptor, name = tempfile.mkstemp(prefix=".offbeat-", suffix=".json", dir=target.resolve().parent)
    try:
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(file_descriptor, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask)
        yield file_descriptor, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _congestion_control() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return None
