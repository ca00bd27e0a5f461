"""Stored responses of `/v1/responses`: save, retrieve, continue and delete them.

    an answer that ends --save--> Redis --history--> the input of a request with previous_response_id
                                        --load-----> GET /v1/responses/{id}

Each tenant sees only its own responses; an API key without a tenant sees only the responses made with it.  A response
is stored before its last event or its body is sent, so a client may continue it at once.
"""

from __future__ import annotations

import logging
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from quire.engine.wire.link import BusDown
from quire.engine.wire.response_store import StoredResponse
from quire.service.api.openai_responses.output_items import PREFIX
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.openai_responses.response_items import Item, listed
from quire.service.api.openai_responses.responses import Turn, missing
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import shown
from quire.service.common.pacing import Pacer
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.streams import Streams, ask
from quire.service.http.middleware import OWNER, TENANT

log = logging.getLogger("quire.gateway")

T = TypeVar("T")

EARLY_MS = 10_000  # ms that a running response stays stored after its deadline, so that its final state can be stored
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}")  # id of an output item: digits of its response, its index
PAGE, PAGES = 20, 100  # items per page of GET .../input_items: default and maximum


def holder_of(request: web.Request) -> str:
    """Return the owner of a request's stored responses: its tenant, or its API key if it has no tenant."""
    tenant = request[TENANT]
    return f"tenant {tenant.name}" if tenant.name else f"key {request[OWNER]}"


class StoredResponses:
    """Reads and writes the responses that a gateway stores."""

    def __init__(self, config: GatewayConfig, streams: Streams) -> None:
        self._store, self._config = streams.responses, config
        self._ttl_ms, self._most = int(config.responses_ttl_s * 1000), config.responses_mib * 2**20

    # -- writing

    async def save(self, holder: str, valid: ValidRequest, form: ResponseFormat, pacer: Pacer) -> None:
        """Store a response at its end, unless its request has `store: false`.

        If Redis is away, or the response is too large, it is not stored, and its field `store` becomes false."""
        if not form.stored:
            return
        await form.prepare_end(pacer)
        response = form.response()
        try:
            outcome = await self._store.put(
                holder,
                response["id"],
                msgspec.json.encode(response),
                ended=True,
                ttl_ms=self._ttl_ms,
                max_bytes=self._most,
                given=msgspec.json.encode(valid.items),
                previous=response["previous_response_id"] or "",
            )
        except BusDown as error:
            log.warning("a response was not stored: %s", error)
            outcome = -1
        form.stored = outcome >= 0

    async def begin(
        self, holder: str, valid: ValidRequest, response: dict[str, Any], lease_ms: int, timeout_s: float
    ) -> None:
        """Store a response that will run in the background.  Raises Refusal."""
        outcome = await ask(
            self._store.put(
                holder,
                response["id"],
                msgspec.json.encode(response),
                ended=False,
                ttl_ms=self._ttl_ms + int(timeout_s * 1000) + EARLY_MS,
                max_bytes=self._most,
                given=msgspec.json.encode(valid.items),
                previous=response["previous_response_id"] or "",
                lease_ms=lease_ms,
            )
        )
        if outcome == -1:
            message = f"input: the responses of one tenant have {self._config.responses_mib} MiB"
            raise Refusal(400, "too_long", message, param="input", limit=self._most)

    async def update(self, holder: str, response: dict[str, Any], *, ended: bool) -> bool:
        """Store the next state of a response that runs in the background.

        Returns False, without storing it, if the response was deleted or has ended.  Raises BusDown."""
        body = msgspec.json.encode(response)
        ttl_ms = self._ttl_ms if ended else self._ttl_ms + int(self._config.max_timeout_s * 1000)
        outcome = await self._store.put(holder, response["id"], body, ended=ended, ttl_ms=ttl_ms, max_bytes=self._most)
        if outcome == -1 and ended:
            error = {"code": "server_error", "message": "the response is larger than what one tenant may store"}
            failed = {**response, "status": "failed", "output": [], "error": error}
            return await self.update(holder, failed, ended=True)
        return outcome >= 0

    async def cancel(self, holder: str, response_id: str) -> bytes:
        """Mark a background response as cancelled, unless it has ended.  Returns the stored response as JSON.

        Raises Refusal."""
        found = await self.load(holder, response_id)
        response = msgspec.json.decode(found.body)
        if not response["background"]:
            raise Refusal(
                400,
                "invalid_value",
                "Cannot cancel a synchronous response.",
                param="background",
                limit=True,
                given=False,
            )
        if found.ended:
            return found.body
        await ask(self.update(holder, {**response, "status": "cancelled"}, ended=True))
        return (await self.load(holder, response_id)).body

    # -- reading

    async def load(self, holder: str, response_id: str) -> StoredResponse:
        """Return a stored response.  Raises Refusal: 404 if this holder has no such response."""
        found = await ask(self._store.get(holder, response_id)) if self._ttl_ms else None
        if found is None:
            raise missing(response_id)
        return found

    async def history(self, holder: str, response_id: str | None) -> list[Turn]:
        """Return a response and all responses that it continues, oldest first, each as (input, response) in JSON.

        Raises Refusal."""
        if not response_id:
            return []
        field = "previous_response_id"
        if not self._ttl_ms:
            message = f"{field}: this server stores no responses (--responses-ttl-s)"
            raise Refusal(400, "unsupported", message, param=field)
        most = self._config.max_body_bytes
        chain = await ask(self._store.chain(holder, response_id, max_bytes=most, ttl_ms=self._ttl_ms))
        size = sum(len(one.input) + len(one.body) for one in chain.found)
        if size > most:
            message = f"{field}: the responses that it continues have more than {most} bytes (--max-body-bytes)"
            raise Refusal(400, "too_long", message, param=field, limit=most, given=size)
        if chain.missing:
            raise missing(chain.missing, field)
        if not all(one.ended for one in chain.found):
            message = f"{field}: '{shown(response_id)}' has not ended"
            raise Refusal(400, "invalid_value", message, param=field)
        return [(one.input, one.body) for one in reversed(chain.found)]

    async def items(self, holder: str, ids: list[str]) -> dict[str, Item]:
        """Return the output items with these ids from stored responses; unknown ids are ignored.  Raises Refusal.

        An item's id contains its response's id, so each response is read once."""
        wanted = {PREFIX + match[1] for item in ids if (match := ITEM_ID.fullmatch(item))} if self._ttl_ms else set()
        found: dict[str, Item] = {}
        size, most = 0, self._config.max_body_bytes
        for response_id in sorted(wanted):
            if (stored := await ask(self._store.get(holder, response_id))) is None:
                continue
            size += len(stored.body)
            if size > most:
                message = f"input: the responses that it refers to have more than {most} bytes (--max-body-bytes)"
                raise Refusal(400, "too_long", message, param="input", limit=most, given=size)
            found |= {item["id"]: item for item in msgspec.json.decode(stored.body)["output"]}
        return found

    async def drop(self, holder: str, response_id: str) -> None:
        """Delete a stored response.  Raises Refusal: 404 if this holder has no such response."""
        if not self._ttl_ms or not await ask(self._store.drop(holder, response_id)):
            raise missing(response_id)

    async def input_items(self, request: web.Request) -> bytes:
        """Return a page of a response's input items as JSON, for `GET /v1/responses/{id}/input_items`."""
        query = request.query
        found = await self.load(holder_of(request), request.match_info["id"])
        items = msgspec.json.decode(found.input)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise Refusal(400, "invalid_value", "order: must be one of asc, desc", param="order", limit="asc, desc")
        limit = query.get("limit", str(PAGE))
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= PAGES:
            message = f"limit: must be 1 to {PAGES}"
            raise Refusal(400, "invalid_value", message, param="limit", limit=PAGES, given=str(shown(limit)))
        if order == "desc":
            items.reverse()
        if after := query.get("after"):
            at = next((at for at, item in enumerate(items) if item["id"] == after), len(items))
            items = items[at + 1 :]
        page = [listed(item) for item in items[: int(limit)]]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return msgspec.json.encode({"object": "list", "data": page, **ends, "has_more": len(page) < len(items)})
