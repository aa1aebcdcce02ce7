"""Dense tensors on a parameter server: a namespace whose keys are the numbers of named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.tensors import Tensor, TensorTable
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.requests import InflightRequests


class PsTensors:
    """Named tensors of a parameter server; `PS.tensors` creates it.

    Attributes:
        namespace: that holds them.
        offsets: the range of keys of each tensor.
    """

    def __init__(self, requests: InflightRequests, namespace: Namespace, offsets: TensorTable) -> None:
        self._requests, self.namespace, self.offsets = requests, namespace, offsets

    def push(self, tensors: Mapping[str, Tensor], *, after: Iterable[Future] = ()) -> Future:
        """Send tensors, or gradients of them, by name; those that are left out do not change.

        Args:
            tensors: by name; names, shapes and dtype as in the namespace. They must not change until the push
                is done.
            after: requests that have to be done before this one is sent.

        Raises:
            ValueError: no tensor, or one that the namespace does not have.
            OffbeatError: this client is disconnected from the parameter server.
        """
        ranges = self._ranges(tensors)
        contents = [self.offsets.gather(tensors, first, last) for first, last in ranges]
        before = list(after)
        pushes = [
            self.namespace.push(content, first=first, after=before)
            for content, (first, _) in zip(contents, ranges, strict=True)
        ]
        return self._requests.when_done(pushes)

    def pull(self, tensors: Mapping[str, Tensor], *, after: Iterable[Future] = ()) -> Future:
        """Fetch tensors by name into the given ones, which may be partly written before the pull is done.

        The future's result is None.

        Args:
            tensors: by name; names, shapes and dtype as in the namespace.
            after: requests that have to be done before this one is sent.

        Raises:
            ValueError: no tensor, or one that the namespace does not have.
            OffbeatError: this client is disconnected from the parameter server.
        """
        ranges = self._ranges(tensors)
        for first, last in ranges:
            self.offsets.gather(tensors, first, last)  # raises for a mismatch before anything is requested
        before = list(after)
        pulls = [self.namespace.pull(first=first, last=last, after=before) for first, last in ranges]

        def write() -> None:
            for (first, _), pull in zip(ranges, pulls, strict=True):
                self.offsets.scatter(Entries(first, pull.result()), tensors)

        return self._requests.when_done(pulls, write)

    def _ranges(self, tensors: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return the ranges of keys of these tensors, ascending; adjacent ranges are merged."""
        found: list[tuple[int, int]] = []
        for first, last in sorted(self.offsets.key_range_of(name) for name in tensors):
            if found and found[-1][1] == first:
                found[-1] = (found[-1][0], last)
            elif first < last:
                found.append((first, last))
        if not found:
            raise ValueError("expected at least one tensor with numbers in it, got none")
        return found
