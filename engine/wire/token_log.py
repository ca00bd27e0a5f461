"""The token log as values: what an engine enters in it, and what comes out of it.

log:ID:I            | 4 bytes | 4 bytes | ...       token ids, little endian, from output position 0
log:ID:I:logprobs   [msgpack TokenLogprob, ...]     one for each of them, where asked for

What an exchange says stands in the engine's tail first, as it was sent, which costs next to nothing; all that a
continuation has said in TAIL exchanges is then entered in its log in one piece (see "The token log" in `keys.py`).

    0 ............ base ............ logged .................. end
    | earlier engines'  | in the log       | in the tail, or to be sent now |
"""

from __future__ import annotations

import struct
import sys
from array import array

import msgspec

from engine.wire.layout import TAIL, TAIL_BYTES
from engine.wire.messages import Delta, Finish, TokenBatch, TokenLogprob

TOKEN_BYTES = 4

Head = tuple[int, list[TokenLogprob] | None]  # what the Delta with first == 0 said beside its tokens

_encode = msgspec.msgpack.Encoder().encode
_decode_finish = msgspec.msgpack.Decoder(Finish).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_logprob = msgspec.msgpack.Decoder(TokenLogprob).decode


class LoggedOutput(msgspec.Struct, frozen=True):
    """One continuation as the log has it: all that its clients can have seen, and no token more."""

    token_ids: list[int]  # from output position 0
    finish: Finish | None = None  # None: it goes on, or waits to be continued
    logprobs: list[TokenLogprob] | None = None  # one for each token id, where asked for
    cached_tokens: int = 0  # the next two as in the Delta with first == 0
    prompt_logprobs: list[TokenLogprob] | None = None


class Entries(msgspec.Struct, frozen=True):
    """What an exchange enters in logs."""

    pieces: list[str | int]  # request id, continuation, output position of the first token, how many tokens, ...
    tokens: bytes  # all of those, TOKEN_BYTES each
    extras: list[tuple[str, str, bytes]]  # (id, field of its log or "logprobs INDEX FIRST", value): most have none
    whole: bool  # this is all that was said and not entered before: nothing is left of the tail
    outputs: list[_Output]  # whose these are


class _Output:
    """What one continuation has said since this engine has it."""

    __slots__ = ("base", "end", "fields", "fields_logged", "id", "index", "logged", "logprobs", "tokens")

    def __init__(self, request_id: str, index: int, base: int) -> None:
        self.id, self.index = request_id, index
        self.base = self.logged = self.end = base  # output positions
        self.tokens = array("I")  # from `base` on
        self.logprobs: list[bytes] = []  # of the same tokens, where asked for
        self.fields: list[tuple[str, bytes]] = []  # of its log
        self.fields_logged = 0

    def add(self, delta: Delta) -> bool:
        """Says whether this belongs in the log at once."""
        known = self.end - delta.first
        if known < 0:
            raise ValueError(f"{self.id}: tokens from {delta.first} on follow on {self.end}")
        self.tokens.fromlist(delta.token_ids[known:] if known else delta.token_ids)
        self.end = self.base + len(self.tokens)
        if delta.finish is None and delta.logprobs is None and delta.first:
            return False
        return self._add_rest(delta, known)

    def _add_rest(self, delta: Delta, known: int) -> bool:
        if delta.logprobs is not None:
            self.logprobs += map(_encode, delta.logprobs[known:])
        before = len(self.fields)
        if delta.first == 0 and (delta.cached_tokens or delta.prompt_logprobs is not None):
            self.fields.append((f"head:{self.index}", _encode((delta.cached_tokens, delta.prompt_logprobs))))
        if delta.finish is not None:
            self.fields.append((f"finish:{self.index}", _encode(delta.finish)))
        return delta.logprobs is not None or len(self.fields) > before


class Journal:
    """What an engine has said of the requests it holds, and how much of that stands in their logs.

    It keeps all of it, 4 bytes a token, so that what Redis loses can be sent again."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], _Output] = {}
        self._counts: dict[str, int] = {}  # continuations of each request
        self._due: dict[_Output, None] = {}  # belong in the log at once
        self._tail = self._tail_bytes = 0  # exchanges there, and the bytes of their batches

    def hold(self, request_id: str, lengths: list[int]) -> None:
        """The engine has claimed a request; so many tokens of each continuation are in its log."""
        self._counts[request_id] = len(lengths)
        for index, length in enumerate(lengths):
            self._outputs[request_id, index] = _Output(request_id, index, length)

    def forget(self, request_ids: list[str]) -> None:
        """It holds them no more."""
        for request_id in request_ids:
            for index in range(self._counts.pop(request_id, 0)):
                self._due.pop(self._outputs.pop((request_id, index)), None)

    def rewind(self, request_id: str, lengths: list[int]) -> bool:
        """So many tokens of each continuation are in its log, whatever was entered: the rest is due again.  False: it
        is not to be had here."""
        outputs = [self._outputs[request_id, index] for index in range(self._counts[request_id])]
        if any(not output.base <= length <= output.end for output, length in zip(outputs, lengths, strict=True)):
            return False
        for output, length in zip(outputs, lengths, strict=True):
            output.logged, output.fields_logged = length, 0
            self._due[output] = None
        return True

    def add(self, batches: list[tuple[str, TokenBatch]], finished: list[str]) -> None:
        """It says this, each Delta to one gateway, and has finished these requests; some may not be held any more."""
        outputs, due = self._outputs, self._due
        for _, batch in batches:
            for delta in batch.deltas:
                output = outputs.get((delta.id, delta.index))
                if output is not None and output.add(delta):
                    due[output] = None
        for request_id in finished:  # it may not have said so: nobody listens to one that was withdrawn
            for index in range(self._counts.get(request_id, 0)):
                due[outputs[request_id, index]] = None

    def due(self, batches: list[tuple[str, TokenBatch]]) -> Entries:
        """What the exchange that sends these batches, added before, is to enter."""
        whole = not batches or self._tail >= TAIL or self._tail_bytes >= TAIL_BYTES
        outputs = [
            output
            for output in (self._outputs.values() if whole else self._due)
            if output.end > output.logged or len(output.fields) > output.fields_logged
        ]
        pieces: list[str | int] = []
        tokens, extras = array("I"), list[tuple[str, str, bytes]]()
        for output in outputs:
            if output.end > output.logged:
                pieces += (output.id, output.index, output.logged, output.end - output.logged)
                tokens += output.tokens[output.logged - output.base :]
            if probs := output.logprobs[output.logged - output.base :]:
                framed = b"".join(struct.pack("<I", len(one)) + one for one in probs)
                extras.append((output.id, f"logprobs {output.index} {output.logged}", framed))
            extras += ((output.id, field, value) for field, value in output.fields[output.fields_logged :])
        if sys.byteorder == "big":
            tokens.byteswap()
        self._tail = 0 if whole else self._tail + 1
        return Entries(pieces, tokens.tobytes(), extras, whole, outputs)

    def entered(self, entries: Entries, tail_bytes: int) -> None:
        """That exchange has succeeded.  It added batches of so many bytes to the tail."""
        self._tail_bytes = 0 if entries.whole else self._tail_bytes + tail_bytes
        for output in entries.outputs:
            output.logged, output.fields_logged = output.end, len(output.fields)
        self._due.clear()


def read(
    tokens: bytes | None, finish: bytes | None, head: bytes | None = None, logprobs: list[bytes] | None = None
) -> LoggedOutput:
    """What Redis has of one continuation; None for what it has not."""
    cached_tokens, prompt_logprobs = _decode_head(head) if head is not None else (0, None)
    return LoggedOutput(
        list(struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)) if tokens else [],
        _decode_finish(finish) if finish is not None else None,
        [_decode_logprob(one) for one in logprobs] if logprobs else None,
        cached_tokens,
        prompt_logprobs,
    )
