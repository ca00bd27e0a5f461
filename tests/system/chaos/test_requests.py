"""A sample of mutated requests; and that their judge can say no.  `make chaos ARGS='requests'` sends many more."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import redis.asyncio

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.system.chaos.judging import judge, read
from tests.system.chaos.mutations import BASES, Mutator, Request, examples
from tests.system.chaos.requests import TOOLS, leftovers, send_all, table

STREAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.timeout(300)
async def test_no_mutated_request_is_answered_wrongly(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    found = await send_all(tmp_path, redis_server, requests=300, seed=1, template=TOOLS, stalls=False)
    print(table(found))
    assert not found.failures
    assert found.requests == 300
    assert found.statuses["200"] > 30
    assert found.statuses["400"] > 100


def test_a_request_is_its_seed_and_number() -> None:
    made = [Mutator(3).request(number) for number in range(400)]
    assert made == [Mutator(3).request(number) for number in range(400)]
    assert made != [Mutator(4).request(number) for number in range(400)]
    assert set(BASES) <= {one.path for one in made}
    ways = Counter((one.leave_after >= 0, one.sent >= 0) for one in made)
    assert set(ways) >= {(False, False), (True, False), (False, True)}


def test_fields_come_from_the_documentation() -> None:
    for kind in ("completions", "chat", "messages", "responses", "tokenize", "refused"):
        assert len(examples()[kind]) > 10, kind


def _error(status: int, message: str, param: str | None, code: str = "invalid_value") -> bytes:
    body = json.dumps({"error": {"message": message, "type": "t", "param": param, "code": code}}).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def _chunked(body: bytes) -> bytes:
    return STREAMED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\nNaN", "no JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{}", "the body did not end"),
        (_error(400, "n: must be >= 1", "n"), ""),
        (_error(400, "must be >= 1", "n"), "the message does not name"),
        (_error(400, "top_p: must be > 0", "top_p"), "the refusal names"),
        (_error(400, "Last-Event-ID: no id", "last-event-id"), ""),
        (_error(500, "the gateway failed", None, "internal_error"), "status 500"),
        (_error(503, "too many", None, "too_many_open"), ""),
        (_error(503, "so what", None, "bored"), "status 503"),
        (b"HTTP/1.1 400 X\r\nContent-Length: 2\r\n\r\n{}", "status 400, no error of OpenAI's form"),
        (b"", "no answer"),
        (_chunked(b'data: {"choices":[]}\n\ndata: [DONE]\n\n'), ""),
        (_chunked(b'data: {"choices":[]}\n\n'), "the stream has no end"),
        (_chunked(b"data: [DONE]\n"), "the last event did not end"),
        (_chunked(b'event: x\ndata: {"type":"message_stop"}\n\n'), ""),
        (_chunked(b'data: {"error":{"code":"internal_error"}}\n\n'), "a stream ended in"),
        (_chunked(b'data: {"error":{"code":"deadline_exceeded"}}\n\n'), ""),
        (STREAMED + b"5\r\nda", "the body did not end"),
    ],
)
def test_an_answer_that_is_not_promised_is_found(answer: bytes, wrong: str) -> None:
    said = judge(Request("POST", "/v1/completions", b'{"n": 0}'), answer)[1]
    assert said.startswith(wrong)
    assert bool(said) == bool(wrong)


def test_a_message_has_errors_of_its_own_form() -> None:
    request, body = Request("POST", "/v1/messages", b"{}"), b'{"type":"error","error":{"type":"t","message":"m"}}'
    head = b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n"
    assert judge(request, head % len(body) + body)[1].startswith("status 400, no error of Anthropic's form")
    body = body[:-1] + b',"request_id":"r"}'
    assert judge(request, head % len(body) + body) == ("400", "")


def test_chunks_are_put_together() -> None:
    answer = read(STREAMED + b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n")
    assert answer is not None
    assert (answer.body, answer.complete) == (b"abc", True)


async def test_what_a_request_leaves_in_redis_is_found(redis_server: EmbeddedRedis) -> None:
    prefix = "{leftovers}:"
    async with redis.asyncio.from_url(redis_server.url) as client:
        await client.set(prefix + "counters", 1)
        assert await leftovers(client, "leftovers") == []
        await client.set(prefix + "log:a", 1)
        await client.hset(prefix + "req:b", "payload", "x")
        await client.expire(prefix + "req:b", 100)
        await client.zadd(prefix + "queue:late:acme", {"c": 1})
        found = sorted(await leftovers(client, "leftovers"))
    assert found == [
        "Redis holds queue:late:acme",
        "Redis holds req:b, which has not ended",
        "Redis keeps log:a for ever",
    ]
