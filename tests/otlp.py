"""A trace collector inside the test process: it accepts OTLP over HTTP and keeps all spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.pace import Patience


@dataclass(frozen=True)
class Seen:
    """One span, with the values of its protobuf message."""

    service: str
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[str, ...]  # trace ids
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class Collector:
    """An HTTP server on a free port, started and stopped by `with`."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.asked = 0  # requests received
        self.status = 200  # HTTP status of its answers
        self.answering = threading.Event()  # cleared: requests are accepted but not answered
        self.answering.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked += 1
                collector.answering.wait()
                if collector.status == 200:
                    assert self.path == "/v1/traces"
                    collector._take(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Nothing on stderr."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that did not wait for its answer."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def _take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {one.key: _plain(one.value) for one in group.resource.attributes}
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Seen(
                            service=resource["service.name"],
                            instance=resource["service.instance.id"],
                            name=span.name,
                            kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            links=tuple(link.trace_id.hex() for link in span.links),
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes={one.key: _plain(one.value) for one in span.attributes},
                            failed=span.status.code == Status.STATUS_CODE_ERROR,
                        )
                    )

    def named(self, name: str) -> list[Seen]:
        """Return the spans of this name in the order of their start."""
        return sorted((span for span in list(self.spans) if span.name == name), key=lambda span: span.start_ns)

    def wait_for(self, holds: Callable[[], bool], seconds: float = 200.0) -> None:
        bound = Patience(seconds)
        while not holds():
            assert bound.lasts(), self.spans
            time.sleep(0.02)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answering.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
