"""Opens what shows a running job, as the settings say; its failure never ends a training."""

from __future__ import annotations

import socket

from offbeat.errors import describe_os_error
from offbeat.runtime.monitoring.prometheus import CONTENT_TYPE, to_prometheus
from offbeat.runtime.monitoring.publisher import Publisher, print_line
from offbeat.runtime.monitoring.settings import MonitoringSettings
from offbeat.runtime.transport.addresses import listen_at


def listen_for_http(settings: MonitoringSettings) -> socket.socket | None:
    """Listen for HTTP requests, and print where; None where that is not wanted or not possible."""
    if settings.http is None:
        return None
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
    if listener is None:
        return None
    publisher = Publisher({})
    _serve_http(publisher, listener)
    return publisher


def _serve_http(publisher: Publisher, listener: socket.socket) -> None:
    from offbeat.runtime.monitoring.http_server import HttpServer, Page  # most jobs serve nothing

    def metrics() -> str:
        return to_prometheus(publisher.status(), dropped=publisher.dropped)

    def job() -> str:
        return publisher.status().to_json().decode()

    pages = {"/metrics": Page(CONTENT_TYPE, metrics), "/job": Page("application/json", job)}
    HttpServer(listener, pages).start(
        on_failure=lambda error: print_line(f"metrics are not served any longer: {error!r}")
    )
