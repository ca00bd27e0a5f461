"""The small case of `kills`: a tiny checkpoint is killed under streams of every kind; and what would not be clean."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from quire.loadtest.server import serve
from tests.system.chaos.kills import FLAGS, KINDS, Found, asks, run, sound, with_tools


@pytest.mark.system
@pytest.mark.timeout(400)
async def test_streams_of_every_kind_survive_kills(tmp_path: Path) -> None:
    flags = [*FLAGS, "--dtype=float32", "--threads=1"]
    with serve(str(with_tools(tmp_path)), *flags, log=tmp_path / "serve.log") as server:
        found = await run(server, asks(8, seed=2), streams=6, kills=3)
    assert found.clean, found
    assert len(found.met) == 3
    assert len(found.pauses_s) <= sum(found.met)
    assert found.answers.keys() == set(KINDS)


def test_a_wrong_answer_and_a_kill_that_met_nobody_are_not_clean() -> None:
    every = Counter(dict.fromkeys(KINDS, 1))
    assert Found(every, met=[2]).clean
    assert not Found(every, met=[2], wrong=["one"]).clean
    assert not Found(every, met=[2, 0]).clean
    assert not Found(Counter(plain=3), met=[2]).clean


def test_only_whole_answers_are_compared_with() -> None:
    plain, _, structured, tools = asks(4, seed=1)
    usage = {"prompt_tokens": 5, "completion_tokens": 90}
    said = {"text": "once", "calls": [], "finish": "length"}
    assert sound(plain, {"choices": [said], "usage": usage})
    assert not sound(plain, {"choices": [said], "usage": {}})
    assert not sound(plain, {"choices": [said | {"finish": "stop"}], "usage": usage})
    assert not sound(plain, {"choices": [said, said], "usage": usage})
    weather = '{"city": "a", "rain": true, "degrees": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'
    assert sound(structured, {"choices": [said | {"text": weather, "finish": "stop"}], "usage": usage})
    assert not sound(structured, {"choices": [said | {"text": weather[:30]}], "usage": usage})  # cut
    assert sound(
        tools, {"choices": [{"text": "", "calls": [["report", weather]], "finish": "tool_calls"}], "usage": usage}
    )
    assert not sound(
        tools, {"choices": [{"text": "", "calls": [["report", weather]], "finish": "stop"}], "usage": usage}
    )
