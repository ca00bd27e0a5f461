"""What vLLM has beyond OpenAI: roles, echo of chats, wording of errors, names of tokens; model cards for Anthropic."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import pytest

from quire.service.api import api, decoding, fitting
from quire.service.api.bodies import ChatBody
from quire.service.api.fitting import EngineLimits
from quire.service.api.history import for_template, plain_messages
from quire.service.api.skipped import Skipped
from quire.service.chat_templates.template_probe import probe
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_api import LIMITS, chat, completion, form, read, refused, scored_a, whole_answer
from tests.service.api.test_tools import model
from tests.service.api.test_tools import says as says_tools
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import raw, says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
CHAT = "/v1/chat/completions"

SPEAKS = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "An apple a day, keeps"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


# ------------------------------------------------------------------------------------------------------------- wording


def test_every_bad_key_of_logit_bias_is_named() -> None:
    refusal = refused(completion, logit_bias={"bad1": 50, "5": 1, "bad2": 20})
    assert "bad1" in refusal.message
    assert "bad2" in refusal.message
    assert "'5'" not in refusal.message
    many = refused(completion, logit_bias={f"bad{at}": 1 for at in range(20)})
    assert many.message.count("'bad") == api.BAD_KEYS
    assert f"and {20 - api.BAD_KEYS} more" in many.message
    assert len(refused(completion, logit_bias={"x" * 5000: 1}).message) < 200


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_a_token_id_beyond_the_vocabulary_is_told_its_size(field: str) -> None:
    limits = EngineLimits(max_model_len=100, vocab_size=731, block_size=16, total_blocks=50)
    given: Any = {"732": 1.0} if field == "logit_bias" else [732]
    refusal = refused(fitting.fit, completion(**{field: given}, logprobs=1), [[1]], limits)
    assert (refusal.status, refusal.param) == (400, field)
    assert "732" in refusal.message
    assert "731 tokens" in refusal.message


async def test_detokenize_tells_the_size_of_the_vocabulary(serve: Serve, byte_level_tokenizer: Tokenizer) -> None:
    served = await serve()
    size = len(byte_level_tokenizer.vocabulary.table)
    status, error, _ = await raw(served.session, "/detokenize", tokens=[size])
    assert (status, error["error"]["param"]) == (400, "tokens")
    assert f"{size} tokens" in error["error"]["message"]


async def test_errors_of_responses_have_openais_words(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    missing = "resp_" + "0" * 32
    async with model(engine, says_tools(tools_tokenizer, "No.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, error, _ = await raw(served.session, "/v1/responses", input="Hi", background=True, store=False)
        assert (status, error["error"]["message"]) == (400, "background can only be used when `store` is true")
        status, made, _ = await raw(served.session, "/v1/responses", input="Hi")
        assert status == 200
        status, error, _ = await raw(served.session, f"/v1/responses/{made['id']}/cancel")
        assert (status, error["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
        async with served.session.get(f"/v1/responses/{missing}") as response:
            error = await response.json()
            assert (response.status, error["error"]["message"]) == (404, f"Response with id '{missing}' not found.")
        status, error, _ = await raw(served.session, "/v1/responses", input="Hi", previous_response_id=missing)
        assert status == 404
        assert f"Response with id '{missing}' not found." in error["error"]["message"]


@pytest.mark.parametrize("parse", [completion, chat])
def test_an_empty_salt_is_refused_for_it_would_separate_nothing(parse: Callable[..., Any]) -> None:
    refusal = refused(parse, cache_salt="")
    assert (refusal.status, refusal.param) == (400, "cache_salt")
    assert parse(cache_salt=None).cache_salt == ""


async def test_a_token_that_does_not_exist_is_out_of_vocabulary(serve: Serve, engine: EngineMaker) -> None:
    served = await serve()
    async with engine(lambda generate, index: ([5], None)):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, error, _ = await raw(served.session, "/v1/completions", prompt=[999_999])
    assert "999999 is out of vocabulary" in error["error"]["message"]


async def test_ping_may_be_a_post(serve: Serve) -> None:
    served = await serve()
    for method in ("GET", "POST"):
        async with served.session.request(method, "/ping") as response:
            assert (response.status, await response.text()) == (200, "pong")


# ---------------------------------------------------------------------------------------------------------------- echo


async def test_echo_repeats_the_answer_that_is_continued(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    body = {"messages": SPEAKS, "max_tokens": 200, **CONTINUED}
    async with engine(says(byte_level_tokenizer, " the doctor away", eos=True)):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, plain, _ = await raw(served.session, CHAT, **body)
        _, echoed, headers = await raw(served.session, CHAT, **body, echo=True)
        async with served.session.post(
            CHAT, json={"model": "tiny", **body, "echo": True, "stream": True, "stream_options": {"include_ids": True}}
        ) as response:
            streamed = (await response.read()).decode()
    assert "x-unknown-fields" not in headers
    assert plain["choices"][0]["message"]["content"] == " the doctor away"
    assert echoed["choices"][0]["message"]["content"] == SPEAKS[1]["content"] + " the doctor away"
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == SPEAKS[1]["content"] + " the doctor away"
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]


@pytest.mark.parametrize(
    ("messages", "repeated"),
    [
        ([{"role": "user", "content": "Say it"}], ""),
        (SPEAKS, SPEAKS[1]["content"]),
        ([SPEAKS[0], {"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]}], "a\nb"),
        ([*SPEAKS, {"role": "user", "content": "On"}], ""),
    ],
)
def test_echo_never_repeats_what_is_not_the_assistants(messages: list[dict[str, Any]], repeated: str) -> None:
    assert chat(messages=messages, echo=True).repeated == [repeated]
    assert chat(messages=messages, echo=False).repeated == chat(messages=messages).repeated == []


def test_each_choice_of_a_stream_repeats_once() -> None:
    written = form(chat(messages=SPEAKS, echo=True, stream=True, n=2))
    pieces = [written.chunk(ChoiceDelta(at, "x", [1])) for at in (0, 1, 0, 1)]
    texts = ["", ""]
    for _, data in (event for piece in pieces for event in read(piece)):
        [choice] = data["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
    assert texts == [SPEAKS[1]["content"] + "xx"] * 2


# --------------------------------------------------------------------------------------------------------------- roles

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}U {{ m['content'] }}{% elif m['role'] == 'assistant' %}"
    "A {{ m['content'] }}{% endif %}{% endfor %}"
)
SILENT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"  # the role is not shown


def rendered(template: str, role: str, content: Any = "what is 1+1?") -> str:
    """What the model sees of a message of another role.  Raises Refusal."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    compiled = ImmutableSandboxedEnvironment().from_string(template)

    def render(messages: Any, tools: Any = None, **variables: Any) -> str:
        return compiled.render(messages=messages, tools=tools, **variables)

    sent = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": role, "content": content}]}).encode()
    messages = plain_messages(decoding.decode(sent, ChatBody).messages, GatewayConfig(), Skipped(GatewayConfig()))
    entries = for_template(messages, probe(render, template), template)
    return render([message for message, _ in entries])


def test_a_role_of_another_name_is_what_the_template_writes() -> None:
    text = rendered(CHATML, "my-custom-role")
    assert "<|im_start|>my-custom-role\nwhat is 1+1?" in text
    assert rendered(CHATML, "my-custom-role", [{"type": "text", "text": "what is 1+1?"}]) == text


@pytest.mark.parametrize("template", [NAMED, SILENT], ids=["named", "silent"])
def test_a_role_that_the_template_does_not_write_is_refused(template: str) -> None:
    with pytest.raises(Refusal) as caught:
        rendered(template, "my-custom-role")
    assert (caught.value.status, caught.value.param) == (400, "messages[1].role")


# -------------------------------------------------------------------------------------------------------------- others


@pytest.mark.parametrize(("on", "asked", "named"), [(True, None, True), (True, False, False), (False, True, True)])
def test_tokens_are_named_by_ids_where_the_gateway_says_so(on: bool, asked: bool | None, named: bool) -> None:
    config = GatewayConfig(return_tokens_as_token_ids=on)
    fields = {} if asked is None else {"return_tokens_as_token_ids": asked}
    body = {"model": "m", "messages": SPEAKS[:1], "logprobs": True, **fields}
    valid = api.parse_chat(json.dumps(body).encode(), config, "m", 600.0)
    entry = whole_answer(form(valid), [scored_a()])["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == ("token_id:1" if named else "a")
    assert fitting.fit(valid, [[1]], LIMITS)


async def test_a_model_card_is_one_of_anthropic_too(serve: Serve) -> None:
    served = await serve(served_name="tiny,other")
    async with served.session.get("/v1/models", headers={"anthropic-version": "2023-06-01"}) as response:
        page = await response.json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("tiny", "other", False)
    for card in page["data"]:
        assert (card["type"], card["display_name"], card["object"]) == ("model", card["id"], "model")
        assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
