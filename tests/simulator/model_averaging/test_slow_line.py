"""A worker with a slow line of its own: it slows the averagings that it is in, and no others."""

import pytest

from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.simulator.core.network import Line, NetworkCosts
from offbeat.simulator.core.times import ConstantTimes
from offbeat.simulator.model_averaging.cluster import SimulatedModelCluster
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting

SIZE_BYTES, SLOW = 1_000_000, 3
NETWORK = NetworkCosts(
    latency_s=1e-3, bytes_per_s=1e8, spread=0.0, lines={SLOW: Line(latency_s=5e-3, bytes_per_s=2e7)}
)


def test_a_ring_runs_at_the_slowest_line_of_its_members():
    """2 (m - 1) alpha + 2 (m - 1) / m n / beta, with the longest latency and the lowest bandwidth."""
    assert NETWORK.all_reduce_s(SIZE_BYTES, (0, 1, 2)) == pytest.approx(4 * 1e-3 + 4 / 3 * 0.01)
    assert NETWORK.all_reduce_s(SIZE_BYTES, (1, 2, 3)) == pytest.approx(4 * 5e-3 + 4 / 3 * 0.05)
    assert NETWORK.all_reduce_s(SIZE_BYTES, (SLOW,)) == 0


def test_a_message_takes_as_long_as_on_the_slower_line_of_its_ends():
    assert NETWORK.transfer_s(SIZE_BYTES, 0, 1) == pytest.approx(1e-3 + 0.01)
    assert NETWORK.transfer_s(SIZE_BYTES, 0, SLOW) == pytest.approx(5e-3 + 0.05)


def test_a_fast_line_does_not_speed_up_the_other_end():
    network = NetworkCosts(latency_s=1e-3, bytes_per_s=1e6, lines={1: Line(latency_s=1e-5, bytes_per_s=1e9)})
    assert network.transfer_s(1000, 0, 1) == network.transfer_s(1000, 0, 2)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_line_has_a_latency_and_a_bandwidth(latency_s, bytes_per_s):
    with pytest.raises(ValueError, match="expected"):
        Line(latency_s=latency_s, bytes_per_s=bytes_per_s)


class RecordsTheTimes(SimulatedModelCluster):
    """Records how long each averaging of a pair took, from its last arrival to its end."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.took_s = []

    def close_exchange(self, exchange_id):
        exchange = self.exchanges[exchange_id]
        if len(exchange.members) == 2:
            self.took_s.append((exchange.members, self.engine.now_s - exchange.begin_s))
        super().close_exchange(exchange_id)


def run_pairs(network):
    setting = SimulationSetting(
        world=4,
        samples=SampleSetting(epoch_samples=160, batch_size=1, epochs=1),
        times=ConstantTimes(mean_s=0.1),
        network=network,
        size_bytes=SIZE_BYTES,
    )
    cluster = RecordsTheTimes(
        setting,
        lambda: [Assembly(4, accepts_late_joiners=True), PairAveraging(4)],
        overlap=False,
        has_epoch_means=False,
    )
    cluster.run()
    assert cluster.is_job_complete
    return cluster


def test_pairs_without_the_worker_behind_the_slow_line_do_not_notice_it():
    """Of the ring 0 1 2 3, worker 3 forms pairs with 2 and 0. Exact times."""
    took_s = run_pairs(NETWORK).took_s
    slow = [one_s for members, one_s in took_s if SLOW in members]
    others = [one_s for members, one_s in took_s if SLOW not in members]
    assert len(slow) > 10
    assert len(others) > 10
    assert slow == pytest.approx([2 * 5e-3 + 0.05] * len(slow))
    assert others == pytest.approx([2 * 1e-3 + 0.01] * len(others))


def test_only_the_averagings_of_a_slow_line_are_longer_than_on_equal_lines():
    equal = NetworkCosts(latency_s=1e-3, bytes_per_s=1e8, spread=0.0)
    assert {round(one_s, 9) for _, one_s in run_pairs(equal).took_s} == {0.012}
