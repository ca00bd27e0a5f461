"""A refused request gets a time to return from any gateway, and is recognised when it returns."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Sequence

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common.embedded_redis import EmbeddedRedis
from engine.wire.gateway_side import GatewaySide
from engine.wire.layout import CAME_MS, CAME_S, PROMISE_MS
from engine.wire.messages import Generate, Sampling
from engine.wire.records import RetryTerms
from tests.wire.promises import Book

TERMS = RetryTerms(pace=50.0, full_pace=50.0, least_ms=500, most_ms=60_000, least_shares=(0.1, 0.5))


def asked(name: str, tokens: int = 10, tenant: str = "", weight: float = 1.0) -> Generate:
    """A new attempt of request `name`: ids, seeds and deadlines differ between attempts, what is asked does not."""
    prompt = [zlib.crc32(name.encode()) % 10_007] * tokens
    later = time.time_ns()
    due_ms = later // 1_000_000 + 60_000
    return Generate(f"r{later}", "g", prompt, 5, Sampling(seed=later), due_ms, tenant=tenant, weight=weight)


@pytest.fixture
async def gateways(redis_server: EmbeddedRedis, namespace: str) -> AsyncIterator[Sequence[GatewaySide]]:
    sides = [GatewaySide(redis_server.url, name, namespace=namespace) for name in ("g0", "g1")]
    yield sides
    for side in sides:
        await side.close()


async def test_a_crowd_is_told_to_return_one_behind_the_other_whoever_tells(gateways: Sequence[GatewaySide]) -> None:
    # 50 tokens a second and no newcomers: 100 tokens take 2 s.  First in 0.5 s, then in 2.5 s, ..., in whole seconds.
    began = time.monotonic()
    pauses = [await gateways[i % 2].promise(asked(f"a{i}", 100), terms=TERMS) for i in range(6)]
    late = time.monotonic() - began
    for i, pause in enumerate(pauses):
        assert pause is not None
        assert 1000 + 2000 * i - 1000 * (late + 1) <= pause <= 1000 + 2000 * i
        assert pause % 1000 == 0
    assert pauses == sorted(pauses, key=lambda pause: pause or 0)


async def test_too_early_hears_the_same_time_again_and_in_time_is_let_in_once(gateways: Sequence[GatewaySide]) -> None:
    first, second = gateways
    pause = await first.promise(asked("a"), terms=TERMS)
    told = time.monotonic()
    assert pause == 1000
    again = await second.promise(asked("a"), terms=TERMS)
    assert again is not None
    assert 0 < again <= 1000
    await asyncio.sleep(max(0.0, told + 1.0 - time.monotonic()))
    for gateway in gateways:
        assert await gateway.promise(asked("a"), terms=TERMS) == 0  # until it is let in
    broken = await second.promise(asked("a"), terms=TERMS, broken=True)
    assert broken is not None
    assert broken >= 1000
    assert (await first.submit(asked("a"))).accepted
    anew = await first.promise(asked("a"), terms=TERMS)
    assert anew is not None
    assert anew % 1000 == 0  # kept is kept: this is a new promise


def newcomers(server: EmbeddedRedis, namespace: str, tokens: dict[int, int]) -> None:
    """So many prompt tokens came so many whole seconds ago."""
    with redis.Redis.from_url(server.url) as client:
        for ago, count in tokens.items():
            client.set(f"{{{namespace}}}:came:{int(time.time()) - ago}", count, px=CAME_MS)


@pytest.mark.parametrize(
    ("came", "apart_s"),
    [
        (dict.fromkeys(range(1, CAME_S + 1), 30), 5),  # they leave 20 of 50 tokens a second
        (dict.fromkeys(range(1, CAME_S + 1), 500), 20),  # they leave nothing, so it is a tenth and more
        ({1: 5000}, 2),  # a crowd that came at once is not who will come next
    ],
    ids=["light", "heavy", "once"],
)
async def test_who_returns_gets_what_newcomers_leave(
    redis_server: EmbeddedRedis, namespace: str, gateways: Sequence[GatewaySide], came: dict[int, int], apart_s: int
) -> None:
    newcomers(redis_server, namespace, came)
    began = time.monotonic()
    pauses = [await gateways[0].promise(asked(name, 100), terms=TERMS) for name in "ab"]
    late = time.monotonic() - began
    assert pauses[0] is not None
    assert pauses[1] is not None
    assert apart_s - late - 1.5 <= (pauses[1] - pauses[0]) / 1000 <= apart_s + 0.5


async def test_only_who_was_promised_nothing_is_a_newcomer(
    redis_server: EmbeddedRedis, namespace: str, gateways: Sequence[GatewaySide]
) -> None:
    gateway = gateways[0]
    await gateway.promise(asked("a", 100), terms=TERMS)
    await gateway.promise(asked("a", 100), terms=TERMS)
    await gateway.submit(asked("a", 100))
    await gateway.submit(asked("b", 10))
    with redis.Redis.from_url(redis_server.url) as client:
        counted = [int(client.get(key)) for key in client.scan_iter(f"{{{namespace}}}:came:*")]
    assert sum(counted) == 110


async def test_what_was_kept_for_who_does_not_come_is_promised_to_others(
    gateways: Sequence[GatewaySide], redis_server: EmbeddedRedis, namespace: str
) -> None:
    """Five wait in line, 4 s apart; the first two do not come, and who is refused next need not wait for their time."""
    gateway = gateways[0]
    for i in range(5):
        await gateway.promise(asked(f"a{i}", 200, "t"), terms=TERMS)
    behind = await gateway.promise(asked("b", 200, "t"), terms=TERMS)
    with redis.Redis.from_url(redis_server.url) as client:  # it is PROMISE_MS later for those two
        promises = f"{{{namespace}}}:promises"
        names = client.zrange(promises, 0, 1)
        client.zadd(promises, {name: time.time() * 1000 - PROMISE_MS - 1 for name in names})
        assert client.hlen(f"{{{namespace}}}:parts") == 6
        after = await gateway.promise(asked("c", 200, "t"), terms=TERMS)
        assert behind is not None
        assert after is not None
        assert behind - 6000 <= after <= behind - 3000  # one more 4 s behind, less twice 4 s
        assert client.hlen(f"{{{namespace}}}:parts") == 5
        assert (await gateway.submit(asked("c", 200, "t"))).accepted  # kept: nothing to give back
        assert client.hlen(f"{{{namespace}}}:parts") == 4


@pytest.mark.parametrize("kept", [True, False])
def test_a_crowd_that_does_not_come_back_leaves_its_line(*, kept: bool) -> None:
    """Virtual clock: 25 are refused at once and promised 2 s each.  Who comes after 25 s stands behind the other half;
    where nobody came that is shorter by what was kept for those."""
    book = Book()
    for number in range(25):
        assert book.promise(f"r{number}", 100, TERMS, 0) == max(1000, 1000 * round(0.5 + 2 * number + 0.5))
    for now in range(0, 25_000, 500):
        due = [name for name, at in book.due.items() if at <= now and kept]
        for name in due:
            book.submit(name, 100, now)
    left = book.promise("next", 100, TERMS, 25_000)
    assert left == pytest.approx(26_000 if kept else 6_000, abs=2000)


async def test_beyond_the_last_moment_nothing_is_promised(gateways: Sequence[GatewaySide]) -> None:
    gateway = gateways[0]
    assert await gateway.promise(asked("huge", 3100), terms=TERMS) == 1000  # the next one could come in 62 s
    assert await gateway.promise(asked("next"), terms=TERMS) is None
    assert await gateway.promise(asked("next"), terms=TERMS) is None  # and so it left no trace
    other = await gateway.promise(asked("other", tenant="quiet"), terms=TERMS)
    assert other == 1000  # another tenant's crowd is not in the way


async def test_the_same_prompt_of_another_tenant_or_length_is_another_request(gateways: Sequence[GatewaySide]) -> None:
    gateway = gateways[0]
    for request in (asked("a"), asked("a", tenant="b"), asked("a", 11)):
        pause = await gateway.promise(request, terms=TERMS)
        assert pause is not None
        assert pause % 1000 == 0  # new: what is left of an old one would not be whole seconds


# Each takes up 2 s or more of its tenant's share, so that no promise runs out during an example.
CALLS = st.tuples(st.integers(0, 30), st.integers(100, 400), st.sampled_from((("", 1.0), ("a", 2.0), ("b", 0.5))))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(CALLS, min_size=1, max_size=25),
    st.tuples(st.floats(5, 50), st.floats(1, 3)),
    st.integers(1, 5000),
    st.tuples(st.floats(0.05, 0.5), st.floats(0.5, 1.0)),
    st.integers(0, 60),
)
def test_the_script_does_what_the_book_does(
    redis_server: EmbeddedRedis,
    namespace: str,
    calls: list[tuple[int, int, tuple[str, float]]],
    pace: tuple[float, float],
    least_ms: int,
    shares: tuple[float, float],
    came: int,
) -> None:
    terms, book = RetryTerms(pace[0], pace[0] * pace[1], least_ms, 60_000, shares), Book()

    async def run(gateway: GatewaySide) -> None:
        began = time.time_ns() // 1_000_000
        for number, tokens, (tenant, weight) in calls:
            got = await gateway.promise(asked(str(number), tokens, tenant, weight), terms=terms)
            late = time.time_ns() // 1_000_000 - began
            if late > 900:
                return  # a machine this busy says nothing about where whole seconds are cut
            want = book.promise(f"{tenant} {number} {tokens}", tokens, terms, began, tenant, weight)
            if got is None or want < 0:
                assert (60_000 if got is None else got) - (60_000 if want < 0 else want) <= 1000 + late
            else:
                assert abs(got - want) <= 1000 + late

    async def connected() -> None:
        fresh = f"{namespace}-{time.time_ns()}"
        gateway = GatewaySide(redis_server.url, "g", namespace=fresh)
        newcomers(redis_server, fresh, dict.fromkeys(range(-1, CAME_S + 1), came))
        book.came.update({int(time.time()) - ago: came for ago in range(-1, CAME_S + 1)})
        try:
            await run(gateway)
        finally:
            await gateway.close()

    asyncio.run(connected())
