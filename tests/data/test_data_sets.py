"""Data sets: files that readers accept and refuse, their messages, and the real sets where present."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import struct
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from offbeat.data import DATA_SETS, DEFAULT_DIR, DataError, Splits, load_data_set
from offbeat.data.download import RemoteFile
from offbeat.data.files import CIFAR_RECORD_BYTES, read_cifar_batch, read_digits, read_idx
from offbeat.data.sets import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    MNIST_FILES,
    MNIST_MEAN,
    MNIST_STD,
    download_cifar10,
    download_mnist,
    read_cifar10,
    read_mnist,
)
from offbeat.models import build_model
from support.processes import run, values

UNREADABLE = Path("/proc/self/mem")
CIFAR_NAMES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def idx(shape: tuple[int, ...], values: bytes, *, type_code: int = 8) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, type_code, len(shape), *shape) + values


def cifar(labels: list[int], pixels: bytes = bytes(3072)) -> bytes:
    return b"".join(bytes([label]) + pixels for label in labels)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


# idx files.


@settings(max_examples=80, deadline=None)
@given(data=st.data(), zipped=st.booleans())
def test_idx_files_round_trip(data: st.DataObject, zipped: bool) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    values = data.draw(st.binary(min_size=(n := int(torch.Size(shape).numel())), max_size=n))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "any name"
        content = idx(shape, values)
        file.write_bytes(gzip.compress(content) if zipped else content)
        read = read_idx(file, dims=len(shape))
    assert read.dtype == torch.uint8
    assert tuple(read.shape) == shape
    assert bytes(read.flatten().tolist()) == values


@settings(max_examples=150, deadline=None)
@given(data=st.data(), zipped=st.booleans())
def test_a_damaged_idx_file_is_a_data_error(data: st.DataObject, zipped: bool) -> None:
    """Cut, lengthened or altered in its header, plain or inside gzip."""
    content = bytearray(idx((3, 2, 2), bytes(range(12))))
    kind = data.draw(st.sampled_from(["cut", "longer", "header"]))
    if kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "longer":
        content += data.draw(st.binary(min_size=1, max_size=20))
    else:
        content[data.draw(st.integers(0, 15))] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(gzip.compress(content) if zipped else content)
        with pytest.raises(DataError) as caught:
            read_idx(file, dims=3)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_gzip_stream_never_gives_wrong_values(data: st.DataObject) -> None:
    """Where the damaged bits carry nothing (the time in the header, padding), the values must be right."""
    values = bytes(range(12))
    content = bytearray(gzip.compress(idx((3, 2, 2), values), mtime=0))
    cut = data.draw(st.booleans())
    at = data.draw(st.integers(0, len(content) - 1))
    if cut:
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.gz"
        file.write_bytes(content)
        try:
            read = bytes(read_idx(file, dims=3).flatten().tolist())
        except DataError:
            read = None
    assert read in ((None,) if cut else (None, values))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "begins with 00 00 08 03, found nothing, the file is empty"),
        (b"\x00\x00", "found 00 00;"),
        (b"<html><body>", "begins with 00 00 08 03, found 3c 68 74 6d"),
        (idx((3,), bytes(3)), "in 3 dimensions, .* found 00 00 08 01"),
        (idx((3, 1, 1), bytes(12), type_code=0x0D), "unsigned bytes .* found 00 00 0d 03"),
        (idx((3, 1, 1), bytes(3))[:14], "expected a header of 16 bytes, found 14"),
        (idx((0, 28, 28), b""), r"expected at least one value, found sizes \(0, 28, 28\)"),
        (idx((3, 2, 2), bytes(11)), r"expected 12 values after the header \(3 x 2 x 2\), found only 11"),
        (idx((3, 2, 2), bytes(13)), r"expected 12 values .*, found more"),
        (idx((2**32 - 1, 2**32 - 1, 2**32 - 1), bytes(9)), r"found only 9"),
    ],
    ids=["empty", "2 bytes", "html", "labels", "floats", "header cut", "no values", "cut", "longer", "huge"],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_idx_errors_name_the_expected_content(path: Path, content: bytes, text: str, zipped: bool) -> None:
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=text):
        read_idx(path, dims=3)


@pytest.mark.parametrize("read", [lambda p: read_idx(p, dims=1), read_cifar_batch], ids=["idx", "cifar"])
def test_a_path_that_is_no_file_is_refused(path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(DataError, match=r"expected a file, found nothing; .* --download"):
        read(path)
    path.mkdir()
    with pytest.raises(DataError, match="expected a file, found a folder"):
        read(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DataError, match="expected a file, found something else"):
        read(path)


@pytest.mark.skipif(not UNREADABLE.is_file(), reason=f"needs Linux's {UNREADABLE}, a file that gives errors")
@pytest.mark.parametrize("read", [lambda p: read_idx(p, dims=1), read_cifar_batch], ids=["idx", "cifar"])
def test_a_read_error_of_the_disk_is_a_data_error(read: object) -> None:
    assert callable(read)
    with pytest.raises(DataError, match=r"mem: cannot be read .Input/output error"):
        read(UNREADABLE)


# CIFAR-10 batches.


def test_a_cifar_record_is_a_label_and_three_planes(path: Path) -> None:
    planes = bytes([1] * 1024 + [2] * 1024 + [3] * 1023 + [4])
    path.write_bytes(cifar([9, 0], planes))
    images, labels = read_cifar_batch(path)
    assert images.dtype == torch.uint8
    assert images.shape == (2, 3, 32, 32)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [9, 0]
    assert images[1, :, 0, 0].tolist() == [1, 2, 3]
    assert images[1, 2, 31, 30:].tolist() == [3, 4]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(0, 3 * CIFAR_RECORD_BYTES).filter(lambda n: n == 0 or n % CIFAR_RECORD_BYTES))
def test_a_cifar_file_of_another_size_is_refused(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batch.bin"
        file.write_bytes(bytes(size))
        with pytest.raises(
            DataError, match=rf"batch.bin: expected a multiple of 3,073 bytes .* found {size:,};"
        ):
            read_cifar_batch(file)


def test_a_cifar_label_above_9_is_refused(path: Path) -> None:
    path.write_bytes(cifar([0, 9, 10, 255]))
    with pytest.raises(DataError, match="expected labels 0 to 9, found 10 in record 2"):
        read_cifar_batch(path)


# Whole sets, small.


def write_mnist(folder: Path, *, train: int = 6, test: int = 3, side: int = 28, zipped: bool = True) -> Path:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images = bytes(i % 256 for i in range(count * side * side))
        for name, content in (
            (f"{prefix}-images-idx3-ubyte", idx((count, side, side), images)),
            (f"{prefix}-labels-idx1-ubyte", idx((count,), bytes(i % 10 for i in range(count)))),
        ):
            if zipped:
                (raw / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (raw / name).write_bytes(content)
    return raw


def write_cifar10(folder: Path, *, count: int = 4) -> Path:
    raw = folder / "cifar-10-batches-bin"
    raw.mkdir(parents=True)
    for i, name in enumerate(CIFAR_NAMES):
        (raw / name).write_bytes(cifar([(i + j) % 10 for j in range(count)], bytes([i]) * 3072))
    return raw


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_from_files(tmp_path: Path, zipped: bool) -> None:
    write_mnist(tmp_path, zipped=zipped)
    splits = read_mnist(tmp_path, train_count=6, test_count=3)
    images, labels = splits.train.tensors
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.shape == (6, *splits.sample_shape) == (6, 1, 28, 28)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(splits.test) == 3
    assert images[0, 0, 0, 5].item() == pytest.approx((5 / 255 - MNIST_MEAN[0]) / MNIST_STD[0])


def test_cifar10_from_files(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    splits = read_cifar10(tmp_path, batch_count=4)
    images, labels = splits.train.tensors
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.shape == (20, *splits.sample_shape) == (20, 3, 32, 32)
    assert labels.tolist() == [(i + j) % 10 for i in range(5) for j in range(4)]
    assert len(splits.test) == 4
    expected = [(4 / 255 - mean) / std for mean, std in zip(CIFAR10_MEAN, CIFAR10_STD, strict=True)]
    assert images[19, :, 31, 31].tolist() == pytest.approx(expected)


def test_a_set_can_be_written_to(tmp_path: Path) -> None:
    """Nothing points into a read-only buffer; augmentation in place is allowed."""
    write_cifar10(tmp_path)
    images, labels = read_cifar10(tmp_path, batch_count=4).test.tensors
    images.zero_()
    labels.zero_()
    assert not images.any()


def swap(raw: Path) -> None:
    os.replace(raw / "train-images-idx3-ubyte.gz", raw / "spare")
    os.replace(raw / "t10k-images-idx3-ubyte.gz", raw / "train-images-idx3-ubyte.gz")
    os.replace(raw / "spare", raw / "t10k-images-idx3-ubyte.gz")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (swap, r"train-images-idx3-ubyte.gz: expected 6 x 28 x 28 images .*, found 3 x 28 x 28"),
        (
            lambda raw: (raw / "t10k-labels-idx1-ubyte").write_bytes(idx((2,), bytes(2))),
            "t10k-labels-idx1-ubyte: expected 3 labels, found 2",
        ),
        (
            lambda raw: (raw / "t10k-labels-idx1-ubyte").write_bytes(idx((3,), bytes([1, 10, 2]))),
            "t10k-labels-idx1-ubyte: expected labels 0 to 9, found 10 in record 1",
        ),
        (
            lambda raw: (raw / "t10k-images-idx3-ubyte").write_bytes(idx((3, 27, 28), bytes(3 * 27 * 28))),
            "t10k-images-idx3-ubyte: expected 3 x 28 x 28 images .*, found 3 x 27 x 28",
        ),
        (
            lambda raw: os.replace(raw / "t10k-labels-idx1-ubyte.gz", raw / "t10k-images-idx3-ubyte.gz"),
            "MNIST is not in .*: looked for t10k-labels-idx1-ubyte .also with .gz. in .*--download",
        ),
        (shutil.rmtree, "looked for train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images"),
    ],
    ids=["swapped", "fewer labels", "label 10", "other size", "one missing", "all missing"],
)
def test_a_set_that_is_not_mnist_is_refused(tmp_path: Path, damage: object, text: str) -> None:
    assert callable(damage)
    damage(write_mnist(tmp_path))
    with pytest.raises(DataError, match=text) as caught:
        read_mnist(tmp_path, train_count=6, test_count=3)
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_plain_file_is_ignored_or_named(tmp_path: Path) -> None:
    """Unpackers make such folders; the gzipped file next to it is good, else the folder is named."""
    raw = write_mnist(tmp_path)
    (raw / "train-images-idx3-ubyte").mkdir()
    read_mnist(tmp_path, train_count=6, test_count=3)
    (raw / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match="train-images-idx3-ubyte: expected a file, found a folder"):
        read_mnist(tmp_path, train_count=6, test_count=3)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda raw: (raw / "data_batch_3.bin").write_bytes(cifar([1, 2, 3])),
            "data_batch_3.bin: expected 4 records, found 3",
        ),
        (
            lambda raw: (raw / "test_batch.bin").write_bytes(cifar([1, 2, 3, 11])),
            "test_batch.bin: expected labels 0 to 9, found 11 in record 3",
        ),
        (
            lambda raw: (raw / "test_batch.bin").unlink(),
            "CIFAR-10 is not in .*: looked for test_batch.bin in .*cifar-10-batches-bin; run with --download",
        ),
        (shutil.rmtree, "looked for data_batch_1.bin, data_batch_2.bin, .*, test_batch.bin in"),
    ],
    ids=["fewer", "label 11", "one missing", "all missing"],
)
def test_a_set_that_is_not_cifar10_is_refused(tmp_path: Path, damage: object, text: str) -> None:
    assert callable(damage)
    damage(write_cifar10(tmp_path))
    with pytest.raises(DataError, match=text) as caught:
        read_cifar10(tmp_path, batch_count=4)
    assert "\n" not in str(caught.value)


# From the network to tensors, over a real server.


@dataclass
class Home:
    """A folder served over HTTP; `requested` keeps the requested paths."""

    folder: Path
    url: str = ""
    requested: list[str] = field(default_factory=list)

    def remote(self, name: str) -> RemoteFile:
        content = (self.folder / name).read_bytes()
        return RemoteFile(
            url=f"{self.url}/{name}", md5=hashlib.md5(content).hexdigest(), size_bytes=len(content)
        )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("no_proxy", "*")
    home = Home(folder=tmp_path / "served")
    home.folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(home.folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            home.requested.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        home.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield home
        server.shutdown()
        thread.join()


def test_mnist_from_the_network(home: Home, tmp_path: Path) -> None:
    for file in write_mnist(tmp_path / "original").iterdir():
        shutil.copy(file, home.folder)
    files = {name: home.remote(f"{name}.gz") for name in MNIST_FILES}
    seen: list[str] = []
    target = tmp_path / "data"
    download_mnist(target, files=files, progress=lambda name, _bytes, _size: seen.append(name))
    assert seen == [f"{name}.gz" for name in MNIST_FILES]
    assert len(read_mnist(target, train_count=6, test_count=3).train) == 6
    unzipped = target / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    unzipped.write_bytes(gzip.decompress(unzipped.with_suffix(".gz").read_bytes()))
    unzipped.with_suffix(".gz").unlink()
    (target / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz").unlink()
    home.requested.clear()
    download_mnist(target, files=files)
    assert home.requested == ["/t10k-images-idx3-ubyte.gz"]


def test_cifar10_from_the_network(home: Home, tmp_path: Path) -> None:
    raw = write_cifar10(tmp_path / "original")
    with tarfile.open(home.folder / "set.tar.gz", "w:gz") as tar:
        tar.add(raw, arcname="cifar-10-batches-bin")
        info = tarfile.TarInfo("cifar-10-batches-bin/readme.html")
        tar.addfile(info, io.BytesIO())
    archive = home.remote("set.tar.gz")
    target = tmp_path / "data"
    download_cifar10(target, archive=archive, batch_count=4)
    assert sorted(file.name for file in (target / "cifar-10-batches-bin").iterdir()) == sorted(CIFAR_NAMES)
    assert not (target / "cifar-10-binary.tar.gz").exists()
    first = read_cifar10(target, batch_count=4)
    (target / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    download_cifar10(target, archive=archive, batch_count=4)
    again = read_cifar10(target, batch_count=4)
    assert torch.equal(first.train.tensors[0], again.train.tensors[0])
    shutil.move(home.folder / "set.tar.gz", target / "cifar-10-binary.tar.gz")
    download_cifar10(target, archive=archive, batch_count=4)  # all files exist: no request
    shutil.rmtree(target / "cifar-10-batches-bin")
    download_cifar10(target, archive=archive, batch_count=4)  # the archive exists: no request
    assert len(read_cifar10(target, batch_count=4).test) == 4
    assert (target / "cifar-10-binary.tar.gz").exists()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_of_several_concurrent_downloads_only_one_requests_files(
    name: str, home: Home, tmp_path: Path
) -> None:
    if name == "mnist":
        for file in write_mnist(tmp_path / "original").iterdir():
            shutil.copy(file, home.folder)
        fetch = partial(download_mnist, files={name: home.remote(f"{name}.gz") for name in MNIST_FILES})
        read = partial(read_mnist, train_count=6, test_count=3)
    else:
        with tarfile.open(home.folder / "set.tar.gz", "w:gz") as tar:
            tar.add(write_cifar10(tmp_path / "original"), arcname="cifar-10-batches-bin")
        fetch = partial(download_cifar10, archive=home.remote("set.tar.gz"), batch_count=4)
        read = partial(read_cifar10, batch_count=4)
    together = Barrier(6)

    def work(_: int) -> int:
        together.wait(timeout=60)
        fetch(tmp_path / "data")
        return len(read(tmp_path / "data").train)

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(work, range(6)))) == 1
    assert sorted(home.requested) == sorted(f"/{file.name}" for file in home.folder.iterdir())


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_nothing_is_written_when_all_files_exist(name: str, tmp_path: Path) -> None:
    """A shared folder may be read-only."""
    write, fetch = {"mnist": (write_mnist, download_mnist), "cifar10": (write_cifar10, download_cifar10)}[
        name
    ]
    write(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    fetch(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("fetch", [download_mnist, download_cifar10])
def test_a_folder_that_cannot_be_written_to_is_a_data_error(fetch: object, tmp_path: Path) -> None:
    assert callable(fetch)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written"):
        fetch(tmp_path / "file" / "data")


# load_data_set, and the digits.


def test_an_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown data set 'svhn'; expected one of digits, mnist, cifar10"):
        load_data_set("svhn")
    assert list(DATA_SETS) == ["digits", "mnist", "cifar10"]


@pytest.mark.parametrize(("name", "title"), [("mnist", "MNIST"), ("cifar10", "CIFAR-10")])
def test_a_missing_set_is_reported_with_the_option_to_download_it(
    name: str, title: str, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=rf"^{title} is not in {tmp_path}: looked for .*; run with --download"
    ):
        load_data_set(name, str(tmp_path))


def test_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=f"not in {tmp_path}/.cache/offbeat"):
        load_data_set("mnist")


def test_digits() -> None:
    splits = load_data_set("digits")
    (images, labels), (test_images, test_labels) = splits.train.tensors, splits.test.tensors
    assert (len(splits.train), len(splits.test)) == (1442, 355)
    assert (splits.classes, splits.sample_shape) == (10, (1, 8, 8))
    assert images.shape[1:] == test_images.shape[1:] == (1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (images.min(), images.max()) == (0, 1)
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    share = torch.bincount(test_labels) / (torch.bincount(labels) + torch.bincount(test_labels))
    assert share.min() > 0.19
    assert share.max() < 0.21


def test_digits_are_those_of_scikit_learn() -> None:
    """They are read from its file, without its import, which would take longer than to train on them."""
    from sklearn.datasets import load_digits

    theirs, splits = load_digits(), load_data_set("digits")
    every_fifth = torch.zeros(len(theirs.target), dtype=torch.bool)
    for digit in range(10):
        every_fifth[np.flatnonzero(theirs.target == digit)[4::5]] = True
    for split, chosen in ((splits.train, ~every_fifth), (splits.test, every_fifth)):
        assert torch.equal(split.tensors[0][:, 0], torch.from_numpy(theirs.images)[chosen].float() / 16)
        assert torch.equal(split.tensors[1], torch.from_numpy(theirs.target)[chosen])


def with_digits(rank: int, emit: object) -> tuple[int, bool]:
    return len(load_data_set("digits").train), "sklearn" in sys.modules


@pytest.mark.long
def test_a_worker_has_the_digits_without_the_import_of_scikit_learn() -> None:
    assert values(run(with_digits, 1)) == [(1442, False)]


def digits(*lines: str) -> bytes:
    return gzip.compress("\n".join(lines).encode())


IMAGE = ",".join(str(pixel % 17) for pixel in range(64))


def test_digits_round_trip(path: Path) -> None:
    path.write_bytes(digits(f"{IMAGE},9", f"{IMAGE},0"))
    images, labels = read_digits(path)
    assert images.flatten().tolist() == [pixel % 17 for pixel in range(64)] * 2
    assert tuple(images.shape) == (2, 1, 8, 8)
    assert labels.tolist() == [9, 0]


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        digits(),
        digits(IMAGE),
        digits(f"{IMAGE},1", IMAGE),
        digits(f"{IMAGE},10"),
        digits(f"{IMAGE},-1"),
        digits(f"{IMAGE},1.5"),
        digits(f"{IMAGE},one"),
        digits(f"{IMAGE},nan"),
        digits(f"17{IMAGE[1:]},1"),
        digits(f"{IMAGE},1")[:-9],
        f"{IMAGE},1".encode(),
    ],
    ids=range(13),
)
def test_malformed_digits_are_a_data_error(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="install scikit-learn again") as caught:
        read_digits(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_digits_are_the_same_each_time_and_in_no_split_twice() -> None:
    first, again = load_data_set("digits"), load_data_set("digits")
    pairs = zip(
        first.train.tensors + first.test.tensors, again.train.tensors + again.test.tensors, strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    all_images = torch.cat([first.train.tensors[0], first.test.tensors[0]])
    assert len(all_images.flatten(1).unique(dim=0)) == len(all_images)


def test_loading_moves_no_global_generator() -> None:
    before = torch.get_rng_state()
    load_data_set("digits")
    assert torch.equal(torch.get_rng_state(), before)


def accuracy_after(splits: Splits, name: str, *, epochs: int, samples: int, lr: float) -> float:
    model = build_model(name, sample_shape=splits.sample_shape, classes=splits.classes, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    images, labels = splits.train.tensors
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator)[:samples].split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    test_images, test_labels = splits.test.tensors
    with torch.no_grad():
        predicted = model.eval()(test_images[:2000]).argmax(1)
    return float((predicted == test_labels[:2000]).float().mean())


def test_a_model_learns_the_digits() -> None:
    assert accuracy_after(load_data_set("digits"), "mlp", epochs=10, samples=2000, lr=0.05) > 0.95


def real(name: str) -> Splits:
    folder = DEFAULT_DIR.expanduser()
    needed = {"mnist": folder / "MNIST" / "raw", "cifar10": folder / "cifar-10-batches-bin"}[name]
    if not needed.exists():
        pytest.skip(f"{name} is not in {folder}; `offbeat train --data {name} --download` fetches it")
    return load_data_set(name)


@pytest.mark.parametrize(
    ("name", "counts", "classes_equal", "floor"),
    [("mnist", (60_000, 10_000), False, 0.85), ("cifar10", (50_000, 10_000), True, 0.2)],
)
def test_the_real_set(name: str, counts: tuple[int, int], classes_equal: bool, floor: float) -> None:
    """Published counts, stated normalisation, and labels that belong to their images: a model learns."""
    splits = real(name)
    images, labels = splits.train.tensors
    assert (len(splits.train), len(splits.test)) == counts
    assert len(torch.bincount(labels)) == 10
    assert classes_equal == (torch.bincount(labels) == counts[0] // 10).all().item()
    assert images.mean((0, 2, 3)).abs().max() < 0.01
    assert (images.std((0, 2, 3)) - 1).abs().max() < 0.01
    assert accuracy_after(splits, "cnn2", epochs=1, samples=3200, lr=0.01) > floor
