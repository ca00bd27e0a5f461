"""Middleware of every request: authentication, concurrency limit, errors as JSON, request log.

connection limit -> API key -> handler -> response, or a Refusal as JSON -> Meter.close (metrics, span, log line)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestPayloadError

from quire.service.api import fields
from quire.service.api.anthropic.messages import REQUEST_ID_HEADER, error_body
from quire.service.api.tenants import Tenant, Tenants
from quire.service.common.metrics import Telemetry
from quire.service.common.refusal import Refusal, limit_refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.open_request import HandedOver
from quire.service.delivery.quotas import Quotas
from quire.service.http.connections import PROBES, Connections
from quire.service.http.cors import Cors
from quire.service.http.meter import Meter
from quire.service.http.web_guard import WebGuard

log = logging.getLogger("quire.gateway")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STARTED = web.RequestKey("started", float)
PATH = web.RequestKey("path", str)  # request path without `root_path`
REQUEST_ID = web.RequestKey("request_id", str)
METER = web.RequestKey("meter", Meter)
TENANT = web.RequestKey("tenant", Tenant)
OWNER = web.RequestKey("owner", str)  # digest of the client's API key
MESSAGES = "/v1/messages"  # endpoint whose errors have Anthropic's format
# Prefixes of paths that need an API key.
GUARDED = (
    "/v1/",
    "/tokenize",
    "/detokenize",
    "/invocations",
    "/generative_scoring",
    "/debug/",
    "/engine/",
    "/reset_prefix_cache",
)
CLIENT_LEFT = 499  # nginx's status code for a client that closed the connection
UNREAD_BODY = (408, 413, 415)  # statuses of errors that are sent before the body was read


class Capacity:
    """Number of requests that this gateway answers now, its limit, and whether new requests are taken."""

    def __init__(self, config: GatewayConfig) -> None:
        self._limit = config.max_open
        self.answering = 0
        self.draining = False
        self.idle = asyncio.Event()  # set while no request is being answered
        self.idle.set()

    @contextlib.contextmanager
    def occupy(self) -> Iterator[None]:
        """A context around one request, from before its body is read until its answer is written.

        Raises Refusal(503) when this gateway shuts down or answers `max_open` requests."""
        if self.draining:
            raise Refusal(503, "shutting_down", "this gateway is shutting down", retry_after_s=1.0)
        if self.answering >= self._limit:
            message = f"this gateway answers {self._limit} requests at a time"
            raise limit_refusal("open", message, self._limit, retry_after_s=1.0)
        self.answering += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.answering -= 1
            if not self.answering:
                self.idle.set()


class Middleware:
    """Wraps every handler of the API's port."""

    def __init__(
        self,
        telemetry: Telemetry,
        tenants: Tenants,
        connections: Connections,
        capacity: Capacity,
        quotas: Quotas,
        root_path: str = "",
        cors: Cors | None = None,
        guard: WebGuard | None = None,
    ) -> None:
        """`root_path`: optional prefix of all paths, such as "/llm", without a slash at its end; "": none."""
        self._root, self._cors = root_path, cors or Cors(())
        self._guard = guard or WebGuard(host="", guarded=tenants.guarded)
        self._telemetry, self._tenants, self._quotas = telemetry, tenants, quotas
        self._connections, self._capacity = connections, capacity

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check connection and key, run the handler, and turn its outcome into one response and one log line."""
        request[STARTED] = time.monotonic()
        path = request.path
        request[PATH] = path.removeprefix(self._root) if path.startswith(self._root + "/") else path
        given = request.headers.get("X-Request-Id", "")
        # The client's X-Request-Id is used if it is harmless in a header and a log.
        request[REQUEST_ID] = given if re.fullmatch(r"[\w.:/+=@-]{1,128}", given) else uuid.uuid4().hex
        resource = request.match_info.route.resource
        endpoint = resource.canonical.removeprefix(self._root) if resource is not None else "other"
        request[METER] = Meter(self._telemetry, request[STARTED], request[REQUEST_ID])
        status = CLIENT_LEFT  # recorded if the request is cancelled before it has a response
        connection = self._connections.of(request)
        if connection is not None:
            connection.begin_request()
        try:
            status, response = await self._respond(request, handler)
        finally:
            request[METER].close(endpoint, status)  # read again, since background responses replace the meter
            if connection is not None:
                connection.end_request()
        if self._capacity.draining or status in UNREAD_BODY or (connection is not None and connection.probes_only):
            response.force_close()
        return response

    async def _respond(self, request: web.Request, handler: Handler) -> tuple[int, web.StreamResponse]:
        """Check and handle the request.  Returns the status for log and metrics, and the response."""
        try:
            self._connections.check(request, request[PATH])
            self._guard.check(request)
            if (answer := self._cors.preflight(request)) is not None:  # browsers send preflights without the API key
                return answer.status, answer
            self._authenticate(request)
            response = await handler(request)
            return response.status, response
        except Refusal as refusal:
            return refusal.status, refuse(refusal, request)
        except web.HTTPException as error:
            if error.status == 404 and (location := await self._without_slash(request)):
                return 307, web.Response(status=307, headers={"Location": location})
            code, message = f"http_{error.status}", f"{request.method} {request.path}: {error.reason}"
            refused = refuse(Refusal(error.status, code, message), request)
            if "Allow" in error.headers:
                refused.headers["Allow"] = error.headers["Allow"]
            return error.status, refused
        except ConnectionError as error:  # the client has left; aiohttp would log the error as a server failure
            if request.transport is not None:
                request.transport.abort()
            status = 503 if isinstance(error, HandedOver) else CLIENT_LEFT
            return status, web.Response(status=status)
        except Exception:
            log.exception("request %s failed; its client gets status 500", request[REQUEST_ID])
            failure = Refusal(500, "internal_error", "the gateway failed on this request")
            return failure.status, refuse(failure, request)

    async def _without_slash(self, request: web.Request) -> str:
        """Return the request's URL without the slash at its end; "" if no endpoint has that path."""
        path = request[PATH].rstrip("/")
        if not path or path == request[PATH]:
            return ""
        found = await request.app.router.resolve(request.clone(rel_url=request.rel_url.with_path(path)))
        if found.http_exception is not None:
            return ""
        query = request.rel_url.raw_query_string
        return self._root + path + (f"?{query}" if query else "")

    def _authenticate(self, request: web.Request) -> None:
        """Find the tenant of the request's API key.  Probes and metrics need no key.  Raises Refusal(401)."""
        if request[PATH].startswith(GUARDED) and request[PATH] not in PROBES:
            authorization = request.headers.get("Authorization", "")
            if not authorization and (key := request.headers.get("X-Api-Key")):  # sent by Anthropic's clients
                authorization = f"Bearer {key}"
            request[TENANT] = self._tenants.of(authorization)
            request[OWNER] = self._tenants.owner(authorization)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every response of the API has."""
        if (started := request.get(STARTED)) is not None:
            response.headers["x-request-id"] = request[REQUEST_ID]
            if request[PATH].startswith(MESSAGES):
                response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
            response.headers.update(self._cors.headers(request))
            response.headers["openai-processing-ms"] = str(round((time.monotonic() - started) * 1000))
            if unknown := request[METER].unknown_fields:
                response.headers["x-unknown-fields"] = fields.header(unknown)
            response.headers.update(await self._quotas.headers(request, request.get(TENANT)))


def refuse(refusal: Refusal, request: web.Request) -> web.Response:
    """Record a refusal, and return it as an error response in the format of the endpoint (OpenAI or Anthropic)."""
    request[METER].fail(refusal)
    foreign = request[PATH].startswith(MESSAGES)
    body = error_body(refusal, request[REQUEST_ID]) if foreign else refusal.body()
    return web.Response(body=body, status=refusal.status, headers=refusal.headers(), content_type="application/json")


def drop_broken_http(record: logging.LogRecord) -> bool:
    """Filter for aiohttp's log: replaces the traceback for malformed HTTP or a broken connection by one DEBUG line."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (http_exceptions.HttpProcessingError, RequestPayloadError, ConnectionError)):
        log.debug("malformed or broken HTTP: %s", " ".join(str(error).split()))
        return False
    return True
