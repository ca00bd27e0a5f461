"""Endpoints of stored responses: /v1/responses, its compaction and token count, and GET, DELETE and cancel by id."""

from __future__ import annotations

import re

import msgspec
from aiohttp import web

from quire.service.api.openai_responses import responses
from quire.service.api.openai_responses.compaction import parse_compaction
from quire.service.api.openai_responses.output_items import PREFIX as RESPONSE
from quire.service.common.refusal import Refusal, renaming
from quire.service.config import GatewayConfig
from quire.service.delivery.quotas import Quotas
from quire.service.http.answers import Answers
from quire.service.http.background import Background
from quire.service.http.bodies import Bodies
from quire.service.http.intake import Intake
from quire.service.http.middleware import TENANT, Capacity
from quire.service.http.request_work import RequestWork, cut_after
from quire.service.http.stored_responses import StoredResponses, holder_of
from quire.service.text.tokenizer import Tokenizer


class ResponseEndpoints:
    """Handlers of /v1/responses and the paths below it."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        capacity: Capacity,
        work: RequestWork,
        bodies: Bodies,
        intake: Intake,
        stored: StoredResponses,
        background: Background,
        answers: Answers,
        quotas: Quotas,
    ) -> None:
        self._config, self._tokenizer, self._capacity = config, tokenizer, capacity
        self._work, self._bodies, self._intake = work, bodies, intake
        self._stored, self._background, self._answers, self._quotas = stored, background, answers, quotas

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        with renaming(responses.NAMES):
            return await self._answers.answer(request, responses.parse, RESPONSE)

    async def compact(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/compact: let the model summarise a conversation."""
        with renaming(responses.NAMES):
            return await self._answers.answer(request, parse_compaction, RESPONSE)

    async def input_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/input_tokens: count the prompt tokens that POST /v1/responses would use."""
        timeout_s = self._config.default_timeout_s
        with renaming(responses.NAMES), self._capacity.occupy():
            await self._quotas.count(request, request[TENANT])
            async with self._bodies.read(request) as body:
                valid, size = await self._intake.parse(request, body, responses.parse, RESPONSE, timeout_s)
                [ids] = await self._tokenizer.encode(valid, size, total=self._work.max_tokens())
            counted = {"object": "response.input_tokens", "input_tokens": len(ids)}
            async with cut_after(timeout_s):
                return await self._work.write(request, [msgspec.json.encode(counted)])

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}: a stored response, or with `stream=true` its events after `starting_after`."""
        response_id, query = request.match_info["id"], request.query
        if query.get("stream", "false") == "false":
            stored = await self._stored.load(holder_of(request), response_id)
            return await self._work.write(request, [stored.body])
        after = query.get("starting_after", "-1")
        if not re.fullmatch("-1|[0-9]{1,9}", after, re.ASCII):
            message = "starting_after: must be the number of an event"
            raise Refusal(400, "invalid_value", message, param="starting_after", limit=">= 0", given=after[:64])
        if not re.fullmatch(RESPONSE + "[0-9a-f]{32}", response_id):
            raise Refusal(404, "stream_not_found", "no answer with this id", given=response_id[:64])
        with self._capacity.occupy():
            return await self._answers.resume(request, response_id, None, int(after))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/{id}/cancel: cancel a background response."""
        response_id, holder = request.match_info["id"], holder_of(request)
        cancelled = await self._stored.cancel(holder, response_id)
        await self._background.cancel(response_id)
        return await self._work.write(request, [cancelled])

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/responses/{id}."""
        response_id = request.match_info["id"]
        await self._stored.drop(holder_of(request), response_id)
        await self._background.cancel(response_id)
        gone = {"id": response_id, "object": "response", "deleted": True}
        return await self._work.write(request, [msgspec.json.encode(gone)])

    async def input_items(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}/input_items: the input of one response, without the input of earlier responses."""
        return await self._work.write(request, [await self._stored.input_items(request)])
