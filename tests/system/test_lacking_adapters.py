"""An engine without an adapter's folder leaves its requests to another one, also while a deploy replaces engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from quire.engine.adapters.errors import AdapterMissing
from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.executor.lora.packing import PackedAdapter
from tests.executor.test_lora import base_of, reference
from tests.lora import merged, write_adapter
from tests.pace import patience
from tests.system.processes import metric, until
from tests.system.stack import EngineThread, GatewayThread
from tests.wire.test_lacking_adapters import Clock

pytestmark = pytest.mark.system

PROMPT, NEW = [20, 30, 40, 50, 60], 8


class Deployment:
    """A gateway with adapter `sql`, and engines that have its folder or not."""

    def __init__(self, redis_url: str, namespace: str, checkpoint: Path, folder: Path) -> None:
        self._place, self._checkpoint = (redis_url, namespace), checkpoint
        self.engines: dict[str, EngineThread] = {}
        self.gateway = GatewayThread(*self._place, "gateway", checkpoint, lora=f"sql={folder}")
        self.looked: dict[str, int] = {}  # loads that did not find the folder, by engine

    def start(self, name: str, *, has_folder: bool, **options: Any) -> None:
        engine = self.engines[name] = EngineThread(*self._place, name, self._checkpoint, **options)
        if not has_folder:
            store: Any = engine.executor.adapter_store
            self.looked[name] = 0

            def missing(key: str) -> PackedAdapter:
                self.looked[name] += 1
                raise AdapterMissing(f"{key.partition('=')[2]}: No such file or directory")

            store._load = missing

    def stop(self, name: str) -> None:
        self.engines.pop(name).stop()


@pytest.fixture
def expected(checkpoint: Callable[[str], Path], tmp_path: Path) -> dict[str, list[int]]:
    """What the base model and the one with the adapter answer."""
    directory = checkpoint("llama")
    folder = write_adapter(tmp_path / "sql", base_of(directory))
    models = {"tiny": base_of(directory), "sql": merged(directory, folder)}
    answers = {name: reference(model, PROMPT, NEW) for name, model in models.items()}
    assert answers["tiny"] != answers["sql"]
    return answers


@pytest.fixture
async def deployment(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], tmp_path: Path, expected: Any
) -> AsyncIterator[Deployment]:
    made = Deployment(redis_server.url, namespace, checkpoint("llama"), tmp_path / "sql")
    yield made
    made.gateway.stop()
    for name in list(made.engines):
        made.stop(name)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(200))) as session:
        yield session


async def ask(client: aiohttp.ClientSession, url: str, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    async with client.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        found: list[int] = answer["choices"][0]["token_ids"]
        return found


async def test_an_engine_without_the_folder_leaves_requests_to_the_one_that_has_it(
    deployment: Deployment, client: aiohttp.ClientSession, expected: dict[str, list[int]]
) -> None:
    """Both serve the base model."""
    deployment.start("without", has_folder=False)
    deployment.gateway.wait_ready()
    url = deployment.gateway.url
    first = asyncio.create_task(ask(client, url, "sql"))
    await until(lambda: deployment.looked["without"] == 1, reading=[first])
    assert await ask(client, url, "tiny") == expected["tiny"]  # nothing waits behind it
    assert not first.done()
    deployment.start("with", has_folder=True)
    models = ["sql", "tiny", "sql", "sql", "tiny", "sql"]
    answers = await asyncio.gather(*(ask(client, url, model) for model in models))
    assert answers == [expected[model] for model in models]
    assert await first == expected["sql"]
    assert await metric(client, url, "quire_requests_refused_total") == 0


async def test_an_engine_without_lora_serves_the_base_model_beside_one_with_it(
    deployment: Deployment, client: aiohttp.ClientSession, expected: dict[str, list[int]]
) -> None:
    """It returns requests with adapters to the queue, also those of an engine that has ended."""
    deployment.start("with", has_folder=True)
    deployment.gateway.wait_ready()
    deployment.start("plain", has_folder=True, lora_slots=0)
    url = deployment.gateway.url
    models = ["sql", "tiny"] * 6
    answers = await asyncio.gather(*(ask(client, url, model) for model in models))
    assert answers == [expected[model] for model in models]
    assert await metric(client, url, "quire_requests_refused_total") == 0
    await asyncio.to_thread(deployment.stop, "with")
    assert await ask(client, url, "tiny") == expected["tiny"]
    async with client.post(f"{url}/v1/completions", json={"model": "sql", "prompt": PROMPT}) as response:
        message = (await response.json())["error"]["message"]  # the gateway's, or that of a queued request
        assert (response.status, "LoRA adapters" in message) == (400, True), message


async def test_a_deploy_of_engines_with_the_folder_loses_no_request(
    deployment: Deployment, client: aiohttp.ClientSession, expected: dict[str, list[int]]
) -> None:
    """The old engine lacks the folder, takes no harm, and goes; the new one answers what came before and after."""
    deployment.start("old", has_folder=False)
    deployment.gateway.wait_ready()
    url = deployment.gateway.url
    early = [asyncio.create_task(ask(client, url, "sql")) for _ in range(3)]
    await until(lambda: deployment.looked["old"] > 0, reading=early)
    deployment.start("new", has_folder=True)
    late = [asyncio.create_task(ask(client, url, model)) for model in ("sql", "tiny")]
    assert await asyncio.gather(*early, *late) == [expected["sql"]] * 4 + [expected["tiny"]]
    await asyncio.to_thread(deployment.stop, "old")
    assert await ask(client, url, "sql") == expected["sql"]


async def test_without_any_engine_that_has_it_the_client_learns_why(
    deployment: Deployment,
    client: aiohttp.ClientSession,
    expected: dict[str, list[int]],
    tmp_path: Path,
    redis_server: EmbeddedRedis,
    namespace: str,
) -> None:
    """After LACKING_MS, in which another engine might have come."""
    deployment.start("without", has_folder=False)
    deployment.gateway.wait_ready()
    url = deployment.gateway.url

    async def refused() -> tuple[int, Any]:
        body = {"model": "sql", "prompt": PROMPT, "max_tokens": NEW}
        async with client.post(f"{url}/v1/completions", json=body) as response:
            return response.status, (await response.json())["error"]

    asking = asyncio.create_task(refused())
    with redis.Redis.from_url(redis_server.url) as server:
        clock = Clock(server, namespace)
        await until(clock.tick, reading=[asking])
    status, error = await asking
    assert status == 400
    assert error["message"].endswith(f"{tmp_path / 'sql'}: No such file or directory")
    assert deployment.looked["without"] == 2
    assert await ask(client, url, "tiny") == expected["tiny"]
