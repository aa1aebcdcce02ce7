"""Logistic regression with an L1 penalty by delayed block proximal gradient, on a parameter server.

    python examples/sparse_logistic_regression.py a9a --l1 10 --blocks 31 --rate 1.1 --epsilon 2e-8 --no-kkt

Four processes share the rows of a file in LIBSVM's format, or generated rows; two servers hold the weights.
Columns of tau + 1 blocks move at once: the more they depend on each other, the smaller the --rate.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import offbeat
from offbeat.apps.sparse_lr.libsvm import read_libsvm
from offbeat.apps.sparse_lr.logistic import BlockWorker, PassSchedule
from offbeat.apps.sparse_lr.powerlaw import power_law_blocks
from offbeat.apps.sparse_lr.proximal_newton import distance_from_optimum
from offbeat.apps.sparse_lr.sparse import SignedColumns, concatenate_rows
from offbeat.ps import Assign, BlockProximal, FilterSpec


def load(path):
    made_up = power_law_blocks(2000, 200, 0, draws=8, exponent=0.5)
    return read_libsvm(path) if path else concatenate_rows(list(made_up))


def one_pass(worker, w, blocks, tau):
    """One step in each block, with weights in which the last `tau` steps may be missing."""
    in_flight, worker.violation = [], 0.0
    for number, (first, last) in enumerate(blocks, 1):
        block = worker.compute_push(first, last, w.is_active)  # gradients and curvature bounds
        pushed = w.push(block.rows, keys=block.keys, first=first, last=last)  # servers sum, then step
        in_flight.append((block.keys, w.pull(keys=block.keys, after=[pushed])))
        while len(in_flight) > (tau if number < len(blocks) else 0):
            keys, pulled = in_flight.pop(0)
            worker.apply_pull(keys, *pulled.result().T)  # updates the margins of the worker's rows


def work(rank, workers, cluster, options, report=print):
    rows, l1 = load(options.path), options.l1
    keys, kkt = int(rows.keys.max()) + 1, FilterSpec("KKT", {"l1": l1})
    worker = BlockWorker(SignedColumns.from_rows(rows.shard(rank, workers)), l1)
    passes = PassSchedule(keys, options.blocks, len(rows), options.epsilon, filtered=options.kkt)
    with offbeat.PS(cluster) as ps:
        step, sums = BlockProximal(l1=l1, rate=options.rate), {"aggregate": "sum", "dtype": "float64"}
        w = ps.namespace("w", keys, width=2, update=step, push_filters=[kkt], **sums)
        totals = ps.namespace("totals", workers, width=4, update=Assign(), **sums)
        w.join_aggregation(workers)
        totals.join_aggregation(workers)
        for blocks in passes:  # in random order, the same for all workers
            w.set_margin(passes.kkt_margin)  # of skipped keys; infinite where no key may be skipped
            one_pass(worker, w, blocks, options.tau)
            own = w.pull(first=rank * keys // workers, last=(rank + 1) * keys // workers).result()[:, 0]
            row = worker.loss + l1 * abs(own).sum(), (own != 0).sum(), ps.traffic_bytes, worker.violation
            reports = totals.pull(after=[totals.push([row], keys=[rank], first=0, last=workers)]).result()
            total, used, size, _ = reports.sum(0)
            passes.end_pass(total, reports[:, 3].max())
            if rank == 0:
                report(f"pass {passes.passes_ended}: objective {total:.6f}, {used:.0f} weights, {size:.3g} B")
        return w.pull().result()[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--no-kkt", dest="kkt", action="store_false", help="skip no weights")
    for name, value in {"l1": 4.0, "blocks": 10, "rate": 0.9, "tau": 2, "epsilon": 1e-9}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    with offbeat.PS.local(servers=2) as ps, ProcessPoolExecutor(4, get_context("spawn")) as pool:
        weights, *_ = pool.map(partial(work, workers=4, cluster=ps.cluster, options=options), range(4))
    columns = SignedColumns.from_rows(load(options.path))
    gap, differ = distance_from_optimum(columns, weights[columns.keys], options.l1)
    print(f"relative gap to the optimum: {gap:.1e}; weights that are zero in one of both only: {differ}")


if __name__ == "__main__":
    main()
