"""The policy of shared validation: metrics are of one snapshot and are reported once in any history."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    EvaluatePart,
    Finished,
    Joined,
    Left,
    Lost,
    MergeStates,
    PartEvaluated,
    RolledBack,
    SendSnapshot,
    SnapshotTaken,
    StatesMerged,
    Tick,
    ValidationFinished,
    ValidationStarted,
)
from offbeat.policies.validation.shared_schedule import BACKUP_FACTOR, PARTS_PER_EVALUATOR, SharedValidation

DEADLINE_S = 100.0


def joined(worker, now_s=0.0):
    return Joined(
        now_s=now_s,
        worker=worker,
        world=3,
        peer=f"worker-{worker}",
        location="here",
        addresses=(),
        model_signature=(),
        strategy="bsp",
    )


def taken(
    worker, epoch=0, now_s=0.0, digest="same", is_current=True, samples=100, evaluators=1, decision_rule=""
):
    return SnapshotTaken(
        now_s=now_s,
        worker=worker,
        epoch=epoch,
        digest=digest,
        is_current=is_current,
        samples=samples,
        evaluators=evaluators,
        part_deadline_s=DEADLINE_S,
        decision_rule=decision_rule,
    )


def evaluated(part, now_s=0.0, **changes):
    """The result of an assigned part: means identify the snapshot, counts add up to samples."""
    samples = range(part.start, part.stop)
    values = {
        "worker": part.worker,
        "epoch": part.epoch,
        "digest": part.digest,
        "part": part.part,
        "means": {"loss": value_of(part.digest) + sum(samples) / len(samples)},
        "counts": {"right": float(len(samples))},
    }
    return PartEvaluated(now_s=now_s, **{**values, **changes})


def with_state(part, now_s=0.0, **changes):
    """As `evaluated`, of a metric that is merged: its state identifies the snapshot and the samples."""
    states = (("seen", f"{part.digest}:{part.start}:{part.stop}"),)
    return evaluated(part, now_s, **{"states": states, **changes})


def merged(worker, asked, now_s=0.0, **changes):
    """The result of merging these states: how many samples of one snapshot they have seen."""
    assert [one.part for one in asked] == list(range(asked[0].parts))
    seen = [dict(one.states)["seen"].rsplit(":", 2) for one in asked]
    assert {digest for digest, _, _ in seen} == {asked[0].digest}
    positions = [position for _, start, stop in seen for position in range(int(start), int(stop))]
    assert positions == list(range(100))
    values = {"worker": worker, "epoch": asked[0].epoch, "digest": asked[0].digest, "means": {}}
    return StatesMerged(now_s=now_s, **{**values, "counts": {"seen": float(len(positions))}, **changes})


def value_of(digest):
    return float(sum(map(ord, digest)))


def is_of_one_snapshot(over, samples=100, is_merged=False):
    counts = {"right": samples, **({"seen": samples} if is_merged else {})}
    return over.counts == counts and over.means == {
        "loss": pytest.approx(value_of(over.digest) + (samples - 1) / 2)
    }


def started(workers, *events):
    policy = SharedValidation()
    actions = []
    for event in [*map(joined, range(workers)), *events]:
        actions += policy.handle(event)
    return policy, actions


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


# In order -----------------------------------------------------------------------------------------------


def test_each_worker_evaluates_its_part_and_all_receive_the_mean():
    policy, actions = started(3, taken(0), taken(1), taken(2))
    assert not of(SendSnapshot, actions)
    parts = of(EvaluatePart, actions)
    assert [part.worker for part in parts] == [0, 1, 2]
    done, over = [], []
    while parts:
        part = parts.pop(0)
        done.append(part)
        answers = policy.handle(evaluated(part))
        parts += of(EvaluatePart, answers)
        over += of(ValidationFinished, answers)
    assert len(done) == 3 * PARTS_PER_EVALUATOR
    assert sorted(position for part in done for position in range(part.start, part.stop)) == list(range(100))
    assert len(over) == 1
    assert (over[0].worker, over[0].snapshot_owner, over[0].digest) == (None, 0, "same")
    assert is_of_one_snapshot(over[0])


def test_a_single_worker_with_one_evaluator_gets_the_whole_set():
    _, actions = started(1, taken(0))
    assert [(part.start, part.stop) for part in of(EvaluatePart, actions)] == [(0, 100)]


def test_a_worker_gets_as_many_parts_as_it_evaluates_at_once():
    _, actions = started(2, taken(0, evaluators=3))
    assert [part.worker for part in of(EvaluatePart, actions)] == [0, 0, 0]


def test_a_slow_worker_evaluates_less():
    """One takes four seconds for a part, two others one."""
    policy, actions = started(3, taken(0), taken(1), taken(2))
    ends = {part: 4.0 if part.worker == 2 else 1.0 for part in of(EvaluatePart, actions)}
    count = {0: 0, 1: 0, 2: 0}
    while ends:
        part = min(ends, key=ends.get)
        now_s = ends.pop(part)
        count[part.worker] += 1
        for more in of(EvaluatePart, policy.handle(evaluated(part, now_s))):
            ends[more] = now_s + (4.0 if more.worker == 2 else 1.0)
    assert count[2] <= 2
    assert count[0] + count[1] + count[2] >= 12
    assert abs(count[0] - count[1]) <= 1


def test_older_epochs_are_evaluated_first():
    policy, actions = started(2, taken(0), taken(0, epoch=1))
    assert {part.epoch for part in of(EvaluatePart, actions)} == {0}
    parts = of(EvaluatePart, actions)
    epochs = []
    while parts:
        part = parts.pop()
        epochs.append(part.epoch)
        parts += of(EvaluatePart, policy.handle(evaluated(part)))
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}


# The evaluated snapshot ---------------------------------------------------------------------------------


def test_a_worker_with_another_snapshot_is_sent_the_evaluated_one_once():
    policy, actions = started(2, taken(0, digest="mine"), taken(1, digest="yours"))
    (transfer,) = of(SendSnapshot, actions)
    assert (transfer.worker, transfer.receiver, transfer.digest) == (0, 1, "mine")
    parts = of(EvaluatePart, actions)
    assert {part.digest for part in parts} == {"mine"}
    more = policy.handle(evaluated(next(part for part in parts if part.worker == 1)))
    assert not of(SendSnapshot, more)


def test_an_excluded_worker_helps_but_its_snapshot_is_not_evaluated():
    policy, actions = started(2, taken(1, digest="old", is_current=False))
    assert not of(EvaluatePart, actions)
    actions = policy.handle(taken(0, digest="new"))
    assert {part.digest for part in of(EvaluatePart, actions)} == {"new"}
    assert {part.worker for part in of(EvaluatePart, actions)} == {0, 1}


@pytest.mark.parametrize("end", [Finished, Left, Lost])
def test_without_a_current_snapshot_the_first_is_evaluated_once_no_other_can_arrive(end):
    details = {
        Finished: {"epoch": 0, "step": 4},
        Left: {"step": 4},
        Lost: {"cause": "it was silent"},
    }[end]
    policy, actions = started(3, taken(1, digest="b", is_current=False), taken(2, is_current=False))
    assert not of(EvaluatePart, actions)
    actions = policy.handle(end(now_s=1.0, worker=0, **details))
    assert {part.digest for part in of(EvaluatePart, actions)} == {"b"}


def test_others_continue_when_the_owner_is_lost():
    policy, actions = started(3, taken(0), taken(1), taken(2, digest="other"))
    answers = policy.handle(Lost(now_s=1.0, worker=0, cause="it was killed"))
    parts = [part for part in of(EvaluatePart, [*actions, *answers]) if part.worker != 0]
    (transfer,) = of(SendSnapshot, answers)
    assert (transfer.worker, transfer.receiver) == (1, 2)
    assert finish(policy, parts).snapshot_owner == 1


def test_when_no_worker_has_the_snapshot_another_is_evaluated_from_the_beginning():
    policy, actions = started(2, taken(0, digest="a"))
    (part,) = of(EvaluatePart, actions)
    policy.handle(evaluated(part))
    answers = policy.handle(Lost(now_s=1.0, worker=0, cause="it was killed"))
    assert answers == []
    answers = policy.handle(taken(1, digest="b"))
    over = finish(policy, of(EvaluatePart, answers))
    assert over.digest == "b"
    assert is_of_one_snapshot(over)


def test_without_any_own_snapshot_left_there_are_no_metrics():
    policy, _ = started(2, taken(0, digest="a"), taken(1, digest="b"))  # which worker 1 may have overwritten
    (over,) = policy.handle(Lost(now_s=1.0, worker=0, cause="it was killed"))
    assert isinstance(over, ValidationFinished)
    assert over.snapshot_owner is None
    assert "no worker is left that has the snapshot" in over.reason


def test_the_part_of_a_lost_worker_is_assigned_to_the_next_free_one():
    policy, actions = started(2, taken(0), taken(1))
    mine, lost = of(EvaluatePart, actions)
    assert policy.handle(Lost(now_s=0.0, worker=1, cause="it was killed")) == []
    (next_,) = of(EvaluatePart, policy.handle(evaluated(mine)))
    assert (next_.worker, next_.part) == (0, lost.part)


def test_a_result_of_the_previous_snapshot_does_not_count():
    policy, actions = started(3, taken(0, digest="a"), taken(1, digest="b"))
    (old,) = [part for part in of(EvaluatePart, actions) if part.worker == 1]
    policy.handle(Lost(now_s=0.0, worker=0, cause="it was killed"))
    parts = of(EvaluatePart, policy.handle(taken(2, digest="c")))
    (new,) = [part for part in parts if part.worker == 1]
    policy.handle(replace(evaluated(old), part=new.part))
    over = finish(policy, parts)
    assert over.digest == "c"
    assert is_of_one_snapshot(over)


def test_a_result_that_arrives_after_the_loss_of_the_owner_counts_for_its_own_samples():
    """Worker 1 has the snapshot of worker 0, fewer are left, and worker 2's first result is late."""
    policy, actions = started(3, taken(2, digest="another", is_current=False), taken(0))
    (old,) = [part for part in of(EvaluatePart, actions) if part.worker == 2]
    policy.handle(Lost(now_s=0.0, worker=0, cause="it was killed"))
    parts = of(EvaluatePart, policy.handle(taken(1)))
    (new,) = [part for part in parts if part.worker == 2]
    assert new.part == old.part
    parts[parts.index(new)] = old
    assert is_of_one_snapshot(finish(policy, parts))


def finish(policy, parts):
    """Has all parts evaluated; returns the end of the epoch."""
    (over,) = of(ValidationFinished, answers_to_all(policy, parts, evaluated))
    return over


def answers_to_all(policy, parts, result_of):
    """Has parts evaluated until none is left; returns the other answers."""
    parts, others = list(parts), []
    while parts:
        answers = policy.handle(result_of(parts.pop(0), now_s=1.0))
        parts += of(EvaluatePart, answers)
        others += [answer for answer in answers if not isinstance(answer, EvaluatePart)]
    return others


# Metrics that are merged --------------------------------------------------------------------------------


def test_the_worker_of_the_first_part_merges_the_states_of_the_metrics():
    policy, actions = started(2, taken(0), taken(1))
    asked = of(MergeStates, answers_to_all(policy, of(EvaluatePart, actions), with_state))
    assert {one.worker for one in asked} == {0}
    (over,) = policy.handle(merged(0, asked))
    assert is_of_one_snapshot(over, is_merged=True)
    assert policy.handle(merged(0, asked)) == []


def test_when_the_merging_worker_is_lost_another_evaluates_the_first_part_and_merges():
    policy, actions = started(2, taken(0), taken(1))
    asked = of(MergeStates, answers_to_all(policy, of(EvaluatePart, actions), with_state))
    (again,) = policy.handle(Lost(now_s=1.0, worker=0, cause="it was killed"))
    assert isinstance(again, EvaluatePart)
    assert (again.worker, again.part) == (1, 0)
    assert policy.handle(merged(0, asked)) == []
    asked = of(MergeStates, policy.handle(with_state(again)))
    assert {one.worker for one in asked} == {1}
    (over,) = policy.handle(merged(1, asked))
    assert is_of_one_snapshot(over, is_merged=True)


def test_merging_that_never_ends_ends_the_job_and_names_the_worker():
    policy, actions = started(2, taken(0), taken(1))
    answers_to_all(policy, of(EvaluatePart, actions), with_state)
    assert policy.handle(Tick(now_s=DEADLINE_S)) == []
    (stop,) = policy.handle(Tick(now_s=DEADLINE_S + 2))
    assert isinstance(stop, AbortJob)
    assert stop.worker == 0
    assert stop.reason.startswith("worker 0 did not merge the metrics of epoch 0 within 100 s")


def test_a_merge_of_a_worker_that_was_not_asked_is_refused():
    policy, actions = started(2, taken(0), taken(1))
    asked = of(MergeStates, answers_to_all(policy, of(EvaluatePart, actions), with_state))
    with pytest.raises(ProtocolError, match="worker 1 was not asked to merge metrics of epoch 0"):
        policy.handle(merged(1, asked))
    with pytest.raises(ProtocolError, match="worker 0 was not asked to merge metrics of epoch 5"):
        policy.handle(merged(0, asked, epoch=5))


def test_a_metric_that_is_merged_in_one_part_and_not_in_another_is_refused():
    policy, actions = started(2, taken(0), taken(1))
    one, other = of(EvaluatePart, actions)
    policy.handle(with_state(one))
    with pytest.raises(ProtocolError, match=r"got the mean loss, the count right, the merged seen, and of"):
        policy.handle(evaluated(other))


# Latecomers ---------------------------------------------------------------------------------------------


def test_a_newcomer_receives_the_results_of_earlier_epochs():
    policy, actions = started(2, taken(0))
    over = finish(policy, of(EvaluatePart, actions))
    policy.handle(taken(1, epoch=1))
    sent, under_way = policy.handle(joined(7))
    assert (sent.worker, sent.epoch, sent.means) == (7, 0, over.means)
    assert isinstance(under_way, ValidationStarted)
    assert (under_way.worker, under_way.epoch) == (7, 1)


def test_epochs_after_a_rollback_end_without_metrics():
    policy, actions = started(2, taken(0), taken(0, epoch=1), taken(0, epoch=2))
    late = of(EvaluatePart, actions)[0]
    for one in (0, 1):
        answers = policy.handle(RolledBack(now_s=1.0, worker=one, epoch=0))
        dropped = [] if one else [1, 2]
        assert [(over.epoch, over.snapshot_owner) for over in of(ValidationFinished, answers)] == [
            (at, None) for at in dropped
        ]
    assert policy.handle(taken(1, epoch=1)) == []
    assert not of(AbortJob, policy.handle(Tick(now_s=DEADLINE_S / 2)))
    policy.handle(evaluated(late))
    assert policy.handle(replace(evaluated(late), epoch=2)) == []


# Slow evaluations ---------------------------------------------------------------------------------------


def test_a_part_that_takes_long_is_assigned_to_a_second_worker_and_the_first_result_counts():
    policy, actions = started(2, taken(0), taken(1))
    stuck = next(part for part in of(EvaluatePart, actions) if part.worker == 1)
    parts = [part for part in of(EvaluatePart, actions) if part.worker == 0]
    now_s = 0.0
    while parts:
        now_s += 1.0
        parts = of(EvaluatePart, policy.handle(evaluated(parts[0], now_s)))
        if parts and parts[0].part == stuck.part:
            break
    assert parts, "no other worker was assigned the part"
    assert parts[0].worker == 0
    assert now_s > BACKUP_FACTOR
    over = of(ValidationFinished, policy.handle(evaluated(parts[0], now_s + 1)))
    assert is_of_one_snapshot(over[0])
    assert policy.handle(evaluated(stuck, now_s + 2)) == []


def test_without_a_slow_worker_each_part_is_assigned_once():
    policy, actions = started(2, taken(0), taken(1))
    parts = of(EvaluatePart, actions)
    given = list(parts)
    while len(parts) > 1:
        more = of(EvaluatePart, policy.handle(evaluated(parts.pop(0), now_s=1.0)))
        parts, given = parts + more, given + more
    assert not of(EvaluatePart, policy.handle(Tick(now_s=1.5)))
    assert len({part.part for part in given}) == len(given)


def test_a_part_that_is_never_evaluated_ends_the_job_and_names_the_worker():
    policy, _ = started(2, taken(1))
    assert policy.handle(Tick(now_s=DEADLINE_S)) == []
    (stop,) = policy.handle(Tick(now_s=DEADLINE_S + 1))
    assert isinstance(stop, AbortJob)
    assert stop.worker == 1
    assert stop.reason.startswith("worker 1 did not evaluate part 0 of epoch 0 within 100 s")
    assert policy.handle(Tick(now_s=DEADLINE_S + 2)) == []


# Impossible messages ------------------------------------------------------------------------------------


def test_impossible_messages_are_refused():
    policy, actions = started(2, taken(0))
    (part,) = of(EvaluatePart, actions)
    with pytest.raises(ProtocolError, match="100 samples on worker 0 and 99 samples on worker 1"):
        policy.handle(taken(1, samples=99))
    with pytest.raises(ProtocolError, match="got lag, no monitor on worker 5 and sync on worker 6"):
        started(2, taken(5, decision_rule="lag, no monitor"), taken(6, decision_rule="sync"))
    with pytest.raises(ProtocolError, match="one snapshot of epoch 0 from worker 0, got a second one"):
        policy.handle(taken(0))
    with pytest.raises(ProtocolError, match="expected at least one of each"):
        policy.handle(taken(1, evaluators=0))
    with pytest.raises(ProtocolError, match="assigned to worker 0, got one of epoch 5"):
        policy.handle(evaluated(part, epoch=5))
    policy.handle(evaluated(part))
    (part,) = [one for one in of(EvaluatePart, policy.handle(taken(1))) if one.worker == 1]
    with pytest.raises(
        ProtocolError, match=r"got the mean loss, .* and of part \d+, on worker 1, the mean f1"
    ):
        policy.handle(evaluated(part, means={"f1": 0.5}))


# Random histories ---------------------------------------------------------------------------------------


class World:
    """Workers that follow the actions at their own times; links lose only the messages of dead workers."""

    def __init__(self, chance, workers, epochs, merges):
        self.chance = chance
        self.merges = merges  # their results, or parts of them, are to be merged
        self.first = set()  # worker, epoch and digest of those that have evaluated a first part
        self.asked = {}  # by worker and epoch: states to merge
        self.policy = SharedValidation()
        self.now_s = 0.0
        self.alive = set(range(workers))
        self.dying = set()
        self.epoch = dict.fromkeys(range(workers), 0)
        self.epochs = epochs
        self.digests = {}  # by worker and epoch: digest of its snapshot
        self.parts = []
        self.results = []  # on their way to the coordinator
        self.over = {}
        for worker in range(workers):
            self.receive(joined(worker))

    def receive(self, event):
        if self.chance.random() < 0.2:  # the coordinator is killed and started again
            state = json.loads(json.dumps(self.policy.state_dict()))
            self.policy = SharedValidation()
            self.policy.load_state_dict(state)
        for action in self.policy.handle(event):
            self.apply(action)

    def apply(self, action):
        match action:
            case EvaluatePart():
                self.parts.append(action)
            case MergeStates():
                key = (action.worker, action.epoch)
                assert (*key, action.digest) in self.first, "it merges with a snapshot that it does not have"
                self.asked[key] = [*(self.asked[key] if action.part else []), action]
                if len(self.asked[key]) == action.parts:
                    self.results.append(action)
            case SendSnapshot() if {action.worker, action.receiver} <= self.alive:
                key = (action.worker, action.epoch)
                assert self.digests[key] == action.digest, "it sends a snapshot that it does not have"
                received = (action.receiver, action.epoch)
                if self.chance.random() < 0.9:  # else it dies before all is sent
                    self.digests[received] = action.digest
                else:
                    if self.digests[received] != action.digest:  # the same over the same changes nothing
                        self.digests[received] = "garbage"
                    self.dying.add(action.worker)
            case ValidationFinished() if action.worker is None:
                assert action.epoch not in self.over, "an epoch ends twice"
                self.over[action.epoch] = action
                assert action.snapshot_owner is None or is_of_one_snapshot(action, is_merged=self.merges)
            case ValidationFinished():
                assert action.epoch in self.over

    def step(self):
        self.now_s += self.chance.random()
        training = [worker for worker in self.alive if self.epoch[worker] < self.epochs]
        choices = ["train"] * 3 * bool(training) + ["evaluate"] * 4 * bool(self.parts) + ["tick"]
        choices += ["report"] * 2 * bool(self.results)
        choices += ["lose"] * (len(self.alive) > 1 and self.chance.random() < 0.2)
        match self.chance.choice(choices):
            case "train":
                self.train(self.chance.choice(sorted(training)))
            case "evaluate":
                part = self.parts.pop(self.chance.randrange(len(self.parts)))
                if self.digests[part.worker, part.epoch] == part.digest:
                    self.results.append(part)
                    if part.part == 0:
                        self.first.add((part.worker, part.epoch, part.digest))
            case "report":
                self.report(self.results.pop(self.chance.randrange(len(self.results))))
            case "lose":
                self.lose(self.chance.choice(sorted(self.alive)))
            case "tick":
                self.receive(Tick(now_s=self.now_s))
        while dying := self.dying & self.alive:
            self.lose(min(dying))

    def report(self, done):
        if done.worker not in self.alive:
            return
        if isinstance(done, MergeStates):
            self.receive(merged(done.worker, self.asked[done.worker, done.epoch], self.now_s))
        else:
            self.receive((with_state if self.merges else evaluated)(done, self.now_s))

    def train(self, worker):
        epoch = self.epoch[worker]
        self.epoch[worker] += 1
        digest = f"{epoch} {self.chance.choice('aab')}"
        self.digests[worker, epoch] = digest
        is_current = self.chance.random() < 0.8
        self.receive(taken(worker, epoch, self.now_s, digest, is_current))
        if self.epoch[worker] == self.epochs:
            self.receive(Finished(now_s=self.now_s, worker=worker, epoch=epoch, step=9))

    def lose(self, worker):
        self.alive.discard(worker)
        self.receive(Lost(now_s=self.now_s, worker=worker, cause="it was killed"))


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 4), epochs=st.integers(1, 3), merges=st.booleans())
def test_in_any_history_each_epoch_ends_once_with_the_metrics_of_one_snapshot(seed, workers, epochs, merges):
    world = World(random.Random(seed), workers, epochs, merges)
    for _ in range(2000):
        done = world.over.keys() >= set(range(epochs))
        if done and all(world.epoch[worker] == epochs for worker in world.alive):
            break
        world.step()
    else:
        pytest.fail(
            f"epochs {set(range(epochs)) - world.over.keys()} never ended: {world.policy.state_dict()}"
        )
