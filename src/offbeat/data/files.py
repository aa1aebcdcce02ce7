"""Readers of the idx and CIFAR-10 binary formats and of scikit-learn's digits.

Any deviation from the format is a DataError. Readers return tensors; they never download, normalise or write.
Shapes: N samples or records.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import DataError

CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
_CHUNK_BYTES = 1 << 20
_IDX_UINT8 = 0x08
_REFETCH = "delete it and fetch it again"


def read_idx(path: Path, *, dims: int) -> Tensor:
    """Read an idx file of unsigned bytes, gzipped or not (detected by content, not by name).

    Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", the idx format: two zero
    bytes, the type (0x08 unsigned byte), the number of dimensions, one big-endian 32-bit size each, the
    values in C order. Deviation: other types are an error, since MNIST does not use them.

    Args:
        path: the file.
        dims: the number of dimensions it must have (3 for MNIST's images, 1 for its labels).

    Returns:
        uint8 of the shape in the file's header, no size of which is 0.

    Raises:
        DataError: the file is missing, not a file, not idx, of other dimensions, empty, shorter or longer
            than its header says, or its gzip stream is damaged.
    """
    _check_is_file(path)
    try:
        with path.open("rb") as file:
            is_gzipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if is_gzipped else path.open("rb") as stream:
            shape = _idx_shape(path, _read_upto(stream, 4 + 4 * dims), dims)
            size_bytes = math.prod(shape)
            values = _read_upto(stream, size_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)}); {_REFETCH}") from error
    if len(values) != size_bytes:
        sizes = " x ".join(str(n) for n in shape)
        found = f"only {len(values):,}" if len(values) < size_bytes else "more"
        raise DataError(
            f"{path}: expected {size_bytes:,} values after the header ({sizes}), found {found}; {_REFETCH}"
        )
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)


def _idx_shape(path: Path, header: bytearray, dims: int) -> tuple[int, ...]:
    magic = bytes((0, 0, _IDX_UINT8, dims))
    if header[:4] != magic:
        found = header[:4].hex(" ") or "nothing, the file is empty"
        raise DataError(
            f"{path}: expected an idx file of unsigned bytes in {dims} dimensions, which begins with "
            f"{magic.hex(' ')}, found {found}; {_REFETCH}"
        )
    if len(header) < 4 + 4 * dims:
        raise DataError(f"{path}: expected a header of {4 + 4 * dims} bytes, found {len(header)}; {_REFETCH}")
    shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, 4 + 4 * dims, 4))
    if 0 in shape:
        raise DataError(f"{path}: expected at least one value, found sizes {shape} in the header; {_REFETCH}")
    return shape


def read_cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Read a file of the CIFAR-10 binary version.

    Source: Krizhevsky, "The CIFAR-10 dataset", binary version: a record is one label byte (0..9), then 1,024
    red, 1,024 green and 1,024 blue bytes in row-major order.

    Args:
        path: the file, of one or more records.

    Returns:
        Images, uint8 (N, 3, 32, 32), and labels, int64 (N,).

    Raises:
        DataError: the file is missing, not a file, empty, not a whole number of records, or has a label above
            9.
    """
    _check_is_file(path)
    try:
        with path.open("rb") as stream:
            content = bytearray(stream.read())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)}); {_REFETCH}") from error
    if not content or len(content) % CIFAR_RECORD_BYTES:
        raise DataError(
            f"{path}: expected a multiple of {CIFAR_RECORD_BYTES:,} bytes (1 label and 3,072 pixels each), "
            f"found {len(content):,}; {_REFETCH}"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, CIFAR_RECORD_BYTES)
    labels = validate_labels(path, records[:, 0], classes=10)
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def read_digits(path: Path) -> tuple[Tensor, Tensor]:
    """Read the digits in scikit-learn's format: gzipped, comma-separated lines of 64 pixels and a label.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits" (1998), the test set; the pixels
    are from 0 to 16.

    Args:
        path: the file.

    Returns:
        Images, uint8 (N, 1, 8, 8), and labels, int64 (N,).

    Raises:
        DataError: the file is missing, damaged or empty, or a value in it is out of range.
    """
    try:
        with gzip.open(path) as stream:
            lines = np.array([line.split(b",") for line in stream], dtype=np.float64)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)}); install scikit-learn again") from error
    maxima = np.array([16] * 64 + [9])
    if lines.shape[1:] != maxima.shape or not np.isin(lines, range(17)).all() or (lines > maxima).any():
        raise DataError(
            f"{path}: expected lines of 64 pixels, 0 to 16, and a label, 0 to 9; install scikit-learn again"
        )
    records = torch.from_numpy(lines).to(torch.uint8)
    return records[:, :64].reshape(-1, 1, 8, 8), records[:, 64].to(torch.int64)


def validate_labels(path: Path, labels: Tensor, *, classes: int) -> Tensor:
    """Return labels as int64 after checking their range.

    Args:
        path: the file they come from, for the error.
        labels: uint8 (N,).
        classes: the number of classes.

    Returns:
        int64 (N,).

    Raises:
        DataError: a label is not in 0..classes-1; the text names the first one.
    """
    out_of_range = (labels >= classes).nonzero()
    if len(out_of_range):
        first = int(out_of_range[0])
        raise DataError(
            f"{path}: expected labels 0 to {classes - 1}, found {int(labels[first])} in record {first:,}; "
            f"{_REFETCH}"
        )
    return labels.to(torch.int64)


def _check_is_file(path: Path) -> None:
    """Check that a path is a regular file before it is opened: reading from a pipe might never end."""
    if path.is_file():
        return
    found = "a folder" if path.is_dir() else "something else" if path.exists() else "nothing"
    raise DataError(f"{path}: expected a file, found {found}; put the file there or run with --download")


def _read_upto(stream: BinaryIO | gzip.GzipFile, limit_bytes: int) -> bytearray:
    """Read at most `limit_bytes`; memory grows with the bytes read, since the limit may be corrupt."""
    content = bytearray()
    while len(content) < limit_bytes:
        chunk = stream.read(min(_CHUNK_BYTES, limit_bytes - len(content)))
        if not chunk:
            break
        content += chunk
    return content


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
