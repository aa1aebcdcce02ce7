"""Sets of images that take time to load: from memory, from cold files, or with expensive preprocessing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.loaders import Samples
from offbeat.data.sets import MNIST_MEAN, MNIST_STD

Images: TypeAlias = "np.ndarray[Any, Any]"
_BLUR: Final = np.array([0.25, 0.5, 0.25], dtype=np.float32)


def normalised(image: Images) -> Images:
    """Return a grey image of bytes (H, W) as float32 (1, H, W), normalised as MNIST is."""
    scaled: Images = (image.astype(np.float32) / 255.0 - MNIST_MEAN[0]) / MNIST_STD[0]
    return scaled[None]


class InMemory:
    """Images in memory.

    Args:
        images: bytes (N, H, W).
        labels: (N,).
    """

    def __init__(self, images: Images, labels: Images) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Images, int]:
        return normalised(self.images[position]), int(self.labels[position])


class Repeated(InMemory):
    """The same images, repeated up to a given total size; held in memory once."""

    def __init__(self, images: Images, labels: Images, size_bytes: int) -> None:
        super().__init__(images, labels)
        self._count = max(len(labels), size_bytes // int(images[0].nbytes))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> tuple[Images, int]:
        if position >= self._count:
            raise IndexError(position)
        return super().__getitem__(position % len(self.labels))


class Decoded(InMemory):
    """Images that are blurred on access, in Python and NumPy."""

    def __getitem__(self, position: int) -> tuple[Images, int]:
        image = self.images[position].astype(np.float32)
        rows = np.stack([np.convolve(row, _BLUR, mode="same") for row in image])
        both = np.stack([np.convolve(column, _BLUR, mode="same") for column in rows.T]).T
        return normalised(both), int(self.labels[position])


class ColdFiles(InMemory):
    """Images in one file each, read from the disk on every access: the kernel drops its cache on request.

    Args:
        images, labels: to write.
        folder: must be on a disk, not in memory.
    """

    def __init__(self, images: Images, labels: Images, folder: Path) -> None:
        super().__init__(images[:0], labels)
        self._shape, self._folder = images.shape[1:], folder
        folder.mkdir(parents=True, exist_ok=True)
        for position, image in enumerate(images):
            with open(folder / str(position), "wb") as file:
                file.write(image.tobytes())
        os.sync()  # the kernel can only drop what is on the disk
        for position in range(len(labels)):
            self._read(position)

    def __getitem__(self, position: int) -> tuple[Images, int]:
        image = np.frombuffer(self._read(position), dtype=np.uint8).reshape(self._shape)
        return normalised(image), int(self.labels[position])

    def _read(self, position: int) -> bytes:
        file = os.open(self._folder / str(position), os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            data = os.read(file, self._shape[0] * self._shape[1])
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
        return data


LOADS: Final[dict[str, str]] = {
    "memory": "images in memory",
    "files": "one file per image, read from the disk on every access: preprocessing waits",
    "decode": "images that are blurred on access: preprocessing computes in Python",
    "repeated": "images in memory, MNIST repeated to a given size",
}
"""The available loads: name -> description."""


def inputs_of(load: str, images: Images, labels: Images, *, folder: Path, size_bytes: int) -> Samples:
    """Make a load of LOADS from images and labels.

    Args:
        load: a key of LOADS.
        images, labels: the samples.
        folder: for files.
        size_bytes: of "repeated".
    """
    makes: dict[str, Callable[[], Samples]] = {
        "memory": lambda: InMemory(images, labels),
        "files": lambda: ColdFiles(images, labels, folder),
        "decode": lambda: Decoded(images, labels),
        "repeated": lambda: Repeated(images, labels, size_bytes),
    }
    return makes[load]()
