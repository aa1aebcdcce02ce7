"""The race: its curves and figures, what it refuses, other libraries' batches, and once for real."""

import json
import subprocess
import time
import zipfile

import pytest
import torch
from torch import nn

import offbeat
from benchmarks import race
from benchmarks.__main__ import main
from benchmarks.accuracy import Point
from benchmarks.commands import RaceOptions
from benchmarks.namespaces import missing
from benchmarks.peer_environments import interpreter_with
from benchmarks.peers import PEERS, equal_shards
from benchmarks.race import SLOWNESS, Case, Method, RaceCurve, RacePoint, curve_points, time_of_samples
from benchmarks.race_worker import Recorder, Recording, flat_model, load_flat_model, read_recording
from benchmarks.timed import Stretch
from offbeat.cli.result import Result
from offbeat.errors import OffbeatError
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule

# Slowness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SLOWNESS)
def test_paces_and_lockstep_follow_from_the_rules(name):
    steps, workers = 4000, 4
    rules = [parse_slow_rule(rule) for rule in SLOWNESS[name].rules(workers)]
    slowness = InjectedSlowness(rules, workers=workers, seed=0)
    factors = torch.tensor(
        [[slowness.factor(worker, 0, step, None, step) for step in range(steps)] for worker in range(workers)]
    )
    paces = (1 / factors.mean(1)).sum().item()
    assert paces == pytest.approx(SLOWNESS[name].paces(workers), rel=0.02)
    lockstep_factor = factors.max(0).values.mean().item()
    assert lockstep_factor == pytest.approx(SLOWNESS[name].lockstep_factor(workers), rel=0.05)


def test_cases_and_methods_have_the_names_of_figures():
    case = Case(workers=8, slow="one5x", line=None, seed=0)
    assert case.name == "8w_one5x"
    assert Case(workers=4, slow="p05", line=1000, seed=0).name == "4w_p05_1000mbit"
    assert Method(strategy="adpsgd:topology=complete").name == "adpsgd_topology_complete"
    assert Method(peer="decent_ring").name == "peer_decent_ring"


# Curves -----------------------------------------------------------------------------------------------------


def recording(steps, times_s, models, bytes_sent):
    step_times_s, samples = zip(*steps, strict=True)
    return Recording(
        step_times_s=torch.tensor(step_times_s, dtype=torch.float64),
        step_samples=torch.tensor(samples),
        times_s=torch.tensor(times_s, dtype=torch.float64),
        bytes_sent=torch.tensor(bytes_sent),
        models=torch.tensor(models),
        late_share=0.0,
    )


def test_a_curve_has_the_mean_of_the_models_that_the_workers_copied_for_each_mark():
    # Marks at 10, 11 and 12 s; the second worker's one step of that time goes beyond two of them.
    first = recording(
        [(10.75, 4), (11.125, 5), (11.5, 8), (12.25, 9), (12.75, 11)],
        [10.25, 11.125, 12.25, 12.75],
        [[0.0, 0.0], [2.0, 0.0], [4.0, 0.0], [5.0, 0.0]],
        [0, 7, 8, 9],
    )
    second = recording(
        [(10.75, 1), (12.5, 3)], [10.5, 12.5, 12.5], [[0.0, 0.0], [0.0, 4.0], [0.0, 4.0]], [0, 10, 10]
    )
    evaluated = []

    def evaluate(model):
        evaluated.append(model.tolist())
        return 0.5

    points = curve_points([first, second], 1.0, evaluate)
    # From 10.5 s on, when both had begun.
    assert [point.time_s for point in points] == [0.0, 2.0, 2.0, 2.25]
    assert [point.samples for point in points] == [0, 12, 12, 14]
    assert [point.bytes_sent for point in points] == [0, 17, 18, 19]
    assert evaluated == [[0.0, 0.0], [1.0, 2.0], [2.0, 2.0], [2.5, 2.0]]
    # Root mean square of two distances from their mean, which are equal.
    assert [point.distance for point in points] == pytest.approx([0.0, 5**0.5, 8**0.5, 10.25**0.5])


def test_a_recorder_copies_at_the_first_step_after_each_mark(tmp_path):
    model, interval_s = nn.Linear(1, 1, bias=False, dtype=torch.float64), 1 / 64
    recorder = Recorder(model, interval_s, "lo")
    began_s, steps = time.monotonic(), 0
    while time.monotonic() < began_s + 5 * interval_s:
        steps += 1
        model.weight.data.fill_(steps)
        recorder.on_step(2)
    recorder.write(tmp_path / "0.pt", Stretch(model, 0.1))
    found = read_recording(tmp_path / "0.pt")
    assert found.step_samples.tolist() == [2 * step for step in range(1, steps + 1)]
    step_marks, copy_marks = (found.step_times_s // interval_s).tolist(), []
    last = found.times_s[0] // interval_s
    for number, mark in enumerate(step_marks, start=1):
        if mark > last:
            copy_marks.append(number)
            last = mark
    assert len(copy_marks) >= 1
    assert found.models[1:-1].flatten().tolist() == copy_marks
    assert found.times_s[1:-1].tolist() == [found.step_times_s[number - 1] for number in copy_marks]
    assert found.models[-1].item() == steps
    assert found.samples_at(found.times_s[0] - 1) == 0
    assert found.samples_at(found.step_times_s[0]) == 2
    assert found.samples_at(found.times_s[-1]) == 2 * steps


@pytest.mark.parametrize(("samples", "time_s"), [(100, 10.0), (150, 15.0), (200, 20.0), (201, None)])
def test_the_time_of_so_many_samples_lies_on_the_line(samples, time_s):
    points = [
        Point(time_s=time, samples=count, accuracy=0.5) for time, count in ((0, 0), (10, 100), (20, 200))
    ]
    assert time_of_samples(points, samples) == time_s


def test_a_flat_model_holds_all_that_is_averaged_and_is_given_back():
    torch.manual_seed(0)
    source, target = (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2))
    source[1].running_mean += 1
    flat = flat_model(source)
    assert flat.shape == (3 * 2 + 2 + 4 * 2,)
    load_flat_model(target, flat)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())
    before = flat.clone()
    source[0].weight.data += 1
    assert torch.equal(flat, before)


# Figures ----------------------------------------------------------------------------------------------------


def curve(method, seed, *measured, slow="one5x"):
    points = tuple(
        RacePoint(time_s=time_s, samples=samples, accuracy=accuracy, bytes_sent=0, distance=0.0)
        for time_s, samples, accuracy in measured
    )
    case = Case(workers=4, slow=slow, line=None, seed=seed)
    return RaceCurve(method=method, case=case, points=points, late_share=0.0)


BSP, PAIRS, DDP = Method(strategy="bsp"), Method(strategy="adpsgd"), Method(peer="ddp")


def test_figures_are_means_over_the_seeds_beside_lockstep_of_the_same_seed():
    curves = [
        curve(BSP, 0, (0.0, 0, 0.1), (50.0, 100, 0.8)),
        curve(BSP, 1, (0.0, 0, 0.1), (40.0, 100, 0.6)),
        curve(PAIRS, 0, (0.0, 0, 0.1), (10.0, 100, 0.7), (20.0, 200, 0.9)),
        curve(PAIRS, 1, (0.0, 0, 0.1), (10.0, 100, 0.61), (20.0, 200, 0.9)),
        curve(DDP, 0, (0.0, 0, 0.1), (25.0, 100, 0.8)),
        curve(DDP, 1, (0.0, 0, 0.1), (40.0, 100, 0.5)),
    ]
    found = race.figures(curves, batch_size=10, step_s=1.0)
    # Seed 0 reaches 0.8 after 15 s, seed 1 reaches 0.6 on its way to 0.61.
    times_s = (15.0, 10.0 * 0.5 / 0.51)
    paces = 10 * (3 + 1 / 5)  # samples per second of three workers, and of one that takes 5 times as long
    assert found == pytest.approx(
        {
            "time_ratio_to_bsp_adpsgd_4w_one5x": (times_s[0] / 50 + times_s[1] / 40) / 2,
            "accuracy_below_bsp_percent_adpsgd": (10 - 1) / 2,
            "accuracy_below_bsp_percent_peer_ddp": (0 + 10) / 2,
            "sum_of_paces_share_bsp_4w_one5x": (100 / 50 + 100 / 40) / 2 / paces,
            "sum_of_paces_share_adpsgd_4w_one5x": 100 / 10 / paces,
            "sum_of_paces_share_peer_ddp_4w_one5x": (100 / 25 + 100 / 40) / 2 / paces,
            "final_accuracy_bsp_4w_one5x": 0.7,
        }
    )
    Result(name="race", command="", kind="real", seed=0, figures=found)  # names with units


def test_what_one_seed_does_not_reach_has_no_mean():
    curves = [
        curve(BSP, 0, (0.0, 0, 0.1), (50.0, 100, 0.8)),
        curve(BSP, 1, (0.0, 0, 0.1), (50.0, 100, 0.8)),
        curve(PAIRS, 0, (0.0, 0, 0.1), (10.0, 100, 0.8)),
        curve(PAIRS, 1, (0.0, 0, 0.1), (10.0, 90, 0.7)),
    ]
    found = race.figures(curves, batch_size=10, step_s=1.0)
    assert "time_ratio_to_bsp_adpsgd_4w_one5x" not in found
    assert "sum_of_paces_share_adpsgd_4w_one5x" not in found
    assert found["accuracy_below_bsp_percent_adpsgd"] == pytest.approx(5)


def test_an_accuracy_is_compared_over_all_cases_and_a_time_within_its_own():
    curves = [
        curve(method, 0, (0.0, 0, 0.1), (time_s, 100, accuracy), slow=slow)
        for slow, time_s in (("none", 10.0), ("one5x", 50.0))
        for method, accuracy in ((BSP, 0.5), (PAIRS, 0.5 + (slow == "one5x") / 10))
    ]
    found = race.figures(curves, batch_size=10, step_s=1.0)
    assert found["accuracy_below_bsp_percent_adpsgd"] == pytest.approx(-5)
    assert found["time_ratio_to_bsp_adpsgd_4w_none"] == 1
    assert found["time_ratio_to_bsp_adpsgd_4w_one5x"] == pytest.approx(0.8)


# Other libraries --------------------------------------------------------------------------------------------


def test_the_shards_of_an_epoch_are_disjoint_and_the_next_epoch_has_others():
    samples = torch.arange(26)
    workers = [equal_shards((samples, samples + 100), rank, 4, 3, 0) for rank in range(4)]
    epochs = []
    for _ in range(2):  # 26 // 4 // 3 = 2 batches of 3 for each worker
        batches = [next(worker) for worker in workers for _ in range(2)]
        assert all(torch.equal(labels, inputs + 100) for inputs, labels in batches)
        epochs.append(torch.cat([inputs for inputs, _ in batches]).tolist())
        assert len({*epochs[-1]}) == 24
    assert epochs[0] != epochs[1]


def test_a_library_that_cannot_be_installed_is_named_with_the_reason(tmp_path):
    with pytest.raises(OffbeatError, match="cannot install no such==1: "):
        interpreter_with("no such==1", tmp_path)


@pytest.mark.long
def test_an_environment_is_made_once_and_again_where_torch_is_another(tmp_path, monkeypatch):
    """The environment has what it installed and what this process has, offbeat among it."""
    with zipfile.ZipFile(tmp_path / "offbeat_peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("offbeat_peer.py", "import offbeat, torch\nprint(torch.__file__, offbeat.__file__)")
        wheel.writestr(
            "offbeat_peer-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: offbeat-peer\nVersion: 1"
        )
        wheel.writestr("offbeat_peer-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        wheel.writestr("offbeat_peer-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    environments = tmp_path / "environments"
    interpreter = interpreter_with("offbeat-peer==1", environments)
    done = subprocess.run(
        [interpreter, "-c", "import offbeat_peer"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.split() == [torch.__file__, offbeat.__file__], done.stderr
    trace = interpreter.parent / "trace"
    trace.touch()
    assert interpreter_with("offbeat-peer==1", environments) == interpreter
    assert trace.exists()
    (interpreter.parents[1] / "complete").write_text("the packages of another environment")
    assert interpreter_with("offbeat-peer==1", environments) == interpreter
    assert not trace.exists()


# For real ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
@pytest.mark.parametrize("line", ["free", "1000"])
def test_the_race_for_real(line, tmp_path):
    path = tmp_path / "result.json"
    words = (
        f"race --data digits --workers 2 --slow one5x --line {line} --seeds 1 --samples 640 --epochs 1 "
        f"--step-ms 10 --points 30 --strategy preduce:P=2 --peer ddp --peer post_local_sgd --every 4 "
        f"--json {path}"
    )
    assert main(words.split()) == 0
    result = json.loads(path.read_text())
    names = {"bsp", "preduce_P_2", "peer_ddp", "peer_post_local_sgd"}
    assert {row["method"] for row in result["rows"]} == names
    summaries = {row["method"]: row for row in result["rows"] if "run_samples" in row}
    assert summaries.keys() == names
    assert summaries["bsp"]["run_samples"] == 640
    assert {summaries[name]["run_samples"] for name in names - {"bsp"}} == {1280}
    # Gradients of 38 kB are sent for 64 samples of two workers in lockstep; models less often after it.
    assert summaries["bsp"]["bytes_per_sample"] > 2 * 38_000 / 64
    assert (
        summaries["peer_post_local_sgd"]["bytes_per_sample"] < summaries["peer_ddp"]["bytes_per_sample"] / 2
    )
    end = "" if line == "free" else "_1000mbit"
    assert 0.1 < result["figures"][f"final_accuracy_bsp_2w_one5x{end}"] <= 1


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_each_case_is_in_the_result_as_soon_as_it_has_ended():
    options = RaceOptions(
        data="digits",
        workers=[2],
        slow=["none"],
        line=["free"],
        seeds=2,
        samples=128,
        epochs=1,
        step_ms=10,
        points=2,
        strategy=["preduce:P=2"],
        peers=False,
    )
    seeds = [
        [row["seed"] for row in result.rows if "run_samples" in row]
        for result in race.run(options, command="test")
    ]
    assert seeds == [[0, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("race --strategy none", "unknown strategy 'none'"),
        ("race --peer none", "unknown peer 'none': expected one of ddp, post_local_sgd"),
        ("race --slow twice", "unknown slowness 'twice': expected one of none, one5x"),
        ("race --line 0", "expected a line's rate in Mbit/s or free, got '0'"),
        ("race --line fast", "expected a line's rate in Mbit/s or free, got 'fast'"),
        ("race --workers 3", "decent_ring needs a number of workers that is a multiple of 2, got 3"),
        ("race --workers 6", "decent_one_peer needs a number of workers that is a power of 2, got 6"),
        ("race --no-peers --lr 0", "learning rate must be above 0"),
        ("race --no-peers --data none", "unknown data set 'none'"),
        ("race --no-peers --data digits --samples 200", "expected at least 256 samples for one step"),
    ],
)
def test_bad_input_ends_with_one_line_before_anything_is_installed_or_measured(line, words, capsys):
    assert main([*line.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("offbeat: ")
    assert printed.count("\n") == 1
    assert words in printed


def test_all_peers_are_named_in_the_help():
    annotation = RaceOptions.__annotations__["peer"]
    assert all(name in str(annotation) for name in PEERS)
