"""Prefix locality between engines on machines whose clocks are minutes apart: how long a request is left to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.layout import STALE_MS
from quire.engine.wire.records import QueueBounds
from tests.wire.sides import Bus
from tests.wire.test_locality import ask, prompt

TOKEN_US = 1000.0  # 1,100 prompt tokens take 1.1 s
AGES_US = 1e6  # so slow that no delay ends within a test


class Engine:
    """An engine in a process whose clock is ahead by some seconds."""

    def __init__(self, folder: Path, url: str, namespace: str, name: str, ahead_s: float) -> None:
        clock = folder / f"{name}.clock"
        clock.write_text(str(ahead_s))
        command = [sys.executable, "-m", "tests.system.skewed", str(clock), "tests.wire.engine_process"]
        self.process = subprocess.Popen(
            [*command, url, namespace, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def sync(self, token_us: float = TOKEN_US, gains: Sequence[int] = ()) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"gains": gains, "token_us": token_us}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        self.process.communicate()


@contextlib.contextmanager
def two(folder: Path, url: str, namespace: str, ahead_s: float) -> Iterator[tuple[Engine, Engine]]:
    with contextlib.ExitStack() as stack:
        engines = [Engine(folder, url, namespace, name, at) for name, at in (("e1", ahead_s), ("e2", -ahead_s))]
        for engine in engines:
            stack.callback(engine.close)
        yield engines[0], engines[1]


@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
async def test_clocks_minutes_apart_leave_no_request_longer_and_none_sooner(
    bus: Bus, redis_server: EmbeddedRedis, tmp_path: Path, ahead_s: float
) -> None:
    """By the holder's clock its last sync was minutes ago or in the future; by the other's all times passed or none."""
    gateway = await bus.gateway()
    with two(tmp_path, redis_server.url, bus.namespace, ahead_s) as (holder, other):
        assert abs(holder.sync(gains=[1, 2])["clock_s"] - ahead_s) < 5
        assert abs(other.sync()["clock_s"] + ahead_s) < 5

        await gateway.submit(ask("held", prompt(1, 1100)))
        got = other.sync()
        assert (got["ids"], 0 < got["retry_ms"] <= 1100) == ([], True)
        got = holder.sync()
        assert (got["ids"], got["held"]) == (["held"], [1024])

        await gateway.submit(ask("on time", prompt(1, 1100)), bounds=QueueBounds(target_ms=60_000))
        got = other.sync(AGES_US)
        assert (got["ids"], 40_000 <= got["retry_ms"] <= 45_000) == ([], True)  # three quarters of its time
        assert holder.sync(AGES_US)["ids"] == ["on time"]

        silent_since = time.monotonic()
        holder.sync()  # its last one; it has computed everything
        await gateway.submit(ask("left for its time", prompt(1, 1100)))
        got = other.sync()
        assert (got["ids"], 0 < got["retry_ms"] <= 1100) == ([], True)
        await asyncio.sleep(got["retry_ms"] / 1000)
        assert other.sync()["ids"] == ["left for its time"]

        await gateway.submit(ask("left to a silent engine", prompt(2, 1100)))
        got = other.sync(AGES_US)
        assert (got["ids"], got["retry_ms"] > 60_000) == ([], True)
        await asyncio.sleep(silent_since + STALE_MS / 1000 + 0.2 - time.monotonic())
        assert other.sync(AGES_US)["ids"] == ["left to a silent engine"]
