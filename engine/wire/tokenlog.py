"""The token log as values: what goes into it with each exchange, and what comes out of it.

log:ID:I         | 4 bytes | 4 bytes | ...             token ids, little endian, from output position 0
log:ID:I:probs   | length, 4 bytes | msgpack [TokenLogprob ...] | ...     one frame a Delta, where asked for
"""

from __future__ import annotations

import struct

import msgspec

from engine.wire.messages import Finish, TokenBatch, TokenLogprob

TOKEN_BYTES = 4

Head = tuple[int, list[TokenLogprob] | None]  # what the Delta with first == 0 said beside its tokens

_encode = msgspec.msgpack.Encoder().encode
_decode_finish = msgspec.msgpack.Decoder(Finish).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_probs = msgspec.msgpack.Decoder(list[TokenLogprob]).decode


class Said(msgspec.Struct, frozen=True):
    """One continuation as the log has it: all that its clients can have seen, and no token more."""

    token_ids: list[int]  # from output position 0
    finish: Finish | None = None  # None: it goes on, or waits to be continued
    logprobs: list[TokenLogprob] | None = None  # one for each token id, where asked for
    cached_tokens: int = 0  # the next two as in the Delta with first == 0
    prompt_logprobs: list[TokenLogprob] | None = None


class Entries(msgspec.Struct, frozen=True):
    """What an exchange writes to logs."""

    pieces: list[str | int]  # "ID:INDEX", how many tokens, ...
    tokens: bytes  # all of those, TOKEN_BYTES each
    extras: list[tuple[str, str, bytes]]  # (id, field of its log or "probs:INDEX", value): most steps have none


def entries(batches: list[tuple[str, TokenBatch]]) -> Entries:
    """Of what one exchange sends, each Delta to one gateway."""
    said: dict[str, list[int]] = {}
    extras: list[tuple[str, str, bytes]] = []
    for _, batch in batches:
        for delta in batch.deltas:
            if delta.token_ids:
                said.setdefault(f"{delta.id}:{delta.index}", []).extend(delta.token_ids)
            if delta.logprobs is not None:
                probs = _encode(delta.logprobs)
                extras.append((delta.id, f"probs:{delta.index}", struct.pack("<I", len(probs)) + probs))
            if delta.first == 0 and (delta.cached_tokens or delta.prompt_logprobs is not None):
                extras.append((delta.id, f"head:{delta.index}", _encode((delta.cached_tokens, delta.prompt_logprobs))))
            if delta.finish is not None:
                extras.append((delta.id, f"finish:{delta.index}", _encode(delta.finish)))
    pieces: list[str | int] = []
    tokens: list[int] = []
    for key, token_ids in said.items():
        pieces += (key, len(token_ids))
        tokens += token_ids
    return Entries(pieces, struct.pack(f"<{len(tokens)}I", *tokens), extras)


def read(tokens: bytes | None, finish: bytes | None, head: bytes | None = None, probs: bytes | None = None) -> Said:
    """What Redis has of one continuation; None for what it has not."""
    cached_tokens, prompt_logprobs = _decode_head(head) if head is not None else (0, None)
    logprobs: list[TokenLogprob] | None = None
    if probs is not None:
        logprobs, at = [], 0
        while at < len(probs):
            (length,) = struct.unpack_from("<I", probs, at)
            logprobs += _decode_probs(probs[at + 4 : at + 4 + length])
            at += 4 + length
    return Said(
        list(struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)) if tokens else [],
        _decode_finish(finish) if finish is not None else None,
        logprobs,
        cached_tokens,
        prompt_logprobs,
    )
