"""States saved while samples are assigned on demand: a job that resumes from one uses each sample once.

The model counts how often each sample was used (`support/sample_counting.py`), and a state holds the counts:
after it was loaded, in any job, every sample must reach one use an epoch.
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
    """Saves on the leader after `step` steps, and then after every `every` steps."""

    def __init__(self, path, step, every=None):
        self._path, self._next, self._every = path, step, every

    def __call__(self, session):
        while session.step >= self._next:
            if session.is_leader:
                torch.save(session.state_dict(), self._path / f"{self._next}.pt")
            self._next = self._next + self._every if self._every else float("inf")


def saves(rank, emit, strategy, path, step, every=None, options=None):
    return count(rank, emit, strategy, EPOCHS, Saver(path, step, every), options=options)


def resumes(rank, emit, strategy, state, options=None):
    return count(rank, emit, strategy, EPOCHS, options=options, state=state)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_state_from_the_middle_of_an_epoch_resumes_with_the_unused_samples(workers, tmp_path):
    once(run(saves, 3, CALM, tmp_path, 13))
    state = torch.load(tmp_path / "13.pt")
    uses = state["model"]["uses_N"]
    assert state["epoch"] == 1
    assert SAMPLES < uses.sum() < 2 * SAMPLES
    once(run(resumes, workers, CALM, tmp_path / "13.pt"))


@pytest.mark.long
def test_a_state_of_any_step_resumes_with_the_unused_samples(tmp_path):
    """Also from the last steps of an epoch and the first steps of the next."""
    once(run(saves, 2, CALM, tmp_path, 11, 1))
    states = sorted(tmp_path.iterdir(), key=lambda path: int(path.stem))
    epochs = [torch.load(path)["epoch"] for path in states]
    assert set(epochs) == set(range(EPOCHS))
    for path in [*states[:4], states[epochs.index(3) - 1], states[epochs.index(3)], states[-1]]:
        once(run(resumes, 2, CALM, path))


@pytest.mark.long
def test_a_state_saved_while_the_first_worker_is_excluded_resumes_with_the_unused_samples(tmp_path):
    """The leader saves; late blocks and assigned samples of other workers are not in the state."""
    strategy = PartialAllReduce(limit=3, n_profile=2, late="join", staleness=100)
    once(run(saves, 3, strategy, tmp_path, 20, 9, env={"OFFBEAT_SLOW": "0:20"}))
    for path in tmp_path.iterdir():
        once(run(resumes, 3, CALM, path))


@pytest.mark.long
def test_samples_prefetched_by_a_data_loader_are_not_saved_as_used(tmp_path):
    once(run(saves, 2, CALM, tmp_path, 20, None, {"num_workers": 1}))
    once(run(resumes, 2, CALM, tmp_path / "20.pt", {"num_workers": 1}))


def test_with_drop_last_a_state_resumes_with_the_unused_samples_and_drops_the_same_rest(tmp_path):
    options = {"drop_last": True}
    once_but_for_the_rest(run(saves, 3, CALM, tmp_path, 13, None, options), 100)
    assert torch.load(tmp_path / "13.pt")["epoch"] == 1
    once_but_for_the_rest(run(resumes, 2, CALM, tmp_path / "13.pt", options), 100)


class SaverOutside:
    """Saves on an excluded worker, which is an error."""

    def __call__(self, session):
        if session.worker == 1 and session.worker not in session.members:
            session.state_dict()


def saves_outside(rank, emit):
    return count(rank, emit, STRATEGY, EPOCHS, SaverOutside())


def test_saving_on_an_excluded_worker_raises_an_error():
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
def test_a_state_of_another_kind_of_sharding_is_rejected(before, after, words, tmp_path):
    values(run(saves, 2, before, tmp_path, 5))
    ended = run(resumes, 2, after, tmp_path / "5.pt")
    assert "OffbeatError" in [one.error_type for one in ended]  # the other worker may be notified first
    for one in ended:
        assert words in one.error


def fails_when_it_sends_its_state(rank, emit, is_late):
    """Worker 0 fails; if `is_late`, worker 1 asks for the state after the loss of worker 0 was reported."""
    if rank == 0:

        def fail(self, *arguments):
            raise ValueError("this state cannot be given")

        GroupSynchronizer._copy_state = fail
    elif is_late:
        acquire_initial = GroupBinding.acquire_initial

        def acquire_initial_later(self, world):
            membership = self.membership
            self._client.wait_for(lambda: "worker 0" in membership.change_reason, 60, "the end of worker 0")
            return acquire_initial(self, world)

        GroupBinding.acquire_initial = acquire_initial_later
    count(rank, emit, CALM, EPOCHS)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_worker_that_waits_for_the_initial_state_gets_the_reason_of_its_absence(is_late):
    first, second = run(fails_when_it_sends_its_state, 2, is_late)
    assert first.error == "this state cannot be given"
    assert "could not receive the initial state before the first step" in second.error
    assert "this state cannot be given" in second.error


def with_fewer_samples(rank, emit, state):
    return count(rank, emit, CALM, EPOCHS, dataset=TensorDataset(torch.arange(50)), state=state)


def test_a_state_of_another_data_set_is_rejected(tmp_path):
    values(run(saves, 2, CALM, tmp_path, 5))
    for one in run(with_fewer_samples, 2, tmp_path / "5.pt"):
        assert one.error_type in (
            "OffbeatError",
            "WorkerError",
        )  # its own error, or that of the worker that failed first
        assert f"an epoch of {SAMPLES} samples, and the data set has 50" in one.error


def loads_on_one(rank, emit, state):
    """A loop in which not all workers load the same state."""
    if rank == 0:
        return resumes(rank, emit, CALM, state)
    other = torch.load(state)
    other["used"] = {"0": [[0, 1]]}
    torch.save(other, f"{state}.{rank}")
    return resumes(rank, emit, CALM, f"{state}.{rank}")


def test_loading_different_states_on_workers_raises_an_error(tmp_path):
    values(run(saves, 2, CALM, tmp_path, 5))
    for one in run(loads_on_one, 2, tmp_path / "5.pt"):
        assert one.error_type == "WorkerError"
        assert "continue from different states of epoch 0: load the same state on every worker" in one.error
