"""The benchmarks of the parameter server run, small; its speed is not judged here."""

import json
import os
import time

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.children import Lines
from benchmarks.failover import (
    DetectedKill,
    Kill,
    Push,
    detected_kills,
    first_served_s,
    gap_s,
    wrong_pushes,
)
from benchmarks.namespaces import missing
from benchmarks.ps import PsMeasurement, by_transport, cases, figures
from benchmarks.sampling import Sampler
from offbeat.errors import OffbeatError
from offbeat.events import ClusterView, NodeLost, ServerUnreachable, Tick


def counters(keys, pushed):
    """The values after each worker's pushes 1 to n."""
    row = [value for count in pushed for value in (count, count * (count + 1) / 2)]
    return np.tile(np.array(row, np.float64), (keys, 1))


def viewed(target=()):
    return ClusterView(
        node="",
        version=1,
        epoch=1,
        ring=(0, 1),
        virtual_nodes=16,
        replicas=2,
        next_ring=target,
        transfers=(),
        namespaces=(),
        participants=(),
        paused=(),
        servers=(),
        reason="",
    )


KILL = Kill(round=0, kind="one", server=1, at_s=10.0, dead_s=10.1, promoted_s=10.5)


# Failover -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_servers_that_are_killed_cost_no_push_and_double_none(tmp_path):
    path = tmp_path / "result.json"
    command = ["failover", "--kills", "4", "--workers", "2", "--mb", "4", "--json", str(path)]
    assert main(command) == 0
    result = json.loads(path.read_text())
    figures = result["figures"]
    assert (figures["lost_pushes"], figures["doubled_pushes"]) == (0, 0)
    assert figures["kills_count"] == 4
    assert figures["pushes_count"] > 4
    times = {
        f"{name}_s_{of}" for name in ("detect", "promote", "first_served", "gap") for of in ("p50", "max")
    }
    assert times <= figures.keys()
    assert [row["kind"] for row in result["rows"]] == ["one", "two", "two", "join"]
    assert [row["round"] for row in result["rows"]] == [0, 1, 1, 2]
    assert all(0 < row["detect_s"] < row["promote_s"] for row in result["rows"])
    assert not any(row["is_join"] for row in result["rows"][:3])


@pytest.mark.parametrize(
    ("key", "column", "by", "found"),
    [
        (3, 2, -1, (1, 0)),  # of worker 1, in one key
        (0, 0, 2, (0, 2)),
        (1, 1, -4, (1, 1)),  # number 5 is missing and number 1 arrived twice: the counter is as it should be
    ],
)
def test_a_missing_or_repeated_push_is_counted_in_any_key(key, column, by, found):
    values = counters(4, [7, 9])
    assert wrong_pushes(values, [7, 9]) == (0, 0)
    values[key, column] += by
    assert wrong_pushes(values, [7, 9]) == found


def test_a_push_that_the_dead_server_may_have_answered_is_not_counted_as_served():
    quick = [
        Push(begun_s=9.9, done_s=10.15),
        Push(begun_s=10.15, done_s=10.75),
        Push(begun_s=10.8, done_s=11),
    ]
    slow = [Push(begun_s=9.5, done_s=9.75), Push(begun_s=9.75, done_s=11.25), Push(begun_s=11.3, done_s=12)]
    assert first_served_s(KILL, [quick, slow]) == pytest.approx(0.75)
    assert gap_s(KILL, [quick, slow]) == pytest.approx(1.5)
    assert gap_s(KILL, [quick]) == pytest.approx(0.6)


def test_a_death_is_detected_once_and_the_next_view_shows_whether_a_server_was_joining():
    entries = [
        NodeLost(now_s=1.0, node="client-9", cause="closed"),
        NodeLost(now_s=2.0, node="server-4", cause="closed"),
        viewed(target=(0, 5)),
        ServerUnreachable(now_s=2.9, node="server-0", server=7, cause="refused"),  # that may be a cut
        NodeLost(now_s=3.0, node="server-7", cause="closed"),
        viewed(),
        Tick(now_s=5.0),
    ]
    assert detected_kills(entries) == {
        4: DetectedKill(detected_s=2.0, is_join=True),
        7: DetectedKill(detected_s=3.0, is_join=False),
    }


# Throughput ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_every_size_and_operation_has_its_figures(tmp_path):
    path = tmp_path / "result.json"
    command = ["ps", "--sizes", "4KB,100k", "--seconds", "0.01", "--json", str(path)]
    assert main(command) == 0
    result = json.loads(path.read_text())
    expected = set()
    for operation in ("push", "pull", "pushpull"):
        dense, sparse = f"{operation}_4KB", f"sparse_{operation}_100k"
        expected |= {f"{dense}_{end}" for end in ("per_s", "gb_per_s", "128_in_flight_per_s")}
        expected |= {f"{name}_{p}_us" for name in (dense, sparse) for p in ("p50", "p99")}
        expected.add(f"{sparse}_keys_per_s")
    expected.add("sparse_push_100k_fresh_keys_per_s")
    expected |= {f"{name}_2x2" for name in expected}
    expected |= {f"shared_to_tcp_{operation}_4KB" for operation in ("push", "pull", "pushpull")}
    expected |= {f"sockets_push_4KB_{end}" for end in ("per_s", "gb_per_s")}
    assert result["figures"].keys() == expected
    assert all(value > 0 for value in result["figures"].values())
    threads = {row["where"] for row in result["rows"] if "share" in row}
    assert threads == {"worker, thread main", "worker, thread links", "server, thread links"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ps", "--sizes", "4KB,5KB"], "expected sizes of 4KB, 64KB, 1MB, 16MB, 64MB, 1k, 100k, 1M, got 5KB"),
        (["ps", "--seconds", "0"], "expected to measure for up to 60 s, got 0 s"),
        (["ps", "--json", "/proc/no/such"], "cannot write /proc/no/such"),
    ],
)
def test_bad_input_is_reported_before_anything_is_started(arguments, message, capsys):
    assert main([*arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_large_requests_have_at_most_as_many_under_way_as_fit():
    under_way = {(case.size, case.in_flight) for case in cases(["4KB", "1MB", "64MB", "1k", "1M"])}
    assert under_way == {
        *(("4KB", many) for many in (1, 16, 128)),
        *(("1MB", many) for many in (1, 16)),
        *(("64MB", many) for many in (1, 2)),
        *(("1k", many) for many in (1, 16, 128)),
        *(("1M", many) for many in (1, 10)),
    }


def test_figures_count_values_each_way_and_compare_transports():
    found = [
        PsMeasurement(case=case, transport=transport, nodes=1, per_s=per_s, latency_s=[0.001, 0.002])
        for transport, per_s in (("tcp", 100.0), ("shared", 150.0))
        for case in cases(["1MB"])
        if case.in_flight == 16 and case.operation != "pull"
    ]
    assert figures(found) == pytest.approx(
        {
            "push_1MB_per_s": 100,
            "push_1MB_gb_per_s": 0.1,
            "pushpull_1MB_per_s": 100,
            "pushpull_1MB_gb_per_s": 0.2,
            "shared_to_tcp_push_1MB": 1.5,
            "shared_to_tcp_pushpull_1MB": 1.5,
        }
    )
    (sparse,) = (case for case in cases(["100k"]) if (case.is_fresh, case.in_flight) == (True, 16))
    two = PsMeasurement(case=sparse, transport="tcp", nodes=2, per_s=30.0, latency_s=[0.1])
    assert figures([two]) == {"sparse_push_100k_fresh_keys_per_s_2x2": 3_000_000}


def test_measurements_in_turns_count_as_one():
    case = cases(["1MB"])[0]
    turns = [
        PsMeasurement(case=case, transport=transport, nodes=1, per_s=per_s, latency_s=[latency_s])
        for transport, per_s, latency_s in (
            ("tcp", 1.0, 0.1),
            ("shared", 4, 0.2),
            ("shared", 8, 0.3),
            ("tcp", 3, 0.4),
        )
    ]
    tcp, shared = by_transport(turns)
    assert (tcp.transport, tcp.per_s, tcp.latency_s) == ("tcp", 2, [0.1, 0.4])
    assert (shared.transport, shared.per_s, shared.latency_s) == ("shared", 6, [0.2, 0.3])


# Child processes ----------------------------------------------------------------------------------------


def test_lines_arrive_whole_and_in_order_and_an_end_names_the_process():
    source, target = os.pipe()
    reader, writer = Lines(source, -1, "worker 3"), Lines(-1, target, "nobody")
    assert not reader.has_message()
    writer.send({"first": 1})
    writer.send("second")
    assert reader.has_message()
    assert [reader.receive(), reader.receive()] == [{"first": 1}, "second"]
    with pytest.raises(OffbeatError, match=r"worker 3: timed out after 0\.01 s"):
        reader.receive(timeout_s=0.01)
    os.write(target, b"half")
    os.close(target)
    with pytest.raises(OffbeatError, match="worker 3 ended"):
        reader.receive()
    os.close(source)


def test_a_sampler_finds_a_thread_in_the_function_that_it_is_in():
    def spin():
        return sum(range(1000))

    limit_s = time.monotonic() + 20
    with Sampler() as sampler:
        begun_s = time.thread_time()
        while time.thread_time() < begun_s + 0.1 or not any(
            "spin" in name for name in sampler.counts["main"]
        ):
            assert time.monotonic() < limit_s
            spin()
    shares = {row["function"]: row["share"] for row in sampler.shares() if row["thread"] == "main"}
    assert shares["(user time)"] > 0
    assert sum(share for name, share in shares.items() if name[0] != "(") == pytest.approx(1)
