"""HTTP requests made by structured mutation of valid ones, each a function of seed and number.

A body begins as the base of its endpoint, with fields from the examples of docs/api.md: a field that the page gains is
tried without a change here.  Then values at random paths of the JSON are replaced, removed, repeated or nested, parts
of other bodies take their place, and the text or the headers are spoilt.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.system.chaos.shots import HEADERS, NUMBERS, TEXTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
Json = Any
HELLO: list[Json] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
# Histories with tools, parts and reasoning, in the format of each endpoint.
CHATS: list[list[Json]] = [
    HELLO,
    [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "content": "Hi"}, *HELLO],
    [
        *HELLO,
        {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain"}]},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "developer", "content": "x"}, *HELLO, {"role": "assistant", "function_call": CALL["function"]}],
    [*HELLO, {"role": "assistant", "content": "The sea"}],
]
TURNS: list[list[Json]] = [
    HELLO,
    [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "b"}]}],
        },
    ],
    [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
            ],
        }
    ],
]
ITEMS: list[Json] = [
    "Hello",
    HELLO,
    [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain"},
        {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
        {"type": "item_reference", "id": "msg_1"},
    ],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}, {"type": "input_file", "file_id": "y"}]}],
]
TOOLS: dict[str, list[Json]] = {
    "chat": [FUNCTION, {"type": "custom", "custom": {"name": "g"}}],
    "messages": [{"name": "f", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
    "responses": [
        {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
        {"type": "web_search"},
    ],
}
# Words of JSON that json.dumps does not write: they stand for a value that is replaced in the text.
RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-0",
    "1E400",
    "00",
    "1.",
    ".5",
    "0x1F",
    "1_000",
    "9" * 5000,
    "0." + "1" * 5000,
)
RAW_STRINGS = ('"\\ud83d"', '"\\udc00\\ud83d"', '"\\u0000"', '"\\x41"', '"a\nb"', "'a'", '"\\ud83d\\ud83d\\ude42"')
RAW_DEEP = ("[" * 900 + "]" * 900, '{"a":' * 300 + "1" + "}" * 300, "[" * 5000, '{"a":' * 100 + "1")
MARK = "\ue000raw\ue000"  # where a raw word goes
LEAVES: tuple[Json, ...] = (None, True, False, [], {}, "", [[]], [{}], {"": None}, "true", "1", "none", "auto", -1, 1.5)
ALONE = ("GET", "DELETE")  # methods without a body
IDS = (
    "resp_" + "0" * 32,
    "cmpl-" + "a" * 32,
    "chatcmpl-" + "a" * 32 + ":3",
    "msg_x",
    "%00",
    "%F0%9F%99%82",
    "..",
    "a" * 300,
)


@dataclass
class Request:
    """One request: bytes to send, and what its client does."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    leave_after: int = -1  # bytes of the answer after which its client leaves; -1: it reads to the end
    sent: int = -1  # bytes of the body that are sent before its client leaves; -1: all
    changes: list[str] = field(default_factory=list)  # what was done to it

    @property
    def answered(self) -> bool:
        """Whether an answer is owed."""
        return self.leave_after < 0 and self.sent < 0

    def bytes(self) -> bytes:
        """Return what goes over the wire, the connection closed after the answer."""
        headers = {"Host": "localhost", "Connection": "close", "Content-Type": "application/json"} | self.headers
        if self.method not in ALONE:
            headers["Content-Length"] = str(len(self.body))
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        sent = self.body if self.sent < 0 else self.body[: self.sent]
        return f"{self.method} {self.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + sent

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} {', '.join(self.changes)}\n    {self.body[:1200]!r}"


def _section(title: str, page: str) -> str:
    found = re.search(rf"^(#+) {re.escape(title)}$", page, re.MULTILINE)
    assert found is not None, title
    rest = page[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


@functools.cache
def examples() -> dict[str, list[dict[str, Json]]]:
    """Fields of bodies by kind of endpoint, each as docs/api.md shows it."""
    page = PAGE.read_text(encoding="utf-8")
    kinds = {
        "Both endpoints": ("completions", "chat"),
        "Completions only": ("completions",),
        "Chat only": ("chat",),
        "Harmless fields": ("completions", "chat"),
        "Refused fields": ("refused",),
        "Tokenize and detokenize": ("tokenize",),
        "Messages": ("messages",),
        "Responses": ("responses",),
    }
    found: dict[str, list[dict[str, Json]]] = {}
    for title, names in kinds.items():
        for line in _section(title, page).splitlines():
            for text in re.findall(r"`(\{.*?\})`(?= *\|)", line) if line.startswith("| `") else ():
                try:
                    shown = json.loads(text)
                except ValueError:
                    continue
                for name in names:
                    found.setdefault(name, []).append(shown)
    return found


Base = Callable[[random.Random], dict[str, Json]]
BASES: dict[str, tuple[str, Base]] = {
    "/v1/completions": ("completions", lambda dice: {"prompt": dice.choice(("Hello", [5, 6], ["a", "b"], [[5], [6]]))}),
    "/v1/chat/completions": ("chat", lambda dice: {"messages": dice.choice(CHATS)}),
    "/v1/chat/completions/batch": ("chat", lambda dice: {"messages": [dice.choice(CHATS), dice.choice(CHATS)]}),
    "/invocations": ("chat", lambda dice: dice.choice(({"messages": dice.choice(CHATS)}, {"prompt": "Hello"}))),
    "/generative_scoring": ("scoring", lambda dice: {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 6]}),
    "/v1/messages": ("messages", lambda dice: {"messages": dice.choice(TURNS), "max_tokens": 8}),
    "/v1/messages/count_tokens": ("messages", lambda dice: {"messages": dice.choice(TURNS)}),
    "/v1/responses": ("responses", lambda dice: {"input": dice.choice(ITEMS)}),
    "/v1/responses/compact": ("responses", lambda dice: {"input": dice.choice(ITEMS)}),
    "/v1/responses/input_tokens": ("responses", lambda dice: {"input": dice.choice(ITEMS)}),
    "/tokenize": ("tokenize", lambda dice: dice.choice(({"prompt": "Hello"}, {"messages": dice.choice(CHATS)}))),
    "/detokenize": ("detokenize", lambda dice: {"tokens": [5, 6]}),
}
WEIGHTS = (5, 6, 1, 1, 2, 5, 1, 5, 1, 1, 1, 1)
LIMITS = {"messages": "max_tokens", "responses": "max_output_tokens", "chat": "max_tokens", "completions": "max_tokens"}
SCORING: list[dict[str, Json]] = [{"apply_softmax": False}, {"item_first": True}, {"model": "tiny"}, {"timeout": 5}]


class Mutator:
    """Makes requests; stores ids of answers that were begun, to resume them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.ids: list[str] = []  # ids of recent answers, events and responses

    def request(self, number: int) -> Request:
        """Nearly a function of seed and number: ids to resume depend on earlier answers."""
        dice = random.Random(f"{self._seed}/{number}")
        if dice.random() < 0.12:
            return self._comeback(dice)
        path = dice.choices(list(BASES), WEIGHTS)[0]
        kind, base = BASES[path]
        body = copy.deepcopy(base(dice))
        changes: list[str] = []
        self._add_fields(dice, kind, body, changes)
        for _ in range(dice.choices((0, 1, 2, 3), (5, 5, 3, 1))[0]):
            mutate(dice, body, changes)
        request = Request("POST", path, _text(dice, body, changes), changes=changes)
        _spoil_text(dice, request)
        _choose_headers(dice, request, number)
        if self.ids and dice.random() < 0.03:
            request.headers["Last-Event-ID"] = dice.choice(self.ids)
        how = dice.random()
        if how < 0.04:
            request.sent = dice.randint(0, len(request.body))
        elif how < 0.14:
            request.leave_after = dice.choice((0, 1, 300, dice.randint(0, 5000)))
        return request

    def _add_fields(self, dice: random.Random, kind: str, body: dict[str, Json], changes: list[str]) -> None:
        """Add fields as the documentation shows them."""
        if kind in LIMITS and dice.random() < 0.7:
            body[LIMITS[kind]] = dice.randint(1, 40)
        if kind in LIMITS and dice.random() < 0.5:
            body["stream"] = True
        if kind in TOOLS and dice.random() < 0.3:
            body["tools"] = copy.deepcopy(dice.sample(TOOLS[kind], dice.randint(1, len(TOOLS[kind]))))
        shown = SCORING if kind == "scoring" else examples().get(kind, [])
        for _ in range(dice.choices((0, 1, 2, 4), (3, 4, 3, 1))[0] if shown else 0):
            more = dice.choice(shown if dice.random() < 0.97 else examples()["refused"])
            kept = {name: value for name, value in more.items() if name not in ("messages", "input", "model", "prompt")}
            body.update(copy.deepcopy(kept or more))
            changes += kept or more
        if kind == "responses" and self.ids and dice.random() < 0.1:
            body["previous_response_id"] = dice.choice(self.ids)

    def _comeback(self, dice: random.Random) -> Request:
        """Ask for an answer that was begun, or for one that never was."""
        one = dice.choice(self.ids) if self.ids and dice.random() < 0.7 else dice.choice(IDS)
        if dice.random() < 0.3:
            at = dice.randrange(len(one))
            one = one[:at] + dice.choice("0:,9f-x%") + one[at + dice.randint(0, 3) :]
        queries = ("", "?stream=true", "?stream=true&starting_after=1", "?starting_after=x&stream=true", "?limit=0")
        more = ("?limit=1&order=asc", "?order=up", "?after=msg_1", "?stream=%ff", "?limit=9999999999999999999")
        method, path = dice.choice(
            (
                ("GET", f"/v1/streams/{one}"),
                ("DELETE", f"/v1/streams/{one}"),
                ("GET", f"/v1/responses/{one}{dice.choice(queries)}"),
                ("DELETE", f"/v1/responses/{one}"),
                ("POST", f"/v1/responses/{one}/cancel"),
                ("GET", f"/v1/responses/{one}/input_items{dice.choice(more)}"),
                ("POST", dice.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))),
                ("GET", dice.choice(("/v1/models", f"/v1/models/{one}", "/tokenizer_info", "/load", "/openapi.json"))),
                ("POST", "/reset_prefix_cache" + dice.choice(("", "?reset_external=true", "?x=%ff"))),
            )
        )
        request = Request(method, path, changes=["comeback"])
        if method == "POST" and path.count("/") <= 3 and "reset" not in path:
            request.headers["Last-Event-ID"] = one
        if dice.random() < 0.1:
            request.leave_after = dice.randint(0, 2000)
        return request


def places(value: Json, path: str = "") -> Iterator[tuple[Json, Any, str]]:
    """(container, key, path) of everything within a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        where = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
        yield value, key, where
        yield from places(inner, where)


def mutate(dice: random.Random, body: dict[str, Json], changes: list[str]) -> None:
    """Change one place of a body."""
    every = list(places(body))
    if not every:
        return
    container, key, path = dice.choice(every)
    value = container[key]
    how = dice.choice(list(_CHANGES))
    changes.append(f"{path[:60]} {how}")
    _CHANGES[how](dice, container, key, value)


def _replace(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    container[key] = copy.deepcopy(dice.choice((*LEAVES, *NUMBERS[:8], *TEXTS)))


def _raw(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    container[key] = MARK


def _remove(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    del container[key]


def _wrap(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    container[key] = dice.choice(([value], {"a": value}, {"type": "text", "text": value}, json.dumps(value)))


def _repeat(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    if isinstance(value, list) and value:
        container[key] = value * dice.choice((2, 3, 70))
    elif isinstance(value, str):
        container[key] = value * dice.choice((2, 70, 3000))
    else:
        container[key] = [value] * dice.choice((2, 70))


def _unknown(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    if isinstance(container, dict):
        container[dice.choice(("unknown", "", "\x00", "a.b[0]", "é" * 80, str(key).upper(), "\ud83d"))] = value
    else:
        container.append(None)


def _foreign(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    """Put a part of any other body here."""
    kind, base = BASES[dice.choice(list(BASES))]
    parts = list(places(base(dice))) + list(places(dice.choice(examples().get(kind, [{"a": 1}]))))
    other, at, _ = dice.choice(parts)
    container[key] = copy.deepcopy(other[at])


def _mistype(dice: random.Random, container: Json, key: Any, value: Json) -> None:
    if isinstance(value, str):
        container[key] = dice.choice((len(value), [value], {"text": value}, value.upper(), value + " ", None))
    elif isinstance(value, (int, float)):
        container[key] = dice.choice((str(value), -value, value * 1e9, value + 0.5, [value], bool(value)))
    else:
        container[key] = dice.choice((json.dumps(value), None, 1, "x"))


_CHANGES: dict[str, Callable[[random.Random, Json, Any, Json], None]] = {
    "replaced": _replace,
    "raw": _raw,
    "removed": _remove,
    "wrapped": _wrap,
    "repeated": _repeat,
    "beside it an unknown one": _unknown,
    "a foreign part": _foreign,
    "of another type": _mistype,
}


def _text(dice: random.Random, body: dict[str, Json], changes: list[str]) -> bytes:
    """Write a body as JSON, raw words in their places."""
    text = json.dumps(body, ensure_ascii=dice.random() < 0.5)
    for mark in (json.dumps(MARK), json.dumps(MARK, ensure_ascii=False)):
        while mark in text:
            word = dice.choice((*RAW, *RAW_STRINGS, *RAW_DEEP))
            changes.append(f"raw {word[:12]}")
            text = text.replace(mark, word, 1)
    return text.encode("utf-8", "surrogatepass")


def _spoil_text(dice: random.Random, request: Request) -> None:
    body, how = request.body, dice.random()
    if how > 0.08 or not body:
        return
    at = dice.randrange(len(body))
    spoilt = {
        "doubled": b"{" + body[1:-1] + b"," + body[1:],
        "cut": body[:at],
        "a byte": body[:at] + bytes([dice.randrange(256)]) + body[at + dice.randint(0, 2) :],
        "a mark in front": b"\xef\xbb\xbf" + body,
        "UTF-16": body.decode("utf-8", "replace").encode("utf-16"),
        "UTF-32": body.decode("utf-8", "replace").encode("utf-32-le"),
        "Latin-1": body.decode("utf-8", "replace").encode("latin-1", "replace"),
        "something after": body + dice.choice((b"}", b"{}", b"\x00", b" " * 5000, b"//")),
        "no object": dice.choice((b"[]", b"null", b"1", b'"a"', b"", b"true", b"[" + body + b"]")),
    }
    what = dice.choice(list(spoilt))
    request.body = spoilt[what]
    request.changes.append(f"text: {what}")


# Headers that leave the HTTP in order, and their values.
OWN = {
    "X-Max-Queue-Wait": ("0", "5", "-1", "nan", "x"),
    "X-Resumable": ("1", "0", "maybe"),
    "tracestate": ("a=1", "x" * 600),
    "Origin": ("http://localhost", "http://attacker.example", "null", "x" * 300),
    "X-Api-Key": ("a", "x", ""),
    "anthropic-version": ("2023-06-01", ""),
    "anthropic-beta": ("x,y", ""),
    "Accept-Encoding": ("gzip", "*;q=0"),
    "Range": ("bytes=0-1",),
    "If-None-Match": ('"x"',),
    "Cookie": ("a=b; c", "\x80"),
}
SOUND = {
    name: values
    for name, values in (HEADERS | OWN).items()
    if name not in ("Content-Length", "Transfer-Encoding", "Expect", "Authorization")
}


def _choose_headers(dice: random.Random, request: Request, number: int) -> None:
    for name in dice.sample(list(SOUND), dice.choices((0, 1, 2, 3), (6, 3, 2, 1))[0]):
        value = dice.choice(SOUND[name]).replace("%d", str(number % 40)).replace("%032x", f"{number:032x}")
        request.headers[name] = value.encode("latin-1", "replace").decode("latin-1")
    if dice.random() < 0.03:
        request.headers["Authorization"] = dice.choice(("", "Bearer x", "Bearer", "Basic eDp4", "Bearer b"))
