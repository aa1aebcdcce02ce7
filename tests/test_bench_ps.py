"""The benchmarks of the parameter server run, small; how quick it is is not judged here."""

import json

import numpy as np
import pytest

from offbeat.bench.failover import (
    Kill,
    Push,
    Seen,
    first_served_s,
    gap_s,
    seen_in,
    wrong_pushes,
)
from offbeat.cli import main
from offbeat.events import NodeLost, ServerMissed, Tick, Viewed


def counters(keys, pushed):
    """The values after each worker's pushes 1 to n."""
    row = [value for count in pushed for value in (count, count * (count + 1) / 2)]
    return np.tile(np.array(row, np.float64), (keys, 1))


def viewed(target=()):
    return Viewed(
        node="",
        number=1,
        epoch=1,
        ring=(0, 1),
        virtual_nodes=16,
        copies=2,
        target=target,
        filling=(),
        namespaces=(),
        servers=(),
        reason="",
    )


KILL = Kill(round=0, kind="one", server=1, at_s=10.0, dead_s=10.1, promoted_s=10.5)


# Failover -----------------------------------------------------------------------------------------------


def test_servers_that_are_killed_cost_no_push_and_double_none(tmp_path):
    path = tmp_path / "result.json"
    command = ["bench", "failover", "--kills", "4", "--workers", "2", "--mb", "4", "--json", str(path)]
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
        (1, 1, -4, (1, 1)),  # number 5 is missing and number 1 came twice: the counter is as it should be
    ],
)
def test_a_push_that_is_missing_or_comes_twice_anywhere_is_seen(key, column, by, found):
    values = counters(4, [7, 9])
    assert wrong_pushes(values, [7, 9]) == (0, 0)
    values[key, column] += by
    assert wrong_pushes(values, [7, 9]) == found


def test_what_a_dead_server_may_have_said_itself_is_not_counted_as_served():
    quick = [
        Push(begun_s=9.9, done_s=10.15),
        Push(begun_s=10.15, done_s=10.75),
        Push(begun_s=10.8, done_s=11),
    ]
    slow = [Push(begun_s=9.5, done_s=9.75), Push(begun_s=9.75, done_s=11.25), Push(begun_s=11.3, done_s=12)]
    assert first_served_s(KILL, [quick, slow]) == pytest.approx(0.75)
    assert gap_s(KILL, [quick, slow]) == pytest.approx(1.5)
    assert gap_s(KILL, [quick]) == pytest.approx(0.6)


def test_a_death_is_noticed_once_and_the_next_view_says_whether_somebody_was_coming():
    entries = [
        NodeLost(now_s=1.0, node="client-9", cause="closed"),
        NodeLost(now_s=2.0, node="server-4", cause="closed"),
        viewed(target=(0, 5)),
        ServerMissed(now_s=3.0, node="server-0", server=7, cause="refused"),
        viewed(),
        NodeLost(now_s=4.0, node="server-7", cause="closed"),
        Tick(now_s=5.0),
    ]
    assert seen_in(entries) == {
        4: Seen(detected_s=2.0, is_join=True),
        7: Seen(detected_s=3.0, is_join=False),
    }
