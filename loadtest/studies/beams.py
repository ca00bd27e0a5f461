"""Beam search in the engine, compared with a client that requests one token at a time, and with transformers.

    python -m quire.loadtest.studies beams [DIR] [--shape llama-8b] [--widths 4:64,8:64,50:10] [--requests 16]
                                           [--rounds 3]

All three search for the same answers: --requests prompts at once; --widths has the beam width and the answer's tokens.

    quire         use_beam_search: one request, one group in the engine
    resubmission  a client keeps the beams and, for each token, sends all of them as prompts of one request for a token
                  and the log probabilities of 2 x width.  The engine's prefix cache holds what they share.  vLLM's
                  front end searches in this way.
    transformers  `generate` on all prompts as one batch, on all cores.  On a CPU without bf16 instructions torch
                  computes faster in float32 (--peer-dtype), this engine in bf16

The model is the 42M one of loadtest/checkpoint.py on a CPU, or a checkpoint DIR.  No answer ends before its length, and
prompts are equally long, so transformers computes no padding.  `quire` and `resubmission` run on one server, each on
an empty prefix cache.  bf16 rounds sums differently in different batches, so answers may differ if two candidates are
nearly equally probable: `same` is the share of best answers equal to Quire's, `score` the mean of the best scores.
With --shape, transformers' weights are random ones of its own, so its answers differ.
Writes loadtest/results/beams_<device>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from quire.loadtest import machine, shapes, trace
from quire.loadtest.checkpoint import VOCAB, make_llama_42m, make_shape
from quire.loadtest.server import MODEL_NAME, Server, serve

PEER = machine.ROOT / "loadtest" / "peers" / "transformers_beams.py"
PROMPT = 78  # tokens of a prompt
SERVER = ("--max-logprobs=100", "--max-prompts=1024", "--late-wait-s=3600", "--no-spare")
TOKEN = "token_id:"  # how return_tokens_as_token_ids writes a token


@dataclass(frozen=True)
class Beam:
    """Tokens after the prompt, and the sum of their log probabilities."""

    tokens: tuple[int, ...]
    score: float


Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]  # the body of a completion -> the answer
Search = Callable[[Ask, list[int], int, int], Awaitable[Beam]]  # prompt, width, tokens -> the best beam
Found = tuple[float, list[Beam]]  # seconds, and the best beam of each prompt


async def in_engine(ask: Ask, prompt: list[int], width: int, length: int) -> Beam:
    """Return the best answer of one request with `use_beam_search`."""
    body = {"prompt": prompt, "max_tokens": length, "use_beam_search": True, "beam_width": width, "length_penalty": 0}
    answer = await ask(body | {"ignore_eos": True, "return_token_ids": True})
    best = answer["choices"][0]
    return Beam(tuple(best["token_ids"]), best["score"])


async def by_resubmission(ask: Ask, prompt: list[int], width: int, length: int) -> Beam:
    """Return the best answer of a search whose beams are prompts that are sent again for each token."""
    beams = [Beam((), 0.0)]
    for _ in range(length):
        body = {"prompt": [[*prompt, *beam.tokens] for beam in beams], "max_tokens": 1, "temperature": 0}
        answer = await ask(body | {"logprobs": 2 * width, "ignore_eos": True, "return_tokens_as_token_ids": True})
        beams = survivors(beams, [choice["logprobs"]["top_logprobs"][0] for choice in answer["choices"]], width)
    return beams[0]


def survivors(beams: list[Beam], likeliest: list[dict[str, float]], width: int) -> list[Beam]:
    """Return the `width` best sequences of `beams` by one token, the best first.

    `likeliest`: for each beam its most probable next tokens, written as TOKEN and an id -> log probability."""
    grown = (
        Beam((*beam.tokens, int(token.removeprefix(TOKEN))), beam.score + logprob)
        for beam, candidates in zip(beams, likeliest, strict=True)
        for token, logprob in candidates.items()
    )
    return heapq.nlargest(width, grown, key=lambda beam: beam.score)


async def search_all(server: Server, search: Search, prompts: list[list[int]], width: int, length: int) -> Found:
    """Search for the answers of all prompts at once.  Return the seconds and the best beams.

    Raises RuntimeError for an answer that is not a completion."""
    async with aiohttp.ClientSession(
        server.url, timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            async with session.post("/v1/completions", json={"model": MODEL_NAME, **body}) as response:
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {await response.text()}")
                answer: dict[str, Any] = await response.json()
                return answer

        async with session.post("/reset_prefix_cache") as response:
            response.raise_for_status()
        begin = time.perf_counter()
        beams = await asyncio.gather(*(search(ask, prompt, width, length) for prompt in prompts))
        return time.perf_counter() - begin, beams


def in_transformers(
    checkpoint: Path, prompts: list[list[int]], width: int, length: int, args: argparse.Namespace
) -> tuple[float, list[tuple[int, ...]]]:
    """Return the seconds that transformers' search takes, its model loaded and warm, and the best answers."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        words = [str(checkpoint), file.name, f"--width={width}", f"--length={length}"]
        where = [f"--device={'cuda' if args.shape else 'cpu'}", f"--dtype={args.peer_dtype or args.dtype}"]
        where += ["--random"] if args.shape else []
        done = subprocess.run(
            [sys.executable, str(PEER), *words, *where], stdout=subprocess.PIPE, text=True, check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], [tuple(tokens) for tokens in found["tokens"]]


def run_round(args: argparse.Namespace, checkpoint: Path, seed: int) -> list[dict[str, Found]]:
    """Run all systems on the same prompts, for each width.  Return what each found; transformers' have no score."""
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    jobs = [trace.Job(PROMPT, 1, seed + at) for at in range(args.requests)]
    prompts = [job.prompt(min(vocab, VOCAB)) for job in jobs]
    flags = [*SERVER, f"--kv-blocks={args.kv_blocks}", f"--max-seqs={args.max_seqs}", f"--threads={args.threads}"]
    flags += [f"--dtype={args.dtype}", *(["--load=random"] if args.shape else []), *args.server]
    rows: list[dict[str, Found]] = []
    with serve(str(checkpoint), *flags) as server:
        for width, length in args.widths:
            rows.append({})
            for name, search in (("quire", in_engine), ("resubmission", by_resubmission)):
                asyncio.run(search_all(server, search, [prompts[0][::-1]], width, min(length, 3)))  # the first steps
                rows[-1][name] = asyncio.run(search_all(server, search, prompts, width, length))
                say(width, name, rows[-1][name])
    for (width, length), row in zip(args.widths, rows, strict=True):
        seconds, answers = in_transformers(checkpoint, prompts, width, length, args)
        row["transformers"] = seconds, [Beam(tokens, math.nan) for tokens in answers]
        say(width, "transformers", row["transformers"])
    return rows


def say(width: int, name: str, found: Found) -> None:
    print(f"width {width}, {name}: {found[0]:.2f} s", flush=True)


def measure(args: argparse.Namespace, checkpoint: Path) -> list[dict[str, Any]]:
    """Run all systems `rounds` times, each time with other prompts.  Return a summary of each width."""
    rounds = [run_round(args, checkpoint, 1000 * number) for number in range(args.rounds)]
    return [
        summary(args, width, length, [each[at] for each in rounds]) for at, (width, length) in enumerate(args.widths)
    ]


def summary(args: argparse.Namespace, width: int, length: int, rounds: list[dict[str, Found]]) -> dict[str, Any]:
    """Return median seconds, and the ratios of each round."""
    others = [name for name in rounds[0] if name != "quire"]
    ratios = {name: [each[name][0] / each["quire"][0] for each in rounds] for name in others}
    return {
        "width": width,
        "tokens": length,
        "requests": args.requests,
        "seconds": {name: statistics.median(each[name][0] for each in rounds) for name in rounds[0]},
        "times_as_fast_as": {name: statistics.median(each) for name, each in ratios.items()},
        "all_ratios": ratios,
        "same": {name: statistics.mean(same(each["quire"][1], each[name][1]) for each in rounds) for name in others},
        "score": {
            name: statistics.mean(beam.score for each in rounds for beam in each[name][1])
            for name in ("quire", "resubmission")
        },
    }


def same(ours: list[Beam], theirs: list[Beam]) -> float:
    """Return the share of answers that are equal token for token."""
    return statistics.mean(mine.tokens == other.tokens for mine, other in zip(ours, theirs, strict=True))


def _widths(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(map(int, pair.split(":", 1))) for pair in text.split(",")]
        if all(width >= 1 and length >= 1 for width, length in pairs):
            return [(width, length) for width, length in pairs]
    except ValueError:  # no numbers, or not two of them
        pass
    raise argparse.ArgumentTypeError(f"{text} is not a list such as 4:64,50:10")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="DIR", help="checkpoint; default: the 42M model")
    parser.add_argument("--shape", choices=shapes.CONFIGS, help="make this shape in DIR, with random weights, on a GPU")
    parser.add_argument(
        "--widths",
        type=_widths,
        default=[(4, 64), (8, 64), (50, 10)],
        help="widths and the tokens of an answer; default 4:64,8:64,50:10",
    )
    parser.add_argument("--requests", type=int, default=16, help="searches at once; default 16")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, medians are reported; default 3")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine; default 1")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the weights; default bfloat16")
    parser.add_argument("--peer-dtype", help="dtype of transformers' weights; default as --dtype")
    parser.add_argument("--kv-blocks", type=int, default=4096, help="KV blocks of the engine; default 4096")
    parser.add_argument("--max-seqs", type=int, default=256, help="beams of the engine at once; default 256")
    parser.add_argument("--server", type=str.split, default=[], help="further options of `quire serve`, in one string")


def main(args: argparse.Namespace, command: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.model or Path(scratch) / "model"
        if args.shape:
            make_shape(checkpoint, shapes.CONFIGS[args.shape])
        elif args.model is None:
            make_llama_42m(checkpoint)
        rows = measure(args, checkpoint)
    path = machine.write(f"beams_{machine.device()}", command, {"prompt_tokens": PROMPT, "rows": rows})
    for row in rows:
        ratio = row["times_as_fast_as"]
        print(
            f"width {row['width']}, {row['tokens']} tokens: {ratio['resubmission']:.1f} times resubmission's speed, "
            f"{ratio['transformers']:.1f} times transformers"
        )
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
