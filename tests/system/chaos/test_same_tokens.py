"""The small case of `same-tokens`: one digest, with and without kill -9; and what would make it differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.chaos.same_tokens import Answers, equal, requests, same_tokens


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.timeout(400)
async def test_one_digest_alone_in_a_crowd_and_through_a_kill(tmp_path: Path) -> None:
    runs = await same_tokens(tmp_path, 20, [1, 8], 1, seed=3)
    assert [(run.batch, run.kills) for run in runs] == [(1, 0), (1, 1), (8, 0), (8, 1)]
    assert all(run.tokens == sum(body["max_tokens"] for body in requests(20, 3)) for run in runs)
    assert equal(runs), [(run.sha256, run.met) for run in runs]


def test_a_lost_a_wrong_and_a_moved_token_change_the_digest() -> None:
    def run(*answers: list[int], met: list[int] | None = None) -> Answers:
        return Answers(8, len(met or []), met or [], ids=dict(enumerate(answers)))

    sound = run([1, 2, 3], [4, 5])
    assert equal([sound, run([1, 2, 3], [4, 5], met=[3])])
    for other in (run([1, 2], [4, 5]), run([1, 2, 4], [4, 5]), run([1, 2], [3, 4, 5]), run([4, 5], [1, 2, 3])):
        assert not equal([sound, other])
    assert not equal([sound, run([1, 2, 3], [4, 5], met=[3, 0])])  # a kill that met no stream proves nothing


def test_no_two_requests_sample_alike() -> None:
    made = requests(500, 1)
    assert len({body["seed"] for body in made}) == 500
    assert len({tuple(body["prompt"]) for body in made}) == 500
    assert made == requests(500, 1)
    assert made != requests(500, 2)
