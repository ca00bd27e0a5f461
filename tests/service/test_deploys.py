"""Gateways that are killed or drained while others start: every answer is completed. Two processes on one port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from quire.engine.wire.messages import Finish, Generate
from quire.service.text.tokenizer import Tokenizer
from tests.pace import paced, patience
from tests.ports import free_port
from tests.service.fakes import FakeEngine, settled
from tests.service.test_process import answers

EngineMaker = Callable[..., FakeEngine]
Launch = Callable[..., subprocess.Popen[str]]

LIMIT_S = 100.0  # generous: the machine may be busy


def says(tokenizer: Tokenizer) -> Callable[[Generate, int], tuple[list[int], Finish | None]]:
    """Each prompt's own words, so that no answer can be taken for another."""

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        ids = generate.token_ids[index:] + generate.token_ids[:index]
        return ids * (generate.max_new_tokens // len(ids) + 1), None

    return script


class Client:
    """Sends one request and resumes as often as needed; a `plain` client acts as OpenAI's: it retries only if there was
    no answer."""

    def __init__(self, url: str, number: int, max_tokens: int, *, plain: bool = False, get: bool = False) -> None:
        self.url, self.plain, self.get = url, plain, get
        self.prompt = f"prompt {number} of many"
        self.body: dict[str, Any] = {"model": "tiny", "prompt": self.prompt, "max_tokens": max_tokens, "stream": True}
        self.body["stream_options"] = {"include_ids": True}
        self.headers = {} if plain else {"Idempotency-Key": f"deploy-{number}"}
        self.last, self.text, self.completion_tokens = "", "", 0
        self.done = False
        self.comebacks = self.refused = 0

    async def read(self) -> None:
        async with asyncio.timeout(patience(LIMIT_S)):
            while not self.done:
                with contextlib.suppress(ClientError, OSError):
                    async with ClientSession() as session:  # a connection of its own: the kernel picks the process
                        await self._attempt(session)
                        continue
                assert not (self.plain and self.last), "an answer was broken off"
                await asyncio.sleep(0.05)

    async def _attempt(self, session: ClientSession) -> None:
        headers, path = self.headers, "/v1/completions"
        if self.last:
            headers = {"Last-Event-ID": self.last}
        if self.last and self.get:
            ask = session.get(f"{self.url}/v1/streams/{self.last.partition(':')[0]}", headers=headers)
        else:
            ask = session.post(f"{self.url}{path}", json=self.body, headers=headers)
        async with ask as response:
            if response.status == 503:
                self.refused += 1
                await asyncio.sleep(0.05)
                return
            assert response.status == 200, await response.text()
            self.comebacks += bool(self.last)
            event_id = ""
            async for line in response.content:
                if not line.endswith(b"\n"):
                    break  # cut in the middle: as a reader of events has it, there is no such line
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
                    self.last = event_id
                elif line.startswith(b"data: [DONE]"):
                    self.done = True

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.text += event["choices"][0]["text"]

    def check(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer._encode(self.prompt, special=True)
        count = int(self.body["max_tokens"])
        whole = (ids * (count // len(ids) + 1))[:count]
        assert self.text == tokenizer.text_of(whole, skip_special=True)


async def test_what_a_killed_gateway_was_answering_goes_on_at_another(
    launch: Launch, port: int, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """SIGKILL in the middle of every stream; clients resume by POST or GET, and none had announced it."""
    processes = {name: launch("--gateway-id", name) for name in ("g0", "g1")}
    url = f"http://127.0.0.1:{port}"
    async with engine(says(byte_level_tokenizer), step_s=0.02) as fake:
        await answers(f"{url}/ready")
        clients: list[Client] = []
        tasks = []

        def serving() -> dict[str, int]:
            return {name: [generate.gateway for generate in fake.seen].count(name) for name in processes}

        while min(serving().values()) < 4:
            assert len(clients) < 200
            clients.append(Client(url, len(clients), 150, get=len(clients) % 2 == 0))
            clients[-1].headers = {}
            tasks.append(asyncio.create_task(clients[-1].read()))
            fake.burst = 1
            await settled(lambda: len(fake.seen) == len(clients) and bool(clients[-1].last))
            fake.burst = 0  # it says nothing more until all streams have begun and the gateway is dead
        lost = serving()["g0"]
        processes["g0"].kill()
        fake.burst = 1
        await asyncio.gather(*tasks)
        for client in clients:
            client.check(byte_level_tokenizer)
        assert sum(client.comebacks > 0 for client in clients) == lost
        assert len(fake.seen) == len(clients)  # nothing was computed twice


@pytest.mark.timeout(300)
async def test_a_rolling_restart_under_load_aborts_nothing(
    launch: Launch, port: int, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """Answers longer than the grace period move on to the other gateway, those of plain clients fit into it."""
    url = f"http://127.0.0.1:{port}"
    pages = {name: free_port() for name in ("g0", "g1")}
    grace_s = paced(3.0)
    long, short = 450, 10  # tokens: at a 200th of the grace period each more than twice as long, and a twentieth of it

    def start(name: str) -> subprocess.Popen[str]:
        return launch("--gateway-id", name, "--drain-s", str(grace_s), "--metrics-port", str(pages[name]))

    processes = {name: start(name) for name in pages}
    clients: list[Client] = []
    over = False

    async def visit(plain: bool) -> None:
        number = len(clients)
        clients.append(Client(url, number, short if plain else long, plain=plain, get=number % 4 == 0))
        await clients[-1].read()

    async def visitor(plain: bool) -> None:
        while not over:
            await visit(plain)

    async with engine(says(byte_level_tokenizer), step_s=grace_s / 200) as fake:
        for page in pages.values():
            await answers(f"http://127.0.0.1:{page}/health")
        visitors = [asyncio.create_task(visitor(plain=number % 2 == 0)) for number in range(8)]
        for name, page in pages.items():
            before = len(fake.seen)
            while not any(new.max_new_tokens == long and new.gateway == name for new in fake.seen[before:]):
                had = len(fake.seen)  # one that has just begun there cannot end in the grace period
                visitors.append(asyncio.create_task(visit(plain=False)))
                await settled(lambda had=had: any(new.max_new_tokens == long for new in fake.seen[had:]))  # type: ignore[misc]
            processes[name].send_signal(signal.SIGTERM)
            _, errors = await asyncio.to_thread(processes[name].communicate, None, patience(LIMIT_S))
            assert processes[name].returncode == 0
            assert "Traceback" not in errors
            start(name)
            await answers(f"http://127.0.0.1:{page}/health")
        over, fake.burst = True, long
        await asyncio.gather(*visitors)
    for client in clients:
        client.check(byte_level_tokenizer)
    keyed = [client for client in clients if not client.plain]
    assert sum(client.comebacks + client.refused for client in keyed) >= len(pages)
    assert sum(new.max_new_tokens == long for new in fake.seen) == len(keyed)  # nothing was computed twice
