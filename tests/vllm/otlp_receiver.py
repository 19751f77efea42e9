"""A collector of spans: takes what OpenTelemetry's exporters send over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span. Ids are hexadecimal; `parent` is empty for the first of a trace."""

    name: str
    trace: str
    span: str
    parent: str
    attributes: dict[str, Any]


class Receiver:
    """The spans received so far."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self._lock = threading.Lock()
        self._spans: list[Received] = []

    def take(self, body: bytes) -> None:
        request: Any = ExportTraceServiceRequest.FromString(body)
        found = [
            Received(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found

    def named(self, name: str) -> list[Received]:
        """Spans of this name."""
        with self._lock:
            return [span for span in self._spans if span.name == name]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver at a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that is overridden
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, name="otlp-receiver", daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
