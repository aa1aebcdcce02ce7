"""Promises of a job that cannot start: every present worker reports the cause in one line, in time."""

import os
import resource
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import nn

import offbeat
import offbeat.runtime.session  # loaded before files are limited
from offbeat.runtime.control import rendezvous
from offbeat.runtime.control.environment import (
    JOB_VARIABLE,
    NEWCOMER_VARIABLE,
    START_S_VARIABLE,
    read_environment,
)
from offbeat.runtime.training import job_connection
from offbeat.strategies import AllReduce, Hybrid, PartialAllReduce, ServerBSP
from support.jobs import job
from support.open_files import few_files
from support.processes import run, values

NEVER_S = 300.0  # longer than any test's job may run: an error reported only then is too late
LIMIT_S = 8.0  # for a start that has to time out; the default is 30 s


def join(rank, emit, change):
    """Joins; `change` names the options that differ on this worker."""
    options = {"width": 3, "lr": 0.1, "strategy": AllReduce(), "log": None}
    options |= CHANGES[change](rank) or {} if change else {}
    model = nn.Sequential(nn.Linear(4, options["width"]), nn.BatchNorm1d(options["width"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=options["lr"])
    with offbeat.join(model, optimizer, options["strategy"], run_log=options["log"]):
        return "joined"


def differ_on(odd_rank, **options):
    return lambda rank: options if rank == odd_rank else None


def environment(odd_rank, **variables):
    return lambda rank: os.environ.update(variables) if rank == odd_rank else None


def end_on(odd_rank):
    def end(rank):
        if rank == odd_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return end


CHANGES = {
    "shape": differ_on(1, width=5),
    "learning rate": differ_on(2, lr=0.2),
    "strategy": differ_on(1, strategy=AllReduce(bucket_bytes=1000)),
    "log": differ_on(0, log="/no such folder/run.jsonl"),
    "rank 1 twice": environment(2, RANK="1"),
    "rank 0 twice": environment(1, RANK="0"),
    "world of 4 on rank 1": environment(1, WORLD_SIZE="4"),
    "world of 2 on rank 0": environment(0, WORLD_SIZE="2"),
    "world of 2 on rank 2": environment(2, WORLD_SIZE="2"),
    "2 missing": end_on(2),
    "0 missing": end_on(0),
}


def start_up(workers, change, master=nullcontext, limit_s=LIMIT_S):
    """Runs a job to its end and returns each worker's result; none may wait beyond the job's deadline."""
    with master() as port:
        env = {START_S_VARIABLE: str(limit_s)} | ({} if port is None else {"MASTER_PORT": str(port)})
        with job(join, workers, change, env=env) as running:
            ended = running.ends()
    for one in ended:
        assert one.value != "joined"
        if one.error is not None:
            assert len(one.error.splitlines()) == 1
            assert one.error_type in ("WorkerError", "OffbeatError"), one.trace
    return ended


# Errors reported at once ----------------------------------------------------------------------------------


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("change", "worker", "texts"),
    [
        ("shape", None, ["0.weight float32 [3, 4]", "0.weight float32 [5, 4]", "same model on every worker"]),
        ("learning rate", 2, ["lr=0.1", "lr=0.2", "on worker 2"]),
        ("strategy", None, ["bucket_bytes=1000", "bucket_bytes=26214400", "the same strategy"]),
        ("rank 1 twice", None, ["two workers have the id 1", "give every worker a RANK"]),
        ("world of 2 on rank 0", None, ["expects a world of 3 workers, this job has 2", "WORLD_SIZE"]),
    ],
)
def test_a_mismatch_between_workers_is_named_by_every_worker(change, worker, texts):
    for one in start_up(3, change, limit_s=NEVER_S):
        for text in texts:
            assert text in one.error
        if worker is not None:
            assert f"worker {worker} (" in one.error
        assert one.error_type == "WorkerError"


def test_a_coordinator_that_cannot_start_reports_the_cause():
    first, second = start_up(2, "log")
    assert first.error == "the coordinator did not start: [Errno 2] No such file or directory: " + repr(
        "/no such folder/run.jsonl"
    )
    assert second.error == f"rank 0 could not open the job: {first.error}"


def join_with_open_files(rank, emit, count):
    """Joins where so many files are open; raises the limit, as a program does that needs them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    assert max(opened) >= count
    return join(rank, emit, None)


def test_a_job_starts_in_a_process_with_more_open_files_than_select_takes():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1500:
        pytest.skip("needs a hard limit of 1500 open files")
    assert values(run(join_with_open_files, 2, 1100)) == ["joined", "joined"]


@contextmanager
def no_files_left():
    """Inside, this process can open no more files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def without_files(rank, emit, odd_rank, where, name):
    """Joins; on one worker, a function of a module runs while no more files can be opened."""
    where = sys.modules[where]
    function = getattr(where, name)

    def starved(*args, **options):
        with no_files_left():
            return function(*args, **options)

    if rank == odd_rank:
        setattr(where, name, starved)
    return join(rank, emit, None)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("odd_rank", "where", "name", "odd_text", "text"),
    [
        (
            0,
            rendezvous.__name__,
            "start_coordinator",
            "the coordinator did not start: too many open files: raise `ulimit -n`",
            "rank 0 could not open the job: the coordinator did not start: too many open files: raise",
        ),
        (
            1,
            job_connection.__name__,
            "CoordinatorClient",
            "cannot open its connections: too many open files",
            "worker 1: worker-1.",
        ),
        (
            1,
            rendezvous.__name__,
            "own_address",
            "(MASTER_ADDR, or the manager): too many open files: raise",
            "worker 1: cannot find a route to '127.0.0.1'",
        ),
    ],
)
def test_a_worker_that_cannot_open_another_file_is_named_by_every_worker(
    odd_rank, where, name, odd_text, text
):
    with job(without_files, 3, odd_rank, where, name, env={START_S_VARIABLE: str(LIMIT_S)}) as running:
        ended = running.ends()
    for one in ended:
        assert one.error_type in ("WorkerError", "OffbeatError"), one.trace
        assert "too many open files: raise `ulimit -n`" in one.error
        assert (odd_text if one.rank == odd_rank else text) in one.error


def starts_with_few_files(rank, emit, odd_ranks, free, is_hard):
    """Joins; some workers may open few files."""
    with few_files(free, hard=is_hard) if rank in odd_ranks else nullcontext():
        return join(rank, emit, None)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("odd_ranks", "free", "is_hard"),
    [([0], 0, False), ([0], 18, False), ([2], 0, False), ([2], 5, True), ([0, 1, 2], 3, False)],
)
def test_a_worker_with_a_file_limit_that_is_too_low_is_named_by_every_worker(odd_ranks, free, is_hard):
    with job(
        starts_with_few_files, 3, odd_ranks, free, is_hard, env={START_S_VARIABLE: str(LIMIT_S)}
    ) as running:
        ended = running.ends()
    for one in ended:
        assert one.error_type in ("WorkerError", "OffbeatError"), one.trace
        assert f"got {free}: too many open files: raise `ulimit -n`, which is " in one.error
        own = f"worker {one.rank} cannot start: expected "
        expected = {0: "rank 0 could not open the job: expected ", 2: "worker 2: expected "}[odd_ranks[0]]
        assert own in one.error if one.rank in odd_ranks else expected in one.error


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", [AllReduce(), PartialAllReduce(), Hybrid(), ServerBSP()], ids=str)
def test_the_number_of_files_that_a_start_requires_is_enough(strategy):
    with job(trains_with_the_required_files, 3, strategy) as running:
        assert values(running.ends()) == [3, 3, 3]


def trains_with_the_required_files(rank, emit, strategy):
    with few_files(rendezvous.descriptors_needed(read_environment()), hard=True):
        return steps(strategy)


def steps(strategy, before_first_step=lambda: None):
    """Takes three steps and returns their number; `before_first_step` is called before the first."""
    model = nn.Linear(200, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, strategy) as session:
        before_first_step()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 200)).square().mean().backward()
            optimizer.step()
    return session.step


def runs_out_of_files(rank, emit, odd_rank, strategy):
    """Trains; the others begin their first step when the odd worker can open no more files."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with ExitStack() as stack:

        def use_up_files():
            if rank == odd_rank:
                stack.enter_context(few_files(0))
                emit("no files are left")
            else:
                signal.sigwait({signal.SIGUSR1})

        return steps(strategy, use_up_files)


def run_out_of_files(workers, odd_rank, strategy):
    """Runs a job in which one worker uses up its files before any worker's first step; returns the ends."""
    with job(runs_out_of_files, workers, odd_rank, strategy) as running:
        running.receive(odd_rank)
        for rank in range(workers):
            if rank != odd_rank:
                running.signal(rank, signal.SIGUSR1)
        return running.ends()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize("strategy", [AllReduce(), Hybrid()], ids=["bsp", "hybrid"])
def test_a_worker_that_runs_out_of_files_is_named_by_all(odd_rank, strategy):
    for one in run_out_of_files(3, odd_rank, strategy):
        assert one.error_type == "WorkerError", one.trace
        assert f"worker {odd_rank}" in one.error
        assert "too many open files: raise `ulimit -n`, which is " in one.error


@pytest.mark.long
def test_on_servers_a_first_worker_that_runs_out_of_files_is_named_by_all():
    for one in run_out_of_files(2, 0, ServerBSP()):
        assert one.error_type == "WorkerError", one.trace
        assert "worker 0" in one.error
        assert "too many open files: raise `ulimit -n`, which is " in one.error


def hangs_before_opening_the_job(rank, emit):
    ask = rendezvous._wait_for_coordinator

    def emit_and_ask(*args):
        emit("asks")
        return ask(*args)

    def hang(_):
        emit("opens")
        signal.pause()

    rendezvous._wait_for_coordinator, rendezvous.start_coordinator = emit_and_ask, hang
    return join(rank, emit, None)


def test_a_rank_0_that_dies_before_it_opens_the_job_is_named():
    with job(hangs_before_opening_the_job, 3) as running:
        running.receive(0, 1, 2)
        running.signal(0, signal.SIGKILL)
        for one in running.ends()[1:]:
            assert f"rank {one.rank} lost the job's store at 127.0.0.1:" in one.error
            assert "before rank 0 opened the job: see the output of rank 0" in one.error


def joins_twice(rank, emit):
    """Joins two jobs, one after the other; rank 1 reaches the store for the second one during the first."""
    for turn in range(2):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.join(model, optimizer, AllReduce()):
            if rank == 1 and turn == 0:
                where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = rendezvous.open_store(*where, is_host=False, timeout_s=LIMIT_S)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()  # waits for rank 1
    if rank == 1:
        store.set("still", "here")
    return "joined"


def test_a_worker_that_joins_the_next_job_early_keeps_the_store():
    assert values(run(joins_twice, 2)) == ["joined"] * 2


# Two jobs at one address -----------------------------------------------------------------------------------


def trains(rank, emit, without_end=False):
    """Takes steps; the gradient is 1, or 10 on rank 1, times 100 in job b. Returns the last mean."""
    gradient = 10.0 ** int(os.environ["RANK"]) * (100.0 if os.environ.get(JOB_VARIABLE) == "b" else 1.0)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, AllReduce()):
        emit("joined")
        while True:
            optimizer.zero_grad()
            (gradient * model(torch.ones(1, 1)).sum()).backward()
            optimizer.step()
            if not without_end:
                return model.weight.grad.item()


def place(rank, name=None, start_s=NEVER_S):
    """The environment of a worker that is started without a launcher in a world of two."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", NEWCOMER_VARIABLE: "0", START_S_VARIABLE: str(start_s)}
    return variables if name is None else variables | {JOB_VARIABLE: name}


def test_a_worker_of_another_job_gets_an_error_and_the_job_trains_with_its_own_workers():
    with job(trains, 1, env=place(0, "a")) as running:
        stranger = running.end(running.add(trains, env=place(1, "b")))
        assert stranger.error_type == "OffbeatError"
        own = running.end(running.add(trains, env=place(1, "a")))
        first = running.end(0)
    assert "expected job 'b' at 127.0.0.1:" in stranger.error
    assert "but job 'a' uses that address: choose another MASTER_PORT" in stranger.error
    assert values([first, own]) == [5.5, 5.5]


def test_a_jobs_name_need_not_be_utf_8():
    with job(trains, 1, env=place(0, "\udce9")) as running:
        own = running.end(running.add(trains, env=place(1, "\udce9")))
        assert values([own, running.end(0)]) == [5.5, 5.5]


def test_a_rank_0_gets_an_error_that_names_the_job_on_its_port():
    with job(trains, 1, True, env=place(0, "a"), clean=False) as running:
        running.receive(running.add(trains, True, env=place(1, "a")))
        stranger = running.end(running.add(trains, env=place(0, "b")))
    assert stranger.error.startswith("rank 0 cannot listen on port ")
    assert "expected job 'b' at 127.0.0.1:" in stranger.error
    assert "but job 'a' uses that address: choose another MASTER_PORT" in stranger.error


def test_two_jobs_share_the_store_of_a_launcher():
    with job(trains, 1, env=place(0, "a"), hosts_store=True) as running:
        for rank, name in ((1, "b"), (0, "b"), (1, "a")):
            running.add(trains, env=place(rank, name))
        ended = running.ends()
    assert values(ended) == [5.5, 550.0, 550.0, 5.5]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("as_newcomer", ["0", "1"])
def test_a_worker_whose_job_does_not_start_gets_an_error_that_names_the_present_job(as_newcomer):
    with job(trains, 1, env=place(0, "a"), hosts_store=True) as running:
        values([running.end(running.add(trains, env=place(1, "a")))])
        stranger = running.end(running.add(trains, env=place(1, "b", 5.0) | {NEWCOMER_VARIABLE: as_newcomer}))
    assert "expected job 'b' at 127.0.0.1:" in stranger.error
    assert "but job 'a' uses that address: choose another MASTER_PORT" in stranger.error


def test_a_newcomer_of_another_job_gets_an_error_that_names_the_job():
    with job(trains, 1, env=place(0, "a")) as running:
        stranger = running.end(running.add(trains, env=place(1, "b") | {NEWCOMER_VARIABLE: "1"}))
        values([running.end(running.add(trains, env=place(1, "a")))])
    assert "expected job 'b' at 127.0.0.1:" in stranger.error
    assert "but job 'a' uses that address" in stranger.error


def test_a_worker_without_a_job_name_gets_an_error_that_names_the_present_job():
    with job(trains, 1, env=place(0, "a")) as running:
        stranger = running.end(running.add(trains, env=place(1) | {JOB_VARIABLE: ""}))
        values([running.end(running.add(trains, env=place(1, "a")))])
    assert "expected a job without a name at 127.0.0.1:" in stranger.error
    assert "but job 'a' uses that address" in stranger.error


def test_two_workers_of_one_rank_end_a_job_without_a_name():
    """Two jobs without a launcher at one address: rank 0 of the one began with rank 1 of the other."""
    with job(trains, 1, True, env=place(0)) as running:
        first = running.add(trains, True, env=place(1))
        running.receive(0, first)
        running.add(trains, True, env=place(1))
        ended = running.ends()
    for one in ended:
        assert "two workers have the id 1, at " in one.error
        assert one.error.count(", process ") == 2
        assert "give each a MASTER_PORT of its own" in one.error


# Errors after the time limit for late workers -------------------------------------------------------------


@contextmanager
def silent():
    """A stranger that accepts connections on the port and sends nothing."""
    with foreign(lambda connection: None) as port:
        yield port


@contextmanager
def web_server():
    """A stranger that answers every message with a page."""
    with foreign(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port:
        yield port


@contextmanager
def no_listener():
    """A stranger that listens and never accepts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def foreign(answer):
    connections = []

    def accept():
        while True:
            try:
                connections.append(listener.accept()[0])
            except OSError:
                return
            answer(connections[-1])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


SLOW_CASES = {
    "silent": (2, None, silent),
    "web_server": (2, None, web_server),
    "deaf": (2, None, no_listener),
    "2 missing": (3, "2 missing", nullcontext),
    "0 missing": (2, "0 missing", nullcontext),
    "world of 4 on rank 1": (3, "world of 4 on rank 1", nullcontext),
    "rank 0 twice": (2, "rank 0 twice", nullcontext),
    "world of 2 on rank 2": (3, "world of 2 on rank 2", nullcontext),
}


@pytest.fixture(scope="module")
def slow_cases():
    """Runs all cases at once, because they mostly wait."""
    with ThreadPoolExecutor(len(SLOW_CASES)) as pool:
        yield {name: pool.submit(start_up, *case) for name, case in SLOW_CASES.items()}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("stranger", ["silent", "web_server", "deaf"])
def test_a_port_used_by_another_program_is_named(slow_cases, stranger):
    first, second = slow_cases[stranger].result()
    assert "rank 0 cannot listen on port" in first.error
    assert "choose another MASTER_PORT" in first.error
    assert "rank 1 cannot reach the job's store at 127.0.0.1:" in second.error


def test_a_missing_worker_is_named(slow_cases):
    ended = slow_cases["2 missing"].result()
    for one in ended[:2]:
        assert one.error.startswith("worker 2 did not join within 8 s, 2 of 3 are here (worker 0 (")


def test_a_missing_rank_0_is_named(slow_cases):
    assert "rank 1 cannot reach the job's store" in slow_cases["0 missing"].result()[1].error
    assert "is rank 0 running" in slow_cases["0 missing"].result()[1].error


def test_a_worker_with_a_different_world_size_is_named(slow_cases):
    """Rank 0 may wait for the fourth worker before it fails; without it no worker would report the cause."""
    for one in slow_cases["world of 4 on rank 1"].result():
        assert "worker 1 (" in one.error
        assert "expects a world of 4 workers, this job has 3: start every worker with the same" in one.error


def test_two_workers_with_rank_0_are_reported(slow_cases):
    errors = sorted(one.error for one in slow_cases["rank 0 twice"].result())
    assert "rank 0 cannot listen on port" in errors[0]
    assert "another process has rank 0, too" in errors[0]
    assert errors[1].startswith("worker 1 did not join within 8 s, 1 of 2 are here (worker 0 (")


def test_a_rank_outside_its_world_is_reported_at_once_and_missing_for_the_others(slow_cases):
    first, second, third = slow_cases["world of 2 on rank 2"].result()
    assert third.error == "expected 0 <= RANK < WORLD_SIZE, got RANK=2 and WORLD_SIZE=2"
    for one in first, second:
        assert one.error.startswith("worker 2 did not join within 8 s, 2 of 3 are here")
