"""Endpoints that generate text.  `answers.py` has the steps of a request; `intake.py` the steps before admission.

Handlers --answers--> Answers            new, repeated and resumed answers
         --responses> ResponseEndpoints  /v1/responses and stored responses
         --tokens---> TokenEndpoints     tokenizer endpoints, which generate nothing
"""

from __future__ import annotations

import re

from aiohttp import web

from quire.service.api import api, generative_scoring
from quire.service.api.anthropic import messages
from quire.service.api.position import ANSWER_ID, Position
from quire.service.common.metrics import Telemetry
from quire.service.common.refusal import Refusal, renaming
from quire.service.config import GatewayConfig
from quire.service.delivery.adapters import Adapters
from quire.service.delivery.quotas import Quotas
from quire.service.delivery.streams import Streams
from quire.service.http.adapter_endpoints import AdapterEndpoints
from quire.service.http.answers import Answers
from quire.service.http.background import Background
from quire.service.http.bodies import Bodies
from quire.service.http.intake import Intake
from quire.service.http.middleware import Capacity
from quire.service.http.request_work import RequestWork
from quire.service.http.response_endpoints import ResponseEndpoints
from quire.service.http.stored_responses import StoredResponses
from quire.service.http.token_endpoints import TokenEndpoints
from quire.service.text.tokenizer import Tokenizer


class Handlers:
    """Handlers of completions, chats and messages, and of running answers by their id."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        streams: Streams,
        capacity: Capacity,
        quotas: Quotas,
        telemetry: Telemetry,
        *,
        model: str,
        gateway: str,
        adapters: Adapters,
    ) -> None:
        """`model`: the model's name in the API.  `gateway`: id of this gateway process."""
        self._streams, self._capacity = streams, capacity
        self.bodies = Bodies(config)
        self._work = work = RequestWork(config, streams, capacity)
        self.tokens = TokenEndpoints(
            config, tokenizer, streams, self.bodies, capacity, work, quotas, model=model, adapters=adapters
        )
        self.adapters = AdapterEndpoints(config, streams, self.bodies, capacity, adapters, gateway=gateway)
        stored = StoredResponses(config, streams)
        self.background = Background(config, tokenizer, streams, stored, capacity, telemetry)
        intake = Intake(config, tokenizer, streams, work, stored, model=model, gateway=gateway, adapters=adapters)
        self.answers = Answers(
            config, tokenizer, streams, capacity, quotas, work, self.bodies, intake, stored, self.background
        )
        self.responses = ResponseEndpoints(
            config, tokenizer, capacity, work, self.bodies, intake, stored, self.background, self.answers, quotas
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self.answers.answer(request, api.parse_completion, "cmpl-", self._work.max_tokens())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self.answers.answer(request, api.parse_chat, "chatcmpl-")

    async def scores(self, request: web.Request) -> web.StreamResponse:
        """POST /generative_scoring."""
        with renaming(generative_scoring.NAMES):
            return await self.answers.answer(request, generative_scoring.parse, "cmpl-", self._work.max_tokens())

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        with renaming(messages.NAMES):
            return await self.answers.answer(request, messages.parse, messages.PREFIX)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/{id}: resume an answer.  For browsers' EventSource, which can only send GET.

        `id`: id of a request (the answer begins at its start) or of an event (it continues after the event). The header
        Last-Event-ID, if any, replaces the event in the path."""
        request_id, asked = _stream_of(request)
        last = request.headers.get("Last-Event-ID")
        had = Position.parse(last) if last else asked
        if had is not None and had.request_id != request_id:
            raise Refusal(400, "invalid_event_id", "Last-Event-ID: it is of another answer", param="last-event-id")
        with self._capacity.occupy():
            return await self.answers.resume(request, request_id, had)

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/streams/{id}: cancel an answer, even one that a client could still resume.

        Responds 204, also if the answer has ended.  Raises the Refusals of resuming (404, 410)."""
        request_id, _ = _stream_of(request)
        with self._capacity.occupy():
            record = await self.answers.record(request, request_id)
            await self._streams.cancel([f"{request_id}.{at}" for at in range(len(record.prompts))])
        return web.Response(status=204)


def _stream_of(request: web.Request) -> tuple[str, Position | None]:
    """Return the request id in a path, and the position if the path has an event id.  Raises Refusal."""
    given = request.match_info["id"]
    if re.fullmatch(ANSWER_ID, given):
        return given, None
    at = Position.parse(given)
    return at.request_id, at
