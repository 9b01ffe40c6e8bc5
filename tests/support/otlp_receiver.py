"""A small OTLP/HTTP metrics receiver on loopback: decodes, keeps, answers; or never answers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True)
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    message: ExportMetricsServiceRequest

    def resource(self) -> dict[str, str]:
        """Attributes of the one resource."""
        (resource,) = self.message.resource_metrics
        return {a.key: a.value.string_value for a in resource.resource.attributes}

    def names(self) -> set[str]:
        """OpenTelemetry names of the metrics."""
        return {
            metric.name
            for resource in self.message.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


class OtlpReceiver:
    """Use as a context manager; `url` is the base endpoint."""

    def __init__(self, *, hang: bool = False, status: int = 200) -> None:
        self.received: list[Received] = []
        self.arrived = threading.Condition()
        self._release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                message = ExportMetricsServiceRequest.FromString(body)
                with outer.arrived:
                    outer.received.append(Received(self.path, dict(self.headers), message))
                    outer.arrived.notify_all()
                if hang:
                    outer._release.wait(60)
                    return
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        """`http://127.0.0.1:<port>`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def wait(self, requests: int, seconds: float = 30.0) -> list[Received]:
        """The requests, once there are so many."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.received) >= requests, seconds)
            return list(self.received)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
