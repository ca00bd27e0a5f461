"""Answers have the keys of vLLM, null without a value, and the last chunk of text has the finish reason."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.regions import Reading
from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_api import chat, completion, form, read, whole_answer
from tests.service.api.test_tools import ASK, TOOL, events, merged, model, post, says
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]


def nulls(found: dict[str, Any]) -> set[str]:
    return {key for key, value in found.items() if value is None}


def test_a_chat_answer_has_the_keys_of_vllm() -> None:
    answer = whole_answer(form(chat()), [ChoiceDelta(0, "a", [1], finish="stop")])
    assert {"prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "service_tier"} <= nulls(answer)
    choice = answer["choices"][0]
    assert {"logprobs", "stop_reason", "token_ids"} <= nulls(choice)
    assert nulls(choice["message"]) == {"refusal", "annotations", "audio", "function_call", "reasoning"}
    answer = whole_answer(form(chat(return_token_ids=True)), [ChoiceDelta(0, "a", [1], finish="stop")])
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([1, 2], [1])


def test_a_completion_has_the_keys_of_vllm() -> None:
    answer = whole_answer(form(completion()), [ChoiceDelta(0, "a", [1], finish="stop")])
    assert {"kv_transfer_params", "service_tier"} <= nulls(answer)
    keys = {"logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"}
    assert nulls(answer["choices"][0]) == keys


@pytest.mark.parametrize("ids", [False, True])
def test_chunks_have_the_keys_of_vllm(ids: bool) -> None:
    """Token ids come with the prompt's first; no chunk has a null in the place of ids that were asked for."""
    written = form(chat(stream=True, return_token_ids=ids))
    chunks = [
        data for _, data in read(written.chunk(ChoiceDelta(0, "x", [1])) + written.chunk(ChoiceDelta(0, "y", [2])))
    ]
    assert [chunk.get("prompt_token_ids", "absent") for chunk in chunks] == [[1, 2] if ids else None] + ["absent"] * 2
    found = [chunk["choices"][0].get("token_ids", "absent") for chunk in chunks]
    assert found == (["absent", [1], [2]] if ids else [None] * 3)
    written = form(completion(stream=True, return_token_ids=ids))
    chunks = [
        data["choices"][0]
        for _, data in read(written.chunk(ChoiceDelta(0, "x", [1])) + written.chunk(ChoiceDelta(0, "y", [2])))
    ]
    assert all(chunk["stop_reason"] is None for chunk in chunks)
    assert [chunk["token_ids"] for chunk in chunks] == ([[1], [2]] if ids else [None] * 2)
    assert chunks[0]["prompt_token_ids"] == ([1, 2] if ids else None)


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"n": 2}], ids=["plain", "ids", "n"])
def test_the_last_chunk_of_text_has_the_finish_reason(fields: dict[str, Any]) -> None:
    written = form(chat(stream=True, **fields))
    written.chunk(ChoiceDelta(0, "x", [1]))
    [(event_id, last)] = read(written.chunk(ChoiceDelta(0, "y", [2], finish="length")))
    choice = last["choices"][0]
    assert (choice["delta"], choice["finish_reason"], choice["stop_reason"]) == ({"content": "y"}, "length", None)
    assert event_id.startswith("r:2")
    assert event_id.endswith(":0")


def test_an_end_without_text_is_an_empty_content() -> None:
    written = form(chat(stream=True))
    written.chunk(ChoiceDelta(0, "x", [1]))
    [(_, last)] = read(written.chunk(ChoiceDelta(0, "", [2], finish="stop")))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({"content": ""}, "stop")


async def test_reasoning_has_both_names(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    asked = {**ASK, "tools": [TOOL]}
    async with model(engine, says(tools_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, whole = await post(served.session, asked)
        streamed = await events(served.session, {**asked, "stream": True})
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "They ask about rain 🙂."
    deltas = [data["choices"][0]["delta"] for _, data in streamed if data and data["choices"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message["reasoning"]


@pytest.mark.parametrize("burst", [1, 7])
async def test_reasoning_that_is_not_wanted_is_left_out(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, burst: int
) -> None:
    """The rest of the answer, its tokens and the places to resume stay the same."""
    served = await serve(tools_tokenizer)
    options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
    hidden = {**ASK, "tools": [TOOL], "include_reasoning": False}
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.burst = burst
        shown = merged(await events(served.session, {**ASK, **options}))
        found = await events(served.session, {**hidden, **options})
        streamed = merged(found)
        async with served.session.post("/v1/chat/completions", json=hidden) as response:
            assert "x-unknown-fields" not in response.headers
            whole = await response.json()
        for at, (event_id, _) in enumerate(found[:-1]):
            rest = await events(served.session, {**hidden, **options}, event_id)
            assert merged(found[: at + 1] + rest) == streamed, event_id
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], "reasoning_content" in message) == (None, False)
    assert not any("reasoning" in json.dumps(data["choices"]) for _, data in found if data)
    assert shown[0].pop("thought")
    assert streamed[0].pop("thought") == ""
    for one in (shown, streamed):
        one[0]["calls"] = [call[1:] for call in one[0]["calls"]]  # their ids differ
    assert streamed[0] == shown[0]
    assert streamed["usage"]["completion_tokens"] == shown["usage"]["completion_tokens"]


def test_hidden_reasoning_makes_no_event() -> None:
    written = form(chat(stream=True, include_reasoning=False))
    written.chunk(ChoiceDelta(0, "x", [1]))
    assert written.chunk(ChoiceDelta(0, "", [2], reasoning="hm")) == b""


async def test_tokenize_has_the_keys_of_vllm(serve: Serve) -> None:
    served = await serve()
    async with served.session.post("/tokenize", json={"prompt": "One request"}) as response:
        found = await response.json()
    assert nulls(found) >= {"token_strs"}


def test_an_end_without_text_after_regions_is_an_empty_delta() -> None:
    """A client makes the message of a call from its deltas: it has no content then, not an empty one."""
    written = form(msgspec.structs.replace(chat(stream=True), reading=Reading(opening="", calls=True)))
    written.chunk(ChoiceDelta(0, "x", [1]))
    [(_, last)] = read(written.chunk(ChoiceDelta(0, "", [2], finish="tool_calls")))
    assert last["choices"][0]["delta"] == {}
