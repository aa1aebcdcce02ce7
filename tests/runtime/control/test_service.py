"""Promises of a coordinator that belongs to no worker, with real processes.

Any worker may be killed, rank 0 too, and started again with the same RANK; the coordinator may be killed and
started again; the others train on. Afterwards all replicas hold the same bits, and each sample was used once
an epoch.
"""

import re
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from offbeat.errors import OffbeatError
from offbeat.events import AbortJob, Joined, Lost, PeerList, PeerUnreachable, Ready, Tick
from offbeat.runtime.control.admission import JobRequest
from offbeat.runtime.control.configuration import CoordinatorConfiguration
from offbeat.runtime.control.environment import read_token
from offbeat.runtime.control.journal import Journal
from offbeat.runtime.control.requesting import request_admission
from offbeat.runtime.control.service import ServiceCoordinator
from offbeat.strategies import AllReduce, PartialAllReduce
from offbeat.wire.codec import (
    ACTION_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    encode_action,
    encode_record,
    join_actions,
    to_plain,
)
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.coordinator_process import Peer, joined
from support.coordinator_service import DEADLINE_S, service
from support.jobs import job
from support.newcomer_training import EPOCHS, GATE_STEP, Gate, train
from support.processes import values
from support.run_logs import entries_of, wait_for_entry, wait_until
from support.sample_counting import SAMPLES

RETURNS = {"OFFBEAT_NEWCOMER": "auto", "WORLD_SIZE": "3"}


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


@pytest.fixture
def coordinator(tmp_path, gate):
    with service(tmp_path, log=gate.log) as running:
        running.env |= {name: gate.env[name] for name in gate.env if name != "OFFBEAT_RUN_LOG"}
        yield running


def trained_once(ended):
    results = values(ended)
    for one in results:
        assert one.uses == [float(EPOCHS)] * SAMPLES
        assert (one.buffer, one.momenta, one.step) == (
            results[0].buffer,
            results[0].momenta,
            results[0].step,
        )
    return results


def all_are_at_the_gate(log, workers):
    """Waits until every worker has sent the gradients of the last step before the gate."""
    for worker in workers:
        wait_for_entry(
            log,
            f"worker {worker} at the gate",
            lambda one, worker=worker: (
                isinstance(one, Ready) and one.worker == worker and one.step >= GATE_STEP - 1
            ),
        )


def ended_with_worker_1_replaced(running, gate):
    """Starts the killed worker again when its loss is known; checks how it and the others end."""
    wait_for_entry(gate.log, "the loss", lambda one: isinstance(one, Lost) and one.worker == 1)
    running.add(train, env={**RETURNS, "RANK": "1"})
    gate.open_for(3)
    ended = running.ends()
    assert ended.pop(1).exitcode == -signal.SIGKILL
    trained_once(ended)


def test_workers_need_no_master_and_the_service_ends_after_the_last_of_them(coordinator, gate):
    gate.open()
    with job(
        train, 3, env={**coordinator.env, "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    ) as running:
        results = trained_once(running.ends())
    assert [one.worker for one in results] == [0, 1, 2]
    code, errors = coordinator.ended()
    assert code == 0
    assert "listens on" in errors
    assert "can join" not in errors  # there is a secret
    assert replay(read_log(gate.log)) is None
    coordinator.start()
    code, errors = coordinator.ended()
    assert code == 0
    assert errors.endswith("have finished: a new job needs a new folder\n")


@pytest.mark.long(after=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_started_again_with_its_rank_comes_back_by_itself(coordinator, gate, rank):
    with job(train, 3, env=coordinator.env) as running:
        all_are_at_the_gate(gate.log, range(3))
        running.signal(rank, signal.SIGKILL)
        wait_for_entry(gate.log, "the loss", lambda one: isinstance(one, Lost) and one.worker == rank)
        again = running.add(train, env={**RETURNS, "RANK": str(rank)})
        gate.open_for(3)
        ended = running.ends()
    assert ended.pop(rank).exitcode == -signal.SIGKILL
    results = trained_once(ended)
    assert results[-1].worker == again == 3
    assert coordinator.ended()[0] == 0


def test_a_coordinator_that_is_started_to_ignore_a_signal_ignores_it(tmp_path, gate):
    ignoring = ["env", "--ignore-signal=TERM"]
    with service(tmp_path, log=gate.log, prefix=ignoring) as running:
        env = {**gate.env, **running.env}
        del env["OFFBEAT_RUN_LOG"]
        with job(train, 3, env=env) as started:
            all_are_at_the_gate(gate.log, range(3))
            running.process.send_signal(signal.SIGTERM)
            gate.open()
            trained_once(started.ends())
        assert running.ended()[0] == 0


def test_two_workers_may_come_back_at_once(coordinator, gate):
    with job(train, 3, env=coordinator.env) as running:
        all_are_at_the_gate(gate.log, range(3))
        for rank in (0, 2):
            running.signal(rank, signal.SIGKILL)
        for rank in (0, 2):
            running.add(train, env={**RETURNS, "RANK": str(rank)})
        gate.open_for(3, 4)
        ended = running.ends()
    assert sorted(one.worker for one in trained_once([ended[1], *ended[3:]])) == [1, 3, 4]


def test_a_coordinator_that_is_started_again_with_its_folder_continues_the_job(coordinator, gate):
    with job(train, 3, env=coordinator.env) as running:
        for _ in range(2):
            wait_for_entry(gate.log, "a step", lambda one: isinstance(one, Ready) and one.step >= 1)
            coordinator.kill()
            coordinator.start()
        all_are_at_the_gate(gate.log, range(3))
        coordinator.kill()
        running.signal(1, signal.SIGKILL)  # while there is no coordinator
        coordinator.start()
        ended_with_worker_1_replaced(running, gate)
    assert coordinator.ended()[0] == 0
    log = read_log(gate.log)
    assert replay(log) is None
    assert sorted(one.worker for one in log.entries if isinstance(one, Joined)) == [0, 1, 2, 3]
    times_s = [one.now_s for one in log.entries if hasattr(one, "now_s")]
    assert times_s == sorted(times_s)


def test_a_coordinator_that_is_started_again_at_another_address_is_found_by_its_file(tmp_path, gate):
    with service(tmp_path, moves=True, log=gate.log) as coordinator:
        env = {**coordinator.env, "OFFBEAT_TEST_GATE": gate.env["OFFBEAT_TEST_GATE"]}
        with job(train, 3, env=env) as running:
            all_are_at_the_gate(gate.log, range(3))
            first = (coordinator.state / "address").read_text()
            coordinator.kill()
            coordinator.start()
            wait_until(lambda: (coordinator.state / "address").read_text() != first, "another address")
            running.signal(1, signal.SIGKILL)
            ended_with_worker_1_replaced(running, gate)
        assert coordinator.ended()[0] == 0


def test_a_file_that_does_not_name_the_coordinator_in_time_is_named(tmp_path, gate):
    place = tmp_path / "address"
    place.write_text("somewhere")
    with job(train, 1, env={"OFFBEAT_COORDINATOR": place.as_uri(), "OFFBEAT_START_S": "1"}) as running:
        assert f"{place} (OFFBEAT_COORDINATOR) does not name the coordinator" in running.ends()[0].error


def test_without_its_state_a_new_coordinator_ends_the_workers_in_words(tmp_path, gate):
    with service(tmp_path, state=False, log=gate.log) as coordinator:
        env = {**coordinator.env, "OFFBEAT_TEST_GATE": gate.env["OFFBEAT_TEST_GATE"]}
        with job(train, 2, env=env) as running:
            all_are_at_the_gate(gate.log, range(2))
            coordinator.kill()
            coordinator.start()
            gate.open()
            ended = running.ends()
    for one in ended:
        assert one.error_type == "WorkerError"
        assert "started again without its state" in one.error


def test_a_higher_attempt_begins_the_job_again_and_ends_the_workers_of_the_one_before(coordinator, gate):
    with job(train, 2, env=coordinator.env) as running:
        all_are_at_the_gate(gate.log, range(2))
        place = {"OFFBEAT_NEWCOMER": "auto", "WORLD_SIZE": "2", "OFFBEAT_ATTEMPT": "1"}
        for rank in range(2):
            running.add(train, env={**place, "RANK": str(rank)})
        gate.open()
        ended = running.ends()
    for one in ended[:2]:
        assert "attempt 1 of the job has begun; this worker is of attempt 0" in one.error
    assert [one.worker for one in trained_once(ended[2:])] == [0, 1]
    assert coordinator.ended()[0] == 0


def test_a_process_of_an_earlier_attempt_is_refused(coordinator, gate):
    with job(train, 2, env={**coordinator.env, "SLURM_RESTART_COUNT": "2"}) as running:
        wait_until(lambda: bool(entries_of(gate.log, PeerList)), "a start")
        place = {"OFFBEAT_NEWCOMER": "auto", "WORLD_SIZE": "2"}
        late = running.add(train, env={**place, "RANK": "0", "OFFBEAT_ATTEMPT": "1"})
        refused = running.end(late)
        gate.open()
        trained_once(running.ends()[:2])
    assert "attempt 2 of the job has begun, and this process is of attempt 1" in refused.error


class NeedsMore(PartialAllReduce):
    """A strategy of a newer version, whose policies have arguments that this one lacks."""

    def policies(self, world, start_s, servers):
        first, *rest = super().policies(world, start_s, servers)
        return msgspec.structs.replace(first, arguments={**first.arguments, "newer": 1}), *rest


def test_a_worker_whose_policies_the_coordinator_cannot_build_is_refused_and_another_begins(
    coordinator, gate
):
    gate.open()
    with job(train, 1, NeedsMore(limit=10**6), env=coordinator.env) as running:
        (refused,) = running.ends()
    assert "its job needs other policies than this coordinator has" in refused.error
    assert "newer" in refused.error
    with job(train, 1, env=coordinator.env) as running:
        trained_once(running.ends())


def test_a_run_log_that_cannot_be_written_is_reported_at_the_start(tmp_path):
    with service(tmp_path, log=tmp_path / "none" / "log") as coordinator:
        code, errors = coordinator.ended()
    assert code != 0
    assert f"{tmp_path}/none/log" in errors


def fails_once(rank, emit, folder):
    """Fails at the third step in the first attempt."""

    def before_step(session):
        if session.step == 3 and session.worker == 1 and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise RuntimeError("a fault of the program")

    return train(rank, emit, AllReduce(), before_step=before_step)


def test_a_failed_job_is_begun_again_by_workers_that_are_started_again(coordinator, gate, tmp_path):
    gate.open()
    with job(fails_once, 2, tmp_path, env=coordinator.env) as running:
        for rank in range(2):
            assert "a fault of the program" in running.end(rank).error
        for rank in range(2):
            env = {"OFFBEAT_NEWCOMER": "auto", "WORLD_SIZE": "2", "RANK": str(rank)}
            running.add(fails_once, tmp_path, env=env)
        results = values([running.end(number) for number in (2, 3)])
    assert [one.worker for one in results] == [0, 1]
    assert coordinator.ended()[0] == 0


@pytest.mark.long
def test_where_all_workers_are_silent_and_a_process_asks_for_the_job_the_workers_are_lost(coordinator, gate):
    """A coordinator that receives nothing at all is cut off itself, and waits much longer."""
    with job(train, 2, AllReduce(), env=coordinator.env) as running:
        all_are_at_the_gate(gate.log, range(2))
        for rank in range(2):
            running.signal(rank, signal.SIGSTOP)
        for rank in range(2):
            wait_for_entry(
                gate.log,
                f"silence of worker {rank}",
                lambda one, rank=rank: isinstance(one, PeerUnreachable) and one.peer == rank,
            )
        late = running.add(train, AllReduce(), env={**RETURNS, "WORLD_SIZE": "2", "RANK": "0"})
        assert running.end(late).error_type is not None
        for rank in range(2):
            wait_for_entry(
                gate.log, "the loss", lambda one, rank=rank: isinstance(one, Lost) and one.worker == rank
            )
        for rank in range(2):
            running.signal(rank, signal.SIGCONT)
        gate.open()
        for one in running.ends()[:2]:
            assert "was lost" in one.error


@pytest.mark.long(after=4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"OFFBEAT_JOB": "another"}, r"cannot be reached: .*job.* OFFBEAT_JOB"),
        ({"OFFBEAT_TOKEN_FILE": "/dev/null"}, "found an empty file"),
        (
            {"OFFBEAT_TOKEN_FILE": "/etc/hostname"},
            r"cannot be reached: .*does 'offbeat coordinator' run there",
        ),
        ({"OFFBEAT_COORDINATOR": "127.0.0.1:1", "OFFBEAT_START_S": "2"}, r"127.0.0.1:1 .* cannot be reached"),
        ({"OFFBEAT_COORDINATOR": "127.0.0.1"}, "must be HOST:PORT"),
        ({"OFFBEAT_ATTEMPT": "-1"}, "OFFBEAT_ATTEMPT must not be negative"),
        ({"OFFBEAT_NEWCOMER": "yes"}, "must be auto, 0 or 1"),
    ],
)
def test_what_keeps_a_worker_from_its_coordinator_is_named(coordinator, change, words):

    with job(train, 1, env={**coordinator.env, **change}) as running:
        (ended,) = running.ends()
    assert ended.error_type == "OffbeatError"
    assert re.search(words, ended.error), ended.error


def job_request(world, attempt=0):
    return JobRequest(
        rank=0,
        world=world,
        attempt=attempt,
        is_newcomer=False,
        policies=AllReduce().policies(world, 30.0, 1),
        log_header={},
        silent_s=10.0,
        start_s=30.0,
    )


def test_an_action_that_no_message_can_hold_is_an_error_and_not_in_the_state(tmp_path):
    """Two workers join, each with so many addresses that no message can hold those of both."""
    with service(tmp_path) as coordinator:
        process = SimpleNamespace(addresses=[f"tcp://{coordinator.address}"])
        token = read_token(coordinator.env["OFFBEAT_TOKEN_FILE"])

        def is_admitted(attempt):
            request = job_request(2, attempt)
            (address,) = process.addresses
            answer = request_admission(address, request, job="job", token=token, timeout_s=DEADLINE_S)
            return answer.worker == 0

        assert is_admitted(attempt=0)
        peers = [Peer(f"w{worker}", process, worker=worker, token=token) for worker in range(2)]
        for peer in peers:
            peer.send(replace(joined(peer, 2, peer.worker), addresses=("a" * 9000,) * 60))
        reasons = [peer.receive_until(AbortJob).reason for peer in peers]
        for peer in peers:
            peer.links.close()
        code, errors = coordinator.ended()
        assert code != 0
        for text in (*reasons, errors):
            assert f"expected an action of at most {ACTION_BYTES_MAX} bytes" in text
            assert re.search(
                r"got PeerList of 1\d{6} bytes, 1\d{6} of them in 'peers': make that shorter", text
            )
        coordinator.start()
        assert is_admitted(attempt=1)


def service_with_journal(folder, peer, event, answers=b""):
    """A coordinator whose journal has the request for a job of one worker, and one event with its answers."""
    journal = Journal(folder)
    plain = {"type": "JobRequest", **msgspec.to_builtins(job_request(1))}
    journal.append(encode_record("request", plain, b""))
    journal.append(encode_record(peer, to_plain(event), answers))
    journal.flush()
    configuration = CoordinatorConfiguration(job="job", token="secret", host="127.0.0.1", policies=())
    return ServiceCoordinator(configuration, listeners=[], journal=journal)


@pytest.mark.parametrize("count", [0, 1, 2 * MESSAGE_BYTES_MAX // 1000])
def test_a_decision_that_is_not_repeated_is_an_error_however_long_it_was(tmp_path, count):
    place = SimpleNamespace(name="w0", links=SimpleNamespace(addresses=()))
    action = AbortJob(worker=0, step=1, reason="r" * 1000)
    answers = join_actions([encode_action(to_plain(action))] * count) if count else b""
    coordinator = service_with_journal(tmp_path, "w0", joined(place, 1, 0), answers)
    with pytest.raises(OffbeatError, match=r"for Joined.* it had returned .*, and returns .*PeerList.* now"):
        coordinator._restore()


def test_the_clock_of_the_job_continues_on_a_host_that_has_run_for_less_long(tmp_path):
    last_s = time.monotonic() + 10**6
    coordinator = service_with_journal(tmp_path, "", Tick(now_s=last_s))
    coordinator._restore()
    assert last_s <= coordinator._now_s() < last_s + 100
