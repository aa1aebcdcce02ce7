"""What a worker reads from its environment about the coordinator and the attempt."""

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import coordinator_address, parse_bind, read_environment, read_token
from offbeat.runtime.monitoring.settings import MonitoringSettings

PLACE = {"RANK": "1", "WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("environ", "ends_together"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}, False),  # by offbeat run
        ({}, False),
    ],
)
def test_an_agent_of_several_workers_ends_them_together(environ, ends_together):
    assert read_environment(environ).ends_together == ends_together


def test_with_a_coordinator_no_master_is_needed():
    found = read_environment({**PLACE, "OFFBEAT_COORDINATOR": "head:4321", "OFFBEAT_TOKEN_FILE": "secret"})
    assert (found.rank, found.world, found.master_port) == (1, 3, 0)
    assert (found.coordinator, found.token_file, found.may_return) == ("head:4321", "secret", True)
    with pytest.raises(OffbeatError, match="MASTER_ADDR is not set"):
        read_environment({**PLACE, "OFFBEAT_COORDINATOR": ""})


@pytest.mark.parametrize(
    ("environ", "attempt"),
    [
        ({}, 0),
        ({"SLURM_RESTART_COUNT": "3"}, 3),
        ({"SLURM_RESTART_COUNT": "3", "TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"SLURM_RESTART_COUNT": "3", "TORCHELASTIC_RESTART_COUNT": "2", "OFFBEAT_ATTEMPT": "0"}, 0),
        ({"OFFBEAT_ATTEMPT": "", "SLURM_RESTART_COUNT": "1"}, 1),
    ],
)
def test_the_attempt_is_the_users_else_the_launchers(environ, attempt):
    assert read_environment(environ).attempt == attempt


def test_servers_are_started_by_workers_or_apart():
    place = {**PLACE, "OFFBEAT_COORDINATOR": "head:4321"}
    found = read_environment({**place, "OFFBEAT_SERVERS": "2"})
    assert (found.servers, found.starts_servers) == (2, True)
    found = read_environment({**place, "OFFBEAT_SERVERS_APART": "3"})
    assert (found.servers, found.starts_servers) == (3, False)
    with pytest.raises(OffbeatError, match="expected OFFBEAT_SERVERS_APART of at least 1, got 0"):
        read_environment({**place, "OFFBEAT_SERVERS_APART": "0"})
    with pytest.raises(OffbeatError, match="got both"):
        read_environment({**place, "OFFBEAT_SERVERS_APART": "3", "OFFBEAT_SERVERS": "3"})
    with pytest.raises(OffbeatError, match="OFFBEAT_SERVERS_APART needs OFFBEAT_COORDINATOR"):
        read_environment({"OFFBEAT_SERVERS_APART": "3"})


@pytest.mark.parametrize(
    ("text", "place"),
    [("head:1", ("head", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_an_address_has_a_host_and_a_port(text, place):
    assert parse_bind(text) == place


@pytest.mark.parametrize("text", ["head", "head:", ":80", "head:65536", "head:x", ""])
def test_what_is_no_address_is_refused_with_the_name_of_the_setting(text):
    with pytest.raises(OffbeatError, match="--bind must be HOST:PORT"):
        parse_bind(text)
    with pytest.raises(OffbeatError, match="OFFBEAT_COORDINATOR must be HOST:PORT"):
        coordinator_address(text)


@pytest.mark.parametrize("text", ["head:0", "file:", "file:relative", "file://host/path"])
def test_what_names_no_coordinator_is_refused(text):
    with pytest.raises(OffbeatError, match="OFFBEAT_COORDINATOR must be HOST:PORT"):
        coordinator_address(text)


def test_a_coordinator_may_be_named_by_a_file():
    environment = read_environment(
        {"RANK": "1", "WORLD_SIZE": "3", "OFFBEAT_COORDINATOR": "file:///job/address"}
    )
    assert environment.coordinator == "file:///job/address"


def test_the_secret_is_that_of_the_file_whatever_its_last_line_end(tmp_path):
    first, second, empty = (tmp_path / name for name in ("first", "second", "empty"))
    first.write_text("a secret")
    second.write_text("a secret\n")
    empty.touch()
    assert read_token(str(first)) == read_token(str(second)) != read_token(None)
    for path, words in ((empty, "found an empty file"), (tmp_path / "none", "cannot read the job's secret")):
        with pytest.raises(OffbeatError, match=words):
            read_token(str(path))


def test_where_a_job_is_shown_is_read_from_its_variables():
    assert read_environment({}).monitoring == MonitoringSettings()
    shown = {"OFFBEAT_METRICS": "9400", "OFFBEAT_TENSORBOARD": "board", "OFFBEAT_SPANS": "10"}
    assert read_environment(shown).monitoring == MonitoringSettings(
        http=("127.0.0.1", 9400), tensorboard="board", spans_every=10
    )
    assert read_environment({"OFFBEAT_METRICS": "[::]:0"}).monitoring.http == ("::", 0)
    assert read_environment(dict.fromkeys(shown, "")).monitoring == MonitoringSettings()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OFFBEAT_METRICS", "port", r"must be \[HOST:\]PORT with a port from 0 to 65535, got 'port'"),
        ("OFFBEAT_METRICS", "host:65536", r"must be \[HOST:\]PORT"),
        ("OFFBEAT_SPANS", "0", "at least 1"),
        ("OFFBEAT_SPANS", "some", "must be a whole number"),
    ],
)
def test_what_does_not_say_where_to_show_a_job_is_refused(variable, value, words):
    with pytest.raises(OffbeatError, match=f"{variable}.*{words}"):
        read_environment({variable: value})
