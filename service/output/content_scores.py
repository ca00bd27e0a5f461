"""Finds the tokens of a chat answer that belong to its content: exactly these have an entry in `logprobs.content`.

    raw text      <think>Hm.</think>  The answer<tool_call>...
    placed                             ----------         content, located in the raw text by ContentPlaces
    released                           ------             content that is sent; a possible stop string is held back

Tokens of reasoning, of markers, of calls, of a stop string that is cut off, and the EOS token have no entry.  A token
that is partly content has an entry with only that part of its text.  So the entries' bytes, joined, are the content.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from quire.engine.wire.messages import TokenLogprob
from quire.service.output.regions import Part, RegionReader, TextDelta

Released = tuple[int, str]  # (offset in the raw text in characters, a part of the content)


class Score(NamedTuple):
    """One entry of `logprobs.content`."""

    token: int
    at: TokenLogprob
    text: bytes | None  # part of the token's bytes that is content; None: all bytes


class _Token:
    __slots__ = ("at", "end", "kept", "start", "tail", "tail_kept", "token")

    def __init__(self, token: int, at: TokenLogprob, start: int, end: int, tail: bytes) -> None:
        self.token, self.at, self.start, self.end, self.kept = token, at, start, end, ""
        self.tail, self.tail_kept = tail, False  # bytes that begin a character which the next token completes

    @property
    def last(self) -> int:
        return self.end + bool(self.tail)

    def keep(self, start: int, text: str) -> None:
        self.kept += text[max(0, self.start - start) : max(0, self.end - start)]
        self.tail_kept |= bool(self.tail) and start <= self.end < start + len(text)

    def score(self) -> Score:
        if len(self.kept) == self.end - self.start and self.tail_kept == bool(self.tail):
            return Score(self.token, self.at, None)
        return Score(self.token, self.at, self.kept.encode() + (self.tail if self.tail_kept else b""))


def unfinished(written: bytes) -> bytes:
    """Return the incomplete UTF-8 character at the end of bytes; b"" if there is none."""
    if not written or written[-1] < 0x80:
        return b""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(written)
    return decoder.getstate()[0]


class ContentScores:
    """The log probabilities of one choice's content, in order."""

    def __init__(self) -> None:
        self._tokens: deque[_Token] = deque()  # tokens whose text may still become content
        self._new: list[Score] = []
        self._sent = 0  # characters that `release_next` has released

    def add(self, token: int, at: TokenLogprob, start: int, end: int, written: bytes) -> None:
        """Add a token.  `start`, `end`: its range in the raw text, in characters.  `written`: its bytes."""
        tail = unfinished(written) if end > start else written
        self._tokens.append(_Token(token, at, start, end, tail))

    def release(self, start: int, text: str) -> None:
        """Add content that is sent.  `start`: its position in the raw text."""
        end = start + len(text)
        while self._tokens and self._tokens[0].start < end:
            token = self._tokens[0]
            if token.last > start:
                token.keep(start, text)
                if token.last > end:
                    break
            self._drop()

    def release_next(self, text: str) -> None:
        """Add content of an answer without regions, which follows directly on the content sent before."""
        self.release(self._sent, text)
        self._sent += len(text)

    def _drop(self) -> None:
        token = self._tokens.popleft()
        if token.kept or token.tail_kept:
            self._new.append(token.score())

    def take(self, *, final: bool) -> list[Score]:
        """Return the entries that are complete.  `final`: no more text will be released."""
        while final and self._tokens:
            self._drop()
        found, self._new = self._new, []
        return found


class ContentPlaces:
    """Finds the positions of an answer's content within its raw text.

    The text is passed to the reader character by character.  New content then either follows directly on the previous
    content, or stands close to the last character that was read.  The text in between was reasoning, calls, markers,
    and white space next to them."""

    def __init__(self) -> None:
        self._raw: list[str] = []  # last characters of raw text, in which new content is searched
        self._end = 0  # number of characters read
        self._placed: deque[list[int]] = deque()  # [start, length] of content that was not released yet

    def read(self, reader: RegionReader, text: str) -> Iterator[list[Part]]:
        """Pass text to a reader, and yield its new parts after each character."""
        for char in text:
            before = reader.kind
            reader.push(char)
            self._raw.append(char)
            self._end += 1
            yield self.place(reader.take_parts())
            if reader.kind == "reasoning" or (before != "content" and reader.kind == "content"):
                self._raw.clear()
            if reader.ended:
                return

    def place(self, parts: list[Part]) -> list[Part]:
        """Record the positions of new content.  Returns `parts` unchanged."""
        for part in parts:
            if not isinstance(part, TextDelta):
                self._raw.clear()
            elif not part.reasoning:
                self._place(part.text)
        return parts

    def _place(self, text: str) -> None:
        raw = "".join(self._raw)
        at = len(raw) - len(raw.lstrip())
        if raw.startswith(text):
            at = 0
        elif not raw.startswith(text, at):
            at = max(0, raw.rfind(text))
        self._placed.append([self._end - len(raw) + at, len(text)])
        del self._raw[: at + len(text)]

    def release(self, text: str) -> Iterator[Released]:
        """Yield (position in the raw text, content) for content that is sent now."""
        while text and self._placed:
            start, length = self._placed[0]
            part, text = text[:length], text[length:]
            yield start, part
            if len(part) == length:
                self._placed.popleft()
            else:
                self._placed[0] = [start + len(part), length - len(part)]
