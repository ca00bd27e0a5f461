"""Request ids on the wire: 16 bytes, and the same text on both sides and in Redis."""

from __future__ import annotations

import re
import secrets

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.messages import Delta, TokenBatch
from quire.engine.wire.request_ids import KINDS, pack, unpack
from quire.service.api.anthropic.messages import PREFIX as MESSAGE
from quire.service.api.openai_responses.output_items import PREFIX as RESPONSE
from quire.service.delivery.resume import new_id
from tests.wire.sides import Bus, generate, load, take

ids = st.builds(
    lambda kind, now_ms, prompt: f"{new_id(kind, now_ms)}.{prompt}",
    st.sampled_from(KINDS),
    st.integers(0, 2**42 - 1),  # until the year 2109
    st.integers(0, 2**16 - 1),
)


@given(ids)
def test_the_ids_of_clients_take_16_bytes_and_2_for_later_prompts(request_id: str) -> None:
    packed = bytes(pack(request_id))
    assert len(packed) == 1 + (16 if request_id.endswith(".0") else 18)  # one byte says that it is a string
    assert unpack(packed) == request_id


@given(st.text(min_size=1) | st.from_regex(re.compile(r"(chatcmpl-|resp_)[0-9a-f]{32}\.[0-9]{1,7}", re.ASCII)))
def test_every_other_id_keeps_its_text(request_id: str) -> None:
    assert unpack(bytes(pack(request_id))) == request_id


def test_each_kind_of_answer_has_a_short_id() -> None:
    assert set(KINDS) == {"chatcmpl-", "cmpl-", MESSAGE, RESPONSE}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [0, 1, 255, 65_535])
async def test_redis_enters_their_tokens_in_the_same_log(bus: Bus, kind: str, prompt: int) -> None:
    """A reader of the log makes Redis read the engine's unflushed log tail, in which ids are short."""
    gateway, engine = await bus.gateway(), await bus.engine()
    request_id = f"{new_id(kind, 1_790_000_000_000)}.{prompt}"
    await gateway.submit(generate(request_id))
    await take(engine)
    await engine.sync([("g1", TokenBatch("e1", [Delta(request_id, 0, [7])]))], [], load("e1"), 0, 0)
    await engine.sync([("g1", TokenBatch("e1", [Delta(request_id, 1, [8, 9])]))], [], load("e1"), 0, 0)
    with redis.Redis.from_url(bus.url) as client:
        key = f"{{{bus.namespace}}}:tail:e1"
        assert request_id.encode() not in b"".join(client.lrange(key, 0, -1))
    attached = await gateway.attach(request_id)
    assert attached is not None
    assert [one.token_ids for one in attached.choices] == [[7, 8, 9]]


def test_text_of_16_bytes_is_no_short_id() -> None:
    for request_id in (secrets.token_hex(8), "@" * 18, "é" * 8):
        assert unpack(bytes(pack(request_id))) == request_id
    with pytest.raises(UnicodeDecodeError):
        unpack(b"\xb0" + b"\xff" * 16)
