"""The parameter server's protocol under faults: trials of many seeds, and broken nodes that they find."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbeat.policies.ps.aggregation import Aggregation
from offbeat.policies.ps.client import PsClient
from offbeat.policies.ps.manager import PsManager
from offbeat.policies.ps.messages import InspectResult, Push, Replicate
from offbeat.policies.ps.range_clock import ClockRange, RangeVectorClock
from offbeat.policies.ps.server_node import ServerNode
from offbeat.simulator.ps.cluster import PsSimulation
from offbeat.simulator.ps.trial import draw_trial
from offbeat.simulator.training.cluster import ViolationError

SEEDS = 150
SEEDS_MAX = 400  # until a broken node is found


def run_all(seeds, make_node=ServerNode, make_client=PsClient, make_manager=PsManager):
    for seed in seeds:
        PsSimulation(draw_trial(seed), make_node, make_client, make_manager).run()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_no_fault_breaks_the_promises(first):
    run_all(range(first, first + 10))


def test_a_trial_is_repeated_by_its_seed():
    one, another = PsSimulation(draw_trial(7)), PsSimulation(draw_trial(7))
    one.run()
    another.run()
    assert [view.version for view in one.published_views] == [
        view.version for view in another.published_views
    ]
    assert one._ledger.total_pushed == another._ledger.total_pushed


class ClearsPushesAppliedInPlace(ServerNode):
    """Clears a push after processing it, where the node has reported that it keeps nothing of it."""

    count = 0

    def on_message(self, sender, message):
        if not isinstance(message, Push) or not self.can_apply_in_place(message):
            return super().on_message(sender, message)
        ClearsPushesAppliedInPlace.count += 1
        own = replace(message, content=dict(message.content))  # a client resends its own copy
        outgoing = super().on_message(sender, own)
        own.content.clear()
        return outgoing


@pytest.mark.long
def test_a_push_that_is_applied_in_place_may_be_cleared_after_the_message():
    run_all(range(60), ClearsPushesAppliedInPlace)
    assert ClearsPushesAppliedInPlace.count > 500


class Counting(PsManager):
    """Counts the nodes that it declares lost, and how often it begins to wait for a silent one."""

    lost_for_silence = waited = 0

    def handle(self, event):
        actions = super().handle(event)
        self.lost_for_silence += any("nothing was received from it" in action.reason for action in actions)
        self.waited += any("requests wait for it:" in action.reason for action in actions)
        return actions


class GivesUpTheLastCopy(PsManager):
    """Declares every node lost that has been silent for long enough, even with a last copy."""

    def _is_replicated(self, node):
        return True


def test_a_manager_that_gives_up_the_last_copy_is_found():
    with pytest.raises(ViolationError, match="again: offbeat simulate ps"):
        find(6, make_manager=GivesUpTheLastCopy)


@pytest.fixture(scope="module")
def some_trials():
    """The trials prove only what happens in them."""
    trials = [PsSimulation(draw_trial(seed), make_manager=Counting) for seed in range(40)]
    for trial in trials:
        trial.run()
    return trials


@pytest.mark.long
def test_trials_contain_deaths_joins_and_fills(some_trials):
    views = [view for trial in some_trials for view in trial.published_views]
    assert sum(bool(view.filling) for view in views) > 5
    assert sum(view.target is not None for view in views) > 10


@pytest.mark.long
def test_trials_contain_silences_with_and_without_a_death(some_trials):
    managers = [trial._manager for trial in some_trials]
    assert sum(manager.lost_for_silence for manager in managers) > 5
    assert sum(manager.waited for manager in managers) > 5


@pytest.mark.long
def test_trials_contain_sums_newcomers_and_lost_participants(some_trials):
    assert sum(len(clients) > 1 for trial in some_trials for clients in trial._ledger._sums.values()) > 1000
    assert sum(bool(view.paused) for trial in some_trials for view in trial.published_views) > 10
    assert sum(len(trial._states.doomed_clients) for trial in some_trials if trial.trial.aggregates) > 10


class CountsTwice(ServerNode):
    """Does not look at the clock."""

    def __init__(self, server, store):
        super().__init__(server, store)
        apply = self._store.apply

        def apply_always(operation):
            self._store.clock(operation.namespace).drop(operation.first, operation.last)
            apply(operation)

        self._store.apply = apply_always


class AcknowledgesEarly(ServerNode):
    """Does not wait for its replicas."""

    def _push(self, space, push):
        super()._push(space, push)
        for kept in self._unacked.of_push(push):
            for request in kept.requests:
                if request.push is push and request.pending_count:
                    request.pending_count = 0
                    self._acknowledge(request)


class ServesBeforeTransfer(ServerNode):
    """Serves keys before their transfer is complete."""

    def __init__(self, server, store):
        super().__init__(server, store)
        self._incoming.lacks = lambda _: False


class DropsOperationsUnderWay(ServerNode):
    """Leaves it to the clients to resend, and carries no operation to the new chain."""

    def _resend_or_carry(self, operation, requests):
        for request in requests:
            request.pending_count += 1


class AppliesOldCopies(ServerNode):
    """Applies copies that a master sent in a former view."""

    def _receive(self, sender, message):
        if isinstance(message, Replicate) and self.view is not None and message.view < self.view.version:
            self._incoming.apply(message.operation)
        super()._receive(sender, message)


class SkipsHandoffs(ServerNode):
    """Sends a new master no operations that it may never have received."""

    def _send_handoffs(self):
        self._unacked._carried = []


class BeginsSumsAtOnce(ServerNode):
    """Does not wait, as a new master, for the handoffs of earlier views."""

    def _send_handoff_done(self):
        super()._send_handoff_done()
        self._pending_handoffs.clear()


class WaitsForLostClients(ServerNode):
    """Removes no client that has ever taken part."""

    def __init__(self, server, store):
        super().__init__(server, store)
        self._ever = {}

    def _adopt_view(self, view):
        for namespace, begins in view.participants.items():
            self._ever.setdefault(namespace, {}).update(begins)
        all_participants = {namespace: dict(begins) for namespace, begins in self._ever.items()}
        super()._adopt_view(replace(view, participants=all_participants))


class SumsRepeatedPushes(ServerNode):
    """Keeps waiting pushes over a change of views, after which they arrive again."""

    class Keeps(Aggregation):
        def set_participants(self, begins):
            cells, self._cells = self._cells, {}
            super().set_participants(begins)
            self._cells = cells
            return []

    def __init__(self, server, store):
        super().__init__(server, store)
        self._aggregation = self.Keeps()

    def _sum(self, namespace, one):
        table = self._store.table(self.view.spaces[namespace])
        contents = [request.push.content for repeats in one.requests for request in repeats]
        return replace(super()._sum(namespace, one), content=table.combine(contents, one.first, one.last))


class SumsAtOnce(ServerNode):
    """Waits for no client."""

    class Hasty(Aggregation):
        def _is_complete(self, namespace, cell, time):
            return True

    def __init__(self, server, store):
        super().__init__(server, store)
        self._aggregation = self.Hasty()


class ReturnsOldValues(ServerNode):
    """Answers a push that wants values with the values before it."""

    def __init__(self, server, store):
        super().__init__(server, store)
        self._before = {}

    def _check(self, space, push):
        super()._check(space, push)
        self._before[push.client, push.request, push.first] = dict(self._read(space, push, None))

    def _values(self, space, request, keys):
        values = super()._values(space, request, keys)
        before = self._before.get((request.client, request.request, request.first), values.content)
        return replace(values, content=before)


class SendsTheLatestTime(ServerNode):
    """Sends for all keys the time of one."""

    def _pulled(self, space, pull):
        pulled = super()._pulled(space, pull)
        if isinstance(pulled, InspectResult) and pulled.times:
            time = max(piece.time for piece in pulled.times)
            return replace(pulled, times=(ClockRange(pull.first, pull.last, time),))
        return pulled


class SendsWaitingTimes(ServerNode):
    """Sends the times of pushes that still wait for those of others."""

    def __init__(self, server, store):
        super().__init__(server, store)
        self._received = {}

    def _add_to_sums(self, request, fresh):
        push = request.push
        clock = self._received.setdefault(push.namespace, RangeVectorClock())
        if clock.earlier_ranges(push.client, push.first, push.last, push.time) == [(push.first, push.last)]:
            clock.set_time(push.client, push.first, push.last, push.time)
        super()._add_to_sums(request, fresh)

    def _pulled(self, space, pull):
        pulled = super()._pulled(space, pull)
        if isinstance(pulled, InspectResult) and pull.namespace in self._received:
            pieces = self._received[pull.namespace].pieces(pull.client, pull.first, pull.last)
            return replace(pulled, times=tuple(pieces))
        return pulled


class DoesNotPause(PsClient):
    """Continues to further times while a newcomer waits for its first time."""

    def _assign_time(self, asked, view):
        return super()._assign_time(asked, replace(view, paused={}))


@pytest.mark.parametrize("seed", [3181, 4466])
def test_a_former_participant_does_not_wait_for_its_successors(seed):
    """A client that was alone when it pushed is acknowledged after another one has taken its place."""
    PsSimulation(draw_trial(seed)).run()


class PullsBeforeItPushes(PsClient):
    """Resends its pulls before its pushes."""

    def on_view(self, view):
        self._pending = dict(sorted(self._pending.items(), key=lambda one: one[1].is_push))
        return super().on_view(view)


def find(found_by, **made):
    """Runs trials until one fails, beginning with the seed that has found this before."""
    run_all([*range(found_by, SEEDS_MAX), *range(found_by)], **made)


@pytest.mark.long(after=5)
@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        (CountsTwice, 0),
        (AcknowledgesEarly, 5),
        (ServesBeforeTransfer, 5),
        (DropsOperationsUnderWay, 3),
        (AppliesOldCopies, 8),
        (SkipsHandoffs, 20),
        (BeginsSumsAtOnce, 228),
        (WaitsForLostClients, 1),
        (SumsRepeatedPushes, 1),
        (SumsAtOnce, 1),
        (ReturnsOldValues, 0),
        (SendsTheLatestTime, 82),
        (SendsWaitingTimes, 1),
    ],
)
def test_a_protocol_that_is_broken_on_purpose_is_found(broken, found_by):
    with pytest.raises(ViolationError, match=r"again: offbeat simulate ps --seeds 1 --seed \d+$"):
        find(found_by, make_node=broken)


@pytest.mark.parametrize(("broken", "found_by"), [(DoesNotPause, 49), (PullsBeforeItPushes, 0)])
def test_a_client_that_is_broken_on_purpose_is_found(broken, found_by):
    with pytest.raises(ViolationError, match="again: offbeat simulate ps"):
        find(found_by, make_client=broken)
