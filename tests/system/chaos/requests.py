"""Mutated requests, as fast as one process serves them: the complete gateway in this process, a scripted engine.

    python -m tests.system.chaos requests [--requests 100000] [--seed 1] [--first 0] [--at-once 8] [--template NAME]

The aiohttp application with all middleware, on a port of its own; parsers, tokenizers and chat templates; a real Redis;
an engine that answers at once.  What must hold (see judging.py), however a request is mutated (see mutations.py):

- status 2xx or 4xx, or an overload that docs/api.md names; errors have their format's form and name a sent field;
- JSON is JSON; a stream of events ends as its format does;
- no request alone makes a turn of the event loop compute for more than 100 ms, scaled by the machine's speed;
- afterwards no request is open, Redis holds no request, reservation or quota of one, and no error was logged.

Exit status 1 otherwise, with the number of each request that failed: --first N --requests 1 sends it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import logging
import re
import shutil
import tempfile
import time
import uuid
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import LATER_FIELDS, Finish, Generate
from quire.service.text.tokenizer import Tokenizer
from tests.pace import Patience, patience, python_s
from tests.service.chat_templates.published import TEMPLATES, tokenizer_in
from tests.service.fakes import TOOLS_TEMPLATE, FakeEngine, byte_level, with_template
from tests.service.gateways import MeasuredGateway, settings
from tests.system.chaos.judging import judge
from tests.system.chaos.mutations import Mutator, Request

ANSWER_S = 60.0
BLOCK = 1000  # requests in a row that one world gets
SLICE = 200  # requests between two looks at what they left
TOOLS = "tools"  # the template of a model that thinks and calls tools
WORLDS = (TOOLS, *sorted(TEMPLATES))
UNITS = 200  # bound on a turn of the event loop, in python_s(): 100 ms on a machine of 2026
MAX_SAID = 3000  # characters of a failure, as it is found
RESTS = 2500  # looks at what is left, 20 ms apart or more: what no gateway settles, a reading of the fleet settles
IDS = 100  # ids of answers kept for resuming
KEY, FREE = "a", "b"  # API keys: of a tenant with quotas, and of one without
ANSWERS = (
    "One request down, one token up. END of story.",
    "<think>\nHm, well\n</think>\n\nYes 🙂 café",
    '<think>\nHm</think><tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {"city": "Pa',
    '{"city": "Paris"}',
    "<tool_call><tool_call></tool_call>\n\n</think><think>",
    "",
)
# Keys that Redis may hold at rest: of the layout and its counts, of engines and gateways; and those that expire.
LASTING = (
    *("layout", "arrivals", "counters", "weights", "left", "reached", "gateways", "changes", "offered", "usage:"),
    *("engines", "lease:", "bells", "engine:", "prefixes:", "offers", "spare", "gateway:", "probe", "lanes", "amnesty"),
)
EXPIRING = ("req:", "log:", "once:", "quota:", "response:", "responses:", "response_bytes:", "tail:", "orders:")

Say = Callable[[str], None]


@dataclass
class Found:
    """What came of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0  # CPU seconds of the longest turn of a gateway's loop that one request alone caused
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """How many were sent."""
        return self.statuses.total()


class Errors(logging.Handler):
    """Collects what was logged with a traceback or as an error."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.lines.append(self.format(record))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which errors are collected."""
        logging.getLogger().addHandler(self)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(self)


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    """Return a tokenizer with one of WORLDS' templates; its files are made once."""
    if template != TOOLS:
        shutil.rmtree(folder / template, ignore_errors=True)
        return tokenizer_in(folder, template)
    shutil.rmtree(folder / TOOLS, ignore_errors=True)
    return Tokenizer(str(with_template(byte_level(folder / TOOLS), TOOLS_TEMPLATE)))


def tenants_file(folder: Path) -> str:
    """Write a file of two tenants, one with every quota."""
    tables = [
        f"[{name}]\nweight = 1\nadmin = true\nkey_sha256 = ['{hashlib.sha256(key.encode()).hexdigest()}']\n{quotas}"
        for name, key, quotas in (
            ("acme", KEY, "requests_per_minute = 1000000000\ntokens_per_minute = 1000000000\nmax_requests = 1000\n"),
            ("free", FREE, ""),
        )
    ]
    path = folder / "tenants.toml"
    path.write_text("\n".join(tables))
    return str(path)


class World:
    """A gateway on a thread of its own, a scripted engine, and clients."""

    def __init__(
        self, folder: Path, redis_url: str, template: str, *, strict: bool, stalls: bool, found: Found, say: Say
    ) -> None:
        self._stalls, self._say = stalls, say
        self.found, self._redis_url, self._namespace = found, redis_url, uuid.uuid4().hex[:8]
        tokenizer = tokenizer_of(folder, template)
        config = settings(
            model=str(folder),
            served_name="tiny",
            namespace=self._namespace,
            redis_url=redis_url,
            tenants=tenants_file(folder),
            strict_fields=strict,
            retain_s=15.0,
            resume_s=0.0,
            default_timeout_s=30.0,
            max_timeout_s=60.0,
        )
        self._gateway = MeasuredGateway(config, tokenizer)
        answers = [tokenizer._encode(text, special=False) for text in ANSWERS]
        eos = tokenizer._encode("</s>", special=False)[:1]

        def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
            prompt = zlib.crc32(repr(generate.token_ids[-8:]).encode())
            tokens = answers[(prompt + index) % len(answers)]
            if prompt % 3 == 0 or not tokens:
                return (tokens * generate.max_new_tokens)[: generate.max_new_tokens] or [5], Finish(
                    "length", score=-1.0
                )
            cut = generate.max_new_tokens < len(tokens) + 1
            return [*tokens, *eos], Finish("length" if cut else "stop", -1 if cut else eos[0], score=-1.0)

        self._engine = FakeEngine(redis_url, self._namespace, script)
        self._engine.burst, self._engine.free_tokens = (1000 if strict else 7), 10_000_000
        self._engine.load_changes = {
            **{
                "max_model_len": 512,
                "vocab_size": len(tokenizer.vocabulary.table),
                "grammars": True,
                "honours": list(LATER_FIELDS),
            },
            **{"total_blocks": 100_000, "free_blocks": 100_000, "beams": 8 if strict else 0},
        }
        self._recent: deque[str] = deque(maxlen=IDS)
        self._errors = Errors()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """A context in which everything runs; what is left or was logged at its end is a failure."""
        with self._errors.listening():
            await asyncio.to_thread(self._gateway.__enter__)
            try:
                async with self._engine:
                    bound = Patience(ANSWER_S)
                    while not self._gateway.served.streams.fleet.engines:
                        assert bound.lasts()
                        await asyncio.sleep(0.02)
                    yield self
            finally:
                await asyncio.to_thread(self._gateway.__exit__)
        self._blame("", self._errors.lines)

    async def send(self, numbers: range, mutator: Mutator, at_once: int) -> None:
        """Send requests, look at what they left, and send those of a slow slice again, alone."""
        with self._gateway.measured() as turns_s:
            left = iter(numbers)

            async def client() -> None:
                for number in left:
                    await self._one(number, mutator)

            await asyncio.gather(*(client() for _ in range(at_once)))
        await self._rest(f"requests {numbers.start} to {numbers.stop - 1}")
        if self._stalls and turns_s[0] > UNITS * python_s():
            await self._find_slow(numbers, mutator)

    async def _one(self, number: int, mutator: Mutator) -> None:
        mutator.ids = list(self._recent)
        request = mutator.request(number)
        try:
            data = await self._fire(request)
        except TimeoutError:
            self._blame(f"request {number}, {request}", ["neither answered nor closed"])
            return
        status, wrong = judge(request, data)
        self.found.statuses[status] += 1
        named = re.findall(rb"\nid: (\S+)|\"id\":\"((?:resp|cmpl|chatcmpl|msg)[_-]\w+)\"", data[:20_000])
        for event, one in named[:: 1 + number % 3][:5]:
            self._recent.append((event or one).decode())
        self._blame(f"request {number}, {request}", [wrong] if wrong else [])
        if self._errors.lines:
            self._blame(f"about request {number}, {request}", self._errors.lines)
            self._errors.lines = []

    async def _fire(self, request: Request) -> bytes:
        """Send a request and return the response.  Raises TimeoutError."""
        request.headers.setdefault("Authorization", f"Bearer {KEY}")
        port = int(self._gateway.served.url.rpartition(":")[2])
        async with asyncio.timeout(patience(ANSWER_S)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            got = bytearray()
            try:
                writer.write(request.bytes())
                if request.sent >= 0:
                    await asyncio.sleep(0)
                    return b""
                while (request.leave_after < 0 or len(got) < request.leave_after) and (
                    block := await reader.read(65536)
                ):
                    got += block
                return bytes(got)
            except ConnectionError:
                return bytes(got)
            finally:
                writer.transport.abort()

    async def _find_slow(self, numbers: range, mutator: Mutator) -> None:
        """Send each request again, alone, three times: one that computes for too long each time is a failure."""
        for number in numbers:
            turns: list[float] = []
            for _ in range(3):
                with self._gateway.measured() as turns_s:
                    await self._one(number, mutator)
                turns += turns_s
                if turns[-1] < UNITS * python_s() / 2:
                    break
            self.found.longest_s = max(self.found.longest_s, min(turns))
            if min(turns) > UNITS * python_s():
                self._blame(f"request {number}, {mutator.request(number)}", [f"a turn computed for {min(turns):.3f} s"])

    async def _rest(self, whom: str) -> None:
        """Wait until nothing runs; what is still there then is a failure."""
        gateway, streams = self._gateway.served.gateway, self._gateway.served.streams
        async with redis.asyncio.from_url(self._redis_url) as client:
            for _ in range(RESTS):
                await asyncio.sleep(0.02)
                left = [f"{gateway.capacity.answering} requests open"] if gateway.capacity.answering else []
                left += [f"{len(streams)} streams open"] if len(streams) else []
                left += ["the engine runs"] if self._engine.busy else []
                left = left or await leftovers(client, self._namespace)
                if not left:
                    return
        self._blame(whom, left)

    def _blame(self, whom: str, wrong: list[str]) -> None:
        for one in wrong:
            self.found.failures.append(f"{whom}: {one}")
            self._say(self.found.failures[-1][:MAX_SAID])


async def leftovers(client: Any, namespace: str) -> list[str]:
    """What Redis holds that it should not while nothing runs."""
    found = []
    async for raw in client.scan_iter(match=f"{{{namespace}}}:*", count=1000):
        name = raw.decode().partition(":")[2]
        if name.startswith(EXPIRING):
            if await client.pttl(raw) == -1:
                found.append(f"Redis keeps {name} for ever")
            if name.startswith("req:") and not await client.hexists(raw, "gone"):
                found.append(f"Redis holds {name}, which has not ended")
        elif not name.startswith(LASTING):
            found.append(f"Redis holds {name}")
    return found


async def send_all(
    folder: Path,
    server: EmbeddedRedis,
    *,
    requests: int,
    seed: int,
    first: int = 0,
    at_once: int = 8,
    template: str = "",
    stalls: bool = True,
    say: Say = lambda line: None,
) -> Found:
    """Send requests and return what came of them.  `template`: one of WORLDS; without: each in turn.

    `stalls`: whether turns of the event loop are judged."""
    found, began, end = Found(), time.monotonic(), first + requests
    for start in range(first - first % BLOCK, end, BLOCK):
        at = start // BLOCK
        name = template or WORLDS[at % len(WORLDS)]
        mutator = Mutator(seed)
        async with World(
            folder, server.url, name, strict=at % 2 == 1, stalls=stalls, found=found, say=say
        ).running() as world:
            for begin in range(max(start, first), min(start + BLOCK, end), SLICE):
                await world.send(range(begin, min(begin + SLICE, start + BLOCK, end)), mutator, at_once)
        say(f"{found.requests} requests, {time.monotonic() - began:.0f} s, {len(found.failures)} failures")
    found.seconds = time.monotonic() - began
    return found


def table(found: Found) -> str:
    """For people."""
    kinds = Counter(re.sub(r"\d+", "N", failure.rpartition(": ")[2])[:120] for failure in found.failures)
    return "\n".join(
        [
            f"{found.requests} requests in {found.seconds:.0f} s: "
            + ", ".join(f"{count} x {status}" for status, count in sorted(found.statuses.items())),
            f"longest turn of the loop that one request caused, among slow slices: {1000 * found.longest_s:.0f} ms",
            f"failures: {len(found.failures)}",
            *(f"{count:6} {kind}" for kind, count in kinds.most_common(20)),
        ]
    )


def main(words: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="requests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=8, help="connections")
    parser.add_argument("--template", choices=WORLDS, default="", help="chat template; without: each in turn")
    options = vars(parser.parse_args(words))
    print(f"seed {options['seed']}, requests {options['first']} to {options['first'] + options['requests'] - 1}")
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        found = asyncio.run(send_all(Path(folder), server, say=lambda line: print(line, flush=True), **options))
    print(table(found))
    return 1 if found.failures else 0
