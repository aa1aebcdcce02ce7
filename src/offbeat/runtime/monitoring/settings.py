"""The settings by which a coordinator shows the running job."""

from __future__ import annotations

import msgspec


class MonitoringSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator shows the running job; by default nowhere.

    Attributes:
        http: host and port at which it answers HTTP requests, `/metrics` and `/job`.
        tensorboard: the folder of TensorBoard's event files.
        spans_every: so many steps apart, steps are exported as spans of OpenTelemetry.
    """

    http: tuple[str, int] | None = None
    tensorboard: str | None = None
    spans_every: int | None = None
