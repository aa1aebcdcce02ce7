"""Opens what shows a running job, as the settings say; its failure never ends a training.

What needs the job's state is imported when it is opened, which takes some 15 ms: most jobs are not shown.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.monitoring.settings import MonitoringSettings
from offbeat.runtime.transport.addresses import listen_at

if TYPE_CHECKING:
    from offbeat.runtime.monitoring.publisher import Publisher, Sink

_TENSORBOARD: Final = "tensorboard"
_OPENTELEMETRY: Final = "opentelemetry.exporter.otlp.proto.http"


def check_extras(settings: MonitoringSettings) -> None:
    """Check that the packages that the settings need are installed.

    Raises:
        OffbeatError: one is not.
    """
    if settings.tensorboard is not None and not _is_installed(_TENSORBOARD):
        raise OffbeatError('TensorBoard\'s event files need: pip install "offbeat[tensorboard]"')
    if settings.spans_every is not None and not _is_installed(_OPENTELEMETRY):
        raise OffbeatError('spans of OpenTelemetry need: pip install "offbeat[otel]"')


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parent is
        return False


def listen_for_http(settings: MonitoringSettings) -> socket.socket | None:
    """Listen for HTTP requests, and print where; None where that is not wanted or not possible."""
    if settings.http is None:
        return None
    from offbeat.runtime.monitoring.publisher import print_line

    host, port = settings.http
    try:
        listener, address = listen_at(host, port)
    except OSError as error:
        print_line(f"no metrics are served: cannot listen on {host}:{port}: {describe_os_error(error)}")
        return None
    print_line(f"metrics of the job: http://{address.removeprefix('tcp://')}/metrics")
    return listener


def open_publisher(settings: MonitoringSettings, listener: socket.socket | None) -> Publisher | None:
    """Make the publisher of a job, which the caller starts; None where nothing shows the job.

    Args:
        settings: where the job is shown.
        listener: from `listen_for_http`.
    """
    sinks = _sinks(settings)
    if listener is None and not sinks:
        return None
    from offbeat.runtime.monitoring.publisher import Publisher

    publisher = Publisher(sinks)
    if listener is not None:
        _serve_http(publisher, listener)
    return publisher


def _sinks(settings: MonitoringSettings) -> dict[str, Callable[[], Sink]]:
    """Return what makes each sink; their packages are imported then."""
    folder, every = settings.tensorboard, settings.spans_every
    sinks: dict[str, Callable[[], Sink]] = {}
    if folder is not None:
        from offbeat.runtime.monitoring.tensorboard import TensorBoardSink

        sinks["TensorBoard"] = lambda: TensorBoardSink(folder)
    if every is not None:
        from offbeat.runtime.monitoring.spans import open_spans

        sinks["OpenTelemetry"] = lambda: open_spans(every)
    return sinks


def _serve_http(publisher: Publisher, listener: socket.socket) -> None:
    from offbeat.runtime.monitoring.http_server import HttpServer, Page
    from offbeat.runtime.monitoring.prometheus import CONTENT_TYPE, to_prometheus
    from offbeat.runtime.monitoring.publisher import print_line

    def metrics() -> str:
        return to_prometheus(publisher.status(), dropped=publisher.dropped)

    def job() -> str:
        return publisher.status().to_json().decode()

    pages = {"/metrics": Page(CONTENT_TYPE, metrics), "/job": Page("application/json", job)}
    HttpServer(listener, pages).start(
        on_failure=lambda error: print_line(f"metrics are not served any longer: {error!r}")
    )
