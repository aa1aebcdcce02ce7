"""Promises of the two exchanges: over links between threads of one process, and over torch.distributed
between real processes."""

import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import WorkerError
from offbeat.numerics.collectives.buckets import Bucket
from offbeat.numerics.collectives.schedules import ALGORITHMS, AUTO
from offbeat.runtime.averaging.buckets import GradientBucket
from offbeat.runtime.collectives.contribution import ExternalElements
from offbeat.runtime.collectives.interface import TensorMemory
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.collectives.torch_exchange import TorchExchange
from offbeat.runtime.devices.host import Host
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.runtime.transport.shared_memory import HAS_SHARED_MEMORY
from support.processes import run, start, values
from support.run_logs import wait_until

DEADLINE_S, HEARTBEAT_S = 20.0, 3600.0
ALL_REDUCES = [*ALGORITHMS, "hierarchical:2", "hierarchical:3"]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16, torch.uint8]


def all_reduces(size):
    """All algorithms for groups of that size."""
    return [*ALL_REDUCES, *(f"torus:{part}" for part in range(2, size) if size % part == 0)]


def vector(rank, length, dtype=torch.float64):
    """Small whole numbers, different on every member, whose sums every dtype holds exactly."""
    return ((torch.arange(length) * 7 + rank * 3) % 11).to(dtype)


def total(members, length, dtype=torch.float64):
    return sum(vector(rank, length).long() for rank in range(members)).to(dtype)


class Group:
    """Members in one process, each with its own endpoint."""

    def __init__(self, size, **options):
        self.lost = []
        self.endpoints = [
            Endpoint(
                f"m{rank}",
                job="job",
                token="secret",
                on_message=print,
                on_lost=self.lost.append,
                on_error=self.lost.append,
                **options,
            )
            for rank in range(size)
        ]
        for one in self.endpoints:
            for other in self.endpoints:
                if one is not other:
                    one.add_peer(other.name, other.addresses)
        names = [one.name for one in self.endpoints]
        self.members = [LinkExchange(one, names, rank) for rank, one in enumerate(self.endpoints)]
        self._next_id = 0

    def new_id(self):
        self._next_id += 1
        return self._next_id

    def all_reduce(self, flats, algorithm="ring"):
        """Begins an all-reduce on every member; the returned tensors will hold the sums."""
        exchange_id = self.new_id()
        sums = [torch.empty_like(flat) for flat in flats]
        pending = [
            member.all_reduce(flat, into, exchange_id=exchange_id, algorithm=algorithm)
            for member, flat, into in zip(self.members, flats, sums, strict=True)
        ]
        return pending, sums

    def sum(self, flats, algorithm="ring"):
        pending, sums = self.all_reduce(flats, algorithm)
        wait(pending)
        return sums


@contextmanager
def group(size, **options):
    made = Group(size, **options)
    try:
        yield made
        assert not made.lost
    finally:
        for one in made.endpoints:
            one.close()


@pytest.fixture(scope="module")
def groups():
    """A group of each size, shared by all tests that leave it intact."""
    made = {size: Group(size) for size in range(1, 6)}
    yield made
    for one in made.values():
        for endpoint in one.endpoints:
            endpoint.close()
        assert not one.lost


def zeros(endpoint, length, dtype=torch.float32):
    return TensorMemory(endpoint, Host()).zeros(length, dtype)


def wait(pending):
    for one in pending:
        one.wait(DEADLINE_S)


# Over links -----------------------------------------------------------------------------------------------


@pytest.mark.long(after=8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_reduce_equals_torchs_sum_for_every_dtype_and_length(groups, size, dtype):
    for algorithm in all_reduces(size):
        for length in [0, 1, 2, size - 1, size, size + 1, 999, 100_003]:
            flats = [vector(rank, length, dtype) for rank in range(size)]
            for flat in groups[size].sum(flats, algorithm):
                assert torch.equal(flat, total(size, length, dtype)), (algorithm, length, flat)
            for rank, flat in enumerate(flats):
                assert torch.equal(flat, vector(rank, length, dtype))


@pytest.mark.long(after=2)
@pytest.mark.parametrize("size", [6, 7, 8, 11, 16, 17])
def test_all_reduce_of_6_to_17_members_gives_bit_identical_sums(size):
    with group(size) as many:
        for algorithm in all_reduces(size):
            for length in [1, size + 1, 20_003]:
                generator = torch.Generator().manual_seed(length)
                flats = [torch.randn(length, generator=generator) for _ in range(size)]
                sums = many.sum(flats, algorithm)
                for flat in sums:
                    assert torch.equal(flat.view(torch.uint8), sums[0].view(torch.uint8)), algorithm
                assert torch.allclose(sums[0], sum(flats), rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", all_reduces(8))
def test_over_tcp_no_all_reduce_waits_for_an_acknowledgement_with_a_heartbeat(algorithm):
    """Members forward parts of a message in the order in which they arrive, here from several others."""
    with group(8, unix=False, heartbeat_s=HEARTBEAT_S, silent_s=3 * HEARTBEAT_S) as eight:
        for _ in range(20):
            flats = [vector(rank, 1000) for rank in range(8)]
            assert all(torch.equal(flat, total(8, 1000)) for flat in eight.sum(flats, algorithm))


def test_members_measure_how_long_data_are_on_the_way_to_their_neighbours():
    with group(4, unix=False) as four:
        for _ in range(2):
            four.sum([vector(rank, 1000) for rank in range(4)])
            for rank, member in enumerate(four.members):
                times_s = member.pop_line_times()
                assert [*times_s] == [(rank + 1) % 4]
                assert min(times_s.values()) > 0
                assert member.pop_line_times() == {}


def test_a_member_reports_an_exchange_that_takes_long_until_it_ends():
    with group(3, unix=False) as three:
        flats = [vector(rank, 1000) for rank in range(3)]
        reports = queue.SimpleQueue()
        three.members[0].report_progress(reports.put)
        begin = [
            partial(member.all_reduce, flat, torch.empty_like(flat), exchange_id=1)
            for member, flat in zip(three.members, flats, strict=True)
        ]
        pending = [one() for one in begin[:2]]
        assert isinstance(reports.get(timeout=DEADLINE_S), bool)
        assert reports.get(timeout=DEADLINE_S) is False  # its data are with member 1, and nothing comes
        pending.append(begin[2]())
        wait(pending)


@pytest.mark.long(after=4)
@pytest.mark.parametrize("memory", ["own", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_in_place_elements_are_summed_without_a_copy_to_the_same_bits_on_all_members(
    groups, size, dtype, memory
):
    chosen = groups[size]
    for algorithm in all_reduces(size):
        for length in [5, 10_003, 2_000_003]:
            if length > 10_003 and algorithm not in ("ring", "recursive_doubling"):
                continue
            third = length // 3
            generator = torch.Generator().manual_seed(length)
            flats, parts, expected = [], [], torch.zeros(length, dtype=torch.float64)
            for member in chosen.members:
                whole = torch.randn(length, generator=generator).to(dtype)
                flat = whole / size
                flat[third : 2 * third] = torch.nan  # these elements lie in another tensor
                flats.append(zeros(member._endpoint, length, dtype) if memory == "shared" else flat)
                flats[-1].copy_(flat)
                parts.append([ExternalElements(third, whole[third : 2 * third], 1 / size)] if third else [])
                expected += whole.double() / size
            kept = [[part.values.clone() for part in some] for some in parts]
            sums = [zeros(member._endpoint, length, dtype) for member in chosen.members]
            exchange_id = chosen.new_id()
            wait(
                [
                    member.all_reduce(flat, into, exchange_id=exchange_id, algorithm=algorithm, external=some)
                    for member, flat, into, some in zip(chosen.members, flats, sums, parts, strict=True)
                ]
            )
            for into in sums:
                assert torch.equal(into.view(torch.uint8), sums[0].view(torch.uint8)), algorithm
            tolerance = 1e-6 if dtype == torch.float32 else 0.04
            assert torch.allclose(sums[0].double(), expected, rtol=0, atol=tolerance), algorithm
            for some, before in zip(parts, kept, strict=True):
                assert all(torch.equal(part.values, one) for part, one in zip(some, before, strict=True))


def test_an_abandoned_all_reduce_stops_materializing_its_contribution():
    """Afterwards the caller may write its memory again, although much of it has not been sent."""
    with group(2) as two:
        two.sum([torch.ones(10), torch.ones(10)])
        length = 1 << 25
        flat, into = torch.zeros(length), torch.empty(length)
        began, go_on = threading.Event(), threading.Event()
        two.endpoints[0].call_soon(lambda: (began.set(), go_on.wait(DEADLINE_S)))
        assert began.wait(DEADLINE_S)
        part = ExternalElements(0, torch.ones(length), 1.0)
        pending = two.members[0].all_reduce(flat, into, exchange_id=two.new_id(), external=[part])
        abandoning = threading.Thread(target=two.members[0].abandon, args=[WorkerError("over")])
        abandoning.start()
        wait_until(
            lambda: two.members[0]._error, "an error"
        )  # then `forget` waits behind the running callback
        go_on.set()
        abandoning.join(DEADLINE_S)
        with pytest.raises(WorkerError, match="over"):
            pending.wait(DEADLINE_S)
        materialized = int(flat.sum())
        assert materialized < length // 2
        later = threading.Event()
        two.endpoints[0].call_soon(later.set)
        assert later.wait(DEADLINE_S)
        assert int(flat.sum()) == materialized


@pytest.mark.long(after=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_reduce_over_shared_memory_equals_the_sum(groups, size, dtype):
    chosen = groups[size]
    for length in [0, 1, size + 1, 100_003, 1_500_001]:
        for algorithm in ["ring"] if length > 2**20 else all_reduces(size):
            flats = [zeros(member._endpoint, length, dtype) for member in chosen.members]
            for rank, flat in enumerate(flats):
                flat.copy_(vector(rank, length, dtype))
            sums = [zeros(member._endpoint, length, dtype) for member in chosen.members]
            sent = [one.bytes_sent for one in chosen.endpoints]
            exchange_id = chosen.new_id()
            wait(
                [
                    member.all_reduce(flat, into, exchange_id=exchange_id, algorithm=algorithm)
                    for member, flat, into in zip(chosen.members, flats, sums, strict=True)
                ]
            )
            for rank, (flat, into) in enumerate(zip(flats, sums, strict=True)):
                assert torch.equal(into, total(size, length, dtype)), (algorithm, length, into)
                assert torch.equal(flat, vector(rank, length, dtype))
            if size > 1 and HAS_SHARED_MEMORY and length * dtype.itemsize > 2**20:
                for one, before in zip(chosen.endpoints, sent, strict=True):
                    assert algorithm != "ring" or one.bytes_sent - before < length * dtype.itemsize // 10


@pytest.mark.parametrize(
    ("length", "algorithm"),
    [(2_048, "recursive_doubling"), (2_049, "rabenseifner"), (32_768, "rabenseifner"), (32_769, "ring")],
)
def test_the_size_of_a_vector_chooses_the_algorithm(groups, length, algorithm):
    """Algorithms add in different orders, so sums of random numbers differ in their last bits."""
    four = groups[4]
    generator = torch.Generator().manual_seed(length)
    flats = [torch.randn(length, generator=generator) for _ in range(4)]
    found = four.sum(flats, AUTO)
    same = {other for other in ALGORITHMS if torch.equal(four.sum(flats, other)[0], found[0])}
    assert same == {algorithm}


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="memory is shared on Linux only")
def test_memory_that_a_member_may_still_read_is_not_reused():
    """A delayed member reads an announced part late, although the exchange was abandoned since."""
    with group(2) as two:
        two.sum([torch.ones(10), torch.ones(10)])
        memory = TensorMemory(two.endpoints[0], Host())
        own, into = (zeros(two.endpoints[0], 2**20) for _ in range(2))
        release = threading.Event()
        two.endpoints[1].call_soon(lambda: release.wait(DEADLINE_S))
        pending = two.members[0].all_reduce(own, into, exchange_id=two.new_id())
        assert two.endpoints[0].flush(DEADLINE_S)
        two.members[0].abandon(WorkerError("somebody else was lost"))
        with pytest.raises(WorkerError):
            pending.wait(DEADLINE_S)
        assert memory.may_be_read(own)
        again = LinkExchange(two.endpoints[0], [one.name for one in two.endpoints], 0)
        assert not memory.may_be_read(into)
        for begin in partial(again.prepare, own), partial(again.all_reduce, into, own):
            with pytest.raises(ValueError, match="memory that a member may still read"):
                begin(exchange_id=two.new_id())
        bucket = Bucket(dtype=torch.float32, entries=(0,), offsets=(0,), elements=2**20)
        gradient_bucket = GradientBucket(bucket, [torch.Size([2**20])], 1, partial(zeros, two.endpoints[0]))
        gradient_bucket.contribution.flat = own.fill_(3.0)
        kept = gradient_bucket.output
        gradient_bucket.replace_read_buffers(memory.may_be_read)
        assert gradient_bucket.contribution.flat is not own
        assert gradient_bucket.contribution.flat.unique().tolist() == [3.0]
        assert gradient_bucket.output is kept
        gradient_bucket.output.flat = own
        gradient_bucket.replace_read_buffers(memory.may_be_read)
        assert gradient_bucket.output is not kept
        release.set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_members_hold_the_same_bits_though_the_sum_is_rounded(groups, size, dtype):
    generator = torch.Generator().manual_seed(size)
    flats = [torch.randn(10_007, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
    expected = sum(flat.double() for flat in flats)
    for algorithm in all_reduces(size):
        sums = groups[size].sum(flats, algorithm)
        for flat in sums:
            assert torch.equal(flat.view(torch.uint8), sums[0].view(torch.uint8)), algorithm
            assert torch.allclose(flat.double(), expected, rtol=0, atol=40 * torch.finfo(dtype).eps)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    kinds=st.lists(
        st.tuples(
            st.integers(0, 3000) | st.integers(3000, 300_000), st.sampled_from(ALL_REDUCES), st.integers(0, 3)
        ),
        min_size=1,
        max_size=6,
    ),
    is_shared=st.booleans(),
    seed=st.integers(),
)
def test_concurrent_exchanges_do_not_mix(groups, size, kinds, is_shared, seed):
    """Every member begins and awaits the exchanges in a different order."""
    chosen = groups[size]
    lengths = [length for length, _, _ in kinds]
    exchange_id = chosen.new_id()
    flats = [[vector(rank + i, length) for i, length in enumerate(lengths)] for rank in range(size)]
    sums = [[torch.empty_like(flat) for flat in own] for own in flats]
    if is_shared:
        flats, sums = (
            [
                [zeros(member._endpoint, flat.numel(), flat.dtype).copy_(flat) for flat in own]
                for member, own in zip(chosen.members, side, strict=True)
            ]
            for side in (flats, sums)
        )
    generator = torch.Generator().manual_seed(seed % 2**63)
    orders = [torch.randperm(len(lengths), generator=generator).tolist() for _ in range(size)]
    prepared = [torch.randperm(len(lengths), generator=generator).tolist() for _ in range(size)]

    def member(rank):
        for i in prepared[rank][: len(lengths) // 2]:
            chosen.members[rank].prepare(
                sums[rank][i], exchange_id=exchange_id, index=i, algorithm=kinds[i][1]
            )
        pending = [
            chosen.members[rank].all_reduce(
                flats[rank][i],
                sums[rank][i],
                exchange_id=exchange_id,
                index=i,
                algorithm=kinds[i][1],
                priority=kinds[i][2],
            )
            for i in orders[rank]
        ]
        wait(pending)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(member, range(size)))
    for i, length in enumerate(lengths):
        expected = sum(vector(rank + i, length) for rank in range(size))
        for rank in range(size):
            assert torch.equal(sums[rank][i], expected)


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_a_long_vector_travels_in_many_frames(unix):
    with group(3, unix=unix) as three:
        flats = [vector(rank, 3_000_001, torch.float32) for rank in range(3)]
        for flat in three.sum(flats):
            assert torch.equal(flat, total(3, 3_000_001, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_broadcast_copies_the_bits_of_any_root(groups, size, dtype):
    for root in range(size):
        for length in [0, 1, 15, 16, 17, 20_001]:
            content = vector(root, length, dtype)
            flats = [content.clone() if rank == root else torch.zeros_like(content) for rank in range(size)]
            exchange_id = groups[size].new_id()
            wait(
                [
                    member.broadcast(flat, root=root, exchange_id=exchange_id)
                    for member, flat in zip(groups[size].members, flats, strict=True)
                ]
            )
            for flat in flats:
                assert torch.equal(flat, content)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_gather_copies_the_bits_of_each_members_part(groups, size, dtype):
    for length in [0, 1, 17, 20_001]:
        flats = [torch.zeros(size * length, dtype=dtype) for _ in range(size)]
        for rank, flat in enumerate(flats):
            flat[rank * length : (rank + 1) * length] = vector(rank, length, dtype)
        exchange_id = groups[size].new_id()
        wait(
            [
                member.all_gather(flat, exchange_id=exchange_id)
                for member, flat in zip(groups[size].members, flats, strict=True)
            ]
        )
        for flat in flats:
            assert torch.equal(flat, torch.cat([vector(rank, length, dtype) for rank in range(size)]))


def test_an_all_gather_needs_equal_parts(groups):
    with pytest.raises(ValueError, match="equal parts for 3 members, got 7 elements in all"):
        groups[3].members[0].all_gather(torch.zeros(7), exchange_id=groups[3].new_id())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_to_all_copies_the_bits_of_each_part_to_its_member(groups, size, dtype):
    for length in [0, 1, 17, 20_001]:
        flats = [vector(rank, size * length, dtype) for rank in range(size)]
        received = [torch.full_like(flat, 99) for flat in flats]
        exchange_id = groups[size].new_id()
        wait(
            [
                member.all_to_all(flat, into, exchange_id=exchange_id)
                for member, flat, into in zip(groups[size].members, flats, received, strict=True)
            ]
        )
        for rank, into in enumerate(received):
            parts = [vector(other, size * length, dtype)[rank * length :][:length] for other in range(size)]
            assert torch.equal(into, torch.cat(parts))
            assert torch.equal(flats[rank], vector(rank, size * length, dtype))


@pytest.mark.parametrize("is_shared", [False, True])
def test_parts_that_arrive_before_a_member_has_begun_are_kept_for_it(is_shared):
    length = 300_000
    with group(3) as three:
        flats, received = [], []
        for rank, endpoint in enumerate(three.endpoints):
            make = partial(zeros, endpoint) if is_shared else torch.zeros
            flats.append(make(3 * length).copy_(vector(rank, 3 * length)))
            received.append(make(3 * length))
        begin = [
            partial(member.all_to_all, flat, into, exchange_id=1)
            for member, flat, into in zip(three.members, flats, received, strict=True)
        ]
        pending = [begin[0](), begin[1]()]
        for endpoint in three.endpoints[:2]:
            assert endpoint.flush(DEADLINE_S)
        pending.append(begin[2]())
        wait(pending)
        for rank, into in enumerate(received):
            parts = [flat[rank * length : (rank + 1) * length] for flat in flats]
            assert torch.equal(into, torch.cat(parts))


def test_all_to_all_needs_equal_parts(groups):
    flat = torch.zeros(7)
    with pytest.raises(ValueError, match="equal parts for 3 members, got 7 elements in all"):
        groups[3].members[0].all_to_all(flat, flat.clone(), exchange_id=groups[3].new_id())


def test_a_wait_returns_only_when_the_memory_may_be_written_again():
    """The root waits for no member, but its memory holds the bytes until the kernel has accepted them."""
    with group(2) as two:
        root, other = torch.arange(2**22), torch.zeros(2**22, dtype=torch.int64)
        release = threading.Event()
        two.endpoints[1].call_soon(lambda: release.wait(DEADLINE_S))  # does not read until `release` is set
        sent = two.members[0].broadcast(root, root=0, exchange_id=1)
        with pytest.raises(WorkerError):
            sent.wait(0.01)
        release.set()
        received = two.members[1].broadcast(other, root=0, exchange_id=1)
        sent.wait(DEADLINE_S)
        root.zero_()
        received.wait(DEADLINE_S)
        assert torch.equal(other, torch.arange(2**22))


class Held:
    """What an exchange waits for: calls back when a test says so."""

    def __init__(self):
        self._calls = []

    def __call__(self, call):
        self._calls.append(call)

    def release(self):
        for call in self._calls:
            call()


def after_all_calls(endpoint):
    """Waits until the I/O thread has done what was queued before."""
    done = threading.Event()
    endpoint.call_soon(done.set)
    assert done.wait(DEADLINE_S)


@pytest.mark.parametrize("is_prepared", [False, True], ids=["alone", "prepared"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_exchange_reads_and_writes_nothing_before_it_may(size, is_prepared):
    with group(size) as some:
        held, length = Held(), 30_000
        flats = [vector(rank, length) for rank in range(size)]
        sums = [torch.full((length,), -1.0, dtype=torch.float64) for _ in range(size)]
        late, flats[0] = flats[0], torch.full((length,), torch.nan, dtype=torch.float64)
        if is_prepared:
            some.members[0].prepare(sums[0], exchange_id=1, after=held)
        pending = [
            member.all_reduce(flat, into, exchange_id=1, after=held if member is some.members[0] else None)
            for member, flat, into in zip(some.members, flats, sums, strict=True)
        ]
        for endpoint in some.endpoints:
            assert endpoint.flush(DEADLINE_S)
            after_all_calls(endpoint)
        assert (sums[0] == -1.0).all()
        flats[0].copy_(late)
        held.release()
        wait(pending)
        for flat in sums:
            assert torch.equal(flat, total(size, length))


@pytest.mark.parametrize("size", [1, 2])
def test_an_exchange_that_is_abandoned_before_it_may_begin_sends_and_receives_nothing(size):
    with group(size) as some:
        held, first = Held(), some.members[0]
        into = torch.full((30_000,), -1.0)
        first.prepare(into, exchange_id=1, after=held)
        pending = first.all_reduce(torch.ones(30_000), into, exchange_id=1, after=held)
        error = WorkerError("worker 1 was lost")
        first.abandon(error)
        held.release()
        after_all_calls(some.endpoints[0])
        for other in some.members[1:]:
            other.all_reduce(torch.ones(30_000), torch.empty(30_000), exchange_id=1)
            wait_until(lambda: some.endpoints[0].bytes_received > 60_000, "the other member's half")
        assert some.endpoints[0].flush(DEADLINE_S)
        with pytest.raises(WorkerError) as caught:
            pending.wait(DEADLINE_S)
        assert caught.value is error
        assert some.endpoints[0].bytes_sent < 60_000
        assert (into == -1.0).all()


def test_an_exchange_that_is_abandoned_before_it_has_begun_drops_what_has_arrived_for_it():
    with group(2) as two:
        endpoint, name = two.endpoints[0], two.endpoints[1].name
        two.members[1].all_reduce(torch.ones(30_000), torch.empty(30_000), exchange_id=1)

        def early_bytes():
            peer = endpoint._sessions.peers.get(name)  # None before it has connected
            return 0 if peer is None else peer.inbox.early_bytes

        wait_until(lambda: early_bytes() >= 60_000, "the other member's half")
        exchange = LinkExchange(endpoint, [endpoint.name, name], 0, ids_below=2)
        exchange.abandon(WorkerError("cancelled"))
        assert early_bytes() == 0


def test_abandoning_fails_pending_and_later_exchanges():
    with group(3) as three:
        flats = [torch.ones(1000), torch.ones(1000)]
        pending = [
            three.members[0].all_reduce(flats[0], torch.empty(1000), exchange_id=1, index=i) for i in range(2)
        ]
        pending.append(three.members[0].all_to_all(torch.ones(999), torch.empty(999), exchange_id=1, index=2))
        error = WorkerError("worker 1 was lost", worker=1, step=5)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(pending[0].wait, DEADLINE_S)
            three.members[0].abandon(error)
            assert waiting.exception(DEADLINE_S) is error
        three.members[0].abandon(WorkerError("something later"))
        for one in [
            *pending,
            three.members[0].all_reduce(flats[1], torch.empty(1000), exchange_id=2),
            three.members[0].broadcast(flats[1], root=0, exchange_id=3),
            three.members[0].all_to_all(torch.ones(999), torch.empty(999), exchange_id=4),
        ]:
            with pytest.raises(WorkerError) as caught:
                one.wait(DEADLINE_S)
            assert caught.value is error


def test_an_exchange_completed_before_abandoning_stays_complete():
    with group(2) as two:
        flats = [vector(rank, 10) for rank in range(2)]
        pending, sums = two.all_reduce(flats)
        wait(pending)
        two.members[0].abandon(WorkerError("worker 1 was lost"))
        wait(pending)
        assert torch.equal(sums[0], total(2, 10))


def test_a_missed_deadline_raises_an_error_that_names_it():
    with group(2) as two:
        pending = two.members[0].all_reduce(torch.ones(10), torch.empty(10), exchange_id=1)
        with pytest.raises(WorkerError, match=r"not finished within 0\.01 s"):
            pending.wait(0.01)


# Over torch.distributed -----------------------------------------------------------------------------------


def torch_sums(rank, emit):
    dist.init_process_group("gloo")
    exchange = TorchExchange(dist.group.WORLD, Host())
    size = dist.get_world_size()
    for number, dtype in enumerate([torch.float32, torch.float64, torch.int64, torch.bfloat16]):
        lengths = [0, 1, size - 1, size, 10_007]
        flats = [vector(rank, length, dtype) for length in lengths]
        sums = [torch.empty_like(flat) for flat in flats]
        pending = [
            exchange.all_reduce(flat, into, exchange_id=number, index=i)
            for i, (flat, into) in enumerate(zip(flats, sums, strict=True))
        ]
        wait(pending)
        for length, flat in zip(lengths, sums, strict=True):
            assert torch.equal(flat, total(size, length, dtype)), (dtype, length)
    for root in range(size):
        flat = vector(rank, 1000)
        wait([exchange.broadcast(flat, root=root, exchange_id=100 + root)])
        assert torch.equal(flat, vector(root, 1000))
    flat = torch.cat([vector(one, 10) if one == rank else torch.zeros(10) for one in range(size)])
    wait([exchange.all_gather(flat, exchange_id=150)])
    assert torch.equal(flat, torch.cat([vector(one, 10) for one in range(size)]))
    for dtype in (torch.float32, torch.int8, torch.uint8):
        for length in (0, 1, 10_007):
            flat = vector(rank, size * length, dtype)
            into = torch.empty_like(flat)
            wait([exchange.all_to_all(flat, into, exchange_id=160)])
            parts = [vector(one, size * length, dtype)[rank * length :][:length] for one in range(size)]
            assert torch.equal(into, torch.cat(parts))
    if size == 3:  # roots are given by their rank within the group
        part = dist.new_group([1, 2])
        if rank:
            flat = vector(rank, 10)
            wait([TorchExchange(part, Host()).broadcast(flat, root=1, exchange_id=0)])
            assert torch.equal(flat, vector(2, 10))
    generator = torch.Generator().manual_seed(rank)
    flat = torch.randn(10_007, generator=generator)
    into = torch.empty_like(flat)
    wait([exchange.all_reduce(flat, into, exchange_id=200)])
    dist.destroy_process_group()
    return into.sum().item()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_torch_exchanges_have_equal_results_on_all_members(size):
    assert len(set(values(run(torch_sums, size)))) == 1


def torch_abandons(rank, emit):
    dist.init_process_group("gloo")
    dist.barrier()  # else worker 0, which has the store, may end before worker 1 has connected
    exchange = TorchExchange(dist.group.WORLD, Host())
    if rank == 1:
        emit("here")
        threading.Event().wait()
    flat = torch.ones(10)
    into = torch.empty(10)
    pending = exchange.all_reduce(flat, into, exchange_id=1)
    with pytest.raises(WorkerError, match=r"not finished within 0\.01 s"):
        pending.wait(0.01)
    error = WorkerError("worker 1 is stuck", worker=1)
    threading.Timer(0.1, exchange.abandon, [error]).start()
    for one in pending, exchange.all_reduce(flat, into, exchange_id=2):
        with pytest.raises(WorkerError) as caught:
            one.wait(DEADLINE_S)
        assert caught.value is error
    emit("done")


def test_abandoned_torch_exchanges_raise_the_given_error():
    with start(torch_abandons, 2) as running:
        assert running.receive(1) == "here"
        assert running.receive(0) == "done"


HANGING = """
import sys
import torch
import torch.distributed as dist
from offbeat.errors import WorkerError
from offbeat.runtime.collectives.torch_exchange import TorchExchange
from offbeat.runtime.devices.host import Host

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.stdin.read()
exchange = TorchExchange(dist.group.WORLD, Host())
pending = exchange.all_reduce(torch.ones(10), torch.empty(10), exchange_id=1)
exchange.abandon(WorkerError("worker 1 is stuck", worker=1))
exchange.close(0.2)
pending.wait(20.0)
"""


def test_a_process_whose_abort_hangs_ends_with_the_given_error():
    """Gloo's abort waits for its exchanges (torch 2.13), as that of NCCL may; the other worker is stuck."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", HANGING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **place, "RANK": "1"}) as stuck:
        try:
            ended = subprocess.run(
                command,
                env={**os.environ, **place, "RANK": "0"},
                timeout=3 * DEADLINE_S,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            stuck.kill()
    assert ended.returncode == 1
    assert "has not ended its process groups within 0.2 s" in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("WorkerError: worker 1 is stuck")


def torch_loses_a_peer(rank, emit):
    dist.init_process_group("gloo")
    exchange = TorchExchange(dist.group.WORLD, Host())
    dist.barrier()  # else it may die while the workers still connect to each other
    if rank == 1:
        os._exit(1)
    with pytest.raises(WorkerError, match=r"a torch\.distributed exchange failed: .*[Cc]onnection"):
        exchange.all_reduce(torch.ones(10), torch.empty(10), exchange_id=1).wait(DEADLINE_S)
    return "done"


def test_a_failed_torch_exchange_raises_a_worker_error():
    assert run(torch_loses_a_peer, 2)[0].value == "done"
