"""The small case of `adapter-cycles`, and what it would find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.system.chaos.adapter_cycles import CLIENTS, Counts, adapter_cycles, grown

CYCLES = 6


@pytest.mark.system
async def test_adapters_come_and_go_under_traffic_without_a_wrong_text_or_a_leak(
    redis_server: EmbeddedRedis, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    before, after, world = await adapter_cycles(redis_server.url, checkpoint("llama"), tmp_path, CYCLES)
    assert world.wrong == 0
    assert world.answers > 2 * CYCLES + len(CLIENTS)
    assert grown(before, after, CYCLES) == []


def test_what_grows_is_named() -> None:
    before = Counts(objects=100_000, descriptors=20, threads=10, keys=30, excess=0)
    assert grown(before, before, 1000) == []
    for name, value in (("objects", 102_000), ("descriptors", 40), ("threads", 20), ("keys", 1030), ("excess", 1)):
        assert grown(before, msgspec.structs.replace(before, **{name: value}), 1000) == [name]
