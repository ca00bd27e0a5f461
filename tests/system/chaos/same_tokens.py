"""One SHA-256 of all token ids, however they were computed: one request at a time or 64, with and without kill -9.

    python -m tests.system.chaos same-tokens [--requests 500] [--batches 1,64] [--kills 3] [--seed 1] [--result NAME]

One `quire serve --deterministic` with a tiny checkpoint on a CPU answers the same sampled requests several times:
with each number of open requests, undisturbed, and again while the engine is killed with SIGKILL.  A kill comes when a
share of all tokens has arrived, never at a time, so it always meets streams that are open.  Exit status 1 where a run
has another digest, or where a kill met no open stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from quire.loadtest import machine
from quire.loadtest.server import MODEL_NAME, Server, engine_processes, serve
from tests.checkpoints import VOCAB, make_checkpoint
from tests.pace import Patience, patience
from tests.system.processes import sse_events, until

PROMPT, OUTPUT = (4, 60), (16, 96)  # tokens, minimum and maximum
# Blocks for all open requests, so that no kill is mistaken for a preemption.  A test of determinism has preemptions.
FLAGS = ["--deterministic", "--dtype=float32", "--threads=1", "--max-seqs=64", "--kv-blocks=1500", "--late-wait-s=1000"]


@dataclass
class Answers:
    """Parameters of one run."""

    batch: int
    kills: int = 0
    met: list[int] = field(default_factory=list)  # streams with a token and no end, at each kill
    tokens: int = 0
    seconds: float = 0.0
    ids: dict[int, list[int]] = field(default_factory=dict)  # by number of the request
    open: set[int] = field(default_factory=set)  # requests with a token and no end

    @property
    def sha256(self) -> str:
        """Digest of the token ids of all requests, in the order of their numbers."""
        return hashlib.sha256(json.dumps(sorted(self.ids.items())).encode()).hexdigest()


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Return bodies of sampled requests; a third begin with the same 32 tokens."""
    rng = random.Random(seed)
    shared = rng.choices(range(3, VOCAB), k=32)
    made = []
    for number in range(count):
        prompt = rng.choices(range(3, VOCAB), k=rng.randint(*PROMPT))
        made.append(
            {
                "model": MODEL_NAME,
                "prompt": shared + prompt if number % 3 == 0 else prompt,
                "max_tokens": rng.randint(*OUTPUT),
                "temperature": rng.choice([0.7, 1.0, 1.3]),
                "top_p": rng.choice([1.0, 0.9]),
                "seed": seed * 1_000_000 + number,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        )
    return made


@contextlib.asynccontextmanager
async def accepted(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request, again after each 429 and 503: on a busy machine an engine may be silent for seconds."""
    bound = Patience(300)
    while True:
        async with session.post(url, json=body) as response:
            if response.status not in (429, 503) or not bound.lasts():
                assert response.status == 200, await response.text()
                yield response
                return
            await asyncio.sleep(float(response.headers["Retry-After"]))


async def one_run(server: Server, bodies: list[dict[str, Any]], batch: int, kills: int) -> Answers:
    """Send all requests, at most `batch` open at a time; kill the engine whenever another share of the tokens is in."""
    answers, waiting = Answers(batch), iter(enumerate(bodies))
    total = sum(body["max_tokens"] for body in bodies)
    due = [total * (one + 1) // (kills + 1) for one in range(kills)]
    began = time.monotonic()

    async def client(session: aiohttp.ClientSession) -> None:
        for number, body in waiting:
            found = answers.ids[number] = []
            async with accepted(session, f"{server.url}/v1/completions", body) as response:
                async for event in sse_events(response):
                    for choice in event["choices"]:
                        found += choice["token_ids"]
                        answers.tokens += len(choice["token_ids"])
                    answers.open.add(number)
            answers.open.discard(number)

    async def kill_at(tokens: int) -> None:
        await until(lambda: answers.tokens >= tokens and bool(answers.open))
        engine = engine_processes(server.process)[0]
        answers.met.append(len(answers.open))
        engine.kill()
        answers.kills += 1
        await until(lambda: engine not in engine_processes(server.process), poll_s=0.05)

    async def killer() -> None:
        for tokens in due:
            await kill_at(tokens)

    timeout = aiohttp.ClientTimeout(total=None, sock_read=patience(300))
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        killing = asyncio.create_task(killer())
        await asyncio.gather(*(client(session) for _ in range(batch)))
        await killing
    answers.seconds = time.monotonic() - began
    return answers


async def same_tokens(
    folder: Path, count: int, batches: list[int], kills: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> list[Answers]:
    """Return the answers of each run."""
    bodies, done = requests(count, seed), []
    checkpoint = make_checkpoint(folder / "llama", "llama")
    with serve(str(checkpoint), *FLAGS, log=folder / "serve.log") as server:
        for batch, deaths in itertools.product(batches, sorted({0, kills})):
            done.append(await one_run(server, bodies, batch, deaths))
            say(line(done[-1]))
    return done


def line(run: Answers) -> str:
    met = f", which met {', '.join(map(str, run.met))} open streams" if run.kills else ""
    return (
        f"{run.batch} at a time, {run.kills} kills{met}: {len(run.ids)} requests, {run.tokens} tokens in "
        f"{run.seconds:.0f} s, {run.sha256}"
    )


def figures(runs: list[Answers]) -> dict[str, Any]:
    """Return what a result file has."""
    return {
        "equal": equal(runs),
        "runs": [
            {
                "batch": run.batch,
                "kills": run.kills,
                "streams_open_at_kills": run.met,
                "requests": len(run.ids),
                "tokens": run.tokens,
                "seconds": round(run.seconds, 1),
                "sha256": run.sha256,
            }
            for run in runs
        ],
    }


def equal(runs: list[Answers]) -> bool:
    """Whether all runs have one digest, and each kill met a stream."""
    return len({run.sha256 for run in runs}) == 1 and all(
        0 not in run.met and len(run.met) == run.kills for run in runs
    )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--batches", default="1,64", help="open requests, with commas between them")
    parser.add_argument("--kills", type=int, default=3, help="of each disturbed run; 0: none is disturbed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    options = parser.parse_args(words)
    batches = [int(part) for part in options.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        runs = asyncio.run(
            same_tokens(
                Path(folder),
                options.requests,
                batches,
                options.kills,
                options.seed,
                lambda said: print(said, flush=True),
            )
        )
    print("one digest" if equal(runs) else "the digests differ, or a kill met no open stream")
    if options.result:
        machine.write(
            options.result, shlex.join(["python", "-m", "tests.system.chaos", "same-tokens", *words]), figures(runs)
        )
    return 0 if equal(runs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
