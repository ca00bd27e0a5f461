"""Faults affect only their own request: disconnects, slow readers, failed steps, NaN.  Block order changes nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.core.plan import StepPlan
from quire.engine.executor.worker import Launched, Worker
from tests.checkpoints import make_checkpoint
from tests.pace import patience
from tests.system.processes import sse_events, until
from tests.system.stack import Stack

pytestmark = pytest.mark.system
Make = Callable[..., Stack]


@pytest.fixture
def make(redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]) -> Make:
    return lambda path=None, **options: Stack(
        redis_server.url, namespace, path or checkpoint("llama"), gateway_options={"late_wait_s": 1000.0}, **options
    )


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(200))) as session:
        yield session


async def ask(client: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Return (status, body) of an answer that is not streamed."""
    body = {"model": "tiny", "return_token_ids": True, **body}
    async with client.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def tokens(client: aiohttp.ClientSession, url: str, **body: Any) -> list[int]:
    status, answer = await ask(client, url, **body)
    assert status == 200, answer
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def stream(client: aiohttp.ClientSession, url: str, **body: Any) -> AsyncIterator[dict[str, Any]]:
    body = {"model": "tiny", "return_token_ids": True, "stream": True, **body}
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for event in sse_events(response):
            yield event


def greedy(model: PreTrainedModel, ids: list[int], new: int) -> list[int]:
    out: list[int] = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()
    return out


@pytest.mark.parametrize("streamed", [True, False])
async def test_who_leaves_gives_every_block_back_within_two_steps(
    make: Make, client: aiohttp.ClientSession, streamed: bool
) -> None:
    """Counted from the moment the socket closes, at 60 ms per step, the speed of a large model."""
    with make(executor="scripted", scripted_step_ms=60.0) as stack:
        core, steps = stack.core, []
        for _ in range(8):
            body = {"model": "tiny", "prompt": [9] * 100, "max_tokens": 500, "n": 2, "stream": streamed}
            request = asyncio.create_task(client.post(f"{stack.url}/v1/completions", json=body))
            await until(lambda: core.running == 2)
            await asyncio.sleep(random.uniform(0, 0.12))
            if streamed:
                (await request).close()
            else:
                request.cancel()
            left = core.step
            await until(lambda: core.pool.available == core.pool.total and core.running == 0)
            steps.append(core.step - left)
        assert max(steps) <= 2, steps


async def test_a_slow_reader_costs_bounded_memory_and_delays_nobody(make: Make, client: aiohttp.ClientSession) -> None:
    with make(executor="scripted", scripted_step_ms=1.0, max_model_len=2000, kv_blocks=8192, max_seqs=64) as stack:

        async def pace() -> float:
            """Return the median gap between the tokens of one stream.

            A gateway that waits for a slow reader never ends it: those readers read only when it has ended."""
            times = [time.monotonic() async for _ in stream(client, stack.url, prompt=[1, 2], max_tokens=300, seed=1)]
            return statistics.median(after - before for before, after in itertools.pairwise(times))

        before = await pace()
        rss = psutil.Process().memory_info().rss
        body = json.dumps(
            {
                "model": "tiny",
                "prompt": [5] * 10,
                "max_tokens": 800,
                "n": 8,
                "stream": True,
                "return_token_ids": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_ids": True},
            }
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        readers = []
        for _ in range(4):
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", stack.gateways[0].port))
            readers.append(await asyncio.open_connection(sock=slow, limit=4096))
            readers[-1][1].write(head % len(body) + body)
        await until(lambda: bool(stack.core.running == 32))
        during = await pace()
        assert during < 5 * before + 0.005, (before, during)  # 33 rows per step instead of one, on the same two cores
        await until(lambda: bool(stack.core.running == 0), 200)
        grown = psutil.Process().memory_info().rss - rss
        for reader, _ in readers:
            answer = await reader.read()
            assert b"data: [DONE]" in answer
            every = b",".join([b"800"] * 8)  # in the last event id: tokens of each choice
            assert b":%s:done\n" % every in answer
        for _, writer in readers:
            writer.close()
            await writer.wait_closed()
        # 25,600 tokens waited: 13 MB as events of 500 bytes each; 2 MB were measured.
        assert grown < 5 * 2**20


def choking(monkeypatch: pytest.MonkeyPatch, fails: Callable[[StepPlan], bool]) -> list[int]:
    """Make each step fail for which `fails` is true; return the list of failed steps, which grows."""
    failed: list[int] = []
    launch = Worker.launch_model

    def choke(self: Worker, plan: StepPlan, *, all_collected: bool = True) -> Launched:
        if fails(plan):
            failed.append(plan.step)
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.31 GiB")
        return launch(self, plan, all_collected=all_collected)

    monkeypatch.setattr(Worker, "launch_model", choke)
    return failed


async def test_a_failed_step_costs_no_request_a_token(
    make: Make,
    client: aiohttp.ClientSession,
    reference: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, fuse = reference("llama"), {"step": 0}

    def once(plan: StepPlan) -> bool:
        blown = bool(fuse["step"] and plan.step >= fuse["step"])
        fuse["step"] = 0 if blown else fuse["step"]
        return blown

    failed = choking(monkeypatch, once)
    work = [[20 + i] * (5 + 9 * i) for i in range(8)]
    with make(max_seqs=4) as stack:
        first = stream(client, stack.url, prompt=work[0], max_tokens=900, temperature=0)
        said = [await anext(first)]
        later = [
            asyncio.create_task(tokens(client, stack.url, prompt=ids, max_tokens=200, temperature=0))
            for ids in work[1:]
        ]
        await until(lambda: bool(stack.core.running == 4))  # the other four stand in the queue
        fuse["step"] = stack.core.step + 2
        said += [event async for event in first]
        assert [token for event in said for token in event["choices"][0]["token_ids"]] == greedy(model, work[0], 900)
        for answer, ids in zip(await asyncio.gather(*later), work[1:], strict=True):
            assert answer == greedy(model, ids, 200)
        assert len(failed) == 1
        await until(lambda: bool(stack.core.idle))
        assert stack.core.pool.available == stack.core.pool.total


async def test_a_request_that_fails_its_steps_ends_alone(
    make: Make,
    client: aiohttp.ClientSession,
    reference: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """8 of 8 other streams complete; the exception is in the log and in no answer."""
    model, bad = reference("llama"), 630
    failed = choking(monkeypatch, lambda plan: any(set(piece.token_ids) == {bad} for piece in plan.slices))
    with make() as stack:
        streams = [
            asyncio.create_task(tokens(client, stack.url, prompt=[20 + i] * (5 + 9 * i), max_tokens=300, temperature=0))
            for i in range(8)
        ]
        await until(lambda: bool(stack.core.running == 8))
        status, answer = await ask(client, stack.url, prompt=[bad] * 30, max_tokens=20)
        assert (status, answer["error"]["code"]) == (500, "engine_error")
        assert "the engine failed on this request twice at the same position" in answer["error"]["message"]
        for i, said in enumerate(await asyncio.gather(*streams)):
            assert said == greedy(model, [20 + i] * (5 + 9 * i), 300)
        assert 2 <= len(failed) <= 8
        await until(lambda: bool(stack.core.idle))
        assert stack.core.pool.available == stack.core.pool.total
    assert "CUDA out of memory" not in str(answer)
    assert "CUDA out of memory" in caplog.text
    assert "Traceback" in caplog.text


BAD = 633  # its embedding is not a number


async def test_nan_fails_its_request_alone_and_is_not_cached(
    make: Make, client: aiohttp.ClientSession, reference: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    def poison(model: PreTrainedModel) -> None:
        model.get_input_embeddings().weight.data[BAD] = float("nan")

    model, good = reference("llama"), [11] * 40
    with make(make_checkpoint(tmp_path / "poisoned", "llama", edit=poison)) as stack:

        async def fine(ids: list[int]) -> dict[str, Any]:
            status, answer = await ask(client, stack.url, prompt=ids, max_tokens=12, temperature=0)
            assert status == 200
            assert answer["choices"][0]["token_ids"] == greedy(model, ids, 12)
            return answer

        async def broken(**body: Any) -> None:
            status, answer = await ask(client, stack.url, max_tokens=50, **body)
            assert (status, answer["error"]["code"]) == (500, "engine_error"), answer
            assert "not finite" in answer["error"]["message"]

        await asyncio.gather(
            *(fine([12 + i] * (3 + 7 * i)) for i in range(6)),
            broken(prompt=[*good, BAD, *good]),
            broken(prompt=[*good, BAD, *good], n=3),
            broken(prompt=good, logit_bias={str(BAD): 100}),  # sampled first, computed next
        )
        body = {"model": "tiny", "prompt": good, "max_tokens": 50, "logit_bias": {str(BAD): 100}}
        body |= {"stream": True, "return_token_ids": True}
        async with client.post(f"{stack.url}/v1/completions", json=body) as response:
            # An event after the first token, or, if that and the failure a step later came as one, instead of it.
            said = [json.loads(line.removeprefix(b"data: ")) async for line in response.content if b"{" in line]
            if response.status == 200:
                assert said[0]["choices"][0]["token_ids"] == [BAD]
            else:
                assert (response.status, len(said)) == (500, 1)
            assert said[-1]["error"]["code"] == "engine_error"

        await until(lambda: bool(stack.core.idle))
        answer = await fine([*good, 12, *good])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # what a failed row wrote is forgotten
        answer = await fine([*good, 12, *good])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
        await broken(prompt=[*good, BAD, *good])


async def test_answers_do_not_depend_on_where_blocks_lie(make: Make, client: aiohttp.ClientSession) -> None:
    """Through every layer: same tokens and logprobs after each random permutation of the free blocks."""
    asked = [
        {
            "prompt": [30 + i] * (10 + 13 * i),
            "max_tokens": 40,
            "temperature": i % 2,
            "seed": i,
            "logprobs": 5,
            "n": 1 + i % 3,
        }
        for i in range(6)
    ]
    with make(prefix_cache=False, block_size=8) as stack:

        async def all_of_it() -> list[Any]:
            answers = [await ask(client, stack.url, **body) for body in asked]
            await until(lambda: bool(stack.core.idle))
            assert {status for status, _ in answers} == {200}
            return [[(c["token_ids"], c["logprobs"]) for c in answer["choices"]] for _, answer in answers]

        expected = await all_of_it()
        for seed in range(3):
            random.Random(seed).shuffle(stack.core.pool._free)
            got = await all_of_it()
            for choices, wanted in zip(got, expected, strict=True):
                for (ids, logprobs), (wanted_ids, wanted_logprobs) in zip(choices, wanted, strict=True):
                    assert ids == wanted_ids
                    assert logprobs["token_logprobs"] == pytest.approx(wanted_logprobs["token_logprobs"], abs=1e-5)


async def test_a_choice_that_met_its_stop_string_is_not_computed_on(make: Make, client: aiohttp.ClientSession) -> None:
    body = {"prompt": [40, 41, 42], "n": 3, "seed": 5, "ignore_eos": True, "skip_special_tokens": False}
    with make() as stack:
        _, whole = await ask(client, stack.url, max_tokens=900, **body)
        texts = [choice["text"] for choice in whole["choices"]]
        stop = next(  # in none of the others: what the model says differs between versions of torch
            texts[0][at : at + 6]
            for at in range(20, 60)
            if not any(texts[0][at : at + 6] in text for text in texts[1:])
        )
        before = stack.core.report.totals.generated_tokens
        _, answer = await ask(client, stack.url, max_tokens=900, stop=stop, **body)
        lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
        assert answer["choices"][0]["stop_reason"] == stop
        assert lengths[0] < 60
        assert max(lengths) > 500, "the others ended early too: nothing was tested"
        assert stack.core.report.totals.generated_tokens - before < sum(lengths) + 300
