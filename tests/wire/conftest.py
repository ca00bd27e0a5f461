"""Fixtures: a bus on the shared server, and one on a server that a test may stop, fill or break."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.wire.sides import Bus


@pytest.fixture
async def bus(redis_server: EmbeddedRedis, namespace: str) -> AsyncIterator[Bus]:
    bus = Bus(redis_server.url, namespace)
    yield bus
    await bus.close()


@pytest.fixture
def own_server(redis_binary: Path) -> Iterator[EmbeddedRedis]:
    """One that a test may stop, fill or break."""
    with EmbeddedRedis(binary=redis_binary) as server:
        yield server


@pytest.fixture
async def own_bus(own_server: EmbeddedRedis, namespace: str) -> AsyncIterator[Bus]:
    bus = Bus(own_server.url, namespace)
    yield bus
    own_server.start()
    await bus.close()
