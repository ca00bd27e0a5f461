"""What clients in use send and expect, over HTTP: scoring, empty prompts, many prompts, unusual numbers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from quire.engine.wire.messages import Sampling
from quire.service.api import api, fitting
from quire.service.api.fitting import EngineLimits
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.service.delivery.test_late import TARGET_S, full
from tests.service.delivery.test_resume import events
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import ANSWER, raw, says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
SCORE = {"prompt": "One request", "max_tokens": 0, "echo": True, "logprobs": 2}


async def test_a_prompt_is_scored_without_an_answer(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    ids = byte_level_tokenizer._encode("One request", special=True)
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, _ = await raw(served.session, "/v1/completions", **SCORE)
        assert status == 200
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("One request", "length")
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == len(ids)
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
        assert choice["logprobs"]["text_offset"][0] == 0
        assert answer["usage"]["completion_tokens"] == 0

        body = {"model": "tiny", "stream": True, "stream_options": {"include_ids": True}, **SCORE, "n": 2}
        whole = await events(served.session, "/v1/completions", body)
        assert [event["choices"][0]["text"] for _, event in whole[:-1]] == ["One request"] * 2
        assert whole[0][1]["choices"][0]["logprobs"] == choice["logprobs"]
        rest = await events(
            served.session,
            "/v1/completions",
            body,
            **{"Last-Event-ID": whole[0][0]},  # type: ignore[arg-type]
        )
        assert [data for _, data in rest] == [data for _, data in whole[1:]]


async def test_the_official_client_scores_a_prompt(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with (
        engine(says(byte_level_tokenizer, eos=True)),
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        await settled(lambda: bool(served.streams.fleet.engines))
        scored = await client.completions.create(model="tiny", prompt="Say it", max_tokens=0, echo=True, logprobs=1)
        assert scored.choices[0].text == "Say it"
        assert scored.choices[0].logprobs is not None
        assert scored.choices[0].logprobs.top_logprobs is not None
        rest = await client.completions.create(model="tiny", prompt="Say it", max_tokens=-1, seed=-1)
        assert (rest.choices[0].text, rest.choices[0].finish_reason) == (ANSWER, "stop")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="Say it", max_tokens=5000)
        assert refused.value.code == "context_length_exceeded"
        assert "this model's maximum context length is 512 tokens" in str(refused.value)
        # LangChain looks for the code in the text of the error, which this client makes of the message alone.
        assert "context_length_exceeded" in str(refused.value)


async def test_an_empty_prompt_is_the_begin_token_where_there_is_one(
    byte_level_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    limits = EngineLimits(max_model_len=100, vocab_size=700, block_size=16, total_blocks=50)
    body = json.dumps({"model": "m", "prompt": "", "echo": True, "logprobs": 0}).encode()
    valid = api.parse_completion(body, GatewayConfig(), "m", 600.0)
    encoded = await sentencepiece_tokenizer.encode(valid)
    assert encoded == [[1]]
    assert fitting.fit(valid, encoded, limits) == [16]
    [prompted] = sentencepiece_tokenizer.prompted(valid, encoded)
    assert (prompted.text, prompted.offsets) == ("", [0])
    with pytest.raises(Refusal) as refused:
        fitting.fit(valid, await byte_level_tokenizer.encode(valid), limits)
    assert refused.value.code == "empty_prompt"


async def test_500_prompts_wait_in_the_late_lane(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    """A full engine that starts 90 prompt tokens per second: 500 prompts of 5 tokens would need 28 s."""
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0)
    async with full(served, engine(says(byte_level_tokenizer))) as fake:
        prompts = [[7] * 5 for _ in range(500)]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "stream": True}
        async with served.session.post("/v1/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-queue-lane"] == "late"
            fake.free_tokens, fake.load_changes = 100_000, {}
            stream = await response.read()
        assert stream.endswith(b"data: [DONE]\n\n")
        assert len(fake.seen) == 500
        assert stream.count(b'"finish_reason":"length"') == 500


async def test_words_of_a_schema_that_assert_nothing_are_named_in_a_header(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    schema = {
        "type": "object",
        "x-order": 1,
        "properties": {"tel": {"type": "string", "format": "phone", "title": "T"}},
    }
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.load_changes = {"grammars": True}
        await settled(lambda: any(one.grammars for one in served.streams.fleet.engines))
        _, _, headers = await raw(served.session, "/v1/completions", prompt="a", max_tokens=1, typo=1, **asked)
        path = "response_format.json_schema.schema"
        assert headers["x-unknown-fields"] == f"typo, {path}.x-order, {path}.properties.tel.format"


async def test_unknown_fields_are_named_in_a_header_and_counted(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    odd = {"prompt": "a", "max_tokens": 1, "typo": 1, "n\r\nx: y": 2, "user": "anna", "length_penalty": 1.0}
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        for stream in (False, True):
            body = {"model": "tiny", "stream": stream, **odd}
            async with served.session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                assert response.headers["x-unknown-fields"] == "typo, ?"
        many = {f"f{at}": 1 for at in range(20)}
        _, _, headers = await raw(served.session, "/v1/completions", prompt="a", max_tokens=1, **many)
        assert headers["x-unknown-fields"].endswith("f15, and 4 more")
        _, _, headers = await raw(served.session, "/v1/completions", prompt="a", max_tokens=1)
        assert "x-unknown-fields" not in headers
        async with served.session.get("/metrics") as page:
            counted = 'quire_unknown_fields_total{endpoint="/v1/completions",gateway="g0"} 24.0'
            assert counted in await page.text()


async def test_the_models_defaults_reach_the_engine(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(defaults=Sampling(temperature=0.6, top_k=20))
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        await raw(served.session, "/v1/completions", prompt="a", max_tokens=1)
        await raw(served.session, "/v1/completions", prompt="a", max_tokens=1, temperature=1, top_k=0)
        assert [(one.sampling.temperature, one.sampling.top_k) for one in fake.seen] == [(0.6, 20), (1.0, 0)]


async def test_several_names_and_none(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve(served_name="a, b")
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        for names in ({"model": "a"}, {"model": "b"}, {}):
            body = {"prompt": "x", "max_tokens": 1, **names}
            async with served.session.post("/v1/completions", json=body) as response:
                assert (response.status, (await response.json())["model"]) == (200, "a"), names
        status, refusal, _ = await raw(served.session, "/tokenize", prompt="x")  # as "tiny"
        assert (status, refusal["error"]["code"]) == (404, "model_not_found")
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
            cards = [card async for card in client.models.list()]
            assert [card.id for card in cards] == ["a", "b"]
            card = (await client.models.retrieve("b")).model_dump()
        assert (card["root"], card["parent"], card["max_model_len"]) == ("tiny", None, 512)
        [permission] = card["permission"]
        assert (permission["object"], permission["allow_sampling"]) == ("model_permission", True)


async def test_a_prompt_is_cut_at_either_side(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    ids = list(range(100, 160))
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        cuts: list[dict[str, Any]] = [
            {"truncate_prompt_tokens": 10},
            {"truncate_prompt_tokens": 10, "truncation_side": "right"},
            {"truncate_prompt_tokens": -1, "prompt": ids * 10, "max_tokens": 12},
        ]
        for cut in cuts:
            status, _, _ = await raw(served.session, "/v1/completions", **{"prompt": ids, "max_tokens": 1, **cut})
            assert status == 200
        assert [one.token_ids for one in fake.seen] == [ids[-10:], ids[:10], (ids * 10)[-500:]]


async def test_special_tokens_are_added_unless_the_client_says_no(sentencepiece_tokenizer: Tokenizer) -> None:
    found = []
    for special in (True, False):
        body = json.dumps({"prompt": "One", "echo": True, "logprobs": 0, "add_special_tokens": special}).encode()
        valid = api.parse_completion(body, GatewayConfig(), "m", 600.0)
        [ids] = await sentencepiece_tokenizer.encode(valid)
        [prompted] = sentencepiece_tokenizer.prompted(valid, [ids])
        assert (prompted.text, len(prompted.offsets)) == ("One", len(ids))
        found.append(ids)
    assert found[0] == [1, *found[1]]


async def test_the_official_client_reads_prompt_logprobs(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with (
        engine(says(byte_level_tokenizer)),
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        await settled(lambda: bool(served.streams.fleet.engines))
        extra = {"prompt_logprobs": 2, "return_token_ids": True}
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Say it"}], max_tokens=2, n=2, extra_body=extra
        )
        found = answer.model_dump()
        assert len(found["prompt_logprobs"]) == len(found["prompt_token_ids"])
        assert str(found["prompt_token_ids"][1]) in found["prompt_logprobs"][1]
        completion = await client.completions.create(model="tiny", prompt="Say it", max_tokens=2, extra_body=extra)
        [choice] = completion.model_dump()["choices"]
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])


async def test_what_there_is_to_know_of_the_tokenizer(serve: Serve, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve(api_keys=["k"])
    async with served.session.get("/tokenizer_info") as response:
        assert response.status == 401
    key = {"Authorization": "Bearer k"}
    async with served.session.get("/tokenizer_info", headers=key) as response:
        info = await response.json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert info["vocab_size"] == len(byte_level_tokenizer.vocabulary.table)
    assert "message" in info["chat_template"] or "m['role']" in info["chat_template"]
    assert info["tokenizer_class"]
    body = {"prompt": "One request", "return_token_strs": True}
    async with served.session.post("/tokenize", json=body, headers=key) as response:
        found = await response.json()
    assert len(found["token_strs"]) == found["count"]
    assert "".join(found["token_strs"]).replace("\u0120", " ") == "One request"


async def test_128_continuations_of_one_prompt(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, _ = await raw(served.session, "/v1/completions", prompt="a", max_tokens=1, n=128)
        assert (status, len(answer["choices"])) == (200, 128)
        status, answer, _ = await raw(served.session, "/v1/completions", prompt="a", max_tokens=1, n=129)
        assert (status, answer["error"]["param"]) == (400, "n")
