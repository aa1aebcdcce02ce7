"""The parameter server's protocol under faults: trials of many seeds, which find what breaks it."""

from __future__ import annotations

import pytest

from offbeat.policies.parcels import Copy, Push
from offbeat.policies.server import ServerNode
from offbeat.simulator.serving import Serving, ViolationError, trial_of

SEEDS = 150
SEEDS_MAX = 400  # until what is broken is found


def run_all(seeds, make_node=ServerNode):
    for seed in seeds:
        Serving(trial_of(seed), make_node).run()


@pytest.mark.parametrize("first", range(0, SEEDS, 30))
def test_no_fault_breaks_what_is_promised(first):
    run_all(range(first, first + 30))


def test_a_trial_is_repeated_by_its_seed():
    one, another = Serving(trial_of(7)), Serving(trial_of(7))
    one.run()
    another.run()
    assert [view.number for view in one.views] == [view.number for view in another.views]
    assert one._pushed == another._pushed


def test_trials_see_deaths_joins_and_fills():
    """Not only calm ones: what the trials prove, they prove of these."""
    views = []
    for seed in range(40):
        trial = Serving(trial_of(seed))
        trial.run()
        views += trial.views
    assert sum(bool(view.filling) for view in views) > 10
    assert sum(view.target is not None for view in views) > 10


class CountsTwice(ServerNode):
    """Does not look at the clock."""

    def _apply_now(self, operation):
        clock = self._clock(operation.namespace)
        clock.drop(operation.first, operation.last)
        super()._apply_now(operation)


class AcknowledgesEarly(ServerNode):
    """Does not wait for its replicas."""

    def _push(self, push: Push):
        super()._push(push)
        for kept in self._kept.values():
            for request in kept.requests:
                if request.push is push and request.waits_for:
                    request.waits_for = 0
                    self._acknowledge(request)


class ServesWhatItLacks(ServerNode):
    """Begins to work before what it takes over has come."""

    def _lacks(self, block):
        return False


class ForgetsWhatIsUnderWay(ServerNode):
    """Leaves it to the clients to send again, and tells nobody what it had."""

    def _send_again(self, operation, requests):
        for request in requests:
            request.waits_for += 1


class TakesOldCopies(ServerNode):
    """Takes what a master sent in a view that is over."""

    def _hear(self, sender, message):
        if isinstance(message, Copy) and self.view is not None and message.view < self.view.number:
            self._apply(message.operation)
        super()._hear(sender, message)


class KeepsToItself(ServerNode):
    """Does not hand to a new master what that may never have had."""

    def _hand_to_masters(self):
        self._carried = []


@pytest.mark.parametrize(
    "broken",
    [
        CountsTwice,
        AcknowledgesEarly,
        ServesWhatItLacks,
        ForgetsWhatIsUnderWay,
        TakesOldCopies,
        KeepsToItself,
    ],
)
def test_a_protocol_that_is_broken_on_purpose_is_found(broken):
    with pytest.raises(ViolationError, match=r"again: offbeat simulate ps --seeds 1 --seed \d+$"):
        run_all(range(SEEDS_MAX), broken)
