"""Load and unload LoRA adapters while the server runs, as vLLM's endpoints do.

POST /v1/load_lora_adapter    gateway reads the files ──> an engine computes a token with them ──> all gateways serve it
POST /v1/unload_lora_adapter  all gateways stop serving the name; requests that were accepted before continue
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
from aiohttp import web

from quire.service.api import decoding
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.adapter_check import try_out
from quire.service.delivery.adapters import Adapters
from quire.service.delivery.streams import Streams
from quire.service.http.bodies import Bodies
from quire.service.http.middleware import METER, TENANT, Capacity

log = logging.getLogger("quire.gateway")

VALUES = 64  # maximum number of JSON values in a body

T = TypeVar("T", bound=msgspec.Struct)


class LoadBody(msgspec.Struct):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadBody(msgspec.Struct):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str | None = None


class AdapterEndpoints:
    """Handlers of the two endpoints, which need the admin scope."""

    def __init__(
        self,
        config: GatewayConfig,
        streams: Streams,
        bodies: Bodies,
        capacity: Capacity,
        adapters: Adapters,
        *,
        gateway: str,
    ) -> None:
        """`gateway`: id of this gateway process."""
        self._config, self._streams, self._bodies = config, streams, bodies
        self._capacity, self._adapters, self._gateway = capacity, adapters, gateway

    async def load(self, request: web.Request) -> web.Response:
        """POST /v1/load_lora_adapter.  Answers once an engine has loaded the adapter.  Raises Refusal."""
        request[TENANT].require_admin()
        with self._capacity.occupy():
            asked = await self._read(request, LoadBody)
            name, path = _required("lora_name", asked.lora_name), _required("lora_path", asked.lora_path)
            replace = bool(asked.load_inplace)
            adapter = await self._adapters.read(name, path, replace=replace)
            await self._streams.fleet_watch.engine_wait.wait(self._config.default_timeout_s)
            await try_out(self._streams, self._gateway, adapter, self._config.default_timeout_s)
            await self._adapters.enter(adapter, replace=replace)
        log.info("loaded LoRA adapter %s from %s (POST /v1/load_lora_adapter)", adapter.id, adapter.path)
        return web.Response(text=f"loaded LoRA adapter '{name}'")

    async def unload(self, request: web.Request) -> web.Response:
        """POST /v1/unload_lora_adapter.  Raises Refusal."""
        request[TENANT].require_admin()
        with self._capacity.occupy():
            asked = await self._read(request, UnloadBody)
            adapter = await self._adapters.remove(_required("lora_name", asked.lora_name))
        log.info("unloaded LoRA adapter %s (POST /v1/unload_lora_adapter)", adapter.id)
        return web.Response(text=f"unloaded LoRA adapter '{adapter.name}'")

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        """Return the decoded body, and record its unknown fields for `x-unknown-fields`.  Raises Refusal."""
        async with self._bodies.read(request, VALUES) as body:
            asked, unknown = decoding.decode_all(bytes(body.data), kind, "adapters", self._config)
        request[METER].record_unknown(unknown)
        return asked


def _required(param: str, value: str | None) -> str:
    """Return the value of a required field.  Raises Refusal if it is missing or empty."""
    if not value:
        raise Refusal(400, "invalid_value", f"{param}: must be given", param=param, limit="a text", given=value)
    return value
