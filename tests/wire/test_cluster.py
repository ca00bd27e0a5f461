"""The bus on a real Redis Cluster: one slot for all keys, redirected clients, a slot that moves, a master that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis, server_binaries
from quire.engine.wire import scripts
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown, Link
from quire.engine.wire.messages import Delta, Finish, HotPrefix, PoolState, TokenBatch
from quire.engine.wire.nodes import has_hash_tag
from quire.engine.wire.prefixes import PrefixReport, prefix_digests
from quire.engine.wire.quotas import Quota
from quire.engine.wire.records import IdempotencyKey
from quire.engine.wire.scripts import Script
from tests.pace import patience
from tests.wire.redis_cluster import Node, RedisCluster, slot_of
from tests.wire.sides import LONG_MS, PLENTY, Bus, answer, batch, generate, ids, load, read, take

LIMIT_S = 100.0
ALL = {name: value for name, value in vars(scripts).items() if isinstance(value, Script)}
pytestmark = pytest.mark.skipif(not server_binaries(), reason="needs redis-server or valkey-server on PATH")


@pytest.fixture(scope="module")
def cluster(redis_binary: Path) -> Iterator[RedisCluster]:
    with RedisCluster(redis_binary) as cluster:
        yield cluster


@pytest.fixture
async def elsewhere(cluster: RedisCluster, namespace: str) -> AsyncIterator[Bus]:
    """A bus whose URL is that of a node that does not serve its namespace."""
    bus = Bus(cluster.others(f"{{{namespace}}}:")[0].url, namespace)
    yield bus
    await bus.close()


async def use_every_script(bus: Bus) -> None:
    gateway, engine = await bus.gateway(), await bus.engine()
    gone = await bus.engine("e2")
    digests = prefix_digests(list(range(200)), "")
    await take(engine)
    assert not await engine.hot_prefixes.requests_wait()
    quota, key = Quota(1000, 100_000, 50), IdempotencyKey("key", "body")
    await gateway.quotas.take("t", quota, "a", generate("a").deadline_ms, [(10, 5)])
    await gateway.quotas.restore("t", quota, "a")
    queued = await gateway.submit(generate("a", 200, prefixes=digests, tenant="t"), idempotency_key=key)
    assert queued.lane == "on_time"
    assert (await gateway.places(["a"]))["a"].ahead == 0
    assert await gateway.find_duplicate(key) is not None
    assert ids(await engine.sync([], [], load("e1"), *PLENTY, PrefixReport(token_us=1, step_us=1))) == ["a"]
    await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
    assert await gateway.attach("a") is not None
    await engine.sync([("g1", batch("a", 1))], ["a"], load("e1"), 0, 0)
    assert len(await read(gateway, 2)) == 2
    assert await gateway.log("a", 0, 0, 5) is not None
    await gateway.keep(["a"])
    await gateway.settle([("a", "t", [2])])
    await gateway.release(key, "a")
    await gateway.submit(generate("b"))
    await gateway.cancel("b")
    await take(gone, "e2")  # and its lease lapses: it has to rejoin
    await gateway._link.redis.delete(f"{gateway._link.prefix}lease:e2")
    assert len((await gateway.fleet()).engines) == 1
    await take(gone, "e2")
    assert [other.engine for other in await engine.others()] == ["e2"]
    await gateway.operations.quarantined()
    await gateway.operations.reset_prefix_caches()
    await gateway.operations.probe()
    stored: dict[str, Any] = {"ttl_ms": LONG_MS, "max_bytes": 9000, "given": b"[]", "lease_ms": LONG_MS}
    await gateway.responses.put("t", "r", b"{}", ended=False, **stored)
    await gateway.responses.renew(LONG_MS, ["r"])
    assert await gateway.responses.get("t", "r") is not None
    assert await gateway.responses.drop("t", "r")
    await engine.hot_prefixes.write("f", [HotPrefix(b"1234", "")])
    await gateway.pool_states.watch()
    await engine.pool_states.write(PoolState("e1", 1, 1, b"\0", []))
    assert "e1" in await gateway.pool_states.read(["e1"])
    assert await gateway.adapters.put("sql", b"folder", replace=False)
    assert await gateway.adapters.get("sql") == b"folder"
    assert await gateway.adapters.drop("sql")
    await gone.close()


@pytest.mark.every_redis
@pytest.mark.parametrize("form", ["{}", "{{{}}}", "{}}}x"])
async def test_the_keys_of_every_script_lie_in_one_slot(
    cluster: RedisCluster, namespace: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the namespace looks like: as usual, in braces, or with a brace in the middle."""
    name = form.format(namespace)
    prefix = f"{{{name}}}:"
    ran: set[str] = set()
    run_script = Link.run_script

    async def recorded(self: Link, script: Script, *args: Any, **options: Any) -> Any:
        ran.add(script.sha)
        return await run_script(self, script, *args, **options)

    monkeypatch.setattr(Link, "run_script", recorded)
    bus = Bus(cluster.others(prefix)[0].url, name)
    await use_every_script(bus)
    assert {name for name, script in ALL.items() if script.sha not in ran} == set()
    found = cluster.serving(prefix).client.scan_iter(count=1000)
    keys = [key.decode() for key in found if key.startswith(prefix.encode())]
    assert len(keys) > 10
    assert {slot_of(key) for key in keys} == {slot_of(prefix)}
    for node in cluster.others(prefix):
        assert not any(key.startswith(prefix.encode()) for key in node.client.scan_iter(count=1000))
    await bus.close()


@pytest.mark.every_redis
@pytest.mark.parametrize("name", ["", "}", "}cell"])
async def test_a_namespace_without_a_hash_tag_is_refused_on_a_cluster_only(
    cluster: RedisCluster, redis_server: EmbeddedRedis, name: str
) -> None:
    assert not has_hash_tag(name)
    assert len({slot_of(f"{{{name}}}:{key}") for key in ("layout", "waiting", "due")}) > 1
    side = GatewaySide(cluster.nodes[0].url, "g1", namespace=name)
    with pytest.raises(BusDown, match=f"is a cluster, and keys of the namespace '{name}' lie in many") as caught:
        await side.open()
    assert "\n" not in str(caught.value)
    await side.close()
    side = GatewaySide(redis_server.url, "g1", namespace=name)
    await side.open()
    await side.close()


@pytest.mark.every_redis
async def test_a_unix_socket_of_a_cluster_is_refused(cluster: RedisCluster, namespace: str) -> None:
    side = GatewaySide(f"unix://{cluster.nodes[0].socket}", "g1", namespace=namespace)
    with pytest.raises(BusDown, match="is a node of a cluster: give the TCP address of a node"):
        await side.open()
    await side.close()


def move_keys(source: Node, target: Node, slot: int) -> None:
    while keys := source.cluster("GETKEYSINSLOT", slot, 100):
        source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)


@pytest.mark.every_redis
async def test_a_slot_moves_to_another_node(cluster: RedisCluster, elsewhere: Bus) -> None:
    """While it moves, every script is refused in full.  Then stream, log, queue and wake-ups use the new node."""
    prefix = f"{{{elsewhere.namespace}}}:"
    source, slot = cluster.serving(prefix), slot_of(prefix)
    target = cluster.others(prefix)[1]
    gateway, engine = await elsewhere.gateway(), await elsewhere.engine()
    await gateway.submit(generate("a"))
    assert ids(await take(engine)) == ["a"]
    await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
    assert len(await read(gateway, 1)) == 1
    await engine.wait_for_wakeup()

    target.cluster("SETSLOT", slot, "IMPORTING", source.id)
    source.cluster("SETSLOT", slot, "MIGRATING", target.id)
    with pytest.raises(BusDown, match="ASK"):
        await gateway.submit(generate("b"))
    keys = source.cluster("GETKEYSINSLOT", slot, 1000)
    assert f"{prefix}req:a".encode() in keys
    assert f"{prefix}req:b".encode() not in keys
    assert target.cluster("COUNTKEYSINSLOT", slot) == 0
    sending = asyncio.create_task(engine.sync([("g1", batch("a", 1))], [], load("e1"), 0, 0))
    move_keys(source, target, slot)
    for node in (target, source):
        node.cluster("SETSLOT", slot, "NODE", target.id)

    async with asyncio.timeout(patience(LIMIT_S)):
        await sending
        ringing = asyncio.create_task(engine.wait_for_wakeup())
        assert [one.deltas[0].first for one in await read(gateway, 2)] == [0, 1]
        await gateway.submit(generate("c"))
        await ringing
        assert ids(await take(engine)) == ["c"]
    log = await gateway.log("a", 0, 0, 5)
    assert log is not None
    assert log.token_ids == [0, 1]


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_master_dies_and_its_replica_serves(redis_binary: Path, namespace: str, how: str) -> None:
    """The URL is that of the node that dies, so the others are known from the start."""
    prefix = f"{{{namespace}}}:"
    with RedisCluster(redis_binary, replicated=prefix) as cluster:
        master = cluster.serving(prefix)
        bus = Bus(master.url, namespace)
        gateway, engine = await bus.gateway(), await bus.engine()
        await gateway.submit(generate("a"))
        assert ids(await take(engine)) == ["a"]
        await engine.sync([("g1", batch("a", 0))], [], load("e1"), 0, 0)
        master.command("WAIT", 1, 10_000)
        reading = asyncio.create_task(answer(gateway, "a"))
        await asyncio.sleep(0.1)
        master.kill() if how == "killed" else master.freeze()
        async with asyncio.timeout(patience(LIMIT_S)):
            last = TokenBatch("e1", [Delta("a", 1, [1], Finish("length"))])
            await engine.sync([("g1", last)], [], load("e1"), 0, 0)
            assert await reading == [[0, 1]]
            ringing = asyncio.create_task(engine.wait_for_wakeup())
            queued = None
            while queued is None:
                with contextlib.suppress(BusDown):
                    queued = await gateway.submit(generate("c"))
            await ringing
            assert ids(await take(engine)) == ["c"]
        assert cluster.replica.client.info("replication")["role"] == "master"
        await bus.close()
