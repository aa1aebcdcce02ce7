"""Promises of a job with failures: real workers are killed, paused, interrupted and misused.

The others always end with an error that names the culprit, and nothing is left: no process, no temporary
file, no hook; a gradient whose exchange did not finish is the local one.
"""

import io
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import WorkerError
from offbeat.runtime.collectives import link_exchange
from offbeat.runtime.control import client
from offbeat.runtime.training import job_connection
from offbeat.strategies import AllReduce
from support.jobs import job
from support.newcomer_training import train

SILENT_S = 3.0  # the default is 10 s

WORKERS = 4


class Net(nn.Module):
    """Calls `at_forward` in every forward pass."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.at_forward = lambda: None

    def forward(self, x):
        self.at_forward()
        return self.layers(x)


def hooks_of(model, optimizer):
    return (
        [dict(p._post_accumulate_grad_hooks or {}) for p in model.parameters()],
        dict(model._forward_pre_hooks),
        dict(model._forward_hooks),
        dict(optimizer._optimizer_step_pre_hooks),
        dict(optimizer._optimizer_step_post_hooks),
    )


def loss_of(model, rank, step):
    x = torch.full((2, model.layers[0].in_features), 1.0 + rank + step / 10)
    return model(x).square().mean()


def local_gradients(model, rank, step):
    """The gradients of a backward pass on this worker alone."""
    twin = Net(model.layers[0].in_features)
    twin.load_state_dict(model.state_dict())
    loss_of(twin, rank, step).backward()
    return [p.grad for p in twin.parameters()]


class Loop:
    """A training loop that checks hooks and gradients when it ends with a WorkerError.

    Args:
        before_step: (session, step), called before each step; may raise, end the process or return "leave".
    """

    def __init__(self, rank, emit, *, steps=10**6, width=8, before_step=lambda session, model: None):
        self.rank, self.emit, self.steps, self.before_step = rank, emit, steps, before_step
        torch.manual_seed(rank)
        self.model = Net(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.waits_in = None  # the step in whose exchange this worker reports that it waits

    def run(self):
        before = hooks_of(self.model, self.optimizer)
        step, expected = 0, None
        try:
            with offbeat.join(self.model, self.optimizer, AllReduce()) as session:
                synchronizer = session._synchronizer
                announce = synchronizer.announce_gradients
                synchronizer.announce_gradients = lambda compute_s: self._ready(announce, session, compute_s)
                while session.step < self.steps:
                    step = session.step
                    if self.before_step(session, self.model) == "leave":
                        break
                    self.optimizer.zero_grad()
                    expected = local_gradients(self.model, self.rank, step)
                    loss_of(self.model, self.rank, step).backward()
                    expected = None
                    self.optimizer.step()
        except WorkerError as error:
            assert hooks_of(self.model, self.optimizer) == before
            if expected is not None:
                for parameter, gradient in zip(self.model.parameters(), expected, strict=True):
                    assert parameter.grad is None or torch.equal(parameter.grad, gradient)
            return {
                "worker": error.worker,
                "step": error.step,
                "text": str(error),
                "at": step,
                "waited": expected is not None,
            }
        assert hooks_of(self.model, self.optimizer) == before
        return None

    def _ready(self, announce, session, compute_s):
        contribution = announce(compute_s)
        if session.step == self.waits_in:
            self.emit("waits")
        return contribution


def survivors(ended, victim, since_s=None):
    """The results of the other workers; prints how long after `since_s` the last of them ended."""
    others = [one for one in ended if one.rank != victim]
    for one in others:
        assert one.error is None, one.trace
        assert one.exitcode == 0
        assert one.value is not None, f"worker {one.rank} ended without an error"
    if since_s is not None:
        print(f"the last of the others ended {max(one.ended_s for one in others) - since_s:.2f} s after")
    return [one.value for one in others]


# Killed workers -------------------------------------------------------------------------------------------


def hang(emit, what):
    emit(what)
    signal.pause()


def hangs_in_compute(rank, emit, victim, at_step):
    loop = Loop(rank, emit)
    loop.waits_in = at_step
    if rank == victim:

        def before_step(session, model):
            if session.step == at_step:
                model.at_forward = lambda: hang(emit, "computes")

        loop.before_step = before_step
    return loop.run()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_worker_killed_while_the_others_wait_for_it_is_named(victim):
    with job(hangs_in_compute, WORKERS, victim, 3) as running:
        running.receive(*range(WORKERS))
        killed_s = running.signal(victim, signal.SIGKILL)
        ended = running.ends()
    for report in survivors(ended, victim, killed_s):
        assert report["worker"] == victim
        assert report["step"] == 3
        assert f"worker {victim} was lost" in report["text"]
        assert re.search(r"\(noticed by (the coordinator|worker \d)\)$", report["text"])
        assert report["waited"]


def hangs_after_join(rank, emit, victim):
    if rank == victim:
        return Loop(rank, emit, before_step=lambda *_: hang(emit, "joined")).run()
    return Loop(rank, emit).run()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_killed_right_after_join_is_named(victim):
    with job(hangs_after_join, WORKERS, victim) as running:
        running.receive(victim)
        killed_s = running.signal(victim, signal.SIGKILL)
        ended = running.ends()
    for report in survivors(ended, victim, killed_s):
        assert report["worker"] == victim
        assert report["step"] is None
        assert f"worker {victim} was lost before its first step" in report["text"]


def killed_before_the_start(rank, emit, late):
    if rank != late:
        has_started, reported = client.CoordinatorClient._wait_for_start, []

        def emit_that_it_waits(self, wait_s):
            assert self.endpoint.flush(10)
            if not reported:
                reported.append(emit("asked to join"))
            return has_started(self, wait_s)

        client.CoordinatorClient._wait_for_start = emit_that_it_waits
    if rank == late:
        join = client.CoordinatorClient.join

        def join_late(self, **about):
            emit("has met the others and waits to join")
            assert signal.sigwait({signal.SIGUSR1})
            return join(self, **about)

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        client.CoordinatorClient.join = join_late
    return Loop(rank, emit).run()


def test_a_worker_killed_before_the_start_is_named_also_to_later_workers():
    with job(killed_before_the_start, 3, 2) as running:
        running.receive(0, 1, 2)
        killed_s = running.signal(1, signal.SIGKILL)
        running.died(1)
        running.signal(2, signal.SIGUSR1)
        ended = running.ends()
    first, late = survivors(ended, 1, killed_s)
    # On a busy machine the coordinator may see the death before it reads this worker's request.
    assert first["worker"] == 1 or "cannot take part" in first["text"]
    for report in first, late:
        assert "was lost before the start" in report["text"]
        assert "worker 1" in report["text"]


def dies_in_the_exchange(rank, emit, victim, width):
    loop = Loop(rank, emit, width=width, steps=10)
    if rank == victim:
        arrived = link_exchange._ScheduleRun._on_complete

        def die_halfway(self, number, first, last):
            is_copy = self._plan.steps[number].op == "copy"
            if self._plan.received - self._to_receive > width * width // 2 and is_copy:
                os.kill(os.getpid(), signal.SIGKILL)
            arrived(self, number, first, last)

        def before_step(session, model):
            if session.step == 2:
                link_exchange._ScheduleRun._on_complete = die_halfway

        loop.before_step = before_step
    return loop.run()


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_the_middle_of_the_exchange_of_a_big_model_is_named(victim):
    """The weight of each layer is a bucket of 64 MB; the victim dies when half of one has arrived."""
    with job(dies_in_the_exchange, 3, victim, 4096) as running:
        killed_s = running.died(victim)
        ended = running.ends()
    for report in survivors(ended, victim, killed_s):
        assert report["worker"] == victim
        assert report["step"] == 2
        assert report["at"] == 2
        assert report["waited"]


def test_a_coordinator_killed_with_its_supervisor_is_named_by_every_worker():
    """Killed alone, a coordinator is restarted: see test_coordinator_restart.py."""
    with job(hangs_in_compute, 3, 1, 3) as running:
        running.receive(0, 1, 2)
        killed_s = time.monotonic()
        running.kill_coordinator()
        waiting = [running.end(0), running.end(2)]
        running.signal(1, signal.SIGKILL)
    for report in survivors(waiting, 1, killed_s):
        assert "lost the coordinator" in report["text"]
        assert "nothing listens any more" in report["text"]
        assert report["waited"]


# Paused workers -------------------------------------------------------------------------------------------


def sleeps_in_compute(rank, emit, victim):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    job_connection._SILENT_S = SILENT_S
    loop = Loop(rank, emit)
    loop.waits_in = 3
    if rank == victim:

        def sleep():
            emit("computes")
            signal.sigwait({signal.SIGUSR1})

        def before_step(session, model):
            if session.step == 3:
                model.at_forward = sleep

        loop.before_step = before_step
    return loop.run()


def stop_one(victim):
    with job(sleeps_in_compute, 3, victim) as running:
        running.receive(0, 1, 2)
        stopped_s = running.signal(victim, signal.SIGSTOP)
        others = [running.end(rank) for rank in range(3) if rank != victim]
        running.signal(victim, signal.SIGCONT)
        running.signal(victim, signal.SIGUSR1)
        return victim, survivors(others, victim, stopped_s), running.end(victim)


def test_a_paused_worker_is_named_after_its_silence_and_ends_when_it_resumes():
    with ThreadPoolExecutor() as pool:  # each case waits for the whole silence limit
        for victim, others, resumed in pool.map(stop_one, [0, 1]):
            for report in others:
                assert report["worker"] == victim
                assert report["step"] == 3
                assert f"has been silent for {SILENT_S:g} s" in report["text"]
                assert report["waited"]
            assert resumed.error is None, resumed.trace
            assert "lost the coordinator" in resumed.value["text"]


# Failing workers ------------------------------------------------------------------------------------------


def has_a_fault(rank, emit, culprit, how):
    loop = Loop(rank, emit)  # without an end: the coordinator's message may arrive some steps later

    def before_step(session, model):
        if rank == culprit and session.step == 4:
            return FAULTS[how](session, model)
        return None

    loop.before_step = before_step
    return loop.run()


def fail(session, model):
    raise ValueError("sample 17 is broken:\n  it has two labels")


def fail_without_a_message(session, model):
    raise AssertionError


def fail_at_length(session, model):
    raise ValueError("x" * 2**21)


def fail_in_forward(session, model):
    def at_forward():
        raise MemoryError("no memory left for the activations")

    model.at_forward = at_forward


def interrupt(session, model):
    signal.raise_signal(signal.SIGINT)


def exit_early(session, model):
    raise SystemExit("no disk space left")


FAULTS = {
    "fail": fail,
    "fail without a word": fail_without_a_message,
    "fail at length": fail_at_length,
    "fail in forward": fail_in_forward,
    "interrupt": interrupt,
    "exit": exit_early,
    "leave": lambda session, model: "leave",
    "exit in order": lambda session, model: sys.exit(),
    "two backwards": lambda session, model: loss_of(model, session.worker, 0).backward(),
}


@pytest.mark.long(after=3)
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("how", "text", "own_error"),
    [
        ("fail", "failed after 4 steps: ValueError: sample 17 is broken:", "ValueError"),
        ("fail without a word", "failed after 4 steps: AssertionError", "AssertionError"),
        ("fail at length", "failed after 4 steps: ValueError: xxx", "ValueError"),
        ("fail in forward", "failed after 4 steps: MemoryError: no memory left", "MemoryError"),
        ("interrupt", "failed after 4 steps: KeyboardInterrupt", "KeyboardInterrupt"),
        ("exit", "failed after 4 steps: SystemExit: no disk space left", "SystemExit"),
    ],
)
def test_an_error_in_one_worker_ends_the_others_with_its_name_and_text(culprit, how, text, own_error):
    with job(has_a_fault, 3, culprit, how) as running:
        ended = running.ends()
    assert ended[culprit].error_type == own_error
    for report in survivors(ended, culprit, ended[culprit].ended_s):
        assert report["worker"] == culprit
        assert report["step"] == 4
        assert report["text"].startswith(f"worker {culprit} {text}")
        assert len(report["text"].splitlines()) == 1
        assert len(report["text"]) < 3000


@pytest.mark.long(after=2)
@pytest.mark.parametrize("how", ["leave", "exit in order"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_worker_that_leaves_early_is_named(culprit, how):
    with job(has_a_fault, 3, culprit, how) as running:
        ended = running.ends()
    if how == "leave":  # it waits for the others, and gets the error that they continue
        assert f"worker {culprit} has finished after 4 steps; worker" in ended[culprit].value["text"]
    else:
        assert ended[culprit].value is None
    for report in survivors(ended, culprit):
        assert f"worker {culprit} has finished after 4 steps" in report["text"]
        assert "begins step 5: give every worker the same number of batches" in report["text"]
        assert report["at"] in (3, 4)  # a worker may still wait for step 4 when another is at step 5


def test_a_worker_that_calls_backward_twice_is_named():
    with job(has_a_fault, 3, 1, "two backwards") as running:
        ended = running.ends()
    for report in survivors(ended, None):
        assert re.search(r"worker [012] is in step [45] but worker [012] in step [45]", report["text"])
        assert "worker 1" in report["text"]
        assert "call backward and step equally often on every worker" in report["text"]


def exits_at_the_end(rank, emit):
    loop = Loop(rank, emit, steps=10)
    try:
        loop.before_step = lambda session, model: sys.exit(0) if session.step == 5 else None
        loop.run()
    except SystemExit as error:
        return error.code
    return "did not exit"


def test_exiting_with_success_counts_as_leaving():
    with job(exits_at_the_end, 3) as running:
        assert [one.value for one in running.ends()] == [0, 0, 0]


# Reports of survivors ---------------------------------------------------------------------------------------


def writes(rank, emit, victim, fault):
    """Trains to the end; returns the lines on standard error, without any configuration of logging."""
    at_step = None
    if rank == victim:

        def at_step(session):
            if session.step == 12:
                fault()

    written = io.StringIO()
    with redirect_stderr(written):
        train(rank, emit, before_step=at_step)
    return written.getvalue().splitlines()


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with_runtime_error():
    raise RuntimeError("out of luck")


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (kill_this_process, r"worker-2\.\w+ .* \(noticed by the coordinator\)"),
        (fail_with_runtime_error, r"it failed after 12 steps: RuntimeError: out of luck"),
    ],
)
def test_every_survivor_logs_once_the_lost_worker_the_cause_and_the_remaining_workers(fault, cause):
    with job(writes, WORKERS, 2, fault, clean=fault is fail_with_runtime_error) as running:
        ended = running.ends()
    for one in ended[:2] + ended[3:]:
        (line,) = one.value
        assert re.fullmatch(f"worker 2 was lost: {cause}; training continues with workers 0, 1 and 3", line)
