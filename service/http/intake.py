"""Intake of a new request: the steps from its body to submissions for engines.

    body -> api.parse -> tokenizer.encode -> grammar -> fitting.fit -> cost, submissions, record, format = Accepted

Nothing is queued here: afterwards `Answers.begin` takes the quotas, and `Streams.open` decides on admission.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
from aiohttp import web

from quire.engine.wire.messages import Generate
from quire.service.api import api, fitting
from quire.service.api.anthropic import messages
from quire.service.api.beams import queue_extra
from quire.service.api.envelope import Envelope, generates
from quire.service.api.fitting import EngineLimits
from quire.service.api.format import AnswerFormat, Prompted
from quire.service.api.inference_headers import InferenceHeaders
from quire.service.api.openai_responses import responses
from quire.service.api.openai_responses.output_items import PREFIX as RESPONSE
from quire.service.api.openai_responses.response_items import earlier_items
from quire.service.api.prediction import drafts_nothing
from quire.service.api.skipped import left_out
from quire.service.api.tenants import Tenant
from quire.service.api.trace_context import TraceContext
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import check
from quire.service.config import GatewayConfig
from quire.service.delivery import admission, resume
from quire.service.delivery.adapters import Adapters
from quire.service.delivery.streams import Streams
from quire.service.grammar.grammar_checks import GrammarChecks
from quire.service.grammar.grammar_errors import NotServed
from quire.service.http.bodies import Body, parse_weight
from quire.service.http.meter import Meter
from quire.service.http.middleware import METER, OWNER, TENANT
from quire.service.http.request_work import RequestWork, trace_context
from quire.service.http.stored_responses import StoredResponses, holder_of
from quire.service.text.stop_strings import with_stop_tokens
from quire.service.text.tokenizer import Tokenizer

Parse = Callable[[bytes, GatewayConfig, str, float, api.Served], ValidRequest]

# Id prefix of an API format -> that format's names for fields of /v1/chat/completions.
NAMES = {messages.PREFIX: messages.NAMES, RESPONSE: responses.NAMES}
MOMENT_S = 0.001  # timeout of a request that waited for an engine until its deadline, so that admission refuses it


class Accepted(NamedTuple):
    """A request that was parsed, encoded and checked: ready for admission."""

    valid: ValidRequest
    submissions: list[Generate]  # one submission per prompt
    cost: admission.Cost
    form: AnswerFormat
    record: bytes  # encoded resume.Record, stored in Redis for resuming the answer


class Intake:
    """Parses, encodes and checks the requests of one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        streams: Streams,
        work: RequestWork,
        stored: StoredResponses,
        *,
        model: str,
        gateway: str,
        adapters: Adapters,
    ) -> None:
        """`model`: the model's name in the API.  `gateway`: id of this gateway process."""
        self._config, self._tokenizer, self._streams = config, tokenizer, streams
        self._work, self._stored = work, stored
        self._model, self._gateway, self._adapters = model, gateway, adapters
        self._grammars = GrammarChecks()
        self._inference_headers = InferenceHeaders(config)

    async def accept(self, request: web.Request, body: Body, parse: Parse, prefix: str) -> Accepted:
        """Parse, encode and check a new request.  Raises Refusal.

        `prefix`: prefix of the request id; "": the body decides whether it is a chat or a completion."""
        tenant, priority = self._inference_headers.place(request.headers, request[TENANT])
        timeout_s = api.header_timeout(request.headers.get("X-Request-Timeout"), self._config)
        longest_wait_s = api.header_queue_wait(request.headers.get("X-Max-Queue-Wait"), self._config)
        valid, size = await self.parse(request, body, parse, prefix, timeout_s)
        priority = _right_to(tenant, valid.priority, request[METER]) if priority is None else priority
        valid = msgspec.structs.replace(valid, cache_salt=tenant.salt(valid.cache_salt), priority=priority, unknown=())
        limits, valid, longest_wait_s = await self._wait_for_limits(valid, longest_wait_s)
        encoded = await self._tokenizer.encode(valid, size, longest=limits.max_model_len, total=self._work.max_tokens())
        valid = await self._forbid(valid, size)
        valid = await self._constrain(valid, encoded, size, tenant, request[METER])
        predicted = await self._predicted(valid, size, request[METER])
        rooms = await self._work.offload(size, fitting.fit, valid, encoded, limits)
        rooms = fitting.bound_logprobs(valid, encoded, rooms, self._config)
        prompt_tokens, extra = sum(map(len, encoded)), queue_extra(valid.beams, limits.block_size)
        cost = admission.Cost(
            prompt_tokens=prompt_tokens + extra * len(encoded),
            timeout_s=valid.timeout_s,
            min_output_tokens=min(map(valid.min_output_tokens, rooms)),
            tenant=tenant.name,
            weight=tenant.weight,
            longest_wait_s=longest_wait_s,
            choices=valid.width * len(encoded),
            extra_tokens=extra,
        )
        envelope = self._envelope(valid, tenant, prefix)
        given = trace_context(request)
        trace = request[METER].describe(
            envelope.request_id, valid, tenant.name, prompt_tokens, max(rooms), given.parent, given.state
        )
        envelope = envelope._replace(trace=TraceContext(*trace))
        prompts = await self._tokenizer.threads.run(size, self._tokenizer.prompted, valid, encoded)
        record = self._record(request[OWNER], valid, prompts, envelope)
        ids = valid.include_ids or resume.resumable(request.headers)
        form = record.form(envelope.request_id, self._tokenizer.vocabulary.table, ids=ids)
        submissions = generates(valid, encoded, rooms, envelope, self._tokenizer.turns.anchors, predicted)
        return Accepted(valid, submissions, cost, form, await self._work.offload(size, record.encode))

    def _envelope(self, valid: ValidRequest, tenant: Tenant, prefix: str) -> Envelope:
        """Return id, gateway, tenant and times of a new request; the trace context is added later."""
        now_ms = self._streams.redis_ms()
        return Envelope(
            request_id=resume.new_id(prefix or ("chatcmpl-" if valid.chat else "cmpl-"), now_ms),
            gateway=self._gateway,
            tenant=tenant.name,
            weight=tenant.weight,
            queued_ms=now_ms,
            deadline_ms=now_ms + int(valid.timeout_s * 1000),
        )

    def _record(self, owner: str, valid: ValidRequest, prompts: list[Prompted], envelope: Envelope) -> resume.Record:
        return resume.Record(
            owner=owner,
            tenant=envelope.tenant,
            valid=valid,
            prompts=prompts,
            model=self._model if valid.adapter is None else valid.adapter.name,
            created=envelope.queued_ms // 1000,
            fingerprint=self._streams.fleet_watch.fingerprint,
            deadline_ms=envelope.deadline_ms,
            traceparent=envelope.trace.parent,
            tracestate=envelope.trace.state,
        )

    async def parse(
        self, request: web.Request, body: Body, parse: Parse, prefix: str, timeout_s: float
    ) -> tuple[ValidRequest, int]:
        """Parse a body.  Returns the request, and the bytes of the body and of the stored responses that it continues.

        Raises Refusal."""
        config, size, holder = self._config, len(body.data), holder_of(request)
        weight = parse_weight(body.data)
        if prefix == RESPONSE:
            wanted = await self._work.offload(weight, responses.wanted_of, body.data, config)
            history = await self._stored.history(holder, wanted.previous)
            items = await self._stored.items(holder, wanted.items)
            size += sum(len(given) + len(answered) for given, answered in history)
            weight += sum(parse_weight(given) + parse_weight(answered) for given, answered in history)
            earlier = await self._work.offload(weight, earlier_items, history)
            parse = partial(cast(Any, parse), earlier=earlier, items=items)
        work, data = self._work, body.data

        async def parsed(served: api.Served) -> ValidRequest:
            return await work.offload(weight, parse, data, config, self._model, timeout_s, served)

        valid = await self._adapters.chosen(request[TENANT], parsed)
        unread = left_out(self._tokenizer.chat.unread(valid), NAMES.get(prefix, ()), config)
        request[METER].record_unknown((*valid.unknown, *unread))
        return valid, size

    async def _wait_for_limits(
        self, valid: ValidRequest, longest_wait_s: float
    ) -> tuple[EngineLimits, ValidRequest, float]:
        """Wait until an engine takes requests.

        Returns the limits of the engines, the request with its timeout shortened by the wait, and `longest_wait_s`
        shortened by the wait.  Raises Refusal."""
        waited_s = await self._streams.fleet_watch.engine_wait.wait(min(longest_wait_s, valid.timeout_s))
        limits = admission.limits(self._streams.fleet, valid.beams)
        left_s = max(MOMENT_S, valid.timeout_s - waited_s)
        return limits, msgspec.structs.replace(valid, timeout_s=left_s), max(0.0, longest_wait_s - waited_s)

    async def _forbid(self, valid: ValidRequest, size: int) -> ValidRequest:
        """Return the request with token ids for its `bad_words`, and for special tokens in its `stop` strings.

        Raises Refusal, also for fields that the engines do not support."""
        valid = with_stop_tokens(valid, self._tokenizer.vocabulary.special)
        valid = await self._tokenizer.threads.run(size, self._tokenizer.forbid, self._tokenizer.end_infill(valid))
        admission.require_fields(self._streams.fleet, valid.sampling)
        if valid.adapter is not None:
            admission.require_adapters(self._streams.fleet, "model")
        return valid

    async def _predicted(self, valid: ValidRequest, size: int, meter: Meter) -> list[int]:
        """Return the token ids of the client's `prediction`, which engines use for speculative decoding.

        If the engines cannot use it for this request, return [] and name the field in `x-unknown-fields`.  Raises
        Refusal if it has too many tokens."""
        if valid.prediction is None:
            return []
        tokens = await self._tokenizer.threads.run(size, self._tokenizer.predicted, valid.prediction)
        check("prediction", len(tokens), self._config)
        if drafts_nothing(valid.sampling) or not admission.drafts(self._streams.fleet):
            meter.record_unknown(("prediction",))
            return []
        return tokens

    async def _constrain(
        self, valid: ValidRequest, prompts: list[list[int]], size: int, tenant: Tenant, meter: Meter
    ) -> ValidRequest:
        """Return the request with the rules for parsing its answer, and with the compiled grammar if it needs one.

        Raises Refusal."""
        tokenizer = self._tokenizer
        reading = await tokenizer.threads.run(size, tokenizer.rules.reading_of_all, valid, prompts)
        valid = msgspec.structs.replace(valid, reading=reading)
        constraint = await tokenizer.threads.run(size, tokenizer.rules.constraint, valid, valid.reading)
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


def _right_to(tenant: Tenant, asked: int, meter: Meter) -> int:
    """Return the requested priority, limited to what the tenant may use.

    If it was lowered, `x-unknown-fields` names `priority`."""
    if (priority := tenant.priority(asked)) != asked:
        meter.record_unknown(("priority",))
    return priority
