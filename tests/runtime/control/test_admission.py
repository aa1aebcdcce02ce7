"""The rules by which a coordinator that belongs to no worker gives ids, and begins its job again."""

import msgspec
import pytest

from offbeat.errors import ProtocolError
from offbeat.runtime.control.admission import (
    Admission,
    JobAnswer,
    JobRequest,
    ServerRequest,
    decode_job_answer,
    decode_job_request,
    encode_job_message,
)
from offbeat.runtime.control.channel import SequenceAck, decode_sequence_ack, encode_sequence_ack
from offbeat.runtime.control.configuration import PARAMETER_SERVER_PATH, PolicySpec
from offbeat.wire.codec import encode_actions, encode_events

POLICIES = (PolicySpec(path="offbeat.policies.membership.assembly:Assembly", arguments={"world": 3}),)


def request(rank=0, attempt=0, *, world=3, is_newcomer=False):
    return JobRequest(
        rank=rank,
        world=world,
        attempt=attempt,
        is_newcomer=is_newcomer,
        policies=POLICIES,
        log_header={"seed": 1},
        silent_s=10.0,
        start_s=30.0,
    )


def begun(attempt=0):
    admission = Admission()
    first = request(attempt=attempt)
    assert admission.begins_job(first)
    admission.begin(first)
    return admission


def test_until_the_start_a_process_has_its_rank():
    admission = begun()
    assert not admission.begins_job(request(2))
    assert admission.admit(request(2), has_started=False) == JobAnswer(worker=2, world=3)


def test_after_the_start_every_process_gets_an_id_that_was_never_used():
    admission = begun()
    answers = [admission.admit(request(rank), has_started=True) for rank in (1, 1, 0)]
    answers.append(admission.admit(request(-1, is_newcomer=True), has_started=True))
    assert [(one.worker, one.world, one.is_newcomer) for one in answers] == [
        (3, 3, True),
        (4, 3, True),
        (5, 3, True),
        (6, 3, True),
    ]


def test_an_id_that_a_launcher_has_drawn_is_kept_unless_it_was_used():
    admission = begun()
    ids = [admission.admit(request(rank, is_newcomer=True), has_started=True).worker for rank in (7, 7, -1)]
    assert ids == [7, 8, 9]


@pytest.mark.parametrize(("has_started", "is_over"), [(False, False), (True, True)])
def test_a_newcomer_waits_for_a_running_job(has_started, is_over):
    newcomer = request(-1, is_newcomer=True)
    assert Admission().is_deferred(newcomer, has_started=False, has_workers=False)
    admission = begun()
    admission.is_over = is_over
    assert admission.is_deferred(newcomer, has_started=has_started, has_workers=True)
    admission.is_over = False
    assert not admission.is_deferred(newcomer, has_started=True, has_workers=True)


def test_a_failed_job_begins_again_once_its_workers_have_ended():
    admission = begun()
    admission.is_over = True
    assert admission.is_deferred(request(1), has_started=True, has_workers=True)
    assert not admission.is_deferred(request(1), has_started=True, has_workers=False)
    assert admission.begins_job(request(1))
    admission.begin(request(1))
    assert not admission.is_over
    assert admission.admit(request(1), has_started=False) == JobAnswer(worker=1, world=3)


def test_a_higher_attempt_begins_the_job_at_once_and_a_lower_one_is_refused():
    admission = begun(attempt=1)
    assert not admission.is_deferred(request(0, 2), has_started=True, has_workers=True)
    assert admission.begins_job(request(0, 2))
    assert not admission.begins_job(request(0, 0))
    assert not admission.is_deferred(request(0, 0), has_started=False, has_workers=True)
    refusal = admission.admit(request(0, 0), has_started=False).refusal
    assert refusal == "attempt 1 of the job has begun, and this process is of attempt 0"


def with_servers(attempt=0):
    admission = Admission()
    servers = PolicySpec(path=PARAMETER_SERVER_PATH, arguments={"servers": 2})
    admission.begin(msgspec.structs.replace(request(attempt=attempt), policies=(*POLICIES, servers)))
    return admission


def test_a_server_waits_for_a_running_job_and_is_admitted_to_one_that_has_servers():
    assert Admission().admit_server(ServerRequest(attempt=0)) is None
    admission = with_servers(attempt=1)
    assert admission.admit_server(ServerRequest(attempt=2)) is None
    assert admission.admit_server(ServerRequest(attempt=1)) == JobAnswer(world=3)
    assert "this process is of attempt 0" in admission.admit_server(ServerRequest(attempt=0)).refusal
    admission.is_over = True
    assert admission.admit_server(ServerRequest(attempt=1)) is None
    assert "no parameter server" in begun().admit_server(ServerRequest(attempt=0)).refusal


def test_the_state_of_another_gives_the_same_answers():
    admission, other = begun(), Admission()
    admission.admit(request(1), has_started=True)
    other.load_state_dict(admission.state_dict())
    assert other.request == admission.request
    for _ in range(2):
        assert admission.admit(request(2), has_started=True) == other.admit(request(2), has_started=True)


def test_requests_and_answers_are_distinguished_from_all_other_messages():
    message = encode_job_message(request(2, 5))
    assert decode_job_request(message) == request(2, 5)
    of_server = ServerRequest(attempt=3)
    assert decode_job_request(encode_job_message(of_server)) == of_server
    assert decode_sequence_ack(encode_job_message(of_server)) is None
    assert decode_sequence_ack(message) is None
    answer = JobAnswer(worker=4, world=3, is_newcomer=True)
    assert decode_job_answer(encode_job_message(answer)) == answer
    for other in (encode_sequence_ack(SequenceAck(1, 2, 3)), encode_events([]), encode_actions([]), b""):
        assert decode_job_request(other) is None


@pytest.mark.parametrize("change", [{"rank": -2}, {"world": 0}, {"attempt": -1}, {"is_newcomer": 3}])
def test_a_malformed_request_breaks_the_protocol(change):

    plain = {**msgspec.to_builtins(request()), **change}
    with pytest.raises(ProtocolError, match="expected a request for an id in the job"):
        decode_job_request(msgspec.msgpack.encode(plain))
    with pytest.raises(ProtocolError, match="expected the answer"):
        decode_job_answer(msgspec.msgpack.encode(plain))
