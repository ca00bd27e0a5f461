"""Half surrogates that a model writes as escapes of JSON: clients get U+FFFD, in every notation and format."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.wire.messages import Finish
from quire.service.api import api
from quire.service.api.anthropic import messages
from quire.service.api.anthropic.messages import MessageFormat
from quire.service.api.api import NO_DEFAULTS
from quire.service.api.client_tools import custom_input
from quire.service.api.format import Format, Prompted
from quire.service.api.openai_responses import responses
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.common.pacing import Pacer
from quire.service.config import GatewayConfig
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.regions import Reading, ResponseTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.matrix import examples
from tests.service.output.cuts import pieces_of
from tests.service.output.test_regions import ANSWERS, TEMPLATES, read

ESCAPES = st.sampled_from(
    ["\\ud83d", "\\ude00", "\\ud83d\\ude00", "\\uD83D", "\\\\ud83d", "\\u0041", "\\n", "\\", "x", "é", "🙂", '\\"']
)
TYPED = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": kinds}}}}} for kinds in (["object"],)]
# In a notation that only transformers reads
CALLS = {"content": "json", "content_args": {"allow_non_json": True}}
WHOLE = {
    "start_anchor": "A:",
    "fields": {"tool_calls": {"repeats": True, "open": "<call>", "close": "</call>", **CALLS}, "content": {}},
}


def has_halves(text: str) -> bool:
    return any("\ud800" <= char < "\ue000" for char in text)


def clean(arguments: str) -> bool:
    """Whether arguments, or their beginning, hold no half surrogate, escaped or not."""
    try:
        return not has_halves(json.dumps(json.loads(arguments), ensure_ascii=False))
    except ValueError:
        return not has_halves(arguments)


@st.composite
def escaped(draw: st.DrawFn) -> tuple[str, str]:
    """A response template, and one of its answers with escapes at any place."""
    name = draw(st.sampled_from(sorted(TEMPLATES)))
    text = draw(st.sampled_from(ANSWERS[name]))[0]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + "".join(draw(st.lists(ESCAPES, min_size=1, max_size=4))) + text[at:]
    return name, text


@settings(max_examples=examples(150), deadline=None)
@given(escaped(), st.lists(st.integers(0, 400), max_size=12), st.booleans(), st.booleans())
def test_calls_hold_no_half_surrogates_however_the_text_is_cut(
    asked: tuple[str, str], cuts: list[int], cut: bool, tools: bool
) -> None:
    name, text = asked
    reading = Reading("", calls=True, tools=TYPED if tools else [])
    whole = read(name, [text], reading, cut=cut)
    ends = [0, *sorted(min(end, len(text)) for end in cuts), len(text)]
    for pieces in ([text[a:b] for a, b in itertools.pairwise(ends)], list(text)):
        assert read(name, pieces, reading, cut=cut) == whole
    for called, arguments in whole.calls:
        assert not has_halves(called)
        assert clean(arguments), text


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": "HALF"}}',
        '{"name": "f", "arguments": {"HALF": 1}}',
        '{"name": "HALF", "arguments": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1}, "HALF": "HALF"}',
        '[{"name": "f", "arguments": "{\\"a\\": \\"HALF\\"}"}]',
    ],
)
@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00\\ud83d"])
def test_notations_that_transformers_reads_hold_none_either(body: str, half: str) -> None:
    reader = ResponseTemplate(WHOLE).reader(Reading("", calls=True))
    reader.push(f"<call>{body.replace('HALF', half)}</call>")
    reader.finish(cut=False)
    content, _, calls = reader.take()
    assert len(calls) == 1
    for text in (content, calls[0].name or "", calls[0].arguments):
        text.encode()
        assert "\\ud8" not in text


ARGUMENTS = '{"a": "\\ud83d", "b\\ude00": ["\\ud83d\\ude00"]}'
ANSWER = f'\\ud83d <tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["chat", "messages", "responses"])
def test_answers_of_every_format_hold_none(tools_tokenizer: Tokenizer, path: str, stream: bool) -> None:
    config, hello = GatewayConfig(), [{"role": "user", "content": "Hi"}]
    schema = {"type": "object"}
    prompt, ids = Prompted([1] * 8), f"{0:032x}"
    more: dict[str, Any] = {"model": "tiny", "request_id": ids}
    if path == "chat":
        tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        fields = {"messages": hello, "logprobs": True, "stream": stream}
        valid = api.parse_chat(json.dumps({"tools": tools, **fields}).encode(), config, "tiny", 600.0)
        more |= {"created": 1, "fingerprint": None, "prompts": [prompt], "vocabulary": tools_tokenizer.vocabulary.table}
        kind: Any = Format
    elif path == "messages":
        tools = [{"name": "f", "input_schema": schema}]
        fields = {"messages": hello, "max_tokens": 99, "tools": tools}
        valid = messages.parse(json.dumps(fields).encode(), config, "tiny", 600.0, NO_DEFAULTS)
        more["prompt"], kind = prompt, MessageFormat
    else:
        tools = [{"type": "function", "name": "f", "parameters": schema}, {"type": "custom", "name": "g"}]
        valid = responses.parse(json.dumps({"input": "Hi", "tools": tools}).encode(), config, "tiny", 600.0)
        more |= {"created": 1, "prompt": prompt, "vocabulary": tools_tokenizer.vocabulary.table}
        kind = ResponseFormat
    valid = msgspec.structs.replace(valid, reading=tools_tokenizer.rules.reading(valid, []))
    form = kind(valid, **more)
    tokens = tools_tokenizer._encode(ANSWER, special=False)
    pieces: list[ChoiceDelta] = pieces_of(
        tools_tokenizer, valid, tokens, Finish("stop"), list(range(len(tokens))), each_token=True
    )
    if stream:
        sent = b"".join(map(form.chunk, pieces)) + form.done()
        found = [json.loads(line[6:]) for line in sent.split(b"\n") if line.startswith(b"data: {")]
    else:
        found = [json.loads(b"".join(asyncio.run(form.whole(pieces, Pacer()))))]
    assert len(found) > stream
    assert not has_halves(json.dumps(found, ensure_ascii=False))


@pytest.mark.parametrize("written", ['{"input": "a\\ud83d"}', '{"x": "a\\ud83d"}', '"a\\ud83d"'])
def test_the_input_of_a_custom_tool_holds_none(written: str) -> None:
    assert custom_input(written) == "a\ufffd"
