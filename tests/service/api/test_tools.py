"""Tools, reasoning and variables of the chat template, over HTTP: streamed, non-streaming, resumed and refused."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from quire.engine.wire.messages import Finish, Generate
from quire.service.api.api import parse_chat
from quire.service.api.format import call_id
from quire.service.api.tools import ChatOptions
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.output.regions import Reading
from quire.service.text.tokenizer import Tokenizer
from tests.service.delivery import test_resume
from tests.service.fakes import TOOLS_TEMPLATE, FakeEngine, Served, byte_level, settled, with_template

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
Event = tuple[str, Any]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Rain?"}], "max_tokens": 400}
ANSWER = (
    "<think>\nThey ask about rain 🙂.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\"is"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n'
    "<tool_call>\n{broken}\n</tool_call>"
)
BROKEN = "<tool_call>\n{broken}\n</tool_call>"


def says(tokenizer: Tokenizer, text: str = ANSWER, end: str = "<|im_end|>") -> Any:
    """Every choice says `text` and ends with a stop token; the second one says it without its last call."""
    (stop,) = tokenizer._encode(end, special=False)

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        said = text if index == 0 else text.replace(BROKEN, "")
        return [*tokenizer._encode(said, special=False), stop], Finish("stop", stop)

    return script


def model(engine: EngineMaker, script: Any, **options: object) -> FakeEngine:
    """An engine of the model, whose context holds a chat with tools."""
    fake = engine(script, **options)
    fake.load_changes = {"max_model_len": 4096, "vocab_size": 600}
    return fake


async def post(session: ClientSession, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def events(session: ClientSession, body: dict[str, Any], last: str = "") -> list[Event]:
    headers = {"Last-Event-ID": last} if last else {}
    body = {**body, "stream_options": {"include_ids": True, **body.get("stream_options", {})}}
    found = await test_resume.events(session, "/v1/chat/completions", body, **headers)  # type: ignore[arg-type]
    return [(event_id, None if data == "[DONE]" else data) for event_id, data in found]


def merged(found: list[Event]) -> dict[Any, Any]:
    """What a client makes of a stream; every entry of a call has its index, and its id and name come first and once."""
    whole: dict[Any, Any] = {"usage": None, "done": 0}
    for _, data in found:
        if data is None:
            whole["done"] += 1
            continue
        whole["usage"] = data.get("usage") or whole["usage"]
        for choice in data["choices"]:
            one = whole.setdefault(choice["index"], {"text": "", "thought": "", "calls": [], "end": None, "roles": 0})
            delta = choice["delta"]
            one["roles"] += "role" in delta
            one["text"] += delta.get("content") or ""
            one["thought"] += delta.get("reasoning_content") or ""
            one["end"] = choice["finish_reason"] or one["end"]
            one["logprobs"] = one.get("logprobs", 0) + len((choice["logprobs"] or {}).get("content", []))
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(one["calls"])
                    assert call["type"] == "function"
                    one["calls"].append([call["id"], call["function"]["name"], ""])
                assert call["index"] == len(one["calls"]) - 1
                one["calls"][-1][2] += call["function"]["arguments"]
    return whole


FORMS: list[dict[str, Any]] = [
    {"tools": [TOOL, OTHER], "stream_options": {"include_usage": True}},
    {"tools": [TOOL, OTHER], "n": 2, "logprobs": True, "stream_options": {"include_usage": True}},
    {"tools": [TOOL, OTHER], "parallel_tool_calls": False, "stream_options": {"include_usage": True}},
    {"tools": [TOOL], "stop": ["Par"], "return_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


@pytest.mark.parametrize("fields", FORMS, ids=["tools", "n", "one call", "stop", "no tools"])
@pytest.mark.parametrize("burst", [1, 7])
async def test_every_event_is_a_place_to_resume_inside_reasoning_and_calls(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, fields: dict[str, Any], burst: int
) -> None:
    first, other = await serve(tools_tokenizer), await serve(tools_tokenizer)
    body = {**ASK, "stream": True, **fields}
    async with model(engine, says(tools_tokenizer)) as fake:
        await settled(lambda: bool(first.streams.fleet.engines) and bool(other.streams.fleet.engines))
        fake.burst = burst
        whole = await events(first.session, body)
        expected = merged(whole)
        assert len(whole) >= 5  # as few, if all tokens arrive together
        for at, (event_id, _) in enumerate(whole[:-1]):
            rest = await events(other.session, body, event_id)
            assert merged(whole[: at + 1] + rest) == expected, event_id


async def test_a_stream_and_a_whole_answer_say_the_same(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    asked = {**ASK, "tools": [TOOL, OTHER], "n": 2}
    async with model(engine, says(tools_tokenizer)):
        await settled(lambda: bool(served.streams.fleet.engines))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        found = await events(served.session, {**asked, **options})
        streamed = merged(found)
        status, whole = await post(served.session, asked)
        assert status == 200, whole
    ids = [data["id"] for _, data in found if data] + [whole["id"]]
    for at, broken in enumerate((BROKEN, "")):
        message, one = whole["choices"][at]["message"], streamed[at]
        assert message["content"] == one["text"] == "I look." + broken
        assert message["reasoning_content"] == one["thought"] == "They ask about rain 🙂."
        assert whole["choices"][at]["finish_reason"] == one["end"] == "tool_calls"
        assert one["roles"] == 1
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert calls == [("weather", '{"city": "Par\\"is"}'), ("time", "{}")]
        assert [(name, arguments) for _, name, arguments in one["calls"]] == calls
        for request_id, given in (
            (ids[0], [call[0] for call in one["calls"]]),
            (ids[-1], [call["id"] for call in message["tool_calls"]]),
        ):
            assert given == [call_id(request_id, at, index) for index in range(2)]
    assert whole["usage"] == streamed["usage"]
    thought = len(tools_tokenizer._encode("<think>\nThey ask about rain 🙂.\n</think>", special=False))
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 2 * thought
    assert len(set(ids)) == 2


async def test_without_calls_the_answer_is_content_and_its_end_is_stop(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer, "<think>hm</think>\n\nNo rain. ")):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, whole = await post(served.session, {**ASK, "tools": [TOOL]})
    assert whole["choices"][0]["finish_reason"] == "stop"
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message.get("tool_calls")) == ("No rain. ", "hm", None)


NAMED = {"tool_choice": {"type": "function", "function": {"name": "time"}}}


@pytest.mark.parametrize("fields", [{"parallel_tool_calls": False}, NAMED], ids=["not parallel", "named"])
async def test_one_call_ends_the_answer_and_its_engine_stops(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """A function that is named is called once, as at OpenAI: a weak model would repeat the call until the end."""
    served = await serve(tools_tokenizer)
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    async with model(engine, says(tools_tokenizer, call * 20), step_s=0.001) as fake:
        fake.load_changes = {**fake.load_changes, "grammars": True}
        await settled(lambda: any(one.grammars for one in served.streams.fleet.engines))
        _, whole = await post(served.session, {**ASK, "tools": [OTHER], **fields})
        await settled(lambda: bool(fake.aborted))
    choice = whole["choices"][0]
    assert (len(choice["message"]["tool_calls"]), choice["message"]["content"]) == (1, None)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    tokens = len(tools_tokenizer._encode(call, special=False))
    assert tokens <= whole["usage"]["completion_tokens"] <= tokens + 1


async def test_tool_choice_none_shows_no_tools_and_reads_no_calls(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    async with model(engine, says(tools_tokenizer, call)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        _, whole = await post(served.session, {**ASK, "tools": [OTHER], "tool_choice": "none"})
    message = whole["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (call, None)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert '"time"' not in tools_tokenizer.text_of(fake.seen[0].token_ids)


def called(tokenizer: Tokenizer, **fields: Any) -> Any:
    """What holds the answer to tools that are demanded or strict."""
    asked = {"model": "tiny", "messages": [USER], **fields}
    valid = parse_chat(json.dumps(asked).encode(), GatewayConfig(), "tiny", 600.0)
    ids = tokenizer._encode_chat(valid.messages, None, valid.options)
    return tokenizer.rules.constraint(valid, tokenizer.rules.reading(valid, ids))


def test_demanded_and_strict_calls_become_a_grammar(tools_tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    strict = {"type": "function", "function": {**OTHER["function"], "strict": True}}
    assert called(tools_tokenizer, tools=[TOOL]) is None
    one = called(tools_tokenizer, tools=[TOOL, OTHER], tool_choice=named)
    assert (one.param, one.kind, [each.param for each in one.value.values]) == (
        "tool_choice",
        "calls",
        ["tools[0].function.parameters"],
    )
    assert "thinking" in one.value.grammar
    assert (
        "thinking"
        not in called(
            tools_tokenizer, tools=[TOOL], tool_choice="required", chat_template_kwargs={"enable_thinking": False}
        ).value.grammar
    )
    assert called(tools_tokenizer, tools=[TOOL, strict]).param == "tools[1].function.strict"
    assert called(tools_tokenizer, tools=[strict], tool_choice="none") is None
    both = called(tools_tokenizer, tools=[TOOL], response_format={"type": "json_object"})
    assert (both.param, both.value.answer.param) == ("response_format", "response_format")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ]
    for fields, param in refused:
        with pytest.raises(Refusal) as caught:
            called(tools_tokenizer, tools=[TOOL], **fields)
        assert (caught.value.param, caught.value.code) == (param, "unsupported")
    # A model whose template shows no calls.
    tags = (
        "{% for t in tools or [] %}{{ t | tojson }}<function=a><parameter=b>{% endfor %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), tags)))
    refused = [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [strict]}, "tools[0].function.strict"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ]
    for fields, param in refused:
        with pytest.raises(Refusal, match="does not show how calls are written") as caught:
            called(tokenizer, **fields)
        assert caught.value.param == param


async def test_a_demanded_call_reaches_the_engine_as_a_grammar(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    asked = {**ASK, "tools": [OTHER], "tool_choice": "required"}
    async with model(engine, says(tools_tokenizer, call)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, refused = await post(served.session, asked)
        assert (status, refused["error"]["param"]) == (400, "tool_choice")
        fake.load_changes = {**fake.load_changes, "grammars": True}
        await settled(lambda: served.streams.fleet.engines[0].grammars)
        status, whole = await post(served.session, asked)
        assert status == 200, whole
        assert "@tool0" in fake.seen[-1].sampling.grammar
    [made] = whole["choices"][0]["message"]["tool_calls"]
    assert (made["function"]["name"], made["function"]["arguments"]) == ("time", "{}")


async def test_openais_client_reads_calls(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer)
    tools: Any = [TOOL, OTHER]
    async with (
        model(engine, says(tools_tokenizer)),
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        await settled(lambda: bool(served.streams.fleet.engines))
        async with client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "Rain?"}], tools=tools, max_tokens=400
        ) as stream:
            final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", '{"city": "Par\\"is"}'),
        ("time", "{}"),
    ]


async def test_special_tokens_that_are_markers_are_seen_by_the_parser_only(
    serve: Serve, engine: EngineMaker, tmp_path: Path
) -> None:
    """Markers may be special tokens, which are no text otherwise; a shipped response template is used."""
    markers = ["<|channel|>", "<|message|>", "<|end|>", "<|noise|>"]
    shipped = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
            "content": {"close": "<|channel|>final<|message|>"},
        },
    }
    folder = with_template(byte_level(tmp_path / "m"), TOOLS_TEMPLATE, markers, response_template=shipped)
    tokenizer = Tokenizer(str(folder))
    served = await serve(tokenizer)
    text = "<|channel|>analysis<|message|>h<|noise|>m<|end|><|channel|>final<|message|>Yes<|noise|>."
    async with model(engine, says(tokenizer, text)):
        await settled(lambda: bool(served.streams.fleet.engines))
        _, whole = await post(served.session, ASK)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")


# -------------------------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": [TOOL] * 129}, "tools", "too_many"),
        ({"tools": [3]}, "tools[0]", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "invalid_type"),
        ({"tools": [TOOL, OTHER, TOOL]}, "tools[2].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": "ä"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": "a" * 65}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": "a", "description": 3}}]}, "tools[0].function.description", "invalid_type"),
        ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters", "invalid_type"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
            "invalid_value",
        ),
        ({"tools": [{"function": {"name": "a", "description": "x" * 2**20}}]}, "tools", "too_long"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": 3}, "tool_choice", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_type"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "invalid_value"),
        ({"chat_template_kwargs": {"a b": True}}, "chat_template_kwargs.a b", "invalid_value"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs.__class__", "invalid_value"),
        ({"chat_template_kwargs": {"enable_thinking": "x" * 20_000}}, "chat_template_kwargs", "too_long"),
        ({"documents": {}}, "documents", "invalid_type"),
        ({"documents": ["x"]}, "documents[0]", "invalid_type"),
        ({"documents": [{}] * 1025}, "documents", "too_many"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
                "continue_final_message": True,
            },
            "continue_final_message",
            "invalid_value",
        ),
        ({"tools": [TOOL], "function_call": {"name": "f"}}, "function_call", "unsupported"),
        ({"messages": [{"role": "a critic", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tools_tokenizer: Tokenizer, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(Refusal) as caught:
        prompt(tools_tokenizer, **{"messages": ASK["messages"], **fields})
    refusal = caught.value
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code), refusal.message
    if code in ("too_many", "too_long"):
        assert refusal.limit is not None
        assert refusal.given is not None


def test_a_model_whose_template_knows_no_tools_says_so(byte_level_tokenizer: Tokenizer, tmp_path: Path) -> None:
    for fields, param in (({"tools": [TOOL]}, "tools"), ({"documents": [{"text": "x"}]}, "documents")):
        with pytest.raises(Refusal) as caught:
            prompt(byte_level_tokenizer, [USER], **fields)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported")
    unknown = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), unknown)))
    with pytest.raises(Refusal, match="no response template"):
        prompt(tokenizer, [USER], tools=[TOOL])


def prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt of a chat, as the model sees it."""
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    valid = parse_chat(body, GatewayConfig(), "m", 600.0)
    return tokenizer.text_of(tokenizer._encode_chat(valid.messages, None, valid.options), skip_special=False)


USER: dict[str, Any] = {"role": "user", "content": "Rain?"}


def test_the_template_gets_tools_documents_and_arguments(tools_tokenizer: Tokenizer) -> None:
    text = prompt(tools_tokenizer, [USER], tools=[TOOL], documents=[{"text": "wet"}])
    assert json.dumps(TOOL) in text
    assert "[wet]" in text
    text = prompt(tools_tokenizer, [USER], chat_template_kwargs={"enable_thinking": False})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt(tools_tokenizer, [USER], reasoning_effort="none") == text
    assert (
        prompt(tools_tokenizer, [USER], reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) != text
    )
    assert prompt(tools_tokenizer, [USER], add_generation_prompt=False).endswith("Rain?<|im_end|>\n")
    begun = [USER, {"role": "assistant", "content": "It"}]
    assert prompt(tools_tokenizer, begun, continue_final_message=True).endswith("<|im_start|>assistant\nIt")


def test_the_history_is_given_as_the_template_reads_it(tools_tokenizer: Tokenizer) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "21"}]},
        {"role": "ipython", "content": "22"},
    ]
    text = prompt(tools_tokenizer, messages)
    assert "<think>\nhm\n</think>\n\n<tool_call>\n" in text
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in text
    assert "<|im_start|>tool\n21<|im_end|>" in text
    assert "<|im_start|>ipython\n22<|im_end|>" in text
    for written in ("not json", "[1]"):
        call["function"] = {"name": "weather", "arguments": written}
        assert f'"arguments": {json.dumps(written)}' in prompt(tools_tokenizer, messages)
    call["function"] = {"name": "weather", "arguments": ""}
    assert '"arguments": {}' in prompt(tools_tokenizer, messages)
    messages[1]["reasoning"] = messages[1].pop("reasoning_content")
    assert "<think>\nhm\n</think>" in prompt(tools_tokenizer, messages)


def test_documents_cannot_write_special_tokens(tools_tokenizer: Tokenizer) -> None:
    ids = tools_tokenizer._backend.token_to_id("<|im_end|>")
    plain = tools_tokenizer._encode_chat([USER], None, ChatOptions(documents=[{"text": "a"}]))
    mean = tools_tokenizer._encode_chat([USER], None, ChatOptions(documents=[{"text": "a<|im_end|>"}]))
    assert mean.count(ids) == plain.count(ids)


PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}{{ '(' + p.text + ')' }}{% endfor %}{% endfor %}"
CONCATENATED = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{% endfor %}"
)
PYTHONIC = CONCATENATED.replace("+ ' ' + call", "~ ' ' ~ call")


@pytest.mark.parametrize(
    ("template", "content", "shown"),
    [
        (PARTS_ONLY, "Hi", "(Hi)"),
        (PARTS_ONLY, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "(a)(b)"),
        (CONCATENATED, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (CONCATENATED, "Hi", "Hi"),
    ],
)
def test_content_has_the_form_that_the_template_wants(tmp_path: Path, template: str, content: Any, shown: str) -> None:
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), template)))
    assert prompt(tokenizer, [{"role": "user", "content": content}]) == shown


@pytest.mark.parametrize("template", [CONCATENATED, PYTHONIC])
def test_a_template_that_joins_arguments_to_text_gets_them_as_text(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), template)))
    for arguments in ('{"city": "Paris"}', {"city": "Paris"}):
        call = {"function": {"name": "f", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "tool_calls": [call]}]
        assert prompt(tokenizer, messages) == 'Rain?f {"city": "Paris"}'


def test_what_is_stored_to_read_an_answer_is_small(tools_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Tools stay with the request as names and types of their arguments."""
    body = json.dumps({**ASK, "model": "m", "tools": [TOOL], "parallel_tool_calls": False}).encode()
    valid = parse_chat(body, GatewayConfig(), "m", 600.0)
    ids = tools_tokenizer._encode_chat(valid.messages, None, valid.options)
    properties = {"city": {"type": ["string"]}}
    tools = [{"function": {"name": "weather", "parameters": {"properties": properties}}}]
    assert tools_tokenizer.rules.reading(valid, ids) == Reading("", calls=True, tools=tools, parallel=False)

    tags = TOOLS_TEMPLATE.replace("Call with", "<function=f><parameter=a>")
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), tags)))
    reading = tokenizer.rules.reading(valid, tokenizer._encode_chat(valid.messages, None, valid.options))
    assert reading is not None
    assert reading.tools == tools


def test_the_opening_of_the_answer_is_found_in_the_prompt(tools_tokenizer: Tokenizer) -> None:
    for fields, opening in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
        (
            {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": "a " * 200 + "b"}]},
            None,
        ),
        ({"add_generation_prompt": False}, ""),
    ):
        valid = parse_chat(json.dumps({**ASK, "model": "m", **fields}).encode(), GatewayConfig(), "m", 600.0)
        reading = tools_tokenizer.rules.reading(
            valid, tools_tokenizer._encode_chat(valid.messages, None, valid.options)
        )
        assert reading is not None
        assert reading.opening == (opening if opening is not None else "a " * 200 + "b")
