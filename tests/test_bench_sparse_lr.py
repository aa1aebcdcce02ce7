"""`offbeat bench sparse-lr` runs, small; how quick it is is not judged here."""

import json

import pytest

from offbeat.cli import main
from offbeat.libsvm import write_libsvm
from offbeat.numerics.powerlaw import power_law
from offbeat.numerics.proximal_newton import solve
from offbeat.numerics.sparse import SignedColumns, joined


@pytest.mark.parametrize("is_file", [False, True])
def test_all_variants_find_the_same_optimum(tmp_path, is_file):
    rows = joined(list(power_law(400, 2000, 0, rows_of_block=200)))
    write_libsvm(tmp_path / "rows", rows)
    source = ["--file", str(tmp_path / "rows")] if is_file else ["--rows", "400", "--features", "2000"]
    path = tmp_path / "result.json"
    tried = ["--tau", "0", "--tau", "2", "--workers", "2", "--blocks", "8", "--slow", "1:3@burst=2/8"]
    fixed = ["--task-ms", "0", "--rate", "0.4", "--epsilon", "1e-6", "--passes", "400", "--l1", "3"]
    assert main(["bench", "sparse-lr", *source, *tried, *fixed, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [(row["filters"], row["tau"]) for row in found["rows"]] == [
        (filters, tau) for filters in ("none", "kkt") for tau in (0, 2)
    ]
    best = solve(SignedColumns.of(rows), 3.0)
    for row in found["rows"]:
        assert row["objective"] == pytest.approx(best.standing.objective, rel=1e-4)
        assert row["found_after_passes"] <= row["passes"] < 400
        assert 0 < row["waiting_share"] < 1
    plain, filtered = (
        [row["pushed_keys"] / row["passes"] for row in found["rows"] if row["filters"] == filters]
        for filters in ("none", "kkt")
    )
    assert max(filtered) < min(plain)
