"""A stored answer, however long, is sent in slices between which others run, and no stream is silent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.engine.wire.messages import Finish, Generate
from quire.service.common import pacing
from quire.service.common.pacing import Pacer
from quire.service.text.text_stream import SLICE_TOKENS, SLICE_WEIGHT, LongWork, reasoning_tokens
from quire.service.text.tokenizer import Tokenizer
from tests.pace import patience
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.text.test_content import OPEN, asking

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]


class Clock:
    """The time of a loop whose work takes as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


async def test_long_works_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number, one slice runs in a turn of the loop; the clock says when a slice is over."""
    clock, pacer = Clock(monkeypatch), Pacer()
    turns, busy = [0.0], True

    async def count_turns() -> None:
        while busy:
            turns.append(clock.now)
            await asyncio.sleep(0)

    async def work() -> None:
        long = LongWork(pacer)
        for _ in range(100):
            await long.does(SLICE_WEIGHT)
            clock.now += pacing.SLICE_S / 4

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(work() for _ in range(10)))
    busy = False
    await counting
    # Ten times a first part that no slice is needed for may be in one turn.
    gaps = [after - before for before, after in itertools.pairwise(turns[5:])]
    assert max(gaps) <= 2 * pacing.SLICE_S
    assert len(turns) >= 10 * 100 / 5


async def test_little_work_waits_for_no_turn() -> None:
    long = LongWork(Pacer())
    for _ in range(3):
        long.begin()
        assert not await long.does(SLICE_WEIGHT)


async def test_a_cancelled_work_leaves_its_turn_to_others() -> None:
    pacer = Pacer()
    first, second = (asyncio.create_task(pacer.slice()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, patience(60))
    await asyncio.wait_for(pacer.slice(), patience(60))


async def test_what_a_resuming_client_has_is_read_in_slices(
    tools_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pacer, yields = Pacer(), 0
    clock = Clock(monkeypatch)
    asked = pacer.slice

    async def slice_() -> float:
        nonlocal yields
        yields += 1
        clock.now += pacing.SLICE_S
        return await asked() - pacing.SLICE_S  # each part takes a slice

    monkeypatch.setattr(pacer, "slice", slice_)
    tokens = tools_tokenizer._encode("a", special=False) * 10 * SLICE_TOKENS
    assert await reasoning_tokens(asking(OPEN), tools_tokenizer, tokens, pacer) == len(tokens)
    assert yields == 9


PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 200},
}
TOOLS: dict[str, Any] = {
    "/v1/chat/completions": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "/v1/messages": [{"name": "f", "input_schema": {"type": "object"}}],
    "/v1/responses": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("held", ["a call", "a stop string"])
async def test_no_stream_is_silent_while_text_is_held_back(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, path: str, held: str
) -> None:
    """Tokens come more often than the heartbeat, and none of them can be sent: yet bytes arrive, again and again."""
    served = await serve(tools_tokenizer, heartbeat_s=0.2, default_timeout_s=120.0)
    lead, unit = ("<tool_call>\n", '{"x') if held == "a call" else ("", "ab")
    lead_ids, unit_ids = tools_tokenizer._encode(lead, special=False), tools_tokenizer._encode(unit, special=False)

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        return (lead_ids + unit_ids * 120)[:120], None

    body = {"model": "tiny", "stream": True, **PATHS[path]}
    if held == "a call":
        body["tools"] = TOOLS[path]
    else:
        body["stop_sequences" if path == "/v1/messages" else "stop"] = ["ab" * 128]
    seen, last = 0, b""
    async with engine(script, step_s=0.03) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        async with served.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            async with asyncio.timeout(patience(110)):
                async for line in response.content:
                    filled = line.startswith((b": keep-alive", b"event: ping")) or (line == last == b"\n")
                    seen += filled
                    last = line
                    if seen >= 3:
                        break
                    assert b"[DONE]" not in line, "the answer ended before the client saw anything"
            response.close()
        await settled(lambda: not fake.busy)
