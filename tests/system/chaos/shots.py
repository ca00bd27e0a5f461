"""Hostile requests, each a function of its seed: bytes to send, and what the client does with the connection.

Bodies begin as valid ones, made from the fields of the structs in service/api/bodies.py, so that a new field is tried
without a change here.  Then some are mutated: wrong types, absurd numbers, missing and doubled fields, broken bytes.
"""

from __future__ import annotations

import functools
import json
import random
import types
import typing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.service.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.service.http.hostile import corpus

VOCAB = 100
CORPUS_BYTES = 64 * 1024  # limit of each body in the corpus: the stall test has larger ones
MODEL = "tiny"
POSTS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GETS = (
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/%00",
    "/health",
    "/ready",
    "/ping",
    "/version",
    "/metrics",
    "/nowhere",
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW", "post")
TEXTS = (
    "",
    "a",
    "hello world",
    "\x00",
    "\u202e",
    "\ud83d",
    "🙂" * 9,
    "日本語",
    "</s><|user|>",
    "a" * 3000,
    "%s%n{}",
    "NaN",
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**70,
    10**400,
    0.5,
    -0.5,
    1e-320,
    1e308,
)
HEADERS = {
    "X-Request-Timeout": ("0.5", "3", "0", "-1", "1e400", "nan", "", "soon", "9" * 400),
    "Idempotency-Key": ("k", "key-%d", "", "a b", "é", "x" * 256, "x" * 255),
    "Last-Event-ID": (
        "",
        "cmpl-1:1",
        "cmpl-%032x:17",
        "chatcmpl-%032x:0:done",
        "cmpl-" + "0" * 32 + ":" + "9" * 20,
        ":",
        "🙂",
    ),
    "traceparent": ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "00-0-0-0", "ff" * 40, ""),
    "Content-Type": (
        "application/json",
        "text/plain",
        "application/json; charset=utf-16",
        "multipart/form-data",
        "",
        "/;=",
    ),
    "Content-Encoding": ("gzip", "deflate", "br", "identity", "gzip, gzip", "zstd", "x"),
    "X-Resumable": ("1", "true", "maybe"),
    "X-Request-Id": ("id-1", "a\tb", "x" * 4000, "\xff"),
    "Authorization": ("Bearer x", "Bearer", "Basic eDp4", "\x7f"),
    "Accept": ("text/event-stream", "*/*"),
    "Expect": ("100-continue", "a miracle"),
    "Transfer-Encoding": ("chunked", "gzip, chunked", "identity"),
    "Content-Length": ("0", "-1", "5", "99999999999999999999", "1e3", "+7"),
}
GARBAGE = (
    b"",
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 3000 + b"\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n\tfolded\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
)


@dataclass
class Shot:
    """One connection: what is sent, in parts, and when its client leaves."""

    parts: list[bytes]
    sound: bool  # the HTTP is in order, so that an answer is owed
    pause_s: float = 0.0  # between two parts
    leave_after: int = -1  # bytes of the answer; -1: it reads to the end
    name: str = ""
    notes: list[str] = field(default_factory=list)  # what was done to it


class Shooter:
    """Makes shots; stores ids of answers that were begun, to resume them."""

    def __init__(self, seed: int, avoid: frozenset[str] = frozenset()) -> None:
        """`avoid`: fields of bodies that are never set."""
        self._seed, self._avoid = seed, avoid
        self.ids: list[str] = []  # event ids seen lately
        self._extra = extra_bodies()

    def shot(self, number: int) -> Shot:
        """Nearly a function of seed and number: ids to resume depend on earlier answers."""
        dice = random.Random(f"{self._seed}/{number}")
        kind = dice.random()
        if kind < 0.03:
            return Shot([dice.choice(GARBAGE)], False, name="garbage")
        if kind < 0.05:
            noise = bytes(dice.randrange(256) for _ in range(dice.randint(1, 400)))
            return Shot([dice.choice((b"", b"GET /ping HTTP/1.1\r\n")) + noise + b"\r\n\r\n"], False, name="noise")
        if kind < 0.11:
            return self._small(dice)
        if kind < 0.2:
            return self._comeback(dice)
        return self._post(dice, number)

    def _small(self, dice: random.Random) -> Shot:
        method = dice.choice(METHODS) if dice.random() < 0.3 else "GET"
        path = dice.choice((*GETS, *POSTS))
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        return Shot([head.encode()], method.isupper(), name=f"{method} {path}")

    def _comeback(self, dice: random.Random) -> Shot:
        """With an event id that was seen, perhaps spoilt, as a GET or as the header of a POST."""
        event = dice.choice(self.ids) if self.ids and dice.random() < 0.8 else f"cmpl-{dice.getrandbits(128):032x}:3"
        if dice.random() < 0.4:
            at = dice.randrange(len(event))
            event = event[:at] + dice.choice("0:,9f-x%é") + event[at + dice.randint(0, 3) :]
        if dice.random() < 0.5:
            quoted = "".join(c if c.isalnum() or c in ":,-" else f"%{ord(c) % 256:02x}" for c in event)
            head = f"GET /v1/streams/{quoted} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        else:
            path = dice.choice(("/v1/completions", "/v1/chat/completions"))
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nLast-Event-ID: {event}\r\n"
            head += "Content-Length: 0\r\n\r\n"
        leave = dice.randint(0, 2000) if dice.random() < 0.2 else -1
        return Shot([head.encode("latin-1", "replace")], True, leave_after=leave, name="comeback", notes=[event])

    def _post(self, dice: random.Random, number: int) -> Shot:
        path = dice.choices(list(POSTS), (5, 4, 1, 1))[0]
        notes: list[str] = []
        if self._extra and dice.random() < 0.02:
            path, body = dice.choice(self._extra)
        else:
            body = self._body(dice, path, notes)
        headers = {
            "Host": "localhost",
            "Content-Type": "application/json",
            "Connection": "close",
            "Content-Length": str(len(body)),
        }
        if dice.random() < 0.5:
            headers["X-Request-Timeout"] = dice.choice(("0.5", "1", "3"))
        sound = True
        for name in dice.sample(list(HEADERS), dice.choices((0, 1, 2, 3), (6, 3, 2, 1))[0]):
            value = dice.choice(HEADERS[name])
            headers[name] = value.replace("%d", str(number % 50)).replace("%032x", f"{number:032x}")
            notes.append(f"{name}: {value[:40]}")
            sound &= name not in ("Content-Length", "Transfer-Encoding", "Expect", "X-Request-Id", "Authorization")
            sound &= name != "Content-Encoding"  # a body that it belies may end in a reset
            sound &= headers[name].isascii()
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        sent = head.encode("latin-1", "replace") + body
        shot = Shot([sent], sound, name=path, notes=notes)
        how = dice.random()
        if how < 0.05:  # a partial body, and then nothing
            shot.parts, shot.sound = [sent[: dice.randint(1, len(sent))]], False
            shot.leave_after, shot.pause_s = 0, dice.random() * 0.2
        elif how < 0.1:  # in pieces
            cut = dice.randint(1, len(sent))
            shot.parts, shot.pause_s = [sent[:cut], sent[cut:]], dice.random() * 0.05
        elif how < 0.25:  # its client leaves in the middle
            shot.leave_after = dice.choice((0, 1, 200, dice.randint(0, 20_000)))
        return shot

    def _body(self, dice: random.Random, path: str, notes: list[str]) -> bytes:
        kind = POSTS[path]
        fields = _base(dice, path)
        known = {one.name: one.type for one in msgspec.structs.fields(kind) if one.name not in self._avoid}
        for name in dice.sample(list(known), min(len(known), dice.choices((0, 1, 2, 4), (3, 4, 3, 2))[0])):
            if name not in ("model", "prompt", "messages", "tokens", "max_tokens") and dice.random() < 0.9:
                fields[name] = _typed(dice, known[name], name)
                notes.append(name)
        for _ in range(dice.choices((0, 1, 2), (5, 3, 1))[0]):
            name = dice.choice([*known, "unknown"])
            if dice.random() < 0.2:
                fields.pop(name, None)
                notes.append(f"without {name}")
            else:
                fields[name] = _nasty(dice, 0)
                notes.append(f"{name} nasty")
        body = json.dumps(fields, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
        spoil = dice.random()
        if spoil < 0.02:
            notes.append("doubled")
            return b"{" + body[1:-1] + b"," + body[1:]
        if spoil < 0.06 and body:
            notes.append("spoilt")
            at = dice.randrange(len(body))
            return body[:at] + bytes([dice.randrange(256)]) + body[at + dice.randint(0, 2) :]
        if spoil < 0.07:
            notes.append("deep")
            return b'{"model":"tiny","prompt":' + b"[" * 5000
        return body


def _base(dice: random.Random, path: str) -> dict[str, Any]:
    """A valid body of moderate size."""
    text = " ".join(dice.choice(("hello", "world", "of", "paging")) for _ in range(dice.randint(1, 20)))
    ids = [dice.randrange(2, VOCAB) for _ in range(dice.randint(1, 60))]
    common = {"model": MODEL, "max_tokens": dice.randint(1, 40), "stream": dice.random() < 0.6}
    if common["stream"] and path.startswith("/v1/") and dice.random() < 0.5:
        common["stream_options"] = {"include_ids": True}
    if path == "/v1/completions":
        return {**common, "prompt": dice.choice((text, ids, [ids, ids[:3]], ids))}
    if path == "/v1/chat/completions":
        return {**common, "messages": [{"role": "user", "content": text}]}
    if path == "/tokenize":
        return {"prompt": text}
    return {"tokens": ids}


def _typed(dice: random.Random, kind: Any, name: str) -> Any:
    """A value of a field's type, mostly a plausible one."""
    options = [one for one in typing.get_args(kind) if one is not types.NoneType]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return _typed(dice, dice.choice(options), name)
    origin = typing.get_origin(kind)
    if kind is bool:
        return dice.random() < 0.5
    if kind is int:
        ids = name.endswith("ids") or name == "tokens"
        return dice.choice((0, 1, 2, 3, 5, -1, 20, dice.randrange(VOCAB))) if not ids else dice.randrange(-1, VOCAB + 2)
    if kind is float:
        return dice.choice((0.0, 0.5, 1.0, 1.5, -2.0, 2.0, dice.uniform(-3, 3)))
    if kind is str:
        return dice.choice(TEXTS[:8])
    if origin is list:
        return [_typed(dice, typing.get_args(kind)[0], name) for _ in range(dice.randint(0, 4))]
    if origin is dict:
        return {str(dice.randrange(VOCAB + 1)): dice.uniform(-101, 101) for _ in range(dice.randint(0, 4))}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {
            one.name: _typed(dice, one.type, one.name) for one in msgspec.structs.fields(kind) if dice.random() < 0.8
        }
    return _nasty(dice, 1)


def _nasty(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return dice.choice(NUMBERS)
    if kind < 4:
        return dice.choice(TEXTS)
    if kind == 4:
        return dice.choice((None, True, False, [], {}, ""))
    if kind == 5:
        return [_nasty(dice, depth + 1) for _ in range(dice.choice((1, 2, 70)))]
    if kind == 6:
        return {dice.choice(TEXTS[:6]): _nasty(dice, depth + 1) for _ in range(dice.randint(1, 3))}
    return {dice.choice(("5", "9" * 5000, "٣", "-1", " 5")): dice.choice(NUMBERS)}


@functools.cache
def extra_bodies() -> list[tuple[str, bytes]]:
    """(path, body) of the corpus of hostile bodies, each within CORPUS_BYTES."""
    return [(one.path, one.body) for one in corpus(CORPUS_BYTES) if not one.headers]
