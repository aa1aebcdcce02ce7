"""Traces of two steps: the workers' files, and the file for Perfetto."""

import json

import pytest

from offbeat.cli.main import main
from offbeat.cli.trace_file import read_traces, to_chrome_trace
from offbeat.runtime.training.tracing import Tracer, TraceSpan, WorkerTrace


def test_spans_of_the_two_steps_are_written_when_they_are_over(tmp_path):
    tracer = Tracer(str(tmp_path / "trace"), 3, first_step=5)
    tracer.on_step_start(4)
    tracer.add_span("loop", "before", 0.0, 1.0)
    tracer.on_step_start(5)
    tracer.add_span("loop", "first", 1.0, 2.0)
    tracer.record_bytes_sent(100)
    tracer.on_step_start(6)
    tracer.add_span("loop", "second", 2.0, 2.0)
    assert not list(tmp_path.iterdir())
    tracer.on_step_start(7)
    tracer.add_span("loop", "after", 3.0, 4.0)
    tracer.close()
    (traced,) = read_traces(tmp_path / "trace")
    assert (traced.worker, traced.first_step) == (3, 5)
    assert [span.name for span in traced.spans] == ["first", "second"]
    assert traced.spans[0].end_s - traced.spans[0].begin_s == pytest.approx(1.0, abs=1e-6)
    assert [sent for _, sent in traced.bytes_sent] == [100]


def test_a_loop_that_ends_between_writes_its_spans_so_far(tmp_path):
    tracer = Tracer(str(tmp_path), 0, first_step=0)
    tracer.on_step_start(0)
    tracer.add_span("loop", "compute", 1.0, 2.0)
    tracer.close()
    assert len(read_traces(tmp_path)[0].spans) == 1


def test_each_worker_is_a_process_and_each_track_a_thread():
    spans = [
        TraceSpan("loop", "compute", 10.0, 10.5),
        TraceSpan("weights", "weights", 10.1, 10.2),
        TraceSpan("x", "y", 10.2, 10.2),
    ]
    first = WorkerTrace(0, 7, spans, [(10.0, 0), (10.1, 1_000_000), (10.1, 1_000_000)])
    second = WorkerTrace(1, 7, [TraceSpan("loop", "compute", 9.5, 9.6)], [])
    events = to_chrome_trace([first, second])["traceEvents"]
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert named == {(0, 0): "loop", (0, 1): "weights", (0, 2): "x", (1, 0): "loop"}
    shown = [one for one in events if one["ph"] in "Xi"]
    assert [(one["pid"], one["tid"], one["ph"]) for one in shown] == [
        (0, 0, "X"),
        (0, 1, "X"),
        (0, 2, "i"),
        (1, 0, "X"),
    ]
    assert (shown[0]["ts"], shown[0]["dur"]) == (pytest.approx(5e5), pytest.approx(5e5))
    assert shown[3]["ts"] == 0.0
    rates = [one["args"]["MB/s"] for one in events if one["ph"] == "C"]
    assert rates == [pytest.approx(10.0), 0.0]


@pytest.mark.long
def test_a_training_is_traced_and_communication_overlaps_both_passes(tmp_path, capsys):
    options = ["--workers", "2", "--epochs", "1", "--model", "cnn2", "--strategy", "hybrid:fuse_bytes=0"]
    assert main(["train", *options, "--trace", "6", "--run-dir", str(tmp_path / "run")]) == 0
    assert main(["trace", str(tmp_path / "run"), "--out", str(tmp_path / "shown.json")]) == 0
    assert "steps 6 and 7 of 2 workers" in capsys.readouterr().out
    assert json.loads((tmp_path / "shown.json").read_text())["traceEvents"]
    for traced in read_traces(tmp_path / "run" / "trace"):
        tracks = {span.track for span in traced.spans}
        assert {"loop", "the forward pass comes to", "the backward pass has"} < tracks
        (first, *_) = [span for span in traced.spans if span.track.startswith("hidden.weight")]
        # Its gradients left while the backward pass was still on its way to the first layer.
        assert any(
            span.name == "conv1.weight" and first.begin_s < span.begin_s
            for span in traced.spans
            if span.track == "the backward pass has"
        )
        assert traced.bytes_sent[-1][1] > traced.bytes_sent[0][1]


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_without_a_trace_one_line_explains_how_to_get_one(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "trace").mkdir()
        (tmp_path / "trace" / "worker-0.json").write_text(content)
    assert main(["trace", str(tmp_path)]) != 0
    printed = capsys.readouterr().err
    assert ("cannot read" if content else "train with --trace STEP") in printed
    assert len(printed.splitlines()) == 1
