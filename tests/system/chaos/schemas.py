"""Structured output over HTTP: random schemas with random sampling parameters, whose answers must validate.

    python -m tests.system.chaos schemas [--draws 2000] [--seed 1] [--at-once 16]

A gateway and an engine with random weights.  Draws take turns between the two endpoints, complete and streamed answers.
Each answer that ends by itself must be JSON of its schema, as `jsonschema` sees it.  One that is cut must have all of
its tokens.  Exit status 1 otherwise, with the draws that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import hypothesis
import jsonschema
from hypothesis import HealthCheck, Phase

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.checkpoints import make_checkpoint
from tests.schemas import kinds, samplings
from tests.system.stack import Stack

LONGEST = 300  # tokens of an answer: spaces between the parts of a JSON text are bounded, but may all be wanted
PROMPT = "class Engine:\n    def run(self):"
Draw = tuple[dict[str, Any], dict[str, Any]]  # schema; sampling parameters as engines name them


class Answer(NamedTuple):
    """What a client has got."""

    text: str
    finish: str | None
    tokens: int


@dataclass
class Found:
    """What came of a run."""

    finished: int = 0
    cut: int = 0  # at LONGEST tokens
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def draws(count: int, seed: int) -> list[Draw]:
    """Return `count` draws; the same for the same seed."""
    found: list[Draw] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(kinds(), samplings())
    def take(schema: dict[str, Any], sampling: dict[str, Any]) -> None:
        found.append((schema, sampling))

    take()
    return found


def request(number: int, draw: Draw) -> tuple[str, dict[str, Any]]:
    """Return path and body of a draw.  Its number decides about endpoint and stream."""
    schema, sampling = draw
    bias = {str(token): added for token, added in sampling.get("logit_bias", ())}
    body = {"model": "tiny", "max_tokens": LONGEST, **sampling, "logit_bias": bias}
    if number & 1:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if not number & 2:
        return "/v1/completions", {**body, "prompt": PROMPT, "guided_json": schema}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    form = {"type": "json_schema", "json_schema": {"name": "drawn", "strict": True, "schema": schema}}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": PROMPT}], "response_format": form}


async def ask(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Answer | str:
    """Return the answer to a request, or why there is none."""
    async with session.post(path, json=body) as response:
        if response.status != 200:
            return f"status {response.status}: {await response.text()}"
        if not body.get("stream"):
            parts = [await response.json()]
        else:
            lines = (line.decode() async for line in response.content)
            events = [line.removeprefix("data: ").strip() async for line in lines if line.startswith("data: ")]
            if events[-1:] != ["[DONE]"]:
                return "the stream has no end"
            parts = [json.loads(event) for event in events[:-1]]
    if wrong := [part["error"] for part in parts if "error" in part]:
        return str(wrong[0])
    choices = [choice for part in parts for choice in part["choices"]]
    said = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    text = "".join(one.get("content") or one.get("text") or "" for one in said)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return Answer(text, ends[0] if len(ends) == 1 else None, parts[-1]["usage"]["completion_tokens"])


def judge(schema: dict[str, Any], answer: Answer | str) -> str:
    """Return what is wrong with an answer; '' if nothing is."""
    if isinstance(answer, str):
        return answer
    if answer.finish == "length":
        return "" if answer.tokens == LONGEST else f"cut after {answer.tokens} tokens"
    if answer.finish != "stop":
        return f"it ended with {answer.finish}"
    try:
        jsonschema.validate(json.loads(answer.text), schema)
    except ValueError:
        return f"no JSON: {answer.text!r}"
    except jsonschema.ValidationError as error:
        return f"{error.message}: {answer.text!r}"
    return ""


async def run(url: str, wanted: list[Draw], at_once: int) -> Found:
    """Ask for every draw, `at_once` at a time."""
    found, numbers, began = Found(), iter(range(len(wanted))), time.monotonic()

    async def client(session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for number in numbers:
            answer = await ask(session, *request(number, wanted[number]))
            if wrong := judge(wanted[number][0], answer):
                found.failures.append(f"draw {number}: {wrong}\n    {wanted[number]}")
            elif isinstance(answer, Answer):
                found.finished += answer.finish == "stop"
                found.cut += answer.finish == "length"

    connections = aiohttp.TCPConnector(limit=at_once)
    async with aiohttp.ClientSession(url, connector=connections) as session:
        await asyncio.gather(*(client(session, numbers) for _ in range(at_once)))
    found.seconds = time.monotonic() - began
    return found


def schemas(folder: Path, *, count: int, seed: int, at_once: int = 16) -> Found:
    """Start everything, ask for `count` draws, and say what was wrong."""
    wanted = draws(count, seed)
    checkpoint = make_checkpoint(folder / "llama", "llama")
    with EmbeddedRedis() as server, Stack(server.url, "schemas", checkpoint, kv_blocks=600) as stack:
        return asyncio.run(run(stack.url, wanted, at_once))


def table(found: Found) -> str:
    """For people."""
    count = found.finished + found.cut + len(found.failures)
    rows = [
        f"{count} draws in {found.seconds:.0f} s: {found.finished} answers ended and validate, {found.cut} were cut",
        f"failures: {len(found.failures)}",
        *found.failures[:50],
    ]
    return "\n".join(rows)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16, help="requests")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = schemas(Path(folder), count=options.draws, seed=options.seed, at_once=options.at_once)
    print(table(found))
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
