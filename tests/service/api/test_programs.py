"""What agent programs send with their defaults: hints, tools of providers, histories of other servers, references."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession

from quire.service.api.anthropic import messages
from quire.service.api.api import NO_DEFAULTS, parse_chat
from quire.service.api.openai_responses import responses
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_responses import events, folded
from tests.service.api.test_tools import model, says
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PARSERS: dict[str, Any] = {CHAT: parse_chat, MESSAGES: messages.parse, RESPONSES: responses.parse}
HI = {"role": "user", "content": "Hi"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 9},
    MESSAGES: {"messages": [HI], "max_tokens": 9},
    RESPONSES: {"input": [HI], "max_output_tokens": 9},
}
OBJECT = {"type": "object", "properties": {"cmd": {"type": "string"}}}
SH = {"type": "function", "name": "sh", "parameters": OBJECT}
CHAT_SH = {"type": "function", "function": {"name": "sh", "parameters": OBJECT}}


def parsed(path: str, **fields: Any) -> ValidRequest:
    body = json.dumps({**BASE[path], **fields}).encode()
    valid: ValidRequest = PARSERS[path](body, GatewayConfig(), "tiny", 600.0, NO_DEFAULTS)
    return valid


def prompt_of(tokenizer: Tokenizer, valid: ValidRequest) -> str:
    return tokenizer.text_of(tokenizer._encode_chat(valid.messages, None, valid.options), skip_special=False)


async def post(session: ClientSession, path: str, **fields: Any) -> tuple[int, Any, str]:
    async with session.post(path, json={**BASE[path], **fields}) as response:
        return response.status, await response.json(), response.headers.get("x-unknown-fields", "")


# ---------------------------------------------------------------------------------- what changes nothing, or cannot run

EDIT = {"type": "clear_thinking_20251015", "keep": "all"}
SKIPPED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"reasoning_effort": "none"}, ""),  # the template has a switch for it
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"verbosity": "medium"}, ""),
    (CHAT, {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "chat_template_kwargs.thinking"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"tools": [CHAT_SH, {"type": "web_search"}], "tool_choice": "auto"}, "tools[1].web_search"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "text"}}}]}, ""),
    (
        CHAT,
        {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]},
        "tools[0].custom.format",
    ),
    (CHAT, {"tools": [{**CHAT_SH, "type": None}]}, ""),
    (CHAT, {"tools": [CHAT_SH], "function_call": "auto"}, ""),
    (RESPONSES, {"truncation": "auto"}, ""),
    (RESPONSES, {"max_tool_calls": 5}, ""),
    (RESPONSES, {"context_management": [{"type": "compaction", "compact_threshold": 100_000}]}, ""),
    (RESPONSES, {"tools": [{**SH, "type": None}]}, ""),
    (RESPONSES, {"input": [HI, {"type": "ghost_snapshot", "ghost_commit": {}}]}, "input[1].ghost_snapshot"),
    (RESPONSES, {"input": [HI, {"type": "context_compaction"}]}, "input[1].encrypted_content"),
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    (MESSAGES, {"output_config": {"effort": "none"}}, ""),
    (MESSAGES, {"context_management": {"edits": []}}, ""),
    (MESSAGES, {"context_management": {"edits": [EDIT]}}, "context_management"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].web_search_20250305"),
    (MESSAGES, {"tools": [{"name": "sh"}, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].bash_20250124"),
    (MESSAGES, {"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
    (MESSAGES, {"output_config": {"task_budget": {"type": "tokens", "total": 9000}}}, "output_config.task_budget"),
    (MESSAGES, {"speed": "standard"}, ""),
    (MESSAGES, {"speed": "fast"}, "speed"),
    (MESSAGES, {"system": "x-anthropic-billing-header: a=1;\nBe brief."}, "system.x-anthropic-billing-header"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"reasoning": {"effort": "none"}}, ""),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"tools": [SH, {"type": "mcp", "server_label": "m"}]}, "tools[1].mcp"),
    (
        RESPONSES,
        {"tools": [{"type": kind} for kind in ("local_shell", "tool_search")]},
        "tools[0].local_shell, tools[1].tool_search",
    ),
    (RESPONSES, {"input": [HI, {"type": "web_search_call", "id": "ws_1"}, HI]}, "input[1].web_search_call"),
    (
        RESPONSES,
        {"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}, HI]},
        "input[0].encrypted_content",
    ),
]


@pytest.mark.parametrize(("path", "fields", "named"), SKIPPED, ids=[f"{path} {named}" for path, _, named in SKIPPED])
async def test_what_has_no_effect_is_left_out_and_named(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, path: str, fields: dict[str, Any], named: str
) -> None:
    served, strict = await serve(tools_tokenizer), await serve(tools_tokenizer, strict_fields=True)
    async with model(engine, says(tools_tokenizer, "Yes.")):
        await settled(lambda: bool(served.streams.fleet.engines) and bool(strict.streams.fleet.engines))
        status, answer, header = await post(served.session, path, **fields)
        assert (status, header) == (200, named), answer
        status, answer, _ = await post(strict.session, path, **fields)
        assert status == (400 if named else 200), answer


def test_the_effort_none_switches_thinking_off(tools_tokenizer: Tokenizer) -> None:
    for path, fields in (
        (CHAT, {"reasoning_effort": "none"}),
        (MESSAGES, {"output_config": {"effort": "none"}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
    ):
        assert prompt_of(tools_tokenizer, parsed(path, **fields)).endswith("<think>\n\n</think>\n\n")
    forced = parsed(CHAT, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert prompt_of(tools_tokenizer, forced).endswith("assistant\n")


def test_a_billing_line_does_not_change_the_prompt(tools_tokenizer: Tokenizer) -> None:
    """The program's line differs by the request; the prefix of the cache must not."""
    rest = {"type": "text", "text": "Be brief."}
    prompts = {
        prompt_of(tools_tokenizer, parsed(MESSAGES, system=system))
        for system in (
            "Be brief.",
            [rest],
            [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.1; cch=a1b2;"}, rest],
            [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.2; cch=c3d4;"}, rest],
            "x-anthropic-billing-header: cc_version=2.1.2;\nBe brief.",
        )
    }
    assert len(prompts) == 1
    only = parsed(MESSAGES, system="x-anthropic-billing-header: cc_version=2.1.2;")
    assert [one["role"] for one in only.messages] == ["user"]
    later = "Be brief.\nx-anthropic-billing-header: is a header."
    assert parsed(MESSAGES, system=later).messages[0]["content"] == later


# ------------------------------------------------------------------------------------------------------ tools of others

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [{**SH, "name": "close"}, PATCH]}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS: list[tuple[str, dict[str, Any]]] = [
    (called("sh", cmd="ls"), {"type": "function_call", "name": "sh", "arguments": '{"cmd": "ls"}'}),
    (
        called("agents__close", cmd="a"),
        {"type": "function_call", "name": "close", "namespace": "agents", "arguments": '{"cmd": "a"}'},
    ),
    (
        called("apply_patch", input='*** a\n"ü"'),
        {"type": "custom_tool_call", "name": "apply_patch", "input": '*** a\n"ü"'},
    ),
    (called("apply_patch", patch="*** b"), {"type": "custom_tool_call", "name": "apply_patch", "input": "*** b"}),
    (
        called("agents__apply_patch", input=""),
        {"type": "custom_tool_call", "name": "apply_patch", "namespace": "agents", "input": ""},
    ),
]


@pytest.mark.parametrize(("text", "item"), CALLS)
async def test_calls_come_back_as_the_client_names_its_tools(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, text: str, item: dict[str, Any]
) -> None:
    served = await serve(tools_tokenizer)
    asked = {"tools": [SH, AGENTS, PATCH], "max_output_tokens": 400}
    async with model(engine, says(tools_tokenizer, text)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, response, header = await post(served.session, RESPONSES, **asked)
        assert (status, header) == (200, "tools[1].tools[1].format, tools[2].format")
        [found] = response["output"]
        assert found.items() >= item.items()
        async with served.session.post(RESPONSES, json={**BASE[RESPONSES], **asked, "stream": True}) as stream:
            told = await stream.read()
        kinds = [event["type"] for event in events(told)]
        if item["type"] == "custom_tool_call":
            assert kinds[-3:] == [
                "response.custom_tool_call_input.done",
                "response.output_item.done",
                "response.completed",
            ]
            deltas = [
                event["delta"] for event in events(told) if event["type"] == "response.custom_tool_call_input.delta"
            ]
            assert "".join(deltas) == item["input"]
        else:
            [again] = folded(events(told))["output"]
            assert again.items() >= item.items()
        # What the server returned is valid history, and the prompt holds the call as the model wrote it.
        output = {"type": f"{item['type']}_output", "call_id": found["call_id"], "output": "done"}
        status, answer, _ = await post(served.session, RESPONSES, **{**asked, "input": [HI, found, output]})
        assert status == 200, answer
        prompt = tools_tokenizer.text_of(fake.seen[-1].token_ids, skip_special=False)
        name = f"{item['namespace']}__{item['name']}" if "namespace" in item else item["name"]
        assert f'"name": "{name}"' in prompt.partition("Hi<|im_end|>")[2]


CHAT_PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}},
    },
}


@pytest.mark.parametrize("text", ['*** a\n"ü"', "", "{}", "\\"])
async def test_calls_of_custom_tools_of_a_chat_have_plain_text(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, text: str
) -> None:
    served = await serve(tools_tokenizer)
    asked = {"tools": [CHAT_SH, CHAT_PATCH], "max_tokens": 400}
    written = called("apply_patch", input=text) + called("sh", cmd="ls") + called("apply_patch", input="b")
    async with model(engine, says(tools_tokenizer, f"I patch.\n{written}")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, header = await post(served.session, CHAT, **asked)
        assert (status, header) == (200, "tools[1].custom.format"), answer
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        told = [{key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]]
        assert told == [
            {"type": "custom", "custom": {"name": "apply_patch", "input": text}},
            {"type": "function", "function": {"name": "sh", "arguments": '{"cmd": "ls"}'}},
            {"type": "custom", "custom": {"name": "apply_patch", "input": "b"}},
        ]
        async with served.session.post(CHAT, json={**BASE[CHAT], **asked, "stream": True}) as stream:
            frames = (await stream.text()).removesuffix("data: [DONE]\n\n").split("\n\n")
        deltas = [json.loads(frame.partition("data: ")[2])["choices"][0]["delta"] for frame in frames if frame]
        streamed = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        customs = [call for call in streamed if "custom" in call]
        assert [call["custom"] for call in customs] == [call["custom"] for call in told if "custom" in call]
        assert all(call["type"] == "custom" and call["id"] for call in customs)
        assert [call["index"] for call in customs] == [0, 2]
        history = [
            HI,
            message,
            *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]),
        ]
        status, answer, _ = await post(served.session, CHAT, **{**asked, "messages": history})
        assert status == 200, answer
        prompt = tools_tokenizer.text_of(fake.seen[-1].token_ids, skip_special=False)
        assert prompt.count('"name": "apply_patch"') == 1 + 2  # among the tools, and in the calls


def test_a_custom_tool_of_a_chat_is_demanded_by_its_name(tools_tokenizer: Tokenizer) -> None:
    choice: dict[str, Any] = {"type": "custom", "custom": {"name": "apply_patch"}}
    valid = parsed(CHAT, tools=[CHAT_SH, CHAT_PATCH], tool_choice=choice)
    assert (valid.options.demanded, valid.custom) == (["apply_patch"], frozenset({"apply_patch"}))
    assert valid.options.tools[1]["function"]["description"].endswith("start: /.+/")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
    assert parsed(CHAT, tools=[CHAT_SH, CHAT_PATCH], tool_choice=allowed).options.demanded == ["apply_patch"]
    for broken in ({"type": "custom"}, {"type": "custom", "custom": {"name": 1}}):
        with pytest.raises(Refusal, match=r"^tools\[0\]"):
            parsed(CHAT, tools=[broken])
        with pytest.raises(Refusal, match=r"^tool_choice"):
            parsed(CHAT, tools=[CHAT_PATCH], tool_choice=broken)


def test_a_custom_tool_shows_the_model_its_grammar(tools_tokenizer: Tokenizer) -> None:
    valid = parsed(RESPONSES, tools=[PATCH])
    [tool] = valid.options.tools
    assert tool["function"]["description"].endswith("start: /.+/")
    assert tool["function"]["parameters"]["required"] == ["input"]


def test_allowed_tools_leave_the_others_out() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sh"}]}
    valid = parsed(RESPONSES, tools=[PATCH, SH], tool_choice=choice)
    assert valid.options.demanded == ["sh"]
    inner = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sh"}}]}
    other = {"type": "function", "function": {"name": "other"}}
    valid = parsed(CHAT, tools=[other, CHAT_SH], tool_choice={"type": "allowed_tools", "allowed_tools": inner})
    assert [tool["function"]["name"] for tool in valid.options.tools] == ["sh"]


@pytest.mark.parametrize("kind", [["object", "null"], None, "OBJECT", ["null", "Object"]])
def test_types_of_parameters_are_taken_as_programs_write_them(kind: Any) -> None:
    schema = {"type": kind, "properties": {"a": {"type": "STRING" if kind == "OBJECT" else "string"}}}
    want = {"type": "object", "properties": {"a": {"type": "string"}}}
    for path, tool in (
        (CHAT, {"type": "function", "function": {"name": "f", "parameters": schema}}),
        (MESSAGES, {"name": "f", "input_schema": schema}),
        (RESPONSES, {"type": "function", "name": "f", "parameters": schema}),
    ):
        assert parsed(path, tools=[tool]).options.tools[0]["function"]["parameters"] == want


def test_anthropics_bounds_hold_for_messages() -> None:
    tools = [{"name": f"{'x' * 124}{at:04}", "input_schema": OBJECT} for at in range(300)]
    assert len(parsed(MESSAGES, tools=tools).options.tools) == 300


# ------------------------------------------------------------------------------------------------------------ histories

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
NOTE = "[image left out: this model reads text only]"


def test_an_image_in_a_tools_result_becomes_a_note(tools_tokenizer: Tokenizer) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_a", "name": "sh", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "toolu_a", "content": [{"type": "text", "text": "See:"}, PICTURE]}
    valid = parsed(MESSAGES, messages=[HI, use, {"role": "user", "content": [result]}])
    assert f"See:\n{NOTE}" in prompt_of(tools_tokenizer, valid)
    assert valid.unknown == ("messages[2].content[0].content[1].image",)
    call = {"type": "function_call", "call_id": "call_a", "name": "sh", "arguments": "{}"}
    for kind, output in (
        ("function_call_output", [{"type": "input_image", "image_url": "data:image/png;base64,aaaa"}]),
        ("computer_call_output", {"type": "computer_screenshot", "image_url": "x"}),
    ):
        item = {"type": kind, "call_id": "call_a", "output": output}
        valid = parsed(RESPONSES, input=[HI, call, item])
        assert NOTE in prompt_of(tools_tokenizer, valid)
        assert len(valid.unknown) == 1


ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    (
        [
            {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "*** a"},
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"},
        ],
        '"name": "apply_patch", "arguments": {"input": "*** a"}',
    ),
    (
        [
            {"type": "local_shell_call", "call_id": "call_1", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "call_1", "output": "ok"},
        ],
        '"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}',
    ),
    (
        [
            {"type": "shell_call", "call_id": "call_1", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "call_1", "output": [{"stdout": "ok", "stderr": ""}]},
        ],
        '"name": "shell"',
    ),
    (
        [
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "server_label": "docs",
                "name": "find",
                "arguments": '{"q": 1}',
                "output": "ok",
            }
        ],
        '"name": "docs__find", "arguments": {"q": 1}',
    ),
    (
        [
            {"type": "mcp_call", "id": "mcp_1", "name": "empty", "arguments": '{"q": 1}', "output": ""},
            {"role": "assistant", "content": "ok"},
        ],
        '"name": "empty", "arguments": {"q": 1}',
    ),
    (
        [
            {
                "type": "agent_message",
                "author": "/lead/reviewer",
                "recipient": "/root",
                "content": [{"type": "input_text", "text": "looks ok"}],
            }
        ],
        "user\nMessage from /lead/reviewer:\n\nlooks ok",
    ),
    (
        [
            {"type": "local_shell_call", "id": "lsh_1", "call_id": None, "action": {"command": ["ls"]}},
            {"type": "function_call_output", "call_id": "lsh_1", "output": "ok"},
        ],
        '"name": "local_shell", "arguments": {"command": ["ls"]}',
    ),
    ([{"type": "function_call_output", "name": "watch", "output": "ok"}], "ok"),
    (
        [
            {"type": "tool_search_call", "call_id": None, "execution": "client", "arguments": {"query": "mail"}},
            {
                "type": "tool_search_output",
                "call_id": None,
                "tools": [{"type": "namespace", "name": "mail", "tools": [{**SH, "name": "ok"}]}, {**SH, "name": "b"}],
            },
        ],
        '"name": "tool_search", "arguments": {"query": "mail"}',
    ),
    (
        [{"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": [{"logs": "ok"}]}],
        '"name": "code_interpreter"',
    ),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "ok, no"}]}], "ok, no"),
    (
        [
            {
                "role": "user",
                "content": [{"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,b2s="}],
            }
        ],
        "a.txt:\nok",
    ),
]


@pytest.mark.parametrize(("items", "shown"), ITEMS, ids=[items[0].get("type", "message") for items, _ in ITEMS])
def test_histories_of_other_servers_reach_the_model(
    tools_tokenizer: Tokenizer, items: list[dict[str, Any]], shown: str
) -> None:
    valid = parsed(RESPONSES, input=[HI, *items, HI])
    prompt = prompt_of(tools_tokenizer, valid)
    assert shown in prompt
    assert "ok" in prompt.partition(shown)[2] or "ok" in shown
    assert valid.unknown == ()


@pytest.mark.parametrize(
    ("earlier", "reasoning"),
    [
        ({"thinking": "hm"}, "hm"),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted"}]}, "hm"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "hm"}, {"summary": "so"}, "x"]}, "hm\n\nso"),
        ({"reasoning_content": "hm", "thinking": "no", "thinking_blocks": [{"thinking": "no"}]}, "hm"),
        ({"reasoning": "hm", "reasoning_details": [{"text": "no"}]}, "hm"),
        ({"thinking": True, "thinking_blocks": {}, "reasoning_details": [{"type": "reasoning.encrypted"}]}, None),
    ],
)
def test_earlier_reasoning_is_read_in_the_forms_of_other_programs(earlier: dict[str, Any], reasoning: Any) -> None:
    valid = parsed(CHAT, messages=[HI, {"role": "assistant", "content": "ok", **earlier}, HI])
    assert valid.messages[1].get("reasoning_content") == reasoning
    other = parsed(CHAT, messages=[HI, {"role": "user", "content": "ok", **earlier}, HI]).messages[1]
    assert "reasoning_content" in other if {"reasoning_content", "reasoning"} & earlier.keys() else True


@pytest.mark.parametrize("empty", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_last_answer_of_messages_is_not_continued(empty: Any) -> None:
    valid = parsed(MESSAGES, messages=[HI, {"role": "assistant", "content": empty}])
    assert [message["role"] for message in valid.messages] == ["user"]
    assert not valid.options.continue_final


NUMBER = "1.50e+02"
OBJECTS: list[dict[str, Any]] = [
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "timeout_ms": "NUMBER"}},
    {"type": "tool_search_call", "call_id": "c", "arguments": {"n": ["NUMBER", {"m": "NUMBER"}]}},
    {"type": "code_interpreter_call", "id": "c", "code": "x", "outputs": [{"logs": "NUMBER", "a\ud83d": "NUMBER"}]},
    {"type": "file_search_call", "id": "c", "queries": ["q"], "results": [{"score": "NUMBER", "text": "t"}]},
]


@pytest.mark.parametrize("item", OBJECTS, ids=[item["type"] for item in OBJECTS])
def test_numbers_of_items_are_as_they_were_written(tools_tokenizer: Tokenizer, item: dict[str, Any]) -> None:
    wanted = json.dumps(item).count('"NUMBER"')
    for number in (NUMBER, "-0", "0.10", "12345678901234567890123"):
        body = json.dumps({"input": [HI, item, HI]}).replace('"NUMBER"', number).encode()
        valid: ValidRequest = responses.parse(body, GatewayConfig(), "tiny", 600.0)
        assert prompt_of(tools_tokenizer, valid).count(number) == wanted


def test_documents_and_results_of_messages_reach_the_model(tools_tokenizer: Tokenizer) -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "red"}}
    found = {"type": "search_result", "title": "S", "source": "x", "content": [{"type": "text", "text": "blue"}]}
    nested = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "grey"}]}}
    answer = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "find", "server_name": "d", "input": {"q": 1}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m",
            "is_error": False,
            "content": [{"type": "text", "text": "green"}],
        },
        {"type": "text", "text": "Found."},
    ]
    turns = [
        {"role": "user", "content": [document, found, nested]},
        {"role": "assistant", "content": answer},
        HI,
    ]
    valid = parsed(MESSAGES, messages=turns)
    prompt = prompt_of(tools_tokenizer, valid)
    places = [prompt.index(text) for text in ("T\nred", "S\nx\nblue", "grey", '"name": "find"', "green", "Found.")]
    assert places == sorted(places)
    assert [name.rpartition(".")[2] for name in valid.unknown] == [
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
    ]


def test_an_edit_of_calls_is_accepted_while_it_clears_none() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "sh", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]}
    plain: dict[str, Any] = {"type": "clear_tool_uses_20250919"}
    for calls, edit, served in (
        (3, plain, True),
        (4, plain, 100_000),  # Anthropic's default
        (4, {**plain, "keep": {"type": "tool_uses", "value": 4}}, True),
        (4, {**plain, "trigger": {"type": "tool_uses", "value": 5}}, True),
        (5, {**plain, "trigger": {"type": "tool_uses", "value": 5}}, False),
        (4, {**plain, "trigger": {"type": "input_tokens", "value": 10**6}}, 10**6),
        (4, {**plain, "trigger": {"type": "input_tokens", "value": "many"}}, False),
    ):
        fields = {"messages": [HI, *[use, result] * calls], "context_management": {"edits": [edit]}}
        if served:
            valid = parsed(MESSAGES, **fields)
            assert valid.unknown == ("context_management",)
            assert [bound.tokens for bound in valid.bounds] == ([] if served is True else [served])
        else:
            with pytest.raises(Refusal, match="clear_tool_uses"):
                parsed(MESSAGES, **fields)


EDITS_BY_TOKENS: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"edits": [{"type": "compact_20260112"}]}, "context_management.edits[0].trigger"),
    (
        MESSAGES,
        {"edits": [EDIT, {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}]},
        "context_management.edits[1].trigger",
    ),
    (RESPONSES, {}, "context_management[0].compact_threshold"),
]


@pytest.mark.parametrize(("path", "management", "param"), EDITS_BY_TOKENS)
async def test_a_prompt_that_would_be_edited_is_refused(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, path: str, management: dict[str, Any], param: str
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer, "Yes.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        status, answer, _ = await post(served.session, path)
        usage = answer["usage"]
        tokens = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        for trigger, wanted in ((tokens + 1, 200), (tokens, 400)):
            given: Any = [{"type": "compaction", "compact_threshold": trigger}]
            if path == MESSAGES:
                last = {**management["edits"][-1], "trigger": {"type": "input_tokens", "value": trigger}}
                given = {"edits": [*management["edits"][:-1], last]}
            status, answer, _ = await post(served.session, path, context_management=given)
            assert status == wanted, answer
            if path == MESSAGES:
                body = {**BASE[path], "context_management": given}
                async with served.session.post(f"{MESSAGES}/count_tokens", json=body) as counted:
                    assert counted.status == wanted
        assert param in answer["error"]["message"]


def test_a_result_may_be_a_reference_to_a_tool(tools_tokenizer: Tokenizer) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "search", "input": {}}]}
    block = {"type": "tool_reference", "tool_name": "mcp__mail__send"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]}
    assert "mcp__mail__send" in prompt_of(tools_tokenizer, parsed(MESSAGES, messages=[HI, use, result]))


def test_the_older_name_of_an_output_format_is_honoured() -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    older, newer = parsed(MESSAGES, output_format=form), parsed(MESSAGES, output_config={"format": form})
    assert older.constraint is not None
    assert older.constraint == newer.constraint
    for fields in ({"output_format": {"type": "text"}}, {"output_format": form, "output_config": {"format": form}}):
        with pytest.raises(Refusal, match=r"^output_format"):
            parsed(MESSAGES, **fields)


def test_thinking_of_earlier_turns_is_cleared_where_asked() -> None:
    def turn(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": "A"}]}

    turns = [HI, turn("one"), HI, turn("two"), HI, turn("three"), HI]
    for keep, left in (("all", 3), ({"type": "thinking_turns", "value": 2}, 2), (None, 1)):
        edit = {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}
        valid = parsed(MESSAGES, messages=turns, context_management={"edits": [edit]})
        thoughts = [one["reasoning_content"] for one in valid.messages if "reasoning_content" in one]
        assert thoughts == ["one", "two", "three"][3 - left :]


# ----------------------------------------------------------------------------------------------------------- references


async def test_references_to_stored_items_are_resolved(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    """The second turn of a chat, and the turn after a call: the client refers to what the server stored."""
    served = await serve(tools_tokenizer)
    text = "<think>\nhm\n</think>\n\nI look.\n" + called("sh", cmd="ls")
    asked = {"tools": [SH], "max_output_tokens": 400}
    async with model(engine, says(tools_tokenizer, text)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        _, first, _ = await post(served.session, RESPONSES, **asked)
        kinds = [item["type"] for item in first["output"]]
        assert kinds == ["reasoning", "message", "function_call"]
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        references[1].pop("type")  # an item with nothing but an id is one, too
        output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "a.txt"}
        status, second, _ = await post(served.session, RESPONSES, **{**asked, "input": [HI, *references, output]})
        assert status == 200, second
        by_reference = fake.seen[-1].token_ids
        await post(served.session, RESPONSES, **{**asked, "input": [HI, *first["output"], output]})
        assert fake.seen[-1].token_ids == by_reference
        # What is stored are the items: a response that continues this one knows them.
        status, third, _ = await post(served.session, RESPONSES, **asked, previous_response_id=second["id"])
        assert status == 200, third
        for unknown in (f"msg_{'0' * 36}", "x", references[0]["id"][:-1] + "9"):
            body = {**asked, "input": [{"type": "item_reference", "id": unknown}, HI]}
            status, answer, _ = await post(served.session, RESPONSES, **body)
            assert (status, answer["error"]["param"]) == (404, "input")
            assert answer["error"]["message"].startswith(f"Item with id '{unknown}' not found.")


async def test_items_of_another_tenant_are_not_found(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer, api_keys=("a", "b"))
    async with model(engine, says(tools_tokenizer, "Yes.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        item = ""
        for key, want in (("a", 200), ("b", 404), ("a", 200)):
            given = [HI, {"type": "item_reference", "id": item}, HI] if item else [HI]
            headers = {"Authorization": f"Bearer {key}"}
            async with served.session.post(RESPONSES, json={"input": given}, headers=headers) as response:
                assert response.status == want
                item = item or (await response.json())["output"][0]["id"]


# ------------------------------------------------------------------------------------------------------------ reasoning


async def test_reasoning_is_a_summary_where_one_is_asked_for(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    asked = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "max_output_tokens": 99}
    async with model(engine, says(tools_tokenizer, "<think>\nhm, so\n</think>\n\nYes.")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        _, whole, _ = await post(served.session, RESPONSES, **asked)
        thought, _ = whole["output"]
        assert thought["summary"] == [{"type": "summary_text", "text": "hm, so"}]
        assert thought["content"] == []
        async with served.session.post(RESPONSES, json={**BASE[RESPONSES], **asked, "stream": True}) as stream:
            told = [event for event in events(await stream.read()) if "reasoning" in event["type"]]
        kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in told]
        assert kinds[0] == "part.added"
        assert kinds[-2:] == ["text.done", "part.done"]
        assert set(kinds[1:-2]) == {"text.delta"}
        assert "".join(event["delta"] for event in told[1:-2]) == "hm, so"
        # A client that stores nothing here sends the item back, with its summary or without.
        for kept in (thought, {**thought, "summary": []}):
            await post(served.session, RESPONSES, **{**asked, "input": [HI, kept, *whole["output"][1:], HI]})
            assert "hm, so" in tools_tokenizer.text_of(fake.seen[-1].token_ids, skip_special=False)


# ------------------------------------------------------------------------------------------------- further endpoints


async def test_a_conversation_is_compacted_and_continued(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer, "<think>\nhm\n</think>\n\nThe user likes kiwis.")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        given = [{"role": "user", "content": "I like kiwis."}, {"role": "assistant", "content": "Noted."}]
        body = {"input": given, "instructions": "Be brief.", "tools": [SH], "tool_choice": "required"}
        async with served.session.post(f"{RESPONSES}/compact", json=body) as response:
            assert response.status == 200, await response.text()
            compacted = await response.json()
        asked = tools_tokenizer.text_of(fake.seen[-1].token_ids, skip_special=False)
        assert asked.index("Noted.") < asked.index("Summarise the conversation")
        assert not fake.seen[-1].sampling.grammar
        assert compacted["object"] == "response.compaction"
        message, item = compacted["output"]
        assert message["content"] == [{"type": "input_text", "text": "I like kiwis."}]
        assert item["type"] == "compaction"
        assert "kiwi" not in item["encrypted_content"]
        assert compacted["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        status, answer, _ = await post(served.session, RESPONSES, input=[*compacted["output"], HI])
        assert status == 200, answer
        prompt = tools_tokenizer.text_of(fake.seen[-1].token_ids, skip_special=False)
        assert "The user likes kiwis." in prompt
        assert "Noted." not in prompt
        async with served.session.get(f"{RESPONSES}/{compacted['id']}") as response:
            assert response.status == 404  # it is not stored
        async with served.session.get(f"{RESPONSES}/{compacted['id']}?stream=true") as response:
            assert response.status == 404, await response.text()  # and has no events
            assert (await response.json())["error"]["code"] == "response_not_found"


async def test_input_tokens_are_those_of_the_prompt(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer, "Yes.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {"input": [HI], "tools": [SH], "instructions": "Be brief."}
        _, first, _ = await post(served.session, RESPONSES, **body)
        continued = {**body, "previous_response_id": first["id"]}
        for fields in (body, continued):
            _, answer, _ = await post(served.session, RESPONSES, **fields)
            async with served.session.post(f"{RESPONSES}/input_tokens", json=fields) as response:
                counted = await response.json()
            assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


async def test_probes_of_programs_need_no_key(serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer) -> None:
    served = await serve(tools_tokenizer, api_keys=("a",))
    async with model(engine, says(tools_tokenizer, "Yes.")):
        await settled(lambda: bool(served.streams.fleet.engines))
        for path in ("/health", "/v1/health", "/healthz"):
            async with served.session.get(path) as response:
                assert (response.status, (await response.json())["status"]) == (200, "ok")
        async with served.session.head("/") as response:
            assert response.status == 200
        headers = {"Authorization": "Bearer a"}
        for query, there in (("", False), ("?client_version=0.171.0", True)):
            async with served.session.get(f"/v1/models{query}", headers=headers) as response:
                assert ("models" in await response.json()) == there


async def test_max_tokens_of_messages_may_exceed_the_context(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    """Coding agents ask for 32,000 tokens of every model."""
    served = await serve(tools_tokenizer)
    async with engine(lambda generate, _: ([60] * generate.max_new_tokens, None)) as fake:
        fake.load_changes, fake.burst = {"max_model_len": 64, "vocab_size": 600}, 64
        await settled(lambda: any(load.max_model_len == 64 for load in served.streams.fleet.engines))
        status, answer, _ = await post(served.session, MESSAGES, max_tokens=32_000)
        assert (status, answer["stop_reason"]) == (200, "model_context_window_exceeded")
        room = 64 - len(fake.seen[-1].token_ids)
        assert fake.seen[-1].max_new_tokens == answer["usage"]["output_tokens"] == room
        status, answer, _ = await post(served.session, MESSAGES, max_tokens=room)
        assert (status, answer["stop_reason"]) == (200, "max_tokens")
        long = [{"role": "user", "content": "word " * 99}]
        status, answer, _ = await post(served.session, MESSAGES, max_tokens=32_000, messages=long)
        assert status == 400
        assert "maximum context length" in answer["error"]["message"]
        status, answer, _ = await post(served.session, CHAT, max_tokens=32_000)
        assert status == 400
