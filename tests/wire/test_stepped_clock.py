"""The clock of Redis' machine is set forward or back by hours: nothing waits until it is there again."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.layout import QUOTA_MS
from quire.engine.wire.quotas import Quota
from tests.pace import paced_ms
from tests.wire.sides import LONG_MS, Bus, batch, generate, ids, load, read, take, within

HOURS_S = 3 * 3600
PLENTY = within(10**9)
SOURCE = Path(__file__).with_name("stepped_clock.cpp")


class Clock:
    """The wall clock of one Redis server."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(struct.pack("l", 0))

    def set_ahead(self, seconds: int) -> None:
        """Set it ahead of this machine's clock; negative: behind."""
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            shared[:] = struct.pack("l", seconds)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("clock") / "stepped_clock.so"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, SOURCE, "-ldl"], check=True)
    return built


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "ahead")


@pytest.fixture
def own_server(library: Path, clock: Clock, tmp_path: Path, redis_binary: Path) -> Iterator[EmbeddedRedis]:
    """A server on a clock of its own."""
    program = tmp_path / "redis-server"
    program.write_text(f'#!/bin/sh\nCLOCK_AHEAD={tmp_path}/ahead LD_PRELOAD={library} exec {redis_binary} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with EmbeddedRedis(binary=program) as server:
        yield server


async def test_a_quota_is_exhausted_for_a_minute_at_most_when_the_clock_is_set_back(own_bus: Bus, clock: Clock) -> None:
    gateway, quota = await own_bus.gateway(), Quota(requests_per_minute=1)
    deadline_ms = gateway.clock.redis_ms() + LONG_MS
    assert (await gateway.quotas.take("t", quota, "a", deadline_ms, [(1, 1)])).used_up is None
    clock.set_ahead(-HOURS_S)
    taken = await gateway.quotas.take("t", quota, "b", deadline_ms, [(1, 1)])
    assert taken.used_up == "requests"
    assert taken.wait_ms <= QUOTA_MS


async def test_a_dead_engine_is_noticed_when_the_clock_is_set_back(own_bus: Bus, clock: Clock) -> None:
    gateway = await own_bus.gateway()
    dead, other = await own_bus.engine("e1", lease_ms=paced_ms(500)), await own_bus.engine("e2")
    await gateway.submit(generate("a"), bounds=PLENTY)
    assert ids(await take(dead)) == ["a"]
    await gateway.fleet()
    clock.set_ahead(-HOURS_S)
    while "e1" in {load.engine for load in (await gateway.fleet()).engines}:
        await take(other, "e2", tokens=0)
    assert ids(await take(other, "e2")) == ["a"]


async def test_a_request_whose_gateway_died_is_withdrawn_when_the_clock_is_set_back(own_bus: Bus, clock: Clock) -> None:
    dead, gateway, engine = (
        await own_bus.gateway("g1"),
        await own_bus.gateway("g2", grace_s=0.2),
        await own_bus.engine(),
    )
    await dead.submit(generate("a"), bounds=PLENTY)
    assert ids(await take(engine)) == ["a"]
    await dead.fleet()
    clock.set_ahead(-HOURS_S)
    aborts: list[str] = []
    while not aborts:
        await gateway.fleet()
        aborts = [abort.id for abort in (await take(engine, tokens=0)).aborts]
    assert aborts == ["a"]


@pytest.mark.parametrize("ahead_s", [HOURS_S, -HOURS_S])
async def test_new_requests_are_served_after_the_clock_is_set(own_bus: Bus, clock: Clock, ahead_s: int) -> None:
    """Running ones continue, or their clients learn that Redis has lost them."""
    gateway, engine = await own_bus.gateway(), await own_bus.engine(lease_ms=paced_ms(500))
    await gateway.submit(generate("old"), bounds=PLENTY)
    assert ids(await take(engine)) == ["old"]
    await gateway.fleet()
    clock.set_ahead(ahead_s)
    fleet = await gateway.fleet()
    known = await gateway.attach("old")
    assert (known is None) == (ahead_s > 0)
    assert fleet.forgotten == (ahead_s > 0)
    deadline_ms = gateway.clock.redis_ms() + LONG_MS
    await gateway.submit(msgspec.structs.replace(generate("new"), deadline_ms=deadline_ms), bounds=PLENTY)
    assert "new" in ids(await take(engine))
    await engine.sync([("g1", batch("new", 0))], [], load("e1"), 0, 0)
    assert [delta.id for one in await read(gateway, 1) for delta in one.deltas] == ["new"]
    assert math.isclose(gateway.clock.skew_s, -ahead_s, abs_tol=60)
