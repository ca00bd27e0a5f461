"""Several chats in one request, and `/invocations`, which takes the body of a chat or of a completion."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.engine.wire.messages import Finish, Generate
from quire.service.api import chat_batch
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_api import refused
from tests.service.api.test_tools import model
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import ANSWER, raw, says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
BATCH = "/v1/chat/completions/batch"
CHATS = [[{"role": "user", "content": f"Reply with the word {word}"}] for word in ("alpha", "beta", "gamma")]


def parsed(**fields: Any) -> Any:
    body = {"model": "m", "messages": CHATS, **fields}
    return chat_batch.parse(json.dumps(body).encode(), GatewayConfig(max_prompts=4), "m", 600.0)


def echoes(tokenizer: Tokenizer) -> Callable[..., Any]:
    """Every answer is the last word of its prompt's message."""

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        prompt = tokenizer.text_of(generate.token_ids)
        word = next(word for word in ("alpha", "beta", "gamma") if word in prompt)
        return [*tokenizer._encode(word, special=False), 1], Finish("stop", stop_token=1)

    return script


async def test_each_chat_has_its_choice(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve()
    async with engine(echoes(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, _ = await raw(served.session, BATCH, messages=CHATS, max_tokens=40)
        prompts = sorted(len(one.token_ids) for one in fake.seen)
    assert status == 200, answer
    assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [
        (0, "alpha"),
        (1, "beta"),
        (2, "gamma"),
    ]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == sum(prompts)
    assert answer["id"].startswith("chatcmpl-")


async def test_options_hold_for_each_chat(serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve()
    turns = [[*chat, {"role": "assistant", "content": f"{at}: "}] for at, chat in enumerate(CHATS)]
    body = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 40, "logprobs": True}
    async with engine(echoes(byte_level_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, _ = await raw(
            served.session, BATCH, messages=turns, echo=True, return_tokens_as_token_ids=True, **body
        )
    assert status == 200, answer
    assert [one["message"]["content"] for one in answer["choices"]] == ["0: alpha", "1: beta", "2: gamma"]
    for one in answer["choices"]:
        assert one["logprobs"]["content"]
        assert all(entry["token"].startswith("token_id:") for entry in one["logprobs"]["content"])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stream": True}, "stream", "unsupported"),
        ({"n": 2}, "n", "unsupported"),
        ({"use_beam_search": True, "n": 1}, "use_beam_search", "unsupported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported"),
        ({"messages": []}, "messages", "empty_prompt"),
        ({"messages": [CHATS[0], []]}, "messages[1]", "empty_prompt"),
        ({"messages": CHATS[0]}, "messages[0]", "invalid_type"),
        ({"messages": [CHATS[0], [{"role": "!", "content": "a"}]]}, "messages[1][0].role", "invalid_value"),
        ({"messages": CHATS * 2}, "messages", "too_many"),
        ({"temperature": -1}, "temperature", "out_of_range"),
    ],
)
def test_a_bad_batch_is_refused_by_field(fields: dict[str, Any], param: str, code: str) -> None:
    refusal = refused(parsed, **fields)
    assert (refusal.status, refusal.param) == (400, param)
    if code != "out_of_range":
        assert refusal.code == code


def test_values_that_change_nothing_are_taken() -> None:
    valid = parsed(stream=False, n=1, tools=[], use_beam_search=False, user="anna")
    assert [valid.messages, *valid.conversations] == CHATS
    assert valid.unknown == ()


async def test_chats_that_begin_otherwise_are_refused(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    """One of the chats is continued within its reasoning, so its answer would be read as that of none."""
    served = await serve(tools_tokenizer)
    thinks = [*CHATS[1], {"role": "assistant", "content": "<think>\nHm"}]
    answers = [*CHATS[0], {"role": "assistant", "content": "It is"}]
    async with model(engine, says(tools_tokenizer, "x", eos=True)):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, error, _ = await raw(
            served.session,
            BATCH,
            messages=[answers, thinks],
            continue_final_message=True,
            add_generation_prompt=False,
        )
    assert (status, error["error"]["param"], error["error"]["code"]) == (400, "messages[1]", "unsupported")


@pytest.mark.parametrize("path", ["/invocations", BATCH])
async def test_these_need_a_key(serve: Serve, path: str) -> None:
    served = await serve(api_keys=["k"])
    status, error, _ = await raw(served.session, path, prompt="a")
    assert (status, error["error"]["code"]) == (401, "invalid_api_key")


async def test_invocations_is_a_chat_or_a_completion(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    async with engine(says(byte_level_tokenizer, eos=True)):
        await settled(lambda: bool(served.streams.fleet.engines))
        for path, body in (
            ("/v1/chat/completions", {"messages": CHATS[0], "max_tokens": 300}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 300}),
        ):
            _, direct, _ = await raw(served.session, path, **body)
            status, invoked, _ = await raw(served.session, "/invocations", **body)
            assert status == 200
            assert invoked.keys() == direct.keys()
            assert invoked["choices"] == direct["choices"]
            assert invoked["id"].partition("-")[0] == direct["id"].partition("-")[0]
            assert ANSWER in json.dumps(invoked, ensure_ascii=False)
        status, error, _ = await raw(served.session, "/invocations", input="a")
        assert (status, error["error"]["param"]) == (400, "messages")
