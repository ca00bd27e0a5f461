"""A body with as many values as fit is parsed on a thread, although it is short.

Each value takes Python some lines.  Lines are counted, not time, so no machine is too slow for these tests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import LATER_FIELDS, Finish
from quire.service.http.bodies import parse_weight
from quire.service.http.request_work import INLINE_BYTES
from quire.service.text.tokenizer import Tokenizer
from tests.pace import patience, until
from tests.service.fakes import FakeEngine
from tests.service.gateways import CountingLoop, MeasuredGateway, settings
from tests.service.http.hostile import Hostile, request
from tests.system.chaos.mutations import BASES, TOOLS, Json, places

EngineMaker = Callable[..., FakeEngine]
BYTES = 24 * 1024
FILLS: dict[str, Json] = {"objects": {}, "lists": [], "texts": "", "numbers": 1}
SHAPES = len(FILLS) + 1  # those, and an object of many members
LINES = 5_000  # lines of Python in a turn of the loop; a body without anything dense takes 1,500


def dense_bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """Bodies of an endpoint, about BYTES long, in which one place holds as many values as fit.

    Each place has one of SHAPES, and every shape comes at some place."""
    kind, base = BASES[path]
    dice, tools = random.Random(path), [{"tools": TOOLS[kind]}] if kind in TOOLS else []
    bodies = [base(random.Random(seed)) for seed in range(20)]
    bodies += [bodies[0] | more for more in tools]
    seen: set[str] = set()
    for original in bodies:
        body = copy.deepcopy(original)
        for container, key, where in list(places(body)):
            if isinstance(key, str) and where not in seen:
                seen.add(where)
                value, (name, filled) = container[key], dense_value(dice)
                container[key] = filled
                yield f"{where}: {name}", json.dumps({"model": "tiny", **body}, separators=(",", ":")).encode()
                container[key] = value


def dense_value(dice: random.Random) -> tuple[str, Json]:
    """A value of BYTES of JSON, and its name."""
    name = dice.choice([*FILLS, "members"])
    if name == "members":
        return name, {str(at): 1 for at in range(BYTES // 10)}
    return name, [FILLS[name]] * (BYTES // (len(json.dumps(FILLS[name])) + 1))


@pytest.fixture
def gateway(
    redis_server: EmbeddedRedis, namespace: str, tools_tokenizer: Tokenizer, byte_level_dir: object
) -> Iterator[MeasuredGateway]:
    """A gateway on a thread of its own, which counts lines."""
    config = settings(
        model=str(byte_level_dir), served_name="tiny", namespace=namespace, redis_url=redis_server.url, fleet_s=0.2
    )
    with MeasuredGateway(config, tools_tokenizer, CountingLoop()) as started:
        yield started


async def lines_of(gateway: MeasuredGateway, one: Hostile) -> int:
    """Send a body.  Return the lines of the longest turn of the gateway's loop meanwhile."""
    loop, port = gateway.loop, int(gateway.served.url.rpartition(":")[2])
    assert isinstance(loop, CountingLoop)
    loop.longest = 0
    async with asyncio.timeout(patience(60)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(one, "localhost"))
        with contextlib.suppress(ConnectionError):
            assert (await reader.readline()).startswith((b"HTTP/1.1 2", b"HTTP/1.1 4"))
            await reader.read()
        writer.close()
    return loop.longest


@pytest.mark.parametrize("path", BASES)
async def test_no_turn_of_the_loop_parses_a_dense_body(
    gateway: MeasuredGateway, engine: EngineMaker, tools_tokenizer: Tokenizer, path: str
) -> None:
    async with engine(lambda generate, index: ([5], Finish("length", score=-1.0))) as fake:
        fake.load_changes = {"vocab_size": len(tools_tokenizer.vocabulary.table), "honours": list(LATER_FIELDS)}
        await until(lambda: bool(gateway.served.streams.fleet.engines))
        sent = 0
        for name, body in dense_bodies(path):
            for _ in range(2):  # the first time patterns are compiled and connections made
                lines = await lines_of(gateway, Hostile(name, path, body))
                if lines <= LINES:
                    break
            assert lines <= LINES, name
            sent += 1
    assert sent


@pytest.mark.parametrize("value", ["{}", "[]", '""', "1", '"a":1', '"[1,1]"', '"{\\"a\\":1}"'])
def test_a_dense_body_is_too_heavy_for_the_loop(value: str) -> None:
    """A quarter of what used to be parsed on the loop."""
    assert parse_weight(b"[" + ",".join([value] * (INLINE_BYTES // (len(value) + 1))).encode() + b"]") > INLINE_BYTES


def test_a_text_weighs_little_more_than_its_bytes() -> None:
    prose = 'The quick brown fox jumps over the lazy dog, and "what" it says is known to all of us by now. ' * 100
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": prose}]}).encode()
    assert parse_weight(body) < 2 * len(body)
