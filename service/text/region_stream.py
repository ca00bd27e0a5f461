"""A chat answer's text, cut into regions as its tokens arrive; stop strings end its content.

    tokens --TextStream--> text --RegionReader--> parts --stop strings, in the content only--> parts for the client

Reasoning and calls are parsed out, so no stop string is looked for in them: a client means the answer that it reads.
"""

from __future__ import annotations

import copy

from quire.service.output.content_scores import ContentPlaces, ContentScores
from quire.service.output.regions import Part, Reading, ResponseTemplate, TextDelta
from quire.service.text.stop_strings import StopSearch, StopStrings
from quire.service.text.token_decoder import TextStream


class RegionStream:
    """A `TextStream` whose text is cut into regions.  What it returns depends on the tokens, not on how they arrive."""

    __slots__ = (
        "_ahead",
        "_min_tokens",
        "_parts",
        "_peeked",
        "_places",
        "_reader",
        "_released",
        "_stops",
        "_text",
        "reasoning_tokens",
        "scores",
    )

    def __init__(
        self,
        text: TextStream,
        template: ResponseTemplate,
        reading: Reading,
        stops: StopStrings,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        scores: ContentScores | None = None,
    ) -> None:
        """`text`: without stop strings.  `scores`: for the log probabilities of the content."""
        self._text, self._reader = text, template.reader(reading)
        self._stops, self._min_tokens = StopSearch(stops, include=include_stop) if stops else None, min_tokens
        self._ahead: StopSearch | None = None  # a search that has seen the white space before a possible marker
        self._peeked = 0  # characters of that
        self.scores = scores
        self._places = ContentPlaces() if scores is not None else None
        self._released: list[tuple[int, str]] = []  # content in the raw text, for `scores`
        self._parts: list[Part] = []
        self.reasoning_tokens = 0  # consumed while the reasoning was open, its markers included

    @property
    def tokens(self) -> int:
        """Tokens consumed."""
        return self._text.tokens

    @property
    def chars(self) -> int:
        """Characters of all regions, with their markers."""
        return self._text.chars

    @property
    def matched(self) -> str | None:
        """The stop string that ended the content."""
        return None if self._stops is None else self._stops.matched

    @property
    def complete(self) -> bool:
        """Whether the answer has ended before its tokens did: no more tokens are consumed."""
        return self._reader.ended or self.matched is not None

    @property
    def called(self) -> bool:
        """Whether the answer has a tool call."""
        return self._reader.calls > 0

    def push(self, tokens: list[int]) -> None:
        """Consume tokens, up to the end of the answer."""
        out, text = self._reader.out, self._text
        for token in tokens:
            open_before = out.reasoning
            self._read(text.push([token]))
            self.reasoning_tokens += open_before or out.reasoning
            if self.complete:
                break

    def _read(self, text: str) -> None:
        if self._places is not None:
            for parts in self._places.read(self._reader, text):
                self._add(parts)
        elif text:
            self._reader.push(text)
            if self._stops is not None:
                self._add(self._reader.take_parts())
        if self._stops is not None and not self.complete:
            self._look_ahead(self._stops)

    def _add(self, parts: list[Part]) -> None:
        """Add parts, up to a match."""
        for part in parts:
            if self.matched is not None:
                return
            self._ahead = None
            if isinstance(part, TextDelta) and not part.reasoning:
                search = self._stops is not None and self._text.tokens > self._min_tokens
                self._send(self._stops.push(part.text) if self._stops is not None and search else part.text)
            else:
                self._flush()
                self._parts.append(part)

    def _send(self, text: str) -> None:
        """Send content."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, TextDelta) and not last.reasoning:
            last.text += text
        elif text:
            self._parts.append(TextDelta(text))
        if self._places is not None:
            self._released += self._places.release(text)

    def _flush(self) -> None:
        if self._stops is not None:
            self._send(self._stops.flush())

    def _look_ahead(self, stops: StopSearch) -> None:
        """End the content at a stop string that white space completes, although a marker may follow it."""
        space = self._reader.waiting_space
        if not space or self._text.tokens <= self._min_tokens:
            self._ahead = None
            return
        if self._ahead is None or len(space) < self._peeked:
            self._ahead, self._peeked = copy.copy(stops), 0
        self._ahead.push(space[self._peeked :])
        self._peeked = len(space)
        if self._ahead.matched is not None:
            if self._places is not None:
                self._places.place([TextDelta(space)])
            self._send(stops.push(space))

    def count_hidden(self) -> None:
        """Count a stop token, which is no text."""
        self.reasoning_tokens += self._reader.reasoning

    def finish(self, *, cut: bool = False) -> None:
        """End the answer.  `cut`: it could have been longer."""
        self._read(self._text.finish())
        if self.complete:
            return
        self._reader.finish(cut=cut)
        if self._places is not None:
            self._add(self._places.place(self._reader.take_parts()))
        elif self._stops is not None:
            self._add(self._reader.take_parts())
        self._flush()

    def take(self) -> list[Part]:
        """Return what is new since the last call, content included, in the order in which the model wrote it."""
        if self._stops is None and self._places is None:
            return self._reader.out.take()
        parts, self._parts = self._parts, []
        return parts

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in the text; of a special token that is skipped, none."""
        return self._text.bytes_of(token)

    def named(self, token: int, stops: tuple[str, ...]) -> str | None:
        """Return the one of `stops` that is a special token; None if none is this one."""
        return self._text.named(token, stops)

    def take_offsets(self) -> list[int]:
        """Return the number of characters before each token consumed since the last call."""
        return self._text.take_offsets()

    def take_released(self) -> list[tuple[int, str]]:
        """Return the content that is new since the last call, with its places in the raw text."""
        found, self._released = self._released, []
        return found
