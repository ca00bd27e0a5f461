"""The token log: the engine's journal of its output, the entries for the logs in Redis, and decoded logs.

log:ID:I            | 4 bytes | 4 bytes | ...       token ids, little endian, from output position 0
log:ID:I:logprobs   [msgpack TokenLogprob, ...]     one entry per token, if requested

A sync first appends its messages to the engine's tail in Redis, which is cheap.  After TAIL syncs the engine flushes
the tail: all new tokens of a choice go into its log as one segment ("The token log" in `redis/KEYS.md`).

    0 ............ base ............ logged .................. end
    | earlier engines'  | in the log       | in the tail, or not sent yet |
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

Head = tuple[int, list[TokenLogprob] | None]  # (cached tokens, prompt logprobs) of the Delta with first == 0

_encode = msgspec.msgpack.Encoder().encode
_decode_finish = msgspec.msgpack.Decoder(Finish).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_logprob = msgspec.msgpack.Decoder(TokenLogprob).decode


class LoggedLogprobs(Sequence[TokenLogprob]):
    """Log probabilities of a log, decoded lazily: an answer may have 100,000 of them."""

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
    """The log of one choice: exactly the tokens that a client may have received."""

    token_ids: list[int]  # token ids from output position 0
    finish: Finish | None = None  # None: the choice is being computed, or waits for an engine
    logprobs: Sequence[TokenLogprob] | None = None  # one entry per token id, if requested
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[TokenLogprob] | None = None  # log probabilities of the prompt, if requested


class Entries(msgspec.Struct, frozen=True):
    """The entries that one sync writes to the logs."""

    segments: list[str | int]  # flat list: request id, choice, output position of the first token, tokens, ...
    tokens: bytes  # the tokens of all segments, TOKEN_BYTES each
    extras: list[tuple[str, str, bytes]]  # (id, field of its log or "logprobs INDEX FIRST", value); mostly empty
    whole: bool  # the segments contain all tokens that the logs lack, so the tail becomes empty
    outputs: list[_Output]  # the choices of the segments and extras
    flushes_tail: bool = False  # `whole`, and the tail is not empty


class _Output:
    """The output of one choice since this engine claimed it."""

    __slots__ = ("base", "end", "fields", "fields_logged", "id", "index", "logged", "logprobs", "tokens")

    def __init__(self, request_id: str, index: int, base: int) -> None:
        self.id, self.index = request_id, index
        self.base = self.logged = self.end = base  # output positions
        self.tokens = array("I")  # token ids from position `base`
        self.logprobs: list[bytes] = []  # log-probabilities of the same tokens, if requested
        self.fields: list[tuple[str, bytes]] = []  # (field, value) pairs for its log in Redis
        self.fields_logged = 0  # number of `fields` that are in the log

    def add(self, delta: Delta) -> bool:
        """Append a Delta; return whether it must go into the log at once instead of the tail."""
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
    """Records the output of the requests that an engine holds, and how much of it is in their logs.

    Keeps the complete output, 4 bytes per token, so that the engine can send tokens again that Redis has lost."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], _Output] = {}
        self._counts: dict[str, int] = {}  # request id -> number of choices
        self._due: dict[_Output, None] = {}  # outputs that the next sync must write to the log
        self._tail = self._tail_bytes = 0  # syncs in the unflushed tail, and the bytes of their batches

    def hold(self, request_id: str, lengths: list[int]) -> None:
        """Add a claimed request.  `lengths`: tokens per choice that its log has."""
        self._counts[request_id] = len(lengths)
        for index, length in enumerate(lengths):
            self._outputs[request_id, index] = _Output(request_id, index, length)

    def forget(self, request_ids: list[str]) -> None:
        """Remove requests that the engine does not hold any more."""
        for request_id in request_ids:
            for index in range(self._counts.pop(request_id, 0)):
                self._due.pop(self._outputs.pop((request_id, index)), None)

    def rewind(self, request_id: str, lengths: list[int]) -> bool:
        """Let the next sync send all tokens that the log lacks.  `lengths`: tokens per choice that the log has.

        Returns False if this engine does not have the missing tokens, or Redis has lost the log: `lengths` is empty."""
        outputs = [self._outputs[request_id, index] for index in range(self._counts[request_id])]
        if not lengths or any(
            not output.base <= length <= output.end for output, length in zip(outputs, lengths, strict=True)
        ):
            return False
        for output, length in zip(outputs, lengths, strict=True):
            output.logged, output.fields_logged = length, 0
            self._due[output] = None
        return True

    def add(self, batches: list[tuple[str, TokenBatch]], finished: list[str]) -> None:
        """Record the batches and the `finished` requests of one sync; requests that are not held are ignored."""
        outputs, due = self._outputs, self._due
        for _, batch in batches:
            for delta in batch.deltas:
                output = outputs.get((delta.id, delta.index))
                if output is not None and output.add(delta):
                    due[output] = None
        for request_id in finished:  # a withdrawn request may end without a Finish
            for index in range(self._counts.get(request_id, 0)):
                due[outputs[request_id, index]] = None

    def due(self, batches: list[tuple[str, TokenBatch]]) -> Entries:
        """Return the log entries of the sync that sends these batches.  Call add() with the batches first."""
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
        """Record that the sync with these entries succeeded.  `tail_bytes`: size of its messages."""
        self._tail_bytes = 0 if entries.whole else self._tail_bytes + tail_bytes
        for output in entries.outputs:
            output.logged, output.fields_logged = output.end, len(output.fields)
        self._due.clear()


def read(
    tokens: bytes | None, finish: bytes | None, head: bytes | None = None, logprobs: list[bytes] | None = None
) -> LoggedOutput:
    """Decode the log of one choice from its values in Redis; None: Redis has no such value."""
    cached_tokens, prompt_logprobs = _decode_head(head) if head is not None else (0, None)
    return LoggedOutput(
        list(struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)) if tokens else [],
        _decode_finish(finish) if finish is not None else None,
        LoggedLogprobs(logprobs) if logprobs else None,
        cached_tokens,
        prompt_logprobs,
    )
