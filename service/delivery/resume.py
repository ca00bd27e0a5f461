"""Resumption of an answer: the record from which any gateway can continue it, and the check of who may resume it.

    POST, first event "cmpl-1:1" ... connection, client or gateway lost after "cmpl-1:17"
    POST to the same path, or GET /v1/streams/cmpl-1, with `Last-Event-ID: cmpl-1:17`   at any gateway: continues at 18
    POST with the same `Idempotency-Key` and body                                       the same answer from its start

The record is stored in Redis with the request, for as long as its token log.  Any gateway computes the same answer,
byte for byte, from record and token log.  Only the split into events may differ: a client that catches up gets larger
events.  Event ids are sent only to clients that announce that they can resume, because many SSE parsers try to parse
every non-empty line as data.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.engine.wire.records import IdempotencyKey
from quire.service.api.anthropic.messages import PREFIX as MESSAGE
from quire.service.api.anthropic.messages import MessageFormat
from quire.service.api.format import AnswerFormat, Format, Prompted
from quire.service.api.generative_scoring import ScoreFormat
from quire.service.api.openai_responses.compaction import OBJECT as COMPACTION
from quire.service.api.openai_responses.compaction import CompactionFormat
from quire.service.api.openai_responses.output_items import PREFIX as RESPONSE
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.tools import ChatOptions
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import KEY_CHARS
from quire.service.common.refusal import Refusal

_ID_DIGITS = 32  # digits of a request id, after its prefix
_ID_TIME = 12  # hexadecimal digits of a request id for the time of the request, unix milliseconds


class Record(msgspec.Struct, frozen=True):
    """All that another gateway needs to write the answer of an accepted request.  Fields are only ever appended."""

    owner: str  # digest of the API key that may resume the answer: see Tenants.owner
    tenant: str
    valid: ValidRequest  # without prompts and messages
    prompts: list[Prompted]  # parts of each prompt that the answer contains: token ids for usage, text for `echo`
    model: str
    created: int  # unix seconds
    fingerprint: str | None
    deadline_ms: int  # unix time on Redis' clock
    traceparent: str = ""  # W3C trace context of the request; a resumed answer continues its trace
    tracestate: str = ""  # W3C header that accompanies traceparent
    shown: bytes = b""  # JSON of `valid.shown`, if that has integers too large for msgpack

    @property
    def context(self) -> tuple[str, str]:
        """The trace context of the request: `traceparent` and `tracestate`."""
        return self.traceparent, self.tracestate

    def encode(self) -> bytes:
        """Return the record as it is stored in Redis."""
        bare = msgspec.structs.replace(
            self.valid, prompts=[], messages=[], conversations=[], sources=[], items=[], options=ChatOptions()
        )
        if bare.prediction is not None:  # "": usage must still show that the request had a prediction
            bare = msgspec.structs.replace(bare, prediction="")
        try:
            return msgspec.msgpack.encode(msgspec.structs.replace(self, valid=bare))
        except OverflowError:  # an integer beyond 64 bits, for example in a tool's schema, which the answer repeats
            fields = {name: value for name, value in bare.shown.items() if not isinstance(value, dict | list)}
            bare = msgspec.structs.replace(bare, shown=fields)
            shown = msgspec.json.encode(self.valid.shown)
            return msgspec.msgpack.encode(msgspec.structs.replace(self, valid=bare, shown=shown))

    def form(self, request_id: str, vocabulary: list[bytes], *, ids: bool) -> AnswerFormat:
        """Return a formatter of the answer, from its start.  `ids`: write event ids, if the format has any."""
        if request_id.startswith(MESSAGE):
            return MessageFormat(self.valid, request_id=request_id, model=self.model, prompt=self.prompts[0])
        if request_id.startswith(RESPONSE):
            form = CompactionFormat if self.valid.shown.get("object") == COMPACTION else ResponseFormat
            return form(
                self.valid,
                request_id=request_id,
                model=self.model,
                created=self.created,
                prompt=self.prompts[0],
                vocabulary=vocabulary,
            )
        form_of = Format if self.valid.scoring is None else ScoreFormat
        return form_of(
            self.valid,
            request_id=request_id,
            model=self.model,
            created=self.created,
            fingerprint=self.fingerprint,
            prompts=self.prompts,
            vocabulary=vocabulary,
            ids=ids,
        )


_decode = msgspec.msgpack.Decoder(Record).decode


def decode(record: bytes) -> Record:
    """Decode a record as stored in Redis."""
    found = _decode(record)
    if not found.shown:
        return found
    shown = msgspec.json.decode(found.shown, type=dict[str, Any])
    return msgspec.structs.replace(found, valid=msgspec.structs.replace(found.valid, shown=shown), shown=b"")


def read(record: bytes | None, request_id: str, owner: str, retain_s: float, now_ms: int) -> Record:
    """Decode a record if `owner` made the request; otherwise raise Refusal.

    Whether the record is missing or has another owner, the status is the same: 410 if the id is older than `retain_s`,
    so that the answer may have expired, else 404."""
    found = decode(record) if record else None
    if found is not None and found.owner == owner:
        return found
    made_ms = int(request_id[-_ID_DIGITS:][:_ID_TIME], 16)
    if made_ms < now_ms - retain_s * 1000:
        raise Refusal(410, "stream_gone", "this answer is not kept any longer", given=request_id)
    raise Refusal(404, "stream_not_found", "no answer with this id", given=request_id)


def new_id(prefix: str, now_ms: int) -> str:
    """Return a request id that cannot be guessed: 48 bits of time, then 80 random bits."""
    return f"{prefix}{now_ms:0{_ID_TIME}x}{secrets.token_hex(10)}"


def resumable(headers: Mapping[str, str]) -> bool:
    """Return whether a client announces, by its headers, that it will resume after losing the connection."""
    return "Idempotency-Key" in headers or headers.get("X-Resumable", "").lower() in ("1", "true")


def idempotency_key(key: str | None, owner: str, path: str, body: bytes) -> IdempotencyKey | None:
    """Return digests of an Idempotency-Key header and of the request; None without the header.  Raises Refusal.

    The key's scope is the client's API key.  Two requests are the same if path and body are equal, byte for byte."""
    if key is None:
        return None
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{KEY_CHARS}}}", key):
        message = f"idempotency-key: must be 1 to {KEY_CHARS} printable ASCII characters"
        raise Refusal(400, "invalid_value", message, param="idempotency-key", limit=KEY_CHARS, given=len(key))
    return IdempotencyKey(_digest(owner.encode(), key.encode()), _digest(path.encode(), body))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
