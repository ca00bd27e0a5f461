"""One chat with a server: send the messages, read the streamed answer, resume it after a lost connection.

    POST /v1/chat/completions, X-Resumable: 1 --> events with ids --x  connection lost
    GET /v1/streams/ANSWER, Last-Event-ID: the last event ----------> the rest, at any gateway
    DELETE /v1/streams/ANSWER ---------------------------------------  the user stops the answer

A server other than Quire sends no header x-answer-id.  Its answers end with a lost connection, and the only way to
cancel one is to close the connection.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import msgspec

from quire.service.terminal import server
from quire.service.terminal.options import ChatConfig
from quire.service.terminal.server import ServerError

RESUME_S = 30.0  # default of --resume-s: seconds that a gateway continues a request after its client has disconnected
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between attempts to resume; the last value repeats
SILENCE_S = 60.0  # seconds of silence after which a connection counts as broken; Quire sends a keep-alive every 10 s
STOP_S = 5.0  # seconds to wait for the server to confirm that it cancelled an answer
MAX_LINE = 2**22  # maximum bytes of one event
QUEUED = re.compile(r": queued place=(\d+)(?: wait_s=([\d.]+))?$")


class Waits(msgspec.Struct, frozen=True):
    """The request waits in the late lane."""

    place: int  # number of requests ahead
    wait_s: float | None  # estimated wait in seconds; None: not known


class Piece(msgspec.Struct, frozen=True):
    """New text of the answer."""

    text: str
    reasoning: bool = False


class Lost(msgspec.Struct, frozen=True):
    """The connection broke; the answer is resumed."""

    why: str


class Ended(msgspec.Struct, frozen=True):
    """The answer is complete."""

    finish: str
    tokens: int | None  # output tokens as counted by the server


Event = Waits | Piece | Lost | Ended


class _Broken(Exception):
    """The connection ended before the answer did."""


class Answer:
    """One answer while it streams."""

    def __init__(self, client: aiohttp.ClientSession, base: str, config: ChatConfig, model: str) -> None:
        self._client, self._base, self._config, self._model = client, base, config, model
        self.id = ""  # id of the answer; "": not known, or not from Quire
        self._last_event = ""  # id of the last event whose data were read; "": no event yet
        self._event_id = ""  # id of the event that is read now
        self._finish, self._done = "", False
        self._tokens: int | None = None
        self._started = False  # whether the server has begun to answer

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Return the request body, without the sampling fields that the user did not set."""
        config = self._config
        fields: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        given = {
            "max_tokens": (config.max_tokens, config.max_tokens > 0),
            "temperature": (config.temperature, config.temperature >= 0),
            "top_p": (config.top_p, config.top_p > 0),
            "top_k": (config.top_k, config.top_k >= 0),
            "min_p": (config.min_p, config.min_p >= 0),
            "repetition_penalty": (config.repetition_penalty, config.repetition_penalty > 0),
            "seed": (config.seed, config.seed >= 0),
        }
        return fields | {name: value for name, (value, wanted) in given.items() if wanted}

    async def stream(self, messages: list[dict[str, str]]) -> AsyncGenerator[Event, None]:
        """Yield the events of the answer; the last one is Ended.  Raises ServerError with a message of one line."""
        url = f"{self._base}/v1/chat/completions"
        request = self._client.post(url, json=self.body(messages), headers={"X-Resumable": "1"})
        try:
            async for event in self._read(request):
                yield event
        except _Broken as broken:
            async for event in self._resume(str(broken)):
                yield event
        yield Ended(self._finish, self._tokens)

    async def _resume(self, why: str) -> AsyncIterator[Event]:
        """Yield the rest of the answer.  Raises ServerError if no attempt to resume it succeeds for RESUME_S."""
        if not self.id:
            raise ServerError(server.printable(f"the connection to {self._base} broke: {why}"))
        failures, until = 0, time.monotonic() + RESUME_S
        yield Lost(why)
        while not self._done:
            if time.monotonic() >= until:
                raise ServerError(server.printable(f"the answer could not be resumed for {RESUME_S:g} s: {why}"))
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            failures += 1
            headers = {"Last-Event-ID": self._last_event} if self._last_event else {}
            try:
                async for event in self._read(self._client.get(f"{self._base}/v1/streams/{self.id}", headers=headers)):
                    failures, until = 0, time.monotonic() + RESUME_S
                    yield event
            except _Broken as broken:
                why = str(broken)

    async def _read(self, request: Any) -> AsyncIterator[Event]:
        """Yield the events of one connection.  Raises _Broken if resuming the answer may help, else ServerError."""
        try:
            async with request as response:
                if response.status != 200:
                    await self._refuse(response)
                    return
                self._started = True
                self.id = response.headers.get("x-answer-id", self.id)
                if response.headers.get("x-queue-lane") == "late" and "x-queue-place" in response.headers:
                    wait = response.headers.get("x-queue-wait")
                    yield Waits(int(response.headers["x-queue-place"]), float(wait) if wait else None)
                async for line in _lines(response):
                    for event in self._parse(line):
                        yield event
                    if self._done:
                        return
        except server.FAILURES as error:
            if not self._started:
                raise server.unreachable(self._base, error) from None
            raise _Broken(server.reason(error)) from None
        raise _Broken("the stream ended early")

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        """Handle a status other than 200: return for 204, else raise ServerError."""
        body = await response.read()
        if response.status == 204:  # the answer was read to its end
            self._done = True
            return
        if self.id and response.status in (429, 502, 503, 504):
            raise _Broken(f"{response.status}: {server.error_text(body)}")
        error = server.refused(self._base, response.status, body)
        retry = response.headers.get("Retry-After", "")
        if response.status in (429, 503) and retry.isdigit():
            raise ServerError(f"{error}; try again in {retry} s")
        raise error

    def _parse(self, line: str) -> list[Event]:
        """Process one line of the stream, and return its events for the caller."""
        if line.startswith("id: "):
            self._event_id = line[4:]
        elif found := QUEUED.match(line):
            return [Waits(int(found[1]), float(found[2]) if found[2] else None)]
        elif line.startswith("data:"):
            pieces = self._parse_data(line[5:].strip())
            self._last_event = self._event_id  # not before: an event without its data must be sent again
            return pieces
        return []

    def _parse_data(self, data: str) -> list[Event]:
        if data == "[DONE]":
            self._done = True
            return []
        found: list[Event] = []
        try:
            chunk = json.loads(data)
            if error := chunk.get("error"):
                text = error if isinstance(error, str) else str(error.get("message"))
                raise ServerError(server.printable(f"the server ended the answer: {' '.join(text.split())}"))
            if usage := chunk.get("usage"):
                self._tokens = int(usage["completion_tokens"])
            for choice in chunk["choices"]:
                self._finish = choice.get("finish_reason") or self._finish
                delta = choice.get("delta") or {}
                if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                    found.append(Piece(str(thought), reasoning=True))
                if content := delta.get("content"):
                    found.append(Piece(str(content)))
        except (ValueError, LookupError, TypeError, AttributeError):
            shown = server.printable(data[:80])
            raise ServerError(f"{self._base} sent an event that is none of a chat: {shown}") from None
        return found

    async def stop(self) -> None:
        """Cancel the answer in the server, after its connection was closed."""
        if not self.id or self._done:
            return
        try:
            async with asyncio.timeout(STOP_S), self._client.delete(f"{self._base}/v1/streams/{self.id}"):
                pass
        except server.FAILURES:
            pass  # the server cancels the request by itself, --resume-s after the connection was closed


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the lines of a stream.  Raises TimeoutError if nothing arrives for SILENCE_S."""
    rest = b""
    while True:
        async with asyncio.timeout(SILENCE_S):
            block = await response.content.readany()
        if not block:
            return
        *whole, rest = (rest + block).split(b"\n")
        if len(rest) > MAX_LINE:
            raise ServerError("the server sent an event without an end")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
