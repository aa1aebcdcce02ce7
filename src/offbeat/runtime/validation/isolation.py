"""Somebody's code, run so that the training around it does not notice: random numbers, threads, modes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Watch: TypeAlias = Callable[..., None]
_DRAWING: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli),
        *(torch.multinomial, torch.poisson, Tensor.random_, Tensor.uniform_, Tensor.normal_),
        *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.exponential_, Tensor.cauchy_),
        *(Tensor.geometric_, Tensor.log_normal_),
    }
)
"""What draws from torch's global generator unless it is given another one."""


class OwnRandomness(TorchFunctionMode):
    """Inside, in this thread, torch's functions draw from generators of their own.

    The global generators belong to all threads: what a validation draws would be missing where training draws
    next. A DataLoader draws a number each time that it is iterated, even one that does not shuffle.

    Args:
        seed: of these generators, at least 0.
        watch: is shown the arguments of every function of torch before it is called, and may raise.
    """

    def __init__(self, seed: int, watch: Watch | None = None) -> None:
        super().__init__()
        self._seed, self._watch = seed, watch
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Add a generator where a function draws and was given none."""
        kwargs = kwargs or {}
        if self._watch is not None:
            self._watch(*args, *kwargs.values())
        if func in _DRAWING and kwargs.get("generator") is None:
            of = next((value.device for value in args if isinstance(value, Tensor)), None)
            device = torch.device(kwargs.get("device") or of or torch.get_default_device())
            kwargs = {**kwargs, "generator": self._generator(device)}
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class GlobalRandomness:
    """The state of the generators that all threads share: torch's, on every device, Python's and NumPy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def restore(self) -> None:
        """Make the generators what they were."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def moved(self) -> list[str]:
        """Return the names of the generators from which something has been drawn since."""
        now = GlobalRandomness()
        same_cuda = all(
            torch.equal(then, of_now) for then, of_now in zip(self._cuda, now._cuda, strict=False)
        )
        return [
            name
            for name, is_same in {
                "torch's global generator": torch.equal(self._torch, now._torch),
                "torch's global generator on the GPU": same_cuda,
                "Python's random module": self._python == now._python,
                "numpy.random": _of_numpy(self._numpy) == _of_numpy(now._numpy),
            }.items()
            if not is_same
        ]


def _of_numpy(state: Any) -> tuple[Any, ...]:
    inner = state["state"]
    key = inner["key"].tobytes() if "key" in inner else repr(inner)
    return key, inner.get("pos"), state.get("has_gauss"), state.get("gauss")


@contextmanager
def apart() -> Iterator[list[str]]:
    """Runs code in the thread that trains, and takes back what it did to random numbers and settings.

    Yields:
        A list that in the end names what the code has changed of what all threads share.
    """
    before, threads = GlobalRandomness(), torch.get_num_threads()
    moved: list[str] = []
    try:
        yield moved
    finally:
        moved += before.moved()
        before.restore()
        if torch.get_num_threads() != threads:
            moved.append("torch's number of threads")
            torch.set_num_threads(threads)
