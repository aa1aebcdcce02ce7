"""Promises of `late="join"`, with real workers: gradients of an excluded worker count, and count once.

The model of `support.sample_counting` counts the uses of each sample; a replica that holds one use of each
an epoch has lost none and doubled none.
"""

import os
import signal

import pytest

from offbeat.events import AssignLateBlock, LateGradientArrived, ResolveLateBlock
from offbeat.runtime.collectives import link_exchange
from offbeat.runtime.data import late_gradients
from offbeat.strategies import PartialAllReduce
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support import group_training, sample_counting
from support.group_training import agree, train
from support.jobs import job
from support.processes import run, values
from support.run_logs import entries_of, wait_for_group_without, wait_until

SAMPLES = 401
LONG = 8  # epochs, enough to reach the nth late block however busy the machine is
# A limit of 3 times the pace against 20 times: on a busy machine, too, the slow worker is the excluded one.
STRATEGY = PartialAllReduce(k=3.0, limit=3, n_profile=2, late="join", staleness=100)


def late_ones(log):
    """The late gradients that were contributed."""
    return [resolved for resolved in entries_of(log, ResolveLateBlock) if resolved.is_contributed]


def counts(rank, emit, strategy=STRATEGY, epochs=4, before_step=None, options=None):
    sample_counting.SAMPLES = SAMPLES  # an epoch has to last long enough
    sample_counting.once_each = once_each
    return sample_counting.count(rank, emit, strategy, epochs, before_step, options=options)


def once_each(model):
    """As in `sample_counting`; and all samples of a round weigh the same on every worker."""
    grad = model.uses_N.grad
    if grad is not None and grad.any():
        grad.div_(grad.abs()[grad != 0].min())
        assert (grad - grad.round()).abs().max() < 1e-9
        grad.round_()


def once(ended, epochs=4):
    for uses, _ in values(ended):
        assert uses == [float(epochs)] * SAMPLES


@pytest.mark.long(after=1)
@pytest.mark.parametrize("slow", ["1:20", "0:20", "1:20@burst=5/12", "2:20@0.0-0.5"])
def test_each_sample_is_used_once_whichever_worker_is_late(slow, tmp_path):
    log = tmp_path / "log.jsonl"
    once(run(counts, 3, env={"OFFBEAT_SLOW": slow, "OFFBEAT_RUN_LOG": str(log)}))
    assert entries_of(log, AssignLateBlock) or "@" in slow  # a worker that recovers soon joins instead
    assert replay(read_log(log)) is None


@pytest.mark.long
def test_late_gradients_beyond_the_staleness_bound_are_not_used(tmp_path):
    log = tmp_path / "log.jsonl"
    strategy = PartialAllReduce(k=3.0, limit=3, n_profile=2, late="join", staleness=2)
    once(run(counts, 3, strategy, env={"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}))
    assert entries_of(log, LateGradientArrived)
    assert not late_ones(log)


@pytest.mark.long
def test_each_sample_is_used_once_with_two_late_workers_of_four(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20;2:20", "OFFBEAT_RUN_LOG": str(log)}
    once(run(counts, 4, env=env))
    assigned = entries_of(log, AssignLateBlock)
    assert {assignment.worker for assignment in assigned} >= {1, 2}
    assert {assignment.proxy for assignment in assigned} >= {0, 3}
    assert late_ones(log)


@pytest.mark.long
def test_a_single_member_is_the_proxy_of_all_late_workers(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "0:20;1:20", "OFFBEAT_RUN_LOG": str(log)}
    once(run(counts, 3, env=env))
    assert {assignment.worker for assignment in entries_of(log, AssignLateBlock)} == {0, 1}
    assert late_ones(log)


def trains(rank, emit):
    group_training.SAMPLES = 400
    return train(rank, emit, STRATEGY, 4)


@pytest.mark.long
def test_members_hold_the_same_bits_after_every_step(tmp_path):
    log = tmp_path / "log.jsonl"
    results = values(run(trains, 3, env={"OFFBEAT_SLOW": "2:20", "OFFBEAT_RUN_LOG": str(log)}))
    agree(results)
    assert late_ones(log)


class SignalAtLateBlock:
    """Sends this process a signal after the nth call of a method of `LateGradients`."""

    def __init__(self, emit, point, nth, number=signal.SIGKILL):
        self._emit, self._left, self._number = emit, nth, number
        before = getattr(late_gradients.LateGradients, point)

        def strike(this, *args):
            result = before(this, *args)
            if this.active if point == "activate_accepted" else point != "begin_block" or result is not None:
                self._strike()
            return result

        setattr(late_gradients.LateGradients, point, strike)

    def __call__(self, session):
        """Does nothing: the signal is sent by the patched method."""

    def _strike(self):
        self._left -= 1
        if not self._left:
            self._emit("now")
            os.kill(os.getpid(), self._number)


def strikes(rank, emit, victim, point, nth):
    return counts(
        rank, emit, epochs=LONG, before_step=SignalAtLateBlock(emit, point, nth) if rank == victim else None
    )


AS_LATE, AS_PROXY = (
    ("_accept_block", "begin_block", "_send"),
    ("_expect_gradient", "_send_parameters", "_resolve", "activate_accepted"),
)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("victim", "point"), [(1, point) for point in AS_LATE] + [(0, point) for point in AS_PROXY]
)
def test_a_worker_may_be_killed_at_any_point_of_a_late_block(victim, point):
    with job(strikes, 3, victim, point, 2, env={"OFFBEAT_SLOW": "1:20"}) as running:
        assert running.receive(victim) == ["now"]
        once([one for one in running.ends() if one.rank != victim], LONG)


def dies_in_the_exchange(rank, emit, victim, share):
    def before_step(session):
        if rank == victim:
            begin = link_exchange._ScheduleRun._on_complete

            def die_on_the_way(self, number, first, last):
                if self._to_receive - (last - first) <= self._plan.received * share and is_in(session):
                    os.kill(os.getpid(), signal.SIGKILL)
                begin(self, number, first, last)

            link_exchange._ScheduleRun._on_complete = die_on_the_way

    def is_in(session):
        return bool(session._synchronizer.binding.late_gradients.active)

    return counts(rank, emit, epochs=4, before_step=Once(before_step))


class Once:
    def __init__(self, call):
        self._call = call

    def __call__(self, session):
        call, self._call = self._call, None
        if call is not None:
            call(session)


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_proxy_may_be_killed_in_the_exchange_that_adds_a_late_gradient(share):
    with job(dies_in_the_exchange, 3, 0, share, env={"OFFBEAT_SLOW": "1:20"}) as running:
        ended = running.ends()
    assert ended[0].exitcode == -signal.SIGKILL
    once(ended[1:])


def stops(rank, emit, victim, point):
    before_step = SignalAtLateBlock(emit, point, 2, signal.SIGSTOP) if rank == victim else None
    return counts(rank, emit, epochs=8, before_step=before_step)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "point"), [(1, "_send"), (0, "activate_accepted")])
def test_a_worker_may_hang_and_continue_at_any_point_of_a_late_block(victim, point, tmp_path):
    """Other workers use the samples of a paused late worker, and its gradient is dropped afterwards."""
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}
    with job(stops, 4, victim, point, env=env) as running:
        running.receive(victim)
        if victim:
            wait_until(
                lambda: len(entries_of(log, AssignLateBlock)) == len(entries_of(log, ResolveLateBlock)),
                "an answer to each",
            )
        else:
            wait_for_group_without(log, 0)
        running.signal(victim, signal.SIGCONT)
        once(running.ends(), 8)


def accumulates(rank, emit):
    sample_counting.SAMPLES, sample_counting.STRATEGY = SAMPLES, STRATEGY
    return sample_counting.accumulates(rank, emit)


def test_with_gradients_accumulated_over_batches(tmp_path):
    log = tmp_path / "log.jsonl"
    ended = run(accumulates, 3, env={"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)})
    assert {len(values([one])[0][0]) for one in ended} == {SAMPLES}
    assert all(all(uses) for uses, _ in values(ended))
    assert entries_of(log, AssignLateBlock)


@pytest.mark.long
def test_through_a_data_loader(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}
    once(run(counts, 3, STRATEGY, 4, None, {"num_workers": 1}, env=env))
    assert late_ones(log)


@pytest.mark.long
def test_each_sample_is_used_once_while_the_coordinator_is_killed(tmp_path):
    log = tmp_path / "log.jsonl"
    with job(counts, 3, STRATEGY, 8, env={"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}) as running:
        for _ in range(3):
            before = len(entries_of(log, LateGradientArrived))
            wait_until(lambda: len(entries_of(log, LateGradientArrived)) > before, "more")  # noqa: B023 (asked at once)
            os.kill(running.coordinator(), signal.SIGKILL)
        once(running.ends(), 8)
    assert replay(read_log(log)) is None


@pytest.mark.parametrize(
    "arguments", [{"late": "x"}, {"late": "join", "shards": "equal"}, {"staleness": 0}], ids=str
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        PartialAllReduce(**arguments)
