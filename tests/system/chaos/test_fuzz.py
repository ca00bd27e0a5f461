"""The short fuzz; and that its judge can say no."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.system.chaos.fuzz import fuzz, judge, table
from tests.system.chaos.shots import Shooter, Shot


@pytest.mark.system
@pytest.mark.timeout(300)
async def test_hostile_clients_break_nothing(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        # The limit on stalls is generous: this machine may be slow.
        found = await fuzz(tmp_path, server, requests=600, seed=1, model="scripted", stall_s=0.5, say=print)
    print(table(found))
    assert not found.failures
    assert found.requests > 500
    assert found.statuses["200"] > 100
    assert found.statuses["400"] > 100


def test_a_shot_is_its_seed_and_number() -> None:
    shots = [Shooter(3).shot(number) for number in range(500)]
    assert shots == [Shooter(3).shot(number) for number in range(500)]
    assert shots != [Shooter(4).shot(number) for number in range(500)]
    kinds = Counter(shot.name.partition(" ")[0] for shot in shots)
    assert {"garbage", "noise", "comeback", "GET", "/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(kinds)


@pytest.mark.parametrize(
    ("answer", "status", "wrong"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "200", ""),
        (b"HTTP/1.1 400 Bad\r\n\r\n", "400", ""),
        (b'HTTP/1.1 503 X\r\n\r\n{"error":{"code":"too_many_open"}}', "503", ""),
        (b'HTTP/1.1 503 X\r\n\r\n{"error":{"code":"bored"}}', "503", "status 503, code bored"),
        (b"HTTP/1.1 500 X\r\n\r\n500 Internal", "500", "status 500, code none"),
        (b"HTTP/1.1 504 X\r\n\r\n", "504", "status 504, code none"),
        (b"", "closed", "no answer"),
        (
            b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"error":{"code":"internal_error"}}\n',
            "200",
            "a stream ended",
        ),
        (
            b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"error":{"code":"deadline_exceeded"}}\n',
            "200",
            "",
        ),
    ],
)
def test_an_answer_that_is_not_documented_is_found(answer: bytes, status: str, wrong: str) -> None:
    got, said = judge(Shot([b"GET / HTTP/1.1\r\n\r\n"], True), answer)
    assert got == status
    assert said.startswith(wrong)
    assert bool(said) == bool(wrong)
