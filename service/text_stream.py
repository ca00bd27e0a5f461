"""Text out: incremental decoding of tokens, stop strings.

    token ids --table--> bytes --UTF-8 decoder--> characters --stop strings--> text for the client
                          |-- an unfinished character waits --|-- what may begin a stop string waits --|

Going through bytes makes streaming exact: a token's bytes never depend on its neighbours, so the text is the same
however the tokens are cut into deltas.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator

from engine.wire.messages import Finish
from service.api import Refusal, ValidRequest
from service.format import Piece
from service.mailbox import Mailbox
from service.open_request import OpenRequest
from service.streams import REQUEST_LOST
from service.tokenizer import Tokenizer

TURN_TOKENS = 4096  # of one request become text before other requests have their turn: about 2 ms


class TextStream:
    """The text of one continuation, as its tokens arrive.

    The concatenation of everything `push` and `finish` return depends only on the tokens, never on how they were cut:
    stop strings are looked for after each single token.  Where several match, the one that begins first wins.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_offsets",
        "_simple",
        "_skip_special",
        "_stops",
        "_tokenizer",
        "chars",
        "matched",
        "tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        track_offsets: bool = False,
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops, self._include_stop, self._min_tokens = stop, include_stop, min_tokens
        self._held = ""  # the end of the text so far, as long as it may be the beginning of a stop string
        self.chars = 0  # decoded so far, held ones included
        self._offsets: list[int] | None = [] if track_offsets else None
        self._simple = not stop and not track_offsets
        self.tokens = 0  # consumed; after a match, up to and with the token that completed it
        self.matched: str | None = None  # the stop string that ended the text: nothing may be pushed any more

    def push(self, tokens: list[int]) -> str:
        """Consume tokens, up to a match; return the text that may go out now."""
        pieces = self._tokenizer.bytes_of(tokens, skip_special=self._skip_special)
        if self._simple:
            self.tokens += len(tokens)
            return self._decoder.decode(b"".join(pieces))
        out = ""
        for piece in pieces:
            if self._offsets is not None:
                self._offsets.append(self.chars)
            new = self._decoder.decode(piece)
            self.chars += len(new)
            self.tokens += 1
            if self.tokens <= self._min_tokens:
                out += new  # too early to stop: this text takes no part in any match
            else:
                out += self._release(new)
            if self.matched is not None:
                break
        return out

    def finish(self) -> str:
        """The end of the tokens: return all text still held, an unfinished character as U+FFFD."""
        tail = self._decoder.decode(b"", final=True)
        out = self._release(tail) if self._stops else tail
        if self.matched is None:
            out += self._held
        self._held = ""
        return out

    def take_offsets(self) -> list[int]:
        """Characters before each token consumed since the last call."""
        offsets, self._offsets = self._offsets or [], []
        return offsets

    def _release(self, new: str) -> str:
        """Add text; return what cannot be part of a stop string any more, or everything before the match."""
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return text[: at + len(self.matched)] if self._include_stop else text[:at]
        keep = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), keep, -1):
                if text.endswith(stop[:length]):
                    keep = length
                    break
        split = len(text) - keep
        self._held = text[split:]
        return text[:split]


def _failure(finish: Finish) -> Refusal:
    """What a client is told when a continuation ended neither by stop nor by length."""
    if finish.reason == "deadline":
        return Refusal(504, "deadline_exceeded", "the request's timeout passed before the answer was complete")
    if finish.reason == "cancelled":
        return Refusal(503, "cancelled", "the request was cancelled by the server", retry_after_s=1.0)
    if finish == REQUEST_LOST:
        return Refusal(503, "request_lost", finish.message, retry_after_s=1.0)
    return Refusal(500, "engine_error", finish.message or "the engine failed on this request")


async def decode(opened: OpenRequest, valid: ValidRequest, tokenizer: Tokenizer) -> AsyncGenerator[list[Piece], None]:
    """Everything an open request has for its client, in lists of what is new; an empty list is a heartbeat.

    Ends when every choice has finished.  A stop string closes its choice, and the whole request once all are closed.
    Raises Refusal when a continuation fails: the request has one answer, so one failure ends it."""
    sampling = valid.sampling
    wants_logprobs = sampling.logprobs >= 0
    streams = [
        TextStream(
            tokenizer,
            stop=valid.stop,
            include_stop=valid.include_stop,
            skip_special=valid.skip_special,
            min_tokens=sampling.min_tokens,
            track_offsets=wants_logprobs,
        )
        for _ in opened.mailboxes
    ]

    def read(mailbox: Mailbox) -> Piece:
        stream = streams[mailbox.choice]
        tokens, logprobs, finish = mailbox.take()
        if mailbox.had:  # the client came back: their text is not sent again
            over = not tokens and finish is not None  # all of it was, but for the end itself
            ends = over and finish is not None and finish.stop_token >= 0 and not valid.include_stop
            stream.push(mailbox.had[:-1] if ends else mailbox.had)
            if over:
                stream.finish()
            stream.take_offsets()
            mailbox.had = []
        if stream.matched is not None:
            tokens = []  # the engine went on for a while
        shown = tokens
        if finish is not None and finish.stop_token >= 0 and not valid.include_stop:
            shown = tokens[:-1]  # a stop token is counted and reported, but is no text
        before = stream.tokens
        piece = Piece(mailbox.choice, stream.push(shown), tokens, cached_tokens=mailbox.cached_tokens)
        if stream.matched is None and finish is not None:
            if finish.reason not in ("stop", "length"):
                raise _failure(finish)
            piece.text += stream.finish()
            piece.finish = finish.reason
            if finish.stop_token in sampling.stop_token_ids:
                piece.stop_reason = finish.stop_token
        if stream.matched is not None:
            piece.token_ids = tokens[: stream.tokens - before]
            piece.finish, piece.stop_reason = "stop", stream.matched
        if wants_logprobs:
            piece.logprobs = (logprobs or [])[: len(piece.token_ids)]
            piece.offsets = stream.take_offsets()
            if len(piece.offsets) < len(piece.token_ids):  # the stop token that is no text
                piece.offsets.append(stream.chars)
            piece.prompt_logprobs, mailbox.prompt_logprobs = mailbox.prompt_logprobs, None
        if piece.finish is not None:
            opened.end(mailbox.choice)
        return piece

    async for changed in opened:
        pieces, tokens = [], 0
        for mailbox in changed:
            pieces.append(read(mailbox))
            tokens += len(pieces[-1].token_ids)
            if tokens > TURN_TOKENS:  # of a request with many choices that lags behind
                tokens = 0
                await asyncio.sleep(0)
        yield pieces
