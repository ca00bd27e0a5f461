"""The pause of streams after a kill of the engine, and the time of each part of the restart.

    python -m quire.loadtest recovery MODEL [--streams 32] [--kills 4] [--second-after 4] [--server=--threads=1]

MODEL is a directory, in which the 42M model is created if it is empty, or a shape of loadtest/shapes.py with random
weights (`--load random`). `quire serve` runs with one engine and its spare.  Each client streams
long answers and checks the position that every event carries.  One round is two kills (SIGKILL):

    first     the spare of the engine is ready, every stream has --warm tokens
    second    --second-after seconds after every stream resumed, often before the next spare is ready

A stream's pause runs from its last token before the kill to its first token after it.  This program follows the
server's log for the parts of a restart: when the supervisor reported the death, and when the engine reported its start.
The engine itself reports the seconds of its start ("started: ...").

`--root` measures the server of another checkout with the same clients.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from quire.loadtest import command_line, machine, shapes
from quire.loadtest.checkpoint import make_llama_42m, prepare
from quire.loadtest.server import MODEL_NAME, Server, engine_processes, serve

LIMIT_S = 120.0  # maximum seconds until a condition holds
CONTEXT = 8192  # context length of shapes, in tokens
POLL_S = 0.005
PART = re.compile(r"([a-zA-Z][a-zA-Z ]*?) (\d+\.\d+) s")


@dataclass
class Stream:
    """One client: the tokens it has received, their times, and every wrong position."""

    tokens: int = 0  # tokens of all answers
    position: int = 0  # token position in the current answer
    # Monotonic seconds of received tokens: the last one before `forget_times()`, and all since.
    times: list[float] = field(default_factory=lambda: [0.0])
    lost: int = 0
    repeated: int = 0
    failure: str = ""

    def forget_times(self) -> None:
        """Drop all times but the last."""
        del self.times[:-1]

    def pause(self, killed: float) -> tuple[float, float]:
        """Return (seconds, end) of the longest time between two tokens that ended after `killed`."""
        ends = [(after - before, after) for before, after in itertools.pairwise(self.times) if after > killed]
        return max(ends, default=(0.0, 0.0))

    def received(self, count: int, position: int, now: float) -> None:
        """Count `count` new tokens of an event that reports `position` tokens of the answer so far."""
        ahead = position - (self.position + count)
        self.lost += max(0, ahead)
        self.repeated += max(0, -ahead)
        self.position = position
        self.tokens += count
        self.times.append(now)

    async def read(self, session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> None:
        """Stream greedy answers of `tokens` tokens one after another until one fails, which sets `failure`."""
        while not self.failure:
            self.position = 0
            await self.answer(session, url, prompt, tokens)
            if not self.failure and self.position != tokens:
                self.failure = f"an answer of {self.position} tokens, not {tokens}"

    async def answer(self, session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_ids": True},
        }
        position = 0
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                self.failure = f"{response.status}: {await response.text()}"
                return
            async for line in response.content:
                if line.startswith(b"id: "):
                    position = int(line.split(b":")[2] or 0)
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.failure = str(event["error"])
                        return
                    if count := sum(len(choice.get("token_ids") or ()) for choice in event["choices"]):
                        self.received(count, position, time.monotonic())


@dataclass
class Log:
    """The server's log, read as it grows: (monotonic seconds at which a line was read, line)."""

    path: Path
    lines: list[tuple[float, str]] = field(default_factory=list)

    async def follow(self) -> None:
        """Read until cancelled."""
        rest = ""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            while True:
                if block := file.read():
                    *whole, rest = (rest + block).split("\n")
                    self.lines += [(time.monotonic(), line) for line in whole]
                await asyncio.sleep(POLL_S)

    def first(self, words: str, since: float) -> tuple[float, str]:
        """Return the first line with these words after `since`; (0, "") without one."""
        return next(((at, line) for at, line in self.lines if at >= since and words in line), (0.0, ""))


async def until(holds: Any, streams: list[Stream]) -> None:
    """Wait until `holds()` is true.  Raises RuntimeError when a stream fails or LIMIT_S pass."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        if failed := [stream.failure for stream in streams if stream.failure]:
            raise RuntimeError(f"{len(failed)} streams failed: {failed[0]}")
        if time.monotonic() > end:
            raise RuntimeError(f"the streams did not continue in {LIMIT_S:g} s")
        await asyncio.sleep(POLL_S)


def cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


async def spare_ready(server: Server, log: Log) -> None:
    """Wait until a spare engine is ready, for LIMIT_S at most.

    Older versions (`--root`) do not log this.  Their spare counts as ready once it has stopped using the CPU."""
    end = time.monotonic() + LIMIT_S
    quiet, spent = 0, 0.0
    while time.monotonic() < end and quiet < 20:
        found = engine_processes(server.process)
        if len(found) == 2 and any(f"spare {found[-1].pid} is ready" in line for _, line in log.lines):
            return
        now = cpu_s(found[-1]) if len(found) == 2 else 0.0
        quiet = quiet + 1 if now > 2.0 and now == spent else 0
        spent = now
        await asyncio.sleep(0.25)


async def kill(server: Server, streams: list[Stream], log: Log) -> dict[str, Any]:
    """Kill the engine and wait until every stream has a new token.  Return the pauses and their parts, in seconds."""
    engine, *spares = engine_processes(server.process)
    before = cpu_s(spares[0]) if spares else 0.0
    tokens = sum(stream.tokens for stream in streams)
    for stream in streams:
        stream.forget_times()
    engine.kill()
    killed = time.monotonic()
    await until(lambda: log.first("started: ", killed)[0] > 0, streams)
    up, line = log.first("started: ", killed)
    await until(lambda: all(stream.times[-1] > up for stream in streams), streams)
    successor = engine_processes(server.process)[0]
    cpu = cpu_s(successor) - (before if spares and successor.pid == spares[0].pid else 0.0)
    pauses = sorted(stream.pause(killed) for stream in streams)
    ends = sorted(end for _, end in pauses)
    noticed, _ = log.first("was killed by", killed)
    parts = {name.strip(): float(value) for name, value in PART.findall(line.partition("started: ")[2])}
    figures: dict[str, Any] = {
        "longest_pause_s": round(pauses[-1][0], 3),
        "median_pause_s": round(pauses[len(pauses) // 2][0], 3),
        "tokens_before": tokens,
        "noticed_s": round(noticed - killed, 3),
        "up_s": round(up - killed, 3),
        "first_token_s": round(ends[0] - killed, 3),
        "all_tokens_s": round(ends[-1] - killed, 3),
        "engine_cpu_s": round(cpu, 2),
        "parts_s": parts,
    }
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


async def more_tokens(streams: list[Stream], count: int) -> None:
    """Wait until every stream has `count` more tokens.  Raises RuntimeError as until() does."""
    wanted = [stream.tokens + count for stream in streams]
    await until(lambda: all(a.tokens >= b for a, b in zip(streams, wanted, strict=True)), streams)


async def measure(server: Server, options: argparse.Namespace, vocab: int, log: Log) -> dict[str, Any]:
    """Run all rounds; return tokens lost and repeated, each kill, and medians over kills."""
    rng = random.Random(options.seed)
    following = asyncio.create_task(log.follow())
    rounds: dict[str, list[dict[str, Any]]] = {"first": [], "second": []}
    resumed = 0.0  # monotonic seconds when the last stream had resumed
    every: list[Stream] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for _ in range(-(-options.kills // 2)):
            await spare_ready(server, log)
            streams = [Stream() for _ in range(options.streams)]
            every += streams
            prompts = [[rng.randrange(3, vocab) for _ in range(options.prompt)] for _ in streams]
            reading = [
                asyncio.create_task(stream.read(session, server.url, prompt, options.tokens))
                for stream, prompt in zip(streams, prompts, strict=True)
            ]
            for which in ("first", "second"):
                if sum(map(len, rounds.values())) == options.kills:
                    break
                await more_tokens(streams, options.warm)
                if which == "second":
                    await asyncio.sleep(max(0.0, resumed + options.second_after - time.monotonic()))
                rounds[which].append(await kill(server, streams, log))
                resumed = time.monotonic()
            await more_tokens(streams, options.warm)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    following.cancel()
    figures: dict[str, Any] = {
        "tokens": sum(stream.tokens for stream in every),
        "tokens_lost": sum(stream.lost for stream in every),
        "tokens_repeated": sum(stream.repeated for stream in every),
    }
    for which, kills in rounds.items():
        if kills:
            figures[which] = summary(kills)
            figures[f"{which}_kills"] = kills
    return figures


def summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over several kills, and the worst pause."""
    names = dict.fromkeys(name for each in kills for name in each["parts_s"])
    figures = {
        name: round(statistics.median(each[name] for each in kills), 3) for name in kills[0] if name != "parts_s"
    }
    parts = {name: round(statistics.median(each["parts_s"].get(name, 0.0) for each in kills), 3) for name in names}
    return {**figures, "worst_pause_s": max(each["longest_pause_s"] for each in kills), "parts_s": parts}


def model(name: str, scratch: Path) -> tuple[str, int, list[str]]:
    """Return (directory, vocabulary of the prompts, options of the server) of a directory or shape."""
    if name not in shapes.CONFIGS:
        directory = Path(name)
        if not (directory / "config.json").exists():
            print(f"making the 42M model in {directory}", flush=True)
            make_llama_42m(directory)
        vocab, _ = prepare(directory)
        return str(directory.absolute()), vocab, []
    directory, small = scratch / name, scratch / "tokenizer"
    shapes.write(name, directory)
    make_llama_42m(small)  # a gateway needs a tokenizer; ids outside its vocabulary have no text but are sent as ids
    for file in small.glob("token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return str(directory), shapes.CONFIGS[name]["vocab_size"], ["--load", "random", "--max-model-len", str(CONTEXT)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"a directory, or one of {', '.join(shapes.CONFIGS)}")
    parser.add_argument(
        "--root", type=Path, default=machine.ROOT, help="checkout whose server is measured; default: this one"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the engine")
    parser.add_argument("--streams", type=int, default=32, help="answers that are streamed at once; default 32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt; default 128")
    parser.add_argument(
        "--warm", type=int, default=100, help="tokens of each stream before and after a kill; default 100"
    )
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each answer; default 1000")
    parser.add_argument(
        "--kills", type=int, default=4, help="number of kills, two per round, each round with new streams; default 4"
    )
    parser.add_argument(
        "--second-after", type=float, default=4.0, help="seconds from the recovery to the second kill; default 4"
    )
    parser.add_argument("--server", action="append", default=[], help="one more option of quire serve; may be repeated")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts; default 1")
    parser.add_argument("--log", type=Path, help="file that keeps the server's log; default: not kept")
    parser.add_argument(
        "--name", type=machine.result_name, help="write loadtest/results/NAME.json; default: print only"
    )


def main(options: argparse.Namespace, command: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        directory, vocab, flags = model(options.model, Path(scratch))
        flags += ["--device", options.device, "--late-wait-s", "1000", *options.server]
        log = Log(options.log or Path(scratch) / "serve.log")
        with serve(directory, *flags, checkout=options.root, log=log.path) as server:
            figures = asyncio.run(measure(server, options, vocab, log))
    print(json.dumps({key: value for key, value in figures.items() if not key.endswith("_kills")}, indent=1))
    if options.name:
        path = machine.write(options.name, command, figures)
        print(f"written to {path.relative_to(machine.ROOT)}")
    return int(bool(figures["tokens_lost"] or figures["tokens_repeated"]))


if __name__ == "__main__":
    sys.exit(command_line.run("recovery", __doc__, add_arguments, main))
