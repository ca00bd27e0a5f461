"""The ledger: what engines generated and what clients got, to the token, however the clients leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import pytest
import redis
from aiohttp import ClientError

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import Finish, Generate
from quire.engine.wire.records import Usage
from quire.service.delivery import usage_ledger
from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]


def says(tokenizer: Tokenizer) -> Callable[[Generate, int], tuple[list[int], Finish | None]]:
    ids = tokenizer._encode("One request down, one token up. END of story. ", special=False)
    return lambda generate, index: (ids * (generate.max_new_tokens // len(ids) + 1), None)


@pytest.mark.usefixtures("patient")
async def test_after_500_random_departures_the_books_balance(
    serve: Serve,
    engine: EngineMaker,
    byte_level_tokenizer: Tokenizer,
    redis_server: EmbeddedRedis,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streamed and non-streaming answers, several choices, stop strings; clients that leave at any moment, read to the
    end, or resume at another gateway. "Generated" is the engine's count; "delivered" is at least the number of tokens
    that a client has read."""
    gateways = [await serve(late_wait_s=1000.0), await serve(late_wait_s=1000.0)]
    rng, read, complete = random.Random(5), 0, 0
    slots = asyncio.Semaphore(100)
    recorded: list[Usage] = []
    monkeypatch.setattr(usage_ledger, "record_usage", lambda _, usage: recorded.append(usage))

    async def visit(number: int) -> None:
        nonlocal read, complete
        body = {"model": "tiny", "prompt": "a", "n": 1 + number % 2, "max_tokens": 60, "return_token_ids": True}
        if number % 5 == 0:
            body["stop"] = "END"
        leaves = rng.choice([0.0, 0.02, 0.1, 0.3, 60.0])
        body["stream"] = stream = number % 3 > 0
        headers = {"X-Resumable": "1"} if number % 4 == 0 else {}
        turn = 0
        while turn < 3:
            turn += 1
            try:
                async with asyncio.timeout(leaves):
                    session = gateways[(number + turn) % 2].session
                    async with session.post("/v1/completions", json=body, headers=headers) as response:
                        if response.status != 200:
                            assert "Last-Event-ID" in headers
                            return
                        async for line in response.content:
                            if line.startswith(b"id: ") and "X-Resumable" in headers:
                                last = line[4:].decode().strip()
                            if line.startswith((b"data: {", b"{")):
                                chunk = json.loads(line.removeprefix(b"data: "))
                                read += sum(len(choice["token_ids"]) for choice in chunk["choices"])
                                if "X-Resumable" in headers:
                                    headers["Last-Event-ID"] = last if stream else ""
                            complete += line.startswith((b"data: [DONE]", b"{"))
                return
            except (TimeoutError, ClientError):
                if "Last-Event-ID" not in headers or not stream:
                    return
                leaves = 60.0

    async def one(number: int) -> None:
        async with slots:
            await visit(number)

    async with engine(says(byte_level_tokenizer), step_s=0.005) as fake:
        await settled(lambda: all(served.streams.fleet.engines for served in gateways))
        await asyncio.gather(*(one(number) for number in range(500)))
        for served in gateways:
            for submission in list(served.streams.submissions._submissions.values()):
                if submission.timer is not None and submission.running:  # no client resumes it, as after resume_s
                    served.streams.submissions._abandon(submission)
        await settled(lambda: not fake.busy)
    for served in gateways:
        await served.streams.stop()
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        usage = {key: int(value) for key, value in client.hgetall(f"{{{namespace}}}:usage:").items()}
    assert usage["generated"] == fake.generated
    assert usage["requests"] >= len(fake.seen)
    assert 0 < read <= usage["delivered"] < usage["generated"]
    assert 0 < complete < 500
    # A submission that was read at two gateways has a record from each, in any order: the furthest one counts.
    furthest = {one.request_id: one for one in sorted(recorded, key=lambda one: one.delivered)}
    assert sum(one.generated for one in furthest.values()) == usage["generated"]
    assert sum(one.delivered for one in furthest.values()) == usage["delivered"]
    # The metric counts no position twice; a stopping gateway may miss the reply to its last settlement.
    assert 0 < sum(one.new for one in recorded) <= usage["delivered"]
