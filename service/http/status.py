"""A gateway's own state as pages: models, liveness, readiness, version, metrics."""

from __future__ import annotations

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

log = logging.getLogger("quire.gateway")

RESET_PARAMETERS = {  # parameters of vLLM's endpoint
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
        """`names`: of the model for clients.  `root`: its hub name, or the name of its directory.

        `document`: returns the OpenAPI document.  `strict`: unknown parameters are refused.
        `ready_without_engine`: see GatewayConfig."""
        self._strict, self._ready_without_engine = strict, ready_without_engine
        self._document, self._engine_pages = document, engine_pages
        self._base, self._root, self._streams = names[0], root, streams
        self._names, self._adapters = names, adapters
        self._telemetry, self._capacity = telemetry, capacity
        self._created = int(time.time())
        self._logged_trouble: str | None = None  # last reason logged, so that each is logged once

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models.  Codex, which sends its version, wants a list of its own form in addition to OpenAI's."""
        cards = [self._card(name) for name in self._names]
        cards += [self._card(one.name, one) for one in await self._adapters.listed(request[TENANT])]
        listed: dict[str, object] = {"object": "list", "data": cards}
        listed |= {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}  # a page, as at Anthropic
        return _json(listed | ({"models": []} if "client_version" in request.query else {}))

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}."""
        if (name := request.match_info["id"]) in self._names:
            return _json(self._card(name))
        if (adapter := await self._adapters.find(name, request[TENANT])) is None:
            raise unknown_model(name, self._base)
        return _json(self._card(name, adapter))

    def _card(self, name: str, adapter: ServedAdapter | None = None) -> dict[str, object]:
        """Return a model as OpenAI, vLLM and Anthropic describe it.  `adapter`: None: the base model."""
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
        """GET /health: is an engine running?  A gateway without engines answers 503 and keeps running."""
        alive = len(self._streams.fleet.engines)
        return _json({"status": "ok" if alive else "no engine is running", "engines": alive}, 200 if alive else 503)

    async def root(self, request: web.Request) -> web.Response:
        """HEAD /: some programs ask it once, to see whether there is a server."""
        return web.Response()

    async def no_page(self, request: web.Request) -> web.Response:
        """GET / without the playground: 404, although HEAD has an answer."""
        raise web.HTTPNotFound

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: may a load balancer send work here?  If not, the body says why."""
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
        """Return why Redis cannot be used, without its address.  The address goes to the log, once for each reason."""
        trouble, before = self._streams.trouble, self._logged_trouble
        self._logged_trouble = trouble
        if trouble is not None and trouble != before:
            log.warning("not ready: %s", trouble)
        return None if trouble is None else NO_REDIS

    async def ping(self, request: web.Request) -> web.Response:
        """GET /ping: does this process work, whatever the others do?  If not, it must be restarted."""
        if self._streams.supervisor.dead:
            return web.Response(text=self._redis_trouble() or NO_REDIS, status=503)
        return web.Response(text="pong")

    async def load(self, request: web.Request) -> web.Response:
        """GET /load: how many requests this process answers now, the queued ones included."""
        return _json({"server_load": self._capacity.answering})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """POST /reset_prefix_cache: order all engines to empty their prefix caches.

        Raises Refusal: 403 without the admin scope, 400 for what vLLM's parameters would stop, 503 without Redis."""
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
        return _json(self._document())

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics, in Prometheus' text format: of this process alone."""
        return _page(self._telemetry.expose())

    async def open_metrics(self, request: web.Request) -> web.Response:
        """GET /metrics on the clients' port: with the engines' metrics that --engine-metrics names."""
        return _page(self._telemetry.expose() + await self._engine_pages.families())

    async def no_metrics(self, request: web.Request) -> web.Response:
        """GET /metrics on the clients' port of a gateway with keys: metrics name tenants, so it is refused."""
        raise Refusal(404, "not_found", "/metrics: a gateway with API keys or tenants serves it on --metrics-port only")
