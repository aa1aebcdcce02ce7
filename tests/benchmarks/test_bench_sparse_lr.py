"""`python -m benchmarks sparse-lr` runs, small; its speed is not judged here."""

import json

import numpy as np
import pytest

from benchmarks import sparse_lr
from benchmarks.__main__ import main
from offbeat.apps.sparse_lr.libsvm import write_libsvm
from offbeat.apps.sparse_lr.powerlaw import power_law_blocks
from offbeat.apps.sparse_lr.proximal_newton import solve
from offbeat.apps.sparse_lr.sparse import SignedColumns, concatenate_rows

ROWS = concatenate_rows(list(power_law_blocks(400, 2000, 0, rows_per_block=200)))


@pytest.mark.long
def test_all_variants_find_the_same_optimum(tmp_path):
    path = tmp_path / "result.json"
    source = ["--rows", "400", "--features", "2000", "--l1", "3", "--workers", "2", "--blocks", "4"]
    tried = ["--tau", "0", "--tau", "2", "--slow", "1:2@burst=1/8", "--task-ms", "0"]
    fixed = ["--rate", "0.4", "--epsilon", "1e-4", "--passes", "400", "--gap", "1e-3"]
    assert main(["sparse-lr", *source, *tried, *fixed, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [(row["filters"], row["tau"]) for row in found["rows"]] == [
        ("all", 0),
        ("all", 2),
        *[(f"no_{one}", 0) for one in ("kkt", "key_caching", "fixed_point", "compression")],
        ("none", 0),
    ]
    best = solve(SignedColumns.from_rows(ROWS), 3.0)
    for row in found["rows"]:
        assert row["objective"] == pytest.approx(best.optimality.objective, rel=1e-3)
        assert row["found_after_passes"] <= row["passes"] < 400
        assert 0 < row["waiting_share"] < 1
    keys, sizes = (
        {row["filters"]: row[column] / row["passes"] for row in found["rows"] if row["tau"] == 0}
        for column in ("pushed_keys", "traffic_mb")
    )
    assert keys["none"] == keys["no_kkt"] > 1.2 * keys["all"]
    assert keys["all"] == pytest.approx(keys["no_key_caching"]) == keys["no_compression"]
    assert sizes["none"] > 1.2 * sizes["all"]
    figures = found["figures"]
    assert {name for name in figures if name.startswith("waiting_share")} == {
        "waiting_share_all_tau0",
        "waiting_share_all_tau2",
    }
    assert {name for name in figures if name.startswith("traffic_mb")} == {
        f"traffic_mb_{row['filters']}_tau{row['tau']}" for row in found["rows"]
    }


@pytest.mark.parametrize("is_file", [False, True])
def test_workers_share_the_rows_of_a_file_or_generated_ones(tmp_path, is_file):
    path = tmp_path / "rows"
    if is_file:
        write_libsvm(path, ROWS)
    setting = sparse_lr.SparseLrSettings(
        path=str(path) if is_file else "",
        rows=400,
        features=2000,
        seed=0,
        workers=2,
        blocks=8,
        l1=3.0,
        rate=0.4,
        epsilon=1e-6,
        passes_max=1,
        slow=(),
        task_ms=0.0,
    )
    assert sparse_lr._extent(setting) == ((int(ROWS.keys.max()) + 1) if is_file else 2000, 400)
    shared = concatenate_rows([sparse_lr._share(setting, rank) for rank in range(2)])
    np.testing.assert_array_equal(shared.keys, ROWS.keys)
    np.testing.assert_array_equal(shared.labels, ROWS.labels)
