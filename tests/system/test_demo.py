"""What random weights cannot show: real text from the demo model, against transformers and over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.executor.models.sources import demo
from quire.engine.llm import LLM
from quire.loadtest.server import engine_processes
from tests.pace import patience
from tests.ports import free_port
from tests.system.processes import Process, ending, until, wait_until_ready
from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # the first one may download the model

MAX_LEN = 1024
NEW = 16
STORY = "Once upon a time, in a small village by the sea, there lived an old clockmaker called Anna. "
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    STORY + "Every morning she",
    "1, 2, 3, 4, 5, 6, 7,",
]
CAPITAL = "What is the capital of France?"


@pytest.fixture(scope="module")
def model(demo_model: Path) -> PreTrainedModel:
    """transformers' own, in float32."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def words(demo_model: Path) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(demo_model)
    return loaded


@pytest.fixture(scope="module")
def client(redis_server: EmbeddedRedis, demo_model: Path) -> Iterator[openai.OpenAI]:
    options: dict[str, Any] = {"kv_blocks": 256, "max_model_len": MAX_LEN, "max_seqs": 16}
    gateway = {"served_name": ""}
    name = f"test-{uuid.uuid4().hex[:8]}"
    with (
        Stack(redis_server.url, name, demo_model, gateway_options=gateway, **options) as stack,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def generate(model: PreTrainedModel, ids: list[int], new: int) -> list[int]:
    """Return what transformers' greedy search adds to a prompt."""
    mask = torch.ones(1, len(ids), dtype=torch.long)
    out = model.generate(torch.tensor([ids]), attention_mask=mask, max_new_tokens=new, do_sample=False)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def complete(client: openai.OpenAI, prompt: Any, new: int = NEW, **options: Any) -> Any:
    asked = {"model": demo.NAME, "max_tokens": new, "temperature": 0, **options}
    return client.completions.create(prompt=prompt, extra_body={"return_token_ids": True}, **asked)


def chat(client: openai.OpenAI, messages: Any, new: int = NEW, **options: Any) -> Any:
    return client.chat.completions.create(
        model=demo.NAME, messages=messages, max_completion_tokens=new, temperature=0, **options
    )


def test_greedy_text_is_transformers_own(
    client: openai.OpenAI, model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    """All prompts in one batch, token for token."""
    ids = [words(prompt).input_ids for prompt in PROMPTS]
    answer = complete(client, ids)
    got = [choice.token_ids for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert got == [generate(model, one, NEW) for one in ids]
    assert [choice.text for choice in complete(client, PROMPTS[:1]).choices] == [words.decode(got[0])]
    assert "Paris" in words.decode(got[0])


def test_bfloat16_leaves_transformers_text_at_near_ties_only(
    demo_model: Path, model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    """Each token is transformers' most probable one in float32, or nearly as likely as it.

    How near: bfloat16 moves transformers' own logits by some amount.  A token may lead by an error of this size where
    it should trail by another one."""
    ids = [words(prompt).input_ids for prompt in PROMPTS]
    llm = LLM(str(demo_model), dtype="bfloat16", kv_blocks=256, max_model_len=MAX_LEN, max_seqs=16, threads=1)
    try:
        found = [completion.outputs[0].token_ids for completion in llm.generate(ids, max_new_tokens=NEW)]
    finally:
        llm.close()
    rounded = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.bfloat16).eval()
    ties = []
    for prompt, new in zip(ids, found, strict=True):
        with torch.inference_mode():
            exact, near = (
                each(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float() for each in (model, rounded)
            )
        error = (exact - near).abs().max().item()
        short = exact.max(-1).values - exact[range(len(new)), new]
        ties += [(tie, error) for tie in short[short > 0].tolist()]
        assert short.max().item() <= 2 * error
    count = sum(map(len, found))
    print(f"{len(ties)} of {count} tokens are near-ties; by how much of a logit, and the error of bfloat16:", ties)
    assert len(ties) <= count // 10


def test_log_probabilities_are_transformers_own(
    client: openai.OpenAI, model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    """Of the prompt and of the answer, the most probable alternatives included."""
    ids = words(PROMPTS[2]).input_ids
    answer = complete(client, PROMPTS[2], 6, logprobs=4, echo=True).choices[0]
    whole = ids + answer.token_ids
    with torch.inference_mode():
        expected = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
    assert answer.logprobs.token_logprobs[0] is None
    chosen = expected[range(len(whole) - 1), whole[1:]]
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(chosen.tolist(), abs=1e-3)
    for got, row in zip(answer.logprobs.top_logprobs[1:], expected, strict=True):
        assert sorted(got.values(), reverse=True)[:4] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)


def test_a_chat_uses_the_template_and_ends_by_itself(
    client: openai.OpenAI, model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    messages: Any = [{"role": "user", "content": CAPITAL}]
    ids = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = words.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(f"<|im_start|>user\n{CAPITAL}<|im_end|>\n<|im_start|>assistant\n")
    answer = chat(client, messages)
    expected = generate(model, ids, NEW)
    assert expected[-1] == words.convert_tokens_to_ids("<|im_end|>")
    assert answer.choices[0].message.content == words.decode(expected[:-1]) == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(expected))


def test_a_stop_string_ends_the_text_wherever_tokens_begin(client: openai.OpenAI) -> None:
    whole = complete(client, PROMPTS[0], 24).choices[0].text
    at = len(whole) // 2
    for stop in (whole[at : at + 5], whole[at - 1 : at + 1]):
        before = whole[: whole.index(stop)]
        answer = complete(client, PROMPTS[0], 24, stop=[stop, "\u2603"]).choices[0]
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (before, "stop", stop)
        chunks = list(complete(client, PROMPTS[0], 24, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == before


def test_a_cached_prefix_gives_the_same_text(client: openai.OpenAI) -> None:
    chapter = "The lighthouse keeper wrote down the weather of each day in a thick green book. " * 8
    first, second = (complete(client, chapter + "One day") for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    assert second.choices[0].text == first.choices[0].text
    fork = complete(client, chapter + "His daughter")
    assert fork.usage.prompt_tokens_details.cached_tokens > 100
    assert fork.choices[0].text != first.choices[0].text


def test_several_turns_are_transformers_own_and_computed_once(
    client: openai.OpenAI, model: PreTrainedModel, words: PreTrainedTokenizerFast
) -> None:
    messages: Any = [{"role": "system", "content": "You answer in one short sentence."}]
    cached = []
    for question in (CAPITAL, "And of Italy?", "Which of the two is larger?"):
        messages.append({"role": "user", "content": question})
        ids = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = chat(client, messages, 24)
        text = answer.choices[0].message.content
        assert text == words.decode(generate(model, ids, 24), skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        cached.append((answer.usage.prompt_tokens_details.cached_tokens, len(ids)))
    assert "Paris" in messages[2]["content"]
    for (_, before), (now, _) in itertools.pairwise(cached):
        assert now >= before - 16  # all complete blocks of the turn before


def body(**options: Any) -> dict[str, Any]:
    return {"model": demo.NAME, "prompt": PROMPTS[3], "max_tokens": 80, "ignore_eos": True, "stream": True, **options}


class Reader:
    """Reads one stream and keeps its text."""

    def __init__(self) -> None:
        self.id, self.text, self.events = "", "", 0

    async def read(self, client: aiohttp.ClientSession, url: str, asked: dict[str, Any] | None = None) -> str:
        """POST `asked`, or GET without it.  Returns the complete text."""
        async with client.request("POST" if asked else "GET", url, json=asked) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    self.id = event["id"]
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    self.events += 1
        return self.text


@pytest.mark.nightly  # each change does the same with a tiny model: test_survival.py
@pytest.mark.usefixtures("warm_processes")
async def test_a_killed_engine_goes_on_with_the_same_bytes(demo_model: Path, tmp_path: Path) -> None:
    """Greedy and sampled, in bfloat16; then the complete answers are read again at the gateway."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    options = [f"--port={port}", "--deterministic", "--kv-blocks=256", f"--max-model-len={MAX_LEN}", "--max-seqs=8"]
    process = Process(tmp_path / "log", "serve", str(demo_model), *options)
    with ending([process]):
        wait_until_ready(f"http://127.0.0.1:{port}", 100)
        asked = [body(temperature=0), body(temperature=0.8, seed=4, top_p=0.9)]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(100))) as client:
            undisturbed = await asyncio.gather(*(Reader().read(client, f"{url}/completions", one) for one in asked))
            assert len(set(undisturbed)) == 2
            readers = [Reader() for _ in asked]
            reading = [
                asyncio.create_task(reader.read(client, f"{url}/completions", one))
                for reader, one in zip(readers, asked, strict=True)
            ]
            await until(lambda: all(reader.events >= 20 for reader in readers), 60, reading=reading)
            assert not any(task.done() for task in reading)
            engine_processes(psutil.Process(process.popen.pid))[0].kill()
            assert await asyncio.gather(*reading) == undisturbed
            again = [await Reader().read(client, f"{url}/streams/{reader.id}") for reader in readers]
            assert again == undisturbed
        assert "was killed by SIGKILL" in process.said()
