"""START HERE: the gateway process.  HTTP in, server-sent events out; asyncio, no torch.

One request walks through `Gateway.answer`:

    api.parse -> text.encode -> api.fit -> admission.decide -> streams.open -> text.decode -> sse.write

A client that lost its answer comes back through `Gateway.go_on`: streams.join -> text.decode -> sse.write (see
`resume.py`).

Start: tokenizer, Redis, first look at the engines, then the port: nobody is let in before an answer is possible.
Stop (SIGTERM, SIGINT): not ready, port closed, running answers get `drain_s`.  Then the streams of clients that can
come back break off, to go on at another gateway; the rest end in an error; exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import re
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec
from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestPayloadError

from engine.common import histograms, logs, open_files, readiness, settings
from engine.common.tracing import Tracing
from engine.wire.bus import BusDown, DuplicateRequest, Fleet, GatewaySide, IdempotencyKey
from engine.wire.clock import steady_ms
from engine.wire.messages import Finish
from service import admission, api, memory, resume, sse
from service.api import Refusal
from service.bodies import Bodies, Body, require_json
from service.config import GatewayConfig
from service.connections import Connections
from service.format import REQUEST_ID as ANSWER_ID
from service.format import Format, Position
from service.limits import LIMITS, VALUES, shown
from service.metrics import Meter, Telemetry
from service.pacing import GC_THRESHOLDS, QuietCollector, StallWatch, new_event_loop
from service.streams import Before, HandedOver, OpenRequest, Streams
from service.tenants import Tenant, Tenants, TenantsError
from service.text_stream import decode
from service.tokenizer import ModelError, Tokenizer, served_name

log = logging.getLogger("quire.gateway")

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parse = Callable[[bytes, GatewayConfig, str, float], api.ValidRequest]

STARTED = web.RequestKey("started", float)
REQUEST_ID = web.RequestKey("request_id", str)
METER = web.RequestKey("meter", Meter)
TENANT = web.RequestKey("tenant", Tenant)
OWNER = web.RequestKey("owner", str)  # digest of the key that asks
# Ends that are no answer.
FAILED = ("stream_gone", "stream_not_found", "deadline_exceeded", "request_lost", "engine_error")
TWINS = 3  # requests under one idempotency key that may turn out to have come to nothing before their retry gives up
# Seconds past its deadline that a client may take to read the end of its answer, before its connection is cut.
LAST_WORDS_S = 30.0
LAST_EVENTS_S = 5.0  # for the last events of the streams that `drain_s` has cut off
NO_REDIS = "Redis cannot be used; the log of this gateway says why"
INLINE_BYTES = 64 * 1024  # larger bodies are parsed and checked on a thread: Python changes threads every GIL_SWITCH_S
GIL_SWITCH_S = (
    0.001  # seconds that a thread may keep the event loop waiting for the interpreter; Python's own are 0.005
)
WRITE_BYTES = 256 * 1024  # of a long answer are written before other requests have their turn
AUDIT_PATIENCE_S = 10.0  # an engine looks for orders between two steps


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


class Unanswered(Exception):
    """The request that came first under an idempotency key has no answer, and will have none."""


class Gateway:
    """The HTTP side.  `streams` must be started before, and stopped after, the app serves."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        streams: Streams,
        telemetry: Telemetry,
        tenants: Tenants,
        gateway: str,
        open_files: int = open_files.MOST,
    ) -> None:
        """`open_files`: how many files the process may have open, connections included."""
        self._config, self._tokenizer, self._streams, self._telemetry = config, tokenizer, streams, telemetry
        self._tenants, self._gateway = tenants, gateway
        self._model = config.served_name or served_name(config.model)
        self._created = int(time.time())
        self.connections = Connections(config, open_files)
        self._bodies = Bodies(config)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="parse")
        self._answering = 0
        self._quiet = asyncio.Event()  # set while nothing is being answered
        self._quiet.set()
        self._draining = False
        self._trouble: str | None = None  # as /ready logged it last

    def runner(self, *, shutdown_timeout: float = 1.0) -> web.AppRunner:
        """aiohttp's side of the API's port."""
        return web.AppRunner(
            self.app(),
            access_log=None,
            handler_cancellation=True,  # or a queued request whose client left is noticed only at the first write
            shutdown_timeout=shutdown_timeout,
            lingering_time=2.0,
            keepalive_timeout=2 * self._config.keepalive_s,  # a connection of connections.py ends before
            auto_decompress=False,  # see bodies.py
        )

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware])
        app.on_response_prepare.append(self._headers)
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/streams/{id}", self.stream),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{id:.+}", self.model),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/ping", self.ping),
                web.get("/version", self.version),
                web.get("/metrics", self.no_metrics if self._tenants.guarded else self.metrics),
            ]
        )
        if self._config.debug_endpoints:
            app.add_routes([web.post("/debug/audit", self.audit)])
        return app

    def page(self) -> web.Application:
        """What `metrics_port` serves: this process's own figures, whoever else listens on the main port."""
        app = web.Application()
        app.add_routes([web.get("/metrics", self.metrics), web.get("/health", self.health)])
        return app

    # -- the walk of a request

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, api.parse_completion, "cmpl-", self._most_tokens())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, api.parse_chat, "chatcmpl-")

    async def answer(
        self, request: web.Request, parse: Parse, prefix: str, max_values: int = VALUES
    ) -> web.StreamResponse:
        """Answer a request, or go on with one that was made before: the client says so, or its Idempotency-Key does."""
        with self._place():
            if (last := request.headers.get("Last-Event-ID")) is not None:
                had = Position.parse(last)
                if not had.request_id.startswith(prefix):
                    raise Refusal(404, "stream_not_found", "no answer with this id here", given=had.request_id)
                return await self.go_on(request, had.request_id, had)
            async with self._bodies.read(request, max_values) as body:
                return await self._answer_body(request, body, parse, prefix)

    async def _answer_body(self, request: web.Request, body: Body, parse: Parse, prefix: str) -> web.StreamResponse:
        key = request.headers.get("Idempotency-Key")
        once = await self._step(len(body.data), resume.once, key, request[OWNER], request.path, body.data)
        if once is None:
            return await self.begin(request, body, parse, prefix)
        for _ in range(TWINS):
            twin = await self._streams.twin(once)
            try:
                return await (
                    self._again(request, once, twin) if twin else self.begin(request, body, parse, prefix, once)
                )
            except (Before, Unanswered):
                continue
        raise Refusal(503, "cancelled", "requests with this idempotency key keep being cancelled", retry_after_s=1.0)

    async def begin(
        self, request: web.Request, body: Body, parse: Parse, prefix: str, once: IdempotencyKey | None = None
    ) -> web.StreamResponse:
        """The whole gateway in one breath.  Every `Refusal` on the way becomes a response in `_middleware`.

        Raises Before when another request with the key `once` was quicker."""
        config, streams, tenant = self._config, self._streams, request[TENANT]
        timeout_s = api.header_timeout(request.headers.get("X-Request-Timeout"), config)
        size = len(body.data)
        valid = await self._step(size, parse, body.data, config, self._model, timeout_s)
        valid = msgspec.structs.replace(valid, cache_salt=tenant.salt(valid.cache_salt))
        limits = admission.limits(streams.fleet)
        most = self._most_tokens()
        encoded = await self._tokenizer.encode(valid, size, longest=limits.max_model_len, total=most)
        rooms = await self._step(size, api.fit, valid, encoded, limits)
        rooms = api.bound_logprobs(valid, encoded, rooms, config)
        prompt_tokens = sum(map(len, encoded))
        cost = admission.Cost(
            prompt_tokens=prompt_tokens,
            timeout_s=valid.timeout_s,
            least_tokens=min(map(valid.least_tokens, rooms)),
            tenant=tenant.name,
            weight=tenant.weight,
        )
        now_ms = streams.redis_ms()
        request_id = resume.new_id(prefix, now_ms)
        deadline_ms = now_ms + int(valid.timeout_s * 1000)
        meter = request[METER]
        came = api.traceparent(request.headers.get("traceparent", ""))
        trace = meter.describe(request_id, valid, tenant.name, prompt_tokens, max(rooms), came)
        orders = api.generates(
            valid,
            request_id,
            self._gateway,
            encoded,
            rooms,
            deadline_ms,
            trace,
            tenant.name,
            tenant.weight,
            now_ms,
        )
        record = resume.Record(
            owner=request[OWNER],
            tenant=tenant.name,
            valid=valid,
            prompts=await self._tokenizer.run(size, self._tokenizer.prompted, valid, encoded),
            model=self._model,
            created=now_ms // 1000,
            fingerprint=streams.fingerprint,
            deadline_ms=deadline_ms,
            traceparent=trace,
        )
        form = record.form(request_id, self._tokenizer.table)
        resumable = once is not None or request.headers.get("X-Resumable", "").lower() in ("1", "true")
        kept = await self._step(size, record.encode)
        async with (
            self._deadline(valid.timeout_s),
            streams.open(
                orders,
                valid.timeout_s,
                partial(self._admit, cost),
                record=kept,
                once=once,
                resumable=resumable,
            ) as opened,
        ):
            meter.admit()
            body.release()
            return await self._deliver(request, valid, opened, form)

    async def go_on(self, request: web.Request, request_id: str, had: Position | None) -> web.StreamResponse:
        """Answer on after what the client has `had`; None: from the start.  Raises Refusal."""
        if had is not None and had.done:
            return web.Response(status=204)  # for EventSource: do not ask again
        streams, config = self._streams, self._config
        found = await streams.find(request_id)
        record = resume.read(found, request_id, request[OWNER], config.retain_s, streams.redis_ms())
        valid = record.valid
        form = record.form(request_id, self._tokenizer.table)
        prompts, n = len(record.prompts), valid.n
        had = had or Position.start(request_id, prompts * n)
        if len(had.tokens) != prompts * n:
            raise Refusal(400, "invalid_event_id", f"Last-Event-ID: the answer has {prompts * n} choices")
        counts = [count or 0 for count in had.tokens]
        left_s = max(0.0, (record.deadline_ms - streams.redis_ms()) / 1000)
        async with (
            self._deadline(left_s),
            streams.join(
                [f"{request_id}.{at}" for at in range(prompts)],
                [counts[at * n : (at + 1) * n] for at in range(prompts)],
                record.tenant,
                left_s,
            ) as opened,
        ):
            came = api.traceparent(request.headers.get("traceparent", ""))
            request[METER].resume(request_id, valid, prompts * n, record.tenant, record.traceparent, came)
            form.skip(had, [mailbox.cached_tokens for mailbox in opened.mailboxes])
            for choice in had.ended:
                opened.end(choice)
            try:
                return await self._deliver(request, valid, opened, form)
            except Refusal as refusal:
                if refusal.code == "cancelled":  # its client had left it
                    raise Refusal(410, "stream_gone", "this request was cancelled", given=request_id) from None
                raise

    async def _again(self, request: web.Request, once: IdempotencyKey, twin: DuplicateRequest) -> web.StreamResponse:
        """The answer to an earlier request under the same key.  Raises Unanswered where there will be none; the key is
        free then."""
        if not twin.same_body:
            message = "idempotency-key: it was used for another request, whose path or body differs"
            raise Refusal(409, "idempotency_key_reused", message, param="idempotency-key")
        try:
            return await self.go_on(request, twin.request_id.rpartition(".")[0], None)
        except Refusal as refusal:
            if refusal.code not in FAILED:
                raise
            await self._streams.release(once, twin)
            if refusal.code == "engine_error":  # once more is one more chance to do harm: that is its client's choice
                raise
            raise Unanswered from None

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Around everything a client waits for, its body's arrival included.  Raises Refusal(503) when this gateway
        takes no more."""
        if self._draining:
            raise Refusal(503, "shutting_down", "this gateway is shutting down", retry_after_s=1.0)
        if self._answering >= self._config.max_open:
            message, row = f"this gateway answers {self._config.max_open} requests at a time", LIMITS["open"]
            raise Refusal(row.status, row.code, message, limit=self._config.max_open, retry_after_s=1.0)
        self._answering += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._quiet.set()

    @contextlib.asynccontextmanager
    async def _deadline(self, timeout_s: float) -> AsyncIterator[None]:
        """Around an answer: raises ConnectionResetError when it is long over, but its client does not read it."""
        try:
            async with asyncio.timeout(timeout_s + LAST_WORDS_S):
                yield
        except TimeoutError:
            raise ConnectionResetError("client does not read") from None

    async def _step(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a part of the work on a request whose body has `size` bytes: here when it is short, else on a thread."""
        if size <= INLINE_BYTES:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    def _most_tokens(self) -> int:
        """Tokens that one request may bring: `max_prompt_tokens`, or one whole context where that is longer."""
        longest = min((load.max_model_len for load in self._streams.fleet.engines), default=0)
        return max(self._config.max_prompt_tokens, longest)

    async def _deliver(
        self, request: web.Request, valid: api.ValidRequest, opened: OpenRequest, form: Format
    ) -> web.StreamResponse:
        """Write the answer, as a stream or whole, and note how much of it went out."""
        meter = request[METER]
        async with contextlib.aclosing(decode(opened, valid, self._tokenizer)) as pieces:
            if valid.stream:
                return await sse.write(request, pieces, form, meter, opened.sent)
            answered = []
            try:
                async for changed in pieces:
                    for piece in changed:
                        meter.note(piece)
                    answered += changed
            except HandedOver:
                raise Refusal(503, "shutting_down", "ask again with the same key", retry_after_s=1.0) from None
        response = await self._write(request, await form.whole(answered))
        opened.sent(form.tokens)
        return response

    async def _write(self, request: web.Request, parts: list[bytes]) -> web.StreamResponse:
        """Send a whole JSON answer part by part, so that a long one neither stalls the loop nor is copied at once."""
        response = web.StreamResponse()
        response.content_type, response.content_length = "application/json", sum(map(len, parts))
        if self._draining:
            response.force_close()
        await response.prepare(request)
        for part in parts:
            for at in range(0, len(part), WRITE_BYTES):
                await response.write(part[at : at + WRITE_BYTES])
                await asyncio.sleep(0)
        await response.write_eof()
        return response

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/{id}: an answer from its start, or on from an event; for EventSource, which can only GET.

        `id` is a request's or an event's, but a Last-Event-ID is newer."""
        given = request.match_info["id"]
        asked = None if re.fullmatch(ANSWER_ID, given) else Position.parse(given)
        last = request.headers.get("Last-Event-ID")
        had = Position.parse(last) if last else asked
        request_id = asked.request_id if asked is not None else given
        if had is not None and had.request_id != request_id:
            raise Refusal(400, "invalid_event_id", "Last-Event-ID: it is of another answer", param="last-event-id")
        with self._place():
            return await self.go_on(request, request_id, had)

    def _admit(self, cost: admission.Cost, fleet: Fleet, returning: bool) -> int:
        """admission.decide with this process's clock and dice."""
        return admission.decide(cost, fleet, steady_ms(), self._config, random.random(), returning=returning)

    # -- the small endpoints

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != self._model:
            message = f"model: this server serves '{self._model}', not the one asked for"
            raise Refusal(404, "model_not_found", message, param="model")
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        engines = self._streams.fleet.engines
        longest = min((load.max_model_len for load in engines), default=None)
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "max_model_len": longest,
        }

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        config = self._config
        with self._place():
            async with self._bodies.read(request) as body:
                size = len(body.data)
                asked: api.TokenizeBody = await self._step(size, api.decode, body.data, api.TokenizeBody, config)
            if (asked.prompt is None) == (asked.messages is None):
                raise Refusal(400, "invalid_value", "prompt: give either prompt or messages", param="prompt")
            messages = asked.messages
            ids = await self._tokenizer.tokenize(
                asked.prompt,
                [] if messages is None else await self._step(size, api.plain_messages, messages, config),
                special=asked.add_special_tokens,
                generation_prompt=asked.add_generation_prompt,
                size=size,
                total=self._most_tokens(),
            )
            found = {"count": len(ids), "max_model_len": self._card()["max_model_len"], "tokens": ids}
            encoded = await self._step(size, msgspec.json.encode, found)
            async with self._deadline(config.default_timeout_s):
                return await self._write(request, [encoded])

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        config, most = self._config, self._most_tokens()
        with self._place():
            async with self._bodies.read(request, most) as body:
                size = len(body.data)
                asked: api.DetokenizeBody = await self._step(size, api.decode, body.data, api.DetokenizeBody, config)
            text = await self._tokenizer.run(size, self._text, asked.tokens, most)
            encoded = await self._step(size, msgspec.json.encode, {"prompt": text})
            async with self._deadline(config.default_timeout_s):
                return await self._write(request, [encoded])

    def _text(self, tokens: list[int], most: int) -> str:
        """The text of token ids.  Raises Refusal for more than `most`, and for ids that the tokenizer does not know."""
        if len(tokens) > most:
            raise api.too_many_tokens("tokens", most, len(tokens))
        last = len(self._tokenizer.table) - 1
        if tokens and (min(tokens) < 0 or max(tokens) > last):
            token = next(token for token in tokens if not 0 <= token <= last)
            message = f"tokens: token ids are 0 to {last}, got {shown(token)}"
            raise Refusal(400, "invalid_token_id", message, param="tokens", limit=last, given=token)
        return self._tokenizer.text_of(tokens, skip_special=False)

    async def health(self, request: web.Request) -> web.Response:
        """Is there anybody to compute?  A gateway without engines answers 503 but goes on."""
        alive = len(self._streams.fleet.engines)
        return _json({"status": "ok" if alive else "no engine is running", "engines": alive}, 200 if alive else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """May a load balancer send work here?  Says why not."""
        why = self._redis_trouble()
        engines = self._streams.fleet.engines
        if self._draining:
            why = "this gateway is shutting down"
        elif why is None and not engines:
            why = "no engine is running"
        elif why is None and all(load.draining for load in engines):
            why = "every engine is shutting down"
        return _json({"ready": why is None, "reason": why}, 200 if why is None else 503)

    def _redis_trouble(self) -> str | None:
        """Why Redis cannot be used, without its address; that goes to the log, once for each reason."""
        trouble, before = self._streams.trouble, self._trouble
        self._trouble = trouble
        if trouble is not None and trouble != before:
            log.warning("not ready: %s", trouble)
        return None if trouble is None else NO_REDIS

    async def ping(self, request: web.Request) -> web.Response:
        """Does this process work, whatever the others do?  One that does not must be restarted."""
        if self._streams.supervisor.dead:
            return web.Response(text=self._redis_trouble() or NO_REDIS, status=503)
        return web.Response(text="pong")

    async def audit(self, request: web.Request) -> web.Response:
        """Order a full audit of every engine's KV blocks: 200 where all balance, 500 where one doesn't, 503 where one
        (or everyone) is silent."""
        require_json(request)
        found = await self._streams.audit(AUDIT_PATIENCE_S)
        silent = not found or None in found.values()
        return _json(
            {"balanced": not silent and not any(found.values()), "engines": found},
            500 if any(found.values()) else 503 if silent else 200,
        )

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": histograms.build()["version"]})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._telemetry.expose(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def no_metrics(self, request: web.Request) -> web.Response:
        """Metrics name tenants, and this port is the clients'."""
        raise Refusal(404, "not_found", "/metrics: a gateway with API keys or tenants serves it on --metrics-port only")

    # -- around every request

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and turn whatever happens into one answer and one line of the metrics."""
        request[STARTED] = time.monotonic()
        given = request.headers.get("X-Request-Id", "")
        # A client's own id is repeated if it is harmless in a header and a log.
        request[REQUEST_ID] = given if re.fullmatch(r"[\w.:/+=@-]{1,128}", given) else uuid.uuid4().hex
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "other"
        meter = request[METER] = Meter(self._telemetry, request[STARTED], request[REQUEST_ID])
        status = 499  # the client left; nginx's number for it
        response: web.StreamResponse
        connection = self.connections.of(request)
        if connection is not None:
            connection.begin()
        try:
            self.connections.check(request)
            self._authenticate(request)
            response = await handler(request)
            status = response.status
        except Refusal as refusal:
            status, response = refusal.status, self._refuse(refusal, meter)
        except web.HTTPException as error:
            status = error.status
            response = self._refuse(
                Refusal(status, f"http_{status}", f"{request.method} {request.path}: {error.reason}"), meter
            )
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError as error:  # nobody is left to answer; raised on, it would be logged as our failure
            if isinstance(error, HandedOver):
                status = 503
            if request.transport is not None:
                request.transport.abort()
            response = web.Response(status=status)
        except Exception:
            log.exception("request %s failed", request[REQUEST_ID])
            failure = Refusal(500, "internal_error", "the gateway failed on this request")
            status, response = failure.status, self._refuse(failure, meter)
        finally:
            meter.close(endpoint, status)
            if connection is not None:
                connection.end()
        unread = status in (408, 413, 415)  # a body that was not read
        if self._draining or unread or (connection is not None and connection.probes_only):
            response.force_close()
        return response

    def _refuse(self, refusal: Refusal, meter: Meter) -> web.Response:
        meter.fail(refusal)
        return web.Response(
            body=refusal.body(), status=refusal.status, headers=refusal.headers(), content_type="application/json"
        )

    def _authenticate(self, request: web.Request) -> None:
        """Bearer keys guard whatever reads or makes text or work; probes and metrics are open.  Raises Refusal(401)."""
        if request.path.startswith(("/v1/", "/tokenize", "/detokenize", "/debug/")):
            authorization = request.headers.get("Authorization", "")
            request[TENANT] = self._tenants.of(authorization)
            request[OWNER] = self._tenants.owner(authorization)

    async def _headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if (started := request.get(STARTED)) is not None:
            response.headers["x-request-id"] = request[REQUEST_ID]
            response.headers["openai-processing-ms"] = str(round((time.monotonic() - started) * 1000))

    # -- the end

    def refuse_new(self) -> None:
        self._draining = True

    async def drain(self) -> None:
        """Let running answers finish for `drain_s`; then the rest goes on elsewhere, or ends in an error."""
        try:
            await asyncio.wait_for(self._quiet.wait(), self._config.drain_s)
        except TimeoutError:
            log.warning("%d requests did not finish in %g s", self._answering, self._config.drain_s)
            await self.break_off(Finish("cancelled"))

    async def break_off(self, finish: Finish) -> None:
        """End every answer with `finish`, but hand those over whose clients may come back."""
        self._streams.end_all(finish)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), LAST_EVENTS_S)


class StartError(Exception):
    """The gateway cannot start; one line an operator can act on."""


class Unserviceable(Exception):
    """The gateway ran and cannot go on, which a restart may mend; one line."""


async def serve(config: GatewayConfig, stopping: asyncio.Event, started: Callable[[], None] = lambda: None) -> None:
    """Run one gateway until `stopping` is set; `started` is called once it answers.  Raises StartError, and
    Unserviceable when it cannot read tokens or engines any more."""
    gateway_id = config.gateway_id or settings.process_name()
    try:
        tenants = Tenants(config.api_keys, config.tenants)
        tokenizer = Tokenizer(config.model, literal_content=config.literal_content)
    except (TenantsError, ModelError) as error:
        raise StartError(str(error)) from None
    try:
        bus = GatewaySide(
            config.redis_url,
            gateway_id,
            namespace=config.namespace,
            retain_s=config.retain_s,
            grace_s=config.resume_s,
        )
        await bus.open()
    except BusDown as error:
        raise StartError(str(error)) from None
    tracing = Tracing.start("quire-gateway", gateway_id, config.otlp_endpoint, config.trace_sample, os.environ)
    telemetry = Telemetry(
        gateway_id,
        model=config.served_name or served_name(config.model),
        vllm=config.vllm_metrics,
        tracing=tracing,
        trace_prompts=config.trace_prompts,
    )
    streams = Streams(bus, config, telemetry)
    stalls = StallWatch(telemetry.record_stall)
    await streams.start()
    stalls.start()
    before, allowed = open_files.raise_limit()
    gateway = Gateway(config, tokenizer, streams, telemetry, tenants, gateway_id, allowed)
    collector = QuietCollector(lambda: len(gateway.connections))
    collector.start()
    log.info(
        "open files: soft limit %s %d, which allows %d connections",
        f"raised from {before} to" if allowed > before else "is",
        allowed,
        gateway.connections.limit,
    )
    runner = gateway.runner()
    page = web.AppRunner(gateway.page(), access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        if config.metrics_port:
            await page.setup()
            with _taken(config.host, config.metrics_port, "--metrics-port"):
                await web.TCPSite(page, config.host, config.metrics_port).start()
        assert runner.server is not None
        with _taken(config.host, config.port, "--port"):
            port = await gateway.connections.listen(runner.server, config.host, config.port)
        log.info("gateway %s listens on %s:%d", gateway_id, config.host, port)
        started()
        await _first_of(stopping, streams.supervisor.gave_up)
        gateway.refuse_new()
        gateway.connections.stop_listening()
        if streams.supervisor.gave_up.is_set():
            why = streams.trouble
            await gateway.break_off(Finish("error", message="this gateway lost its token stream"))
            raise Unserviceable(f"{why}; ending, to be started again")
        await gateway.drain()
    finally:
        await runner.cleanup()
        await page.cleanup()
        stalls.stop()
        collector.stop()
        await streams.stop()
        await bus.close()
        await asyncio.to_thread(tracing.close)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _without_traceback(record: logging.LogRecord) -> bool:
    """A filter for aiohttp's log: a client that sends malformed HTTP, or leaves before aiohttp has answered by itself,
    is one line at level DEBUG, not a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (http_exceptions.HttpProcessingError, RequestPayloadError, ConnectionError)):
        log.debug("malformed or broken HTTP: %s", " ".join(str(error).split()))
        return False
    return True


@contextlib.contextmanager
def _taken(host: str, port: int, flag: str) -> Iterator[None]:
    """Raises StartError when a port cannot be had."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(f"cannot listen on {host}:{port}: {reason}; see {flag}") from None


def main(argv: Sequence[str]) -> None:
    """`python -m service.app [MODEL] [options]`.  Returns after a drain; exits with one line on stderr, and 2 when it
    cannot start, 1 when it cannot go on."""
    prog = "quire gateway"
    config = settings.load(GatewayConfig, argv, os.environ, prog=prog, positional="model", table="gateway")
    logs.start(config.log_format)
    memory.return_large_blocks()
    logging.getLogger("aiohttp.server").addFilter(_without_traceback)
    # transformers would load an installed torch (1.3 s, 200 MB) only to define models nobody uses here.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # and would remark on its absence

    def started() -> None:
        # What is loaded stays: the collector need not walk through it again and again while tokens wait.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        sys.setswitchinterval(GIL_SWITCH_S)
        readiness.notify_ready()

    async def run() -> None:
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        await serve(config, stopping, started)

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run())
    except StartError as error:
        settings.stop(prog, str(error))
    except Unserviceable as error:
        settings.stop(prog, str(error), 1)


if __name__ == "__main__":
    main(sys.argv[1:])
