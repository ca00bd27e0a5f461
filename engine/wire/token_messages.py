"""Token messages: the tokens of one sync, as an engine publishes them to the listening gateways.

Gateways share TOKEN_CHANNELS channels.  A sync publishes one message per channel with listeners.  The message has a
part per gateway, and each gateway reads only its own part.

    [engine, [[gateway, [delta, ...]], ...]]
    delta: [id as in request_ids.py, first, token_ids, finish, index, ...]: fields of Delta without trailing defaults

The engine's tail in Redis holds the same messages.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import msgspec

from quire.engine.wire.layout import TOKEN_CHANNELS
from quire.engine.wire.messages import Delta, Finish, Predictions, TokenBatch, TokenLogprob
from quire.engine.wire.request_ids import pack, unpack

NO_CHANNEL = ""  # channel of a message that no gateway reads: it is only logged

_encode = msgspec.msgpack.Encoder().encode


class _Part(msgspec.Struct, frozen=True, array_like=True):
    gateway: str
    deltas: msgspec.Raw


class _Message(msgspec.Struct, frozen=True, array_like=True):
    engine: str
    parts: list[_Part]


class _Delta(msgspec.Struct, frozen=True, array_like=True):
    """A Delta with its id in the compact form of request_ids.py."""

    id: msgspec.Raw
    first: int
    token_ids: list[int]
    finish: Finish | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    predictions: Predictions | None = None


_decode_message = msgspec.msgpack.Decoder(_Message).decode
_decode_deltas = msgspec.msgpack.Decoder(list[_Delta]).decode


@lru_cache(4096)
def channel_of(gateway: str) -> int:
    """Return the number of a gateway's token channel; listeners.lua computes the same number."""
    return int(hashlib.sha1(gateway.encode(), usedforsecurity=False).hexdigest()[:4], 16) % TOKEN_CHANNELS


def _fields(delta: Delta) -> list[Any]:
    if (
        delta.finish is None
        and delta.logprobs is None
        and not delta.cached_tokens
        and delta.prompt_logprobs is None
        and delta.predictions is None
    ):
        short = [pack(delta.id), delta.first, delta.token_ids]
        return [*short, None, delta.index] if delta.index else short
    _, *others = msgspec.structs.astuple(delta)
    return [pack(delta.id), *(others if delta.predictions is not None else others[:-1])]


def encode(batches: list[tuple[str, TokenBatch]]) -> list[tuple[int | str, bytes]]:
    """Encode one engine's batches as one (channel, message) per channel; NO_CHANNEL: batches without a gateway.

    `batches`: (gateway, batch) pairs."""
    parts: dict[int | str, list[tuple[str, list[Any]]]] = {}
    for gateway, batch in batches:
        channel = channel_of(gateway) if gateway else NO_CHANNEL
        parts.setdefault(channel, []).append((gateway, list(map(_fields, batch.deltas))))
    return [(channel, _encode((batches[0][1].engine, some))) for channel, some in parts.items()]


def decode(message: bytes, gateway: str) -> TokenBatch | None:
    """Return the gateway's part of a message; None: it has no part for this gateway.

    Raises msgspec.MsgspecError or UnicodeDecodeError if the bytes are no token message."""
    found = _decode_message(message)
    deltas = [
        Delta(
            unpack(bytes(one.id)),
            one.first,
            one.token_ids,
            one.finish,
            one.index,
            one.logprobs,
            one.cached_tokens,
            one.prompt_logprobs,
            one.predictions,
        )
        for part in found.parts
        if part.gateway == gateway
        for one in _decode_deltas(part.deltas)
    ]
    return TokenBatch(found.engine, deltas) if deltas else None
