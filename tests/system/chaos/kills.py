"""An engine that really computes is killed again and again, under streams of every kind that OpenAI's clients send.

    python -m tests.system.chaos kills [--kills 100] [--streams 12] [--model demo|tiny] [--seed 1] [--result NAME]

One `quire serve --deterministic`, with the demo model or with a tiny checkpoint.  Requests take turns:

    plain    a completion, sampled               n       four completions of one prompt, sampled
    json     a chat with a JSON schema           tools   a chat that must call a function

They are answered once without a fault.  Then --streams clients send them repeatedly, as streams that cannot be
resumed, while the engine is killed with SIGKILL: the next kill follows when every open stream has continued since the
last.  Every answer must equal the first: text, arguments, finish reasons and usage.  Exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

from quire.loadtest import machine
from quire.loadtest.server import MODEL_NAME, Server, engine_processes, serve
from tests.checkpoints import make_checkpoint
from tests.pace import patience
from tests.service.fakes import TOOLS_TEMPLATE, with_markers
from tests.system.chaos.run import percentile
from tests.system.processes import sse_events, until

FLAGS = ["--deterministic", "--max-seqs=64", "--late-wait-s=1000", "--max-model-len=1024", "--kv-blocks=2000"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "rain": {"type": "boolean"},
        "degrees": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 12},
    },
    "required": ["city", "rain", "degrees"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "report", "description": "Report weather.", "parameters": SCHEMA}}
TOPICS = ("the sea", "a castle", "old trains", "a recipe", "the moon", "two friends", "a storm", "the desert")
KINDS = ("plain", "n", "json", "tools")
LEFT_OVER = 24  # events: more than a killed engine has sent that clients have not seen
Answer = dict[str, Any]  # what an answer says: of each choice text, calls and finish; and usage


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass
class Found:
    """What came of a run."""

    answers: Counter[str] = field(default_factory=Counter)  # complete and as they were, by kind
    met: list[int] = field(default_factory=list)  # open streams at each kill
    pauses_s: list[float] = field(default_factory=list)  # the longest silence of each
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.wrong and 0 not in self.met and all(self.answers[kind] for kind in KINDS)


def asks(count: int, seed: int) -> list[Ask]:
    """Return `count` requests, the kinds in turn; the same for the same seed."""
    rng, made = random.Random(seed), []
    for number, kind in zip(range(count), itertools.cycle(KINDS)):
        topic = f"{rng.choice(TOPICS)} and {rng.choice(TOPICS)}, number {number}"
        how = {"temperature": rng.choice([0.7, 1.0]), "seed": seed * 1000 + number, "model": MODEL_NAME}
        if kind in ("plain", "n"):
            body: dict[str, Any] = {"prompt": f"A story about {topic}:", "max_tokens": 90, "ignore_eos": True}
            made.append(Ask(kind, "/v1/completions", how | body | {"n": 4 if kind == "n" else 1}))
            continue
        said = [{"role": "user", "content": f"What is the weather like at {topic}?"}]
        body = {"messages": said, "max_tokens": 640}
        if kind == "json":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
        else:
            body |= {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "report"}}}
        made.append(Ask(kind, "/v1/chat/completions", how | body))
    return made


class Stream:
    """One stream, and its text so far."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.events = 0
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, int] = {}
        self._last = time.monotonic()  # when the last event came
        self._longest_s = 0.0  # longest silence since it is watched
        self._ended = False

    @property
    def answer(self) -> Answer:
        return {"choices": [self.choices[at] for at in sorted(self.choices)], "usage": self.usage}

    def watch(self) -> None:
        """From now on, how long is the longest silence?"""
        self._longest_s = 0.0

    @property
    def pause_s(self) -> float:
        """The longest silence since it is watched; one that had begun before counts whole."""
        return self._longest_s if self._ended else max(self._longest_s, time.monotonic() - self._last)

    async def read(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read it to its end.  Raises AssertionError for an error, or where it breaks off."""
        body = {**self.ask.body, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(url + self.ask.path, json=body) as response:
            assert response.status == 200, await response.text()
            async for event in sse_events(response):
                self.events += 1
                self._longest_s, self._last = self.pause_s, time.monotonic()
                self._take(event)
        self._ended = True

    def _take(self, event: dict[str, Any]) -> None:
        if usage := event.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in event["choices"]:
            said = self.choices.setdefault(choice["index"], {"text": "", "calls": [], "finish": None})
            delta = choice.get("delta") or {"content": choice.get("text")}
            said["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    said["calls"].append([call["function"]["name"], ""])
                said["calls"][call["index"]][1] += call["function"]["arguments"]
            said["finish"] = choice["finish_reason"] or said["finish"]


def sound(ask: Ask, answer: Answer) -> bool:
    """Return whether an undisturbed answer can be compared: it is complete, and fits its schema."""
    if len(answer["choices"]) != ask.body.get("n", 1) or not answer["usage"]:
        return False
    for choice in answer["choices"]:
        if ask.kind == "tools" and (choice["finish"] != "tool_calls" or choice["calls"][0][0] != "report"):
            return False
        if ask.kind == "json" and choice["finish"] != "stop":  # cut
            return False
        if ask.kind in ("json", "tools"):
            text = choice["text"] if ask.kind == "json" else choice["calls"][0][1]
            jsonschema.validate(json.loads(text), SCHEMA)
        elif choice["finish"] != "length":
            return False
    return True


class Clients:
    """So many clients, each asking again when it was answered."""

    def __init__(self, server: Server, work: Iterator[tuple[Ask, Answer]], found: Found) -> None:
        """`work`: what to ask, and the answer that must come."""
        self._server, self._work, self._found = server, work, found
        self.open: set[Stream] = set()
        self.ending = False

    @property
    def live(self) -> list[Stream]:
        return [stream for stream in self.open if stream.events]

    async def client(self, session: aiohttp.ClientSession) -> None:
        while not self.ending:
            ask, wanted = next(self._work)
            stream = Stream(ask)
            self.open.add(stream)
            try:
                await stream.read(session, self._server.url)
                if stream.answer == wanted:
                    self._found.answers[ask.kind] += 1
                    self._found.tokens += wanted["usage"]["completion_tokens"]
                else:
                    self._found.wrong.append(f"{ask.kind}: {json.dumps(stream.answer)}, not {json.dumps(wanted)}")
            except (AssertionError, aiohttp.ClientError) as error:
                self._found.wrong.append(f"{ask.kind}: {error!r}")
            finally:
                self.open.discard(stream)


async def kill(server: Server, clients: Clients, found: Found) -> None:
    """Kill the engine under live streams, and return once every open one has gone on, also those without an event yet.

    Some events may come that the killed engine had sent, so it takes more: a request at whose same token two engines
    die, its first one included, is put into quarantine."""
    await until(lambda: bool(clients.live))
    engine = engine_processes(server.process)[0]
    goals = {stream: stream.events + LEFT_OVER for stream in clients.open}
    live = clients.live
    for stream in live:
        stream.watch()
    found.met.append(len(live))
    engine.kill()
    open_ones = clients.open
    await until(lambda: all(stream.events >= goal or stream not in open_ones for stream, goal in goals.items()))
    found.pauses_s += [stream.pause_s for stream in live]


async def run(
    server: Server, work: list[Ask], streams: int, kills: int, say: Callable[[str], None] = lambda line: None
) -> Found:
    """Answer all requests undisturbed, then over and over while the engine is killed `kills` times."""
    found, began = Found(), time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=patience(200))
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        undisturbed = [Stream(ask) for ask in work]
        await asyncio.gather(*(stream.read(session, server.url) for stream in undisturbed))
        wanted = [(stream.ask, stream.answer) for stream in undisturbed if sound(stream.ask, stream.answer)]
        counts = Counter(ask.kind for ask, _ in wanted)
        say(f"undisturbed: {dict(counts)} answers in {time.monotonic() - began:.0f} s")
        clients = Clients(server, itertools.cycle(wanted), found)
        tasks = [asyncio.create_task(clients.client(session)) for _ in range(streams)]
        for number in range(1, kills + 1):
            await kill(server, clients, found)
            if number % 10 == 0 or number == kills:
                pauses = f"pause p50 {statistics.median(found.pauses_s):.2f} s"
                say(f"{number} kills, {found.answers.total()} answers, {len(found.wrong)} wrong, {pauses}")
        clients.ending = True
        await asyncio.gather(*tasks)
    found.seconds = time.monotonic() - began
    return found


def figures(found: Found) -> dict[str, Any]:
    """Return what a result file has."""
    return {
        "clean": found.clean,
        "kills": len(found.met),
        "streams_open_at_kills": sum(found.met),
        "answers": dict(found.answers),
        "tokens": found.tokens,
        "wrong": found.wrong[:20],
        **{f"pause_p{p}_s": round(percentile(found.pauses_s, p), 3) for p in (50, 99, 100)},
        "seconds": round(found.seconds, 1),
    }


def with_tools(folder: Path) -> Path:
    """Write a tiny checkpoint whose chat template knows tools."""
    checkpoint = make_checkpoint(folder / "llama", "llama")
    template = TOOLS_TEMPLATE.replace("<|im_end|>", "<|end|>")  # the EOS token that this vocabulary has
    described = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    with_markers(checkpoint / "tokenizer.json")
    return checkpoint


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--streams", type=int, default=12, help="open at a time")
    parser.add_argument("--requests", type=int, default=32, help="different ones")
    parser.add_argument("--model", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    options = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp())
    try:
        model = "demo" if options.model == "demo" else str(with_tools(folder))
        with serve(model, *FLAGS, log=folder / "serve.log") as server:
            work = asks(options.requests, options.seed)
            found = figures(
                asyncio.run(run(server, work, options.streams, options.kills, lambda said: print(said, flush=True)))
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=1))
    if options.result:
        machine.write(options.result, shlex.join(["python", "-m", "tests.system.chaos", "kills", *words]), found)
    return 0 if found["clean"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
