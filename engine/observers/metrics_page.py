"""The engine's HTTP port for metrics and probes, served by separate threads.

    GET /metrics              Prometheus text format
    GET /health               200 while the step loop turns, else 503 and the reason; for probes
    POST /debug/accounting    run a full check of the block accounting: 200 if it balances, else 500 and the error

The port opens when the model is loaded.  For a probe, a closed port or the status `warming` mean that the engine is
starting.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from quire.engine.common.addresses import host_and_port
from quire.engine.common.errors import OperatorError
from quire.engine.common.web_pages import allows_host, is_foreign, is_loopback
from quire.engine.observers.metrics import Telemetry


class PageError(OperatorError):
    """The metrics port cannot be opened; the text is one line."""

    exit_status = 2


class Page:
    """The HTTP server of one engine."""

    def __init__(self, telemetry: Telemetry, host: str, port: int, check: Callable[[], str] | None = None) -> None:
        """`check`: runs a check of the block accounting, see AccountingChecks.request_check().

        Raises PageError when the port is taken."""
        self._telemetry, self._check, self._host = telemetry, check, host
        self._metrics = make_wsgi_app(telemetry.registry)
        try:  # not prometheus_client's own server, which answers every path with 200
            self._server = _bound(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PageError(
                f"cannot serve metrics on {host_and_port(host, port)}: {reason}; see --metrics-port"
            ) from None
        self._server.set_app(self._answer)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path, host = environ["PATH_INFO"], environ.get("HTTP_HOST")
        if is_loopback(self._host) and not allows_host(host, ()):
            why = "Host: on loopback this page answers to names of this machine only; see --metrics-host"
            return _json(start, "403 Forbidden", {"error": why})
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, start)
            return page
        if path == "/health":
            alive = "" if self._telemetry.alive else "the step loop does not turn"
            ill = "warming" if self._telemetry.warming else alive
            return _json(start, "503 Service Unavailable" if ill else "200 OK", {"status": ill or "ok"})
        if path == "/debug/accounting" and environ["REQUEST_METHOD"] == "POST" and self._check is not None:
            if is_foreign("POST", host, environ.get("HTTP_ORIGIN"), environ.get("HTTP_SEC_FETCH_SITE")):
                return _json(start, "403 Forbidden", {"error": "web pages may not ask for a check"})
            try:
                finding = self._check()
            except TimeoutError:
                return _json(start, "503 Service Unavailable", {"error": "the step loop does not turn"})
            status = "500 Internal Server Error" if finding else "200 OK"
            return _json(start, status, {"balanced": not finding, "finding": finding})
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"GET /metrics, GET /health and POST /debug/accounting are served here\n"]


class _Silent(WSGIRequestHandler):
    """A request handler that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing."""


def _bound(host: str, port: int) -> WSGIServer:
    """Return a server that listens on the address; connections wait until serve_forever() runs."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = infos[0]

    class Server(ThreadingWSGIServer):
        address_family = family

    return Server((str(address[0]), port), _Silent)


def _json(start: StartResponse, status: str, body: dict[str, str | bool]) -> list[bytes]:
    start(status, [("Content-Type", "application/json")])
    return [msgspec.json.encode(body)]
