"""Request times: histograms of the phases of requests, and trace spans of traced requests.

queued --queue--> started --prefill--> first token --decode--> ended       preempted --resume--> in the batch again
"""

from __future__ import annotations

from collections import Counter

from quire.engine.commands import request_of
from quire.engine.common import histograms
from quire.engine.common.histograms import Tally
from quire.engine.common.tracing import Tracing, Value
from quire.engine.core.limits import Event
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.messages import Generate


class Clock:
    """Times of the milestones of one request, `time.monotonic` seconds; 0: not reached."""

    __slots__ = (
        *("claimed", "first", "longest", "preempted", "preemptions", "queued", "request", "resumed", "started"),
        *("step", "traced"),
    )

    def __init__(self, request: Generate, queued: float, claimed: float, *, traced: bool) -> None:
        self.request = request
        self.queued = queued  # time when it entered the queue in Redis
        self.claimed = claimed  # time when this engine claimed it
        self.started = 0.0  # time when it entered the batch
        self.first: dict[int, float] = {}  # choice -> time of its first token
        self.preempted: dict[int, float] = {}  # choice -> time of its preemption, while it waits to resume
        self.preemptions = 0  # number of preemptions of all its sequences
        self.resumed: dict[int, float] = {}  # choice begun by another engine -> time when it resumed on this engine
        self.longest = 0  # output tokens of its longest ended choice
        self.step = 0  # first step of its current phase
        self.traced = traced


class RequestTimes:
    """Follows every request from its claim to its end."""

    def __init__(self, engine: str, tracing: Tracing) -> None:
        self._engine, self._tracing = engine, tracing
        self.open: dict[str, Clock] = {}  # requests that have not ended, by id
        self.accepted = 0  # accepted requests since start
        self.ended: Counter[str] = Counter()  # ended sequences by finish reason
        self.queue_s = Tally(histograms.FINE_REQUEST_S)
        self.prefill_s = Tally(histograms.FINE_REQUEST_S)
        self.decode_s = Tally(histograms.FINE_REQUEST_S)
        self.inference_s = Tally(histograms.FINE_REQUEST_S)
        self.preempted_s = Tally(histograms.FINE_REQUEST_S)
        self.prompt_tokens = Tally(histograms.TOKENS)
        self.output_tokens = Tally(histograms.TOKENS)
        self.longest_tokens = Tally(histograms.TOKENS)  # output tokens of the longest choice, per request
        self.preemptions = Tally(histograms.PREEMPTIONS)  # per request
        self.prefilled_tokens = 0  # tokens of prompts whose first output token was sampled, cached tokens included
        self.computed_tokens = Tally(histograms.TOKENS)  # uncached prompt tokens per request

    def observe(self, record: TurnRecord) -> None:
        for command in record.commands:
            if (request := request_of(command)) is not None:
                self._accept(request, record.marks[0], record.unix_ms)
        for event in record.outputs.events:
            self._milestone(event, record, record.marks[-1])
        for request_id in record.outputs.finished:
            clock = self.open.pop(request_id, None)
            if clock is not None and clock.started:
                self.longest_tokens.add(clock.longest)
                self.preemptions.add(clock.preemptions)

    def oldest_wait_s(self, now: float) -> float:
        """Return how many seconds the oldest request that has not started has waited; 0: none waits."""
        waiting = [clock.queued for clock in list(self.open.values()) if not clock.started]
        return max(0.0, now - min(waiting)) if waiting else 0.0

    def _accept(self, request: Generate, now: float, unix_ms: int) -> None:
        """Begin to follow a request.  `now` (monotonic) and `unix_ms` (unix time) are the same moment."""
        waited = max(0, unix_ms - request.queued_ms) / 1000 if request.queued_ms else 0.0
        traced = self._tracing.on and bool(request.traceparent)
        self.open[request.id] = Clock(request, now - waited, now, traced=traced)
        self.accepted += 1

    def _milestone(self, event: Event, record: TurnRecord, now: float) -> None:
        clock = self.open.get(event.request.id)
        if event.kind == "ended":
            self.ended[event.reason or "moved"] += 1
            if event.reason is None:  # reassigned to another engine: `outputs.finished` will not contain it
                self.open.pop(event.request.id, None)
        if clock is None:
            return
        index = event.index
        if event.kind == "started":
            clock.started, clock.step = now, record.last_step
            self.queue_s.add(now - clock.queued)
            self.prompt_tokens.add(len(event.request.token_ids))
            self.computed_tokens.add(len(event.request.token_ids) - event.tokens)
            self._span("queue", clock, event, clock.queued, now)
        elif event.kind == "first":
            if not clock.first:  # one span per request, since its other choices share the prefill
                self._span("prefill", clock, event, clock.started, now, record.last_committed)
                clock.step = record.last_committed + 1
                self.prefilled_tokens += len(event.request.token_ids)
            clock.first[index] = now
            self.prefill_s.add(now - clock.started)
        elif event.kind in ("preempted", "requeued"):
            clock.preempted[index] = now
            clock.preemptions += event.kind == "preempted"
        elif event.kind == "resumed":
            if (since := clock.preempted.pop(index, None)) is not None:
                self.preempted_s.add(now - since)
            else:
                since = clock.claimed
                clock.resumed[index], clock.step = now, record.last_step
            self._span("resume", clock, event, since, now)
        elif event.kind == "ended" and event.reason is not None:
            self._end(clock, event, record.last_committed, now)

    def _end(self, clock: Clock, event: Event, step: int, now: float) -> None:
        first = clock.first.get(event.index)
        clock.longest = max(clock.longest, event.tokens)
        if clock.started:
            self.inference_s.add(now - clock.started)
            self.output_tokens.add(event.tokens)
            if first is not None:
                self.decode_s.add(now - first)
        if (since := first or clock.resumed.get(event.index)) is not None:
            self._span("decode", clock, event, since, now, step)
        elif clock.started:
            self._span("prefill", clock, event, clock.started, now, step)
        else:
            self._span("queue", clock, event, clock.queued, now)

    def _span(self, name: str, clock: Clock, event: Event, since: float, now: float, step: int | None = None) -> None:
        """Emit the trace span that ends with this event.  `step`: the last step in which its phase ran."""
        if not clock.traced:
            return
        request = event.request
        attributes: dict[str, Value] = {
            "gen_ai.request.id": request.id,
            "quire.engine": self._engine,
            "quire.continuation": event.index,
        }
        if step is not None:
            attributes |= {"quire.first_step": min(clock.step, step), "quire.last_step": step}
        error = ""
        if event.kind == "started":
            attributes["gen_ai.usage.cache_read.input_tokens"] = event.tokens
        elif event.kind == "first":
            attributes["gen_ai.usage.input_tokens"] = len(request.token_ids)
        elif event.kind == "resumed":
            attributes["quire.tokens_to_compute"] = event.tokens
        elif event.reason is not None:
            attributes["gen_ai.usage.output_tokens"] = event.tokens
            attributes["gen_ai.response.finish_reasons"] = [event.reason]
            error = event.reason if event.reason in ("error", "deadline") else ""
        self._tracing.add(name, request.traceparent, since, now, attributes, error, request.tracestate)
