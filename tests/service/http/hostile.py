"""Request bodies that try to hold a gateway's event loop: large, dense, deep, or slow to parse.

`corpus(limit)` yields each of them for every endpoint that reads a body.  A test sends them and measures the loop; a
fuzz target can mutate them.  No body is longer than `limit` bytes on the wire.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import NamedTuple

TEXT_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")


class Hostile(NamedTuple):
    """One request.  `chunk`: bytes in each part of a chunked body; 0 sends a Content-Length."""

    name: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    chunk: int = 0


def _filled(head: bytes, item: bytes, tail: bytes, limit: int, between: bytes = b"") -> bytes:
    """`head`, as many copies of `item` as fit into `limit` bytes, `tail`."""
    count = (limit - len(head) - len(tail)) // (len(item) + len(between))
    return head + between.join([item] * count) + tail


def _texts() -> dict[str, bytes]:
    """Pieces of JSON strings, by what is hard about them."""
    return {
        "prose": b"The quick brown fox jumps over the lazy dog. ",
        "one letter": b"a",
        "spaces": b" ",
        "digits": b"1234567890",
        "escaped newlines": b"\\n",
        "escaped quotes": b'\\"',
        "escaped backslashes": b"\\\\",
        "escaped letters": b"\\u00e9",
        "surrogate pairs": b"\\ud83d\\ude42",
        "mixed widths": "é🙂a".encode(),
        "emoji families": "👩‍👩‍👧".encode(),
        "combining marks": "e\u0301\u0323\u0302".encode(),
        "CJK": "日本語".encode(),
        "Arabic ligatures": "ﷺ".encode(),
        "special tokens": b"<s></s>",
    }


def _in_text(path: str, piece: bytes, limit: int) -> bytes:
    if path == "/v1/completions":
        return _filled(b'{"model":"tiny","max_tokens":1,"prompt":"', piece, b'"}', limit)
    if path == "/v1/chat/completions":
        head = b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"'
        return _filled(head, piece, b'"}]}', limit)
    return _filled(b'{"prompt":"', piece, b'"}', limit)


def _messages(limit: int) -> Iterator[tuple[str, bytes]]:
    """Values of `messages`, of about `limit` bytes."""
    yield "empty messages", _filled(b"[", b'{"role":"user"}', b"]", limit, b",")
    yield "one-letter messages", _filled(b"[", b'{"role":"user","content":"a"}', b"]", limit, b",")
    part = b'{"type":"text","text":"a"}'
    yield "content parts", _filled(b'[{"role":"user","content":[', part, b"]}]", limit, b",")
    yield "empty parts", _filled(b'[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]", limit, b",")
    head = b'[{"role":"assistant","content":"a","tool_calls":['
    yield "tool calls", _filled(head, b"{}", b"]}]", limit, b",")
    yield "a tool call of numbers", _filled(head + b'{"a":[', b"1", b"]}]}]", limit, b",")
    yield "a long name", _filled(b'[{"role":"user","content":"a","name":"', b"n", b'"}]', limit)
    yield "a long role", _filled(b'[{"role":"', b"r", b'","content":"a"}]', limit)
    yield (
        "4,000 messages of text",
        _filled(b"[", b'{"role":"user","content":"' + b"word " * (limit // 4000 // 5 - 8) + b'"}', b"]", limit, b","),
    )


def _prompts(limit: int) -> Iterator[tuple[str, bytes]]:
    """Values of `prompt`, of about `limit` bytes."""
    yield "token ids", _filled(b"[", b"5", b"]", limit, b",")
    yield (
        "token ids of 64 prompts",
        _filled(b"[", b"[" + b",".join([b"5"] * (limit // 128 - 4)) + b"]", b"]", limit, b","),
    )
    yield "64 texts", _filled(b"[", b'"' + b"word " * (limit // 64 // 5 - 4) + b'"', b"]", limit, b",")
    yield "empty texts", _filled(b"[", b'""', b"]", limit, b",")
    yield "one-letter texts", _filled(b"[", b'"a"', b"]", limit, b",")
    yield "empty lists", _filled(b"[", b"[]", b"]", limit, b",")
    yield "one-token lists", _filled(b"[", b"[5]", b"]", limit, b",")
    yield "floats", _filled(b"[", b"1.5", b"]", limit, b",")
    yield "mixed kinds", _filled(b'["a",', b"5", b"]", limit, b",")
    yield "unknown token ids", _filled(b"[", b"99999999", b"]", limit, b",")


def _fields(limit: int) -> Iterator[tuple[str, bytes]]:
    """Members that a small body gets on top."""
    yield "logit_bias", b'"logit_bias":{' + b",".join(b'"%d":1' % at for at in range(limit // 12)) + b"}"
    yield "stop strings", _filled(b'"stop":[', b'"ab"', b"]", limit, b",")
    yield "a long stop string", _filled(b'"stop":"', b"s", b'"', limit)
    yield "stop_token_ids", _filled(b'"stop_token_ids":[', b"5", b"]", limit, b",")
    yield "a long user", _filled(b'"user":"', b"u", b'"', limit)
    yield "a long cache_salt", _filled(b'"cache_salt":"', b"s", b'"', limit)
    yield "an unknown list", _filled(b'"x":[', b"0", b"]", limit, b",")
    yield "an unknown text", _filled(b'"x":"', b"\\t", b'"', limit)
    yield "unknown members", _filled(b'"y":0,', b'"x":0', b"", limit, b",")
    yield "nested lists", b'"x":' + b"[" * (limit // 2) + b"]" * (limit // 2)
    yield "nested objects", b'"tools":' + b'{"a":' * (limit // 6) + b"1" + b"}" * (limit // 6)
    yield "lists of lists", _filled(b'"tools":[', b"[]", b"]", limit, b",")
    yield "tools", _filled(b'"tools":[', b'{"type":"function","function":{"name":"f"}}', b"]", limit, b",")
    yield "an integer", _filled(b'"seed":', b"1", b"", limit)
    yield "a fraction", _filled(b'"top_p":0.', b"1", b"", limit)
    yield "an exponent", _filled(b'"top_p":1e', b"1", b"", limit)
    yield "a number in a field of any type", _filled(b'"tools":', b"7", b"", limit)
    yield "NaN", _filled(b'"top_p":NaN,"x":[', b"1", b"]", limit, b",")
    yield "null members", _filled(b'"z":[', b"null", b"]", limit, b",")


def _foreign(limit: int) -> Iterator[Hostile]:
    """Bodies of the formats that are translated into a chat."""
    messages, responses = (
        b'{"model":"tiny","max_tokens":1,"messages":[',
        b'{"model":"tiny","max_output_tokens":1,"input":',
    )
    turn = b'{"role":"user","content":['
    for name, item in (
        ("blocks of text", b'{"type":"text","text":"a"}'),
        ("results of tools", b'{"type":"tool_result","tool_use_id":"a","content":"b"}'),
        ("unknown blocks", b'{"type":"x"}'),
    ):
        yield Hostile(name, "/v1/messages", _filled(messages + turn, item, b"]}]}", limit, b","))
        yield Hostile(name, "/v1/messages/count_tokens", _filled(messages + turn, item, b"]}]}", limit, b","))
    nested = b'{"type":"tool_result","tool_use_id":"a","content":['
    deep = nested * (limit // 64) + b"]}" * (limit // 64)
    yield Hostile("nested results", "/v1/messages", messages + turn + deep + b"]}]}")
    yield Hostile("turns", "/v1/messages", _filled(messages, b'{"role":"user","content":"a"}', b"]}", limit, b","))
    yield Hostile(
        "one text", "/v1/messages", _filled(messages + b'{"role":"user","content":"', b"word ", b'"}]}', limit)
    )
    for name, item in (
        ("messages", b'{"role":"user","content":"a"}'),
        ("calls", b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}'),
        ("results of calls", b'{"type":"function_call_output","call_id":"a","output":"b"}'),
        ("reasoning", b'{"type":"reasoning","content":[{"type":"reasoning_text","text":"a"}]}'),
        ("empty items", b"{}"),
    ):
        yield Hostile(f"items: {name}", "/v1/responses", _filled(responses + b"[", item, b"]}", limit, b","))
    yield Hostile("one text", "/v1/responses", _filled(responses + b'"', b"word ", b'"}', limit))
    members = b'"a","metadata":{' + b",".join(b'"%d":""' % at for at in range(limit // 12)) + b"}}"
    yield Hostile("metadata", "/v1/responses", responses + members)


def _no_json(limit: int) -> Iterator[tuple[str, bytes]]:
    yield "spaces", b" " * limit
    yield "not UTF-8", b'{"model":"' + b"\xff" * (limit - 12) + b'"}'
    yield "zeros", b"\0" * limit
    yield "open lists", b"[" * limit
    yield "open objects", b'{"a":' * (limit // 5)
    yield "quotes", b'"' * limit
    yield "backslashes", b'"' + b"\\" * (limit - 2)
    yield "commas", b"," * limit


def _with(path: str, members: bytes) -> bytes:
    """A small valid request with further members."""
    small = {
        "/v1/completions": b'{"model":"tiny","max_tokens":1,"prompt":"a",',
        "/v1/chat/completions": b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a"}],',
        "/tokenize": b'{"prompt":"a",',
        "/detokenize": b'{"tokens":[5],',
    }
    return small[path] + members + b"}"


def corpus(limit: int) -> Iterator[Hostile]:
    """Every body, none longer than `limit` bytes.  Bodies are built when their turn comes."""
    room = limit - 128
    for path in TEXT_PATHS:
        for name, piece in _texts().items():
            # A text for /tokenize is encoded, which takes a second for each MiB; most others are too long for that.
            size = limit // 4 if path == "/tokenize" else limit
            yield Hostile(f"one text: {name}", path, _in_text(path, piece, size))
    for name, value in _messages(room):
        yield Hostile(name, "/v1/chat/completions", b'{"model":"tiny","max_tokens":1,"messages":' + value + b"}")
        yield Hostile(name, "/tokenize", b'{"messages":' + value + b"}")
    for name, value in _prompts(room):
        yield Hostile(name, "/v1/completions", b'{"model":"tiny","max_tokens":1,"prompt":' + value + b"}")
        cut = b'{"model":"tiny","max_tokens":1,"truncate_prompt_tokens":9,"echo":true,"prompt":' + value + b"}"
        yield Hostile(f"{name}, truncated and echoed", "/v1/completions", cut)
    yield Hostile("token ids", "/detokenize", _filled(b'{"tokens":[', b"5", b"]}", limit, b","))
    yield Hostile("large token ids", "/detokenize", _filled(b'{"tokens":[', b"123456", b"]}", limit, b","))
    for path in ("/v1/completions", "/v1/chat/completions", "/detokenize"):
        for name, members in _fields(room):
            yield Hostile(f"field: {name}", path, _with(path, members))
    yield from _foreign(room)
    for name, body in _no_json(limit):
        yield Hostile(f"no JSON: {name}", "/v1/completions", body)
    yield from _encoded(limit)


def _encoded(limit: int) -> Iterator[Hostile]:
    """Bodies whose transfer is the attack."""
    text = _in_text("/v1/completions", b"a", limit)
    for chunk in (1, 7, 4096):
        short = text if chunk > 1000 else _in_text("/v1/completions", b"a", limit // 8)
        yield Hostile(f"chunks of {chunk}", "/v1/completions", short, chunk=chunk)
    zipped = (("Content-Encoding", "gzip"),)
    yield Hostile("a gzip bomb", "/v1/completions", gzip.compress(b"\0" * (64 * limit), 6), zipped)
    yield Hostile("gzip of a text", "/v1/completions", gzip.compress(text, 1), zipped)
    yield Hostile("gzip of nothing like it", "/v1/completions", text[: limit // 2], zipped)
    yield Hostile("an unknown encoding", "/v1/completions", text, (("Content-Encoding", "snappy"),))


def chunked(body: bytes, size: int) -> bytes:
    """The body in HTTP's chunked coding."""
    parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[at : at + size] for at in range(0, len(body), size))]
    return b"".join(parts) + b"0\r\n\r\n"


def request(hostile: Hostile, host: str) -> bytes:
    """Return the complete request as sent over the wire, with the connection closed after the answer."""
    headers = {
        "Host": host,
        "Content-Type": "application/json",
        "Connection": "close",
        "X-Request-Timeout": "10",
        **dict(hostile.headers),
    }
    body = hostile.body
    if hostile.chunk:
        headers["Transfer-Encoding"] = "chunked"
        body = chunked(body, hostile.chunk)
    else:
        headers["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {hostile.path} HTTP/1.1\r\n{head}\r\n".encode() + body


SMALL = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()
