"""A sample of hostile answers, asked for in every way: no answer holds the event loop, fails or loses text.

`make chaos ARGS='answers'` asks for many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import python_s
from tests.service.output.hostile_answers import CALL, PATHS, Case, World, fields_of

# (notation, beginning, repeated unit, characters, endpoints): long tokens, so that they are few
SAMPLE: dict[str, tuple[str, str, str, int, list[str]]] = {
    "an argument that is no JSON": (
        "function-tags",
        "<tool_call>\n<function=f>\n<parameter=o>\n{",
        "'a': 1, " * 8,
        16_000,
        PATHS[1:3],
    ),
    "calls without end": ("hermes", "", CALL, 6000, PATHS[1:]),
    "long tokens": ("mistral", "", "ab" * 64, 8000, PATHS[:2]),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", SAMPLE)
async def test_no_answer_holds_the_event_loop(redis_server: EmbeddedRedis, tmp_path: Path, what: str) -> None:
    notation, beginning, unit, chars, paths = SAMPLE[what]
    answer = beginning + unit * (chars // len(unit))
    async with World(tmp_path, redis_server.url, notation) as world:
        for path in paths:
            case = Case(notation, answer, path, fields_of(path, tools=True, stops=True, scores=True, n=2))
            found = await world.ask(case)
            assert not found.wrong, f"{case}: {found.wrong}"
            assert found.turn_s <= 100 * python_s(), str(case)
