"""The data sets by name: their files, sources and normalisation. Shapes: N samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from offbeat.data import download as net
from offbeat.data.download import DownloadProgress, RemoteFile
from offbeat.data.files import (
    CIFAR_RECORD_BYTES,
    read_cifar_batch,
    read_digits,
    read_idx,
    validate_labels,
)
from offbeat.errors import DataError

DEFAULT_DIR = Path("~/.cache/offbeat")

DATA_SETS: Mapping[str, str] = MappingProxyType(
    {
        "digits": "1,797 handwritten digits of 8x8 pixels that come with scikit-learn",
        "mnist": "60,000 + 10,000 handwritten digits of 28x28 pixels",
        "cifar10": "50,000 + 10,000 colour images of 32x32 pixels in 10 classes",
    }
)
"""What `load_data_set` can load: name -> one line of description."""

MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

_MNIST_HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES: Mapping[str, RemoteFile] = MappingProxyType(
    {
        name: RemoteFile(url=f"{_MNIST_HOME}{name}.gz", md5=md5, size_bytes=size_bytes)
        for name, md5, size_bytes in (
            ("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        )
    }
)
"""The four files of MNIST by their names without .gz; checksums as in torchvision's `MNIST`."""

CIFAR10_ARCHIVE = RemoteFile(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    size_bytes=170_052_171,
)
"""The CIFAR-10 binary version; checksum as on its home page, https://www.cs.toronto.edu/~kriz/cifar.html."""

_CIFAR10_FOLDER = "cifar-10-batches-bin"
_CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_CIFAR10_TEST = "test_batch.bin"


@dataclass(frozen=True, kw_only=True)
class Splits:
    """A data set, split for training and testing.

    Attributes:
        train: samples, float32 (N, *sample_shape), and labels, int64 (N,) in 0..classes-1.
        test: the same for testing.
        classes: the number of classes.
        sample_shape: the shape of one sample, (channels, height, width).
    """

    train: TensorDataset
    test: TensorDataset
    classes: int
    sample_shape: tuple[int, ...]


def resolve_data_dir(given: Path | None) -> str:
    """Return the absolute path of the data folder; without a home folder `~` stays, and `load_data_set`
    raises.

    Args:
        given: the folder; by default `DEFAULT_DIR`.
    """
    path = given or DEFAULT_DIR
    try:
        return str(path.expanduser().absolute())
    except RuntimeError:
        return str(path)


def load_data_set(
    name: str,
    data_dir: str | Path = DEFAULT_DIR,
    *,
    download: bool = False,
    progress: DownloadProgress | None = None,
) -> Splits:
    """Load a data set into memory; the same files give the same tensors in the same order.

    `digits` are scaled to [0, 1]; every fifth sample of each digit is for testing (1,442 + 355). `mnist` and
    `cifar10` are scaled to [0, 1], then normalised by the per-channel mean and standard deviation of their
    training pixels (`MNIST_MEAN`, `CIFAR10_MEAN`, ...). CIFAR-10 needs 737 MB of memory.

    Args:
        name: a key of `DATA_SETS`.
        data_dir: folder with the files; `~` is the home folder. `digits` needs none.
        download: download the files that are missing from their public sources.
        progress: called as bytes of a download arrive.

    Returns:
        The data set.

    Raises:
        DataError: files are missing, damaged or cannot be downloaded, or scikit-learn is missing (`digits`).
        ValueError: unknown name.
    """
    if name not in DATA_SETS:
        raise ValueError(f"unknown data set {name!r}; expected one of {', '.join(DATA_SETS)}")
    if name == "digits":
        return _digits()
    try:
        folder = Path(data_dir).expanduser()
    except RuntimeError as error:
        raise DataError(f"{data_dir}: there is no home folder; name a folder with --data-dir") from error
    if name == "mnist":
        if download:
            download_mnist(folder, progress=progress)
        return read_mnist(folder)
    if download:
        download_cifar10(folder, progress=progress)
    return read_cifar10(folder)


def _digits() -> Splits:
    # scikit-learn's file is read directly: importing its `load_digits` would cost every worker 1.2 s.
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError("digits come with scikit-learn, which is missing: pip install 'offbeat[demo]'")
    pixels, labels = read_digits(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz")
    images = pixels.to(torch.float32).div_(16)
    is_test = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    for digit in range(10):
        is_test[(labels == digit).nonzero().squeeze(1)[4::5]] = True
    return Splits(
        train=TensorDataset(images[~is_test], labels[~is_test]),
        test=TensorDataset(images[is_test], labels[is_test]),
        classes=10,
        sample_shape=(1, 8, 8),
    )


def read_mnist(folder: Path, *, train_count: int = 60_000, test_count: int = 10_000) -> Splits:
    """Read `MNIST/raw/*-ubyte` or `*-ubyte.gz` in a folder.

    Args:
        folder: the data folder.
        train_count: expected number of training samples.
        test_count: expected number of test samples.

    Returns:
        The data set, normalised.

    Raises:
        DataError: a file is missing or not as expected.
    """
    raw = folder / "MNIST" / "raw"
    missing = [name for name in MNIST_FILES if _mnist_path(raw, name) is None]
    if missing:
        raise DataError(
            f"MNIST is not in {folder}: looked for {', '.join(missing)} (also with .gz) in {raw}; "
            f"run with --download, or put the files of {_MNIST_HOME} there"
        )
    train, test = (
        _mnist_split(raw, f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte", count)
        for prefix, count in (("train", train_count), ("t10k", test_count))
    )
    return Splits(train=train, test=test, classes=10, sample_shape=(1, 28, 28))


def _mnist_path(raw: Path, name: str) -> Path | None:
    """Return the path of a plain file, else of a gzipped one, else of a folder of either name."""
    found = [path for path in (raw / name, raw / f"{name}.gz") if path.exists()]
    return next((path for path in found if path.is_file()), found[0] if found else None)


def _mnist_split(raw: Path, images_name: str, labels_name: str, count: int) -> TensorDataset:
    images_path = _mnist_path(raw, images_name) or raw / images_name
    labels_path = _mnist_path(raw, labels_name) or raw / labels_name
    images = read_idx(images_path, dims=3)
    labels = read_idx(labels_path, dims=1)
    _check_shape(images_path, "images of height and width", tuple(images.shape), (count, 28, 28))
    _check_shape(labels_path, "labels", tuple(labels.shape), (count,))
    return TensorDataset(
        _normalised(images.unsqueeze(1), MNIST_MEAN, MNIST_STD),
        validate_labels(labels_path, labels, classes=10),
    )


def download_mnist(
    folder: Path, *, files: Mapping[str, RemoteFile] = MNIST_FILES, progress: DownloadProgress | None = None
) -> None:
    """Download the missing MNIST files; of several processes one downloads, the others wait.

    Args:
        folder: the data folder.
        files: the four files by their names without .gz.
        progress: called as bytes arrive.

    Raises:
        DataError: a file could not be downloaded.
    """
    raw = folder / "MNIST" / "raw"
    if all(_mnist_path(raw, name) for name in files):
        return
    with net.lock_folder(folder):
        for name, remote in files.items():
            if _mnist_path(raw, name) is None:
                net.download_file(remote, raw / f"{name}.gz", progress=progress)


def read_cifar10(folder: Path, *, batch_count: int = 10_000) -> Splits:
    """Read `cifar-10-batches-bin/*.bin` in a folder.

    Args:
        folder: the data folder.
        batch_count: expected number of records in each of the six files.

    Returns:
        The data set, normalised.

    Raises:
        DataError: a file is missing or not as expected.
    """
    raw = folder / _CIFAR10_FOLDER
    missing = [name for name in (*_CIFAR10_TRAIN, _CIFAR10_TEST) if not (raw / name).exists()]
    if missing:
        raise DataError(
            f"CIFAR-10 is not in {folder}: looked for {', '.join(missing)} in {raw}; "
            f"run with --download, or put the files of {CIFAR10_ARCHIVE.url} (the binary version) there"
        )
    train = _cifar10_split([raw / name for name in _CIFAR10_TRAIN], batch_count)
    test = _cifar10_split([raw / _CIFAR10_TEST], batch_count)
    return Splits(train=train, test=test, classes=10, sample_shape=(3, 32, 32))


def _cifar10_split(paths: list[Path], batch_count: int) -> TensorDataset:
    batches = []
    for path in paths:
        images, labels = read_cifar_batch(path)
        _check_shape(path, "records", (len(labels),), (batch_count,))
        batches.append((images, labels))
    pixels = torch.cat([images for images, _ in batches])
    return TensorDataset(
        _normalised(pixels, CIFAR10_MEAN, CIFAR10_STD), torch.cat([labels for _, labels in batches])
    )


def download_cifar10(
    folder: Path,
    *,
    archive: RemoteFile = CIFAR10_ARCHIVE,
    batch_count: int = 10_000,
    progress: DownloadProgress | None = None,
) -> None:
    """Download and unpack CIFAR-10 unless its six files exist; of several processes one downloads.

    An archive that already exists in the folder is used; one that was downloaded is deleted afterwards.

    Args:
        folder: the data folder.
        archive: the gzipped tar.
        batch_count: records of each of the six files in it.
        progress: called as bytes arrive.

    Raises:
        DataError: the archive could not be downloaded or unpacked.
    """
    raw = folder / _CIFAR10_FOLDER
    names = (*_CIFAR10_TRAIN, _CIFAR10_TEST)
    if all((raw / name).exists() for name in names):
        return
    target = folder / "cifar-10-binary.tar.gz"
    with net.lock_folder(folder):
        if all((raw / name).exists() for name in names):
            return  # another process has downloaded them
        given = target.exists()
        net.download_file(archive, target, progress=progress)
        members = [f"{_CIFAR10_FOLDER}/{name}" for name in names]
        net.extract_members(target, raw, members=members, size_bytes=batch_count * CIFAR_RECORD_BYTES)
        if not given:
            target.unlink(missing_ok=True)


def _check_shape(path: Path, what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise DataError(
            f"{path}: expected {' x '.join(f'{n:,}' for n in expected)} {what}, found "
            f"{' x '.join(f'{n:,}' for n in found)}; delete it and fetch it again"
        )


def _normalised(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Convert pixels, uint8 (N, C, H, W), to (pixel / 255 - mean) / std, float32."""
    shape = (1, -1, 1, 1)
    scaled = pixels.to(torch.float32).div_(255)
    return scaled.sub_(torch.tensor(mean, device="cpu").reshape(shape)).div_(
        torch.tensor(std, device="cpu").reshape(shape)
    )
