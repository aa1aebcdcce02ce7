"""The metrics that a real job serves are those of its run log."""

import json
import os
import re
import signal
import urllib.error
import urllib.request

import pytest
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from offbeat.events import Group, Lost
from offbeat.runtime.monitoring.settings import MonitoringSettings
from offbeat.runtime.transport.addresses import listen_at, split_host_and_port
from offbeat.strategies import PartialAllReduce
from offbeat.wire.job_status import JobStatus
from offbeat.wire.job_view import TIME_PARTS
from offbeat.wire.log_file import log_schema
from support import group_training
from support.coordinator_process import coordinator, running_job
from support.coordinator_service import service
from support.jobs import job
from support.newcomer_training import GATE, Gate, pass_gate
from support.processes import find_free_port
from support.run_logs import entries_of, step_times, wait_until

SLOW, KILLED, WORKERS = 2, 1, 4
GATE_STEP = 40  # the slow one has been excluded long before
STRATEGY = PartialAllReduce(k=4.0, limit=3, n_profile=2)
DEADLINE_S = 20.0


def ask(port, path):
    """The answer at a path; None as long as nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return None


def scrape(port):
    """The samples by name and labels."""
    families = text_string_to_metric_families(ask(port, "/metrics") or "")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def figures_of(log):
    """What the run log says: seconds by worker and part, steps and samples by worker."""
    entries, found = entries_of(log), {}
    for worker in range(WORKERS):
        times = step_times(entries, worker)
        found["offbeat_step_seconds_count", str(worker)] = len(times)
        found["offbeat_step_seconds_sum", str(worker)] = sum(one.wall_s for one in times)
        found["offbeat_worker_samples_total", str(worker)] = sum(one.samples for one in times)
        for part in TIME_PARTS:
            spent_s = sum(getattr(one, f"{part}_s") for one in times)
            found["offbeat_worker_seconds_total", str(worker), part] = spent_s
    return found


def exclusions_in(log):
    """How many workers that were alive have left a group."""
    members, lost, found = set(), set(), 0
    for entry in entries_of(log, Group, Lost):
        if isinstance(entry, Lost):
            lost.add(entry.worker)
        else:
            found += len(members - set(entry.members) - lost)
            members = set(entry.members)
    return found


def are_those_of(log, port):
    """Whether the metrics have caught up with the log."""
    expected, served = figures_of(log), scrape(port)
    exclusions = sum(value for key, value in served.items() if key[0] == "offbeat_exclusions_total")
    return exclusions == exclusions_in(log) and all(
        served.get(key, 0.0) == pytest.approx(value, rel=1e-9) for key, value in expected.items()
    )


def train_to_gate(rank, emit):
    def stop(session):
        if session.step >= GATE_STEP:
            emit("at the gate")
            pass_gate()

    return group_training.train(rank, emit, STRATEGY, epochs=14, before_step=stop)


def test_metrics_of_a_job_with_a_slow_and_a_killed_worker_are_those_of_its_log(tmp_path):
    port = find_free_port()
    with Gate(tmp_path) as gate:
        env = {**gate.env, "OFFBEAT_METRICS": str(port), "OFFBEAT_SLOW": f"{SLOW}:8"}
        with job(train_to_gate, WORKERS, env=env) as running:
            running.receive(0, KILLED, 3)
            running.signal(KILLED, signal.SIGKILL)
            wait_until(lambda: scrape(port).get(("offbeat_workers_lost_total",)) == 1, "a lost worker")
            wait_until(lambda: are_those_of(gate.log, port), "the figures of the log")
            served = scrape(port)
            assert served["offbeat_exclusions_total", "compute"] >= 1
            assert served["offbeat_members", "lost"] == served["offbeat_members", "excluded"] == 1
            assert 0 < served["offbeat_worker_score", str(SLOW)] < 0.5
            assert max(served["offbeat_worker_score", str(worker)] for worker in (0, SLOW, 3)) == 1.0
            assert served["offbeat_events_dropped_total",] == 0
            status = JobStatus.from_json(ask(port, "/job"))
            assert [one.worker for one in status.workers if one.is_excluded] == [SLOW]

            os.kill(running.coordinator(), signal.SIGKILL)
            wait_until(lambda: are_those_of(gate.log, port), "the figures of the log again")
            gate.open()
            ended = running.ends()
    assert [one.error for one in ended if one.rank != KILLED] == [None] * (WORKERS - 1)
    schema = Draft202012Validator(log_schema())
    for line in gate.log.read_text().splitlines():
        schema.validate(json.loads(line))


@pytest.mark.long
def test_a_coordinator_apart_takes_its_port_again_and_shows_the_next_attempt(tmp_path, monkeypatch):
    port = find_free_port()
    monkeypatch.setenv("OFFBEAT_METRICS", str(port))
    with Gate(tmp_path) as gate, service(tmp_path, log=gate.log) as coordinator:
        env = {**coordinator.env, GATE: gate.env[GATE]}
        with job(train_to_gate, 2, env=env) as running:
            running.receive(0, 1)
            wait_until(lambda: are_those_of(gate.log, port), "the figures of the log")
            coordinator.kill()
            assert ask(port, "/metrics") is None
            coordinator.start()
            wait_until(lambda: are_those_of(gate.log, port), "the figures of the log again")
            for rank in range(2):
                place = {"OFFBEAT_NEWCOMER": "auto", "RANK": str(rank), "WORLD_SIZE": "2"}
                running.add(train_to_gate, env={**place, "OFFBEAT_ATTEMPT": "1"})
            running.receive(2, 3)
            wait_until(lambda: are_those_of(gate.log, port), "the figures of the next attempt's log")
            gate.open()
            ended = running.ends()
        assert coordinator.ended()[0] == 0
    assert [one.error for one in ended[2:]] == [None, None]


def leave_in_order(peers, process):
    """Ends a job; returns what its coordinator wrote to standard error."""
    for peer in peers:
        peer.leave()
    code, errors = process.ended()
    assert code == 0
    return errors.splitlines()


def test_a_port_that_is_taken_costs_one_line_and_not_the_training():
    taken, address = listen_at("127.0.0.1", 0)
    host, port = split_host_and_port(address.removeprefix("tcp://"))
    with taken, running_job(2, monitoring=MonitoringSettings(http=(host, port))) as (process, peers):
        (line,) = leave_in_order(peers, process)
    assert line.startswith(f"offbeat: no metrics are served: cannot listen on {host}:{port}: ")


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [
        (MonitoringSettings(tensorboard="board"), "tensorboard", "tensorboard"),
        (MonitoringSettings(spans_every=1), "opentelemetry.exporter.otlp.proto.http", "otel"),
    ],
)
def test_a_package_that_is_not_installed_is_named_before_the_job_begins(settings, package, extra):
    hidden = f"import sys; sys.modules[{package!r}] = None"
    with coordinator(2, prelude=hidden, monitoring=settings) as process:
        assert process.answer["error"].endswith(f'pip install "offbeat[{extra}]"')


def test_a_port_that_the_system_chooses_is_printed():
    with running_job(2, monitoring=MonitoringSettings(http=("127.0.0.1", 0))) as (process, peers):
        line = process.process.stderr.readline().decode()
        port = int(re.fullmatch(r"offbeat: metrics of the job: http://127.0.0.1:(\d+)/metrics\n", line)[1])
        wait_until(lambda: scrape(port)["offbeat_members", "joined"] == 2, "two workers")
        assert leave_in_order(peers, process) == []
