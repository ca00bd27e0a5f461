"""Streams survive their engine: killed and restarted, frozen, ended by SIGTERM, or killed by a request of its batch."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.records import Fleet
from quire.loadtest.server import engine_processes
from quire.service.api.position import Position
from tests.checkpoints import VOCAB, tokenizer
from tests.matrix import sampled
from tests.pace import paced, paced_ms, patience
from tests.ports import free_port
from tests.system import processes
from tests.system.processes import QUIRE, Process, at_rest, ending, fleet_until, wait_until_ready

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]
LIMIT_S = 250.0  # generous: the machine may be busy


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S)), connector=connector
    ) as session:
        yield session


class Answer:
    """One streamed answer, assembled and checked event by event."""

    def __init__(self, body: dict[str, Any]) -> None:
        n = body.get("n", 1)
        self.body = {
            "model": "tiny",
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "include_ids": True},
            **body,
        }
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.texts = [""] * n
        self.logprobs: list[list[float]] = [[] for _ in range(n)]  # per token: its own, then its alternatives'
        self.ends: list[tuple[str, Any] | None] = [None] * n
        self.usage: dict[str, int] = {}
        self.ids: set[str] = set()
        self.error: dict[str, Any] | None = None
        self.gaps: list[float] = []  # seconds between events

    async def read(self, client: aiohttp.ClientSession, url: str) -> Answer:
        last, done, at = [0] * len(self.texts), False, time.monotonic()
        async with client.post(f"{url}/v1/completions", json=self.body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"id: "):
                    self.gaps.append(time.monotonic() - at)
                    at = time.monotonic()
                    position = Position.parse(line[4:].decode().strip())
                    self.ids.add(position.request_id)
                    now = [count or 0 for count in position.tokens]
                    assert all(before <= after for before, after in zip(last, now, strict=True))
                    last = now
                elif line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]), last)
                done = done or line.startswith(b"data: [DONE]")
        assert done
        assert len(self.ids) <= 1
        return self

    def _take(self, event: dict[str, Any], positions: list[int]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        if event.get("usage"):
            self.usage = {key: event["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
        for choice in event["choices"]:
            index = choice["index"]
            self.tokens[index] += choice["token_ids"]
            self.texts[index] += choice["text"]
            if scored := choice.get("logprobs"):
                for logprob, top in zip(scored["token_logprobs"], scored["top_logprobs"], strict=True):
                    self.logprobs[index] += [logprob, *top.values()]
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"], choice.get("stop_reason")
            if "stop" not in self.body:  # text that may belong to a stop string is held back, and with it its tokens
                assert positions[index] == len(self.tokens[index])

    def same_as(self, other: Answer) -> None:
        assert self.error is None, self.error
        assert self.tokens == other.tokens
        assert self.texts == other.texts
        assert self.ends == other.ends
        assert self.usage == other.usage
        assert all(map(bool, self.logprobs)) == ("logprobs" in self.body)
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)  # logits are rounded differently in a prefill


def bodies() -> list[dict[str, Any]]:
    """Greedy, sampled, parallel, penalties, logprobs, min_tokens, schema, bad words, given tokens: each resumes.

    Most tokens of the schema's answers are forced, so an engine that dies leaves them within a run of these."""
    ids = [[20 + i, 30 + i, 40 + i] * (3 + 4 * i) for i in range(9)]
    signs = "~^@`"  # no two of them are one token: what comes next depends on the two before
    pairs = [a + b for a in signs for b in signs]
    word = {"type": "string", "maxLength": 5}
    parts = {"the_name_of_this_entry": word, "how_often_it_is_there": {"type": "integer", "minimum": 0, "maximum": 9}}
    entry = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
    return [
        {"prompt": ids[0], "max_tokens": 700, "temperature": 0, "ignore_eos": True},
        {"prompt": ids[1], "max_tokens": 500, "n": 2, "top_k": 4, "seed": 5, "ignore_eos": True},
        {"prompt": ids[2], "max_tokens": 500, "temperature": 0, "logprobs": 1, "ignore_eos": True},
        {"prompt": ids[3], "max_tokens": 600, "top_k": 4, "seed": 7, "frequency_penalty": 0.5, "ignore_eos": True},
        {"prompt": ids[4], "max_tokens": 600, "temperature": 0, "min_tokens": 300},
        {"prompt": ids[5], "max_tokens": 600, "top_k": 4, "seed": 8, "n": 3, "ignore_eos": True},
        {
            "prompt": ids[6],
            "max_tokens": 600,
            "top_k": 8,
            "seed": 9,
            "n": 2,
            "guided_json": {"type": "array", "items": entry, "minItems": 100},
        },
        {
            "prompt": ids[7],
            "max_tokens": 500,
            "temperature": 1.5,
            "seed": 10,
            "ignore_eos": True,
            "allowed_token_ids": [tokenizer().encode(sign, add_special_tokens=False)[0] for sign in signs],
            "bad_words": [sign * 2 for sign in signs] + [pair + pair[0] for pair in pairs],
        },
        {
            "prompt": ids[8],
            "max_tokens": 500,
            "top_k": 4,
            "seed": 11,
            "ignore_eos": True,
            "logprobs": 1,
            "logprob_token_ids": [600, 5, 17],
            "return_tokens_as_token_ids": True,
        },
    ]


class Served:
    """`quire serve` with one engine."""

    def __init__(self, folder: Path, checkpoint: Path, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = Process(
            folder / "serve.log", "serve", str(checkpoint), f"--port={port}", "--served-name=tiny", *options
        )

    def engine(self) -> psutil.Process | None:
        """Return the process that is the engine now, not its spare."""
        return next(iter(engine_processes(psutil.Process(self.process.popen.pid))), None)


@pytest.fixture
def served(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    options = ("--dtype=float32", "--threads=1", "--kv-blocks=600", "--max-seqs=16", "--late-wait-s=1000")
    made = Served(tmp_path, checkpoint("llama"), *options, "--check-accounting", "--drafts=on")
    with ending([made.process]):
        wait_until_ready(made.url, LIMIT_S)
        yield made


Reading = list[asyncio.Task[Answer]]


def begin(answers: list[Answer], client: aiohttp.ClientSession, url: str) -> Reading:
    return [asyncio.create_task(answer.read(client, url)) for answer in answers]


async def until(holds: Callable[[], bool], reading: Reading) -> None:
    await processes.until(holds, LIMIT_S, reading=reading)


def drafted(url: str) -> float:
    """Return the drafts that the engine has computed since its start, as the gateway's metrics show them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=patience(LIMIT_S)) as response:
        samples = re.findall(rb"^quire_engine_drafted_tokens\{.*\} (\S+)$", response.read(), re.MULTILINE)
    return sum(map(float, samples))


async def test_a_killed_engine_continues_every_stream(served: Served, client: aiohttp.ClientSession) -> None:
    """The engine is killed twice under load, each time after every stream has resumed.  Clients see only a pause.

    It drafts all the time: with SIGKILL it loses drafts whose result has not arrived."""
    undisturbed = await asyncio.gather(*(Answer(body).read(client, served.url) for body in bodies()))
    stop = undisturbed[0].texts[0][900:912]
    assert stop not in undisturbed[0].texts[0][:880]
    last = {**bodies()[0], "stop": stop}
    undisturbed.append(await Answer(last).read(client, served.url))
    assert undisturbed[-1].ends == [("stop", stop)]
    assert all(said.count("the_name_of_this_entry") > 4 for said in undisturbed[6].texts)

    answers = [Answer(body) for body in [*bodies(), last]]
    reading = begin(answers, client, served.url)
    for kill in range(2):
        reached = [[len(said) for said in answer.tokens] for answer in answers]
        await until(
            lambda reached=reached: all(  # type: ignore[misc]
                len(said) >= before + 15 or answer.ends[index] is not None
                for answer, befores in zip(answers, reached, strict=True)
                for index, (said, before) in enumerate(zip(answer.tokens, befores, strict=True))
            ),
            reading,
        )
        await until(lambda: drafted(served.url) > 0, reading)
        assert sum(None in answer.ends for answer in answers) >= 5, f"kill {kill} had little to lose"
        engine = served.engine()
        assert engine is not None
        engine.kill()
    await asyncio.gather(*reading)
    for answer, wanted in zip(answers, undisturbed, strict=True):
        answer.same_as(wanted)
    pauses = [max(answer.gaps[1:]) for answer in answers]
    starts = [line for line in served.process.said().splitlines() if "started: " in line]
    assert len(starts) == 3
    print("longest pause of each stream, s:", *(f"{pause:.2f}" for pause in pauses))
    print(*starts, sep="\n")


class Engines:
    """Scripted engines and a gateway on one Redis."""

    def __init__(
        self, redis_url: str, namespace: str, folder: Path, checkpoint: Path, processes: list[Process]
    ) -> None:
        self.redis_url, self.namespace = redis_url, namespace
        self._folder, self._checkpoint, self._processes = folder, checkpoint, processes
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = ("--gateway-id=g", f"--port={port}", "--late-wait-s=1000")
        self._start("gateway", *words, command=[*QUIRE, "gateway"])

    def _start(self, name: str, *options: str, command: Sequence[str]) -> Process:
        shared = [f"--redis-url={self.redis_url}", f"--namespace={self.namespace}", "--served-name=tiny"]
        log = self._folder / f"{name}.log"
        process = Process(log, str(self._checkpoint), *shared, *options, command=command)
        self._processes.append(process)
        return process

    def engine(self, name: str, *options: str, command: Sequence[str] = (*QUIRE, "engine")) -> Process:
        scripted = ("--executor=scripted", "--scripted-step-ms=5", "--max-seqs=8", "--max-model-len=4096")
        return self._start(name, f"--engine-id={name}", *scripted, *options, command=command)

    async def ready(self, count: int) -> None:
        await fleet_until(self.redis_url, self.namespace, lambda fleet: len(fleet.engines) == count, LIMIT_S)
        await asyncio.to_thread(wait_until_ready, self.url, LIMIT_S)

    async def rest(self, count: int) -> Fleet:
        def holds(fleet: Fleet) -> bool:
            return len(fleet.engines) == count and at_rest(fleet)

        return await fleet_until(self.redis_url, self.namespace, holds, LIMIT_S)


@pytest.fixture
def engines(
    redis_server: EmbeddedRedis, namespace: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> Iterator[Engines]:
    with ending([]) as processes:
        yield Engines(redis_server.url, namespace, tmp_path, checkpoint("llama"), processes)


def script(seed: int, index: int, count: int) -> list[int]:
    """Return the tokens of the scripted executor, as an independent copy of engine/executor/base.py."""
    return [2 + (seed * 31 + index * 7 + at) % (VOCAB - 2) for at in range(count)]


def asks(count: int, tokens: int) -> list[Answer]:
    return [
        Answer({"prompt": [9] * (3 + i), "max_tokens": tokens, "n": 1 + i % 2, "seed": i, "ignore_eos": True})
        for i in range(count)
    ]


def assert_script(answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.error is None, answer.error
        wanted = [script(answer.body["seed"], index, answer.body["max_tokens"]) for index in range(answer.body["n"])]
        assert answer.tokens == wanted


async def test_an_engine_that_was_frozen_past_its_lease_cannot_write(
    engines: Engines, client: aiohttp.ClientSession
) -> None:
    frozen = engines.engine("frozen", f"--lease-ms={paced_ms(1000)}")
    await engines.ready(1)
    answers = asks(4, 1200)
    reading = begin(answers, client, engines.url)
    await until(lambda: all(len(said) > 20 for answer in answers for said in answer.tokens), reading)
    frozen.popen.send_signal(signal.SIGSTOP)
    try:
        other = engines.engine("other", f"--lease-ms={paced_ms(1000)}")
        await fleet_until(  # it has taken over, and says more
            engines.redis_url,
            engines.namespace,
            lambda fleet: any(load.engine == "other" and load.running == 6 for load in fleet.engines),
            LIMIT_S,
        )
        other.wait_for("ready")
    finally:
        frozen.popen.send_signal(signal.SIGCONT)
    await asyncio.gather(*reading)
    assert_script(answers)
    fleet = await engines.rest(2)
    # What the log holds was written by one engine at a time: it is as long as the answer.
    with redis.Redis.from_url(engines.redis_url) as store:
        prefix = f"{{{engines.namespace}}}:log:".encode()
        logs = [key for key in store.scan_iter(prefix + b"*") if key.rpartition(b":")[2].isdigit()]
        assert sorted(store.strlen(key) for key in logs) == [4 * 1200] * 6
    assert sum(load.generated_tokens for load in fleet.engines) >= 6 * 1200


async def test_sigterm_hands_what_runs_to_another_engine(engines: Engines, client: aiohttp.ClientSession) -> None:
    processes = {name: engines.engine(name) for name in ("one", "other")}
    await engines.ready(2)
    answers = asks(4, 1000)
    reading = begin(answers, client, engines.url)
    await until(lambda: all(len(said) > 20 for answer in answers for said in answer.tokens), reading)
    # They race for requests, and one may have got them all.
    fleet = await fleet_until(engines.redis_url, engines.namespace, lambda fleet: len(fleet.engines) == 2, LIMIT_S)
    leaving = max(fleet.engines, key=lambda load: load.running).engine
    assert await asyncio.to_thread(processes[leaving].terminate, LIMIT_S) == 0
    await asyncio.gather(*reading)
    assert_script(answers)
    [staying] = (await engines.rest(1)).engines
    assert staying.recomputed_tokens > 0  # it went on with what the other had begun
    assert staying.preemptions == 0


async def test_an_engine_alone_that_must_go_leaves_its_work_for_the_next(
    engines: Engines, client: aiohttp.ClientSession
) -> None:
    alone = engines.engine("alone", "--grace-s=0.1")
    await engines.ready(1)
    answers = asks(4, 1000)
    reading = begin(answers, client, engines.url)
    await until(lambda: all(len(said) > 20 for answer in answers for said in answer.tokens), reading)
    assert await asyncio.to_thread(alone.terminate, LIMIT_S) == 0
    engines.engine("next")
    await asyncio.gather(*reading)
    assert_script(answers)
    [following] = (await engines.rest(1)).engines
    assert following.recomputed_tokens > 0


DEADLY = 1  # a token that tests/system/deadly.py dies of; no script says it


DEATHS = {  # kind, see tests/system/deadly.py -> exit status, and what the operator reads
    "kill": (-signal.SIGKILL, ""),
    "lost": (1, "quire engine: the GPU is lost to this process: CUDA error"),
    "bug": (1, "quire engine: KeyError: 'no such row'"),
    "bus": (1, "quire engine: RuntimeError: the bus thread can't read this"),
    "hang": (1, "a step has not returned for"),
}


@pytest.mark.parametrize("kind", sampled(list(DEATHS), ["kill", "bus", "hang"]))
async def test_a_request_that_kills_its_engine_is_quarantined_and_its_mates_live(
    engines: Engines, client: aiohttp.ClientSession, tmp_path: Path, kind: str
) -> None:
    deadly = [sys.executable, "-m", "tests.system.deadly", str(DEADLY), kind]
    # Each death is counted by the next start: a lease that lapses while this machine pauses would count none.
    options = ["--lease-ms=60000"] + ([f"--step-timeout-s={paced(2)}"] if kind == "hang" else [])
    expected, said = DEATHS[kind]

    def start() -> Process:
        return engines.engine("e", *options, command=deadly)

    engine = start()
    await engines.ready(1)
    mates = asks(4, 1000)
    reading = begin(mates, client, engines.url)
    await until(lambda: all(len(said) > 20 for mate in mates for said in mate.tokens), reading)
    poison = Answer({"prompt": [9, DEADLY, 9], "max_tokens": 5, "seed": 1})
    poison.body |= {"stream": False, "stream_options": None}

    async def ask() -> tuple[int, dict[str, Any]]:
        async with client.post(f"{engines.url}/v1/completions", json=poison.body) as response:
            return response.status, await response.json()

    asking = asyncio.create_task(ask())
    deaths = 0
    deadline = time.monotonic() + patience(LIMIT_S)
    while not all(task.done() for task in (asking, *reading)):  # the supervisor
        assert time.monotonic() < deadline
        if engine.popen.poll() is not None:
            assert engine.popen.returncode == expected, engine.said()
            deaths += 1
            assert deaths <= 3, engine.said()
            assert sum(said in line for line in engine.said().splitlines()) == deaths or not said
            engine = start()
        await asyncio.sleep(0.02)
    status, answer = await asking
    assert status == 500, answer
    assert "quarantine" in answer["error"]["message"]
    assert 2 <= deaths <= 3, "at the second death it cannot be told from mates that have said nothing since the first"
    await asyncio.gather(*reading)
    assert_script(mates)
    bus = GatewaySide(engines.redis_url, "observer", namespace=engines.namespace)
    [kept] = await bus.operations.quarantined()
    await bus.close()
    assert kept.request.token_ids == [9, DEADLY, 9]
    assert (kept.attempts, kept.engine) == (deaths, "e")
    if kind == "kill":  # the commands do not depend on how the engine died
        await check_quarantine_commands(engines, tmp_path, kept.request.id, deaths)


async def check_quarantine_commands(engines: Engines, tmp_path: Path, request_id: str, deaths: int) -> None:
    def quire(*words: str) -> list[dict[str, Any]]:
        log = tmp_path / f"quarantine-{len(list(tmp_path.iterdir()))}.log"
        process = Process(
            log, "quarantine", *words, f"--redis-url={engines.redis_url}", f"--namespace={engines.namespace}"
        )
        assert process.popen.wait(patience(LIMIT_S)) == 0, process.said()
        return [json.loads(line) for line in process.said().splitlines() if line.startswith("{")]

    [listed] = await asyncio.to_thread(quire, "list")
    assert (listed["attempts"], listed["engine"]) == (deaths, "e")
    [shown] = await asyncio.to_thread(quire, "show", request_id)
    assert shown["request"]["token_ids"] == [9, DEADLY, 9]
    await asyncio.to_thread(quire, "drop", request_id)
    assert await asyncio.to_thread(quire, "list") == []
