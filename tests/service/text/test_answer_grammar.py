"""Structured output of a model whose prompt opens the reasoning begins after the reasoning, and is the content.

The engine draws tokens from the grammar that the gateway sends it, so an answer shows what the grammar allows."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.engine.wire.messages import Finish, Generate
from quire.service.api.tools import ChatOptions
from quire.service.common.refusal import Refusal
from quire.service.grammar.grammar import Constraint, byte_tokenizer, compile_grammar
from quire.service.output.regions import Reading
from quire.service.text.answer_grammar import Model, constraint_of
from quire.service.text.thinking_budget import quoted
from quire.service.text.tokenizer import Tokenizer
from tests.service.chat_templates.published import tokenizer_in
from tests.service.fakes import TOOLS_TEMPLATE, FakeEngine, Served, byte_level, settled, with_markers, with_template
from tests.service.test_app import events
from tests.service.text.call_notations import notation

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
OPENS = TOOLS_TEMPLATE.replace(
    "{% if enable_thinking is defined",
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% if enable_thinking is defined",
)
EOS = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def thinker_of(folder: Path, markers: str) -> Path:
    """A model whose markers of reasoning are special tokens, other added tokens, or text."""
    made = with_template(byte_level(folder), OPENS, ("<think>", "</think>") if markers == "special" else ())
    if markers == "added":
        with_markers(made / "tokenizer.json")
    return made


@pytest.fixture(scope="module", params=["special", "added", "text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker_of(tmp_path_factory.mktemp("thinking") / "m", request.param)


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Tokenizer:
    return Tokenizer(str(folder))


def writes(thinker: Tokenizer, folder: Path, thoughts: int = 6) -> Callable[[Generate, int], Any]:
    """A script: random tokens that the request's grammar allows, `thoughts` of them before the reasoning is closed."""
    vocabulary = LLTokenizer(str(folder / "tokenizer.json"), eos_token=[EOS])
    closing = thinker._encode("</think>", special=False)

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        matcher = LLMatcher(vocabulary, generate.sampling.grammar, log_level=0)
        dice, found, plan = random.Random(f"{generate.id} {index}"), list[int](), list[int]()
        while len(found) < generate.max_new_tokens:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[: len(thinker.vocabulary.table)]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, matcher.get_error()
            if not plan and len(found) == thoughts and bits[closing[0]] and EOS not in allowed:
                plan = closing.copy()
            # Mostly text that is easy to read, and no marker before its time.
            plain = [one for one in allowed if one != closing[0] and thinker.vocabulary.table[one].isascii()]
            token = plan.pop(0) if plan else EOS if EOS in allowed else dice.choice(plain or allowed)
            assert bits[token], thinker.text_of(found, skip_special=False)
            found.append(token)
            if token == EOS:
                return found, Finish("stop", stop_token=EOS)
            assert matcher.consume_token(token), matcher.get_error()
        return found, None

    return script


def fits(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text)

    return check


FORMATS: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, fits),
    "json": ({"structured_outputs": {"json": SCHEMA}}, fits),
    "json as text": ({"guided_json": json.dumps(SCHEMA)}, fits),
    "choice": ({"structured_outputs": {"choice": ["north", 'so"uth']}}, matches('north|so"uth')),
    "regex": ({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}, matches(r"\d{4}-\d\d")),
    "grammar": (
        {"structured_outputs": {"grammar": 'start: "<" thought ">"\nthought: /[ab]{3}/'}},
        matches("<[ab]{3}>"),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_asked_of_the_content_begins_after_the_reasoning(
    serve: Serve, engine: EngineMaker, thinker: Tokenizer, folder: Path, name: str, stream: bool
) -> None:
    served = await serve(thinker)
    fields, check = FORMATS[name]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 2, "stream": stream, **fields}
    async with engine(writes(thinker, folder)) as fake:
        fake.load_changes = {"grammars": True}
        await settled(lambda: any(one.grammars for one in served.streams.fleet.engines))
        async with served.session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            said = [["", ""], ["", ""]]
            if stream:
                async for _, event in events(response):
                    for choice in event["choices"] if isinstance(event, dict) else ():
                        for at, field in enumerate(("content", "reasoning_content")):
                            said[choice["index"]][at] += choice["delta"].get(field) or ""
            else:
                messages = [choice["message"] for choice in (await response.json())["choices"]]
                said = [[message["content"], message["reasoning_content"]] for message in messages]
    for content, reasoning in said:
        check(content)
        assert reasoning


async def test_it_holds_on_all_endpoints_and_for_demanded_calls(
    serve: Serve, engine: EngineMaker, thinker: Tokenizer, folder: Path
) -> None:
    served = await serve(thinker)

    async def post(path: str, **fields: Any) -> Any:
        async with served.session.post(path, json={"model": "tiny", **fields}) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    schema = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    messages = [{"role": "user", "content": "Hi"}]
    async with engine(writes(thinker, folder)) as fake:
        fake.load_changes = {"grammars": True}
        await settled(lambda: any(one.grammars for one in served.streams.fleet.engines))
        answer = await post("/v1/responses", input="Hi", text={"format": schema})
        reasoning, message = answer["output"]
        assert (reasoning["type"], message["type"]) == ("reasoning", "message")
        jsonschema.validate(json.loads(message["content"][0]["text"]), SCHEMA)
        form = {"type": "json_schema", "schema": SCHEMA}
        answer = await post("/v1/messages", messages=messages, max_tokens=200, output_config={"format": form})
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        jsonschema.validate(json.loads(answer["content"][1]["text"]), SCHEMA)
        answer = await post("/v1/chat/completions", messages=messages, tools=[TOOL], tool_choice="required")
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"]
        assert not message["content"]
        jsonschema.validate(json.loads(message["tool_calls"][0]["function"]["arguments"]), SCHEMA)
        # Within the reasoning max_tokens leaves no content.
        answer = await post("/v1/chat/completions", messages=messages, max_tokens=4, **FORMATS["json"][0])
        [choice] = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["message"]["reasoning_content"]


async def test_without_reasoning_it_begins_with_the_first_token(
    serve: Serve, engine: EngineMaker, thinker: Tokenizer, tools_tokenizer: Tokenizer, folder: Path
) -> None:
    """If the prompt closes the reasoning, or does not open it."""
    reading = partial(Reading, calls=False)
    model = Model(thinker.chat.responses, lambda: None, thinker.vocabulary.grammar_tokens)
    asked = Constraint("response_format", "json", SCHEMA)
    for opening in ("", "<think>\n\n</think>\n\n"):
        assert model.thinks(reading(opening)) != "open"
    served = await serve(thinker)
    off = {"chat_template_kwargs": {"enable_thinking": False}, **FORMATS["json"][0]}
    async with engine(writes(thinker, folder)) as fake:
        fake.load_changes = {"grammars": True}
        await settled(lambda: any(one.grammars for one in served.streams.fleet.engines))
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **off}
        async with served.session.post("/v1/chat/completions", json=body) as response:
            message = (await response.json())["choices"][0]["message"]
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
        assert "reasoning_content" not in message
        assert fake.seen[-1].sampling.grammar == compile_grammar(asked).grammar


@pytest.mark.parametrize("budget", [0, 3])
async def test_a_budget_bounds_the_reasoning_before_it(
    serve: Serve, engine: EngineMaker, thinker: Tokenizer, folder: Path, budget: int
) -> None:
    served = await serve(thinker)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "thinking_token_budget": budget}
    async with engine(writes(thinker, folder, thoughts=1000)) as fake:
        fake.load_changes = {"grammars": True}
        await settled(lambda: any(one.grammars for one in served.streams.fleet.engines))
        for more in (FORMATS["json"][0], {"tools": [TOOL], "tool_choice": "required"}):
            async with served.session.post("/v1/chat/completions", json={**body, **more}) as response:
                answer = await response.json()
            if "</think>" not in thinker.vocabulary.grammar_tokens:
                assert (response.status, answer["error"]["param"]) == (400, "thinking_token_budget")
                continue
            assert response.status == 200, answer
            [choice] = answer["choices"]
            said = choice["message"]
            found = said["content"] or said["tool_calls"][0]["function"]["arguments"]
            jsonschema.validate(json.loads(found), SCHEMA)
            details = answer["usage"]["completion_tokens_details"]
            assert details["reasoning_tokens"] <= budget + 1  # the closing marker is counted


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "on": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["city", "on"],
}


def test_reasoning_that_the_prompt_has_closed_is_not_open(tmp_path: Path) -> None:
    """Also where more text could make its closing marker another one."""
    tokenizer = tokenizer_in(tmp_path, "gemma4")
    model = Model(tokenizer.chat.responses, lambda: None, tokenizer.vocabulary.grammar_tokens)
    assert model.thinks(Reading("<|channel>thought\n<channel|>")) == ""
    assert model.thinks(Reading("<|channel>thought\n")) == "open"
    assert model.thinks(Reading("")) == "may"
    assert quoted("<|channel>thought\n", {"<|channel>": 9}) == '<[9]> "thought\\n"'


@pytest.mark.parametrize("name", ["qwen3.5", "glm", "gemma4"])
async def test_a_call_between_tags_is_demanded_over_http(
    serve: Serve, engine: EngineMaker, tmp_path: Path, name: str
) -> None:
    tokenizer = tokenizer_in(tmp_path, name)
    served = await serve(tokenizer)
    tool = {"type": "function", "function": {"name": "weather", "parameters": TYPED, "strict": True}}
    choice = {"type": "function", "function": {"name": "weather"}}
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"tools": [tool], "tool_choice": choice, "max_tokens": 150}  # the context has 512
    body = {"model": "tiny", "messages": messages, **asked}
    async with engine(writes(tokenizer, tmp_path / name)) as fake:
        fake.load_changes = {"grammars": True}
        await settled(lambda: any(one.grammars for one in served.streams.fleet.engines))
        async with served.session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
    assert response.status == 200, answer
    message = answer["choices"][0]["message"]
    assert not (message["content"] or "").strip()
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TYPED)


def test_a_call_that_the_prompt_begins_goes_on_from_there() -> None:
    """Functionary's prompts end in `>>>`, with which its calls begin."""
    form, responses = notation("functionary-v3.2")
    model = Model(responses, lambda: form, {})
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    for tools, demanded in (([TOOL], ["f"]), ([strict], [])):
        options = ChatOptions(tools=tools, demanded=demanded, strict="" if demanded else "tools[0].function.strict")
        valid = SimpleNamespace(options=options, constraint=None, sampling=SimpleNamespace(ignore_eos=False))
        reading = Reading(">>>", calls=True)
        if not demanded:
            with pytest.raises(Refusal, match="the prompt begins the call"):
                constraint_of(cast(Any, valid), reading, model)
            continue
        found = constraint_of(cast(Any, valid), reading, model)
        assert found is not None
        matcher = LLMatcher(byte_tokenizer(), compile_grammar(found).grammar, log_level=0)
        written = list(b'f\n{"a": "x"}')
        assert matcher.try_consume_tokens(written) == len(written)
        assert matcher.is_accepting()
