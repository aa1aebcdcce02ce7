"""Injected slowness: the forms of rules, agreement of all processes, and messages of refusals."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.policies.stragglers.injection import (
    Burst,
    Chance,
    EpochPart,
    InjectedSlowness,
    SlowRule,
    parse_slow_rule,
)


def slowness(*texts: str, workers: int = 4, seed: int = 0) -> InjectedSlowness:
    return InjectedSlowness([parse_slow_rule(text) for text in texts], workers=workers, seed=seed)


def slow_steps(
    rules: InjectedSlowness, worker: int, *, steps_per_epoch: int = 10, epoch: int = 0
) -> list[int]:
    first = epoch * steps_per_epoch
    return [
        step
        for step in range(steps_per_epoch)
        if rules.factor(worker, epoch, step, steps_per_epoch, first + step) != 1.0
    ]


def victims(rules: InjectedSlowness, epoch: int, workers: int = 4) -> list[int]:
    return [worker for worker in range(workers) if rules.factor(worker, epoch, 0, 10, epoch * 10) != 1.0]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1:5", SlowRule(worker=1, factor=5.0)),
        ("0:1", SlowRule(worker=0, factor=1.0)),
        ("12:2.5", SlowRule(worker=12, factor=2.5)),
        ("1:5@0.0-0.5", SlowRule(worker=1, factor=5.0, applies_in=EpochPart(start=0.0, end=0.5))),
        ("1:5@0.5-1", SlowRule(worker=1, factor=5.0, applies_in=EpochPart(start=0.5, end=1.0))),
        ("random:3", SlowRule(worker=None, factor=3.0)),
        ("random:3@0.0-0.5", SlowRule(worker=None, factor=3.0, applies_in=EpochPart(start=0.0, end=0.5))),
        (
            "1:5@burst=20/100",
            SlowRule(worker=1, factor=5.0, applies_in=Burst(slow_steps=20, period_steps=100)),
        ),
        (
            "random:3@burst=1/1",
            SlowRule(worker=None, factor=3.0, applies_in=Burst(slow_steps=1, period_steps=1)),
        ),
        ("1:5@p=0.05", SlowRule(worker=1, factor=5.0, applies_in=Chance(probability=0.05))),
        ("random:3@p=1", SlowRule(worker=None, factor=3.0, applies_in=Chance(probability=1.0))),
    ],
)
def test_every_form_is_read(text, rule):
    assert parse_slow_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "is not understood: expected WORKER:FACTOR"),
        ("none", "is not understood"),
        ("1", "is not understood"),
        ("1:", "is not understood"),
        (":5", "is not understood"),
        ("-1:5", "is not understood"),
        ("1:-5", "is not understood"),
        ("1:nan", "is not understood"),
        ("1:inf", "is not understood"),
        ("1:1e5", "is not understood"),
        (" 1:5", "is not understood"),
        ("1:5\n", "is not understood"),
        ("1:5@", "is not understood"),
        ("1:5@0.5", "is not understood"),
        ("1:5@burst=20", "is not understood"),
        ("1:5@burst=20/100@0-1", "is not understood"),
        ("١:5", "is not understood"),  # an Arabic digit
        ("Random:5", "is not understood"),
        ("1:0.5", "expected a finite factor of at least 1"),
        ("1:5@0.5-0.5", "expected a part of an epoch, 0 <= start < end <= 1, got 0.5-0.5"),
        ("1:5@0.6-0.5", "got 0.6-0.5"),
        ("1:5@0-1.1", "got 0-1.1"),
        ("1:5@burst=0/100", "expected a burst of 1 to 100 slow steps in a period of 100, got 0"),
        ("1:5@burst=101/100", "got 101"),
        ("1:5@burst=0/0", "expected a burst"),
        ("1:5@p=0", "expected the probability of a slow step, above 0 and at most 1, got 0"),
        ("1:5@p=1.1", "above 0 and at most 1, got 1.1"),
        ("1:5@p=", "is not understood"),
        ("1:5@p=0.05@0-1", "is not understood"),
        ("1" * 5000 + ":5", "is not understood"),
    ],
)
def test_malformed_rules_are_refused_in_one_clear_line(text, wrong):
    with pytest.raises(ValueError) as caught:
        parse_slow_rule(text)
    assert wrong in str(caught.value)
    assert repr(text[:20])[:-1] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=30) | st.from_regex(r"(random|\d):[0-9.]+(@[0-9./=-]*)?"))
def test_any_text_is_either_a_rule_or_a_value_error(text):
    try:
        rule = parse_slow_rule(text)
    except ValueError:
        return
    assert rule.factor >= 1


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, float("nan"), float("inf")])
def test_a_rule_made_without_text_needs_a_finite_factor_of_at_least_1(factor):
    with pytest.raises(ValueError, match="expected a finite factor of at least 1"):
        SlowRule(worker=1, factor=factor)


def test_a_nan_part_of_an_epoch_is_refused():
    with pytest.raises(ValueError, match="expected a part of an epoch"):
        EpochPart(start=float("nan"), end=0.5)
    with pytest.raises(ValueError, match="expected a worker of at least 0"):
        SlowRule(worker=-1, factor=2.0)


def test_a_worker_that_does_not_exist_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"names worker 4, but the workers are 0 to 3: name one of those"):
        slowness("4:5")
    with pytest.raises(ValueError, match="expected at least 1 worker, got 0"):
        slowness("random:5", workers=0)


def test_one_worker_is_slow_always_and_the_others_never():
    rules = slowness("1:5")
    for epoch in range(3):
        assert slow_steps(rules, 1, epoch=epoch) == list(range(10))
        assert slow_steps(rules, 0, epoch=epoch) == []
    assert rules.factor(1, 0, 0, None, 0) == 5.0


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("0.0-0.5", [0, 1, 2, 3, 4]),
        ("0.5-1.0", [5, 6, 7, 8, 9]),
        ("0.7-0.8", [7]),
        ("0.3-0.6", [3, 4, 5]),
        ("0-1", list(range(10))),
    ],
)
def test_a_part_of_every_epoch_is_slow_from_its_start_up_to_its_end(part, steps):
    rules = slowness(f"1:5@{part}")
    for epoch in range(3):
        assert slow_steps(rules, 1, epoch=epoch) == steps
        assert slow_steps(rules, 2, epoch=epoch) == []


@given(st.integers(1, 99), st.integers(1, 300))
def test_two_parts_that_meet_cover_every_step_once(percent, steps_per_epoch):
    early, late = slowness(f"1:5@0-0.{percent:02}"), slowness(f"1:5@0.{percent:02}-1")
    steps = slow_steps(early, 1, steps_per_epoch=steps_per_epoch)
    steps += slow_steps(late, 1, steps_per_epoch=steps_per_epoch)
    assert steps == list(range(steps_per_epoch))


@pytest.mark.parametrize("worker", range(4))
@pytest.mark.parametrize("text", ["1:5@0.0-0.5", "random:3@0.0-0.5"])
def test_a_part_of_an_epoch_needs_the_epochs_length_on_every_worker(text, worker):
    with pytest.raises(
        ValueError, match=r"needs the number of steps in an epoch, got None: use session\.batches"
    ):
        slowness(text).factor(worker, 0, 0, None, 0)


def test_a_burst_slows_the_first_steps_of_every_period_across_epochs():
    rules = slowness("1:5@burst=2/6")
    slow = [step for step in range(20) if rules.factor(1, step // 10, step % 10, None, step) == 5.0]
    assert slow == [0, 1, 6, 7, 12, 13, 18, 19]


@given(st.integers(), st.integers(0, 1000), st.integers(1, 16))
def test_a_random_rule_has_one_victim_an_epoch_on_which_all_processes_agree(seed, epoch, workers):
    first, second = (slowness("random:3", workers=workers, seed=seed) for _ in range(2))
    assert len(victims(first, epoch, workers)) == 1
    # Another copy with other queries before gives the same answer.
    victims(second, epoch + 1, workers)
    assert victims(second, epoch, workers) == victims(first, epoch, workers)


def test_a_random_victim_stays_for_the_epoch_and_changes_between_epochs():
    rules = slowness("random:3")
    drawn = [victims(rules, epoch)[0] for epoch in range(400)]
    for epoch in range(5):
        assert slow_steps(rules, drawn[epoch], epoch=epoch) == list(range(10))
    # Each of the four about 100 times in 400: 60 is more than 4 standard deviations (8.7) away.
    assert all(60 < count < 140 for count in Counter(drawn).values())
    assert len(Counter(drawn)) == 4


def test_victims_depend_on_the_seed_and_on_the_rules_place():
    def drawn(rules: InjectedSlowness) -> list[list[int]]:
        return [victims(rules, epoch) for epoch in range(50)]

    assert drawn(slowness("random:3", seed=1)) != drawn(slowness("random:3", seed=2))
    assert drawn(slowness("random:3")) != drawn(slowness("0:1", "random:3"))


def test_slow_steps_are_drawn_with_their_probability_and_for_each_rule_by_itself():
    rules = slowness(*(f"{worker}:5@p=0.05" for worker in range(4)))
    drawn = [set(slow_steps(rules, worker, steps_per_epoch=4000)) for worker in range(4)]
    # Each about 200 of 4,000: 60 is more than 4 standard deviations (13.8) away.
    assert all(140 < len(steps) < 260 for steps in drawn)
    assert all(rules.factor(0, 0, step, 4000, step) == 5.0 for step in drawn[0])
    # Two workers share about 10 steps (standard deviation 3.2).
    assert all(len(drawn[a] & drawn[b]) < 24 for a in range(4) for b in range(a))


def test_slow_steps_depend_on_the_seed_and_on_the_rules_place():
    def drawn(rules: InjectedSlowness) -> list[int]:
        return slow_steps(rules, 0, steps_per_epoch=200)

    assert drawn(slowness("0:5@p=0.2")) == drawn(slowness("0:5@p=0.2"))
    assert drawn(slowness("0:5@p=0.2")) != drawn(slowness("0:5@p=0.2", seed=1))
    assert drawn(slowness("0:5@p=0.2")) != drawn(slowness("1:2", "0:5@p=0.2"))


def test_a_probability_of_one_slows_each_step_of_the_drawn_worker():
    rules = slowness("random:3@p=1")
    slow = victims(rules, 0)
    assert len(slow) == 1
    assert slow_steps(rules, slow[0]) == list(range(10))


def test_victims_are_the_same_in_a_process_with_other_hashes():
    code = (
        "from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule\n"
        "s = InjectedSlowness([parse_slow_rule('random:3')], workers=4, seed=7)\n"
        "print([w for e in range(30) for w in range(4) if s.factor(w, e, 0, 1, e) > 1])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = slowness("random:3", seed=7)
    assert outputs == {f"{[victims(here, epoch)[0] for epoch in range(30)]}\n".encode()}


def test_rules_that_hold_at_once_multiply():
    rules = slowness("1:2", "1:3@0.5-1.0")
    assert rules.factor(1, 0, 0, 10, 0) == 2.0
    assert rules.factor(1, 0, 5, 10, 5) == 6.0


def test_without_rules_everything_is_normal():
    assert slowness().factor(0, 0, 0, None, 0) == 1.0
