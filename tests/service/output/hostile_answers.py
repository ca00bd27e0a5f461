"""Hostile answers: what a client can make a model write, with `allowed_token_ids` or a grammar, asked for in every way.

    an answer x (endpoint, streamed or not, stop strings, log probabilities, n) --Asker--> text, and the longest turn
                                             the same again under its Idempotency-Key, and resumed from the middle

No answer may hold the event loop of a gateway, fail, or lose text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientSession
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.engine.wire.messages import Finish, Generate
from quire.service.api.anthropic.messages import read_input
from quire.service.output.regions import known
from quire.service.text.tokenizer import Tokenizer
from tests.pace import Patience
from tests.service.fakes import TOOLS_TEMPLATE, FakeEngine, byte_level, with_template
from tests.service.gateways import MeasuredGateway, settings
from tests.service.output.test_linear_answers import BEGINNINGS, UNITS

NOTATIONS = sorted(known().response_templates)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
LONG_TOKENS = (
    " " * 128,
    "ab" * 64,
    "'a': 1, " * 8,
    "1," * 32,
    "[{" * 16,
    "\\\\\\u" * 8,
    "\\ud83d" * 8,
    "</" * 32,
    "\n" * 64,
)
SHAPES = [
    *itertools.product(BEGINNINGS, UNITS),
    *itertools.product(
        [
            "<tool_call>\n<function=f>\n<parameter=o>\n{",
            "<tool_call>f<arg_key>o</arg_key><arg_value>{",
            '<tool_call>{"name": "f", "arguments": "{',
            '[TOOL_CALLS] [{"name": "f", "arguments": {"o": "',
            '<think>hm<tool_call>{"name": "f", "arguments": {"a": "',
            "",
        ],
        [*LONG_TOKENS, '\\"', "'"],
    ),
]
PROPERTIES = {"a": {"type": "string"}, "o": {"type": "object"}, "l": {"type": "array"}, "i": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOLS: dict[str, Any] = {
    "/v1/chat/completions": [FUNCTION],
    "/v1/messages": [{"name": "f", "input_schema": SCHEMA}],
    "/v1/responses": [{"type": "function", "name": "f", "parameters": SCHEMA}],
}
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO},
    "/v1/responses": {"input": "Hi"},
}
PATHS = list(BODIES)
SCORES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": 3},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 3},
    "/v1/responses": {"include": ["message.output_text.logprobs"]},
}
MAX_SCORED = 8000  # characters of an answer with log probabilities: 4 entries each, 4 choices, 131,072 in all
READY_S = 60.0
TRIES = 3
LIMIT_S = 0.05
BURST = 64  # tokens per step and choice
STOPS = [("ab" * 40)[at:] + char for at in range(32) for char in "xy"]  # 64 of them: none matches, each begins anew


class Case(NamedTuple):
    """One answer, and how it is asked for."""

    notation: str
    answer: str
    path: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        given = {name: value for name, value in self.fields.items() if name not in ("tools", "stop", "stop_sequences")}
        return f"{self.notation}, {self.path}, {self.answer[:60]!r} x {len(self.answer)}, {given}"


def tokenizer_of(folder: Path, notation: str) -> Tokenizer:
    """A tokenizer of a model that ships a response template.  Its vocabulary has long tokens, as published ones do."""
    made = with_template(
        byte_level(folder / notation), TOOLS_TEMPLATE, response_template=known().response_templates[notation]
    )
    path = str(made / "tokenizer.json")
    backend = Backend.from_file(path)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in LONG_TOKENS])
    backend.save(path)
    return Tokenizer(str(made))


def cases(seed: int, chars: int) -> Iterator[Case]:
    """Random cases without end, with answers of about `chars` characters."""
    dice = random.Random(seed)
    while True:
        notation, path = dice.choice(NOTATIONS), dice.choice(PATHS)
        beginning, unit = dice.choice(SHAPES)
        answer = beginning + unit * (chars // len(unit))
        fields = fields_of(
            path,
            tools="tool_calls" in known().response_templates[notation]["fields"] and dice.random() < 0.8,
            stops=dice.random() < 0.5,
            scores=dice.random() < 0.4 and len(answer) <= MAX_SCORED,
            n=dice.choice((1, 1, 2, 4)),
        )
        yield Case(notation, answer, path, fields)


def fields_of(path: str, *, tools: bool, stops: bool, scores: bool, n: int) -> dict[str, Any]:
    """Fields of a request, as far as its endpoint has them."""
    fields: dict[str, Any] = {}
    if tools and path in TOOLS:
        fields["tools"] = TOOLS[path]
    if stops:
        fields["stop_sequences" if path == "/v1/messages" else "stop"] = STOPS
    if n > 1 and path in ("/v1/completions", "/v1/chat/completions"):
        fields["n"] = n
    return fields | (SCORES.get(path, {}) if scores else {})


Texts = dict[tuple[int, str], str]  # text by choice and region


class Answer(NamedTuple):
    """What a client makes of an answer, and the ids of its events."""

    status: int
    texts: Texts
    ids: list[str]
    failed: str = ""


class Asker:
    """Asks for answers that a scripted engine gives."""

    def __init__(self, session: ClientSession, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self._session, self._engine, self._tokenizer = session, engine, tokenizer
        self._keys = itertools.count()

    async def ask(self, case: Case, *, stream: bool, key: str = "", last: str = "") -> Answer:
        """Send the request of a case.  `key`: its Idempotency-Key.  `last`: id of the event after which to resume."""
        tokens = self._tokenizer._encode(case.answer, special=False)

        def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
            return tokens, Finish("length")

        self._engine.script = script
        limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
        body = {"model": "tiny", limit: len(tokens), "stream": stream, **BODIES[case.path], **case.fields}
        headers = {"Last-Event-ID": last} if last else {"X-Resumable": "1", "Idempotency-Key": key}
        async with self._session.post(case.path, json=body, headers=headers) as response:
            data = await response.read()
        return await asyncio.to_thread(read_answer, response.status, data, stream)

    async def ask_in_every_way(self, case: Case) -> list[str]:
        """Ask streamed and complete, each again, streamed ones thrice at once; resume.  Return what differs."""
        number, wrong = next(self._keys), list[str]()
        first: Answer | None = None
        for stream in (True, False):
            key = f"{number}-{stream}"
            once = await self.ask(case, stream=stream, key=key)
            again = await asyncio.gather(*(self.ask(case, stream=stream, key=key) for _ in range(3 if stream else 1)))
            rest = [await self.ask(case, stream=True, last=once.ids[len(once.ids) // 2])] if once.ids else []
            first = first or once
            for one in (once, *again, *rest):
                if one.status != 200 or one.failed:
                    wrong.append(f"stream={stream}: status {one.status} {one.failed[:300]}")
            wrong += [
                f"stream={stream}: {_difference(first.texts, one.texts)}"
                for one in (once, *again)
                if one.texts != first.texts
            ]
            for one in rest:
                if not all(first.texts.get(place, "").endswith(text) for place, text in one.texts.items()):
                    wrong.append("the resumed text is not the end of the answer")
        assert first is not None
        if case.path == "/v1/completions" and any(text != case.answer for text in first.texts.values()):
            wrong.append("a completion is not what the model wrote")
        return wrong


class Found(NamedTuple):
    """What came of one case."""

    turn_s: float  # CPU seconds of the longest turn of the gateway's loop, the minimum of TRIES runs
    wrong: list[str]


class World:
    """A gateway on a thread of its own, a scripted engine, and one who asks."""

    def __init__(self, folder: Path, redis_url: str, notation: str) -> None:
        namespace = uuid.uuid4().hex[:8]
        tokenizer = tokenizer_of(folder, notation)
        config = settings(
            model=str(folder),
            served_name="tiny",
            namespace=namespace,
            redis_url=redis_url,
            default_timeout_s=600.0,
            max_timeout_s=600.0,
        )
        self._gateway = MeasuredGateway(config, tokenizer)
        self._engine = FakeEngine(redis_url, namespace, lambda generate, index: ([], None))
        self._engine.burst, self._engine.free_tokens = BURST, 10_000_000
        blocks = {"total_blocks": 1_000_000, "free_blocks": 1_000_000}
        self._engine.load_changes = {
            "max_model_len": 1_000_000,
            "vocab_size": len(tokenizer.vocabulary.table),
            **blocks,
        }
        self._tokenizer = tokenizer

    async def __aenter__(self) -> World:
        await asyncio.to_thread(self._gateway.__enter__)
        await self._engine.__aenter__()
        self._session = ClientSession(base_url=self._gateway.served.url)
        self._asker = Asker(self._session, self._engine, self._tokenizer)
        bound = Patience(READY_S)
        while True:
            async with self._session.get("/ready") as response:
                if response.status == 200:
                    return self
            assert bound.lasts()
            await asyncio.sleep(0.02)

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()
        await self._engine.__aexit__()
        await asyncio.to_thread(self._gateway.__exit__)

    async def ask(self, case: Case, tries: int = TRIES) -> Found:
        """Ask for a case in every way.  A turn of the gateway that is long is long each time, so the minimum counts."""
        turns, wrong = list[float](), list[str]()
        for _ in range(tries):
            with self._gateway.measured() as turns_s:
                wrong = await self._asker.ask_in_every_way(case)
            turns += turns_s
            if wrong or turns[-1] <= LIMIT_S / 2:
                break
        return Found(min(turns), wrong)


def _difference(one: Texts, other: Texts) -> str:
    for place in sorted(one.keys() | other.keys()):
        left, right = one.get(place, ""), other.get(place, "")
        if left != right:
            at = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), -1)
            return (
                f"{place} has {len(left)} and {len(right)} characters: {left[at : at + 40]!r}, {right[at : at + 40]!r}"
            )
    return "nothing"


def read_answer(status: int, data: bytes, stream: bool) -> Answer:
    """Read an answer of any of the four formats."""
    if status != 200:
        return Answer(status, {}, [], data.decode(errors="replace"))
    reader = _Reader()
    if not stream:
        reader.read_whole(json.loads(data))
        return Answer(status, reader.texts(), [])
    lines = data.split(b"\n")
    for line in lines:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("error"):
                return Answer(status, {}, [], line.decode())
            reader.read_event(event)
    return Answer(status, reader.texts(), [line[4:].decode() for line in lines if line.startswith(b"id: ")])


class _Reader:
    """Adds up the texts of an answer.  Arguments of `/v1/messages` are compared as objects: {} if they are none."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, str], list[str]] = {}
        self._block = ""  # the open content block

    def texts(self) -> Texts:
        joined = {place: "".join(parts) for place, parts in self._parts.items()}
        return {
            place: json.dumps(json.loads(bytes(read_input(text)))) if place[1].startswith("input") else text
            for place, text in joined.items()
            if text
        }

    def _add(self, region: str, text: str | None, choice: int = 0) -> None:
        self._parts.setdefault((choice, region), []).append(text or "")

    def _add_calls(self, calls: list[dict[str, Any]], choice: int) -> None:
        for at, call in enumerate(calls):
            region = f"call {call.get('index', at)}"
            self._add(region, call["function"].get("name"), choice)
            self._add(region, call["function"]["arguments"], choice)

    def read_event(self, event: dict[str, Any]) -> None:
        for one in event.get("choices", ()):
            self._add_message(one.get("delta", one), one["index"])
        kind = event.get("type", "")
        if kind == "content_block_start":
            self._block = f"input {event['index']}"
            self._add("names", event["content_block"].get("name"))
        elif kind == "content_block_delta":
            delta = event["delta"]
            self._add("content", delta.get("text"))
            self._add("reasoning", delta.get("thinking"))
            if "partial_json" in delta:
                self._add(self._block, delta["partial_json"])
        elif kind == "response.output_item.done":
            self._add_block(event["item"], event["output_index"])
        elif kind == "response.output_text.delta":
            self._add("deltas", event["delta"])

    def _add_message(self, message: dict[str, Any], choice: int) -> None:
        self._add("content", message.get("text") or message.get("content"), choice)
        self._add("reasoning", message.get("reasoning_content"), choice)
        self._add_calls(message.get("tool_calls") or [], choice)

    def read_whole(self, answer: dict[str, Any]) -> None:
        for one in answer.get("choices", ()):
            self._add_message(one.get("message", one), one["index"])
        for at, block in enumerate(answer.get("content", answer.get("output", ()))):
            self._add_block(block, at)
            if block["type"] == "message":
                self._add("deltas", "".join(part["text"] for part in block["content"]))

    def _add_block(self, block: dict[str, Any], at: int) -> None:
        """Add a content block of a message, or an item of a response."""
        self._add("names", block.get("name"))
        self._add("content", block.get("text"))
        self._add("reasoning", block.get("thinking"))
        self._add(f"arguments {at}", block.get("arguments"))
        if "input" in block:
            self._add(f"input {at}", json.dumps(block["input"]))
        for part in block.get("content") or ():
            self._add(block["type"], part["text"])
