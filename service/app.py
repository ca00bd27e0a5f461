"""START HERE: the gateway process, which takes HTTP requests and answers with JSON or server-sent events.

    connections.py -> middleware.py -> handlers.py -> answers.py (one request, step by step)
                                     or -> status.py (probes, models, metrics)

This file holds the routes and the order of start-up and shutdown:

    start   tokenizer, Redis, first reading of the engines, then the port: clients connect once they can be served
    stop    (SIGTERM, SIGINT) /ready fails, port closed; running answers get `drain_s`.  Then streams whose clients can
            resume break off, to continue at another gateway; other answers end in an error; exit status 0
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

import msgspec
from aiohttp import web

from quire.engine.common import histograms, logs, open_files, orphans, readiness, settings
from quire.engine.common.addresses import host_and_port
from quire.engine.common.errors import OperatorError
from quire.engine.common.tracing import Tracing
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Finish, Sampling
from quire.service.api import chat_batch
from quire.service.api.inference_headers import InferenceHeaders, ObjectivesError
from quire.service.api.tenants import Tenants, TenantsError
from quire.service.common import memory
from quire.service.common.heartbeat import Heartbeat
from quire.service.common.included_models import find_model
from quire.service.common.metrics import Telemetry
from quire.service.common.pacing import GC_THRESHOLDS, QuietCollector, StallWatch, new_event_loop
from quire.service.config import GatewayConfig
from quire.service.delivery.adapters import Adapters
from quire.service.delivery.quotas import Quotas
from quire.service.delivery.streams import Streams
from quire.service.delivery.tenants_watch import TenantsWatch
from quire.service.http import openapi
from quire.service.http.connections import Connections
from quire.service.http.cors import Cors
from quire.service.http.engine_pages import EnginePages, EnginePagesError
from quire.service.http.engine_state import EngineStateFeed
from quire.service.http.handlers import Handlers
from quire.service.http.middleware import Capacity, Middleware, drop_broken_http
from quire.service.http.playground import Playground
from quire.service.http.status import Status
from quire.service.http.web_guard import WebGuard, metrics_guard
from quire.service.text import generation_config
from quire.service.text.tokenizer import Tokenizer, served_name, served_names
from quire.service.text.vocabulary import ModelError

log = logging.getLogger("quire.gateway")

# Last seconds of `drain_s`, for the last events of unfinished streams and for closing all connections.
LAST_EVENTS_S, CLOSE_S = 5.0, 1.0
GIL_SWITCH_S = 0.001  # seconds until another thread must release the GIL to the event loop; Python's default: 0.005


class Gateway:
    """The HTTP side of the process.  `streams` must be started before the app serves, and stopped after it."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        streams: Streams,
        telemetry: Telemetry,
        tenants: Tenants,
        gateway: str,
        open_files: int = open_files.MAX,
        defaults: Sampling | None = None,
    ) -> None:
        """`gateway`: id of this process.  `open_files`: its maximum number of open files, connections included.

        `defaults`: default sampling parameters; None: OpenAI's defaults."""
        self._config, self._streams, self._tenants = config, streams, tenants
        model, *aliases = served_names(config)
        adapters = Adapters(config, [model, *aliases], defaults or Sampling(), streams)
        self.connections = Connections(config, open_files)
        self.capacity = Capacity(config)
        quotas = Quotas(streams, telemetry)
        self.handlers = Handlers(
            *(config, tokenizer, streams, self.capacity, quotas, telemetry),
            model=model,
            gateway=gateway,
            adapters=adapters,
        )
        self.engine_state = EngineStateFeed(streams)
        root = served_name(config.model)
        document = partial(openapi.document, config, histograms.build()["version"], guarded=tenants.guarded)
        self._status = Status(
            [model, *aliases],
            root,
            streams,
            telemetry,
            self.capacity,
            document,
            EnginePages(config.engine_metrics),
            adapters=adapters,
            strict=config.strict_fields,
            ready_without_engine=config.ready_without_engine,
        )
        self._middleware = Middleware(
            telemetry,
            tenants,
            self.connections,
            self.capacity,
            quotas,
            config.path_prefix,
            cors := Cors(config.cors_origins),
            WebGuard(
                host="" if config.uds else config.host,  # browsers cannot connect to a Unix socket
                guarded=tenants.guarded,
                allowed_hosts=config.allowed_hosts,
                cors=cors,
            ),
        )

    def runner(self, *, shutdown_timeout: float = CLOSE_S) -> web.AppRunner:
        """Return aiohttp's runner for the API's port."""
        return web.AppRunner(
            self.app(),
            access_log=None,
            handler_cancellation=True,  # so that a queued request is cancelled at once when its client leaves
            shutdown_timeout=shutdown_timeout,
            lingering_time=2.0,
            keepalive_timeout=2 * self._config.keepalive_s,  # never reached: connections.py closes idle connections
            auto_decompress=False,  # bodies.py decompresses, within its limits
        )

    def app(self) -> web.Application:
        """Return the routes of the API's port."""
        app = web.Application(middlewares=[self._middleware.handle])
        app.on_response_prepare.append(self._middleware.add_headers)
        if self._config.responses_ttl_s:
            app.cleanup_ctx.append(self.handlers.background.serve)
        handlers, status = self.handlers, self._status
        answer, responses = handlers.answers.answer, handlers.responses
        routes = [
            web.post("/v1/completions", handlers.completions),
            web.post("/v1/chat/completions", handlers.chat),
            web.post("/v1/chat/completions/batch", partial(answer, parse=chat_batch.parse, prefix="chatcmpl-")),
            web.post("/invocations", partial(answer, parse=chat_batch.parse_invocation, prefix="")),
            web.post("/generative_scoring", handlers.scores),
            web.post("/v1/messages", handlers.messages),
            web.post("/v1/messages/count_tokens", handlers.tokens.count_tokens),
            web.post("/v1/responses", responses.create),
            web.post("/v1/responses/compact", responses.compact),
            web.post("/v1/responses/input_tokens", responses.input_tokens),
            web.get("/v1/responses/{id}", responses.retrieve),
            web.delete("/v1/responses/{id}", responses.delete),
            web.post("/v1/responses/{id}/cancel", responses.cancel),
            web.get("/v1/responses/{id}/input_items", responses.input_items),
            web.get("/v1/streams/{id}", handlers.stream),
            web.delete("/v1/streams/{id}", handlers.cancel),
            web.post("/tokenize", handlers.tokens.tokenize),
            web.post("/detokenize", handlers.tokens.detokenize),
            web.get("/tokenizer_info", handlers.tokens.tokenizer_info),
            web.get("/v1/models", status.models),
            web.get("/v1/models/{id:.+}", status.model),
            web.post("/v1/load_lora_adapter", handlers.adapters.load),
            web.post("/v1/unload_lora_adapter", handlers.adapters.unload),
            web.get("/engine/state", self.engine_state.stream),
            web.post("/reset_prefix_cache", status.reset_prefix_cache),
            web.get("/health", status.health),
            web.get("/v1/health", status.health),
            web.get("/healthz", status.health),
            web.head("/", status.root),
            web.get("/ready", status.ready),
            web.get("/ping", status.ping),
            web.post("/ping", status.ping),
            web.get("/load", status.load),
            web.get("/version", status.version),
            web.get("/openapi.json", status.openapi),
            web.get("/metrics", status.no_metrics if self._tenants.guarded else status.open_metrics),
        ]
        root = self._config.path_prefix
        if self._config.web:
            page = Playground(root)
            routes += page.routes()
            if root:
                app.router.add_get(root, page.slash)
        else:
            routes.append(web.get("/", status.no_page))
        for prefix in dict.fromkeys(["", root]):
            for route in routes:
                app.router.add_route(route.method, prefix + route.path, route.handler)
        return app

    def page(self) -> web.Application:
        """Return the routes of `metrics_port`: metrics and health of this process alone.

        The API's port may be shared by several gateway processes; each has its own metrics port."""
        app = web.Application(middlewares=[metrics_guard(self._config.host, self._config.allowed_hosts)])
        app.add_routes([web.get("/metrics", self._status.metrics), web.get("/health", self._status.health)])
        return app

    # -- shutdown

    def refuse_new(self) -> None:
        """Refuse every new request from now on, and end the streams of /engine/state."""
        self.capacity.draining = True
        self.engine_state.close()

    async def drain(self) -> None:
        """Let running answers finish; then break off the unfinished ones.  Takes at most `drain_s` in total."""
        answers_s, last_events_s = drain_parts(self._config.drain_s)
        log.info(
            "shutting down: %d requests may take %g s more; this process ends within %g s (--drain-s)",
            self.capacity.answering,
            answers_s,
            max(self._config.drain_s, last_events_s + CLOSE_S),
        )
        try:
            await asyncio.wait_for(self.capacity.idle.wait(), answers_s)
        except TimeoutError:
            log.warning(
                "%d requests did not finish in %g s (--drain-s %g): they end now, or continue at another gateway",
                self.capacity.answering,
                answers_s,
                self._config.drain_s,
            )
            await self.break_off(Finish("cancelled"), last_events_s)

    async def break_off(self, finish: Finish, last_events_s: float = LAST_EVENTS_S) -> None:
        """End every answer with `finish`; a resumable answer is left to another gateway instead."""
        self._streams.end_all(finish)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.capacity.idle.wait(), last_events_s)


def drain_parts(drain_s: float) -> tuple[float, float]:
    """Divide `drain_s`: return the seconds for running answers, and the seconds for last events.

    With CLOSE_S they add up to `drain_s`, if `drain_s` is at least 2 s.  Last events get at least 1 s."""
    last_events_s = min(LAST_EVENTS_S, max(1.0, drain_s / 6))
    return max(0.0, drain_s - last_events_s - CLOSE_S), last_events_s


class StartError(OperatorError):
    """The gateway cannot start.  The message is one line with what to do."""

    exit_status = 2


class Unserviceable(OperatorError):
    """The gateway ran and cannot continue, but may work after a restart.  The message is one line."""


async def serve(config: GatewayConfig, stopping: asyncio.Event, started: Callable[[], None] = lambda: None) -> None:
    """Run one gateway until `stopping` is set; `started` is called once it accepts connections.

    Raises StartError, and Unserviceable if its tasks that read from Redis keep failing."""
    gateway_id = config.gateway_id or settings.process_name()
    try:
        tenants = Tenants(config.api_keys, config.tenants, config.admin_keys, config.highest_priority)
        tokenizer = Tokenizer(config.model, literal_content=config.literal_content)
        defaults = generation_config.read(config)
        InferenceHeaders(config)
        EnginePages(config.engine_metrics)
    except (TenantsError, ModelError, ObjectivesError, EnginePagesError) as error:
        raise StartError(str(error)) from None
    watch = TenantsWatch(tenants, config.tenants)
    async with watch.watching(), _streams(config, gateway_id) as (streams, telemetry):
        before, allowed = open_files.raise_limit()
        gateway = Gateway(config, tokenizer, streams, telemetry, tenants, gateway_id, allowed, defaults)
        if chosen := generation_config.describe(defaults):
            log.info("sampling defaults of the model: %s (--generation-config none: OpenAI's)", chosen)
        log.info(
            "accepts %d connections at once; the limit of open files %s %d",
            gateway.connections.limit,
            f"was raised from {before} to" if allowed > before else "is",
            allowed,
        )
        responses = tokenizer.chat.responses
        log.info(
            "response template: %s%s",
            responses.name
            if responses is not None
            else "none is known, so reasoning and tool calls stay in the content",
            "" if tokenizer.chat.knows_tools else "; requests with tools are refused",
        )
        async with _listening(config, gateway, telemetry) as port:
            log.info("gateway %s listens on %s", gateway_id, config.uds or host_and_port(config.host, port))
            started()
            await _first_of(stopping, streams.supervisor.gave_up)
            gateway.refuse_new()
            gateway.connections.stop_listening()
            if streams.supervisor.gave_up.is_set():
                why = streams.trouble
                await gateway.break_off(Finish("error", message="this gateway lost its token stream"))
                raise Unserviceable(f"{why}; ending, to be started again")
            await gateway.drain()


@contextlib.asynccontextmanager
async def _streams(config: GatewayConfig, gateway_id: str) -> AsyncIterator[tuple[Streams, Telemetry]]:
    """A context in which tokens and the engines' state are read.  Raises StartError if Redis cannot be used."""
    try:
        bus = GatewaySide(
            config.redis_url, gateway_id, namespace=config.namespace, retain_s=config.retain_s, grace_s=config.resume_s
        )
        await bus.open()
    except BusDown as error:
        raise StartError(str(error)) from None
    tracing = Tracing.start("quire-gateway", gateway_id, config.otlp_endpoint, config.trace_sample, os.environ)
    telemetry = Telemetry(
        gateway_id,
        model=served_names(config)[0],
        vllm=config.vllm_metrics,
        tracing=tracing,
        trace_prompts=config.trace_prompts,
        target_s=config.ttft_target_s,
        itl_target_s=config.itl_target_s,
    )
    streams = Streams(bus, config, telemetry)
    await streams.start()
    try:
        yield streams, telemetry
    finally:
        await streams.stop()
        await bus.close()
        await asyncio.to_thread(tracing.close)


@contextlib.asynccontextmanager
async def _listening(config: GatewayConfig, gateway: Gateway, telemetry: Telemetry) -> AsyncIterator[int]:
    """A context in which the gateway's ports are open; yields the API's port.  Raises StartError for a used port."""
    runner = gateway.runner()
    page = web.AppRunner(gateway.page(), access_log=None, shutdown_timeout=1.0)
    stalls = StallWatch(telemetry.record_stall)
    collector = QuietCollector(lambda: len(gateway.connections))
    stalls.start()
    collector.start()
    try:
        await runner.setup()
        if config.metrics_port:
            await page.setup()
            with _port_in_use(config.host, config.metrics_port, "--metrics-port"):
                await web.TCPSite(page, config.host, config.metrics_port).start()
        assert runner.server is not None
        if config.uds:
            try:
                await gateway.connections.listen_at(runner.server, config.uds)
            except OSError as error:
                raise StartError(f"cannot listen at {config.uds}: {error.strerror or error}; see --uds") from None
            yield 0
        else:
            with _port_in_use(config.host, config.port, "--port"):
                port = await gateway.connections.listen(runner.server, config.host, config.port)
            yield port
    finally:
        await runner.cleanup()
        await page.cleanup()
        stalls.stop()
        collector.stop()


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


@contextlib.contextmanager
def _port_in_use(host: str, port: int, flag: str) -> Iterator[None]:
    """A context that raises StartError when a port cannot be opened."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(f"cannot listen on {host_and_port(host, port)}: {reason}; see {flag}") from None


def main(argv: Sequence[str]) -> None:
    """Run `python -m quire.service.app [MODEL] [options]`.

    Returns after a drain.  On errors it prints one line and exits: status 2 if it cannot start, 1 if it ran before."""
    prog = "quire gateway"
    config = settings.load(GatewayConfig, argv, os.environ, prog=prog, positional="model", table="gateway")
    logs.start(config.log_format)
    # Without MODEL an engine serves the built-in one, so a gateway does, too.
    config = msgspec.structs.replace(config, model=find_model(config.model or "builtin"))
    orphans.end_with_supervisor(config.drain_s + LAST_EVENTS_S)
    memory.return_large_blocks()
    logging.getLogger("aiohttp.server").addFilter(drop_broken_http)
    # Otherwise transformers would import torch (1.3 s, 200 MB) for model classes that a gateway does not use.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # otherwise transformers would log that torch is missing

    heartbeat = Heartbeat()

    def started() -> None:
        # Objects that exist now stay for good, so the garbage collector need not traverse them again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        sys.setswitchinterval(GIL_SWITCH_S)
        readiness.notify_ready()
        heartbeat.start()

    async def run() -> None:
        stopping = asyncio.Event()
        for number in orphans.drain_signals():
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        try:
            await serve(config, stopping, started)
        finally:
            heartbeat.stop()

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run())
    except OperatorError as error:
        settings.stop(prog, str(error), error.exit_status)


if __name__ == "__main__":
    main(sys.argv[1:])
