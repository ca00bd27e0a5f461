"""Histories on many chat templates: answers of Quire keep all text when sent back, and no part is dropped silently."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.service.api import api
from quire.service.api.anthropic import messages
from quire.service.api.openai_responses import responses
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.text.tokenizer import Tokenizer
from tests.matrix import each_value
from tests.service.fakes import TOOLS_TEMPLATE, byte_level, with_template
from tests.system.chaos.histories import histories
from tests.system.chaos.returned import returned

CONFIG = GatewayConfig()
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
ARGUMENTS = [
    '{"city": "wordparis", "n": [1, {"m": null}]}',
    "{}",
    "",
    '{"city": "wordpar',
    '["wordlist", 5]',
    '"wordstring"',
    "null",
    '{"t": "wordcut \\ud83d here", "\\ude00": "wordkey"}',
    "wordplain \\ud83d \\n",
]


def prompt(tokenizer: Tokenizer, valid: ValidRequest) -> str:
    return tokenizer.text_of(tokenizer._encode_chat(valid.messages, None, valid.options), skip_special=False)


def chat(conversation: list[dict[str, Any]], **fields: Any) -> ValidRequest:
    return api.parse_chat(json.dumps({"messages": conversation, **fields}).encode(), CONFIG, "m", 600.0)


def chat_prompt(tokenizer: Tokenizer, conversation: list[dict[str, Any]], **fields: Any) -> str:
    return prompt(tokenizer, chat(conversation, **fields))


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


# ------------------------------------------------------------------------------------------------------ roles


ORDERS = [
    "system user",
    "developer user",
    "system developer user",
    "developer system user",
    "system system user",
    "user system",
    "user developer",
    "system user system",
    "system user assistant system user",
    "user assistant developer user",
    "system system user system system user",
    "user user",
    "system user user assistant user",
    "assistant user",
    "system assistant user",
    "assistant assistant user",
    "user assistant assistant user",
    "user assistant user system assistant user",
    "system system assistant assistant user user system",
    "system",
    "developer system",
    "assistant",
    "system assistant",
    "developer assistant assistant",
]


@pytest.mark.parametrize(("order", "parts"), each_value(ORDERS, [False, True]))
def test_messages_of_any_order_are_all_in_the_prompt(published: Tokenizer, order: str, parts: bool) -> None:
    conversation = []
    for at, role in enumerate(order.split()):
        content: Any = f"word{role}{at}"
        if parts:
            content = [{"type": "text", "text": content}, {"type": "text", "text": f"wordmore{at}"}]
        conversation.append({"role": role, "content": content})
    text = chat_prompt(published, conversation)
    words = re.findall(r"word\w+", json.dumps(conversation))
    assert [word for word in words if text.count(word) != 1] == []
    assert "developer\n" not in text  # a header of no model here
    turns = [word for word in words if "user" in word or "assistant" in word]
    assert sorted(turns, key=text.index) == turns


# ------------------------------------------------------------------------------------------- answers as history

ANSWERS = [
    (content, reasoning, calls)
    for content, reasoning, calls in itertools.product(("", "wordsaid"), ("", "wordthought"), range(4))
    if content or reasoning or calls
]


def written(calls: int, first: int) -> list[tuple[str, str]]:
    """Names of functions and arguments, as a model writes them."""
    return [(f"wordf{at}", ARGUMENTS[(first + at) % len(ARGUMENTS)]) for at in range(calls)]


def as_chat(content: str, reasoning: str, calls: list[tuple[str, str]], results: bool) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    if reasoning:
        answer["reasoning_content"] = reasoning
    if calls:
        answer["tool_calls"] = [
            {"id": f"call_{at}x", "type": "function", "function": {"name": name, "arguments": text}}
            for at, (name, text) in enumerate(calls)
        ]
    found = [answer]
    if results:
        found += [{"role": "tool", "tool_call_id": f"call_{at}x", "content": f"wordr{at}"} for at in range(len(calls))]
    return found


def words_of(content: str, calls: list[tuple[str, str]], results: bool) -> list[str]:
    found = [content] if content else []
    for at, (name, text) in enumerate(calls):
        found += [name, *re.findall(r"word[a-z]+", text)]
        found += [f"wordr{at}"] if results else []
    return found


@pytest.mark.parametrize("after", ["", "results", "final", "turn", "system"])
def test_an_answer_is_history_of_a_chat(published: Tokenizer, after: str) -> None:
    known = published.chat.dialect.calls
    for (content, reasoning, count), first in itertools.product(ANSWERS, range(0, len(ARGUMENTS), 2)):
        if count and not known:
            continue
        calls = written(count, first)
        conversation = [say("system", "wordrules"), say("user", "wordask")]
        conversation += as_chat(content, reasoning, calls, results=bool(after))
        words = ["wordrules", "wordask", *words_of(content, calls, bool(after))]
        more = {
            "final": [say("assistant", "wordfinal")],
            "turn": [say("assistant", "wordfinal"), say("user", "wordthen")],
            "system": [say("system", "wordnote"), say("user", "wordthen")],
        }.get(after, [])
        text = chat_prompt(published, [*conversation, *more])
        words += [message["content"] for message in more]
        assert [word for word in words if word not in text] == [], text
        assert text.count("wordask") == 1
        if count > 1 and after:  # each result comes after its own call, in order
            places = [text.index(f"wordr{at}") for at in range(count)]
            assert places == sorted(places)
            assert all(text.index(f"wordf{at}") < places[at] for at in range(count))


def as_messages(content: str, reasoning: str, calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The same answer and its results in Anthropic's format, whose arguments are objects."""
    blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": reasoning, "signature": ""}] if reasoning else []
    blocks += [{"type": "text", "text": content}] if content else []
    blocks += [
        {"type": "tool_use", "id": f"toolu_{at}", "name": name, "input": json.loads(bytes(messages.read_input(text)))}
        for at, (name, text) in enumerate(calls)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": f"toolu_{at}", "content": f"wordr{at}"} for at in range(len(calls))
    ]
    return [{"role": "assistant", "content": blocks}, *([{"role": "user", "content": results}] if results else [])]


def as_items(content: str, reasoning: str, calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The same in the format of responses."""
    part = {"type": "output_text", "text": content, "annotations": []}
    items: list[dict[str, Any]] = []
    if reasoning:
        items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}], "summary": []})
    items += [{"type": "message", "role": "assistant", "content": [part]}] if content else []
    for at, (name, text) in enumerate(calls):
        items.append({"type": "function_call", "call_id": f"call_{at}", "name": name, "arguments": text})
    for at in range(len(calls)):
        items.append({"type": "function_call_output", "call_id": f"call_{at}", "output": f"wordr{at}"})
    return items


@pytest.mark.parametrize("endpoint", ["messages", "responses"])
def test_an_answer_is_history_of_the_other_endpoints(published: Tokenizer, endpoint: str) -> None:
    for (content, reasoning, count), first in itertools.product(ANSWERS, range(0, len(ARGUMENTS), 2)):
        if count and not published.chat.dialect.calls:
            continue
        calls = written(count, first)
        if endpoint == "messages":
            turns = [say("user", "wordask"), *as_messages(content, reasoning, calls), say("user", "wordthen")]
            body = json.dumps({"max_tokens": 5, "system": "wordrules", "messages": turns}).encode()
            valid = messages.parse(body, CONFIG, "m", 600.0, api.NO_DEFAULTS)
            calls = [(name, json.dumps(json.loads(bytes(messages.read_input(text))))) for name, text in calls]
        else:
            items = [say("user", "wordask"), *as_items(content, reasoning, calls), say("user", "wordthen")]
            body = json.dumps({"instructions": "wordrules", "input": items}).encode()
            valid = responses.parse(body, CONFIG, "m", 600.0)
        text = prompt(published, valid)
        words = ["wordrules", "wordask", *words_of(content, calls, results=True), "wordthen"]
        assert [word for word in words if word not in text] == [], text


def test_function_calls_of_old_clients_are_tool_calls(published: Tokenizer) -> None:
    if not published.chat.dialect.calls:
        return
    call = {"role": "assistant", "content": None, "function_call": {"name": "wordf", "arguments": '{"a": "wordx"}'}}
    old = [say("user", "Hi"), call, {"role": "function", "name": "wordf", "content": "wordresult"}]
    tool_call = {"id": "call00001", "type": "function", "function": call["function_call"]}
    new = [say("user", "Hi"), {"role": "assistant", "content": None, "tool_calls": [tool_call]}]
    new += [{"role": "tool", "name": "wordf", "tool_call_id": "call00001", "content": "wordresult"}]
    text = chat_prompt(published, old)
    assert text == chat_prompt(published, new)
    assert all(word in text for word in ("wordf", "wordx", "wordresult"))


def test_calls_of_custom_tools_are_calls_of_functions_with_one_text(published: Tokenizer) -> None:
    if not published.chat.dialect.calls:
        return
    custom = {"id": "call00001", "type": "custom", "custom": {"name": "wordpatch", "input": 'wordin "a"\n'}}
    function = {"name": "wordpatch", "arguments": json.dumps({"input": 'wordin "a"\n'})}
    texts = []
    for call in (custom, {"id": "call00001", "type": "function", "function": function}):
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "name": "wordpatch", "tool_call_id": "call00001", "content": "wordresult"}
        texts.append(chat_prompt(published, [say("user", "Hi"), answer, result]))
    assert texts[0] == texts[1]
    assert all(word in texts[0] for word in ("wordpatch", "wordin", "wordresult"))
    broken = {"id": "call00001", "type": "custom", "custom": {"input": "a"}}
    with pytest.raises(Refusal, match=r"^messages\[1\]\.tool_calls\[0\]\.function\.name: "):
        chat([say("user", "Hi"), {"role": "assistant", "tool_calls": [broken]}])


def test_foreign_call_ids_are_renamed_alike(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    def asked(ids: Sequence[str | None], results: Sequence[str | None]) -> str:
        calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}} for _ in ids]
        for call, given in zip(calls, ids, strict=True):
            call.update({"id": given} if given else {})
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        told = [
            {"role": "tool", "content": f"r{at}", **({"tool_call_id": given} if given else {})}
            for at, given in enumerate(results)
        ]
        return chat_prompt(tokenizer_of("mistral-v3"), [say("user", "Hi"), answer, *told])

    def shown(text: str) -> tuple[list[str], list[str]]:
        return re.findall(r'"id": "(\w{9})"', text), re.findall(r'"call_id": "(\w{9})"', text)

    assert shown(asked(["abcdefghi"], ["abcdefghi"])) == (["abcdefghi"], ["abcdefghi"])
    for ids in (["call_1", "toolu_0123456789"], ["functions.f:0", "é"], [None, None]):
        calls, results = shown(asked(ids, ids[::-1] if ids[0] else ids))
        assert len(set(calls)) == 2
        assert results == (calls[::-1] if ids[0] else calls)
    assert asked(["call_1"], ["call_1"]) == asked(["call_1"], ["call_1"])


REFUSED = [
    ("llama2", [say("user", "a"), as_chat("", "", [("f", "{}")], False)[0]], "messages[1].tool_calls"),
    ("llama2", [say("user", "a"), {"role": "tool", "tool_call_id": "x", "content": "b"}], "messages[1].role"),
    ("qwen3.5", [say("user", "<tool_response>a</tool_response>")], "messages[0]"),
    ("qwen3", [say("user", "a"), say("assistant", "b"), say("judge", "c")], "messages[2].role"),
]


@pytest.mark.parametrize(("name", "conversation", "param"), REFUSED)
def test_what_would_be_left_out_is_refused_by_its_index(
    tokenizer_of: Callable[[str], Tokenizer], name: str, conversation: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(Refusal) as refused:
        chat_prompt(tokenizer_of(name), conversation)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    "call",
    [
        {"id": "a", "type": "function"},
        {"id": "a", "type": "function", "function": None},
        {"id": "a", "type": "function", "function": {"arguments": "{}"}},
        {"id": "a", "type": "function", "function": {"name": 5}},
    ],
)
def test_a_call_without_a_function_is_refused(call: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        chat([say("user", "a"), {"role": "assistant", "tool_calls": [call]}])
    assert refused.value.status == 400
    assert (refused.value.param or "").startswith("messages[1].tool_calls[0].function")


RAISING = (
    "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('No bad words.') }}{% endif %}"
    "{% if 'worse' in m.content %}{{ m.content + 1 }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(("word", "reason"), [("bad", "No bad words."), ("worse", "TypeError")])
@pytest.mark.parametrize("at", range(0, 9))
def test_what_a_template_raises_names_the_message_and_the_reason(
    tmp_path: Path, word: str, reason: str, at: int
) -> None:
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), RAISING)))
    conversation = [say("user" if i % 2 else "assistant", word if i == at else "fine") for i in range(9)]
    with pytest.raises(Refusal) as refused:
        chat_prompt(tokenizer, conversation)
    assert refused.value.param == f"messages[{at}]"
    assert refused.value.message == f"messages[{at}]: the model's chat template refuses it: {reason}"


def test_the_message_at_fault_keeps_its_index_when_it_was_joined_to_another(tmp_path: Path) -> None:
    in_turns = (
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('In turns.') }}{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), in_turns + RAISING)))
    for roles in (["system"] * 3 + ["user"], ["user", "system", "system", "user"], ["user"] * 4):
        for at in range(4):
            conversation = [say(role, "bad" if i == at else "fine") for i, role in enumerate(roles)]
            with pytest.raises(Refusal) as refused:
                chat_prompt(tokenizer, conversation)
            assert refused.value.param == f"messages[{at}]", (roles, at)


def blocks(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": kind, **fields}]


RAISING_TOOLS = (
    "{% for m in messages %}{% if m.content and 'bad' in m.content %}{{ raise_exception('No bad words.') }}{% endif %}"
    "{% endfor %}" + TOOLS_TEMPLATE
)
RESULT = {"role": "user", "content": blocks("tool_result", tool_use_id="x", content="b")}
TWO_RESULTS = {"role": "user", "content": [*RESULT["content"], *RESULT["content"]]}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "b"}
OTHER_FORMATS: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama2", "messages", {"system": "s", "messages": [say("user", "a"), RESULT]}, "messages[1]"),
    ("llama2", "messages", {"messages": [say("user", "a"), RESULT]}, "messages[1]"),
    ("llama2", "messages", {"system": "s", "messages": [say("user", "a"), say("system", "t"), RESULT]}, "messages[2]"),
    ("raising", "messages", {"system": "s", "messages": [TWO_RESULTS, say("user", "bad")]}, "messages[1]"),
    ("raising", "messages", {"system": "bad", "messages": [say("user", "a")]}, "system"),
    ("raising", "messages", {"system": "s", "messages": [say("system", "bad"), say("user", "a")]}, "messages[0]"),
    ("llama2", "responses", {"instructions": "s", "input": [say("user", "a"), CALL_ITEM, OUTPUT_ITEM]}, "input[1]"),
    ("raising", "responses", {"instructions": "bad", "input": "a"}, "instructions"),
    ("raising", "responses", {"instructions": "s", "input": "bad"}, "input"),
    ("raising", "responses", {"input": [say("user", "a"), CALL_ITEM, OUTPUT_ITEM, say("user", "bad")]}, "input[3]"),
]


@pytest.mark.parametrize(("name", "format_", "fields", "param"), OTHER_FORMATS)
async def test_a_refusal_names_the_clients_own_field(
    tokenizer_of: Callable[[str], Tokenizer],
    tmp_path: Path,
    name: str,
    format_: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    if name == "raising":
        tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), RAISING_TOOLS)))
    else:
        tokenizer = tokenizer_of(name)
    module = messages if format_ == "messages" else responses
    body = json.dumps({"max_tokens": 5, **fields} if format_ == "messages" else fields).encode()
    valid = module.parse(body, CONFIG, "m", 600.0, api.NO_DEFAULTS)
    with pytest.raises(Refusal) as refused:
        await tokenizer.encode(valid)
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: ")


async def test_items_of_an_earlier_response_do_not_move_the_index(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(with_template(byte_level(tmp_path / "m"), RAISING)))
    earlier = [say("user", "a"), say("assistant", "b")]

    def asked(given: list[dict[str, Any]], before: list[dict[str, Any]]) -> ValidRequest:
        body = json.dumps({"input": given}).encode()
        return responses.parse(body, CONFIG, "m", 600.0, api.NO_DEFAULTS, before)

    with pytest.raises(Refusal) as refused:
        await tokenizer.encode(asked([say("user", "c"), say("user", "bad")], earlier))
    assert refused.value.param == "input[1]"
    with pytest.raises(Refusal) as refused:
        await tokenizer.encode(asked([say("user", "c")], [say("user", "bad"), earlier[1]]))
    assert refused.value.param == "previous_response_id"
    with pytest.raises(Refusal) as refused:
        asked([{"type": "nonsense"}], earlier)
    assert refused.value.param == "input[0].type"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
URL = "data:text/plain;base64,d29yZHBhcnQ="
PARTS: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("user", {"type": "input_text", "text": "wordpart"}, "wordpart", ()),
    ("assistant", {"type": "output_text", "text": "wordpart"}, "wordpart", ()),
    ("user", "wordpart", "wordpart", ()),
    ("user", {"type": "file", "file": {"filename": "a.md", "file_data": URL}}, "wordpart", ()),
    ("tool", IMAGE, "[image left out", ("messages[2].content[1].image_url",)),
    ("tool", {"type": "file", "file": {"file_id": "f"}}, "[file left out", ("messages[2].content[1].file",)),
    ("assistant", {"type": "thinking", "thinking": "wordthought"}, "wordthought", ()),
    ("assistant", {"type": "thinking", "thinking": [{"type": "text", "text": "wordthought"}]}, "wordthought", ()),
    ("assistant", {"type": "reasoning", "text": "wordthought"}, "wordthought", ()),
]  # fmt: skip


@pytest.mark.parametrize(("role", "part", "shown", "unknown"), PARTS)
def test_parts_of_other_servers_reach_the_model(
    tokenizer_of: Callable[[str], Tokenizer], role: str, part: Any, shown: str, unknown: tuple[str, ...]
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": role, "content": [{"type": "text", "text": "wordtext"}, part], "tool_call_id": "a"}
    before = [say("user", "a"), {"role": "assistant", "tool_calls": [call]}] if role == "tool" else [say("user", "a")]
    valid = chat([*before, message])
    assert valid.unknown == unknown
    text = prompt(tokenizer_of("qwen3"), valid)
    assert shown in text
    assert "wordtext" in text


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_an_image_outside_of_a_tools_result_is_refused(role: str) -> None:
    with pytest.raises(Refusal) as refused:
        chat([{"role": role, "content": [{"type": "text", "text": "a"}, IMAGE]}])
    assert (refused.value.code, refused.value.param) == ("unsupported", "messages[0].content[1].type")


def test_a_refusal_is_content_of_the_assistant(published: Tokenizer) -> None:
    for answer in (
        {"role": "assistant", "content": None, "refusal": "wordno"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "wordno"}]},
        {"role": "assistant", "content": "wordsorry", "refusal": "wordno"},
        {"role": "assistant", "content": [{"type": "text", "text": "wordsorry"}], "refusal": "wordno"},
    ):
        text = chat_prompt(published, [say("user", "a"), answer, say("user", "b")])
        assert [word for word in re.findall(r"word\w+", json.dumps(answer)) if word not in text] == []


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ud83d\\ud83d", "\\\\\\ud83d"])
@pytest.mark.parametrize("place", ["content", "name", "arguments", "key"])
def test_half_a_surrogate_pair_anywhere_is_a_replacement_character(
    tokenizer_of: Callable[[str], Tokenizer], half: str, place: str
) -> None:
    given = dict.fromkeys(("content", "name", "arguments", "key"), "x") | {place: "HALF \U0001f600 a\\u005c"}
    call = {"type": "function", "function": {"name": "f", "arguments": {given["key"]: given["arguments"]}}}
    told = {**say("user", given["content"]), "name": given["name"]}
    conversation = [told, {"role": "assistant", "tool_calls": [{**call, "id": "a"}]}, say("user", "b")]
    for ascii_only in (False, True):
        body = json.dumps({"messages": conversation}, ensure_ascii=ascii_only).replace("HALF", half).encode()
        valid = api.parse_chat(body, CONFIG, "m", 600.0)
        assert "\ufffd \U0001f600 a\\u005c" in json.dumps(valid.messages, ensure_ascii=False).replace("\\\\", "\\")
        prompt(tokenizer_of("hermes"), valid)


def test_random_histories_are_rendered_or_refused(tmp_path: Path) -> None:
    found, failures = histories(tmp_path, requests=1500, seed=1)
    assert failures == []
    assert found["tokens"] > 500


@pytest.mark.parametrize(
    "content",
    [
        "wordone</think>wordtwo",
        "wordone<think>wordtwo</think>wordthree",
        "<tool_call>wordone</tool_call></think>wordtwo",
    ],
)
@pytest.mark.parametrize("after", [[], [say("user", "wordthen")]])
def test_an_answer_with_strings_of_the_template_is_whole(
    published: Tokenizer, content: str, after: list[dict[str, Any]]
) -> None:
    """Templates search an assistant's text for the end of its reasoning, and drop everything before it."""
    text = chat_prompt(published, [say("user", "wordask"), say("assistant", content), *after])
    assert [word for word in re.findall("word[a-z]+", content) if word not in text] == []


def test_reasoning_that_a_client_sends_back_in_the_content_is_left_to_the_template(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    said = [say("user", "Hi"), say("assistant", "<think>\nwordhm\n</think>\n\nwordsaid"), say("user", "Go on")]
    text = chat_prompt(tokenizer_of("qwen3"), said)
    assert "wordsaid" in text
    assert "wordhm" not in text


def test_answers_that_are_sent_back_are_histories(tmp_path: Path) -> None:
    """Many more: `make chaos ARGS='returned --answers 20000'`."""
    found, failures = returned(tmp_path, answers=132, seed=36)
    assert not failures, failures[0]
    assert found == {"fits": 132}
