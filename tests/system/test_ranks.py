"""An engine of two ranks under `quire serve`: a rank is killed, and every stream resumes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.pace import patience
from tests.system.processes import ending, wait_until_ready
from tests.system.test_survival import LIMIT_S, Answer, Served, begin, bodies, until
from tests.system.test_takeover import spare_of

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
OPTIONS = ("--dtype=float32", "--threads=1", "--kv-blocks=600", "--max-seqs=16", "--check-accounting")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S))) as session:
        yield session


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """Return the processes of an engine's other ranks."""
    return [child for child in engine.children() if "quire.engine.process.rank" in child.cmdline()]


async def test_a_killed_rank_ends_its_engine_and_every_stream_continues(
    checkpoint: Callable[[str], Path], tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    """The answers are those of an engine with one rank: greedy, sampled, with penalties, logprobs and a schema."""
    asked = [{**body, "max_tokens": min(150, body["max_tokens"]), "min_tokens": 0} for body in bodies()]
    alone = Served(tmp_path, checkpoint("llama"), *OPTIONS, "--no-spare")
    with ending([alone.process]):
        await asyncio.to_thread(wait_until_ready, alone.url, LIMIT_S)
        undisturbed = await asyncio.gather(*(Answer(body).read(client, alone.url) for body in asked))

    folder = tmp_path / "ranks"
    folder.mkdir()
    served = Served(folder, checkpoint("llama"), *OPTIONS, "--tensor-parallel=2", "--no-spare", "--late-wait-s=1000")
    with ending([served.process]):
        await asyncio.to_thread(wait_until_ready, served.url, LIMIT_S)
        engine = served.engine()
        assert engine is not None
        (rank,) = ranks_of(engine)
        answers = [Answer(body) for body in asked]
        reading = begin(answers, client, served.url)
        await until(lambda: all(answer.tokens[0] for answer in answers), reading)
        assert all(None in answer.ends for answer in answers)
        rank.kill()
        await asyncio.gather(*reading)
        for answer, wanted in zip(answers, undisturbed, strict=True):
            answer.same_as(wanted)
        assert not engine.is_running()
        said = served.process.said()
        assert said.count("quire engine: rank 1 ended with status -9") == 1
        assert said.count("ranks hold the model") == 2
        again = served.engine()
        assert again is not None
        (other,) = ranks_of(again)
    psutil.wait_procs([other], timeout=patience(LIMIT_S))
    assert not other.is_running()


async def test_a_spare_takes_over_with_the_ranks_that_waited_with_it(
    checkpoint: Callable[[str], Path], tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    asked = [{**body, "max_tokens": min(150, body["max_tokens"]), "min_tokens": 0} for body in bodies()]
    served = Served(tmp_path, checkpoint("llama"), *OPTIONS, "--tensor-parallel=2", "--late-wait-s=1000")
    with ending([served.process]):
        await asyncio.to_thread(wait_until_ready, served.url, LIMIT_S)
        undisturbed = await asyncio.gather(*(Answer(body).read(client, served.url) for body in asked))
        spare = await spare_of(served)
        await until(lambda: "rank 1 of a spare is prepared" in served.process.said(), [])
        (waiting,) = ranks_of(spare)
        engine = served.engine()
        assert engine is not None
        (rank,) = ranks_of(engine)
        answers = [Answer(body) for body in asked]
        reading = begin(answers, client, served.url)
        await until(lambda: all(answer.tokens[0] for answer in answers), reading)
        engine.kill()
        await asyncio.gather(*reading)
        for answer, wanted in zip(answers, undisturbed, strict=True):
            answer.same_as(wanted)
        psutil.wait_procs([rank], timeout=patience(LIMIT_S))
        assert not rank.is_running()
        assert served.engine() == spare
        assert ranks_of(spare) == [waiting]
        assert waiting.nice() == spare.nice()
