"""Incremental decoding of one sequence: tokens in, text out, up to a stop string."""

from __future__ import annotations

import codecs

from quire.service.output.content_scores import ContentScores
from quire.service.text.stop_strings import StopSearch, StopStrings
from quire.service.text.tokenizer import Tokenizer


class TextStream:
    """The text of one choice, decoded as its tokens arrive.

    The concatenated results of `push` and `finish` depend only on the tokens, never on how they were split into deltas:
    stop strings are searched after each single token.  If several stop strings match, the one that begins first counts.
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
        """`markers`: decode special tokens that are markers of regions to text, even with `skip_special`."""
        self._vocabulary, self._skip_special, self._markers = tokenizer.vocabulary, skip_special, markers
        # True until the first token with text, which a WordPiece vocabulary writes without the space before it.
        self._starts = tokenizer.vocabulary.spaced
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._simple = not stop and not track_offsets
        stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._stops, self._min_tokens = StopSearch(stops, include=include_stop), min_tokens
        self.chars = 0  # number of characters decoded so far, including text that is held back
        self._offsets: list[int] | None = [] if track_offsets else None
        self.scores: ContentScores | None = None  # collects the entries of a chat's `logprobs.content`
        self.tokens = 0  # number of tokens consumed; after a match, up to the token that completed it

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None.  After a match `push` must not be called."""
        return self._stops.matched

    def push(self, tokens: list[int]) -> str:
        """Consume tokens, up to a match.  Returns the text that may be sent now."""
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
                out += new  # before min_tokens: no stop string is searched in this text
            else:
                out += self._stops.push(new)
            if self._stops.matched is not None:
                break
        return out

    def finish(self) -> str:
        """End the text.  Returns the text that was held back; an incomplete UTF-8 character becomes U+FFFD."""
        tail = self._decoder.decode(b"", final=True)
        return self._stops.push(tail) + self._stops.flush()

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in the text; b"" for a special token that is skipped."""
        shown = {"skip_special": self._skip_special, "markers": self._markers}
        return self._vocabulary.bytes_of([token], **shown)[0]

    def named(self, token: int, stops: tuple[str, ...]) -> str | None:
        """Return the stop string in `stops` that is the text of this special token; None if there is none."""
        return next((stop for stop in stops if self._vocabulary.special.get(stop) == token), None)

    def take_offsets(self) -> list[int]:
        """Return, for each token consumed since the last call, the number of characters before it."""
        offsets, self._offsets = self._offsets or [], []
        return offsets
