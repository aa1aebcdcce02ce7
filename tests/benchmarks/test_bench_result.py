"""Promises of `--json`, and the figures of benchmarks."""

from __future__ import annotations

import getpass
import json
import math
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.commands import keep_results
from benchmarks.gloo import bound_s
from offbeat.cli.result import Result, check_writable, machine, percentile, percentiles
from offbeat.errors import OffbeatError


def _result(**changed: Any) -> Result:
    about: dict[str, Any] = {
        "name": "allreduce",
        "command": "python -m benchmarks allreduce --sizes 35000",
        "kind": "timed",
        "seed": 7,
        "figures": {"step_s_p50": 0.0125, "push_per_s": 54_000, "loss": 1.5},
        "rows": [{"size_bytes": 35_000, "method": "ring", "is_best": True, "note": None}],
    }
    return Result(**(about | changed))


def test_the_json_is_one_object_with_all_fields(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    _result().write(path)
    read = json.loads(path.read_text())
    assert list(read) == ["name", "command", "kind", "seed", "figures", "rows", "machine", "duration_s"]
    assert read["figures"] == {"step_s_p50": 0.0125, "push_per_s": 54_000, "loss": 1.5}
    assert read["rows"] == [{"size_bytes": 35_000, "method": "ring", "is_best": True, "note": None}]
    assert read["kind"] == "timed"


def test_writing_again_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("x" * 10_000)
    path.chmod(0o640)
    _result().write(path)
    assert json.loads(path.read_text())["seed"] == 7
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    link = tmp_path / "last.json"
    link.symlink_to("results/today.json")
    _result().write(link)
    assert link.is_symlink()
    assert json.loads((tmp_path / "results/today.json").read_text())["seed"] == 7


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(fifo)
        _result().write(fifo)
        assert json.loads(os.read(reader, 65_536))["seed"] == 7
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "3", None, [1.0], np.float64(1)])
def test_a_figure_is_a_finite_plain_number(value: object) -> None:
    with pytest.raises(ValueError, match="'step_s' must be a finite plain number"):
        _result(figures={"step_s": value})


@pytest.mark.parametrize("name", ["speed", "step", "steps_", "Step_s", "_s", "step-s"])
def test_a_figure_names_its_unit(name: str) -> None:
    with pytest.raises(ValueError, match="must name its unit"):
        _result(figures={name: 1.0})


@pytest.mark.parametrize(
    "name",
    [
        "step_s",
        "step_s_p99",
        "ratio_to_bound_35KB",
        "step_ratio_p50_cnn2",
        "partial_k2_step_s_mean",
        "goodput_mbit_per_s",
        "to_bound_ratio",
        "test_accuracy",
    ],
)
def test_the_subject_of_a_figure_may_follow_its_unit(name: str) -> None:
    assert _result(figures={name: 1.0}).figures == {name: 1.0}


@pytest.mark.parametrize("value", [math.nan, [1], {"a": 1}, b"x"])
def test_a_row_is_flat_and_finite(value: object) -> None:
    with pytest.raises(ValueError, match="'step_s' in row 1"):
        _result(rows=[{"step_s": 1.0}, {"step_s": value}])


def test_the_machine_is_described_and_not_named() -> None:
    described = machine(congestion_control="reno")
    assert described["cores"] >= 1
    assert described["memory_gb"] > 0
    assert described["torch"]
    assert described["congestion_control"] == "reno"
    text = json.dumps({k: v for k, v in described.items() if k not in ("python", "torch", "kernel")})
    for name in (socket.gethostname(), str(Path.home()), os.getcwd(), getpass.getuser()):
        assert name not in text.split('"')
        assert len(name) < 6 or name not in text


@pytest.mark.parametrize("name", ["missing/result.json", "file/result.json", "folder"])
def test_an_unwritable_path_is_reported_before_and_after(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OffbeatError, match=f"cannot write .*{name}: "):
        check_writable(tmp_path / name)
    with pytest.raises(OffbeatError, match=f"cannot write .*{name}: "):
        _result().write(tmp_path / name)


def test_checking_changes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


def test_a_benchmark_that_fails_leaves_the_last_result_that_it_yielded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"

    def results() -> Iterator[Result]:
        for samples in (100, 200):
            yield _result(figures={"used_samples": samples})
            assert json.loads(path.read_text())["figures"] == {"used_samples": samples}
        raise OffbeatError("a worker failed")

    with pytest.raises(OffbeatError, match="a worker failed"):
        keep_results(results(), path, start_s=0.0)
    assert json.loads(path.read_text())["duration_s"] > 0
    printed = capsys.readouterr().out
    assert "200" in printed
    assert "100" not in printed


def test_the_table_shows_every_figure_and_row_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    _result(rows=[{"method": "[bold]ring", "size_bytes": 35_000}]).print()
    out = capsys.readouterr().out
    for shown in ("step_s_p50", "0.0125", "54,000", "[bold]ring", "35,000", "timed", "seed 7"):
        assert shown in out


def test_a_long_table_is_cut_and_names_the_number_of_further_rows(capsys: pytest.CaptureFixture[str]) -> None:
    result = _result(rows=[{"place": f"row {place}."} for place in range(43)])
    result.print()
    out = capsys.readouterr().out
    assert "row 39." in out
    assert "row 40." not in out
    assert "and 3 more rows" in out
    assert len(json.loads(result.to_json())["rows"]) == 43


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.integers(min_value=1, max_value=100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) * 100 >= percent * len(values)
    assert sum(v < found for v in values) * 100 < percent * len(values)


def test_p99_of_a_hundred_is_the_last_but_one() -> None:
    assert percentiles("wait_s", [float(v) for v in range(100)]) == {"wait_s_p50": 49.0, "wait_s_p99": 98.0}
    assert percentile(list(range(1, 1001)), 99.9) == 999
    assert percentile(list(range(1, 251)), 64.4) == 161  # though 64.4 * 250 / 100 is a little more in floats
    assert percentile([3.0], 1) == 3.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_a_percentile_of_no_values_or_out_of_range_is_an_error(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile(values, percent)


def test_the_bound_counts_each_byte_that_must_cross_the_line() -> None:
    """Patarasu and Yuan 2009: 2(p-1)/p of the tensor, each way at once."""
    assert bound_s(5_000_000, 4, 1e9) == pytest.approx(0.06)
    assert bound_s(5_000_000, 1, 1e9) == 0.0
