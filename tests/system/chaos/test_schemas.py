"""A few random schemas over HTTP; and that their judge can say no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.chaos.schemas import LONGEST, Answer, draws, judge, request, schemas, table

COUNT = 40
STARS: dict[str, Any] = {"type": "object", "properties": {"stars": {"type": "integer", "maximum": 5}}}


@pytest.mark.system
def test_every_answer_that_ends_validates(tmp_path: Path) -> None:
    found = schemas(tmp_path, count=COUNT, seed=1)
    print(table(found))
    assert not found.failures
    assert found.finished + found.cut == COUNT
    assert found.finished > COUNT / 2


def test_draws_are_their_seed_and_reach_both_endpoints_whole_and_streamed() -> None:
    found = draws(COUNT, 3)
    assert len(found) == COUNT
    assert found == draws(COUNT, 3)
    assert found != draws(COUNT, 4)
    sent = [request(number, draw) for number, draw in enumerate(found)]
    assert len({(path, "stream" in body) for path, body in sent}) == 4
    assert len({str(schema) for schema, _ in found}) > COUNT / 2
    assert {"temperature", "min_tokens", "logprobs"} <= {name for _, body in sent for name in body}


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (Answer('{"stars": 5}', "stop", 9), ""),
        (Answer('{"stars": ', "length", LONGEST), ""),
        (Answer('{"stars": ', "length", 9), "cut after 9"),
        (Answer('{"stars": 6}', "stop", 9), "6 is greater"),
        (Answer('{"stars": ', "stop", 9), "no JSON"),
        (Answer('{"stars": 5}', None, 9), "it ended with None"),
        ("status 500: x", "status 500"),
    ],
)
def test_an_answer_that_does_not_validate_is_found(answer: Answer | str, wrong: str) -> None:
    found = judge(STARS, answer)
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)
