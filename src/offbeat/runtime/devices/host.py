"""The CPU as the device of a model: what was called is done, and all memory is the host's."""

from __future__ import annotations

import time

import numpy as np
import torch


class Host:
    """The CPU; see `Device`."""

    torch_device = torch.device("cpu")
    has_streams = False

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device.empty`: numpy asks for large pages, torch for small ones, which take longer."""
        return torch.from_numpy(np.empty(elements * dtype.itemsize, np.uint8)).view(dtype)

    def pinned_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Device.pinned_zeros`."""
        return torch.zeros(elements, dtype=dtype, device="cpu")

    def pin(self, memory: memoryview) -> bool:
        """See `Device.pin`: nothing to do."""
        return True

    def check_not_capturing(self) -> None:
        """See `Device.check_not_capturing`: nothing is captured."""

    def synchronize(self) -> None:
        """See `Device.synchronize`: nothing to do."""

    def close(self) -> None:
        """See `Device.close`: nothing to do."""

    def record_time(self) -> float:
        """See `Device.record_time`."""
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float | None:
        """See `Device.elapsed_s`."""
        return end - begin
