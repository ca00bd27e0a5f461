"""What every client here does with an answer: read its events, and obey, or not, a server that says "later".

Pure: time comes in as an argument, in seconds of any one clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Literal

import msgspec

Retry = Literal["obey", "ignore", "never"]
IMPATIENCE_S = 0.5  # what a client that does not listen waits before its next attempt
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
    """A chunk of either endpoint, as far as a clock cares; other fields are skipped, not decoded."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """What a stream of server-sent events has brought so far, and when.

    An event counts when it carries text; its time is that of the block it came in.  Several tokens may share an event,
    and several events a block, whose gaps are then 0: this is what a reader sees."""

    def __init__(self) -> None:
        self.times: list[float] = []  # of the events with text
        self.gaps: list[float] = []  # between events with text of the same choice
        self.text: list[str] = []
        self.tokens: int | None = None  # as the server counts them; None until it says so
        self.cached: int | None = None  # prompt tokens found in the server's prefix cache; None until it says so
        self.error: str | None = None
        self.done = False  # [DONE] has come
        self._rest = b""
        self._last: dict[int, float] = {}

    def feed(self, block: bytes, now_s: float) -> None:
        """So many bytes, cut anywhere.  What is not an event in JSON ends the answer with an error."""
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
        """Output tokens; the events with text where the server does not count."""
        return len(self.times) if self.tokens is None else self.tokens

    @property
    def complete(self) -> bool:
        return self.done and self.error is None


def announced_pause(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Seconds a refusal asks for, as OpenAI's clients read it: `retry-after-ms` first, then `Retry-After` in seconds or
    as a date.  None when it says nothing, or nothing that can be read."""
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
    """Seconds before the next attempt after the refusal of attempt `attempt` (0, 1, ...); None: give up.

    obey: what the server announced; where it says nothing, half a second doubling to 8 s, less up to a quarter, as
    OpenAI's clients do.  ignore: half a second, whatever it says.  Both give up after MAX_RETRIES retries."""
    if retry == "never" or attempt >= MAX_RETRIES:
        return None
    if retry == "ignore":
        return IMPATIENCE_S
    if announced_s is not None:
        return announced_s
    return min(8.0, 0.5 * 2.0**attempt) * (1 - rng.random() / 4)
