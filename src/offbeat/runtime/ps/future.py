"""`Future`: the result of a request to a parameter server, to wait for or to continue from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from offbeat.errors import OffbeatError
from offbeat.runtime.processes.waiting import SignalSafeEvent

TIMEOUT_S: Final = 60.0
_CHECK_EVERY_S: Final = 0.25

_flag_creation: Final = threading.Lock()

RunUntil = Callable[[Callable[[float], bool], Callable[[], bool], float], bool]
"""As `Endpoint.run_until`."""

NamespaceRange = tuple[str, int, int]
"""A namespace, and its keys `first` to `last` - 1."""


class Future:
    """The future result of a request.

    Args:
        label: description of the request, for errors.
        unanswered: returns which servers have not answered, as text for errors; called with the items of
            `span` if there is one.
        run_until: lets a waiting thread meanwhile process the events that the result depends on.
        span: namespace and keys, `first` to `last` - 1, of a push or a pull.

    Attributes:
        label, span: as given.
        is_sent_push: it is a push that has been sent, or is about to be.
        is_done: there is a result, or an error.
        error: why there is no result.
        callbacks: called in the I/O thread when it is done.
    """

    __slots__ = (
        "_flag",
        "_run_until",
        "_unanswered",
        "_value",
        "callbacks",
        "error",
        "is_done",
        "is_sent_push",
        "label",
        "span",
    )

    def __init__(
        self,
        label: str,
        unanswered: Callable[..., str],
        run_until: RunUntil,
        span: NamespaceRange | None = None,
    ) -> None:
        self.is_done = self.is_sent_push = False
        self.label, self._unanswered, self._run_until, self.span = label, unanswered, run_until, span
        self._value: Any = None
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []
        self._flag: SignalSafeEvent | None = None  # created when a thread blocks

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait until the request is done, and return its result.

        That is the rows for `Namespace.pull` (or as its arguments say), None for a push, and the function's
        value for `when_done`.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds, or the request failed; names the servers
                that have not answered.
        """
        if not self.is_done and not self._wait(timeout_s):
            raise self._overdue(timeout_s)
        if self.error is not None:
            raise self.error
        return self._value

    def result_while(self, check: Callable[[], None], timeout_s: float) -> Any:
        """Wait as `result` does, but call `check` repeatedly meanwhile and stop if it raises."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_done:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._overdue(timeout_s)
            if not self._wait(min(_CHECK_EVERY_S, left_s)):
                check()
        return self.result()

    def _wait(self, timeout_s: float) -> bool:
        return self._run_until(self._wait_on_flag, lambda: self.is_done, timeout_s)

    def _wait_on_flag(self, timeout_s: float) -> bool:
        with _flag_creation:
            if self._flag is None:
                self._flag = SignalSafeEvent()
        if self.is_done:  # perhaps before the flag existed
            return True
        return self._flag.wait(timeout_s)

    def _overdue(self, timeout_s: float) -> OffbeatError:
        return OffbeatError(f"{self.label} is not done after {timeout_s:g} s: {self.describe_waiting()}")

    def describe_waiting(self) -> str:
        """Return which servers have not answered, as text for errors."""
        return self._unanswered() if self.span is None else self._unanswered(*self.span)

    def set_result(self, value: Any, error: Exception | None = None) -> None:
        """Set the result or the error, and call the followers; in the I/O thread."""
        if not self.is_done:
            self._value, self.error = value, error
            self.is_done = True
            if self._flag is not None:
                self._flag.set()
            if self.callbacks:
                followers, self.callbacks = self.callbacks, []
                for follow in followers:
                    follow()
