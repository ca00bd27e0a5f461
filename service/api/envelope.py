"""Makes the submissions to engines from a checked and encoded request, one per prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from quire.engine.wire.messages import Generate
from quire.engine.wire.prefixes import prefix_digests
from quire.service.api.trace_context import TraceContext
from quire.service.api.valid_request import ValidRequest


class Envelope(NamedTuple):
    """Fields that all submissions of a request share: its id, gateway, times and tenant."""

    request_id: str
    gateway: str  # id of the gateway process that reads the tokens
    deadline_ms: int  # unix time on Redis' clock
    queued_ms: int = 0  # unix time on Redis' clock
    tenant: str = ""
    weight: float = 1.0  # the tenant's weight
    trace: TraceContext = TraceContext()


def prefix_salt(valid: ValidRequest) -> str:
    """Return the salt of a prompt's prefix digests.

    It depends on the LoRA adapter, since the same prefix has a different KV cache under another adapter."""
    return valid.cache_salt if valid.adapter is None else f"adapter {valid.adapter.id} {valid.cache_salt}"


def generates(
    valid: ValidRequest,
    encoded: list[list[int]],
    max_new_tokens: list[int],
    envelope: Envelope,
    anchors: Callable[[list[int]], list[int]] = lambda ids: [],
    predicted: list[int] | None = None,
) -> list[Generate]:
    """Return one submission per prompt.  Choice i of prompt p has the index p * n + i in the answer.

    `encoded`, `max_new_tokens`: token ids and maximum output tokens of each prompt.  `anchors`: finds the end of the
    last turn in a chat's prompt. `predicted`: tokens of the client's `prediction`. A missing seed is drawn now, so that
    another engine that repeats the request samples the same tokens."""
    return [
        Generate(
            id=f"{envelope.request_id}.{at}",
            gateway=envelope.gateway,
            token_ids=ids,
            max_new_tokens=most,
            sampling=valid.sampling
            if valid.seeded
            else msgspec.structs.replace(valid.sampling, seed=secrets.randbits(63)),
            deadline_ms=envelope.deadline_ms,
            cache_salt=valid.cache_salt,
            traceparent=envelope.trace.parent,
            tracestate=envelope.trace.state,
            n=valid.n,
            priority=valid.priority,
            tenant=envelope.tenant,
            weight=envelope.weight,
            queued_ms=envelope.queued_ms,
            beams=valid.beams,
            prefixes=prefix_digests(ids, prefix_salt(valid)) if valid.sampling.prompt_logprobs < 0 else b"",
            anchors=anchors(ids) if valid.chat else [],
            adapter=valid.adapter.id if valid.adapter is not None else "",
            adapter_path=valid.adapter.path if valid.adapter is not None else "",
            predicted=predicted or [],
        )
        for at, (ids, most) in enumerate(zip(encoded, max_new_tokens, strict=True))
    ]
