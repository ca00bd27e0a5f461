"""Fixtures for every room: a real Redis server, and a namespace of its own for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from engine.wire.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """Shared by the whole session: isolate by `namespace`; a test that stops or fills a server starts its own."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"
