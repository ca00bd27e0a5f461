"""Hot prefixes over a deploy: real Redis, real engines, before and after."""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
from transformers import PreTrainedModel

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.messages import HotPrefix
from tests.checkpoints import VOCAB, make_checkpoint
from tests.pace import patience
from tests.system.processes import Process, ending
from tests.system.restarts import First, Restarts, hit_rate, text
from tests.system.stack import EngineThread, Stack

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
LIMIT_S = 250.0  # generous: the machine may be busy
LONG = 960  # tokens of the prefix
STEP_TOKENS, STEP_S = 48, 0.1
SLOW = ("--executor=scripted", f"--scripted-step-ms={1000 * STEP_S:g}", f"--step-tokens={STEP_TOKENS}", "--max-seqs=8")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S))) as session:
        yield session


@pytest.fixture
def made(
    redis_server: EmbeddedRedis, namespace: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> Iterator[Restarts]:
    with ending([]) as processes:
        yield Restarts(redis_server.url, namespace, tmp_path, checkpoint("llama"), processes, *SLOW)


async def kept(made: Restarts, fingerprint: str = "scripted") -> None:
    """Wait until the store has an entry."""
    with redis.Redis.from_url(made.redis_url) as store:
        async with asyncio.timeout(patience(LIMIT_S)):
            while not store.exists(f"{{{made.namespace}}}:hot_prefixes:{fingerprint}"):  # noqa: ASYNC110  (another process)
                await asyncio.sleep(0.02)


def other_weights(model: PreTrainedModel) -> None:
    next(iter(model.parameters())).data.mul_(1.01)


async def test_a_deploy_keeps_the_hit_rate_and_other_weights_begin_anew(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A real model: four documents behind one system prompt, for two tenants' salts, and the text stays the same."""
    system = text(1, 100, VOCAB)
    documents = [system + text(10 + i, 150, VOCAB) for i in range(4)]
    options: dict[str, Any] = {"warm_seconds": LIMIT_S}
    with Stack(redis_server.url, namespace, checkpoint("llama"), **options) as stack:

        async def ask(session: aiohttp.ClientSession, at: int, round_: int) -> tuple[str, First]:
            body = {
                "model": "tiny",
                "prompt": [*documents[at % 4], 5 + round_, 6 + at],
                "max_tokens": 4,
                "temperature": 0,
                **({"cache_salt": "s"} if at // 4 % 2 else {}),
            }
            deadline = time.monotonic() + patience(LIMIT_S)
            while True:
                async with session.post(f"{stack.url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    if response.status == 200:
                        break
                    assert response.status in (429, 503), answer  # the gateway has not seen the engine yet
                    assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["text"], First(0.0, cached, usage["prompt_tokens"])

        def swap(model: Path) -> int:
            """Stop the engine and start one; blocks cached before it serves anybody."""
            stack.engines[0].stop()
            stack.engines[0] = EngineThread(redis_server.url, namespace, "engine0", model, **options)
            return stack.engines[0].engine.core.pool.idle

        async with aiohttp.ClientSession() as session:

            async def workload(round_: int) -> tuple[list[str], float]:
                answers = [await ask(session, at, round_) for at in range(16)]
                return [said for said, _ in answers], hit_rate([first for _, first in answers])

            await workload(0)
            said, before = await workload(1)
            assert before > 0.8
            assert await asyncio.to_thread(swap, checkpoint("llama")) > 0
            again, after = await workload(1)
            assert after >= 0.9 * before
            assert again == said
            print(f"hit rate {before:.3f} before, {after:.3f} after")

            other = make_checkpoint(tmp_path / "other", "llama", edit=other_weights)
            assert await asyncio.to_thread(swap, other) == 0
            _, first = await ask(session, 0, 1)
            assert first.cached == 0


async def test_an_engine_that_joins_under_load_is_warm(
    redis_server: EmbeddedRedis,
    namespace: str,
    checkpoint: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests arrive all the time, but another engine has capacity for them: a rolling deploy."""
    caplog.set_level(logging.INFO, "quire.warming")
    document = text(1, 200, VOCAB)
    options: dict[str, Any] = {"warm_seconds": LIMIT_S}
    with Stack(redis_server.url, namespace, checkpoint("llama"), **options) as stack:
        body = {"model": "tiny", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        asked = 0

        async def keep_asking(session: aiohttp.ClientSession) -> None:
            nonlocal asked
            while True:
                prompt = [*document, 5, asked % VOCAB]
                async with session.post(f"{stack.url}/v1/completions", json=body | {"prompt": prompt}) as response:
                    assert response.status == 200, await response.text()
                    asked += 1

        async with aiohttp.ClientSession() as session:
            clients = [asyncio.create_task(keep_asking(session)) for _ in range(3)]
            with redis.Redis.from_url(redis_server.url) as store:
                async with asyncio.timeout(patience(LIMIT_S)):
                    while not list(store.scan_iter(f"{{{namespace}}}:hot_prefixes:*")):  # noqa: ASYNC110  (another thread)
                        await asyncio.sleep(0.02)
            joined = await asyncio.to_thread(
                EngineThread, redis_server.url, namespace, "engine1", checkpoint("llama"), **options
            )
            stack.engines.append(joined)
            for client in clients:
                assert not client.done() or client.result()
                client.cancel()
        assert "computed 1 of 1 hot prefixes, 192 tokens" in caplog.text


async def test_the_first_request_after_a_restart(made: Restarts, session: aiohttp.ClientSession) -> None:
    """Cold it has to compute the complete prefix, in steps that take their time."""
    prefix = text(3, LONG, VOCAB)
    engine = await made.engine()
    for i in range(3):
        steady = await made.first(session, [*prefix, 5, i])
    assert steady.cached == LONG
    await made.rest()
    assert await asyncio.to_thread(engine.terminate, LIMIT_S) == 0

    engine = await made.engine(f"--warm-seconds={LIMIT_S}")
    engine.wait_for(f"computed 1 of 1 hot prefixes, {LONG} tokens")
    warm = await made.first(session, [*prefix, 6])
    await made.rest()
    assert await asyncio.to_thread(engine.terminate, LIMIT_S) == 0

    engine = await made.engine("--warm-seconds=0")
    cold = await made.first(session, [*prefix, 7])
    assert "of 1 hot prefixes" not in engine.said()
    print(f"time to first token: steady {steady.seconds:.2f} s, warm {warm.seconds:.2f} s, cold {cold.seconds:.2f} s")
    assert (warm.cached, cold.cached) == (LONG, 0)
    assert cold.seconds >= LONG / STEP_TOKENS * STEP_S


async def test_after_a_crash_live_requests_come_before_hot_prefixes(
    made: Restarts, session: aiohttp.ClientSession
) -> None:
    engine = await made.engine()
    prefix = text(3, 5 * STEP_TOKENS, VOCAB)
    await made.first(session, prefix)
    await made.first(session, [*prefix, 5])
    await kept(made)
    body = {"model": "m", "prompt": [9] * 5, "max_tokens": 20, "stream": True, "return_token_ids": True}
    said: list[bytes] = []
    async with session.post(f"{made.url}/v1/completions", json=body | {"ignore_eos": True, "seed": 1}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                said.append(line)
                if len(said) == 3:
                    engine.kill()
                    engine = made.launch(f"--warm-seconds={LIMIT_S}")
    assert sum(line.count(b'"finish_reason":"length"') for line in said) == 1
    log = engine.said()
    assert "skipped prefix warm-up: requests are already queued" in log
    assert "hot prefixes, " not in log


@pytest.mark.parametrize(("kind", "status"), [("kill", -9), ("lost", 1)])
async def test_no_engine_dies_of_the_same_prefix_twice(made: Restarts, kind: str, status: int) -> None:
    """It kills one engine; the next start computes nothing ahead, and serves."""
    deadly = 7
    bus = EngineSide(made.redis_url, "e", namespace=made.namespace)
    await bus.open()
    await bus.hot_prefixes.write("scripted", [HotPrefix(struct.pack("<64I", *[deadly] * 64))])
    await bus.close()
    command = [sys.executable, "-m", "tests.system.deadly", str(deadly), kind]
    first: Process = made.launch(command=command)
    assert await asyncio.to_thread(first.popen.wait, patience(LIMIT_S)) == status
    second = made.launch(command=command)
    await asyncio.to_thread(second.wait_for, "ready", LIMIT_S)
    assert "of 1 hot prefixes" not in second.said()
