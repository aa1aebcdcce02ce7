"""The JSON Schema of a run log accepts what the coordinator writes, and nothing else."""

import json
import subprocess
import sys

import pytest
from jsonschema import Draft202012Validator

from offbeat.wire.codec import decode_json, to_plain
from offbeat.wire.log_file import LOG_VERSION, log_schema
from support.every_event import EXAMPLES, HEADER
from support.recorded_run import recorded_run, write_log

SCHEMA = log_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def is_line(plain):
    return VALIDATOR.is_valid(plain)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_schema_is_one_of_draft_2020_12():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("entry", EXAMPLES, ids=lambda entry: type(entry).__name__)
def test_every_event_and_action_is_valid(entry):
    plain = json.loads(json.dumps(to_plain(entry)))
    own = Draft202012Validator({"$ref": f"#/$defs/{type(entry).__name__}", "$defs": SCHEMA["$defs"]})
    own.validate(plain)
    assert is_line(plain)


@pytest.mark.parametrize("entry", EXAMPLES, ids=lambda entry: type(entry).__name__)
def test_an_unknown_field_a_missing_field_and_a_wrong_type_are_invalid(entry):
    plain = json.loads(json.dumps(to_plain(entry)))
    assert not is_line({**plain, "colour": "red"})
    assert not is_line({**plain, "type": "Nothing"})
    for name in plain:
        assert not is_line({key: value for key, value in plain.items() if key != name}) or has_default(
            entry, name
        )
        assert not is_line({**plain, name: {"of": ["another", "type"]}})


def has_default(entry, name):
    return name in vars(type(entry))


def test_fields_of_parts_are_checked_too():
    plain = {"type": "PeerList", "peers": [{"worker": 0, "name": "w", "addresses": ["a:1"]}], "reason": "r"}
    assert is_line(plain)
    plain["peers"][0]["port"] = 7
    assert not is_line(plain)


@pytest.mark.parametrize(("value", "is_valid"), [(0.5, True), ("nan", True), ("-inf", True), ("0.5", False)])
def test_a_loss_that_diverged_is_a_text(value, is_valid):
    plain = {"type": "Evaluated", "now_s": 1.0, "worker": 0, "epoch": 1, "metrics": {"loss": value}}
    assert is_line(plain) is is_valid
    if is_valid:
        decode_json(json.dumps(plain).encode())


def test_a_log_of_a_run_is_valid_line_by_line(tmp_path):
    write_log(recorded_run(), tmp_path / "log.jsonl")
    header, *entries = lines_of(tmp_path / "log.jsonl")
    assert header["offbeat_log"] == LOG_VERSION
    assert len(entries) > 10
    for line in (header, *entries):
        VALIDATOR.validate(line)


def test_a_header_of_another_version_or_without_policies_is_invalid():
    assert is_line({"offbeat_log": LOG_VERSION, **HEADER})
    assert not is_line({"offbeat_log": LOG_VERSION + 1, **HEADER})
    assert not is_line({"offbeat_log": LOG_VERSION, "job": "test"})


def test_a_command_prints_the_schema():
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "log-schema"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(SCHEMA))
