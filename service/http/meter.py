"""Measurement of one request: its latencies, its token counts, its trace span and its log line.

A `Meter` collects all of them.  It records most metrics once, at the end of the request, so that the cost per token is
small.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from quire.engine.common.tracing import Trace, Value
from quire.service.api.tenants import OverQuota
from quire.service.api.valid_request import ValidRequest
from quire.service.common import metrics
from quire.service.common.metrics import NAMELESS, Telemetry
from quire.service.common.refusal import Refusal
from quire.service.delivery.queue_updates import Waiting
from quire.service.output.choice_delta import ChoiceDelta

log = logging.getLogger("quire.request")

API_PATHS = ("/v1/", "/tokenize", "/detokenize")  # paths logged at INFO; others (probes) at DEBUG
NO_ROOM = (429, 503)  # statuses of requests that were refused for lack of capacity, not for a fault of their own


def _operation(valid: ValidRequest) -> str:
    return "chat" if valid.chat else "text_completion"


def _messages(messages: list[dict[str, Any]]) -> str:
    """Encode messages in the JSON format of OpenTelemetry's GenAI conventions. A prompt of token ids appears as ids."""
    return msgspec.json.encode(
        [{"role": message["role"], "parts": [{"type": "text", "content": message["content"]}]} for message in messages]
    ).decode()


class Meter:
    """Measures one request, from its arrival to its last byte."""

    def __init__(self, telemetry: Telemetry, started: float, request_id: str = "") -> None:
        """`started`: arrival of the request, in `time.monotonic` seconds.  `request_id`: value of `x-request-id`."""
        self._telemetry, self._started, self._request_id = telemetry, started, request_id
        self._answer_id = ""
        self._first_s: float | None = None  # seconds from arrival to the first token
        self._last: dict[int, float] = {}  # choice -> arrival time of its last tokens
        self._gaps_s, self._gaps = 0.0, 0
        self._code: str | None = None  # code of the error response
        self._retry_after_s: float | None = None
        self._finishes: set[str] = set()
        self._cached_tokens = 0
        self._described = 0.0  # time at which parsing and encoding were done
        self._valid: ValidRequest | None = None
        self._trace: Trace | None = None
        self._context = "", ""  # traceparent and tracestate for spans and log lines of this request
        self._texts: dict[int, str] = {}  # choice -> its text, kept only with --trace-prompts
        self._tenant, self._lane = "", ""
        self._admitted = self._resumed = self._no_room = False
        self.unknown_fields: tuple[str, ...] = ()
        self._prompt_tokens = self._output_tokens = self._max_tokens = self._choices = 0

    def fresh(self) -> Meter:
        """Return a new meter with the same arrival time and request id."""
        return Meter(self._telemetry, self._started, self._request_id)

    def describe(
        self,
        answer_id: str,
        valid: ValidRequest,
        tenant: str,
        prompt_tokens: int,
        max_tokens: int,
        traceparent: str = "",
        tracestate: str = "",
    ) -> tuple[str, str]:
        """Record the parsed request.  `answer_id`: id of the answer if the request is admitted.

        Returns `traceparent` and `tracestate` for all further work on the request: those of its own span, or the
        client's if this request is not traced."""
        self._answer_id, self._tenant, self._prompt_tokens, self._choices = answer_id, tenant, prompt_tokens, valid.n
        self._max_tokens, self._described = max_tokens, time.monotonic()
        return self._begin(valid, _operation(valid), traceparent, tracestate)

    def _begin(
        self, valid: ValidRequest, operation: str, traceparent: str, tracestate: str, link: str = ""
    ) -> tuple[str, str]:
        self._valid = valid
        name = f"{operation} {self._telemetry.model}"
        self._trace = trace = self._telemetry.tracing.begin(name, traceparent, self._started, link, tracestate)
        self._context = (trace.traceparent, trace.tracestate) if trace is not None else (traceparent, tracestate)
        return self._context

    def admit(self, waiting: Waiting | None = None) -> None:
        """Record that the request is in the queue, and in which lane."""
        self._admitted, self._lane = True, waiting.lane if waiting is not None else "on_time"
        self._telemetry.count(metrics.DECISIONS, 1, "admitted", self._lane)
        self._telemetry.count(metrics.PROMPT_TOKENS, self._prompt_tokens)
        self._span_admission()

    def _span_admission(self, error: str = "") -> None:
        if self._trace is not None:
            parent, state = self._context
            now = time.monotonic()
            self._telemetry.tracing.add("admission", parent, self._described, now, {}, error, state)

    def resume(
        self,
        answer_id: str,
        valid: ValidRequest,
        choices: int,
        tenant: str,
        begun: tuple[str, str] = ("", ""),
        given: tuple[str, str] = ("", ""),
    ) -> None:
        """Record that a client resumes an answer that was admitted before.

        `begun`: trace context of the original request, which this one continues.  `given`: trace context that the
        client sent now."""
        self._answer_id, self._choices, self._tenant = answer_id, choices, tenant
        self._prompt_tokens = 0  # already counted when the request was admitted
        self._admitted = self._resumed = True
        self._telemetry.count(metrics.RESUMED_ANSWERS)
        parent, state = begun if begun[0] else given
        self._begin(valid, "resume", parent, state, given[0] if begun[0] else "")

    def record_delta(self, delta: ChoiceDelta) -> None:
        """Record a delta: new tokens or the end of a choice."""
        if tokens := len(delta.token_ids):
            now = time.monotonic()
            if self._first_s is None:
                self._first_s = now - self._started
                if not self._resumed:
                    self._telemetry.observe_first_token(self._first_s, self._lane)
            if (last := self._last.get(delta.choice)) is not None:
                # Tokens of one delta arrived together, so the gap is divided evenly among them.
                self._telemetry.observe(metrics.INTER_TOKEN, (now - last) / tokens, times=tokens)
                self._gaps_s += now - last
                self._gaps += tokens
            else:
                self._cached_tokens += delta.cached_tokens
                if tokens > 1 and not self._resumed and delta.score is None:  # arrived together with the first token
                    self._telemetry.observe(metrics.INTER_TOKEN, 0.0, times=tokens - 1)
                    self._gaps += tokens - 1
            self._last[delta.choice] = now
            self._output_tokens += tokens
        if delta.finish is not None:
            self._finishes.add(delta.finish)
        if self._trace is not None and self._telemetry.trace_prompts:
            self._texts[delta.choice] = self._texts.get(delta.choice, "") + delta.text

    def record_unknown(self, fields: tuple[str, ...]) -> None:
        """Record fields of the request that have no effect; the header `x-unknown-fields` names them."""
        self.unknown_fields += fields

    def fail(self, refusal: Refusal) -> None:
        """Record the error that the client gets, as an error response or as the last event of a stream."""
        self._code, self._retry_after_s = refusal.code, refusal.retry_after_s
        self._telemetry.count(metrics.REFUSALS, 1, refusal.code)
        if not self._admitted and refusal.status in NO_ROOM and not isinstance(refusal, OverQuota):
            self._no_room = True
            self._telemetry.count(metrics.DECISIONS, 1, "refused", refusal.code)
            if refusal.retry_after_s is not None:
                self._telemetry.observe(metrics.RETRY_AFTER, refusal.retry_after_s)
            self._span_admission(refusal.code)

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per output token (TPOT), without the first token of each choice; None without such tokens."""
        return self._gaps_s / self._gaps if self._gaps else None

    def close(self, endpoint: str, status: int) -> None:
        """Record the end of the request.  `status`: HTTP status; 499: the client left."""
        seconds, telemetry = time.monotonic() - self._started, self._telemetry
        telemetry.count(metrics.REQUESTS, 1, endpoint, str(status))
        if self.unknown_fields:
            telemetry.count(metrics.UNKNOWN_FIELDS, len(self.unknown_fields), endpoint)
        if self._admitted:
            self._record_answer(seconds)
        outcome = self._outcome(status)
        if self._no_room or (self._admitted and not self._resumed and outcome in ("ok", "failed")):
            first_s = seconds if self._first_s is None else self._first_s
            telemetry.count_goodput(first_s, self.seconds_per_token, answered=outcome == "ok")
        if self._answer_id:
            tenant = telemetry.tenant_label(self._tenant)
            telemetry.count(metrics.TENANT_REQUESTS, 1, tenant, outcome)
            if self._admitted:
                telemetry.count(metrics.TENANT_TOKENS, self._prompt_tokens, tenant, "prompt")
                telemetry.count(metrics.TENANT_TOKENS, self._output_tokens, tenant, "output")
        if self._trace is not None and self._valid is not None:
            failed = "" if outcome == "ok" else self._code or outcome
            self._trace.end(self._attributes(self._valid, status), failed)
        self._log(endpoint, status, outcome, seconds)

    def _record_answer(self, seconds: float) -> None:
        telemetry = self._telemetry
        telemetry.count(metrics.OUTPUT_TOKENS, self._output_tokens)
        if self._resumed:  # the original request records these metrics
            return
        if self._first_s is None:
            telemetry.count(metrics.STARTS, 1, self._lane, "never")
        telemetry.observe(metrics.REQUEST_LATENCY, seconds)
        telemetry.observe(metrics.REQUEST_PROMPT, self._prompt_tokens)
        telemetry.observe(metrics.REQUEST_OUTPUT, self._output_tokens)
        telemetry.observe(metrics.MAX_TOKENS, self._max_tokens)
        telemetry.observe(metrics.CHOICES, self._choices)
        if (per_token := self.seconds_per_token) is not None:
            telemetry.observe(metrics.PER_TOKEN, per_token)

    def _log(self, endpoint: str, status: int, outcome: str, seconds: float) -> None:
        """Log the request as one line.  Probes and scrapes, which are frequent, have level DEBUG."""
        level = logging.INFO if endpoint.startswith(API_PATHS) else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        line: dict[str, object] = {
            "request_id": self._request_id,
            "endpoint": endpoint,
            "status": status,
            "outcome": outcome,
            "seconds": round(seconds, 4),
        }
        if self._answer_id:
            line |= {"id": self._answer_id, "tenant": self._tenant or NAMELESS, "output_tokens": self._output_tokens}
            if self._resumed:
                line["resumed"] = True
            else:
                line |= {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens}
        if self._first_s is not None:
            line["first_token_s"] = round(self._first_s, 4)
        if self.seconds_per_token is not None:
            line["token_s"] = round(self.seconds_per_token, 5)
        if self._finishes:
            line["finish"] = ",".join(sorted(self._finishes))
        if self._code is not None:
            line["error"] = self._code
        if self._retry_after_s is not None:
            line["retry_after_s"] = self._retry_after_s
        parent, state = self._context
        if parent:
            line["trace_id"] = parent.split("-")[1]
        if state:
            line["tracestate"] = state
        log.log(level, "request", extra={"fields": line})

    def _attributes(self, valid: ValidRequest, status: int) -> dict[str, Value]:
        """Return the attributes of the trace span, named by OpenTelemetry's GenAI conventions."""
        sampling = valid.sampling
        found: dict[str, Value] = {
            "gen_ai.operation.name": _operation(valid),
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._telemetry.model,
            "gen_ai.response.model": self._telemetry.model,
            "gen_ai.response.id": self._answer_id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.choice.count": valid.n,
            "gen_ai.request.stream": valid.stream,
            "gen_ai.usage.output_tokens": self._output_tokens,
            "gen_ai.response.finish_reasons": sorted(self._finishes),
            "http.response.status_code": status,
            "quire.request_id": self._request_id,
            "quire.tenant": self._tenant or NAMELESS,
        }
        if not self._resumed:  # for a resumed answer, the span of the original request has these
            found["gen_ai.request.max_tokens"] = self._max_tokens
            found["gen_ai.usage.input_tokens"] = self._prompt_tokens
            found["gen_ai.usage.cache_read.input_tokens"] = self._cached_tokens
        if valid.seeded:
            found["gen_ai.request.seed"] = sampling.seed
        if self._first_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self._first_s
        if self._telemetry.trace_prompts:
            found |= self._texts_for_trace(valid)
        return found

    def _texts_for_trace(self, valid: ValidRequest) -> dict[str, Value]:
        found: dict[str, Value] = {}
        if not self._resumed:
            asked = valid.messages or [{"role": "user", "content": prompt} for prompt in valid.prompts]
            found["gen_ai.input.messages"] = _messages(asked)
        answered = [{"role": "assistant", "content": text} for _, text in sorted(self._texts.items())]
        found["gen_ai.output.messages"] = _messages(answered)
        return found

    def _outcome(self, status: int) -> str:
        """Return "ok", "cancelled" (the client left), "refused" (lack of capacity), "invalid" or "failed"."""
        if status == 499:
            return "cancelled"
        if self._code is None:
            return "ok"
        if self._admitted or status not in NO_ROOM:
            return "failed" if self._admitted or status >= 500 else "invalid"
        return "refused"
