"""What TensorBoard and OpenTelemetry get is what the run log says."""

import http.server
import queue
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from offbeat.events import Group, Lost, StepsTimed
from offbeat.runtime.monitoring.publisher import Entry
from offbeat.runtime.monitoring.spans import SpanSink
from offbeat.runtime.monitoring.tensorboard import TensorBoardSink, to_scalars
from offbeat.strategies import AllReduce
from offbeat.wire.job_view import JobView
from support import group_training
from support.jobs import job
from support.round_events import joined, ready, times_of_step
from support.run_logs import entries_of, step_times

WORKERS, EVERY = 2, 3


class Viewed:
    """A view, and a sink that is updated after each event."""

    def __init__(self, sink):
        self.view, self.sink = JobView(), sink

    def add(self, event, *actions):
        for entry in (event, *actions):
            self.view.add(entry)
        self.sink.update(self.view, [Entry(event, actions)])


def train(env):
    """Runs a job, until its coordinator has ended too."""
    with job(group_training.train, WORKERS, AllReduce(), env=env) as running:
        assert [one.error for one in running.ends()] == [None] * WORKERS


# TensorBoard ---------------------------------------------------------------------------------------------


def scalars_in(folder):
    """The points of each tag: step and value."""
    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_gets_the_figures_of_the_state_by_its_step(tmp_path):
    viewed = Viewed(TensorBoardSink(str(tmp_path)))
    viewed.add(joined(0))
    viewed.add(StepsTimed(now_s=1.0, worker=0, steps=(times_of_step(6, wall_s=0.5, wait_s=0.25),)))
    viewed.add(replace(ready(0, 7), step=7))
    first = to_scalars(viewed.view.status())
    for step in (8, 9):  # at most a point a second, and one at the end
        viewed.add(replace(ready(0, step), step=step))
    last = to_scalars(viewed.view.status())
    viewed.sink.close()
    found = scalars_in(tmp_path)
    assert found.keys() == last.keys()
    for point, step, figures in ((0, 7, first), (-1, 9, last)):
        for tag, value in figures.items():
            assert found[tag][point] == (step, pytest.approx(value))
    assert found["offbeat step_s/worker 0"][0] == (7, 0.5)
    assert found["offbeat wait_share/worker 0"][0] == (7, 0.5)


def test_a_folder_of_a_real_job_has_points_of_every_worker(tmp_path):
    env = {"OFFBEAT_TENSORBOARD": str(tmp_path / "board")}
    train(env)
    found = scalars_in(tmp_path / "board")
    steps = [step for step, _ in found["offbeat/lost_workers"]]
    assert steps == sorted(set(steps))
    assert {f"offbeat step_s/worker {worker}" for worker in range(WORKERS)} <= found.keys()


# OpenTelemetry -------------------------------------------------------------------------------------------


def test_a_step_is_a_span_with_its_parts_as_children_one_after_the_other():
    exporter = InMemorySpanExporter()
    viewed = Viewed(SpanSink(EVERY, SimpleSpanProcessor(exporter)))
    steps = tuple(
        times_of_step(step, wall_s=2.0, compute_s=1.5, wait_s=0.5) for step in range(EVERY, 2 * EVERY + 1)
    )
    viewed.add(StepsTimed(now_s=50.0, worker=4, steps=steps))
    spans = exporter.get_finished_spans()
    first, last = [span for span in spans if span.name == "step"]
    assert [span.attributes["offbeat.step"] for span in (first, last)] == [EVERY, 2 * EVERY]
    assert last.attributes["offbeat.worker"] == 4
    assert last.end_time - last.start_time == 2_000_000_000
    assert last.start_time - first.end_time == pytest.approx((EVERY - 1) * 2e9, abs=1e3)
    compute, wait = [span for span in spans if span.parent and span.parent.span_id == last.context.span_id]
    assert (compute.name, wait.name) == ("compute", "wait")
    assert (compute.start_time, wait.end_time) == (last.start_time, last.end_time)
    assert compute.end_time == wait.start_time


def test_an_exclusion_and_a_loss_are_one_span_each():
    exporter = InMemorySpanExporter()
    viewed = Viewed(SpanSink(1, SimpleSpanProcessor(exporter)))
    for worker in range(3):
        viewed.add(joined(worker))
        viewed.add(ready(worker, 0))
    group = Group(
        generation=1,
        step=1,
        exchange_id=1,
        members=(0, 1),
        joining=(),
        weights=(0.5, 0.5),
        reason="worker 2: its compute time is too long",
    )
    viewed.add(ready(0, 1), group)
    viewed.add(ready(0, 2), replace(group, generation=2))
    viewed.add(Lost(now_s=3.0, worker=1, cause="closed"))
    found = [(span.name, dict(span.attributes)) for span in exporter.get_finished_spans()]
    assert found == [
        ("worker excluded", {"offbeat.worker": 2, "offbeat.reason": "its compute time is too long"}),
        ("worker lost", {"offbeat.worker": 1, "offbeat.reason": "closed"}),
    ]


@contextmanager
def collector():
    """Where OTLP spans go by HTTP; yields its address and the requests that it got."""
    requests = queue.SimpleQueue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


def values_of(span):
    return {attribute.key: attribute.value.int_value for attribute in span.attributes}


def duration_s(span):
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_spans_of_a_real_job_are_those_of_every_nth_step_of_its_log(tmp_path):
    log = tmp_path / "log.jsonl"
    with collector() as (address, requests):
        env = {
            "OFFBEAT_SPANS": str(EVERY),
            "OFFBEAT_RUN_LOG": str(log),
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_SERVICE_NAME": "a-job",
        }
        train(env)
    found, services = [], set()
    while not requests.empty():
        for resource in requests.get().resource_spans:
            services |= {
                attribute.value.string_value
                for attribute in resource.resource.attributes
                if attribute.key == "service.name"
            }
            found += [span for scope in resource.scope_spans for span in scope.spans]
    assert services == {"a-job"}
    steps = sorted(
        (values_of(span)["offbeat.worker"], values_of(span)["offbeat.step"], duration_s(span))
        for span in found
        if span.name == "step"
    )
    entries = entries_of(log)
    expected = sorted(
        (worker, one.step, one.wall_s)
        for worker in range(WORKERS)
        for one in step_times(entries, worker)
        if one.step % EVERY == 0
    )
    assert [one[:2] for one in steps] == [one[:2] for one in expected]
    assert [one[2] for one in steps] == pytest.approx([one[2] for one in expected], abs=1e-6)
