"""States that are taken down while samples are dealt: who goes on from one uses each sample once.

The model counts how often each sample was used (`support/sample_counting.py`), and a state holds it: after it
was loaded, in whatever job, every sample must come to one use an epoch.
"""

import pytest
import torch
from torch.utils.data import TensorDataset

from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.averaging.synchronizer import GroupSynchronizer
from offbeat.strategies import AllReduce, PartialAllReduce
from support.processes import run, values
from support.sample_counting import CALM, SAMPLES, STRATEGY, count, once, once_but_for_the_rest

EPOCHS = 4
EQUAL = PartialAllReduce(limit=10**6, shards="equal")


class Saver:
    """Saves on the worker that leads, once it has finished so many steps; and then every so many again."""

    def __init__(self, path, step, every=None):
        self._path, self._next, self._every = path, step, every

    def __call__(self, session):
        while session.step >= self._next:
            if session.is_leader:
                torch.save(session.state_dict(), self._path / f"{self._next}.pt")
            self._next = self._next + self._every if self._every else float("inf")


def saves(rank, emit, strategy, path, step, every=None, options=None):
    return count(rank, emit, strategy, EPOCHS, Saver(path, step, every), options=options)


def goes_on(rank, emit, strategy, state, options=None):
    return count(rank, emit, strategy, EPOCHS, options=options, state=state)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_state_from_the_middle_of_an_epoch_goes_on_with_the_samples_that_it_lacks(workers, tmp_path):
    once(run(saves, 3, CALM, tmp_path, 13))
    state = torch.load(tmp_path / "13.pt")
    uses = state["model"]["uses_N"]
    assert state["epoch"] == 1
    assert SAMPLES < uses.sum() < 2 * SAMPLES
    once(run(goes_on, workers, CALM, tmp_path / "13.pt"))


@pytest.mark.long
def test_a_state_of_any_step(tmp_path):
    """The last steps of an epoch, and the first ones of the next, too."""
    once(run(saves, 2, CALM, tmp_path, 11, 1))
    states = sorted(tmp_path.iterdir(), key=lambda path: int(path.stem))
    epochs = [torch.load(path)["epoch"] for path in states]
    assert set(epochs) == set(range(EPOCHS))
    for path in [*states[:4], states[epochs.index(3) - 1], states[epochs.index(3)], states[-1]]:
        once(run(goes_on, 2, CALM, path))


@pytest.mark.long
def test_with_a_worker_left_out_be_it_the_first(tmp_path):
    """Whoever leads saves, and what others lent or had in their hands is not in the state."""
    strategy = PartialAllReduce(limit=3, n_profile=2, late="join", staleness=100)
    once(run(saves, 3, strategy, tmp_path, 20, 9, env={"OFFBEAT_SLOW": "0:20"}))
    for path in tmp_path.iterdir():
        once(run(goes_on, 3, CALM, path))


@pytest.mark.long
def test_through_a_data_loader_that_loads_ahead(tmp_path):
    once(run(saves, 2, CALM, tmp_path, 20, None, {"num_workers": 1}))
    once(run(goes_on, 2, CALM, tmp_path / "20.pt", {"num_workers": 1}))


def test_with_drop_last_a_state_goes_on_with_what_it_lacks_and_leaves_out_the_same(tmp_path):
    options = {"drop_last": True}
    once_but_for_the_rest(run(saves, 3, CALM, tmp_path, 13, None, options), 100)
    assert torch.load(tmp_path / "13.pt")["epoch"] == 1
    once_but_for_the_rest(run(goes_on, 2, CALM, tmp_path / "13.pt", options), 100)


class SaverOutside:
    """Saves where it must not."""

    def __call__(self, session):
        if session.worker == 1 and session.worker not in session.members:
            session.state_dict()


def saves_outside(rank, emit):
    return count(rank, emit, STRATEGY, EPOCHS, SaverOutside())


def test_a_worker_that_is_left_out_has_nothing_to_save():
    first, second, third = run(saves_outside, 3, env={"OFFBEAT_SLOW": "1:20"})
    assert second.error_type == "OffbeatError"
    assert "worker 1 is excluded from the group, and its parameters are outdated" in second.error
    assert "session.is_leader" in second.error
    once([first, third])


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (CALM, AllReduce(), "assigned on demand: use a strategy that does the same"),
        (EQUAL, CALM, "split equally: use a strategy that does the same"),
    ],
)
def test_samples_that_were_shared_out_otherwise_are_refused(before, after, words, tmp_path):
    values(run(saves, 2, before, tmp_path, 5))
    ended = run(goes_on, 2, after, tmp_path / "5.pt")
    assert "OffbeatError" in [one.error_type for one in ended]  # the other may hear of it first
    for one in ended:
        assert words in one.error


def fails_where_it_gives_its_state(rank, emit, is_late):
    """Worker 0 does; if `is_late`, worker 1 comes to it when it has heard that worker 0 is gone."""
    if rank == 0:

        def fail(self, *arguments):
            raise ValueError("this state cannot be given")

        GroupSynchronizer._copy_state = fail
    elif is_late:
        first_seat = GroupBinding.acquire_initial

        def first_seat_later(self, world):
            membership = self.membership
            self._member.wait_for(lambda: "worker 0" in membership.change_reason, 60, "the end of worker 0")
            return first_seat(self, world)

        GroupBinding.acquire_initial = first_seat_later
    count(rank, emit, CALM, EPOCHS)


@pytest.mark.parametrize("is_late", [False, True])
def test_who_waits_for_the_first_state_is_informed_why_it_does_not_come(is_late):
    first, second = run(fails_where_it_gives_its_state, 2, is_late)
    assert first.error == "this state cannot be given"
    assert "could not receive the initial state before the first step" in second.error
    assert "this state cannot be given" in second.error


def with_fewer_samples(rank, emit, state):
    return count(rank, emit, CALM, EPOCHS, dataset=TensorDataset(torch.arange(50)), state=state)


def test_other_data_than_the_state_is_of_is_refused(tmp_path):
    values(run(saves, 2, CALM, tmp_path, 5))
    for one in run(with_fewer_samples, 2, tmp_path / "5.pt"):
        assert one.error_type in ("OffbeatError", "WorkerError")  # its own, or that of who was first
        assert f"an epoch of {SAMPLES} samples, and the data set has 50" in one.error


def loads_on_one(rank, emit, state):
    """What a loop does that forgets that every worker has to load the state."""
    if rank == 0:
        return goes_on(rank, emit, CALM, state)
    other = torch.load(state)
    other["used"] = {"0": [[0, 1]]}
    torch.save(other, f"{state}.{rank}")
    return goes_on(rank, emit, CALM, f"{state}.{rank}")


def test_workers_that_load_different_states_are_informed(tmp_path):
    values(run(saves, 2, CALM, tmp_path, 5))
    for one in run(loads_on_one, 2, tmp_path / "5.pt"):
        assert one.error_type == "WorkerError"
        assert "continue from different states of epoch 0: load the same state on every worker" in one.error
