"""The bus against a real Redis server: several gateways and engines, deaths, lost replies, restarts, full memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import redis

from engine.wire.bus import BusDown, Claimed, EngineSide, GatewaySide
from engine.wire.embedded import EmbeddedRedis
from engine.wire.messages import Abort, Delta, EngineLoad, Finish, Generate, Sampling, TokenBatch

PLENTY = (1_000_000, 1_000)  # room in tokens and in requests


def generate(request_id: str, tokens: int = 10, gateway: str = "g1") -> Generate:
    return Generate(request_id, gateway, list(range(tokens)), 5, Sampling(), int(time.time() * 1000) + 60_000)


def load(engine: str) -> EngineLoad:
    return EngineLoad(engine, "m", "f", 4096, 32000, 16, 100, 100, 0, 0, 0, 0, int(time.time() * 1000))


def batch(request_id: str, first: int, engine: str = "e1") -> TokenBatch:
    return TokenBatch(engine, [Delta(request_id, first, [first])])


def ids(claimed: Claimed) -> list[str]:
    return [request.id for request in claimed.generates]


async def take(engine: EngineSide, name: str = "e1", tokens: int = PLENTY[0], requests: int = PLENTY[1]) -> Claimed:
    return await engine.exchange([], [], load(name), tokens, requests)


async def read(gateway: GatewaySide, count: int) -> list[TokenBatch]:
    found: list[TokenBatch] = []
    async with asyncio.timeout(20), contextlib.aclosing(gateway.batches()) as batches:  # type: ignore[type-var]
        async for one in batches:
            found.append(one)
            if len(found) == count:
                break
    return found


class Bus:
    """Opens sides on one server and namespace, and closes them all at the end."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url, self.namespace = url, namespace
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def gateway(self, name: str = "g1", url: str = "") -> GatewaySide:
        side = GatewaySide(url or self.url, name, namespace=self.namespace)
        self._closers.append(side.close)
        await side.open()
        return side

    async def engine(self, name: str = "e1", url: str = "", lease_ms: int = 5000) -> EngineSide:
        side = EngineSide(url or self.url, name, namespace=self.namespace, lease_ms=lease_ms)
        self._closers.append(side.close)
        await side.open()
        return side

    async def close(self) -> None:
        for closer in reversed(self._closers):
            await closer()


@pytest.fixture
async def bus(redis_server: EmbeddedRedis, namespace: str) -> AsyncIterator[Bus]:
    bus = Bus(redis_server.url, namespace)
    yield bus
    await bus.close()


@pytest.fixture
def own_server() -> Iterator[EmbeddedRedis]:
    """One that a test may stop, fill or break."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def own_bus(own_server: EmbeddedRedis, namespace: str) -> AsyncIterator[Bus]:
    bus = Bus(own_server.url, namespace)
    yield bus
    own_server.start()
    await bus.close()


async def test_a_request_goes_down_and_its_tokens_come_up(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    request = generate("a", 12)
    await gateway.submit(request)
    assert (fleet := await gateway.fleet()).queued == 1
    assert (fleet.queued_tokens, fleet.engines) == (12, [])
    assert await take(engine) == Claimed([request], [])
    sent = [batch("a", 0), batch("a", 1)]
    await engine.exchange([("g1", sent[0])], [], load("e1"), 0, 0)
    await engine.exchange([("g1", sent[1])], ["a"], last := load("e1"), 0, 0)
    assert await read(gateway, 2) == sent
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens, fleet.engines) == (0, 0, [last])
    assert abs(fleet.time_ms - time.time() * 1000) < 5_000


async def test_claims_are_first_come_first_served_and_fit_the_room(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    for name, tokens in (("a", 10), ("b", 10), ("c", 50), ("d", 1)):
        await gateway.submit(generate(name, tokens))
    assert ids(await take(engine, requests=0)) == []
    assert ids(await take(engine, tokens=69)) == ["a", "b"]  # c does not fit any more, and d does not overtake it
    assert ids(await take(engine, requests=1)) == ["c"]
    assert ids(await take(engine)) == ["d"]


async def test_a_withdrawn_request_costs_nothing_or_aborts(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    for name in ("a", "b"):
        await gateway.submit(generate(name))
    await gateway.cancel("a")
    assert (await gateway.fleet()).queued_tokens == 10
    assert ids(await take(engine)) == ["b"]
    for _ in range(2):
        await gateway.cancel("b")
    await gateway.cancel("never heard of")
    assert await take(engine) == Claimed([], [Abort("b")])
    assert await take(engine) == Claimed([], [])


async def test_one_continuation_is_withdrawn_from_whoever_computes_the_request(bus: Bus) -> None:
    gateway, dying, other = await bus.gateway(), await bus.engine("e1", lease_ms=100), await bus.engine("e2")
    await gateway.cancel("never heard of", 1)
    await gateway.submit(generate("a"))
    assert ids(await take(dying)) == ["a"]
    for index in (2, 0):
        await gateway.cancel("a", index)
    assert (await take(dying)).aborts == [Abort("a", index=2), Abort("a", index=0)]
    assert (await take(dying)).aborts == []
    await asyncio.sleep(0.15)
    assert (await gateway.fleet()).queued == 1
    claimed = await take(other, "e2")  # the request with what nobody wants of it any more
    assert (ids(claimed), claimed.aborts) == (["a"], [Abort("a", index=2), Abort("a", index=0)])
    await gateway.cancel("a")
    assert (await take(other, "e2")).aborts == [Abort("a")]
    await gateway.cancel("a", 1)
    assert await take(other, "e2") == Claimed([], [])


async def test_two_gateways_and_two_engines_share_one_queue(bus: Bus) -> None:
    gateways = [await bus.gateway(f"g{i}") for i in range(2)]
    engines = [await bus.engine(f"e{i}") for i in range(2)]
    for i in range(40):
        await gateways[i % 2].submit(generate(f"r{i}", gateway=f"g{i % 2}"))
    seen: dict[str, str] = {}
    while len(seen) < 40:
        for e, engine in enumerate(engines):
            claimed = (await take(engine, f"e{e}", requests=3)).generates
            assert not seen.keys() & {request.id for request in claimed}
            seen |= {request.id: request.gateway for request in claimed}
            await engine.exchange(
                [(request.gateway, batch(request.id, 0)) for request in claimed],
                [request.id for request in claimed],
                load(f"e{e}"),
                0,
                0,
            )
    for g, gateway in enumerate(gateways):
        got = {one.deltas[0].id for one in await read(gateway, 20)}
        assert got == {name for name, owner in seen.items() if owner == f"g{g}"}
    assert {one.engine for one in (await gateways[0].fleet()).engines} == {"e0", "e1"}


async def test_a_burst_is_shared_between_engines_with_room(bus: Bus) -> None:
    gateway, engines = await bus.gateway(), [await bus.engine(f"e{i}") for i in range(3)]
    for e, engine in enumerate(engines):
        await take(engine, f"e{e}")  # from now on it counts
    for i in range(12):
        await gateway.submit(generate(f"r{i:02}"))
    shares = [ids(await take(engine, f"e{e}")) for e, engine in enumerate(engines)]
    assert list(map(len, shares)) == [4, 3, 2]
    assert [request for share in shares for request in share] == [f"r{i:02}" for i in range(9)]
    assert ids(await take(engines[0], "e0")) == ["r09"]


async def test_a_dead_engines_requests_return_to_the_head_in_order(bus: Bus) -> None:
    gateway, dying, other = await bus.gateway(), await bus.engine("e1", lease_ms=100), await bus.engine("e2")
    for name in "abcd":
        await gateway.submit(generate(name))
    assert ids(await take(dying, requests=3)) == ["a", "b", "c"]
    await gateway.cancel("b")
    await asyncio.sleep(0.15)
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens, fleet.engines) == (3, 30, [])
    assert ids(await take(other, "e2")) == ["a", "c", "d"]


async def test_a_late_engine_keeps_what_nobody_took_and_loses_the_rest(bus: Bus) -> None:
    gateway, late, other = await bus.gateway(), await bus.engine("e1", lease_ms=100), await bus.engine("e2")
    for name in "abc":
        await gateway.submit(generate(name))
    assert ids(await take(late)) == ["a", "b", "c"]
    await asyncio.sleep(0.15)
    await gateway.fleet()
    assert ids(await take(other, "e2", requests=1)) == ["a"]
    await gateway.cancel("b")
    back = await take(late)
    assert (back.generates, sorted(back.lost)) == ([], ["a", "b"])
    assert (await gateway.fleet()).queued == 0
    await late.exchange([], ["a", "c"], load("e1"), 0, 0)  # it had finished a all the same: e2 need not
    assert await take(other, "e2") == Claimed([], [Abort("a")])


async def test_closing_or_reopening_an_engine_gives_back_what_it_held(bus: Bus) -> None:
    gateway, first = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a"))
    assert ids(await take(first)) == ["a"]
    again = await bus.engine()  # the same name: the first process crashed, its lease still runs
    assert ids(await take(again)) == ["a"]
    with pytest.raises(BusDown, match="newer process"):
        await take(first)
    await first.close()  # must not take the newer one's requests away
    assert (await gateway.fleet()).queued == 0
    await again.close()
    assert (await gateway.fleet()).queued == 1


class CuttingProxy:
    """Stands between a side and the server; when told to, lets the request through and swallows the reply."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._path = server.url.removeprefix("unix://")
        self.cut_after: bytes | None = None  # the next request containing this loses its reply and its connection
        self.cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
        up_reader, up_writer = await asyncio.open_unix_connection(self._path)
        doomed = False

        async def down() -> None:
            while data := await up_reader.read(65536):
                if doomed:  # the server has executed it: now the line breaks
                    self.cuts += 1
                    writer.transport.abort()
                    return
                writer.write(data)

        back = asyncio.create_task(down())
        try:
            while data := await reader.read(65536):
                if self.cut_after is not None and self.cut_after in data:
                    doomed, self.cut_after = True, None
                up_writer.write(data)
        except ConnectionError:
            pass
        finally:
            back.cancel()
            up_writer.close()
            writer.close()
            self._tasks.discard(task)  # type: ignore[arg-type]


async def test_a_reply_lost_after_the_work_was_done_repeats_nothing(redis_server: EmbeddedRedis, bus: Bus) -> None:
    async with CuttingProxy(redis_server) as proxy:
        gateway, engine = await bus.gateway(), await bus.engine(url=proxy.url)
        cut_gateway = await bus.gateway("g2", proxy.url)
        await take(engine)  # scripts are loaded: from here on one request is one exchange
        proxy.cut_after = b"submitted-once"
        await cut_gateway.submit(generate("submitted-once"))
        assert (await gateway.fleet()).queued == 1
        for name in ("b", "c", "d"):
            await gateway.submit(generate(name))
        await engine.exchange([], [], load("e1"), *PLENTY)
        await gateway.cancel("c")
        await gateway.submit(generate("e"))
        proxy.cut_after = b"EVALSHA"
        got = await engine.exchange([("g1", batch("b", 0))], ["d"], load("e1"), 1000, 1)
        assert (ids(got), got.aborts) == (["e"], [Abort("c")])
        proxy.cut_after = b"EVALSHA"
        assert await take(engine) == Claimed([], [])
        await engine.exchange([("g1", batch("b", 1))], [], load("e1"), 0, 0)
        assert [one.deltas[0].first for one in await read(gateway, 2)] == [0, 1]
        await cut_gateway.close()
        await engine.close()
        assert proxy.cuts == 3
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens) == (3, 30)  # submitted-once, b and e; c and d ended


async def test_nothing_is_lost_over_a_restart_of_the_server(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine(lease_ms=60_000)
    for name in "ab":
        await gateway.submit(generate(name))
    assert ids(await take(engine, requests=1)) == ["a"]
    reading = asyncio.create_task(read(gateway, 4))
    await engine.exchange([("g1", batch("a", 0))], [], load("e1"), 0, 0)
    own_server.stop()
    sending = asyncio.create_task(engine.exchange([("g1", batch("a", 1))], [], load("e1"), *PLENTY))
    ringing = asyncio.create_task(engine.bell())
    await asyncio.sleep(0.2)
    own_server.start()
    assert ids(await sending) == ["b"]
    await ringing  # a reconnect rings
    own_server.stop()
    own_server.start()
    for position in (2, 3):
        await engine.exchange([("g1", batch("a", position))], [], load("e1"), 0, 0)
    assert [one.deltas[0].first for one in await reading] == [0, 1, 2, 3]
    ringing = asyncio.create_task(engine.bell())
    await gateway.submit(generate("c"))
    await asyncio.wait_for(ringing, 2)
    assert ids(await take(engine)) == ["c"]


async def test_without_a_server_the_gateway_hears_so_within_bounds(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await gateway.submit(generate("a"))
    own_server.stop()
    began = time.monotonic()
    results = await asyncio.gather(
        gateway.submit(generate("b")), gateway.fleet(), gateway.cancel("a"), return_exceptions=True
    )
    assert 1.5 < time.monotonic() - began < 4
    assert isinstance(results[0], BusDown)
    assert isinstance(results[1], BusDown)
    assert results[2] is None
    assert "unix://" in str(results[0])
    assert "\n" not in str(results[0])
    own_server.start()
    assert (await gateway.fleet()).queued == 0  # the withdrawal of a was kept, and b is not queued
    assert ids(await take(engine)) == []


async def test_full_memory_refuses_new_work_and_lets_old_work_end(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    gateway, engine = await own_bus.gateway(), await own_bus.engine()
    await gateway.submit(generate("a"))
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(BusDown, match="OOM"):
            await gateway.submit(generate("b", 100_000))
        assert ids(await take(engine)) == ["a"]
        await engine.exchange(
            [("g1", TokenBatch("e1", [Delta("a", 0, [1], Finish("length"))]))], ["a"], load("e1"), 0, 0
        )
        assert (await read(gateway, 1))[0].deltas[0].finish == Finish("length")
        client.config_set("maxmemory", "0")
    await gateway.submit(generate("c"))


async def test_what_is_read_is_trimmed_and_what_ended_goes_away(redis_server: EmbeddedRedis, bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    await gateway.submit(generate("a"))
    await take(engine)
    reading = asyncio.create_task(read(gateway, 601))
    for position in range(600):
        await engine.exchange([("g1", batch("a", position))], [], load("e1"), 0, 0)
    with redis.Redis.from_url(redis_server.url) as client:
        for _ in range(100):
            if client.xlen(f"{{{bus.namespace}}}:out:g1") == 0:
                break
            await asyncio.sleep(0.02)
        assert client.xlen(f"{{{bus.namespace}}}:out:g1") == 0
        await engine.exchange([("g1", batch("a", 600))], ["a"], load("e1"), 0, 0)
        await reading
        await engine.close()
        for key in client.scan_iter(f"{{{bus.namespace}}}:*"):  # two counters stay, all else has an end
            assert client.pttl(key) > 0 or key.endswith((b":arrivals", b":queued_tokens")), key


async def test_a_request_nobody_ends_expires(redis_server: EmbeddedRedis, bus: Bus) -> None:
    gateway = await bus.gateway()
    late = int(time.time() * 1000) - 59_950  # EXPIRY ends in 50 ms
    await gateway.submit(Generate("a", "g1", [1, 2], 1, Sampling(), late))
    await asyncio.sleep(0.1)
    fleet = await gateway.fleet()
    assert (fleet.queued, fleet.queued_tokens) == (0, 0)


async def test_a_prompt_of_32k_tokens(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    request = Generate("a", "g1", list(range(100_000, 132_768)), 5, Sampling(), int(time.time() * 1000) + 60_000)
    await gateway.submit(request)
    assert (await take(engine)).generates == [request]


async def test_the_bell_rings_at_once(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    delays = []
    for i in range(20):
        ringing = asyncio.create_task(engine.bell())
        await asyncio.sleep(0.002)
        began = time.perf_counter()
        await gateway.submit(generate(f"r{i}"))
        await asyncio.wait_for(ringing, 2)
        delays.append(time.perf_counter() - began)
    assert sorted(delays)[len(delays) // 2] < 0.005
    await take(engine)
    ringing = asyncio.create_task(engine.bell())
    await gateway.cancel("r0")
    await asyncio.wait_for(ringing, 2)
    assert (await take(engine)).aborts == [Abort("r0")]


async def test_an_exchange_costs_the_engine_little_cpu(bus: Bus) -> None:
    engine = await bus.engine()
    full = TokenBatch("e1", [Delta(f"cmpl-{i:032x}", 7, [i]) for i in range(256)])
    await engine.exchange([("g1", full)], [], load("e1"), 0, 0)
    costs = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(40):
            await engine.exchange([("g1", full)], [], load("e1"), 0, 0)
        costs.append((time.process_time() - began) / 40)
    assert min(costs) <= 0.001


async def test_a_malformed_or_unreachable_address_is_one_line() -> None:
    with pytest.raises(BusDown, match="http://nowhere"):
        GatewaySide("http://nowhere", "g")
    side = EngineSide("redis://:secret@127.0.0.1:1/0", "e")
    with pytest.raises(BusDown, match=r"redis://127\.0\.0\.1:1/0") as caught:
        await side.open()
    assert "secret" not in str(caught.value)
    await side.close()
