"""Splits a chat answer into regions (content, reasoning, tool calls) as tokens arrive; stop strings end the content.

    tokens --TextStream--> text --RegionReader--> parts --stop strings, in the content only--> parts for the client

Stop strings are searched in the content only, not in reasoning and tool calls.
"""

from __future__ import annotations

import copy

from quire.service.output.content_scores import ContentPlaces, ContentScores
from quire.service.output.regions import Part, Reading, ResponseTemplate, TextDelta
from quire.service.text.stop_strings import StopSearch, StopStrings
from quire.service.text.token_decoder import TextStream


class RegionStream:
    """A `TextStream` whose text is cut into regions.  Its results do not depend on how tokens are split into deltas."""

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
        """`text`: decoder without stop strings.  `scores`: collects the entries of `logprobs.content`."""
        self._text, self._reader = text, template.reader(reading)
        self._stops, self._min_tokens = StopSearch(stops, include=include_stop) if stops else None, min_tokens
        self._ahead: StopSearch | None = None  # copy of `_stops` that has also read the white space that is held back
        self._peeked = 0  # characters of white space that `_ahead` has read
        self.scores = scores
        self._places = ContentPlaces() if scores is not None else None
        self._released: list[tuple[int, str]] = []  # (position in the raw text, content), for `scores`
        self._parts: list[Part] = []
        self.reasoning_tokens = 0  # number of tokens of the reasoning so far, its markers included

    @property
    def tokens(self) -> int:
        """Number of tokens consumed."""
        return self._text.tokens

    @property
    def chars(self) -> int:
        """Number of characters of the raw text: all regions with their markers."""
        return self._text.chars

    @property
    def matched(self) -> str | None:
        """The stop string that ended the content, or None."""
        return None if self._stops is None else self._stops.matched

    @property
    def complete(self) -> bool:
        """Whether a stop string or a tool call has ended the answer, so that further tokens are ignored."""
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
        """Add parts, up to a stop string."""
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
        """Append content to the parts for the client."""
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
        """End the content if the white space at its end completes a stop string.

        Such white space is held back, since it is dropped if a marker follows; for stop strings it counts at once."""
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
        """Count a stop token that is not part of the text, if the reasoning is open."""
        self.reasoning_tokens += self._reader.reasoning

    def finish(self, *, cut: bool = False) -> None:
        """End the answer.  `cut`: its maximum length ended it, not the model."""
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
        """Return the new parts since the last call, in the order in which the model wrote them."""
        if self._stops is None and self._places is None:
            return self._reader.out.take()
        parts, self._parts = self._parts, []
        return parts

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in the text; b"" for a special token that is skipped."""
        return self._text.bytes_of(token)

    def named(self, token: int, stops: tuple[str, ...]) -> str | None:
        """Return the stop string in `stops` that is the text of this special token; None if there is none."""
        return self._text.named(token, stops)

    def take_offsets(self) -> list[int]:
        """Return, for each token consumed since the last call, the number of characters before it."""
        return self._text.take_offsets()

    def take_released(self) -> list[tuple[int, str]]:
        """Return the new content since the last call as (position in the raw text, content)."""
        found, self._released = self._released, []
        return found
