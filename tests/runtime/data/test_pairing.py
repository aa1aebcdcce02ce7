"""Batches that programs leave out: every round is for one batch of all workers; each is used once at most.

`Lockstep` makes the decisions, as in a job; workers are threads here.
"""

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.events import AbortJob, AssignRoundBatch
from offbeat.policies.membership.lockstep import Lockstep
from offbeat.runtime.data.pairing import RoundPairing
from support.round_events import joined, left_out, ready

WAIT_S = 60.0


class Rounds:
    """Rounds of a job of `world` workers, each recorded with every worker's contribution."""

    def __init__(self, world):
        self.world, self.policy = world, Lockstep(world)
        self.changed = threading.Condition()
        self.named, self.rounds, self.stop = {}, [], None
        for worker in range(world):
            self.policy.handle(joined(worker, world))

    def deliver(self, event):
        for action in self.policy.handle(event):
            if isinstance(action, AssignRoundBatch):
                self.named[action.worker] = action
            else:
                assert isinstance(action, AbortJob)
                self.stop = action.reason
        self.changed.notify_all()

    def wait_for(self, condition):
        assert self.changed.wait_for(lambda: condition() or self.stop is not None, WAIT_S)
        if self.stop is not None:
            raise InterruptedError(self.stop)

    def name(self, worker, epoch, round_, batch, count):
        with self.changed:
            self.named.pop(worker, None)
            self.deliver(left_out(worker, round_, batch=batch, count=count, epoch=epoch))
            self.wait_for(lambda: worker in self.named)
            return self.named[worker].batch

    def take_part(self, worker, epoch, round_, batch, data):
        """`data`: the batch whose gradients count, None for none."""
        with self.changed:
            self.deliver(ready(worker, round_, epoch=epoch, batch=batch))
            if round_ == len(self.rounds):
                self.rounds.append({})
            self.rounds[round_][worker] = (epoch, batch, data)
            self.changed.notify_all()
            self.wait_for(lambda: len(self.rounds[round_]) == self.world)


def work(rounds, worker, epochs, batches, is_bad):
    round_ = 0
    pairing = RoundPairing(lambda batch, count: rounds.name(worker, epoch, round_, batch, count))
    for epoch in range(epochs):
        for batch, weight in pairing.iterate((number, 1) for number in range(1, batches + 1)):
            if pairing.try_stand_in():  # called when the forward pass begins; a batch is left out after it
                weight = 0
            if is_bad(worker, epoch, batch):
                continue
            pairing.is_batch_used = True
            rounds.take_part(worker, epoch, round_, pairing.batch, batch if weight else None)
            round_ += 1
        pairing.begin_epoch(0)


def run(world, epochs, batches, is_bad):
    """The contributions to each round; an error of a worker is raised here."""
    rounds, errors = Rounds(world), []

    def thread(worker):
        try:
            work(rounds, worker, epochs, batches, is_bad)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=thread, args=(worker,)) for worker in range(world)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]
    return rounds.rounds


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(2, 5)), max_size=12),
)
def test_each_round_is_for_one_batch_and_counts_the_workers_that_used_it(world, batches, bad):
    """The first batch of an epoch is used: a worker that has used none has no gradient to stand in with."""
    rounds = run(world, 2, batches, lambda worker, epoch, batch: (worker, epoch, batch) in bad)
    assert all(len({place[:2] for place in one.values()}) == 1 for one in rounds)
    counting = [one for one in rounds if any(data is not None for *_, data in one.values())]
    wanted = [
        {
            worker: (epoch, batch, batch if (worker, epoch, batch) not in bad else None)
            for worker in range(world)
        }
        for epoch in range(2)
        for batch in range(1, batches + 1)
        if not all((worker, epoch, batch) in bad for worker in range(world))
    ]
    assert counting == wanted


@pytest.mark.parametrize("bad", [{1}, {1, 2}, {3}, {2, 3}, {1, 3}])
def test_the_first_and_the_last_batches_may_be_left_out(bad):
    rounds = run(2, 2, 3, lambda worker, epoch, batch: worker == 1 and epoch == 0 and batch in bad)
    assert Counter(data for one in rounds for *_, data in one.values()) == {
        None: len(bad),
        **{batch: 3 if batch in bad else 4 for batch in (1, 2, 3)},
    }
    assert [one[0][:2] for one in rounds] == [(epoch, batch) for epoch in (0, 1) for batch in (1, 2, 3)]


def test_batches_that_all_workers_leave_out_cost_no_round():
    """Like a program that continues in the middle of an epoch."""
    rounds = run(2, 1, 5, lambda worker, epoch, batch: batch < 4)
    assert rounds == [dict.fromkeys((0, 1), (0, batch, batch)) for batch in (4, 5)]


def test_an_epoch_in_which_nothing_is_used_yields_each_batch_once():
    asked = []
    pairing = RoundPairing(lambda batch, count: asked.append(batch))
    assert list(pairing.iterate((number, 1) for number in range(4))) == [(number, 1) for number in range(4)]
    assert not asked


def test_a_batch_delayed_by_a_stand_in_is_yielded_again_after_a_break():
    pairing = RoundPairing(lambda batch, count: batch - count)
    batches = pairing.iterate((number, 1) for number in (1, 2, 3))
    assert next(batches) == (1, 1)
    assert next(batches) == (2, 1)  # the first batch was left out
    assert pairing.try_stand_in()
    assert pairing.batch == 1
    pairing.is_batch_used = True
    batches.close()
    assert pairing.batches_taken == 1
    again = pairing.iterate((number, 1) for number in (2, 3))
    assert [next(again), pairing.batches_taken, pairing.try_stand_in()] == [(2, 1), 2, False]


def test_a_worker_that_uses_no_batch_of_an_epoch_is_named():
    with pytest.raises(InterruptedError, match="worker 1 has gone on to batch 1 of epoch 1 while worker 0"):
        run(2, 2, 3, lambda worker, epoch, batch: worker == 1 and epoch == 0)
