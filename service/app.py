"""START HERE: the gateway process.  HTTP in, server-sent events out; asyncio, no torch.

One request walks through `Gateway.answer`:

    api.parse -> text.encode -> api.fit -> admission.decide -> streams.open -> text.decode -> sse.write

Start: tokenizer, Redis, first look at the engines, then the port: nobody is let in before an answer is possible.
Stop (SIGTERM, SIGINT): not ready, port closed, running answers get `drain_s`, the rest end in an error; exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import random
import re
import signal
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from aiohttp import web

from engine.wire import ready, settings
from engine.wire.bus import BusDown, Fleet, GatewaySide
from engine.wire.messages import Finish
from service import admission, api, sse, text
from service.api import Refusal
from service.config import GatewayConfig
from service.streams import Streams
from service.telemetry import Meter, Telemetry
from service.tenants import Tenant, Tenants, TenantsError

log = logging.getLogger("quire.gateway")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parse = Callable[[bytes, GatewayConfig, str, float], api.ValidRequest]

STARTED = web.RequestKey("started", float)
REQUEST_ID = web.RequestKey("request_id", str)
TENANT = web.RequestKey("tenant", Tenant)
# Seconds past its deadline that a client may take to read the end of its answer, before its connection is cut.
LAST_WORDS_S = 30.0


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


class Gateway:
    """The HTTP side.  `streams` must be started before, and stopped after, the app serves."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: text.Tokenizer,
        streams: Streams,
        telemetry: Telemetry,
        tenants: Tenants,
        gateway: str,
    ) -> None:
        self._config, self._tokenizer, self._streams, self._telemetry = config, tokenizer, streams, telemetry
        self._tenants, self._gateway = tenants, gateway
        self._model = config.served_name or text.served_name(config.model)
        self._promises: defaultdict[str, admission.Promises] = defaultdict(admission.Promises)  # by tenant
        self._created = int(time.time())
        self._answering = 0
        self._quiet = asyncio.Event()  # set while nothing is being answered
        self._quiet.set()
        self._draining = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=self._config.max_body_bytes)
        app.on_response_prepare.append(self._headers)
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{id:.+}", self.model),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/ping", self.ping),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
            ]
        )
        return app

    # -- the walk of a request

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, api.parse_completion, "cmpl-")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, api.parse_chat, "chatcmpl-")

    async def answer(self, request: web.Request, parse: Parse, prefix: str) -> web.StreamResponse:
        """The whole gateway in one breath.  Every `Refusal` on the way becomes a response in `_middleware`."""
        if self._draining:
            raise Refusal(503, "shutting_down", "this gateway is shutting down", retry_after_s=1.0)
        config, streams, tenant = self._config, self._streams, request[TENANT]
        timeout_s = api.header_timeout(request.headers.get("X-Request-Timeout"), config)
        valid = parse(await self._read(request), config, self._model, timeout_s)
        valid = msgspec.structs.replace(valid, cache_salt=tenant.salt(valid.cache_salt))
        limits = admission.limits(streams.fleet)
        encoded = await self._tokenizer.encode(valid)
        rooms = api.fit(valid, encoded, limits)
        prompt_tokens = sum(map(len, encoded))
        cost = admission.Cost(
            prompt_tokens=prompt_tokens,
            timeout_s=valid.timeout_s,
            least_tokens=min(map(valid.least_tokens, rooms)),
            tenant=tenant.name,
            weight=tenant.weight,
        )
        now_ms = int(time.time() * 1000)
        request_id = prefix + uuid.uuid4().hex
        deadline_ms = now_ms + int(valid.timeout_s * 1000)
        trace = api.traceparent(request.headers.get("traceparent", ""))
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
        )
        form = api.Format(
            valid,
            request_id=request_id,
            model=self._model,
            created=now_ms // 1000,
            fingerprint=streams.fingerprint,
            prompts=self._tokenizer.prompted(valid, encoded),
            vocabulary=self._tokenizer.table,
        )
        meter = Meter(self._telemetry, request[STARTED])
        self._answering += 1
        self._quiet.clear()
        try:
            async with (
                asyncio.timeout(valid.timeout_s + LAST_WORDS_S),
                streams.open(orders, valid.timeout_s, partial(self._admit, cost)) as opened,
                contextlib.aclosing(text.decode(opened, valid, self._tokenizer)) as pieces,
            ):
                self._telemetry.prompt_tokens.inc(prompt_tokens)
                if valid.stream:
                    return await sse.write(request, pieces, form, meter)
                answered = []
                async for changed in pieces:
                    for piece in changed:
                        meter.note(len(piece.token_ids))
                    answered += changed
                return web.Response(body=form.whole(answered), content_type="application/json")
        except TimeoutError:  # the answer is long over, but its client does not read it
            raise ConnectionResetError("client does not read") from None
        finally:
            self._answering -= 1
            if not self._answering:
                self._quiet.set()
            meter.close()

    def _admit(self, cost: admission.Cost, fleet: Fleet) -> int:
        """admission.decide with this process's clock, dice and memory."""
        promises = self._promises[cost.tenant]
        return admission.decide(cost, fleet, int(time.time() * 1000), self._config, random.random(), promises)

    async def _read(self, request: web.Request) -> bytes:
        """The body.  Raises Refusal(413) before reading a body announced too large, and while reading any other."""
        limit, length = self._config.max_body_bytes, request.content_length
        if length is not None and length > limit:
            raise self._too_large(length)
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large(f"more than {limit}") from None

    def _too_large(self, given: int | str) -> Refusal:
        limit = self._config.max_body_bytes
        return Refusal(
            413, "body_too_large", f"body: at most {limit} bytes, got {given}", param="body", limit=limit, given=given
        )

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

    async def tokenize(self, request: web.Request) -> web.Response:
        asked: api.TokenizeBody = api.decode(await self._read(request), api.TokenizeBody)
        if (asked.prompt is None) == (asked.messages is None):
            raise Refusal(400, "invalid_value", "prompt: give either prompt or messages", param="prompt")
        ids = await self._tokenizer.tokenize(
            asked.prompt,
            [] if asked.messages is None else api.plain_messages(asked.messages),
            special=asked.add_special_tokens,
            generation_prompt=asked.add_generation_prompt,
        )
        return _json({"count": len(ids), "max_model_len": self._card()["max_model_len"], "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        asked: api.DetokenizeBody = api.decode(await self._read(request), api.DetokenizeBody)
        last = len(self._tokenizer.table) - 1
        for token in asked.tokens:
            if not 0 <= token <= last:
                message = f"tokens: token ids are 0 to {last}, got {token}"
                raise Refusal(400, "invalid_token_id", message, param="tokens", limit=last, given=token)
        return _json({"prompt": self._tokenizer.text_of(asked.tokens, skip_special=False)})

    async def health(self, request: web.Request) -> web.Response:
        """Is there anybody to compute?  A gateway without engines answers 503 but goes on."""
        alive = len(self._streams.fleet.engines)
        return _json({"status": "ok" if alive else "no engine is running", "engines": alive}, 200 if alive else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """May a load balancer send work here?  Says why not."""
        why = self._streams.trouble
        engines = self._streams.fleet.engines
        if self._draining:
            why = "this gateway is shutting down"
        elif why is None and not engines:
            why = "no engine is running"
        elif why is None and all(load.draining for load in engines):
            why = "every engine is shutting down"
        return _json({"ready": why is None, "reason": why}, 200 if why is None else 503)

    async def ping(self, request: web.Request) -> web.Response:
        return web.Response(text="pong")

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": _version()})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._telemetry.expose(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

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
        status = 499  # the client left; nginx's number for it
        response: web.StreamResponse
        try:
            self._authenticate(request)
            response = await handler(request)
            status = response.status
        except Refusal as refusal:
            status, response = refusal.status, self._refuse(refusal)
        except web.HTTPException as error:
            status = error.status
            response = self._refuse(
                Refusal(status, f"http_{status}", f"{request.method} {request.path}: {error.reason}")
            )
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError:  # nobody is left to answer; raised on, it would be logged as our failure
            if request.transport is not None:
                request.transport.abort()
            response = web.Response(status=status)
        except Exception:
            log.exception("request %s failed", request[REQUEST_ID])
            status, response = 500, self._refuse(Refusal(500, "internal_error", "the gateway failed on this request"))
        finally:
            self._telemetry.record_request(endpoint, status)
        if self._draining or status == 413:
            response.force_close()
        return response

    def _refuse(self, refusal: Refusal) -> web.Response:
        self._telemetry.record_refusal(refusal.code)
        return web.Response(
            body=refusal.body(), status=refusal.status, headers=refusal.headers(), content_type="application/json"
        )

    def _authenticate(self, request: web.Request) -> None:
        """Bearer keys guard whatever reads or makes text; probes and metrics are open.  Raises Refusal(401)."""
        if request.path.startswith(("/v1/", "/tokenize", "/detokenize")):
            request[TENANT] = self._tenants.of(request.headers.get("Authorization", ""))

    async def _headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if (started := request.get(STARTED)) is not None:
            response.headers["x-request-id"] = request[REQUEST_ID]
            response.headers["openai-processing-ms"] = str(round((time.monotonic() - started) * 1000))

    # -- the end

    def refuse_new(self) -> None:
        self._draining = True

    async def drain(self) -> None:
        """Let running answers finish for `drain_s`, then end the rest in an error each client sees."""
        try:
            await asyncio.wait_for(self._quiet.wait(), self._config.drain_s)
        except TimeoutError:
            log.warning("%d requests did not finish in %g s", self._answering, self._config.drain_s)
            self._streams.end_all(Finish("cancelled"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), 2.0)


def _version() -> str:
    try:
        return importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0+checkout"


class StartError(Exception):
    """The gateway cannot start; one line an operator can act on."""


async def serve(config: GatewayConfig, stopping: asyncio.Event) -> None:
    """Run one gateway until `stopping` is set.  Raises StartError."""
    gateway_id = config.gateway_id or f"{socket.gethostname()}-{os.getpid()}"
    try:
        tenants = Tenants(config.api_keys, config.tenants)
        tokenizer = text.Tokenizer(config.model)
    except (TenantsError, text.ModelError) as error:
        raise StartError(str(error)) from None
    try:
        bus = GatewaySide(config.redis_url, gateway_id, namespace=config.namespace, retain_s=config.retain_s)
        await bus.open()
    except BusDown as error:
        raise StartError(str(error)) from None
    telemetry = Telemetry(gateway_id)
    streams = Streams(bus, config, telemetry)
    await streams.start()
    gateway = Gateway(config, tokenizer, streams, telemetry, tenants, gateway_id)
    # handler_cancellation: without it a queued request whose client left is noticed only at the first write.
    runner = web.AppRunner(
        gateway.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0, lingering_time=2.0
    )
    try:
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port, backlog=1024, reuse_port=True)
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise StartError(f"cannot listen on {config.host}:{config.port}: {reason}") from None
        log.info("gateway %s listens on %s:%d", gateway_id, config.host, site.port)
        ready.tell()
        await stopping.wait()
        gateway.refuse_new()
        await site.stop()
        await gateway.drain()
    finally:
        await runner.cleanup()
        await streams.stop()
        await bus.close()


def main(argv: Sequence[str]) -> None:
    """`python -m service.app [MODEL] [options]`.  Returns after a drain; exits with 2 and one line on stderr when it
    cannot start."""
    prog = "quire gateway"
    config = settings.load(GatewayConfig, argv, os.environ, prog=prog, positional="model")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # transformers would load an installed torch (1.3 s, 200 MB) only to define models nobody uses here.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # and would remark on its absence

    async def run() -> None:
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        await serve(config, stopping)

    try:
        asyncio.run(run())
    except StartError as error:
        settings.stop(prog, str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
