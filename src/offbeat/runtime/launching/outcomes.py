"""How workers ended, and what one line says about it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerOutcome:
    """How one worker ended.

    Attributes:
        rank: the worker's rank.
        returncode: its exit code; the negative signal number if a signal ended it.
        ended_s: when it ended, in seconds after the launch.
        tail: the last lines of its standard error, oldest first.
        end_reason: why the launcher ended it; None if the launcher did not.
        is_replaced: the same rank was started again.
    """

    rank: int
    returncode: int
    ended_s: float
    tail: tuple[str, ...]
    end_reason: str | None = None
    is_replaced: bool = False

    @property
    def has_succeeded(self) -> bool:
        """Whether the worker ended with exit code 0, and not by the launcher."""
        return self.returncode == 0 and self.end_reason is None

    @property
    def is_lost(self) -> bool:
        """Whether a signal ended the worker, not sent by the launcher."""
        return self.returncode < 0 and self.end_reason is None

    @property
    def end_text(self) -> str:
        """How the worker ended, as the end of a sentence about it."""
        if self.end_reason is not None:
            return f"was ended by the launcher because {self.end_reason}"
        if self.returncode >= 0:
            return f"failed with exit code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        hint = " (unless a person sent it: by the kernel, out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"


def has_job_succeeded(outcomes: Sequence[WorkerOutcome]) -> bool:
    """Whether a job ended well that may go on without workers that are killed.

    The launcher does not know the strategy, and does not have to: where a strategy needs every worker, those
    that are left end with an error when one is killed. So what counts is that some worker ended well and none
    ended with an error of its own; a worker that was killed by a signal, or replaced, does not count.
    """
    ended = [outcome for outcome in outcomes if not (outcome.is_replaced or outcome.is_lost)]
    return bool(ended) and all(outcome.has_succeeded for outcome in ended)


def outcome_summary(outcomes: Sequence[WorkerOutcome]) -> str:
    """Return one line: success, with workers that were lost, or which worker failed first, with its error."""
    if has_job_succeeded(outcomes):
        good = sum(outcome.has_succeeded for outcome in outcomes)
        lost = [
            f"; worker {outcome.rank} {outcome.end_text}{' and was started again' * outcome.is_replaced}"
            for outcome in outcomes
            if not outcome.has_succeeded
        ]
        return f"{good} worker{'s' * (good > 1)} ended well" + "".join(lost)
    failed = [outcome for outcome in outcomes if not (outcome.has_succeeded or outcome.is_replaced)]
    by_itself = [outcome for outcome in failed if outcome.end_reason is None]
    first = min(by_itself, key=lambda outcome: outcome.ended_s) if by_itself else failed[0]
    line = f"worker {first.rank} {first.end_text}"
    error_line = _error_line(first.tail)
    if error_line:
        line += f": {error_line}"
    forced = [str(o.rank) for o in failed if o is not first and o.end_reason is not None]
    if forced:
        ended = f"worker{'s' if len(forced) > 1 else ''} {', '.join(forced)}"
        line += f" (the launcher then had to end {ended})" if by_itself else f" (as {ended})"
    return line


def _error_line(tail: Sequence[str]) -> str:
    """Return the line that names the error: the exception of the last traceback, else the last line."""
    lines = [line.rstrip() for line in tail if line.strip()]
    if not lines:
        return ""
    tracebacks = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[tracebacks[-1] + 1 :] if tracebacks else []
    error_line = next((line for line in after if not line[0].isspace()), lines[-1])
    return error_line.strip()
