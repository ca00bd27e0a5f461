"""One request, step by step.

    Handlers.answer -> bodies.read -> Handlers.begin:
        api.parse -> tokenizer.encode -> api.fit -> quotas.hold
            -> streams.open (admission.decide) -> text_stream.decode -> sse.write

A client that resumes an answer takes a shorter way (`Handlers.resume`, see `resume.py`):

        streams.find -> streams.join -> text_stream.decode -> sse.write

Every `Refusal` on the way becomes a response in `middleware.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
from aiohttp import web

from quire.engine.wire.messages import Generate
from quire.engine.wire.records import DuplicateRequest, IdempotencyKey
from quire.service.api import api, generative_scoring
from quire.service.api.anthropic import messages
from quire.service.api.api import Refusal
from quire.service.api.beams import queue_extra
from quire.service.api.format import ANSWER_ID, AnswerFormat, Position
from quire.service.api.inference_headers import InferenceHeaders
from quire.service.api.openai_responses import responses
from quire.service.api.openai_responses.compaction import parse_compaction
from quire.service.api.openai_responses.response_items import earlier_items
from quire.service.api.openai_responses.responses import ResponseFormat
from quire.service.api.skipped import left_out
from quire.service.api.tenants import Tenant
from quire.service.common.limits import VALUES
from quire.service.common.metrics import Telemetry
from quire.service.common.refusal import renaming
from quire.service.config import GatewayConfig
from quire.service.delivery import admission, resume
from quire.service.delivery.open_request import HandedOver, OpenRequest
from quire.service.delivery.quotas import Quotas
from quire.service.delivery.streams import AlreadySubmitted, Streams
from quire.service.grammar.grammar_checks import GrammarChecks
from quire.service.grammar.grammar_errors import NotServed
from quire.service.http import sse
from quire.service.http.background import Background, Job
from quire.service.http.bodies import Bodies, Body
from quire.service.http.meter import Meter
from quire.service.http.middleware import METER, OWNER, PATH, TENANT, Capacity
from quire.service.http.request_work import RequestWork, cut_after
from quire.service.http.stored_responses import StoredResponses, holder_of
from quire.service.http.token_endpoints import TokenEndpoints
from quire.service.output.pieces import Piece
from quire.service.text.stop_strings import with_stop_tokens
from quire.service.text.text_stream import decode, reasoning_tokens
from quire.service.text.tokenizer import Tokenizer

Parse = Callable[[bytes, GatewayConfig, str, float, api.Served], api.ValidRequest]

# Errors under which the first request with an idempotency key leaves no answer behind.
FAILED = ("stream_gone", "stream_not_found", "deadline_exceeded", "request_lost", "engine_error")
NAMES = {messages.PREFIX: messages.NAMES, responses.PREFIX: responses.NAMES}  # names of a chat's fields, by format
MOMENT_S = 0.001  # least time that a request has left after it waited for an engine; admission refuses it
RETRIES = 3  # first requests under one idempotency key that may turn out to have no answer, before a retry gives up


class NoAnswer(Exception):
    """The first request under an idempotency key has no answer, and will have none."""


class Prepared(NamedTuple):
    """A request that was parsed, encoded and checked: ready for admission."""

    valid: api.ValidRequest
    orders: list[Generate]
    cost: admission.Cost
    form: AnswerFormat
    record: bytes  # for a client that resumes: see resume.Record


class Handlers:
    """Handlers of the endpoints that make text; `tokens` has those that only count it."""

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
        served: api.Served = api.NO_DEFAULTS,
    ) -> None:
        """`model`: the name that clients use.  `gateway`: the id of this process."""
        self._served = served
        self._config, self._tokenizer, self._streams, self._capacity = config, tokenizer, streams, capacity
        self._quotas, self._model, self._gateway = quotas, model, gateway
        self.bodies = Bodies(config)
        self._work = RequestWork(config, streams, capacity)
        self.tokens = TokenEndpoints(
            config, tokenizer, streams, self.bodies, capacity, self._work, quotas, model=model, served=served
        )
        self._grammars = GrammarChecks()
        self._inference_headers = InferenceHeaders(config)
        self._stored = StoredResponses(config, streams)
        self._background = Background(config, tokenizer, streams, self._stored, capacity, telemetry)

    def background(self, app: web.Application) -> AsyncIterator[None]:
        """Return what `app` runs besides requests."""
        return self._background.serve(app)

    # -- endpoints

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self.answer(request, api.parse_completion, "cmpl-", self._work.max_tokens())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self.answer(request, api.parse_chat, "chatcmpl-")

    async def scores(self, request: web.Request) -> web.StreamResponse:
        """POST /generative_scoring."""
        with renaming(generative_scoring.NAMES):
            return await self.answer(request, generative_scoring.parse, "cmpl-", self._work.max_tokens())

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        with renaming(messages.NAMES):
            return await self.answer(request, messages.parse, messages.PREFIX)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        with renaming(responses.NAMES):
            return await self.answer(request, responses.parse, responses.PREFIX)

    async def compact(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/compact: a conversation, summarised by the model."""
        with renaming(responses.NAMES):
            return await self.answer(request, parse_compaction, responses.PREFIX)

    async def input_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/input_tokens: the prompt that POST /v1/responses would make, without an answer."""
        timeout_s = self._config.default_timeout_s
        with renaming(responses.NAMES), self._capacity.occupy():
            async with self.bodies.read(request) as body:
                valid, size = await self._parse(request, body, responses.parse, responses.PREFIX, timeout_s)
                [ids] = await self._tokenizer.encode(valid, size, total=self._work.max_tokens())
            counted = {"object": "response.input_tokens", "input_tokens": len(ids)}
            async with cut_after(timeout_s):
                return await self._work.write(request, [msgspec.json.encode(counted)])

    async def response(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}: a stored response, or with `stream=true` its events after `starting_after`."""
        response_id, query = request.match_info["id"], request.query
        if query.get("stream", "false") == "false":
            found = await self._stored.load(holder_of(request), response_id)
            return await self._work.write(request, [found.body])
        after = query.get("starting_after", "-1")
        if not re.fullmatch("-1|[0-9]{1,9}", after, re.ASCII):
            message = "starting_after: must be the number of an event"
            raise Refusal(400, "invalid_value", message, param="starting_after", limit=">= 0", given=after[:64])
        if not re.fullmatch(responses.PREFIX + "[0-9a-f]{32}", response_id):
            raise Refusal(404, "stream_not_found", "no answer with this id", given=response_id[:64])
        with self._capacity.occupy():
            return await self.resume(request, response_id, None, int(after))

    async def cancel_response(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/{id}/cancel: end a response that runs in the background."""
        response_id, holder = request.match_info["id"], holder_of(request)
        cancelled = await self._stored.cancel(holder, response_id)
        await self._background.cancel(response_id)
        return await self._work.write(request, [cancelled])

    async def delete_response(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/responses/{id}."""
        response_id = request.match_info["id"]
        await self._stored.drop(holder_of(request), response_id)
        await self._background.cancel(response_id)
        gone = {"id": response_id, "object": "response", "deleted": True}
        return await self._work.write(request, [msgspec.json.encode(gone)])

    async def input_items(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}/input_items: what a stored response was asked, without what it continues."""
        return await self._work.write(request, [await self._stored.input_items(request)])

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/{id}: an answer from its start, or on from an event; for EventSource, which can only GET.

        `id` is a request's or an event's.  A Last-Event-ID is newer."""
        request_id, asked = _stream_of(request)
        last = request.headers.get("Last-Event-ID")
        had = Position.parse(last) if last else asked
        if had is not None and had.request_id != request_id:
            raise Refusal(400, "invalid_event_id", "Last-Event-ID: it is of another answer", param="last-event-id")
        with self._capacity.occupy():
            return await self.resume(request, request_id, had)

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/streams/{id}: end an answer as cancelled, although its client may resume it.

        204, also where the answer is over; else as for a client that resumes."""
        request_id, _ = _stream_of(request)
        with self._capacity.occupy():
            record = await self._record(request, request_id)
            await self._streams.cancel([f"{request_id}.{at}" for at in range(len(record.prompts))])
        return web.Response(status=204)

    # -- the steps of a request

    async def answer(
        self, request: web.Request, parse: Parse, prefix: str, max_values: int = VALUES
    ) -> web.StreamResponse:
        """Answer a new request, or resume an earlier one: Last-Event-ID or the Idempotency-Key says so."""
        with self._capacity.occupy():
            if (last := request.headers.get("Last-Event-ID")) is not None:
                had = Position.parse(last)
                if not had.request_id.startswith(prefix):
                    raise Refusal(404, "stream_not_found", "no answer with this id here", given=had.request_id)
                return await self.resume(request, had.request_id, had)
            async with self.bodies.read(request, max_values) as body:
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
        """Prepare, admit and answer a new request.

        Raises Refusal, and AlreadySubmitted when another request with the same `key` was quicker."""
        prepared = await self._prepare(request, body, parse, prefix)
        running = self._running(request, prepared, key)
        if prepared.valid.shown.get("background"):
            return await self._begin_background(request, body, prepared, running)
        async with cut_after(prepared.valid.timeout_s), running as opened:
            request[METER].admit(opened.waiting)
            body.release()
            return await self._deliver(request, prepared.valid, opened, prepared.form)

    @contextlib.asynccontextmanager
    async def _running(
        self, request: web.Request, prepared: Prepared, key: IdempotencyKey | None
    ) -> AsyncIterator[OpenRequest]:
        """A context in which a request is queued and computed.  Raises Refusal and AlreadySubmitted as `begin` does."""
        valid = prepared.valid
        background = bool(valid.shown.get("background"))
        async with (
            self._quotas.hold(request, request[TENANT], prepared.orders, bounded=valid.max_tokens is not None) as held,
            self._streams.open(
                prepared.orders,
                prepared.cost,
                record=prepared.record,
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
        prepared: Prepared,
        running: contextlib.AbstractAsyncContextManager[OpenRequest],
    ) -> web.StreamResponse:
        """Begin a response that is computed without its client, and answer with its state or its events."""
        valid, form = prepared.valid, prepared.form
        assert isinstance(form, ResponseFormat)
        response_id = prepared.orders[0].id.rpartition(".")[0]
        meter, request[METER] = request[METER], request[METER].fresh()  # the job's ends with the answer
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

    async def _limits(
        self, valid: api.ValidRequest, longest_wait_s: float
    ) -> tuple[api.EngineLimits, api.ValidRequest, float]:
        """Wait for an engine if none takes requests.  Return what every engine can serve, and what is left of the
        request's time and of the longest wait.  Raises Refusal."""
        waited_s = await self._streams.fleet_watch.engine_wait.wait(min(longest_wait_s, valid.timeout_s))
        limits = admission.limits(self._streams.fleet, valid.beams)
        left_s = max(MOMENT_S, valid.timeout_s - waited_s)
        return limits, msgspec.structs.replace(valid, timeout_s=left_s), max(0.0, longest_wait_s - waited_s)

    async def _prepare(self, request: web.Request, body: Body, parse: Parse, prefix: str) -> Prepared:
        """Turn a body into orders for engines, and everything else that the answer needs.  Raises Refusal."""
        config, streams = self._config, self._streams
        tenant, priority = self._inference_headers.place(request.headers, request[TENANT])
        timeout_s = api.header_timeout(request.headers.get("X-Request-Timeout"), config)
        longest_wait_s = api.header_queue_wait(request.headers.get("X-Max-Queue-Wait"), config)
        valid, size = await self._parse(request, body, parse, prefix, timeout_s)
        priority = _right_to(tenant, valid.priority, request[METER]) if priority is None else priority
        valid = msgspec.structs.replace(valid, cache_salt=tenant.salt(valid.cache_salt), priority=priority, unknown=())
        limits, valid, longest_wait_s = await self._limits(valid, longest_wait_s)
        encoded = await self._tokenizer.encode(valid, size, longest=limits.max_model_len, total=self._work.max_tokens())
        valid = await self._forbid(valid, size)
        valid = await self._constrain(valid, encoded, size, tenant, request[METER])
        rooms = await self._work.offload(size, api.fit, valid, encoded, limits)
        rooms = api.bound_logprobs(valid, encoded, rooms, config)
        prompt_tokens, extra = sum(map(len, encoded)), queue_extra(valid.beams, limits.block_size)
        cost = admission.Cost(
            prompt_tokens=prompt_tokens + extra * len(encoded),
            timeout_s=valid.timeout_s,
            least_tokens=min(map(valid.least_tokens, rooms)),
            tenant=tenant.name,
            weight=tenant.weight,
            longest_wait_s=longest_wait_s,
            continuations=valid.width * len(encoded),
            extra_tokens=extra,
        )
        now_ms = streams.redis_ms()
        request_id = resume.new_id(prefix or ("chatcmpl-" if valid.chat else "cmpl-"), now_ms)
        deadline_ms = now_ms + int(valid.timeout_s * 1000)
        given = _trace_context(request)
        trace = request[METER].describe(request_id, valid, tenant.name, prompt_tokens, max(rooms), *given)
        orders = api.generates(
            valid, request_id, self._gateway, encoded, rooms, deadline_ms, trace, tenant.name, tenant.weight, now_ms
        )
        record = resume.Record(
            owner=request[OWNER],
            tenant=tenant.name,
            valid=valid,
            prompts=await self._tokenizer.offload(size, self._tokenizer.prompted, valid, encoded),
            model=self._model,
            created=now_ms // 1000,
            fingerprint=streams.fleet_watch.fingerprint,
            deadline_ms=deadline_ms,
            traceparent=trace[0],
            tracestate=trace[1],
        )
        ids = valid.include_ids or resume.resumable(request.headers)
        form = record.form(request_id, self._tokenizer.table, ids=ids)
        return Prepared(valid, orders, cost, form, await self._work.offload(size, record.encode))

    async def _parse(
        self, request: web.Request, body: Body, parse: Parse, prefix: str, timeout_s: float
    ) -> tuple[api.ValidRequest, int]:
        """Return a body as a request, and the bytes of all that its prompt is made of.  Raises Refusal."""
        config, size, holder = self._config, len(body.data), holder_of(request)
        if prefix == responses.PREFIX:
            wanted = await self._work.offload(size, responses.wanted_of, body.data, config)
            history = await self._stored.history(holder, wanted.previous)
            items = await self._stored.items(holder, wanted.items)
            size += sum(len(given) + len(answered) for given, answered in history)
            earlier = await self._work.offload(size, earlier_items, history)
            parse = partial(cast(Any, parse), earlier=earlier, items=items)
        valid = await self._work.offload(size, parse, body.data, config, self._model, timeout_s, self._served)
        unread = left_out(self._tokenizer.unread(valid), NAMES.get(prefix, ()), config)
        request[METER].record_unknown((*valid.unknown, *unread))
        return valid, size

    async def _forbid(self, valid: api.ValidRequest, size: int) -> api.ValidRequest:
        """Return a request whose sampling forbids its bad words, and ends at special tokens that `stop` names.

        Raises Refusal, also for fields that engines lack."""
        valid = with_stop_tokens(valid, self._tokenizer.special)
        valid = await self._tokenizer.offload(size, self._tokenizer.forbid, self._tokenizer.end_infill(valid))
        admission.require_fields(self._streams.fleet, valid.sampling)
        return valid

    async def _constrain(
        self, valid: api.ValidRequest, prompts: list[list[int]], size: int, tenant: Tenant, meter: Meter
    ) -> api.ValidRequest:
        """Return a request with the reading of its answer, and the grammar that it asks for.  Raises Refusal."""
        tokenizer = self._tokenizer
        reading = await tokenizer.offload(size, tokenizer.reading_of_all, valid, prompts)
        valid = msgspec.structs.replace(valid, reading=reading)
        constraint = await tokenizer.offload(size, tokenizer.constraint, valid, valid.reading)
        if constraint is None:
            return valid
        if (
            constraint.kind == "thinking"
            and valid.options.thinking_target
            and not admission.grammars(self._streams.fleet)
        ):
            return valid
        admission.require_grammars(self._streams.fleet, constraint.param)
        try:
            compiled = await self._grammars.compile(constraint, tenant.name, tenant.weight)
        except NotServed as error:
            raise api.not_served(error) from None
        sampling = msgspec.structs.replace(valid.sampling, grammar=compiled.grammar)
        meter.record_unknown(compiled.passed_over)
        return msgspec.structs.replace(valid, sampling=sampling, constraint=None, grammar_param=constraint.param)

    async def _record(self, request: web.Request, request_id: str) -> resume.Record:
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
        """Continue an answer after what the client already has; None: from its start.  Raises Refusal.

        `after`: as a stream of a response's events after this one; -1: all of them.  `fresh`: it was begun by this very
        request, whose quotas are taken."""
        if had is not None and had.done:
            return web.Response(status=204)  # it tells EventSource to stop asking
        streams = self._streams
        record = await self._record(request, request_id)
        valid = record.valid
        form = record.form(request_id, self._tokenizer.table, ids=True)
        if isinstance(form, ResponseFormat):
            if after is not None:
                valid = form.events_after(after)
            elif valid.shown.get("background") and not valid.stream:  # again under its idempotency key
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
            given = _trace_context(request)
            request[METER].resume(request_id, valid, prompts * n, record.tenant, record.context, given)
            cached = [mailbox.cached_tokens for mailbox in opened.mailboxes]
            if not fresh:
                stored = sum(mailbox.next - mailbox.at for mailbox in opened.mailboxes)
                await self._quotas.take_repeat(request, request[TENANT], request_id, stored)
            reasoning = [
                await reasoning_tokens(valid, self._tokenizer, mailbox.had, opened.pacer)
                for mailbox in opened.mailboxes
            ]
            form.skip(had, cached, reasoning)
            if valid.shown.get("background"):
                opened.announce()  # its first events do not wait for tokens
            for choice in had.ended:
                opened.end(choice)
            try:
                return await self._deliver(request, valid, opened, form, resumed=True)
            except Refusal as refusal:
                if refusal.code == "cancelled":  # because its client left
                    raise Refusal(410, "stream_gone", "this request was cancelled", given=request_id) from None
                raise

    async def _answer_duplicate(
        self, request: web.Request, key: IdempotencyKey, duplicate: DuplicateRequest
    ) -> web.StreamResponse:
        """Return the answer of the first request under `key`.

        Raises NoAnswer when there will be none; the key is free then."""
        if not duplicate.same_body:
            message = "idempotency-key: it was used for another request, whose path or body differs"
            raise Refusal(409, "idempotency_key_reused", message, param="idempotency-key")
        try:
            return await self.resume(request, duplicate.request_id.rpartition(".")[0], None)
        except Refusal as refusal:
            if refusal.code not in FAILED:
                raise
            await self._streams.release(key, duplicate)
            if refusal.code == "engine_error":  # to try again may kill another engine: the client decides
                raise
            raise NoAnswer from None

    async def _deliver(
        self,
        request: web.Request,
        valid: api.ValidRequest,
        opened: OpenRequest,
        form: AnswerFormat,
        *,
        resumed: bool = False,
    ) -> web.StreamResponse:
        """Write the answer, streamed or whole, and record how much of it was sent."""
        meter = request[METER]
        save = None
        if isinstance(form, ResponseFormat) and not resumed:
            save = partial(self._stored.save, holder_of(request), valid, form, opened.pacer)
        async with contextlib.aclosing(decode(opened, valid, self._tokenizer, each_token=form.each_token)) as pieces:
            if valid.stream:
                async with contextlib.aclosing(_ending_with(pieces, save)) as saved:
                    sent, waiting, silent = opened.record_sent, opened.waiting, opened.silent
                    return await sse.write(
                        request, saved, form, meter, sent, waiting, silent=silent, pacer=opened.pacer
                    )
            answered = []
            try:
                async for changed in pieces:
                    for piece in changed:
                        meter.record_piece(piece)
                    answered += changed
            except HandedOver:
                raise Refusal(503, "shutting_down", "ask again with the same key", retry_after_s=1.0) from None
        headers = opened.waiting.headers() if opened.waiting is not None else None
        parts = await form.whole(answered, opened.pacer)
        if save is not None and isinstance(form, ResponseFormat):
            await save()
            parts = [form.body()]  # it says whether it was stored
        response = await self._work.write(request, parts, headers)
        opened.record_sent(form.tokens)
        return response


async def _ending_with(
    pieces: AsyncIterator[list[Piece]], last: Callable[[], Awaitable[None]] | None
) -> AsyncGenerator[list[Piece], None]:
    """Yield all pieces; call `last` once their reader has asked for more than there are."""
    async for changed in pieces:
        yield changed
    if last is not None:
        await last()


def _trace_context(request: web.Request) -> tuple[str, str]:
    """Return the `traceparent` and `tracestate` of a request; both are empty where the first is no valid one."""
    parent = api.traceparent(request.headers.get("traceparent", ""))
    return parent, api.tracestate(",".join(request.headers.getall("tracestate", ()))) if parent else ""


def _stream_of(request: web.Request) -> tuple[str, Position | None]:
    """Return the answer that a path names by its id or by that of an event, and the event.  Raises Refusal."""
    given = request.match_info["id"]
    if re.fullmatch(ANSWER_ID, given):
        return given, None
    at = Position.parse(given)
    return at.request_id, at


def _right_to(tenant: Tenant, asked: int, meter: Meter) -> int:
    """Return the priority that a key has a right to.  If it is a lower one, a header of the answer names the field."""
    if (priority := tenant.priority(asked)) != asked:
        meter.record_unknown(("priority",))
    return priority
