"""Signals in the middle of training: all workers see them at the end of the same step, save there, and leave.

A worker sends itself the signal at a known step, from within its forward pass or somewhere else that is
known, so that no result depends on its time of arrival.
"""

import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.events import Failed, Joined, Lost, Preempt, Preempted
from offbeat.policies.membership.group_membership import GroupMembership
from offbeat.policies.membership.preemption import PreemptionBroadcast
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.processes.preemption_signals import PreemptionSignals
from offbeat.strategies import SSP, AllReduce, Downpour, Hybrid, PartialAllReduce, ServerBSP
from support.jobs import job
from support.processes import run, values
from support.run_logs import entries_of, wait_for_entry

SAMPLES, BATCH, EPOCHS = 96, 4, 20
STEADY = PartialAllReduce(limit=10**6)  # no worker is excluded as slow


class Model(nn.Module):
    """A model that calls `in_forward` once in a forward pass, after `left` other passes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
        self.left, self.in_forward = -1, None

    def forward(self, inputs):
        if self.left == 0:
            self.in_forward()
        self.left -= 1
        return self.body(inputs)


def made(left=-1, in_forward=None):
    torch.manual_seed(0)
    model = Model()
    model.left, model.in_forward = left, in_forward
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 5, generator=generator))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data


def signal_this_process():
    os.kill(os.getpid(), signal.SIGTERM)


def train(rank, emit, strategy, signalled=(), step=0, path=None):
    """Returns the step after which the loop saw the signal, None if it never did, and the parameters."""
    model, optimizer, data = made(step if rank in signalled else -1, signal_this_process)
    seen = None
    with offbeat.join(model, optimizer, strategy) as session:
        assert not session.preempted
        for _ in session.epochs(EPOCHS):
            for (inputs,) in session.batches(data, BATCH):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                if session.preempted:
                    seen = session.step
                    if session.is_leader and path is not None:
                        torch.save(session.state_dict(), path)
                    break
    return seen, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("strategy", "signalled", "seen"),
    [
        (AllReduce(), (1,), 6),
        (AllReduce(), (0, 1, 2), 6),
        (STEADY, (0,), 6),
        (STEADY, (1,), 6),
        (Hybrid(), (1,), 7),
        (ServerBSP(shards="equal"), (1,), None),
        (SSP(shards="equal"), (1,), None),
    ],
    ids=str,
)
def test_all_workers_see_a_signal_at_the_end_of_the_same_step_with_equal_parameters(
    strategy, signalled, seen, tmp_path
):
    ended = values(run(train, 3, strategy, signalled, 5, tmp_path / "state.pt"))
    (step,) = {step for step, _ in ended}  # on servers, the latest step in progress
    assert step == seen or (seen is None and 6 <= step <= 6 + 2 * SSP().s)
    first, *others = [parameters for _, parameters in ended]
    assert all(parameters == first for parameters in others)
    assert torch.load(tmp_path / "state.pt")["step"] == step


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("strategy", "workers"), [(AllReduce(), 1), (SSP(), 1), (Downpour(), 2), (SSP(), 2)])
def test_every_worker_sees_a_signal_also_alone_or_without_a_common_clock(strategy, workers):
    for step, _ in values(run(train, workers, strategy, (0,), 5)):
        assert step is not None
        assert workers > 1 or step == 6


def train_outside(rank, emit, strategy):
    """Worker 1 signals itself once it is excluded from the group."""
    model, optimizer, data = made()
    has_signalled = False
    with offbeat.join(model, optimizer, strategy) as session:
        assert not session.preempted
        for _ in session.epochs(10**6):
            for (inputs,) in session.batches(data, BATCH):
                if rank == 1 and session.worker not in session.members and not has_signalled:
                    has_signalled = True
                    signal_this_process()
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                if session.preempted:
                    return session.step, session.is_leader
    return None


def test_the_signal_of_an_excluded_worker_reaches_the_members_at_one_step():
    strategy = PartialAllReduce(k=5.0, limit=3, n_profile=2)  # only worker 1 is slow enough
    first, outside, third = values(run(train_outside, 3, strategy, env={"OFFBEAT_SLOW": "1:20"}))
    assert first[0] == third[0]
    assert {first[1], third[1]} == {True, False}
    assert outside is not None


def ignores(rank, emit, log):
    """Ignores the signal, until this worker has taken a step with a newcomer, which ends last."""
    model, optimizer, data = made(5 if rank == 1 else -1, signal_this_process)
    is_together = False
    has_seen: list[bool] = []  # by the newcomer, after each step
    with offbeat.join(model, optimizer, STEADY) as session:
        for _ in session.epochs(10**6):
            for (inputs,) in session.batches(data, BATCH):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                if session.is_newcomer:
                    has_seen.append(session.preempted)
                    if session.members == (session.worker,):
                        return has_seen[0]
                    continue
                if rank == 1 and session.step == 1:
                    assert not session.preempted  # so that the signal does not end the process
                if is_together:
                    return None
                is_together = 2 in session.members
    return has_seen[0] if has_seen else "no newcomer joined"


def joins_later(rank, emit, log):
    wait_for_entry(log, "a signal", lambda one: isinstance(one, Preempted))
    return ignores(rank, emit, log)


def test_a_newcomer_sees_an_earlier_signal_at_the_end_of_its_first_step(tmp_path):
    """The agreement of its first round brings it the signal too, so the log must show that a Preempt did."""
    log = tmp_path / "log.jsonl"
    with job(ignores, 2, log, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.add(joins_later, log)
        assert values(running.ends()) == [None, None, True]
    assert [action.worker for action in entries_of(log, Preempt)] == [None, 2]


def test_the_policy_informs_all_workers_once_and_each_newcomer():
    policy = PreemptionBroadcast()
    joined = Joined(
        now_s=0.0,
        worker=3,
        world=2,
        peer="worker-3.a",
        location="",
        addresses=(),
        model_signature=(),
        strategy="",
    )
    assert policy.handle(joined) == []
    first = Preempted(now_s=1.0, worker=1, step=7, signal="SIGTERM")
    reason = "worker 1 was sent SIGTERM after 7 steps"
    assert policy.handle(first) == [Preempt(worker=None, signalled_worker=1, reason=reason)]
    assert policy.handle(Preempted(now_s=1.0, worker=0, step=7, signal="SIGUSR1")) == []
    other = PreemptionBroadcast()
    other.load_state_dict(policy.state_dict())
    assert other.handle(joined) == [Preempt(worker=3, signalled_worker=1, reason=reason)]


# Handlers ----------------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_the_programs_handlers_run_as_well_and_are_restored_unless_changed(handlers):
    received = []

    def mine(number, frame):
        received.append(number)

    def later(number, frame):
        received.append(-number)

    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGUSR1, mine)
    model, optimizer, _ = made()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        assert signal.getsignal(signal.SIGTERM) is mine  # until `preempted` is read
        assert not session.preempted
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGUSR1, later)
        signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGTERM, -signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGUSR1) is later


def test_handlers_are_not_installed_in_another_thread(handlers):
    before, signals = signal.getsignal(signal.SIGTERM), PreemptionSignals()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(signals.install).result()  # raises the error of the thread
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_process_ends_by_the_signal(handlers):
    signals = PreemptionSignals()
    signals.install()
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signals.signal_name is None


# Calls in the middle of a step -------------------------------------------------------------------------


def call_within_a_step(rank, emit, strategy, where, what):
    """Worker 1 calls the session in the handler of a signal within its fourth step."""
    model, optimizer, data = made()
    armed = []

    def send_signal():
        if armed:
            armed.clear()
            signal_this_process()

    def before(owner, name):
        method = getattr(owner, name)

        def signal_first(self, *args, **kwargs):
            send_signal()
            return method(self, *args, **kwargs)

        setattr(owner, name, signal_first)

    if where == "a forward pass":
        model.in_forward = send_signal
    if where == "the optimizer":
        optimizer.register_step_pre_hook(lambda *_: send_signal())
    if where == "what holds a lock":
        before(GroupMembership, "finish_step")
    if where == "a wait":
        before(CoordinatorClient, "wait_for")
    with offbeat.join(model, optimizer, strategy) as session:
        signal.signal(
            signal.SIGTERM, lambda *_: getattr(session, what)(*(() if what != "validate" else (0, 0)))
        )
        for _ in session.epochs(3):
            for (inputs,) in session.batches(data, BATCH):
                if rank == 1 and session.step == 3:
                    model.left = 0 if where == "a forward pass" else -1
                    armed.append(True)
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                if where == "a backward pass":
                    loss.register_hook(lambda _: send_signal())
                loss.backward()
                optimizer.step()


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("strategy", "where", "what", "doing"),
    [
        (AllReduce(), "a forward pass", "state_dict", "in a forward pass"),
        (Hybrid(), "a backward pass", "refresh", "in a backward pass"),
        (SSP(shards="equal"), "a wait", "state_dict", "in the session"),
        (ServerBSP(), "a backward pass", "leave", "in a backward pass"),
        (STEADY, "the optimizer", "validate", "in the optimizer's step"),
        (STEADY, "what holds a lock", "state_dict", "in the session"),
        (AllReduce(), "what holds a lock", "leave", "in the session"),
    ],
    ids=str,
)
def test_a_call_within_a_step_is_rejected_with_a_clear_error(strategy, where, what, doing):
    _, second = run(call_within_a_step, 2, strategy, where, what)
    assert second.error_type == "WorkerError", second.trace
    assert second.error == (
        f"session.{what}() was called on worker 1 in the middle of step 4, which is {doing} now: "
        "call it between steps; to save when a signal comes, use session.preempted"
    )


def test_a_state_saved_after_a_backward_pass_is_that_of_the_last_step(handlers):
    states = []

    def steps(model, optimizer, session, data, saves=False):
        for _ in session.epochs(1):
            for (inputs,) in session.batches(data, BATCH):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                if saves and session.step == 3:
                    signal.signal(signal.SIGTERM, lambda *_: states.append(copied(session.state_dict())))
                    signal_this_process()
                optimizer.step()
        return [parameter.tolist() for parameter in model.parameters()]

    model, optimizer, data = made()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        whole = steps(model, optimizer, session, data, saves=True)
    model, optimizer, data = made()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        session.load_state_dict(states[0])
        assert session.step == 3
        assert steps(model, optimizer, session, data) == whole


def copied(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


# Interrupts --------------------------------------------------------------------------------------------


def interrupted(rank, emit, strategy, where):
    model, optimizer, data = made()

    def interrupt():
        signal.raise_signal(signal.SIGINT)

    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(3):
            for (inputs,) in session.batches(data, BATCH):
                is_now = rank == 1 and session.step == 3
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                if is_now and where == "a backward pass":
                    loss.register_hook(lambda _: interrupt())
                loss.backward()
                if is_now and where == "the optimizer":
                    optimizer.register_step_post_hook(lambda *_: interrupt())
                optimizer.step()
        return "went on"


@pytest.mark.long(after=2)
@pytest.mark.parametrize("where", ["a backward pass", "the optimizer"])
@pytest.mark.parametrize("strategy", [AllReduce(), STEADY, Hybrid(), SSP(), Downpour()], ids=str)
def test_an_interrupt_of_one_worker_is_reported_to_the_others(strategy, where, tmp_path):
    log = tmp_path / "log.jsonl"
    with job(interrupted, 3, strategy, where, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        first, second, third = running.ends()
    assert second.error_type == "KeyboardInterrupt", second.trace
    (failed,) = entries_of(log, Failed)[:1]
    assert (failed.worker, failed.error) == (1, "KeyboardInterrupt")
    for one in (first, third):
        if strategy.survives_worker_loss:
            assert one.value == "went on", one.trace
        else:
            assert one.error.startswith("worker 1 failed after")
            assert "KeyboardInterrupt" in one.error


def waits_for_a_paused_worker(rank, emit, strategy, log):
    """Worker 0 pauses in its fourth step until the run log shows the end of worker 1."""
    model, optimizer, data = made()
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(3):
            for (inputs,) in session.batches(data, BATCH):
                if rank == 0 and session.step == 3:
                    wait_for_entry(log, "the end of worker 1", lambda one: isinstance(one, Failed | Lost))
                if rank == 1 and session.step == 3:
                    emit("about to wait")
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        return "went on"


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", [AllReduce(), STEADY, Hybrid(), ServerBSP()], ids=str)
def test_an_interrupt_of_a_waiting_worker_is_reported_to_the_others(strategy, tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_RUN_LOG": str(log)}
    with job(waits_for_a_paused_worker, 2, strategy, log, env=env) as running:
        running.receive(1)
        running.signal(1, signal.SIGINT)
        first, second = running.ends()
    assert second.error_type == "KeyboardInterrupt", second.trace
    (failed,) = entries_of(log, Failed)[:1]
    assert (failed.worker, failed.error) == (1, "KeyboardInterrupt")
    if strategy.survives_worker_loss:
        assert first.value == "went on", first.trace
    else:
        assert first.error.startswith("worker 1 failed after")
