"""Admission with a small pool, in a complete stack without a model: each mode's bound, and several gateways."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.core.plan import StepPlan
from quire.engine.core.scheduler import Scheduler
from quire.engine.wire.layout import STALE_MS
from quire.engine.wire.messages import Generate
from quire.engine.wire.records import Fleet
from quire.loadtest.studies.baselines import MODES, WATERMARK, Mode
from tests.pace import paced, paced_ms, patience
from tests.system.processes import at_rest, fleet_until
from tests.system.stack import CLAIMS_BY_TOKENS, Stack, a_long_step

pytestmark = pytest.mark.system

BLOCKS, SIZE = 64, 16
PROMPT, OUTPUT = 40, 60  # tokens: 3 blocks at the start, 7 at the end
FIRST, LAST = 3, 7


class Watch:
    """Records the pool at the moments that admission decides.  Runs on the engine's thread."""

    def __init__(self, core: Scheduler) -> None:
        self.accepted: list[int] = []  # used blocks plus those of all waiting prompts, after each accepted request
        self.started: list[int] = []  # used blocks after each plan that started a sequence while others ran
        self.running = 0  # most sequences that ran at once
        accept, plan = core.accept, core.plan

        def watched_accept(request: Generate) -> None:
            accept(request)
            self.accepted.append(taken() + sum(-(-seq.known // SIZE) for seq in core.waiting))

        def watched_plan(now_ms: int) -> StepPlan | None:
            made = plan(now_ms)
            self.running = max(self.running, core.running)
            if made is not None and made.starts and core.running > len(made.starts):
                self.started.append(taken())
            return made

        def taken() -> int:
            return core.pool.total - core.pool.available

        core.accept, core.plan = watched_accept, watched_plan  # type: ignore[method-assign, assignment]


async def ask(client: aiohttp.ClientSession, url: str, number: int, *, prompt: int = PROMPT) -> int:
    """Send one request until it is accepted, read its answer, and return the number of refusals."""
    body = {"model": "tiny", "prompt": [9 + number] * prompt, "max_tokens": OUTPUT, "ignore_eos": True}
    refusals = 0
    while True:
        async with client.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status == 200:
                assert answer["usage"]["completion_tokens"] == OUTPUT
                assert answer["choices"][0]["finish_reason"] == "length"
                return refusals
            assert response.status == 429, answer
            assert 1 <= int(response.headers["Retry-After"]) <= 60
        refusals += 1
        await asyncio.sleep(0.02)  # shorter than Retry-After, since capacity may become free at any time


async def hammer(stack: Stack, count: int, **options: Any) -> int:
    timeout = aiohttp.ClientTimeout(total=patience(120))
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        urls = [gateway.url for gateway in stack.gateways]
        return sum(await asyncio.gather(*(ask(client, urls[i % len(urls)], i, **options) for i in range(count))))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "static"])
async def test_each_mode_keeps_its_rule_and_every_accepted_request_ends_well(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], mode: Mode
) -> None:
    """Each mode fills the pool up to its own bound: a mode that admits less than it may fails as well."""
    engine: dict[str, Any] = {
        "executor": "scripted",
        "scripted_step_ms": 3.0,
        "kv_blocks": BLOCKS,
        "max_seqs": 64,
        "admission": mode,
    }
    bounds = {"threshold": 0.9 * BLOCKS, "watermark": (1 - WATERMARK) * BLOCKS, "none": float(BLOCKS)}
    if mode in bounds:
        engine |= CLAIMS_BY_TOKENS
    waits = {"late_wait_s": 1000.0}  # the gateway refuses no request, so only the engine's rule acts
    with Stack(redis_server.url, namespace, checkpoint("llama"), gateway_options=waits, **engine) as stack:
        watch = Watch(stack.core)
        assert await hammer(stack, 60) == 0
        preemptions, most = stack.core.report.totals.preemptions, max(watch.started)
    if bound := bounds.get(mode):
        assert bound - FIRST < most <= bound  # the last start that fitted left less than a prompt's blocks
        assert preemptions > 0, "the pool was never full: the bound was not tested"
    elif mode == "reserve":
        assert watch.running == BLOCKS // LAST  # as many as fit with all their blocks
        assert preemptions == 0
    else:
        assert mode == "forecast"
        assert watch.running > BLOCKS // LAST  # sequences do not reach their peaks at the same time
        assert preemptions == 0


async def test_two_gateways_never_overshoot_the_pool_by_more_than_one_admission(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    """However much two gateways queue, the engine accepts no more than fills the pool.

    A gateway whose reading is older than the engine's last claim may queue some requests more; they stay in the queue.
    The engine's pace is known from a first load: until then the queue may hold as much as the pool does.  Then the
    step of one request lasts until the engine has no free capacity: it has claimed enough to fill the pool.  It
    claims what its next two steps compute, which measured times must not bound: a slow machine would claim less than
    the pool holds, and wait for the end of the step."""
    engine: dict[str, Any] = {"executor": "scripted", "scripted_step_ms": 3.0, "kv_blocks": BLOCKS, "max_seqs": 64}
    engine |= CLAIMS_BY_TOKENS | {"step_tokens": BLOCKS * SIZE}
    each = -(-90 // SIZE)
    none = {"ttft_target_s": 0.001, "late_wait_s": 0.0}
    with Stack(redis_server.url, namespace, checkpoint("llama"), gateways=2, gateway_options=none, **engine) as stack:
        await hammer(stack, 24, prompt=90)
        await fleet_until(redis_server.url, namespace, lambda fleet: at_rest(fleet) and fleet.free_tokens >= 90)
        watch = Watch(stack.core)
        with a_long_step(stack.engines[0].executor) as inside:
            first = asyncio.create_task(hammer(stack, 1, prompt=90))
            await asyncio.to_thread(inside.wait)
            others = asyncio.create_task(hammer(stack, 32, prompt=90))
            await fleet_until(redis_server.url, namespace, lambda fleet: fleet.free_tokens < 90)
        assert await first + await others > 0, "no request was refused: nothing was tested"
        assert max(watch.accepted) > BLOCKS - each, "the pool was never full: nothing was tested"
        assert max(watch.accepted) <= BLOCKS + each
        assert stack.core.report.totals.preemptions == 0


async def test_a_quiet_tenant_gets_in_at_once_though_a_loud_one_fills_pool_and_queue(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """None of the quiet tenant's requests is refused, however long the loud one's queue; the newest loud ones wait."""
    file = tmp_path / "tenants.toml"
    digests = ((name, hashlib.sha256(name.encode()).hexdigest()) for name in ("loud", "quiet"))
    file.write_text("".join(f'[{name}]\nweight = 1.0\nkey_sha256 = ["{digest}"]\n' for name, digest in digests))
    engine: dict[str, Any] = {"executor": "scripted", "scripted_step_ms": 2.0, "kv_blocks": BLOCKS, "max_seqs": 64}
    options = {"ttft_target_s": 2.5, "tenants": str(file)}

    def full_of_the_loud_one(fleet: Fleet) -> bool:
        return fleet.queued > 0 and not fleet.free_tokens and fleet.engines[0].over_share == ["loud"]

    async def one(client: aiohttp.ClientSession, tenant: str, prompt: int, output: int) -> int:
        body = {"model": "tiny", "prompt": [9] * prompt, "max_tokens": output, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {tenant}"}
        async with client.post(f"{stack.url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def keep_asking(client: aiohttp.ClientSession) -> None:
        while True:
            await one(client, "loud", PROMPT, 200)
            await asyncio.sleep(0.02)

    with Stack(redis_server.url, namespace, checkpoint("llama"), gateway_options=options, **engine) as stack:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
            asyncio.timeout(patience(100)),
        ):
            loud = [asyncio.create_task(keep_asking(client)) for _ in range(40)]
            await fleet_until(redis_server.url, namespace, full_of_the_loud_one)
            while await one(client, "quiet", 60, 200) != 200:  # the gateway reads the engine's report a little later
                pass
            answers = [await one(client, "quiet", 60, 200) for _ in range(4)]
            for task in loud:
                task.cancel()
            await asyncio.gather(*loud, return_exceptions=True)
        assert answers == [200] * 4
        assert 0 < stack.core.report.totals.yields <= stack.core.report.totals.preemptions


async def test_a_long_step_refuses_nobody_while_there_is_room(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    """A step may take seconds, such as a long prompt on a CPU.  The loop reports nothing then; the bus thread does."""
    engine: dict[str, Any] = {
        "executor": "scripted",
        "max_seqs": 8,
        "lease_ms": paced_ms(20_000),
    }  # a report every third of it would be too rare
    body = {"model": "tiny", "prompt": [9] * 20, "max_tokens": 1, "ignore_eos": True}

    async with aiohttp.ClientSession() as client, asyncio.timeout(patience(100)):

        async def status(path: str, body: dict[str, Any] | None = None) -> int:
            async with client.request("POST" if body else "GET", stack.url + path, json=body) as response:
                await response.read()
                return response.status

        with Stack(redis_server.url, namespace, checkpoint("llama"), **engine) as stack:
            with a_long_step(stack.engines[0].executor) as inside:
                first = asyncio.create_task(status("/v1/completions", body))
                await asyncio.to_thread(inside.wait)
                began_ms = (await fleet_until(redis_server.url, namespace, lambda fleet: True)).time_ms
                await fleet_until(redis_server.url, namespace, lambda fleet: fleet.time_ms - began_ms > 1.2 * STALE_MS)
                others = [asyncio.create_task(status("/v1/completions", body)) for _ in range(3)]
                done, _ = await asyncio.wait(others, timeout=paced(1.0))
                assert [other.result() for other in done] == []  # a refusal would have arrived by now
                assert [await status(path) for path in ("/ready", "/health")] == [200] * 2
                assert not first.done()
            assert [await each for each in (first, *others)] == [200] * 4
            assert stack.engines[0].engine._dropped == 0, "the engine lost its lease during the step"


async def test_the_kv_usage_that_gateways_read_is_at_most_a_second_old_and_that_of_a_silent_engine_does_not_count(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    """Idle engines report at least once per second; an engine without reports for STALE_MS counts as full."""
    engine: dict[str, Any] = {"executor": "scripted", "lease_ms": paced_ms(60_000)}
    resume = threading.Event()
    with Stack(redis_server.url, namespace, checkpoint("llama"), engines=2, **engine) as stack:
        bus = stack.engines[1].bus
        sync = bus._sync

        async def silent(*arguments: Any) -> None:
            await asyncio.to_thread(resume.wait)
            await sync(*arguments)

        reports = [set[int](), set[int]()]

        def reported_often(fleet: Fleet) -> bool:
            for i, times in enumerate(reports):
                last = fleet.exchanged_ms[f"engine{i}"]
                times.add(last)
                assert fleet.time_ms - last <= paced_ms(1_000), "a report that gateways use is older than 1 s"
            return min(map(len, reports)) >= 4

        try:
            both = (await fleet_until(redis_server.url, namespace, reported_often)).free_tokens
            with mock.patch.object(bus, "_sync", silent):
                half = await fleet_until(redis_server.url, namespace, lambda fleet: fleet.free_tokens <= both // 2)
            ages = [half.time_ms - half.exchanged_ms[f"engine{i}"] for i in range(2)]
            assert ages[0] <= paced_ms(1_000)
            assert ages[1] <= STALE_MS + paced_ms(1_000), "the capacity of a silent engine counted for longer"
        finally:
            resume.set()
