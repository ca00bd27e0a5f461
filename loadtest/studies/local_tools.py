"""Serve the same chats with llama.cpp's server and with Quire, in turn, on the same cores.

    python -m quire.loadtest.studies local-tools MODEL --llama-server PATH --gguf FILE --text FILE
                                                 [--chats 8,32] [--tokens 128] [--rounds 2] [--server OPTIONS]

MODEL is a directory or `demo`, and --gguf the same model for llama.cpp, in the same precision (`llama-quantize FILE
OUT BF16`).  Each chat asks about its own excerpt of --text.  All chats of a round are sent at once, and each answer
has exactly --tokens tokens (`ignore_eos`).  Each round has other excerpts, so no prompt is in a server's cache.  The
servers run one after the other and take turns in being the first.  They compute on all cores of this process (`taskset`
limits them).

Prints medians over rounds: output tokens/s of all chats, seconds to the first token, seconds per later token of a
chat.  With --name they are written to loadtest/results/NAME.json as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from quire.loadtest import machine
from quire.loadtest.raw_stream import encode_request, read_stream
from quire.loadtest.server import MODEL_NAME, Server, serve, serve_llama_cpp
from quire.loadtest.stats import percentile

CONTEXT = 1024  # tokens of a chat, at most
PART = 1200  # characters of an excerpt

Serve = Callable[[], AbstractContextManager[Server]]


def request_of(part: str, tokens: int) -> bytes:
    """Return a streaming chat about an excerpt, answered by exactly `tokens` tokens."""
    chat = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": f"{part}\n\nExplain this text."}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return encode_request(chat, "/v1/chat/completions")


async def measure(server: Server, parts: Sequence[str], tokens: int) -> dict[str, float]:
    """Send a chat for each part at once; return the figures of one round."""
    began = time.perf_counter()
    streams = await asyncio.gather(*(read_stream(server.port, request_of(part, tokens)) for part in parts))
    wall = time.perf_counter() - began
    first = sorted(stream.times[0] - began for stream in streams)
    later = [(stream.times[-1] - stream.times[0]) / (tokens - 1) for stream in streams]
    return {
        "tokens_per_s": len(parts) * tokens / wall,
        "ttft_p50_s": percentile(first, 50),
        "ttft_max_s": first[-1],
        "s_per_token": statistics.fmean(later),
    }


def run(start: Serve, texts: list[list[str]], tokens: int) -> list[dict[str, float]]:
    """Measure every round on one server, after a chat that is not counted."""
    with start() as server:
        asyncio.run(measure(server, ["Hello."], tokens))
        return [asyncio.run(measure(server, parts, tokens)) for parts in texts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="directory of the model, or demo")
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's llama-server")
    parser.add_argument("--gguf", type=Path, required=True, help="the same model for llama.cpp")
    parser.add_argument("--text", type=Path, required=True, action="append", help="excerpts of it are the chats")
    parser.add_argument("--chats", default="8,32", help="concurrent chats; default 8,32")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer; default 128")
    parser.add_argument("--rounds", type=int, default=2, help="rounds per server start, medians count; default 2")
    parser.add_argument("--server", default="", help="further options of `quire serve`, in one string")
    parser.add_argument("--name", type=machine.result_name, help="write loadtest/results/NAME.json")


def main(args: argparse.Namespace, command: str) -> int:
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in args.text)
    cores, figures = len(os.sched_getaffinity(0)), dict[str, Any]()
    for at, chats in enumerate(map(int, args.chats.split(","))):
        if len(text) < args.rounds * chats * PART:
            raise SystemExit(f"--text has {len(text)} characters; {args.rounds * chats * PART} are needed")
        parts = [text[PART * number :][:PART] for number in range(args.rounds * chats)]
        texts = [parts[first :: args.rounds] for first in range(args.rounds)]
        starts: dict[str, Serve] = {
            "llama.cpp": partial(serve_llama_cpp, args.llama_server, args.gguf, chats, CONTEXT, cores),
            "quire": partial(serve, args.model, "--max-model-len", str(CONTEXT), *args.server.split()),
        }
        order = list(starts) if at % 2 == 0 else list(reversed(starts))
        rounds = {name: run(starts[name], texts, args.tokens) for name in order}
        median = {
            name: {key: round(statistics.median(one[key] for one in each), 4) for key in each[0]}
            for name, each in rounds.items()
        }
        ratio = median["quire"]["tokens_per_s"] / median["llama.cpp"]["tokens_per_s"]
        figures[f"{chats} chats"] = median | {"tokens_per_s_ratio": round(ratio, 3)}
        print(f"{chats} chats: {json.dumps(figures[f'{chats} chats'])}", flush=True)
    figures["cores"] = cores
    if args.name:
        path = machine.write(args.name, command, figures)
        print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
