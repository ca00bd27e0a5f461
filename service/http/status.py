"""Endpoints that report the gateway's own state: models, liveness, readiness, version, metrics."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from quire.engine.common import histograms
from quire.service.api.adapters import ServedAdapter
from quire.service.api.api import unknown_model
from quire.service.common.limits import shown
from quire.service.common.metrics import Telemetry
from quire.service.common.refusal import Refusal
from quire.service.delivery.adapters import Adapters
from quire.service.delivery.streams import Streams
from quire.service.http.engine_pages import EnginePages
from quire.service.http.middleware import METER, TENANT, Capacity
from quire.service.http.model_pages import page_of

log = logging.getLogger("quire.gateway")

RESET_PARAMETERS = {  # query parameters of vLLM's endpoint that are refused, and why
    "reset_running_requests": "requests that run are not stopped: they keep their blocks",
    "reset_external": "there is no external cache",
}
NO_REDIS = "Redis cannot be used; the log of this gateway says why"


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _page(text: bytes) -> web.Response:
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


class Status:
    """Handlers of the endpoints that report state and compute nothing."""

    def __init__(
        self,
        names: list[str],
        root: str,
        streams: Streams,
        telemetry: Telemetry,
        capacity: Capacity,
        document: Callable[[], dict[str, Any]],
        engine_pages: EnginePages,
        *,
        adapters: Adapters,
        strict: bool = False,
        ready_without_engine: bool = False,
    ) -> None:
        """`names`: the model's names in the API.  `root`: its hub name, or the name of its directory.

        `document`: returns the OpenAPI document.  `strict`: refuse unknown parameters.
        `ready_without_engine`: see GatewayConfig."""
        self._openapi = b""  # the OpenAPI document as JSON, made at the first request
        self._strict, self._ready_without_engine = strict, ready_without_engine
        self._document, self._engine_pages = document, engine_pages
        self._base, self._root, self._streams = names[0], root, streams
        self._names, self._adapters = names, adapters
        self._telemetry, self._capacity = telemetry, capacity
        self._created = int(time.time())
        self._logged_trouble: str | None = None  # last reason that was logged, so that each is logged once

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models.  A thread writes the answer, because 10,000 adapters take longer than one turn of the loop.

        Raises Refusal for an invalid page."""
        adapters = {one.name: one for one in await self._adapters.listed(request[TENANT])}
        ids, has_more = page_of([*self._names, *adapters], request.query)
        codex = "client_version" in request.query
        body = await asyncio.to_thread(self._list, ids, adapters, has_more=has_more, codex=codex)
        return web.Response(body=body, content_type="application/json")

    def _list(self, ids: list[str], adapters: dict[str, ServedAdapter], *, has_more: bool, codex: bool) -> bytes:
        """Return the list of models as JSON.  `codex`: add the list `models`, which Codex needs."""
        listed: dict[str, object] = {"object": "list", "data": [self._card(name, adapters.get(name)) for name in ids]}
        # Fields of a page in Anthropic's format.
        listed |= {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": has_more}
        return msgspec.json.encode(listed | ({"models": []} if codex else {}))

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}."""
        if (name := request.match_info["id"]) in self._names:
            return _json(self._card(name))
        if (adapter := await self._adapters.find(name, request[TENANT])) is None:
            raise unknown_model(name, self._base)
        return _json(self._card(name, adapter))

    def _card(self, name: str, adapter: ServedAdapter | None = None) -> dict[str, object]:
        """Return a model's description with the fields of OpenAI, vLLM and Anthropic.  No `adapter`: the base model."""
        permission = {
            "id": "modelperm-" + hashlib.sha256(name.encode()).hexdigest()[:32],
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "root": self._root if adapter is None else adapter.path,
            "parent": None if adapter is None else self._base,
            "max_model_len": self._streams.fleet_watch.max_model_len,
            "permission": [permission],
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if an engine is running, else 503; the gateway itself keeps running."""
        alive = len(self._streams.fleet.engines)
        return _json({"status": "ok" if alive else "no engine is running", "engines": alive}, 200 if alive else 503)

    async def root(self, request: web.Request) -> web.Response:
        """HEAD /: 200, since some clients send it first to see whether the server is up."""
        return web.Response()

    async def no_page(self, request: web.Request) -> web.Response:
        """GET / without the playground: 404, although HEAD / is 200."""
        raise web.HTTPNotFound

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: 200 if a load balancer may send requests to this gateway, else 503 with the reason."""
        why = self._redis_trouble()
        engines = self._streams.fleet.engines
        if self._capacity.draining:
            why = "this gateway is shutting down"
        elif why is None and not self._ready_without_engine:
            if not engines:
                why = "no engine is running"
            elif all(load.draining for load in engines):
                why = "every engine is shutting down"
        return _json({"ready": why is None, "reason": why}, 200 if why is None else 503)

    def _redis_trouble(self) -> str | None:
        """Return why Redis cannot be used, without its address.  The log gets the full reason, once."""
        trouble, before = self._streams.trouble, self._logged_trouble
        self._logged_trouble = trouble
        if trouble is not None and trouble != before:
            log.warning("not ready: %s", trouble)
        return None if trouble is None else NO_REDIS

    async def ping(self, request: web.Request) -> web.Response:
        """GET /ping: liveness of this process alone.  If the status is 503, the process must be restarted."""
        if self._streams.supervisor.dead:
            return web.Response(text=self._redis_trouble() or NO_REDIS, status=503)
        return web.Response(text="pong")

    async def load(self, request: web.Request) -> web.Response:
        """GET /load: number of requests that this process is answering, queued requests included."""
        return _json({"server_load": self._capacity.answering})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """POST /reset_prefix_cache: order all engines to empty their prefix caches.

        Raises Refusal: 403 without the admin scope, 400 for vLLM's parameters (RESET_PARAMETERS), 503 without Redis."""
        request[TENANT].require_admin()
        for name in (name for name in RESET_PARAMETERS if request.query.get(name, "false").lower() != "false"):
            raise Refusal(400, "unsupported", f"{name}: {RESET_PARAMETERS[name]}", param=name, limit="false")
        unknown = tuple(sorted(request.query.keys() - RESET_PARAMETERS.keys()))
        if unknown and self._strict:
            name = str(shown(unknown[0]))
            raise Refusal(400, "unknown_field", f"{name}: no such parameter (--strict-fields)", param=name)
        request[METER].record_unknown(unknown)
        told = await self._streams.reset_prefix_caches()
        log.info("ordered %d engines to empty their prefix caches (POST /reset_prefix_cache)", told)
        return _json({"engines": told})

    async def version(self, request: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": histograms.build()["version"]})

    async def openapi(self, request: web.Request) -> web.Response:
        """GET /openapi.json."""
        if not self._openapi:  # 20 ms of work; the document never changes
            self._openapi = await asyncio.to_thread(lambda: msgspec.json.encode(self._document()))
        return web.Response(body=self._openapi, content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics in Prometheus' text format: metrics of this process alone."""
        return _page(await self._telemetry.page())

    async def open_metrics(self, request: web.Request) -> web.Response:
        """GET /metrics on the API's port: this process's metrics and those of the engines in --engine-metrics."""
        return _page(await self._telemetry.page() + await self._engine_pages.families())

    async def no_metrics(self, request: web.Request) -> web.Response:
        """GET /metrics on the API's port of a gateway with API keys: refused, since metrics contain tenants' names."""
        raise Refusal(404, "not_found", "/metrics: a gateway with API keys or tenants serves it on --metrics-port only")
