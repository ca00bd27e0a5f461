"""The steps of one request, from its HTTP body to its last event.

    Handlers.chat -> Answers.answer -> bodies.read -> Answers.begin:
        Intake.accept -> quotas.hold -> streams.open (admission.decide) -> text_stream.decode -> sse.write

A request that resumes an answer needs fewer steps (`Answers.resume`, see `resume.py`):

        streams.find -> streams.join -> text_stream.decode -> sse.write

`middleware.py` turns a `Refusal` raised in any step into an error response.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
from aiohttp import web

from quire.engine.wire.records import DuplicateRequest, IdempotencyKey
from quire.service.api.format import AnswerFormat
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.position import Position
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import VALUES
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery import resume
from quire.service.delivery.open_request import HandedOver, OpenRequest
from quire.service.delivery.quotas import Quotas
from quire.service.delivery.streams import AlreadySubmitted, Streams
from quire.service.http import sse
from quire.service.http.background import Background, Job
from quire.service.http.bodies import Bodies, Body
from quire.service.http.intake import Accepted, Intake, Parse
from quire.service.http.middleware import METER, OWNER, PATH, TENANT, Capacity
from quire.service.http.request_work import RequestWork, cut_after, trace_context
from quire.service.http.stored_responses import StoredResponses, holder_of
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.text.text_stream import decode, reasoning_tokens
from quire.service.text.tokenizer import Tokenizer

# Error codes that mean: the first request with an idempotency key has no answer that a retry could get.
FAILED = ("stream_gone", "stream_not_found", "deadline_exceeded", "request_lost", "engine_error")
RETRIES = 3  # maximum attempts to find or make an answer for an idempotency key


class NoAnswer(Exception):
    """The first request with an idempotency key ended without an answer."""


class Answers:
    """Begins, resumes and writes the answers of one gateway, in every API format."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        streams: Streams,
        capacity: Capacity,
        quotas: Quotas,
        work: RequestWork,
        bodies: Bodies,
        intake: Intake,
        stored: StoredResponses,
        background: Background,
    ) -> None:
        self._config, self._tokenizer, self._streams, self._capacity = config, tokenizer, streams, capacity
        self._quotas, self._work, self._bodies, self._intake = quotas, work, bodies, intake
        self._stored, self._background = stored, background

    async def answer(
        self, request: web.Request, parse: Parse, prefix: str, max_values: int = VALUES
    ) -> web.StreamResponse:
        """Answer a new request; with Last-Event-ID or a known Idempotency-Key, return the earlier answer instead."""
        with self._capacity.occupy():
            if (last := request.headers.get("Last-Event-ID")) is not None:
                had = Position.parse(last)
                if not had.request_id.startswith(prefix):
                    raise Refusal(404, "stream_not_found", "no answer with this id here", given=had.request_id)
                return await self.resume(request, had.request_id, had)
            async with self._bodies.read(request, max_values) as body:
                return await self._answer_body(request, body, parse, prefix)

    async def _answer_body(self, request: web.Request, body: Body, parse: Parse, prefix: str) -> web.StreamResponse:
        header, size = request.headers.get("Idempotency-Key"), len(body.data)
        key = await self._work.offload(size, resume.idempotency_key, header, request[OWNER], request[PATH], body.data)
        if key is None:
            return await self.begin(request, body, parse, prefix)
        for _ in range(RETRIES):
            duplicate = await self._streams.find_duplicate(key)
            try:
                if duplicate is not None:
                    return await self._answer_duplicate(request, key, duplicate)
                return await self.begin(request, body, parse, prefix, key)
            except (AlreadySubmitted, NoAnswer):
                continue
        raise Refusal(503, "cancelled", "requests with this idempotency key keep being cancelled", retry_after_s=1.0)

    async def begin(
        self, request: web.Request, body: Body, parse: Parse, prefix: str, key: IdempotencyKey | None = None
    ) -> web.StreamResponse:
        """Accept, admit and answer a new request.

        Raises Refusal, and AlreadySubmitted if another request with the same `key` was submitted meanwhile."""
        accepted = await self._intake.accept(request, body, parse, prefix)
        running = self._running(request, accepted, key)
        if accepted.valid.shown.get("background"):
            return await self._begin_background(request, body, accepted, running)
        async with cut_after(accepted.valid.timeout_s), running as opened:
            request[METER].admit(opened.waiting)
            body.release()
            return await self._deliver(request, accepted.valid, opened, accepted.form)

    @contextlib.asynccontextmanager
    async def _running(
        self, request: web.Request, accepted: Accepted, key: IdempotencyKey | None
    ) -> AsyncIterator[OpenRequest]:
        """A context in which a request is queued and computed.  Raises Refusal and AlreadySubmitted as `begin` does."""
        valid = accepted.valid
        background = bool(valid.shown.get("background"))
        async with (
            self._quotas.hold(
                request, request[TENANT], accepted.submissions, bounded=valid.max_tokens is not None
            ) as held,
            self._streams.open(
                accepted.submissions,
                accepted.cost,
                record=accepted.record,
                idempotency_key=key,
                resumable=background or resume.resumable(request.headers),
            ) as opened,
        ):
            held.queued = True
            yield opened

    async def _begin_background(
        self,
        request: web.Request,
        body: Body,
        accepted: Accepted,
        running: contextlib.AbstractAsyncContextManager[OpenRequest],
    ) -> web.StreamResponse:
        """Begin a background response, and answer with its state, or with its events if the request streams."""
        valid, form = accepted.valid, accepted.form
        assert isinstance(form, ResponseFormat)
        response_id = accepted.submissions[0].id.rpartition(".")[0]
        # The job keeps the first meter until the response ends; the new one records only this HTTP request.
        meter, request[METER] = request[METER], request[METER].fresh()
        queued = msgspec.json.encode(form.response("queued"))
        try:
            await self._background.start(Job(response_id, holder_of(request), valid, form, meter), running)
        except Exception:
            request[METER] = meter
            raise
        finally:
            body.release()
        if valid.stream:
            return await self.resume(request, response_id, None, fresh=True)
        return await self._work.write(request, [queued])

    async def record(self, request: web.Request, request_id: str) -> resume.Record:
        """Return the record of an answer that this client may read.  Raises Refusal."""
        found = await self._streams.find(request_id)
        return resume.read(found, request_id, request[OWNER], self._config.retain_s, self._streams.redis_ms())

    async def resume(
        self,
        request: web.Request,
        request_id: str,
        had: Position | None,
        after: int | None = None,
        *,
        fresh: bool = False,
    ) -> web.StreamResponse:
        """Continue an answer after the position `had`, which the client already has; None: from its start.

        `after`: stream the events of a response (`/v1/responses`) after this event number; -1: all events.
        `fresh`: this HTTP request itself began the answer, so no quota is taken again.  Raises Refusal."""
        if had is not None and had.done:
            return web.Response(status=204)  # EventSource then stops reconnecting
        streams = self._streams
        record = await self.record(request, request_id)
        valid = record.valid
        form = record.form(request_id, self._tokenizer.vocabulary.table, ids=True)
        if isinstance(form, ResponseFormat):
            if after is not None:
                valid = form.events_after(after)
            elif valid.shown.get("background") and not valid.stream:  # a retry with the same idempotency key
                return await self._work.write(request, [(await self._stored.load(holder_of(request), request_id)).body])
        prompts, n = len(record.prompts), valid.n
        had = had or Position.start(request_id, prompts * n)
        if len(had.tokens) != prompts * n:
            raise Refusal(400, "invalid_event_id", f"Last-Event-ID: the answer has {prompts * n} choices")
        counts = [count or 0 for count in had.tokens]
        left_s = max(0.0, (record.deadline_ms - streams.redis_ms()) / 1000)
        async with (
            cut_after(left_s),
            streams.join(
                [f"{request_id}.{at}" for at in range(prompts)],
                [counts[at * n : (at + 1) * n] for at in range(prompts)],
                record.tenant,
                left_s,
            ) as opened,
        ):
            given = trace_context(request)
            request[METER].resume(request_id, valid, prompts * n, record.tenant, record.context, given)
            cached = [mailbox.cached_tokens for mailbox in opened.mailboxes]
            if not fresh:
                stored = sum(mailbox.next - mailbox.at for mailbox in opened.mailboxes)
                await self._quotas.take_repeat(request, request[TENANT], request_id, stored)
            reasoning = [
                await reasoning_tokens(valid, self._tokenizer, mailbox.had, opened.pacer)
                for mailbox in opened.mailboxes
            ]
            form.skip(had, cached, reasoning, [mailbox.predictions or (0, 0) for mailbox in opened.mailboxes])
            if valid.shown.get("background"):
                opened.announce()  # send the first events at once, before any token
            for choice in had.ended:
                opened.end(choice)
            try:
                return await self._deliver(request, valid, opened, form, resumed=True)
            except Refusal as refusal:
                if refusal.code == "cancelled":  # the original client has left
                    raise Refusal(410, "stream_gone", "this request was cancelled", given=request_id) from None
                raise

    async def _answer_duplicate(
        self, request: web.Request, key: IdempotencyKey, duplicate: DuplicateRequest
    ) -> web.StreamResponse:
        """Return the answer of the first request with this idempotency key.

        Raises NoAnswer if that request ended without an answer; the key has been freed then."""
        if not duplicate.same_body:
            message = "idempotency-key: it was used for another request, whose path or body differs"
            raise Refusal(409, "idempotency_key_reused", message, param="idempotency-key")
        try:
            return await self.resume(request, duplicate.request_id.rpartition(".")[0], None)
        except Refusal as refusal:
            if refusal.code not in FAILED:
                raise
            await self._streams.release(key, duplicate)
            if refusal.code == "engine_error":  # not retried here, since the request may crash another engine
                raise
            raise NoAnswer from None

    async def _deliver(
        self,
        request: web.Request,
        valid: ValidRequest,
        opened: OpenRequest,
        form: AnswerFormat,
        *,
        resumed: bool = False,
    ) -> web.StreamResponse:
        """Write the answer, streamed or not, and record how much of it was sent."""
        meter = request[METER]
        save = None
        if isinstance(form, ResponseFormat) and not resumed:
            save = partial(self._stored.save, holder_of(request), valid, form, opened.pacer)
        async with contextlib.aclosing(decode(opened, valid, self._tokenizer, each_token=form.each_token)) as deltas:
            if valid.stream:
                async with contextlib.aclosing(_ending_with(deltas, save)) as saved:
                    sent, waiting, silent = opened.record_sent, opened.waiting, opened.silent
                    return await sse.write(
                        request, saved, form, meter, sent, waiting, silent=silent, pacer=opened.pacer
                    )
            answered = []
            try:
                async for changed in deltas:
                    for delta in changed:
                        meter.record_delta(delta)
                    answered += changed
            except HandedOver:
                raise Refusal(503, "shutting_down", "ask again with the same key", retry_after_s=1.0) from None
        headers = opened.waiting.headers() if opened.waiting is not None else None
        parts = await form.whole(answered, opened.pacer)
        if save is not None and isinstance(form, ResponseFormat):
            await save()
            parts = [form.body()]  # made again, since `store` is false if saving failed
        response = await self._work.write(request, parts, headers)
        opened.record_sent(form.tokens)
        return response


async def _ending_with(
    deltas: AsyncIterator[list[ChoiceDelta]], last: Callable[[], Awaitable[None]] | None
) -> AsyncGenerator[list[ChoiceDelta], None]:
    """Yield all deltas, then call `last` before the iteration ends."""
    async for changed in deltas:
        yield changed
    if last is not None:
        await last()
