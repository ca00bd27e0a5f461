"""JSON of every kind at every place of every body: an answer or a refusal, never a fault of the gateway.

The places are the fields of the bodies' structs, of the examples of docs/api.md and of the histories, tools and choices
of `BODIES`, with everything within them.  What a request passes before it is queued runs here without HTTP.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire.service.api import api, chat_batch, fitting, generative_scoring
from quire.service.api.anthropic import messages
from quire.service.api.bodies import ChatBody, CompletionBody
from quire.service.api.fitting import EngineLimits
from quire.service.api.format import Prompted
from quire.service.api.openai_responses import responses
from quire.service.api.openai_responses.compaction import parse_compaction
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.openai_responses.response_items import listed
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.resume import Record, decode
from quire.service.grammar.grammar import compile_grammar
from quire.service.grammar.grammar_errors import NotServed
from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import TOOLS_TEMPLATE, byte_level, with_template
from tests.system.chaos.mutations import CHATS, HELLO, ITEMS, SCHEMA, TOOLS, TURNS, examples, places

Json = Any
KINDS = (
    *("null", "true", "1.5", "1e400", "9" * 30, '"x"', "[]", "[null]"),
    *('{"a":1}', '{"type":{"a":[1e400]}}', '{"type":["x"],"name":[]}'),
)
MARK = "\ue000"
GRAMMARS: set[bytes] = set()  # those that were compiled: each once
DEEP = {"type": "object", "properties": {"a": {"type": ["array"], "items": {"enum": [1, "x"]}, "minItems": 1}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": DEEP | {"required": ["a"]}}}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", "namespace": "n"}]}
EDITS = {
    "edits": [
        {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}, "trigger": {"value": 9}},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
    ]
}
BLOCKS = [
    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]},
    {"type": "document", "title": "t", "context": "c", "source": {"type": "content", "content": "x"}},
    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "name": "f"}]},
]
MORE_ITEMS = [
    {"type": "local_shell_call", "call_id": "a", "action": {"command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "a", "output": "x"},
    {"type": "shell_call_output", "call_id": "b", "output": [{"stdout": "x", "stderr": "y"}]},
    {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
    {"type": "mcp_call", "id": "m", "name": "f", "server_label": "s", "arguments": "{}", "output": "x"},
    {"type": "web_search_call", "id": "w", "action": {"query": "q"}, "results": [{"url": "u"}]},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "additional_tools", "tools": [{"type": "function", "name": "k", "parameters": SCHEMA}]},
    {"role": "user", "content": [{"type": "input_file", "filename": "f", "file_data": "data:text/plain;base64,eA=="}]},
]
# Bodies by parser: each alone, and with every field that its endpoint has.
BODIES: dict[str, tuple[Any, type[msgspec.Struct], list[dict[str, Json]]]] = {
    "completions": (api.parse_completion, CompletionBody, [{"prompt": ["a", "b"]}, {"prompt": [[5], [6]]}]),
    "chat": (
        api.parse_chat,
        ChatBody,
        [
            *({"messages": chat} for chat in CHATS),
            {"messages": HELLO, "tools": TOOLS["chat"], "tool_choice": NAMED, "response_format": FORM},
            {
                "messages": HELLO,
                "tools": TOOLS["chat"],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
            },
            {
                "messages": HELLO,
                "tools": TOOLS["chat"],
                "tool_choice": ALLOWED,
                "stream_options": {"include_usage": True},
            },
        ],
    ),
    "batch": (
        chat_batch.parse,
        chat_batch.BatchBody,
        [{"messages": [HELLO, CHATS[2]], "tools": [], "n": 1, "stream": False}],
    ),
    "scoring": (
        generative_scoring.parse,
        generative_scoring.ScoringBody,
        [{"query": "q", "items": ["a"], "label_token_ids": [5, 6]}],
    ),
    "messages": (
        messages.parse,
        messages.MessagesBody,
        [
            *({"messages": turns, "max_tokens": 8} for turns in TURNS),
            {
                "messages": [{"role": "user", "content": BLOCKS}],
                "max_tokens": 8,
                "tools": TOOLS["messages"],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": DEEP}},
                "context_management": EDITS,
                "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            },
        ],
    ),
    "compact": (parse_compaction, responses.ResponsesBody, [{"input": ITEMS[2] + MORE_ITEMS}]),
    "responses": (
        responses.parse,
        responses.ResponsesBody,
        [
            *({"input": given} for given in ITEMS),
            *({"input": [item]} for item in MORE_ITEMS),
            {
                "input": "x",
                "tools": TOOLS["responses"],
                "tool_choice": ALLOWED,
                "text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP}, "verbosity": "low"},
                "reasoning": {"effort": "low", "summary": "auto"},
                "include": ["reasoning.encrypted_content"],
                "metadata": {"a": "b"},
            },
            {
                "input": "x",
                "tools": TOOLS["responses"],
                "tool_choice": {"type": "function", "name": "h", "namespace": "n"},
            },
        ],
    ),
}


def fields_of(kind: str) -> Iterator[dict[str, Json]]:
    """Yield the fields of an endpoint's body: those of its struct, and those that docs/api.md shows."""
    yield from ({name: None} for name in BODIES[kind][1].__struct_fields__)
    yield from (*examples().get(kind, []), *(examples()["refused"] if kind == "chat" else []))


def bodies(kind: str) -> Iterator[str]:
    """Yield bodies as JSON with one value marked, each place once."""
    bases = BODIES[kind][2]
    given = [(base, set(base)) for base in bases]
    given += [(bases[0] | fields, set(fields)) for fields in fields_of(kind)]
    seen: set[str] = set()
    for body, new in given:
        for container, key, path in places(copied := copy.deepcopy(body)):
            if path[1:].replace("[", ".").partition(".")[0] not in new:
                continue
            value, container[key] = container[key], MARK
            text = json.dumps(copied)
            container[key] = value
            if text not in seen:
                seen.add(text)
                yield text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(with_template(byte_level(tmp_path_factory.mktemp("model") / "m"), TOOLS_TEMPLATE)))


async def prepare(tokenizer: Tokenizer, kind: str, body: bytes, config: GatewayConfig) -> None:
    """Do what is done with a request until it is queued.  Raises Refusal."""
    valid = BODIES[kind][0](body, config, "tiny", 30.0, api.NO_DEFAULTS)
    prompts = await tokenizer.encode(valid, len(body), total=config.max_prompt_tokens)
    valid = tokenizer.forbid(tokenizer.end_infill(valid))
    valid = msgspec.structs.replace(valid, reading=tokenizer.rules.reading_of_all(valid, prompts))
    rooms = fitting.fit(valid, prompts, EngineLimits(4096, len(tokenizer.vocabulary.table), 16, 10_000))
    fitting.bound_logprobs(valid, prompts, rooms, config)
    if (constraint := tokenizer.rules.constraint(valid, valid.reading)) is not None:
        key = msgspec.json.encode(constraint)
        if key not in GRAMMARS:
            GRAMMARS.add(key)
            try:
                compile_grammar(constraint)
            except NotServed as error:
                raise api.not_served(error) from None
    valid = msgspec.structs.replace(valid, constraint=None)
    record = Record("", "", valid, tokenizer.prompted(valid, prompts), "tiny", 1, None, 1)
    stored = decode(record.encode())
    assert stored.valid.shown == valid.shown
    if kind in ("responses", "compact"):
        form = stored.form("resp_1", tokenizer.vocabulary.table, ids=True)
        assert isinstance(form, ResponseFormat)
        msgspec.json.encode([form.response("queued"), *map(listed, valid.items)])


@pytest.mark.parametrize("kind", BODIES)
async def test_json_of_any_kind_at_any_place_is_answered_or_refused(kind: str, tokenizer: Tokenizer) -> None:
    config = GatewayConfig(responses_ttl_s=60.0)
    faults: list[str] = []
    statuses: Counter[int] = Counter()
    for text in bodies(kind):
        for word in KINDS:
            body = text.replace(json.dumps(MARK), word).encode()
            status = 200
            try:
                await prepare(tokenizer, kind, body, config)
            except Refusal as refusal:
                status = refusal.status
                json.loads(refusal.body())
                json.loads(messages.error_body(refusal, "r"))
            except Exception as error:  # the gateway would answer 500
                status = 500
                faults.append(f"{error!r}: {body[:2000]!r}")
            statuses[status] += 1
    assert not faults
    assert set(statuses) <= {200, 400, 404}
    assert statuses[200]
    assert statuses[400]


def test_numbers_of_any_size_are_repeated_as_they_were_sent(tokenizer: Tokenizer) -> None:
    schema = f'{{"type":"object","properties":{{"a":{{"type":"integer","maximum":{"9" * 60}}}}}}}'
    body = f'{{"input":"x","tools":[{{"type":"function","name":"f","parameters":{schema}}}]}}'
    valid = responses.parse(body.encode(), GatewayConfig(), "tiny", 30.0)
    record = Record("", "", valid, [Prompted([1])], "tiny", 1, None, 1)
    form = decode(record.encode()).form("resp_1", tokenizer.vocabulary.table, ids=True)
    assert isinstance(form, ResponseFormat)
    assert schema.encode() in msgspec.json.encode(form.response("queued"))
