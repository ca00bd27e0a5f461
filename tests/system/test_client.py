"""The official client against `quire serve`: what OpenAI's users call, and what they may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest.server import engine_processes
from tests.checkpoints import VOCAB, tokenizer
from tests.pace import patience
from tests.system.processes import Process, ending
from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]


class Server:
    def __init__(self, process: Process, base_url: str) -> None:
        self.process, self.base_url = process, base_url

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": self.base_url, "api_key": "none", "max_retries": 0, **options})

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = [str(checkpoint("llama")), "--port=0", "--served-name=tiny", "--dtype=float32", "--kv-blocks=256"]
    with ending([Process(tmp_path_factory.mktemp("serve") / "log", "serve", *words, "--threads=1")]) as [process]:
        yield Server(process, process.wait_for("serving tiny at ").split()[-1])


def greedy(model: PreTrainedModel, ids: list[int], new: int) -> list[int]:
    """What transformers says, float32."""
    out: list[int] = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()
    return out


def text(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=True))


def test_completions_are_transformers_own(server: Server, reference: Callable[[str], PreTrainedModel]) -> None:
    """A text, token ids, and lists of either; complete and streamed, with usage."""
    model = reference("llama")
    texts = ["def main():", "class Engine:\n    ", "import asyncio"]
    ids = [tokenizer().encode(prompt) for prompt in texts]
    expected = [text(greedy(model, one, 20)) for one in ids]
    with server.client() as client:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "temperature": 0}
        for prompts in (texts, ids):
            answer = client.completions.create(prompt=prompts, **asked)
            assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert client.completions.create(prompt=ids[1], **asked).choices[0].text == expected[1]
        streamed, usages = ["", "", ""], []
        for chunk in client.completions.create(
            prompt=texts, stream=True, stream_options={"include_usage": True}, **asked
        ):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
            usages.append(chunk.usage)
        assert streamed == expected
        assert usages[:-1] == [None] * (len(usages) - 1)
        assert usages[-1].completion_tokens == answer.usage.completion_tokens
        assert usages[-1].prompt_tokens == answer.usage.prompt_tokens


def test_chat_is_transformers_own(server: Server, reference: Callable[[str], PreTrainedModel]) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    prompt = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = greedy(reference("llama"), prompt, 24)
    with server.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0)
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == text(expected)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(expected))
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=messages, max_completion_tokens=24, temperature=0, stream=True
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(expected)
        assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_logprobs_are_transformers_own(server: Server, reference: Callable[[str], PreTrainedModel]) -> None:
    prompt = tokenizer().encode("def add(a, b):")
    new = greedy(reference("llama"), prompt, 6)
    with torch.inference_mode():
        logits = reference("llama")(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    logp = logits.log_softmax(-1)
    likeliest = logp.topk(3, dim=-1)
    names = [tokenizer().convert_ids_to_tokens(token) for token in new]
    with server.client() as client:
        got = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=3)
        logprobs = got.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.token_logprobs == pytest.approx(logp[range(len(new)), new].tolist(), abs=1e-4)
        for at, top in enumerate(logprobs.top_logprobs):
            assert sorted(top.values(), reverse=True) == pytest.approx(likeliest.values[at].tolist(), abs=1e-4)
        assert len(logprobs.tokens or []) == len(names)
        chat = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=5,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            extra_body={"skip_special_tokens": False},
        )
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content or []
        assert len(content) == 5
        said = b"".join(bytes(entry.bytes or []) for entry in content).decode("utf-8", "replace")
        assert said == chat.choices[0].message.content
        assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)  # greedy: the most probable


def test_stop_strings_end_the_text_before_them(server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "import os\n", "max_tokens": 40, "temperature": 0}
    with server.client() as client:
        whole = client.completions.create(**asked).choices[0].text
        stop = whole[17:20]
        before = whole.partition(stop)[0]
        answer = client.completions.create(stop=[stop, "\u2603"], **asked).choices[0]
        assert (answer.text, answer.finish_reason) == (before, "stop")
        chunks = list(client.completions.create(stop=stop, stream=True, **asked))
        assert "".join(chunk.choices[0].text for chunk in chunks) == before
        assert chunks[-1].choices[0].finish_reason == "stop"


def sampled(client: openai.OpenAI, seed: int, n: int = 1) -> list[str]:
    answer = client.completions.create(
        model="tiny", prompt="The answer is", max_tokens=24, temperature=1.0, top_p=0.95, seed=seed, n=n
    )
    return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]


async def test_a_seed_gives_the_same_text_whatever_else_runs(server: Server) -> None:
    """Alone, in a batch, streamed, and after the engine died and restarted."""
    with server.client() as client:
        seeds = range(4)
        alone = [await asyncio.to_thread(sampled, client, seed) for seed in seeds]
        assert len({words for [words] in alone}) == 4
        three = await asyncio.to_thread(sampled, client, 1, 3)
        assert len(set(three)) == 3
        # A client that asks for one choice more gets the ones it had, and another.
        assert three[:1] == alone[1]
        assert (await asyncio.to_thread(sampled, client, 1, 4))[:3] == three

        mates = [asyncio.to_thread(sampled, client, 100 + i, 1 + i % 3) for i in range(12)]
        *_, among = await asyncio.gather(
            *mates, asyncio.gather(*(asyncio.to_thread(sampled, client, s) for s in seeds))
        )
        assert among == alone
        async with server.async_client() as streaming:
            stream = await streaming.completions.create(
                model="tiny", prompt="The answer is", max_tokens=24, top_p=0.95, seed=1, n=3, stream=True
            )
            texts = ["", "", ""]
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == three

        engine_processes(psutil.Process(server.process.popen.pid))[0].kill()
        with server.client(max_retries=100) as patient:
            assert [await asyncio.to_thread(sampled, patient, seed) for seed in seeds] == alone


async def test_errors_are_the_classes_users_catch(server: Server) -> None:
    async with server.async_client() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-4", prompt="a")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        refused: list[tuple[dict[str, Any], str, Any]] = [
            ({"prompt": [1] * 1100}, "context_length_exceeded", 1024),
            ({"prompt": "a", "temperature": -1}, "invalid_value", None),
            ({"prompt": "a", "max_tokens": 0}, "invalid_value", None),
            ({"prompt": [5, VOCAB]}, "invalid_token_id", VOCAB - 1),
            ({"prompt": []}, "empty_prompt", None),
            ({"prompt": "a", "n": 999}, "invalid_value", None),
            ({"prompt": "a", "stop": ["x"] * 1000}, "too_many", 64),
        ]
        for body, code, limit in refused:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(**{"model": "tiny", **body})
            assert caught.value.code == code
            assert isinstance(caught.value.body, dict)
            if limit is not None:
                assert caught.value.body["limit"] == limit
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=[{"role": "a king", "content": "x"}])  # type: ignore[list-item, misc]
        assert caught.value.param == "messages[0].role"


async def test_a_crowd_at_once_is_answered_by_the_client_in_its_default_settings(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """600 requests that need fifty times the pool: none is refused, every second one is a stream."""
    words = [str(checkpoint("llama")), "--port=0", "--served-name=tiny", "--kv-blocks=64", "--executor=scripted"]
    words += ["--scripted-step-ms=20", "--no-spare"]
    async with contextlib.AsyncExitStack() as stack:
        [process] = stack.enter_context(ending([Process(tmp_path / "log", "serve", *words)]))
        base_url = process.wait_for("serving tiny at ").split()[-1]
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=base_url, api_key="none"))
        # By default a connection that takes five seconds is tried again: on a busy machine 600 at once may take longer.
        client = client.with_options(timeout=openai.Timeout(600, connect=patience(5)))

        async def ask(number: int) -> tuple[str, int]:
            """Return the lane, and the number of output tokens."""
            asked: dict[str, Any] = {"model": "tiny", "prompt": [9 + number % 7] * 60, "max_tokens": 16}
            asked["extra_body"] = {"ignore_eos": True}
            if number % 2:
                whole = await client.completions.with_raw_response.create(**asked)
                assert whole.retries_taken == 0
                usage = whole.parse().usage
                assert usage is not None
                return whole.headers["x-queue-lane"], usage.completion_tokens
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            stream = await client.completions.with_raw_response.create(**asked)
            assert stream.retries_taken == 0
            chunks = [chunk async for chunk in stream.parse()]
            assert chunks[-1].usage is not None
            return stream.headers["x-queue-lane"], chunks[-1].usage.completion_tokens

        answers = await asyncio.gather(*map(ask, range(600)))
    assert [tokens for _, tokens in answers] == [16] * 600
    assert {lane for lane, _ in answers} == {"on_time", "late"}


async def test_without_a_late_lane_overload_is_a_rate_limit_and_a_patient_client_gets_through(
    redis_server: EmbeddedRedis, namespace: str, checkpoint: Callable[[str], Path]
) -> None:
    """What cannot start in time: 429 with Retry-After, which the client's own retries obey."""
    with Stack(
        redis_server.url,
        namespace,
        checkpoint("llama"),
        kv_blocks=48,
        max_seqs=4,
        executor="scripted",
        scripted_step_ms=5.0,  # so that an answer takes its time, however fast the machine
        gateway_options={"ttft_target_s": 0.0625, "late_wait_s": 0.0},
    ) as stack:
        asked: dict[str, Any] = {
            "model": "tiny",
            "prompt": [9] * 300,
            "max_tokens": 60,
            "extra_body": {"ignore_eos": True},
        }
        base_url = f"{stack.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as hasty:
            answers = await asyncio.gather(
                *(hasty.completions.create(**asked) for _ in range(8)), return_exceptions=True
            )
            refused = [answer for answer in answers if isinstance(answer, BaseException)]
            assert 0 < len(refused) < 8
            for error in refused:
                assert isinstance(error, openai.RateLimitError)
                assert error.code == "rate_limit_exceeded"
                assert 1 <= int(error.response.headers["retry-after"]) <= 60
            began = time.monotonic()
            busy = [asyncio.create_task(hasty.completions.create(**asked)) for _ in range(8)]
            await asyncio.sleep(0.05)
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=20) as patient:
                waited = await asyncio.gather(
                    # Not those of requests that were refused with Retry-After.
                    *(patient.completions.with_raw_response.create(**asked | {"prompt": [i] * 300}) for i in (6, 7, 8))
                )
            assert all(answer.parse().usage.completion_tokens == 60 for answer in waited)
            retried = [answer for answer in waited if answer.retries_taken > 0]
            assert retried, "nobody had to wait, so nothing was tested"
            assert time.monotonic() - began >= 1.0  # the shortest pause there is
            await asyncio.gather(*busy, return_exceptions=True)
