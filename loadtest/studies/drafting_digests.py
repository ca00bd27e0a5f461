"""Compare token ids with and without speculative decoding (drafts): over HTTP, in a full pool, with killed engines.

Two servers of the demo model answer the same requests, one with `--drafts off`, one with `--drafts on`.  Both get
`--deterministic` and a pool that is too small for all streams: requests wait, since the forecast avoids preemption.
tests/executor/test_drafts.py preempts.  The engine of the second server is killed with SIGKILL, `--kills` times, while
it computes drafts; its requests resume from the token log in Redis.

    edit     repeat a text with one change: greedy or sampled, a third with the text as its `prediction`
    quote    a question about a text
    prose    continue a text
    schema   fill in a JSON schema
    tool     call a function

Temperatures alternate among 0, 0.7 and 1.2, and every seventh request has four choices (without `prediction`).

    python -m quire.loadtest.studies drafting-digests --text FILE [--requests 500] [--dtype bfloat16] [--kills 5]

Writes loadtest/results/NAME.json: a SHA-256 of all token ids and reasons per server, whether they are equal, the first
request that differs, drafts computed and accepted, preemptions and kills.  The status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from quire.loadtest import machine
from quire.loadtest.server import MODEL_NAME, Server, engine_processes, serve

KINDS = ("edit", "quote", "prose", "schema", "tool")
TEMPERATURES = (0.0, 0.7, 1.2)
CHOICES_EVERY = 7  # every n-th request has four choices
PART = 240  # characters of the text in a request
POLL_S = 0.02  # seconds between two reads of the counts before a kill
COUNTS = {
    "drafts": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 24}, "pages": {"type": "integer"}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "save_note", "parameters": SCHEMA}}


def body(at: int, text: str, tokens: int) -> dict[str, Any]:
    """Return the chat of request number `at`."""
    part = text[(at * PART) % (len(text) - PART) :][:PART]
    kind = KINDS[at % len(KINDS)]
    asked = {
        "edit": f"Write this text again, with 'and' for 'or':\n\n{part}",
        "quote": f"{part}\n\nQuote the sentence that matters most.",
        "prose": part,
        "schema": f"Describe this text as JSON.\n\n{part}",
        "tool": f"Save a note about this text.\n\n{part}",
    }[kind]
    found: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": asked}],
        "temperature": TEMPERATURES[at % len(TEMPERATURES)],
        "seed": at,
        "max_tokens": tokens,
        "return_token_ids": True,
    }
    if at % CHOICES_EVERY == 0:
        found["n"] = 4
    elif kind == "edit" and at % 3 == 0:
        found["prediction"] = {"type": "content", "content": part}
    if kind == "schema":
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA}}
    elif kind == "tool":
        found |= {"tools": [TOOL], "tool_choice": "required"}
    return found


@dataclass
class Outcome:
    """The digests and counts of one server."""

    digests: list[str] = field(default_factory=list)  # digest of each request's answer
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))  # sums over the server's engines
    kills: int = 0

    @property
    def digest(self) -> str:
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()


async def counts(session: aiohttp.ClientSession) -> dict[str, int]:
    """Return the counts of the running engine; zeros if none runs."""
    try:
        async with session.get("/metrics") as response:
            page = await response.text()
    except aiohttp.ClientError:
        page = ""
    found = {}
    for name, metric in COUNTS.items():
        values = re.findall(rf"^{metric}(?:{{[^}}]*}})? ([0-9.e+]+)$", page, re.MULTILINE)
        found[name] = int(sum(map(float, values)))
    return found


async def kill_while_drafting(session: aiohttp.ClientSession, server: Server, outcome: Outcome) -> None:
    """Kill the engine as soon as its count of drafts grows."""
    last = await counts(session)
    while True:
        await asyncio.sleep(POLL_S)
        now = await counts(session)
        if now["drafts"] > last["drafts"] > 0:
            break
        last = now
    for name, value in now.items():
        outcome.counts[name] += value
    engine_processes(server.process)[0].kill()
    outcome.kills += 1


async def ask(session: aiohttp.ClientSession, request: dict[str, Any]) -> str:
    """Return the digest of an answer's token ids and reasons."""
    async with session.post("/v1/chat/completions", json=request) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(f"a request was refused with {response.status}: {answer}")
    said = [(choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


async def run(server: Server, bodies: list[dict[str, Any]], streams: int, kills: int) -> Outcome:
    """Send all requests, `streams` at a time, and kill the engine at `kills` moments between the first and the last."""
    outcome, slots = Outcome(), asyncio.Semaphore(streams)
    done = 0
    reached = {
        len(bodies) * (at + 1) // (kills + 1): asyncio.Event() for at in range(kills)
    }  # number of finished requests -> event of a kill
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(request: dict[str, Any]) -> str:
            nonlocal done
            async with slots:
                digest = await ask(session, request)
            done += 1
            if done in reached:
                reached[done].set()
            if sys.stderr.isatty() or done % 50 == 0:
                print(f"{done} of {len(bodies)}", file=sys.stderr)
            return digest

        async def killer() -> None:
            for moment in reached.values():
                await moment.wait()
                await kill_while_drafting(session, server, outcome)

        killing = asyncio.create_task(killer())
        outcome.digests = list(await asyncio.gather(*map(one, bodies)))
        killing.cancel()
        for name, value in (await counts(session)).items():
            outcome.counts[name] += value
    return outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this study."""
    parser.add_argument("--text", type=Path, required=True, help="plain text; each request uses a part of it")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=32, help="maximum tokens of an answer")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-blocks", type=int, default=120, help="KV blocks, too few for all streams at once")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--name", type=machine.result_name, default="drafting_digests", help="name of the result file")


def main(args: argparse.Namespace, command: str) -> int:
    """Return 0 if both servers gave equal answers."""
    text = args.text.read_text(encoding="utf-8")
    bodies = [body(at, text, args.tokens) for at in range(args.requests)]
    flags = [f"--dtype={args.dtype}", f"--kv-blocks={args.kv_blocks}", "--max-model-len=1024", "--deterministic"]
    flags += ["--vllm-metrics", "--late-wait-s=10000", "--takeover-wait-s=300", "--default-timeout-s=3000"]
    outcomes = {}
    for drafts, kills in (("off", 0), ("on", args.kills)):
        with serve(args.model, *flags, f"--drafts={drafts}") as server:
            outcomes[drafts] = asyncio.run(run(server, bodies, args.streams, kills))
    plain, drafted = outcomes["off"], outcomes["on"]
    differing = [at for at, pair in enumerate(zip(plain.digests, drafted.digests, strict=True)) if pair[0] != pair[1]]
    figures = {
        "requests": args.requests,
        "dtype": args.dtype,
        "choices": sum(request.get("n", 1) for request in bodies),
        "equal": not differing,
        "differing": len(differing),
        "first_difference": differing[0] if differing else None,
        "kills": drafted.kills,
        "servers": {name: {"sha256": one.digest, **one.counts} for name, one in outcomes.items()},
    }
    print(json.dumps(figures))
    machine.write(args.name, command, figures)
    return bool(differing)
