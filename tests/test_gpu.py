"""Tests on a GPU; only `make test-gpu` runs these.

They run apart: a process that has queried for a GPU can fork none that uses it.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from benchmarks.use_over_time import device_use_reader
from offbeat import nimble
from offbeat.errors import OffbeatError
from offbeat.events import Ready, ResolveLateBlock, StepFinished
from offbeat.policies.validation.schedule import TakeSnapshot
from offbeat.runtime.data import late_gradients
from offbeat.runtime.devices.opening import open_accelerators
from offbeat.runtime.nimble.compiling import GRAPH, MODULE, STREAMS, choose_fastest, compile_module
from offbeat.runtime.nimble.program import same_values
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.evaluators import ThreadEvaluator, make_parts
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.strategies import (
    ASP,
    DPAR,
    DTSSP,
    SSP,
    AllReduce,
    Downpour,
    Hybrid,
    PartialAllReduce,
    PReduce,
    ServerBSP,
)
from offbeat.wire.log_file import read_log
from support import device_training, sample_counting
from support.branching_models import MODELS as BRANCHING_MODELS
from support.branching_models import Branches
from support.branching_models import a_model as a_model_with_branches
from support.newcomer_training import Gate, pass_gate
from support.processes import run, start, values
from support.run_logs import entries_of

pytestmark = pytest.mark.skipif(os.environ.get("OFFBEAT_TEST_GPU") != "1", reason="run by `make test-gpu`")

CLASSES = 4
AVERAGING = [AllReduce(), PartialAllReduce(), Hybrid()]


def a_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )
    return model.double().cuda()


def samples(count):
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def evaluate(model, part):
    device = next(model.parameters()).device
    loss = right = 0
    for inputs, labels in DataLoader(part, batch_size=7):
        logits = model(inputs.to(device))
        loss += float(F.cross_entropy(logits, labels.to(device), reduction="sum"))
        right += int((logits.argmax(1) == labels.to(device)).sum())
    return {"loss": loss / len(part), "right": right}


def train(model, optimizer, epochs, at_the_end=lambda: None):
    torch.manual_seed(1)
    for _ in range(epochs):
        model.train()
        for inputs, labels in DataLoader(samples(64), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.cuda()), labels.cuda()).backward()
            optimizer.step()
        at_the_end()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_line(epochs):
    """The metrics of each epoch and the weights at the end, without offbeat."""
    model = a_model()
    history = {}

    def judge():
        model.eval()
        devices = [torch.cuda.current_device()]
        with torch.no_grad(), torch.random.fork_rng(devices):
            history[len(history)] = evaluate(model, samples(50))

    return history, train(model, sgd(model), epochs, judge)


def on_one_gpu(rank, emit, work, *args):
    torch.cuda.set_device(0)
    return work(*args)


def validated(backend, workers):
    model = a_model()
    with offbeat.Validator(model, evaluate, samples(50), backend=backend, workers=workers) as validator:
        weights = train(model, sgd(model), 6, validator.validate)
        validator.finish()
    return dict(validator.history), weights, validator.backend


@pytest.mark.parametrize(("backend", "workers"), [("stream", 1), ("stream", 3), ("inline", 1), ("auto", 1)])
def test_overlapped_validation_gives_the_metrics_of_inline_validation_and_changes_no_weights(
    backend, workers
):
    (seen,) = values(run(on_one_gpu, 1, validated, backend, workers))
    (expected,) = values(run(on_one_gpu, 1, in_line, 6))
    history, weights, used = seen
    assert used == backend or backend == "auto"
    assert list(history) == list(expected[0])
    for epoch, metrics in history.items():
        assert metrics["right"] == expected[0][epoch]["right"]
        assert metrics["loss"] == pytest.approx(expected[0][epoch]["loss"], rel=1e-12)
    assert weights == expected[1]


def a_branching_model():
    torch.manual_seed(0)
    return nn.Sequential(Branches(), nn.Dropout(0.3)).double().cuda()


def image_samples(count):
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 4, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=generator))


def trained_on_images(at_the_end):
    """Draws random numbers on the device between and during validations."""
    model = a_branching_model()
    optimizer = sgd(model)
    for _ in range(4):
        model.train()
        for inputs, labels in DataLoader(image_samples(64), batch_size=8):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.cuda()), labels.cuda()).backward()
            optimizer.step()
        at_the_end(model)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def validated_images(workers):
    """Each evaluator has 2 * 57 full batches in the first two epochs: enough for a schedule."""
    validators = []

    def validate(model):
        if not validators:
            validators.append(
                offbeat.Validator(
                    model, evaluate, image_samples(403 * workers), backend="stream", workers=workers
                )
            )
        validators[0].validate()

    weights = trained_on_images(validate)
    with validators[0] as validator:
        validator.finish()
    return dict(validator.history), weights, validator.reason


def validated_images_in_line(workers):
    history = {}

    def judge(model):
        model.eval()
        with torch.no_grad():
            history[len(history)] = evaluate(model, image_samples(403 * workers))

    return history, trained_on_images(judge)


@pytest.mark.parametrize("workers", [1, 2])
def test_validation_by_a_captured_graph_gives_the_metrics_of_inline_validation_and_changes_no_weights(
    workers,
):
    (seen,) = values(run(on_one_gpu, 1, validated_images, workers))
    (expected,) = values(run(on_one_gpu, 1, validated_images_in_line, workers))
    history, weights, reason = seen
    assert "forward passes: " in reason
    assert "cannot be" not in reason
    assert "results differ" not in reason
    for epoch, metrics in expected[0].items():
        assert history[epoch]["right"] == metrics["right"]
        assert history[epoch]["loss"] == pytest.approx(metrics["loss"], rel=1e-12)
    assert weights == expected[1]


def compiled_on_the_gpu(name, choice):
    """Whether a graph gives the module's results, from two threads, while others use and free memory."""
    model, inputs = a_model_with_branches(name)
    model = model.double().cuda()

    def inputs_on_the_gpu(seed):
        return tuple(one.double().cuda() if one.is_floating_point() else one.cuda() for one in inputs(seed))

    compiled = compile_module(model, inputs_on_the_gpu(0), choose=lambda times_s: choice)
    differences = []

    def compare(seeds):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for seed in seeds:
                given = inputs_on_the_gpu(seed)
                found = tree_leaves(compiled(*given))
                garbage = [torch.full((1 << size,), math.nan, device="cuda") for size in range(4, 16)]
                del garbage
                expected = tree_leaves(model(*given))
                torch.cuda.current_stream().synchronize()
                differences.extend(
                    seed
                    for one, other in zip(found, expected, strict=True)
                    if isinstance(one, torch.Tensor) and not same_values(one, other)
                )

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(compare, range(start, 200, 2)) for start in range(2)]:
            done.result()
    state = compiled.is_on, compiled.reason
    compiled.close()
    return differences, *state


@pytest.mark.parametrize("name", BRANCHING_MODELS)
@pytest.mark.parametrize("choice", [GRAPH, STREAMS])
def test_a_graph_on_one_stream_or_several_gives_the_results_of_the_module_bit_for_bit(name, choice):
    ((differences, is_on, reason),) = values(run(on_one_gpu, 1, compiled_on_the_gpu, name, choice))
    assert is_on, reason
    assert not differences


def measured_on_the_gpu():
    model, inputs = a_model_with_branches("branches")
    compiled = nimble.compile(model.cuda(), tuple(one.cuda() for one in inputs()))
    return compiled.choice, compiled.times_s, compiled.reason


def test_on_a_gpu_the_fastest_of_module_graph_and_streams_is_chosen():
    ((choice, times_s, reason),) = values(run(on_one_gpu, 1, measured_on_the_gpu))
    assert set(times_s) == {MODULE, GRAPH, STREAMS}
    assert choice == choose_fastest(times_s)
    assert all(name in reason for name in times_s)


def joined(strategy):
    model = a_model()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, strategy):
        return train(model, optimizer, 2)


def alone():
    model = a_model()
    return train(model, sgd(model), 2)


def validated_on_a_stream_of_the_program():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return validated("stream", 2)


def test_a_training_on_a_stream_of_its_own_is_validated_as_it_was_at_the_end_of_each_epoch():
    ((history, weights, _),) = values(run(on_one_gpu, 1, validated_on_a_stream_of_the_program))
    ((expected, expected_weights),) = values(run(on_one_gpu, 1, in_line, 6))
    assert [metrics["right"] for metrics in history.values()] == [one["right"] for one in expected.values()]
    assert weights == expected_weights


class Scaled(nn.Module):
    """Has a parameter, a buffer, and a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.register_buffer("mean", torch.ones(64))
        self.scale = torch.ones(64).cuda()

    def forward(self):
        return (self.weight * self.mean * self.scale).sum()

    def fill(self, value):
        with torch.no_grad():
            for tensor in (self.weight, self.mean, self.scale):
                tensor.fill_(value)


def evaluated_while_the_device_is_busy():
    """The metrics of four snapshots in the same memory; nothing waits where the snapshot is taken."""
    accelerators = open_accelerators(
        [torch.device("cuda", 0)], partial(start_thread, on_failure=print), timeout_s=60.0
    )
    model, sums = Scaled().cuda(), []
    snapshot = Snapshot(shared=False, accelerators=accelerators)
    evaluator = ThreadEvaluator(lambda copied, _: {"sum": copied()}, [0], accelerators, has_stream=True)
    snapshot.capture(model)  # loads its kernels
    for value in (2.0, 3.0, 4.0, 5.0):
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(100_000_000)
        model.fill(value)
        snapshot.capture(model)
        model.fill(-1.0)
        torch.cuda.set_sync_debug_mode("default")
        (part,) = make_parts(TakeSnapshot(epoch=0, parts=(range(1),)), snapshot, SignalSafeEvent())
        sums.append(evaluator.evaluate(part)["sum"])
    return sums


def test_a_snapshot_has_the_values_between_two_steps_without_a_wait_of_the_host():
    (sums,) = values(run(on_one_gpu, 1, evaluated_while_the_device_is_busy))
    assert sums == [64 * value**3 for value in (2.0, 3.0, 4.0, 5.0)]


def use_of_the_gpu():
    read = device_use_reader(torch.device("cuda", 0))
    torch.ones(1024, 1024, device="cuda").matmul(torch.ones(1024, 1024, device="cuda"))
    return read()


def test_the_use_of_the_gpu_is_a_share_in_percent():
    pytest.importorskip("pynvml", reason="the extra 'gpu' is not installed")
    (use,) = values(run(on_one_gpu, 1, use_of_the_gpu))
    assert 0 <= use <= 100


def test_a_single_worker_trains_as_without_offbeat():
    (seen,) = values(run(on_one_gpu, 1, joined, AllReduce()))
    (expected,) = values(run(on_one_gpu, 1, alone))
    assert seen == expected


def on_the_gpu(rank, emit, *args, **kwargs):
    torch.cuda.set_device(0)
    return device_training.train(rank, emit, "cuda", *args, **kwargs)


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(
            torch.tensor(value, dtype=torch.float64),
            torch.tensor(expected[name], dtype=torch.float64),
            rtol=1e-10,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", [AllReduce(), Hybrid()], ids=["bsp", "hybrid"])
def test_workers_that_share_a_gpu_end_with_the_model_of_the_cpu(strategy, workers):
    seen = values(run(on_the_gpu, workers, strategy))
    assert len({digest for _, digest in seen}) == 1
    expected = values(run(device_training.train, workers, "cpu", strategy))
    assert_close(seen[0][0], expected[0][0])


@pytest.mark.parametrize("strategy", [PartialAllReduce(), DPAR(threshold_ms=1000.0)], ids=["partial", "dpar"])
def test_workers_in_changing_groups_end_with_one_model(strategy):
    seen = values(run(on_the_gpu, 4, strategy, env={"OFFBEAT_SLOW": "1:4"}))
    assert len({digest for _, digest in seen}) == 1
    assert all(math.isfinite(value) for value in seen[0][0]["head.bias"])


def test_workers_that_average_models_end_with_one_model():
    seen = values(run(on_the_gpu, 4, PReduce(P=2)))
    assert seen[0][0] == seen[1][0] == seen[2][0] == seen[3][0]


def killed(rank, emit, victim):
    return on_the_gpu(rank, emit, PartialAllReduce(), 6, device_training.kill_in_step(step=10, victim=victim))


@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_when_a_worker_on_the_gpu_is_killed(victim):
    ended = run(killed, 3, victim)
    assert ended[victim].exitcode == -9
    seen = values([one for one in ended if one.rank != victim])
    assert seen[0] == seen[1]


HANG_CYCLES = 40_000_000_000  # some 20 s: the device ends it after all, so that the processes can end


def hanging(rank, emit, strategy):
    """Trains on, but the device of worker 1 hangs in its tenth step."""

    def before_step(session):
        if session.step == 10 and session.worker == 1:
            torch.cuda._sleep(HANG_CYCLES)

    return on_the_gpu(rank, emit, strategy, 6, before_step)


def test_the_errors_of_all_workers_name_a_device_that_hangs():
    for one in run(hanging, 2, AllReduce(timeout_s=5.0)):
        assert "worker 1 failed" in one.error
        assert "cuda:0 has not done what was queued on it within 5 s" in one.error


def test_the_others_go_on_when_a_device_hangs():
    ended = run(hanging, 3, PartialAllReduce(timeout_s=5.0))
    assert "cuda:0 has not done what was queued on it within 5 s" in ended[1].error
    seen = values([ended[0], ended[2]])
    assert seen[0] == seen[1]


def gpu_count(rank, emit):
    return torch.cuda.device_count()


def require_two_gpus():
    if values(run(gpu_count, 1))[0] < 2:
        pytest.skip("needs two GPUs")


def on_own_gpu(rank, emit, *args):
    """Trains on a GPU of its own, by what was measured to be faster."""
    torch.cuda.set_device(rank)
    return device_training.train(rank, emit, f"cuda:{rank}", *args)


def test_workers_with_a_gpu_each_end_with_the_model_of_the_cpu():
    require_two_gpus()
    seen = values(run(on_own_gpu, 2, AllReduce()))
    assert len({digest for _, digest in seen}) == 1
    expected = values(run(device_training.train, 2, "cpu", AllReduce()))
    assert_close(seen[0][0], expected[0][0])


def killed_on_own_gpu(rank, emit):
    return on_own_gpu(rank, emit, AllReduce(), 6, device_training.kill_in_step(step=10, victim=1))


def test_a_worker_with_a_gpu_of_its_own_names_the_one_that_was_killed_and_ends():
    require_two_gpus()
    ended = run(killed_on_own_gpu, 2)
    assert ended[1].exitcode == -9
    assert "worker 1 was lost" in ended[0].error


def joining(rank, emit):
    def before_step(session):
        if session.step == 5:
            pass_gate()

    return on_the_gpu(rank, emit, PartialAllReduce(limit=10**6), 6, before_step)


def test_a_newcomer_receives_the_state_of_a_gpu(tmp_path):
    with Gate(tmp_path) as gate, start(joining, 2, env=gate.env) as cluster:
        newcomer = cluster.add(joining, (), gate.env)
        gate.open_for(newcomer)
        seen = values(cluster.ends())
    assert len({digest for _, digest in seen}) == 1


def without_synchronizing(rank, emit, strategy):
    """Fails where the host waits for the device within a step."""
    torch.cuda.set_device(0)
    model = a_model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = (one.cuda() for one in samples(64)[:])
    losses = []
    with offbeat.join(model, optimizer, strategy):
        for step in range(12):
            if step == 6:  # by then, memory and plans are made
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs.float()), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.cuda.set_sync_debug_mode("default")
    return torch.stack(losses).tolist()


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), PartialAllReduce(), Hybrid(), PReduce(P=2)],
    ids=["bsp", "partial", "hybrid", "preduce"],
)
def test_a_step_never_synchronizes_with_the_device(strategy):
    for losses in values(run(without_synchronizing, 2, strategy)):
        assert losses[-1] < losses[0]


LATE = PartialAllReduce(k=3.0, limit=3, n_profile=2, late="join", staleness=100)
LATE_SAMPLES, LATE_EPOCHS = 401, 4


def without_waiting(method):
    """The method; it fails where the host waits for the device in it."""

    def checked(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked


def counting_with_late_gradients(rank, emit):
    """How often each sample was used."""
    torch.cuda.set_device(0)
    for name in ("pack", "received"):
        method = getattr(late_gradients._TensorMessage, name)
        setattr(late_gradients._TensorMessage, name, without_waiting(method))
    sample_counting.SAMPLES = LATE_SAMPLES
    model = sample_counting.Counter().cuda()
    model.register_forward_hook(lambda *_: torch.cuda._sleep(10_000_000))  # some 5 ms
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, LATE) as session:
        for _ in session.epochs(LATE_EPOCHS):
            for (numbers,) in session.batches(TensorDataset(torch.arange(LATE_SAMPLES)), 4):
                optimizer.zero_grad()
                (-model(numbers.cuda())).backward()
                sample_counting.once_each(model)
                optimizer.step()
    return model.uses_N.tolist()


def test_late_gradients_count_once_and_the_host_waits_for_none(tmp_path):
    log = tmp_path / "log.jsonl"
    env = {"OFFBEAT_SLOW": "1:20", "OFFBEAT_RUN_LOG": str(log)}
    for uses in values(run(counting_with_late_gradients, 3, env=env)):
        assert uses == [float(LATE_EPOCHS)] * LATE_SAMPLES
    assert any(resolved.is_contributed for resolved in entries_of(log, ResolveLateBlock))


def in_mixed_precision(rank, emit, strategy, dtype):
    torch.cuda.set_device(0)
    model = a_model().float().to(memory_format=torch.preserve_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    inputs, labels = (one.cuda() for one in samples(64 + rank)[:])
    losses = []
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=dtype):
                loss = F.cross_entropy(model(inputs.float()), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        session.refresh()
    return losses, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "strategy", [AllReduce(), PartialAllReduce(), Hybrid()], ids=["bsp", "partial", "hybrid"]
)
def test_mixed_precision_with_a_gradient_scaler(strategy, dtype):
    (losses, weights), (_, others) = values(run(in_mixed_precision, 2, strategy, dtype))
    assert losses[-1] < losses[0]
    assert weights == others


def in_half_precision(rank, emit, device):
    torch.manual_seed(0)
    model = nn.Linear(64, CLASSES, bias=False).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.join(model, optimizer, AllReduce()):
        inputs = torch.full((1, 64), 1.0 + rank / 128, dtype=torch.bfloat16, device=device)
        model(inputs).sum().backward()
        return model.weight.grad.tolist()


def test_half_precision_gradients_are_summed_in_single_precision():
    seen = values(run(in_half_precision, 4, "cuda"))
    expected = torch.stack([torch.full((CLASSES, 64), 1.0 + rank / 128) for rank in range(4)]).mean(0)
    assert seen == [expected.bfloat16().tolist()] * 4


def of_channels_last(rank, emit, compiled):
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(4)
    ).cuda()
    inputs = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(rank)).cuda()
    net(inputs)
    net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.join(net, optimizer, PartialAllReduce(shards="equal")):
        model = torch.compile(net, backend="aot_eager") if compiled else net
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs.contiguous(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
    assert net[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    return [parameter.tolist() for parameter in net.parameters()]


@pytest.mark.parametrize("compiled", [False, True])
def test_models_in_channels_last(compiled):
    one, other = values(run(of_channels_last, 2, compiled))
    assert one == other


def with_slow_kernels(rank, emit):
    """How many rounds this worker was outside; worker 2 computes for longer, and queues that as fast.

    The threshold is a constant: the first steps of a process, which load kernels, are slow on all workers.
    """
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)).cuda()
    if rank == 2:
        model[1].register_forward_hook(lambda *_: torch.cuda._sleep(200_000_000))  # some 100 ms
    optimizer = sgd(model)
    inputs, labels = torch.randn(8, 64).cuda(), torch.randint(CLASSES, (8,)).cuda()
    outside = 0
    with offbeat.join(model, optimizer, DPAR(threshold_ms=60.0, limit=5, shards="equal")) as session:
        for _ in range(30):
            before = session.step
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            outside += session.step == before
    return outside


def test_a_worker_whose_device_is_slow_is_left_out_and_no_other():
    outside = values(run(with_slow_kernels, 3))
    assert outside[0] == outside[1] == 0
    assert outside[2] > 10


def with_slow_kernels_and_own_model(rank, emit):
    torch.cuda.set_device(0)
    model = a_model()
    model[0].register_forward_hook(lambda *_: torch.cuda._sleep(200_000_000))  # some 100 ms
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, PReduce(P=2, shards="equal")):
        return train(model, optimizer, 1)


def test_a_worker_that_averages_models_reports_the_compute_time_of_its_device(tmp_path):
    log = tmp_path / "log.jsonl"
    values(run(with_slow_kernels_and_own_model, 2, env={"OFFBEAT_RUN_LOG": str(log)}))
    reported_s = [ready.compute_s for ready in entries_of(log, Ready)]
    assert median(reported_s) > 0.05


LAYERS, WIDTH = 12, 1024
BUCKET_BYTES = 4 << 20


def wide_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).cuda()


def peak_bytes(rank, emit, strategy):
    """The most memory of the device that tensors have used; None trains with DDP."""
    torch.cuda.set_device(0)
    model = wide_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(16, WIDTH, device="cuda")

    def steps(stepped):
        for _ in range(6):
            optimizer.zero_grad()
            stepped(inputs).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    if strategy is not None:
        with offbeat.join(model, optimizer, strategy):
            return steps(model)
    torch.distributed.init_process_group("gloo")
    used = steps(nn.parallel.DistributedDataParallel(model, device_ids=[0]))
    torch.distributed.destroy_process_group()
    return used


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(bucket_bytes=BUCKET_BYTES),
        PartialAllReduce(shards="equal", bucket_bytes=BUCKET_BYTES),
        Hybrid(),
    ],
    ids=["bsp", "partial", "hybrid"],
)
def test_the_device_holds_at_most_what_ddp_needs_and_a_bucket(strategy):
    ours, ddp = (max(values(run(peak_bytes, 2, one))) for one in (strategy, None))
    assert ours <= ddp + max(BUCKET_BYTES, WIDTH * WIDTH * 4)


def traced(rank, emit):
    """By stream, when its copies to the host and its kernels ran in one step's backward pass, in us."""
    torch.cuda.set_device(0)
    model = wide_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8192, WIDTH, device="cuda")
    with offbeat.join(model, optimizer, AllReduce(bucket_bytes=BUCKET_BYTES)):
        for step in range(4):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            torch.cuda.synchronize()
            if step < 3:
                loss.backward()
            else:
                kinds = [torch.profiler.ProfilerActivity.CUDA]
                with torch.profiler.profile(activities=kinds) as profile:
                    loss.backward()
                    torch.cuda.synchronize()
            optimizer.step()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    copies = [(start, end) for name, start, end in spans if "Memcpy DtoH" in name]
    kernels = [
        (start, end) for name, start, end in spans if "gemm" in name.lower() or "nvjet" in name.lower()
    ]
    return copies, kernels


def test_copies_to_the_host_overlap_the_backward_pass():
    for copies, kernels in values(run(traced, 2)):
        assert len(copies) >= LAYERS
        last = max(end for _, end in kernels)
        assert sum(start < last for start, _ in copies) >= LAYERS // 2


def captured(rank, emit):
    torch.cuda.set_device(0)
    model = a_model().float()
    optimizer = sgd(model)
    inputs, labels = (one.cuda() for one in samples(16)[:])
    with offbeat.join(model, optimizer, AllReduce()), torch.cuda.graph(torch.cuda.CUDAGraph()):
        F.cross_entropy(model(inputs.float()), labels).backward()


def test_a_captured_step_is_refused_in_words():
    for one in run(captured, 2):
        assert "CUDA graph" in str(one.error)


def of_two_on(device, strategy):
    """The weights after five steps; the workers have unequal batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double().to(device)
    optimizer = sgd(model)
    inputs, labels = samples(64 + int(os.environ["RANK"]))[:]
    with offbeat.join(model, optimizer, strategy):
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_workers_that_share_a_gpu_average_the_models_of_the_cpu():
    strategy = PReduce(P=2, shards="equal", overlap=False)
    seen = values(run(on_one_gpu, 2, of_two_on, "cuda", strategy))
    expected = values(run(on_one_gpu, 2, of_two_on, "cpu", strategy))
    assert seen[0] == seen[1]
    assert seen[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-14)


def test_workers_that_share_a_gpu_train_on_servers_as_on_the_cpu():
    seen = values(run(on_one_gpu, 2, of_two_on, "cuda", ServerBSP()))
    expected = values(run(on_one_gpu, 2, of_two_on, "cpu", ServerBSP()))
    assert seen[0] == seen[1]
    assert seen[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("strategy", [SSP(), DTSSP(), ASP(), Downpour()])
def test_workers_that_share_a_gpu_train_on_servers_at_their_own_pace(strategy):
    for weights in values(run(on_one_gpu, 2, of_two_on, "cuda", strategy)):
        assert all(map(math.isfinite, weights))


ON_SERVERS = [ServerBSP(), SSP(), DTSSP(), ASP(), Downpour()]


@pytest.mark.parametrize("strategy", ON_SERVERS, ids=str)
def test_a_worker_on_servers_ends_with_the_model_of_the_cpu(strategy):
    """Alone, it reads the same parameters whenever they arrive, but for rounding."""
    (seen,) = values(run(on_one_gpu, 1, of_two_on, "cuda", strategy))
    (expected,) = values(run(on_one_gpu, 1, of_two_on, "cpu", strategy))
    assert seen == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("strategy", ON_SERVERS, ids=str)
def test_a_step_on_servers_waits_for_events_and_never_synchronizes_with_the_device(strategy):
    for losses in values(run(without_synchronizing, 2, strategy)):
        assert all(map(math.isfinite, losses))


def with_slow_kernels_on_servers(rank, emit):
    torch.cuda.set_device(0)
    model = a_model()
    model[1].register_forward_hook(lambda *_: torch.cuda._sleep(200_000_000))  # some 100 ms
    optimizer = sgd(model)
    inputs, labels = (one.cuda() for one in samples(16)[:])
    with offbeat.join(model, optimizer, SSP(shards="equal")):
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def test_compute_times_of_workers_on_servers_are_the_devices(tmp_path):
    log = tmp_path / "run.log"
    values(run(with_slow_kernels_on_servers, 2, env={"OFFBEAT_RUN_LOG": str(log)}))
    entries = [one for one in read_log(log).entries if isinstance(one, StepFinished)]
    for worker in (0, 1):
        times_s = [one.compute_s for one in entries if one.worker == worker and one.clock is not None]
        assert len(times_s) == 8
        assert min(times_s[2:]) > 0.05


def saved_and_loaded(path):
    model = a_model()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        train(model, optimizer, 1)
        torch.save(session.state_dict(), path)
        expected = train(model, optimizer, 1)
    model = a_model()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        session.load_state_dict(torch.load(path, weights_only=True))
        return expected, train(model, optimizer, 1)


def test_training_continues_from_a_checkpoint(tmp_path):
    ((expected, seen),) = values(run(on_one_gpu, 1, saved_and_loaded, tmp_path / "checkpoint.pt"))
    assert seen == expected


def test_a_validator_on_a_stream_requires_a_model_on_a_gpu():
    with pytest.raises(OffbeatError, match="expected a model on an accelerator"):
        offbeat.Validator(a_model_on_the_cpu(), evaluate, samples(8), backend="stream")


def a_model_on_the_cpu():
    return nn.Linear(6, CLASSES)
