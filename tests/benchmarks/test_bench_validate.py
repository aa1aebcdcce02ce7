"""The fourth paper's benchmark: input pipelines give the same, and figures match their names."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from benchmarks.commands import ValidateOptions
from benchmarks.inputs import ColdFiles, Decoded, InMemory, Repeated
from benchmarks.loaders import LOADERS
from benchmarks.validate import COPY_THREADS, figures, run

IMAGES = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
LABELS = np.arange(20) % 10


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_pipeline_gives_the_same_batches(loader, threads):
    samples, order = InMemory(IMAGES, LABELS), [3, 19, 0, 7, 7, 2, 11]
    batches = list(LOADERS[loader](samples, order, 3, threads))
    assert [len(labels) for _, labels in batches] == [3, 3, 1]
    assert torch.cat([labels for _, labels in batches]).tolist() == [position % 10 for position in order]
    expected = torch.from_numpy(np.stack([samples[position][0] for position in order]))
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), expected)


@pytest.mark.parametrize("loader", LOADERS)
def test_an_error_of_the_set_is_raised_by_every_pipeline(loader):
    with pytest.raises(IndexError):
        list(LOADERS[loader](InMemory(IMAGES, LABELS), [1, 2, 25], 2, 1))


def test_closing_a_prefetching_pipeline_ends_its_threads():
    batches = LOADERS["prefetch"](InMemory(IMAGES, LABELS), list(range(20)) * 50, 2, 2)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offbeat loader")]


def test_files_round_trip_and_repeated_sets_have_the_stated_length(tmp_path):
    memory, files = InMemory(IMAGES, LABELS), ColdFiles(IMAGES, LABELS, tmp_path / "images")
    assert len(files) == 20
    assert all(np.array_equal(files[place][0], memory[place][0]) for place in range(20))
    repeated = Repeated(IMAGES, LABELS, 100 * 784)
    assert len(repeated) == 100
    assert np.array_equal(repeated[99][0], memory[19][0])
    with pytest.raises(IndexError):
        repeated[100]


def test_decoding_blurs():
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    image[0, 5, 5] = 255
    blurred = Decoded(image, LABELS)[0][0][0]
    sharp = InMemory(image, LABELS)[0][0][0]
    light = blurred - sharp[0, 0]
    assert light[5, 5] == pytest.approx(4 * light[4, 4], rel=1e-4)
    assert light.sum() == pytest.approx((sharp - sharp[0, 0]).sum(), rel=1e-4)


def row(side, run_s, *, load="files", threads=1, run=0, train_s=3.0, validate_s=1.0, copy_s=0.001):
    return {
        "load": load,
        "threads": threads,
        "run": run,
        "side": side,
        "run_s": run_s,
        "train_s": train_s,
        "validate_s": validate_s,
        "copy_s": copy_s,
    }


def test_figures_match_their_names():
    """4 s an epoch of which 1 s is validation: of 10 epochs 9 can be hidden, 0.225 of the time."""
    found = figures(
        [
            row("numpy", 40.0),
            row("overlap", 32.0),
            row("auto", 36.0),
            row("numpy", 40.0, load="decode"),
            row("overlap", 42.0, load="decode"),
            row("auto", 40.4, load="decode"),
            row("overlap", 30.0, threads=48, copy_s=0.003),
        ],
        epochs=10,
    )
    assert found["saving_files_1_overlap"] == pytest.approx(0.2)
    assert found["saving_where_waiting"] == pytest.approx(0.2)
    assert found["share_of_bound"] == pytest.approx(0.2 / 0.225)
    assert found["saving_decode_1_overlap"] == pytest.approx(-0.05)
    assert found["auto_ratio_to_serial_worst"] == pytest.approx(1.01)
    assert found["copy_share_48"] == pytest.approx(0.001)


def test_sides_are_compared_within_a_run_and_figures_are_medians_over_runs():
    """Something else ran in the first run, and the machine is twice as slow in the third."""
    rows = []
    for number, (serial_s, overlapped_s) in enumerate([(40.0, 60.0), (40.0, 32.0), (80.0, 64.0)]):
        rows += [row("numpy", serial_s, run=number), row("overlap", overlapped_s, run=number)]
    found = figures(rows, epochs=10)
    assert found["saving_files_1_overlap"] == pytest.approx(0.2)
    assert found["share_of_bound"] == pytest.approx(0.2 / 0.225)


@pytest.mark.long
def test_the_benchmark_runs_and_serial_and_overlapped_training_learn_the_same():
    options = ValidateOptions(
        load=["memory"],
        side=["numpy", "overlap"],
        threads=[2],
        epochs=2,
        batch_size=32,
        samples=256,
        held_out=64,
        data="digits",
    )
    result = run(options, command="python -m benchmarks validate")
    serial, overlapped, *many = (row for row in result.rows if "run_s" in row)
    looks = [row for row in result.rows if "at_s" in row]
    assert looks
    assert all(row["used_share"] >= 0 for row in looks)
    assert tuple(row["threads"] for row in many) == COPY_THREADS
    assert {row["accuracy"] for row in (overlapped, *many)} == {serial["accuracy"]}
    copies = {f"copy_share_{threads}" for threads in COPY_THREADS}
    assert {"saving_memory_2_overlap", *copies} <= result.figures.keys()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"load": ["tape"]}, "unknown load 'tape': expected one of memory, files, decode, repeated"),
        ({"side": ["magic"]}, "unknown side 'magic'"),
        ({"data": "cifar10"}, "unknown data set 'cifar10'"),
        ({"compute": "guessed"}, "expected --compute timed or real, got 'guessed'"),
    ],
)
def test_bad_plans_are_refused(changed, text):
    with pytest.raises(ValueError, match=text):
        run(ValidateOptions(**changed), command="")
