"""Parse an answer's server-sent events, and decide when to retry a refused request.  All load tests use it.

Pure: times are arguments, in seconds of any one clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Literal

import msgspec

Retry = Literal["obey", "ignore", "never"]
FIXED_RETRY_S = 0.5  # pause of a client that ignores Retry-After
MAX_RETRIES = 8


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = "no message"
    code: str | int | None = None


class _Event(msgspec.Struct):
    """The fields of a chunk, of either endpoint, that a measurement needs; other fields are not decoded."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """The text received so far from a stream of server-sent events, and its arrival times.

    Only events with text count.  An event's time is the arrival of the block of bytes that contained it.  An event may
    have several tokens.  Several events may share a block: their gaps are then 0, as for a reader."""

    def __init__(self) -> None:
        self.times: list[float] = []  # arrival times of the events with text
        self.gaps: list[float] = []  # seconds between events with text of the same choice
        self.text: list[str] = []
        self.tokens: int | None = None  # output tokens reported by the server; None until it reports usage
        self.cached: int | None = None  # prompt tokens found in the server's prefix cache; None until it reports them
        self.error: str | None = None
        self.done = False  # [DONE] has arrived
        self._rest = b""
        self._last: dict[int, float] = {}

    def feed(self, block: bytes, now_s: float) -> None:
        """Add a block of bytes, cut anywhere.  Data that is not a JSON event sets `error`."""
        lines = (self._rest + block).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # an id, a comment or the blank line between events
            data = line[5:].strip()
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                event = _decode(data)
            except msgspec.DecodeError as error:
                self.error = f"not an event: {error}"
                continue
            if event.error is not None:
                self.error = f"{event.error.code or 'error'}: {event.error.message}"
            if event.usage is not None:
                self.tokens = event.usage.completion_tokens
                if event.usage.prompt_tokens_details is not None:
                    self.cached = event.usage.prompt_tokens_details.cached_tokens
            for choice in event.choices:
                text = choice.text or (choice.delta.content if choice.delta is not None else None)
                if text:
                    self.times.append(now_s)
                    self.text.append(text)
                    if choice.index in self._last:
                        self.gaps.append(now_s - self._last[choice.index])
                    self._last[choice.index] = now_s

    @property
    def count(self) -> int:
        """Output tokens as the server reports them, else the number of events with text."""
        return len(self.times) if self.tokens is None else self.tokens

    @property
    def complete(self) -> bool:
        return self.done and self.error is None


def announced_pause(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Return the seconds to wait that a refusal announces; None without a readable header.

    The order is that of OpenAI's clients: `retry-after-ms`, then `Retry-After` in seconds or as a date."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = next((value for key, value in headers.items() if key.lower() == name), None)
        if value is None:
            continue
        try:
            return max(0.0, float(value) / scale)
        except ValueError:
            pass
        if scale == 1.0:
            try:
                return max(0.0, parsedate_to_datetime(value).timestamp() - now_unix_s)
            except ValueError:
                pass
    return None


def pause(retry: Retry, attempt: int, announced_s: float | None, rng: random.Random) -> float | None:
    """Return the seconds to wait after the refusal of attempt `attempt` (0, 1, ...); None to give up.

    obey: the announced pause.  Without one: half a second, doubled each time up to 8 s, less at most a random quarter,
    like OpenAI's clients. ignore: half a second always. never: give up.  obey and ignore give up after MAX_RETRIES."""
    if retry == "never" or attempt >= MAX_RETRIES:
        return None
    if retry == "ignore":
        return FIXED_RETRY_S
    if announced_s is not None:
        return announced_s
    return min(8.0, 0.5 * 2.0**attempt) * (1 - rng.random() / 4)
