"""Tokens per second that one gateway process streams, and its CPU time per token.

    python -m quire.loadtest.studies gateway MODEL_DIRECTORY [--streams 256] [--tokens 400] [--step-ms 5]
                                             [--engines 1] [--compare CHECKOUT] [--chat] [--tools] [--name NAME]

Starts `quire serve` with the scripted executor, which computes nothing.  Everything else is real: the engine's step
loop, Redis, one gateway, and this client, which reads every stream.  At `--step-ms 5` the engine generates 200 tokens/s
per stream, 51,200 for all 256.  A gateway that falls behind merges tokens into larger events, so events are
counted too.  `streams_at_once` is the maximum number of streams between their first and last token.  CPU time is that
of the gateway process, so other work on the machine hardly changes it.  An engine runs at most 4,096 sequences, so more
streams take several --engines, and `ulimit -n` must be above the number of streams.

`--compare CHECKOUT` measures another checkout of this project in turn with this one (`git worktree add CHECKOUT
COMMIT`).  Each is measured `--rounds` times, and medians are reported: the cost of a change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.loadtest import machine
from quire.loadtest.raw_stream import encode_request, read_stream
from quire.loadtest.server import MODEL_NAME, serve
from quire.loadtest.studies.fairness import further_engines, wait_for_engines

GROUP, GROUP_S = 500, 0.05  # clients that connect at once, fewer than a socket's backlog; seconds between two groups
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def request_of(tokens: int, *, chat: bool, tools: bool) -> bytes:
    """Return the request for one answer: of a prompt, or of a chat with or without tools."""
    body = {"model": MODEL_NAME, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    if not (chat or tools):
        return encode_request(body | {"prompt": "hello"})
    asked = {"messages": [{"role": "user", "content": "hello"}]} | ({"tools": TOOLS} if tools else {})
    return encode_request(body | asked, "/v1/chat/completions")


def streaming_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return the maximum number of spans (first and last token) that overlap."""
    changes = sorted([(first, 1) for first, _ in spans] + [(last, -1) for _, last in spans])
    return max(accumulate(change for _, change in changes))


async def measure(
    port: int, streams: int, tokens: int, gateway: psutil.Process, *, chat: bool = False, tools: bool = False
) -> dict[str, Any]:
    """Read `streams` answers of `tokens` tokens at once; return tokens/s and the gateway's CPU time per token."""
    request = request_of(tokens, chat=chat, tools=tools)
    before, began = gateway.cpu_times(), time.monotonic()
    clients = []
    for at in range(0, streams, GROUP):
        clients += [asyncio.create_task(read_stream(port, request)) for _ in range(at, min(streams, at + GROUP))]
        await asyncio.sleep(GROUP_S if at + GROUP < streams else 0)
    read = await asyncio.gather(*clients)
    after, wall = gateway.cpu_times(), time.monotonic() - began
    cpu = after.user + after.system - before.user - before.system
    return {
        "streams": streams,
        "streams_at_once": streaming_at_once([(stream.times[0], stream.times[-1]) for stream in read]),
        "tokens": streams * tokens,
        "events": sum(stream.events for stream in read),
        "itl_p50_ms": round(statistics.median(gap for stream in read for gap in stream.gaps_s) * 1e3, 2),
        "tokens_per_s": round(streams * tokens / wall),
        "gateway_cpu_us_per_token": round(cpu / (streams * tokens) * 1e6, 1),
        "gateway_rss_mib": round(gateway.memory_info().rss / 2**20),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="directory with a tokenizer; its weights are not read")
    parser.add_argument("--streams", type=int, default=256, help="answers that are streamed at once; default 256")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each answer; default 400")
    parser.add_argument("--engines", type=int, default=1, help="engines that share the streams; default 1")
    parser.add_argument("--step-ms", type=float, default=5.0, help="milliseconds of an engine step; default 5")
    parser.add_argument("--step-tokens", type=int, help="most tokens of an engine step; default: the engine's")
    parser.add_argument("--name", type=machine.result_name, default="gateway", help="name of the result file")
    parser.add_argument(
        "--compare", "--beside", type=Path, help="checkout of another version to measure in turn with this one"
    )
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each checkout; default 1")
    parser.add_argument("--chat", action="store_true", help="send chats instead of prompts")
    parser.add_argument(
        "--tools", action="store_true", help="send chats with a tool; the model's template must know tools"
    )


def main(args: argparse.Namespace, command: str) -> int:
    flags = ["--executor", "scripted", "--scripted-step-ms", str(args.step_ms)]
    flags += ["--max-seqs", str(math.ceil(args.streams / args.engines)), "--kv-blocks", "100000"]
    flags += ["--step-tokens", str(args.step_tokens)] if args.step_tokens else []
    own = ["--late-wait-s", "1000"]  # all streams start, however late

    def run(checkout: Path | None) -> dict[str, Any]:
        with (
            EmbeddedRedis() as redis,
            further_engines(args.model, args.engines, redis.url, flags),
            serve(args.model, *flags, *own, "--redis-url", redis.url, checkout=checkout) as server,
        ):
            asyncio.run(wait_for_engines(redis.url, args.engines))
            gateway = server.child("quire.service.app")
            found = measure(server.port, args.streams, args.tokens, gateway, chat=args.chat, tools=args.tools)
            return asyncio.run(found)

    def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: statistics.median(one[name] for one in runs) for name in runs[0]}

    other, here = [], []
    for _ in range(args.rounds):
        other += [run(args.compare.resolve())] if args.compare else []
        here.append(run(None))
    result = median(here)
    if other:
        result["beside"] = median(other)  # the name that earlier results use
    path = machine.write(args.name, command.replace(args.model, "MODEL"), result)
    print(json.dumps(result, indent=1))
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
