"""What a restart costs the requests after it: hot prefixes computed ahead, or not.

    python -m tests.system.restarts [--rounds 3] [--prefixes 6] [--tokens 800] [--rate 4] [--seconds 15]

The only engine (the 42M-parameter model of loadtest.throughput) gets SIGTERM and is started again, with and without
--warm-seconds in turn, under Poisson arrivals; each prompt is one of a few long prefixes and a short suffix of its own.
Time to first token counts from when a request was due; a refused one is retried every 50 ms.  Printed are those of
requests due within so many seconds after the engine was ready again, and those before it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest import machine
from quire.loadtest.checkpoint import make_llama_42m
from tests.pace import patience
from tests.ports import free_port
from tests.system.processes import Process, at_rest, ending, fleet_until, wait_until_ready

OWN = 24  # tokens behind the prefix, different in each request
ANSWER = 3  # tokens
COME_AGAIN_S = 0.05


class First(NamedTuple):
    """What came of one request."""

    seconds: float  # from when it was due to the first token
    cached: int  # prompt tokens found in the prefix cache
    prompt: int


class Restarts:
    """A gateway, and an engine that comes and goes."""

    def __init__(
        self, redis_url: str, namespace: str, folder: Path, checkpoint: Path, processes: list[Process], *options: str
    ) -> None:
        self.redis_url, self.namespace = redis_url, namespace
        self._folder, self._processes, self._options = folder, processes, options
        self._shared = [str(checkpoint), f"--redis-url={redis_url}", f"--namespace={namespace}", "--served-name=m"]
        self._starts = 0
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        wait = "--late-wait-s=1000"  # what is measured here is not admission
        processes.append(Process(folder / "gateway.log", "gateway", *self._shared, f"--port={port}", wait))

    def launch(self, *options: str, **how: Any) -> Process:
        """Start the engine, always under the same name."""
        self._starts += 1
        words = (*self._shared, "--engine-id=e", *self._options, *options)
        command = () if "command" in how else ("engine",)
        process = Process(self._folder / f"engine{self._starts}.log", *command, *words, **how)
        self._processes.append(process)
        return process

    async def engine(self, *options: str) -> Process:
        """The same, and wait until requests are answered."""
        process = await asyncio.to_thread(self.launch, *options)
        await fleet_until(self.redis_url, self.namespace, lambda fleet: len(fleet.engines) == 1, 100.0)
        await asyncio.to_thread(wait_until_ready, self.url, 100.0)
        return process

    async def rest(self) -> None:
        """Wait until no request is served."""
        await fleet_until(self.redis_url, self.namespace, at_rest, 100.0)

    async def first(self, session: aiohttp.ClientSession, prompt: list[int], due: float | None = None) -> First:
        """Ask, and read the answer to its end.  `due`: time.monotonic(), when it should have been asked."""
        due = time.monotonic() if due is None else due
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        while True:
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status in (429, 503):
                    await response.read()
                    await asyncio.sleep(COME_AGAIN_S)
                    continue
                assert response.status == 200, await response.text()
                seconds = 0.0
                usage: dict[str, Any] = {}
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        if any(choice.get("token_ids") for choice in event["choices"]):
                            seconds = seconds or time.monotonic() - due
                        usage = event.get("usage") or usage
                return First(seconds, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])


def text(seed: int, tokens: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(tokens)]


def hit_rate(found: list[First]) -> float:
    return sum(one.cached for one in found) / sum(one.prompt for one in found)


async def load(
    made: Restarts, session: aiohttp.ClientSession, prefixes: list[list[int]], rate: float, seconds: float, seed: int
) -> list[First]:
    """Open loop, for so many seconds."""
    rng, due, asked = random.Random(seed), time.monotonic(), []
    until = due + seconds
    while (due := due + rng.expovariate(rate)) < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        prompt = rng.choice(prefixes) + text(rng.randrange(2**32), OWN, 16_000)
        asked.append(asyncio.create_task(made.first(session, prompt, due)))
    return list(await asyncio.gather(*asked))


def described(found: list[First]) -> dict[str, float]:
    times = sorted(one.seconds for one in found)
    return {
        "requests": len(found),
        "ttft_p50_ms": round(1000 * statistics.median(times), 1),
        "ttft_p95_ms": round(1000 * times[int(0.95 * (len(times) - 1))], 1),
        "ttft_max_ms": round(1000 * times[-1], 1),
        "hit_rate": round(hit_rate(found), 3),
    }


async def measure(made: Restarts, options: argparse.Namespace) -> dict[str, Any]:
    prefixes = [text(i, options.tokens, 16_000) for i in range(options.prefixes)]
    timeout = aiohttp.ClientTimeout(total=patience(300))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        runs: dict[str, list[First]] = {"before": [], "warm": [], "cold": []}
        away: dict[str, list[float]] = {"warm": [], "cold": []}
        engine = await made.engine()
        await load(made, session, prefixes, options.rate, options.seconds, 0)
        for number in range(options.rounds):
            for how in sorted(away, reverse=bool(number % 2)):
                runs["before"] += await load(made, session, prefixes, options.rate, options.seconds, 2 * number + 1)
                await made.rest()
                await asyncio.to_thread(engine.terminate)
                began = time.monotonic()
                engine = await made.engine(*([] if how == "warm" else ["--warm-seconds=0"]))
                away[how].append(time.monotonic() - began)
                print(how, engine.said(), file=sys.stderr, flush=True)
                runs[how] += await load(made, session, prefixes, options.rate, options.seconds, 2 * number + 2)
                if how == "cold":  # one that keeps the manifest up
                    await made.rest()
                    await asyncio.to_thread(engine.terminate)
                    engine = await made.engine()
    figures: dict[str, Any] = {name: described(found) for name, found in runs.items()}
    for how, seconds in away.items():
        figures[how]["start_s"] = round(statistics.median(seconds), 2)
    return figures


@contextlib.contextmanager
def restarts(folder: Path, checkpoint: Path, *options: str) -> Iterator[Restarts]:
    with EmbeddedRedis() as server, ending([]) as processes:
        yield Restarts(server.url, "restarts", folder, checkpoint, processes, *options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="restarts of each kind")
    parser.add_argument("--prefixes", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=800, help="of each prefix")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of load before and after each restart")
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "model"
        make_llama_42m(checkpoint)
        with restarts(Path(scratch), checkpoint, "--threads=1", "--kv-blocks=2000") as made:
            figures = asyncio.run(measure(made, options))
    print(json.dumps(figures, indent=1))
    if options.result:
        machine.write(options.result, shlex.join(["python", "-m", "tests.system.restarts", *sys.argv[1:]]), figures)


if __name__ == "__main__":
    main()
