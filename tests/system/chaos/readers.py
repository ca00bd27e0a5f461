"""Clients that know the expected tokens: every token of an answer is checked when it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from quire.service.api.position import Position
from tests.pace import patience

PATIENCE_S = 90.0  # seconds after which a client that is refused or cannot connect gives up
PAUSE_S = 0.05  # between two tries where the server does not say how long to wait


@dataclass
class Request:
    """What is asked, and the token ids of each of its choices: the oracle."""

    body: dict[str, Any]
    wanted: list[list[int]]


@dataclass
class Doors:
    """Addresses for clients: the gateways themselves, and the same through a faulty proxy."""

    near: list[str]
    far: list[str]
    gateway_kills: int = 0  # so far: a plain stream that breaks meanwhile has an excuse
    gateways_ending: int = 0  # killed or draining, and not seen gone yet: they may still accept a connection
    failovers: int = 0  # begun and ended so far: one that a stream has seen any of may have lost its request

    @contextlib.contextmanager
    def failing_over(self) -> Iterator[None]:
        """A failover goes on.  Also requests sent meanwhile may be lost: the old master takes them for a while."""
        self.failovers += 1
        try:
            yield
        finally:
            self.failovers += 1


@dataclass
class Tally:
    """What came of all streams together."""

    streams: int = 0
    resumable: int = 0  # failures, by clients that resume
    tokens: int = 0
    lost: int = 0  # tokens that never came, though later ones or the end did
    repeated: int = 0  # tokens that came twice
    wrong: int = 0  # tokens that are not those of the oracle
    resumed: int = 0  # times that a client resumed
    refused: int = 0  # times that a client retried after a 429 or 503
    with_redis: int = 0  # requests lost by a failover and reported to their clients
    with_gateway: int = 0  # plain streams that ended with their gateway, which nothing can help
    failures: list[str] = field(default_factory=list)


class Reader:
    """One client and its one answer."""

    def __init__(self, request: Request, doors: Doors, name: str, door: int, *, resumable: bool) -> None:
        """`door`: where it knocks first.  `resumable`: it connects through a faulty proxy, and resumes where it was
        cut off."""
        self.request, self.resumable = request, resumable
        self._doors, self._urls = doors, doors.far if resumable else doors.near
        self._name = name
        self._door = door % len(self._urls)
        self._have = [0] * len(request.wanted)  # tokens of each choice so far
        self._ends: list[str | None] = [None] * len(request.wanted)
        self._usage = -1
        self._done = False
        self._last_id = ""
        self._last = 0.0  # monotonic time of the last event
        self._tally = Tally(streams=1, resumable=int(resumable))
        self._failovers = doors.failovers  # before the request was sent
        self.events = 0
        # The longest silence between two events since the last reset, and when it ended.
        self._longest_s, self._ended = 0.0, 0.0

    @property
    def live(self) -> bool:
        return self.events > 0 and not self._done

    def watch(self) -> None:
        """From now on, how long is the longest pause?"""
        self._longest_s = self._ended = 0.0

    def pause(self) -> tuple[float, float]:
        """The longest silence since watch() (one that had begun before counts whole): seconds, and the monotonic time
        of its end."""
        now = time.monotonic()
        if self.live and now - self._last > self._longest_s:
            return now - self._last, now
        return self._longest_s, self._ended

    async def read(self, session: aiohttp.ClientSession) -> Tally:
        """To the end, however often it takes."""
        tally, give_up = self._tally, time.monotonic() + patience(PATIENCE_S)
        while not self._done:
            before, kills = self.events, self._doors.gateway_kills
            try:
                wait_s = await self._try(session)
            except aiohttp.ClientConnectorError:  # no connection: no request was sent
                wait_s = PAUSE_S
            except (aiohttp.ClientError, ConnectionError) as error:
                if not self.resumable:
                    if self._doors.gateway_kills > kills or self._doors.gateways_ending:
                        tally.with_gateway += 1
                    else:
                        tally.failures.append(f"{self._name}: a plain stream broke: {error!r}")
                    return tally
                wait_s = PAUSE_S
            except Lost:
                tally.with_redis += 1
                return tally
            except Broken as error:
                tally.failures.append(f"{self._name}: {error}")
                return tally
            if before != self.events:
                give_up = time.monotonic() + patience(PATIENCE_S)
            if not self._done:
                if time.monotonic() > give_up:
                    tally.failures.append(f"{self._name}: not answered for {PATIENCE_S:g} s")
                    return tally
                self._door = (self._door + 1) % len(self._urls)
                await asyncio.sleep(wait_s)
        self._check_end()
        return tally

    async def _try(self, session: aiohttp.ClientSession) -> float:
        """One connection, to its end; seconds to wait before the next one, if it was not the answer's end.

        Raises Broken for what no client should see, ClientError or ConnectionError when the connection is lost."""
        headers = {}
        if self.resumable:
            headers["Idempotency-Key"] = self._name
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        async with session.post(
            f"{self._urls[self._door]}/v1/completions", json=self.request.body, headers=headers
        ) as response:
            if response.status in (429, 503):
                self._tally.refused += 1
                return float(response.headers["Retry-After"])
            # The gateway that would have sent `request_lost` may have been killed before it knew.
            if response.status == 404 and self._last_id and self._doors.failovers > self._failovers:
                raise Lost
            if response.status != 200:
                raise Broken(f"status {response.status}: {await response.text()}")
            if self._last_id:
                self._tally.resumed += 1
            event_id, data = "", b""
            async for line in response.content:
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line.startswith(b"data: "):
                    data = line[6:]
                elif line == b"\n" and data:  # only now has the event come
                    self._take(event_id, data)
                    data = b""
        if not self._done and not self.resumable:
            raise ConnectionError("the stream ended before its end")
        return PAUSE_S

    def _take(self, event_id: str, data: bytes) -> None:
        now = time.monotonic()
        if self.events and now - self._last > self._longest_s:
            self._longest_s, self._ended = now - self._last, now
        self._last = now
        self.events += 1
        if data.startswith(b"[DONE]"):
            self._done = True
            return
        event = json.loads(data)
        if event.get("error", {}).get("code") == "request_lost":
            raise Lost
        if "error" in event and self._doors.gateways_ending and not self.resumable:
            raise ConnectionError(f"the gateway ended the stream: {event['error']}")
        if "error" in event:
            raise Broken(f"an error event: {event['error']}")
        self._last_id = event_id
        if event.get("usage"):
            self._usage = event["usage"]["completion_tokens"]
        position = Position.parse(event_id)
        for choice in event["choices"]:
            index, ids = choice["index"], choice["token_ids"]
            end = position.tokens[index]
            assert end is not None
            self._compare(index, end - len(ids), ids)
            self._ends[index] = choice["finish_reason"] or self._ends[index]

    def _compare(self, index: int, first: int, ids: Sequence[int]) -> None:
        """These tokens came, the first of them at output position `first`."""
        tally, have = self._tally, self._have[index]
        tally.lost += max(0, first - have)
        tally.repeated += max(0, min(have, first + len(ids)) - first)
        wanted = self.request.wanted[index][first : first + len(ids)]
        tally.wrong += sum(a != b for a, b in zip(ids, wanted, strict=False)) + len(ids) - len(wanted)
        self._have[index] = max(have, first + len(ids))
        tally.tokens += len(ids)

    def _check_end(self) -> None:
        tally, lengths = self._tally, [len(wanted) for wanted in self.request.wanted]
        tally.lost += sum(max(0, length - have) for length, have in zip(lengths, self._have, strict=True))
        if None in self._ends:
            tally.failures.append(f"{self._name}: [DONE] came before every choice had ended: {self._ends}")
        if self._usage != sum(lengths):
            tally.failures.append(f"{self._name}: usage says {self._usage} tokens, not {sum(lengths)}")


class Lost(Exception):
    """Redis has acknowledged the request and lost it."""


class Broken(Exception):
    """A wrong answer of a server."""
