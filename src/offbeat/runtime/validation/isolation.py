"""Running user code without effects on the training around it: random numbers, threads, modes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offbeat.runtime.devices.opening import find_used_accelerator

TorchCallHook: TypeAlias = Callable[..., None]
_RANDOM_FUNCTIONS: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli),
        *(torch.multinomial, torch.poisson, Tensor.random_, Tensor.uniform_, Tensor.normal_),
        *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.exponential_, Tensor.cauchy_),
        *(Tensor.geometric_, Tensor.log_normal_),
    }
)
"""Functions that draw from torch's global generator unless they are given another one."""


class IsolatedRandomness(TorchFunctionMode):
    """Inside, in this thread, torch's functions draw from separate generators.

    All threads share the global generators: numbers that a validation draws would be missing where training
    draws next. A DataLoader draws a number each time that it is iterated, even one that does not shuffle.

    Args:
        seed: of these generators, at least 0.
        watch: called with the arguments of every function of torch before the call; may raise.
    """

    def __init__(self, seed: int, watch: TorchCallHook | None = None) -> None:
        super().__init__()
        self._seed, self._watch = seed, watch
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Add a generator to a call that draws random numbers and has none."""
        kwargs = kwargs or {}
        if self._watch is not None:
            self._watch(*args, *kwargs.values())
        if func in _RANDOM_FUNCTIONS and kwargs.get("generator") is None:
            argument_device = next((value.device for value in args if isinstance(value, Tensor)), None)
            device = torch.device(kwargs.get("device") or argument_device or torch.get_default_device())
            kwargs = {**kwargs, "generator": self._generator(device)}
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class GlobalRandomState:
    """The state of the generators that all threads share: torch's, on every device, Python's and NumPy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        accelerator = find_used_accelerator()
        self._on_accelerator = [] if accelerator is None else accelerator.get_rng_state_all()
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def restore(self) -> None:
        """Restore the generators to this state."""
        torch.set_rng_state(self._torch)
        if self._on_accelerator:
            find_used_accelerator().set_rng_state_all(self._on_accelerator)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def changed_generators(self) -> list[str]:
        """Return the names of the generators whose state now differs from this one."""
        current = GlobalRandomState()
        is_same_on_accelerator = all(
            torch.equal(before, after)
            for before, after in zip(self._on_accelerator, current._on_accelerator, strict=False)
        )
        return [
            name
            for name, is_same in {
                "torch's global generator": torch.equal(self._torch, current._torch),
                "torch's global generator on the GPU": is_same_on_accelerator,
                "Python's random module": self._python == current._python,
                "numpy.random": _comparable_numpy_state(self._numpy)
                == _comparable_numpy_state(current._numpy),
            }.items()
            if not is_same
        ]


def _comparable_numpy_state(state: Any) -> tuple[Any, ...]:
    inner = state["state"]
    key = inner["key"].tobytes() if "key" in inner else repr(inner)
    return key, inner.get("pos"), state.get("has_gauss"), state.get("gauss")


@contextmanager
def isolated_evaluation() -> Iterator[list[str]]:
    """Run code in the training thread, and undo its changes to random numbers and settings.

    Yields:
        A list that at the end names the shared state that the code has changed.
    """
    saved, threads = GlobalRandomState(), torch.get_num_threads()
    moved: list[str] = []
    try:
        yield moved
    finally:
        moved += saved.changed_generators()
        saved.restore()
        if torch.get_num_threads() != threads:
            moved.append("torch's number of threads")
            torch.set_num_threads(threads)
