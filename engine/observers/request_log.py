"""The request log: one JSON line per finished request, without prompt or output text.

    TurnRecord.outputs.events --RequestLog--> FILE    `python -m quire.engine.tools simulate --trace FILE` reads it

RequestLine defines the fields.  A request that is reassigned is logged by the engine that finishes it.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from pathlib import Path

import msgspec

from quire.engine.commands import request_of
from quire.engine.core.limits import Event
from quire.engine.observers.log_file import LogFile
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.wire.messages import FinishReason, Generate

LINE_BYTES = 1_000  # memory of one line until it is written, estimated


class RequestLine(msgspec.Struct):
    """One finished request.  Times in seconds, rounded to microseconds."""

    at_s: float  # time of queueing, relative to the engine's start; negative: before the start
    unix_s: float  # time of queueing as unix time, on the engine's clock
    prompt_len: int  # tokens
    output_len: int = 0  # tokens of its longest choice
    max_tokens: int = 0  # maximum output tokens per choice
    n: int = 1  # choices
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    ends_known: bool = False  # the answer ends at max_tokens, since it ignores EOS: the scheduler knew its length
    outcome: FinishReason | None = None  # finish reason of the choice that ended last
    claimed_s: float = 0.0  # seconds from queueing until this engine claimed the request
    queue_s: float | None = None  # seconds from queueing to the start in the batch; null: never started on this engine
    ttft_s: float | None = None  # seconds from queueing to the first token; null: no first token on this engine
    e2e_s: float = 0.0  # seconds from queueing until the last choice ended
    preemptions: int = 0  # preemptions of its sequences
    pauses: int = 0  # times that one of its sequences paused for want of a free block
    paused_s: float = 0.0  # seconds of these waits, summed over its sequences
    # At its end: running sequences, measured seconds of a decode-only step with that many, and seconds per prompt token
    # in addition; 0: not measured yet.
    running: int = 0
    step_s: float = 0.0
    prompt_token_s: float = 0.0
    priority: int = 0
    tenant: str = ""  # digest of the tenant's name; "": no tenant


class RequestLog:
    """Observer that follows every request and writes its line."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError."""
        self._file = LogFile(path, max_bytes)
        self._began = 0.0  # unix seconds of the first turn
        self._open: dict[str, RequestLine] = {}  # lines by request id
        self._paused: dict[tuple[str, int], float] = {}  # (request, choice) -> unix seconds since which it waits

    def observe(self, record: TurnRecord) -> None:
        self._began = self._began or record.unix_ms / 1000
        for command in record.commands:
            if (request := request_of(command)) is not None and request.id not in self._open:
                self._open[request.id] = self._begin(request, record.unix_ms)
        if not self._open:
            return
        now = (record.unix_ms / 1000) + record.marks[-1] - record.marks[0]
        for event in record.outputs.events:
            if event.request.id in self._open:
                self._milestone(event, now)
        for request_id in record.outputs.finished:
            if (line := self._open.pop(request_id, None)) is not None:
                line.running, line.step_s, line.prompt_token_s = record.step_costs
                self._file.write(partial(encode, line), LINE_BYTES)

    def dropped_lines(self) -> int:
        """Return the number of lines that are missing because the disk was too slow or failed."""
        return self._file.dropped

    def close(self) -> None:
        """Write the waiting lines and close the file."""
        self._file.close()

    def _begin(self, request: Generate, unix_ms: int) -> RequestLine:
        queued = (request.queued_ms or unix_ms) / 1000
        return RequestLine(
            at_s=queued - self._began,
            unix_s=queued,
            prompt_len=len(request.token_ids),
            max_tokens=request.max_new_tokens,
            n=request.n,
            ends_known=request.sampling.ignore_eos and not request.sampling.stop_token_ids,
            claimed_s=max(0.0, unix_ms / 1000 - queued),
            priority=request.priority,
            tenant=digest(request.tenant),
        )

    def _milestone(self, event: Event, now: float) -> None:
        line = self._open[event.request.id]
        since = max(0.0, now - line.unix_s)
        if event.kind == "started":
            line.queue_s, line.cached_tokens = since, event.tokens
        elif event.kind == "preempted":
            line.preemptions += 1
        elif event.kind == "paused":
            line.pauses += 1
            self._paused[event.request.id, event.index] = now
        elif event.kind == "continued":
            line.paused_s += now - self._paused.pop((event.request.id, event.index), now)
        elif event.kind == "first" and line.ttft_s is None:
            line.ttft_s = since
        elif event.kind == "ended" and event.reason is None:
            self._paused.pop((event.request.id, event.index), None)
            del self._open[event.request.id]
        elif event.kind == "ended":
            line.paused_s += now - self._paused.pop((event.request.id, event.index), now)
            line.outcome, line.e2e_s = event.reason, since
            line.output_len = max(line.output_len, event.tokens)


def digest(name: str) -> str:
    """Return a digest of a name, 16 hexadecimal digits; "" for an empty name."""
    return blake2b(name.encode(), digest_size=8).hexdigest() if name else ""


def encode(line: RequestLine) -> bytes:
    """Return the line as JSON."""
    values = msgspec.structs.asdict(line)
    values |= {name: round(value, 6) for name, value in values.items() if isinstance(value, float)}
    return msgspec.json.encode(values) + b"\n"
