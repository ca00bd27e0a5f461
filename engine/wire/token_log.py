"""The token log as values: what an engine enters in the logs, and what readers get.

log:ID:I            | 4 bytes | 4 bytes | ...       token ids, little endian, from output position 0
log:ID:I:logprobs   [msgpack TokenLogprob, ...]     one for each token, if asked for

A sync's tokens first stand in the engine's tail, as they were sent, which costs next to nothing.  After TAIL
syncs all tokens of a choice are entered in its log as one segment ("The token log" in `redis/KEYS.md`).

    0 ............ base ............ logged .................. end
    | earlier engines'  | in the log       | in the tail, or to be sent now |
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from operator import eq
from typing import overload

import msgspec

from quire.engine.wire.layout import TAIL, TAIL_BYTES
from quire.engine.wire.messages import Delta, Finish, TokenBatch, TokenLogprob

TOKEN_BYTES = 4

Head = tuple[int, list[TokenLogprob] | None]  # cached tokens and prompt logprobs, of the Delta with first == 0

_encode = msgspec.msgpack.Encoder().encode
_decode_finish = msgspec.msgpack.Decoder(Finish).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_logprob = msgspec.msgpack.Decoder(TokenLogprob).decode


class LoggedLogprobs(Sequence[TokenLogprob]):
    """Log probabilities as the log has them.  Each is decoded when it is read: an answer may have 100,000."""

    __slots__ = ("_encoded",)

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._encoded)

    @overload
    def __getitem__(self, at: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, at: slice) -> LoggedLogprobs: ...
    def __getitem__(self, at: int | slice) -> TokenLogprob | LoggedLogprobs:
        if isinstance(at, slice):
            return LoggedLogprobs(self._encoded[at])
        return _decode_logprob(self._encoded[at])

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(_decode_logprob, self._encoded)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class LoggedOutput(msgspec.Struct, frozen=True):
    """One choice as the log has it: everything that its clients can have seen, and no token more."""

    token_ids: list[int]  # token ids from output position 0
    finish: Finish | None = None  # None: it is being computed, or waits for an engine
    logprobs: Sequence[TokenLogprob] | None = None  # one for each token id, if asked for
    cached_tokens: int = 0  # the next two as in the Delta with first == 0
    prompt_logprobs: list[TokenLogprob] | None = None


class Entries(msgspec.Struct, frozen=True):
    """What one sync enters in the logs."""

    segments: list[str | int]  # request id, choice, output position of the first token, how many tokens, ...
    tokens: bytes  # the tokens of all segments, TOKEN_BYTES each
    extras: list[tuple[str, str, bytes]]  # (id, field of its log or "logprobs INDEX FIRST", value): mostly empty
    whole: bool  # the segments contain everything not yet entered, so nothing is left of the tail
    outputs: list[_Output]  # the choices of the segments and extras
    flushes_tail: bool = False  # `whole`, and the tail has something


class _Output:
    """The output of one choice since this engine holds it."""

    __slots__ = ("base", "end", "fields", "fields_logged", "id", "index", "logged", "logprobs", "tokens")

    def __init__(self, request_id: str, index: int, base: int) -> None:
        self.id, self.index = request_id, index
        self.base = self.logged = self.end = base  # output positions
        self.tokens = array("I")  # token ids from position `base`
        self.logprobs: list[bytes] = []  # log-probabilities of the same tokens, if requested
        self.fields: list[tuple[str, bytes]] = []  # (field, value) pairs for its log in Redis
        self.fields_logged = 0

    def add(self, delta: Delta) -> bool:
        """Append the Delta; return whether it belongs in the log at once."""
        known = self.end - delta.first
        if known < 0:
            raise ValueError(f"{self.id}: a Delta begins at output position {delta.first}, {self.end} is next")
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
            if delta.finish.searched:
                self.fields.append(("searched", str(delta.finish.searched).encode()))
        return delta.logprobs is not None or len(self.fields) > before


class Journal:
    """Records the output of the requests that an engine holds, and how much of it stands in their logs.

    It keeps all of it, 4 bytes per token, so that the engine can send again what Redis loses."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], _Output] = {}
        self._counts: dict[str, int] = {}  # choices of each request
        self._due: dict[_Output, None] = {}  # outputs that belong in the log at once
        self._tail = self._tail_bytes = 0  # syncs in the unflushed tail, and the bytes of their batches

    def hold(self, request_id: str, lengths: list[int]) -> None:
        """Add a claimed request; `lengths`: tokens of each choice that are in its log."""
        self._counts[request_id] = len(lengths)
        for index, length in enumerate(lengths):
            self._outputs[request_id, index] = _Output(request_id, index, length)

    def forget(self, request_ids: list[str]) -> None:
        """Remove requests that the engine holds no more."""
        for request_id in request_ids:
            for index in range(self._counts.pop(request_id, 0)):
                self._due.pop(self._outputs.pop((request_id, index)), None)

    def rewind(self, request_id: str, lengths: list[int]) -> bool:
        """Make everything due again beyond what the log has: `lengths` tokens of each choice.

        Returns False if this engine does not have the missing tokens."""
        outputs = [self._outputs[request_id, index] for index in range(self._counts[request_id])]
        if any(not output.base <= length <= output.end for output, length in zip(outputs, lengths, strict=True)):
            return False
        for output, length in zip(outputs, lengths, strict=True):
            output.logged, output.fields_logged = length, 0
            self._due[output] = None
        return True

    def add(self, batches: list[tuple[str, TokenBatch]], finished: list[str]) -> None:
        """Record the batches of one sync and its `finished` requests; ignore requests that are not held."""
        outputs, due = self._outputs, self._due
        for _, batch in batches:
            for delta in batch.deltas:
                output = outputs.get((delta.id, delta.index))
                if output is not None and output.add(delta):
                    due[output] = None
        for request_id in finished:  # there may be no Finish: a withdrawn request has no listeners
            for index in range(self._counts.get(request_id, 0)):
                due[outputs[request_id, index]] = None

    def due(self, batches: list[tuple[str, TokenBatch]]) -> Entries:
        """Return what the sync that sends these batches enters in the logs.  add() them first."""
        whole = not batches or self._tail >= TAIL or self._tail_bytes >= TAIL_BYTES
        outputs = [
            output
            for output in (self._outputs.values() if whole else self._due)
            if output.end > output.logged or len(output.fields) > output.fields_logged
        ]
        segments: list[str | int] = []
        tokens, extras = array("I"), list[tuple[str, str, bytes]]()
        for output in outputs:
            if output.end > output.logged:
                segments += (output.id, output.index, output.logged, output.end - output.logged)
                tokens += output.tokens[output.logged - output.base :]
            if probs := output.logprobs[output.logged - output.base :]:
                framed = b"".join(struct.pack("<I", len(one)) + one for one in probs)
                extras.append((output.id, f"logprobs {output.index} {output.logged}", framed))
            extras += ((output.id, field, value) for field, value in output.fields[output.fields_logged :])
        if sys.byteorder == "big":
            tokens.byteswap()
        flushes_tail = whole and self._tail > 0
        self._tail = 0 if whole else self._tail + 1
        return Entries(segments, tokens.tobytes(), extras, whole, outputs, flushes_tail)

    def entered(self, entries: Entries, tail_bytes: int) -> None:
        """Record that the sync with these entries succeeded and has messages of `tail_bytes` bytes."""
        self._tail_bytes = 0 if entries.whole else self._tail_bytes + tail_bytes
        for output in entries.outputs:
            output.logged, output.fields_logged = output.end, len(output.fields)
        self._due.clear()


def read(
    tokens: bytes | None, finish: bytes | None, head: bytes | None = None, logprobs: list[bytes] | None = None
) -> LoggedOutput:
    """Decode what Redis has of one choice; None stands for what it does not have."""
    cached_tokens, prompt_logprobs = _decode_head(head) if head is not None else (0, None)
    return LoggedOutput(
        list(struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)) if tokens else [],
        _decode_finish(finish) if finish is not None else None,
        LoggedLogprobs(logprobs) if logprobs else None,
        cached_tokens,
        prompt_logprobs,
    )
