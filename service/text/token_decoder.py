"""Incremental decoding of one sequence: tokens in, text out, with stop strings searched on the way."""

from __future__ import annotations

import codecs

from quire.service.output.content_scores import ContentScores
from quire.service.text.stop_strings import StopSearch, StopStrings
from quire.service.text.tokenizer import Tokenizer


class TextStream:
    """The text of one choice, decoded as its tokens arrive.

    All that `push` and `finish` return, concatenated, depends only on the tokens and never on how they were cut: stop
    strings are searched after each single token.  If several match, the one that begins first wins.
    """

    __slots__ = (
        "_decoder",
        "_markers",
        "_min_tokens",
        "_offsets",
        "_simple",
        "_skip_special",
        "_starts",
        "_stops",
        "_vocabulary",
        "chars",
        "scores",
        "tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] | StopStrings = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        track_offsets: bool = False,
        markers: bool = False,
    ) -> None:
        """`markers`: special tokens that are markers of regions are text, even with `skip_special`."""
        self._vocabulary, self._skip_special, self._markers = tokenizer.vocabulary, skip_special, markers
        self._starts = tokenizer.vocabulary.spaced  # no token was text yet, and the first one is written in another way
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._simple = not stop and not track_offsets
        stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._stops, self._min_tokens = StopSearch(stops, include=include_stop), min_tokens
        self.chars = 0  # decoded so far, those that are held back included
        self._offsets: list[int] | None = [] if track_offsets else None
        self.scores: ContentScores | None = None  # scores for the log probabilities of a chat's content
        self.tokens = 0  # consumed; after a match, up to and including the token that completed it

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; `push` must not be called any more."""
        return self._stops.matched

    def push(self, tokens: list[int]) -> str:
        """Consume tokens, up to a match; return the text that may be sent now."""
        shown = {"skip_special": self._skip_special, "markers": self._markers}
        pieces = self._vocabulary.bytes_of(tokens, **shown)
        if self._starts:
            self._starts = not self._vocabulary.write_first(pieces, tokens, **shown)
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
                out += new  # too early to stop: this text is part of no match
            else:
                out += self._stops.push(new)
            if self._stops.matched is not None:
                break
        return out

    def finish(self) -> str:
        """End the text: return all that is still held, an unfinished character as U+FFFD."""
        tail = self._decoder.decode(b"", final=True)
        return self._stops.push(tail) + self._stops.flush()

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in the text; of a special token that is skipped, none."""
        shown = {"skip_special": self._skip_special, "markers": self._markers}
        return self._vocabulary.bytes_of([token], **shown)[0]

    def named(self, token: int, stops: tuple[str, ...]) -> str | None:
        """Return the one of `stops` that is a special token; None if none is this one."""
        return next((stop for stop in stops if self._vocabulary.special.get(stop) == token), None)

    def take_offsets(self) -> list[int]:
        """Return the number of characters before each token consumed since the last call."""
        offsets, self._offsets = self._offsets or [], []
        return offsets
