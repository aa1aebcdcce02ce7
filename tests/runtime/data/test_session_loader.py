"""A program's DataLoader, shared out among the workers of a session."""

import multiprocessing
from itertools import islice

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import SSP, AllReduce, Hybrid, LocalSGD
from support.processes import run, values
from support.sample_counting import BATCH, CALM, SAMPLES, Counter, once_each, take

NUMBERS = TensorDataset(torch.arange(SAMPLES))
EVERY = [*range(SAMPLES)]


def alone(dataset=NUMBERS, **options):
    """A session of one worker, and its loader."""
    model = Counter()
    session = offbeat.join(model, torch.optim.SGD(model.parameters(), lr=1.0), AllReduce())
    return session, session.loader(DataLoader(dataset, **{"batch_size": BATCH, "shuffle": True, **options}))


def numbers_of(batches):
    return [number for (batch,) in batches for number in batch.tolist()]


def use(model, optimizer, batch):
    model(batch).backward()
    once_each(model)
    take(model, optimizer)


def compare(rank, emit):
    """The batches of two epochs, from the session and from its loader."""
    found = []
    for is_loader in (False, True):
        model = Counter()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.join(model, optimizer, AllReduce()) as session:
            loader = session.loader(DataLoader(NUMBERS, BATCH, shuffle=True))
            epochs = []
            for _ in range(2) if is_loader else session.epochs(2):
                seen = []
                for (batch,) in loader if is_loader else session.batches(NUMBERS, BATCH):
                    use(model, optimizer, batch)
                    seen.append(batch.tolist())
                assert len(seen) == len(loader)
                epochs.append([number for batch in seen for number in batch])
            found.append(epochs)
            assert session.epoch == (1 if is_loader else 2)
    assert found[0] == found[1]
    return found[1]


def test_each_iteration_is_an_epoch_of_the_session():
    first, second = values(run(compare, 2))
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [EVERY, EVERY]
    assert first[0] != first[1]


def test_an_iteration_that_is_broken_off_goes_on_where_it_ended():
    session, loader = alone()
    with session:
        seen = [number for _ in range(4) for number in numbers_of(islice(loader, 5))]
        assert len(seen) == 4 * 5 * BATCH
        assert sorted(seen + numbers_of(loader)) == EVERY
        assert session.epoch == 0


def test_iterators_share_the_batches_of_an_epoch():
    session, loader = alone()
    with session:
        first, second, unused = iter(loader), iter(loader), iter(loader)
        seen = numbers_of([next(first), next(second), next(first)])
        seen += numbers_of(second)
        assert sorted(seen) == EVERY
        assert not numbers_of(first)
        assert sorted(numbers_of(unused)) == EVERY  # of the next epoch
        assert session.epoch == 1


def test_set_epoch_begins_that_epoch_and_drops_what_is_left():
    session, loader = alone()
    with session:
        orders = [numbers_of(loader) for _ in range(3)]
    session, loader = alone()
    with session:
        loader.set_epoch(0)
        running = iter(loader)
        assert numbers_of([next(running)]) == orders[0][:BATCH]
        loader.set_epoch(0)
        assert numbers_of([next(running)]) == orders[0][BATCH : 2 * BATCH]
        loader.set_epoch(2)
        assert not numbers_of(running)
        assert numbers_of(loader) == orders[2]
        for over in (1, 2):
            with pytest.raises(OffbeatError, match=f"an epoch from 3 on, got {over}, which is over: begin"):
                loader.sampler.set_epoch(over)


def test_within_epochs_of_the_session_what_is_left_of_one_is_dropped():
    session, loader = alone()
    with session:
        orders = [numbers_of(loader) for _ in range(3)]
    session, loader = alone()
    with session:
        seen = []
        for _ in session.epochs(3):
            for (batch,) in loader:
                seen.append(batch.tolist())
                break
    assert seen == [order[:BATCH] for order in orders]


def test_in_a_loop_over_epochs_an_epoch_has_one_pass():
    session, loader = alone()
    with session:
        for _ in session.epochs(2):
            assert sorted(numbers_of(loader)) == EVERY
            with pytest.raises(OffbeatError, match=r"are used up: begin the next epoch with session\.epochs"):
                next(iter(loader))
        assert session.epoch == 2


def test_a_loaded_state_says_where_the_next_iteration_begins():
    session, loader = alone()
    with session:
        start = session.state_dict()
        first = numbers_of(loader)
        session.load_state_dict(start)
        assert numbers_of(loader) == first


def test_a_loop_that_fails_ends_the_loading_processes():
    session, loader = alone(num_workers=1)
    running = iter(loader)

    def fail():
        with session:
            next(running)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not multiprocessing.active_children()


def test_another_loader_waits_until_the_first_is_used_up():
    session, loader = alone()
    other = session.loader(DataLoader(NUMBERS, BATCH))
    with session:
        running = iter(loader)
        next(running)
        with pytest.raises(OffbeatError, match="is being iterated already"):
            next(iter(other))
        rest = numbers_of(running)
        assert len(rest) == SAMPLES - BATCH
        assert numbers_of(other) == EVERY


def test_samples_are_loaded_as_the_loader_says():
    session, loader = alone(num_workers=2, collate_fn=len, drop_last=True)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (BATCH, 2, True)
    assert loader.dataset is NUMBERS
    with session:
        assert [*loader] == [BATCH] * (SAMPLES // BATCH)
    assert len(loader) == SAMPLES // BATCH


@pytest.mark.parametrize(
    ("options", "expected", "is_shuffled"),
    [
        ({"shuffle": False}, EVERY, False),
        ({"shuffle": None, "sampler": DistributedSampler(NUMBERS, 2, 0, shuffle=False)}, EVERY, False),
        ({"shuffle": None, "sampler": DistributedSampler(NUMBERS, 2, 0)}, EVERY, True),
        ({"shuffle": None, "sampler": SubsetRandomSampler([*range(5, 50)])}, [*range(5, 50)], True),
    ],
    ids=["sequential", "distributed", "distributed and shuffled", "subset"],
)
def test_samplers_whose_samples_can_be_shared_out(options, expected, is_shuffled):
    session, loader = alone(**options)
    with session:
        found = numbers_of(loader)
    assert sorted(found) == expected
    assert (found != expected) == is_shuffled


class Reversed(SequentialSampler):
    def __iter__(self):
        return reversed(range(SAMPLES))


class Own(DataLoader):
    def __iter__(self):
        return iter([])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Stream(), BATCH), "got an IterableDataset"),
        (lambda: DataLoader(NUMBERS, batch_size=None), "or with batch_size=None"),
        (
            lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 3, False)),
            "with a batch_sampler",
        ),
        (
            lambda: DataLoader(NUMBERS, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, 9)),
            "got a WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(NUMBERS, BATCH, sampler=RandomSampler(NUMBERS, replacement=True)),
            "got a RandomSampler",
        ),
        (lambda: DataLoader(NUMBERS, BATCH, sampler=Reversed(NUMBERS)), "got a Reversed"),
        (lambda: DataLoader(NUMBERS, BATCH, sampler=SequentialSampler(range(9))), "got a SequentialSampler"),
        (lambda: Own(NUMBERS, BATCH), "needs a torch DataLoader with its own iterator, got a Own"),
        (lambda: NUMBERS, "needs a torch DataLoader with its own iterator, got a TensorDataset"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(loader, words):
    session, _ = alone()
    with session, pytest.raises(OffbeatError, match=words):
        session.loader(loader())


def count(rank, emit, last_epoch_batches):
    """How often each sample was used under a strategy that assigns samples, without `session.epochs`."""
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, CALM) as session:
        loader = session.loader(DataLoader(NUMBERS, BATCH, shuffle=True))
        for _ in range(3):
            for (batch,) in loader:
                use(model, optimizer, batch)
        left = iter(loader)
        for _ in range(last_epoch_batches):
            use(model, optimizer, *next(left))
    assert next(left, None) is None  # it ended with the session
    return (-model.uses_N).detach().tolist()


@pytest.mark.parametrize("last_epoch_batches", [0, 2])
def test_where_samples_are_assigned_each_is_used_once_in_an_epoch(last_epoch_batches):
    first, *others = values(run(count, 3, last_epoch_batches))
    assert all(other == first for other in others)
    assert {*first} <= {3.0, 4.0}
    assert bool(4.0 in first) == bool(last_epoch_batches)
    assert first.count(4.0) <= 3 * BATCH * last_epoch_batches


# Batches that are taken ahead ------------------------------------------------------------------------------


def ahead(dataset=NUMBERS):
    """A session of one worker, and its loader for a program that takes batches ahead."""
    session, _ = alone()
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return session, session.loader(loader, takes_ahead=True)


def use_begun(session, loader, batch):
    """One step with a batch that was taken."""
    loader.begin_batch()
    (optimizer,) = session._trained.optimizers
    use(session._trained.model, optimizer, *batch)


def one_ahead(loader):
    """Pairs of a batch and the one that follows it; None after the last."""
    running = iter(loader)
    current = next(running, None)
    while current is not None:
        following = next(running, None)
        yield current, following
        current = following


def take_ahead(rank, emit, strategy, strides):
    """How often each sample was used, by a program that takes several batches, and then uses them."""
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, strategy) as session:
        loader = session.loader(DataLoader(NUMBERS, BATCH, shuffle=True), takes_ahead=True)
        for _ in range(2):
            running = iter(loader)
            while taken := [*islice(running, strides[rank])]:
                for (batch,) in taken:
                    loader.begin_batch()
                    use(model, optimizer, batch)
            session.barrier()
            assert session.state_dict()["epoch"] == session.epoch + 1
    return (-model.uses_N).detach().tolist()


@pytest.mark.parametrize("strategy", [AllReduce(), Hybrid()])
def test_a_batch_that_is_taken_ahead_has_its_own_weight(strategy):
    """The last ones are smaller, so that another batch's weight would count their samples twice or more."""
    for uses in values(run(take_ahead, 2, strategy, (1, 5))):
        assert uses == [2.0] * SAMPLES


def test_a_state_holds_the_batches_that_were_used_not_those_that_were_taken():
    session, loader = ahead()
    with session:
        for steps, (batch, _) in enumerate(one_ahead(loader), 1):
            use_begun(session, loader, batch)
            if steps == 3:
                state = session.state_dict()
                break
    assert state["batches_taken"] == 3
    session, loader = ahead()
    with session:
        session.load_state_dict(state)
        rest = numbers_of(loader)
    assert len(rest) == SAMPLES - 3 * BATCH


def test_batches_that_were_taken_and_not_used_come_again():
    session, loader = ahead()
    with session:
        running = iter(loader)
        first, second, third = (next(running) for _ in range(3))
        use_begun(session, loader, first)
        assert [batch.tolist() for (batch,) in islice(loader, 2)] == [second[0].tolist(), third[0].tolist()]
        for batch in (following := [*loader]):
            use_begun(session, loader, batch)
        assert sorted(numbers_of([first, *following])) == EVERY
        assert len(numbers_of(loader)) == SAMPLES
        assert session.epoch == 1
        loader.set_epoch(3)
        assert session.epoch == 3


def test_a_program_that_does_not_use_each_batch_in_turn_is_told_what_to_do():
    session, loader = ahead()
    with session:
        with pytest.raises(OffbeatError, match="and a batch taken from it"):
            loader.begin_batch()
        running = iter(loader)
        next(running)
        loader.begin_batch()
        (optimizer,) = session._trained.optimizers
        use(session._trained.model, optimizer, torch.arange(2))
        with pytest.raises(
            OffbeatError, match="before a batch was taken, or after its epoch was dropped: call"
        ):
            loader.begin_batch()
        with pytest.raises(OffbeatError, match="is being iterated already"):
            next(iter(session.loader(DataLoader(NUMBERS, BATCH), takes_ahead=True)))


def take_a_step_ahead(rank, emit, strategy):
    """Steps of three batches each, by a program that takes all batches of a step first."""
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, strategy) as session:
        loader = session.loader(DataLoader(NUMBERS, BATCH, shuffle=True), takes_ahead=True)
        running = iter(loader)
        while taken := [*islice(running, 3)]:
            for (batch,) in taken:
                loader.begin_batch()
                model(batch).backward()
            assert session.samples == sum(len(batch) for (batch,) in taken)
            optimizer.step()
            optimizer.zero_grad()
        return session.step, len(loader)


@pytest.mark.parametrize("strategy", [LocalSGD(shards="equal"), SSP(s=1, shards="equal")])
def test_a_step_of_several_batches_is_taken_ahead_where_workers_count_their_own_steps(strategy):
    for steps, batches in values(run(take_a_step_ahead, 2, strategy)):
        assert steps == -(-batches // 3)


def skip_a_batch(rank, emit):
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        loader = session.loader(DataLoader(NUMBERS, BATCH), takes_ahead=True)
        for _ in islice(loader, 2):
            loader.begin_batch()


def test_a_batch_that_is_taken_ahead_is_not_skipped_where_others_wait_for_it():
    for ended in run(skip_a_batch, 2):
        assert ended.was_ended_by("OffbeatError")
        assert "a batch had no backward pass" in ended.error
        assert "use its loss times 0" in ended.error


def test_a_batch_of_an_epoch_that_was_dropped_does_not_begin():
    session, loader = ahead()
    with session:
        running = iter(loader)
        next(running)
        loader.set_epoch(1)
        with pytest.raises(OffbeatError, match="or after its epoch was dropped"):
            loader.begin_batch()
        assert next(running, None) is None
        assert sorted(numbers_of(loader)) == EVERY


def test_a_program_that_never_begins_a_batch_is_told_so():
    session, loader = ahead()
    with session:
        (batch,) = next(iter(loader))
        with pytest.raises(OffbeatError, match="a backward pass ended before begin_batch was called"):
            session._trained.model(batch).backward()


def take_where_assigned(rank, emit):
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, CALM) as session:
        next(iter(session.loader(DataLoader(NUMBERS, BATCH), takes_ahead=True)))


def test_taking_ahead_where_samples_are_assigned_on_demand_is_refused():
    assert any(
        'give the strategy shards="equal"' in (ended.error or "") for ended in run(take_where_assigned, 2)
    )
