"""START HERE: a run of chaos: continuous load, faults one round after the other, and what came of every stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from quire.engine.executor.base import scripted_token
from tests.checkpoints import VOCAB, make_checkpoint
from tests.pace import patience
from tests.system.chaos.faults import KINDS, LEASE_MS, Fault, Missed
from tests.system.chaos.readers import Doors, Reader, Request, Tally
from tests.system.chaos.world import LIMIT_S, World, until, world
from tests.system.processes import at_rest, fleet_until

Model = Literal["scripted", "tiny"]
# Slots and blocks for all streams on any one engine, so that no stream is preempted.
OPTIONS = {
    "scripted": ["--executor=scripted", "--max-model-len=4096", "--max-seqs=255", "--kv-blocks=20000"],
    "tiny": ["--dtype=float32", "--threads=1", "--max-seqs=255", "--kv-blocks=6000"],
}


Beside = Callable[[World, aiohttp.ClientSession], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Setting:
    """What runs while things go wrong."""

    model: Model  # scripted: says a known text; tiny: a real checkpoint, which is asked beforehand what it says
    machines: int  # each with an engine
    streams: int  # live at any time
    tokens: tuple[int, int]  # tokens of an answer: minimum and maximum
    seed: int
    step_ms: float = 20.0  # the scripted engine's
    between_s: tuple[float, float] = (0.1, 1.0)  # from a round's end, every stream having gone on, to the next round
    options: tuple[str, ...] = ()  # more words for each `quire serve`


@dataclass
class Round:
    """One round of faults, and the streams that were live when it began."""

    kind: str
    pauses_s: list[float]
    after_s: list[float]  # how much of each pause was left when the fault was over
    took_s: float  # the fault
    recovered: bool  # every stream went on


@dataclass
class Report:
    """All that is worth knowing about a run."""

    setting: Setting
    rounds: list[Round] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    restarts: list[dict[str, float]] = field(default_factory=list)  # engine restarts: seconds by part
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        tally = self.tally
        return not (tally.lost or tally.repeated or tally.wrong or tally.failures) and all(
            one.recovered for one in self.rounds
        )


async def run(
    setting: Setting,
    rounds: Iterable[list[Fault]],
    folder: Path,
    *,
    say: Callable[[str], None] = lambda line: None,
    binary: Path | None = None,
    checkpoint: Path | None = None,
    beside: Beside = lambda stage, session: contextlib.nullcontext(),
) -> Report:
    """Start everything, with Redis servers of the program `binary`, keep `setting.streams` going through these rounds,
    let them end, and count.  `beside`: entered before the first stream, left after the last one."""
    report = Report(setting)
    checkpoint = checkpoint or make_checkpoint(folder / "llama", "llama")
    options = [f"--lease-ms={LEASE_MS}", "--late-wait-s=1000", *OPTIONS[setting.model], *setting.options]
    if setting.model == "scripted":
        options.append(f"--scripted-step-ms={setting.step_ms}")
    # A connection for each request: one that is used again may be closed while the next request is on its way.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=patience(LIMIT_S))
    async with (
        world(folder, checkpoint, options, machines=setting.machines, binary=binary) as stage,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        rng = random.Random(setting.seed)
        if setting.model == "scripted":
            asks = (scripted(rng, setting.tokens) for _ in itertools.count())
        else:
            known = await undisturbed(session, stage.doors, rng, setting.tokens)
            asks = (rng.choice(known) for _ in itertools.count())
        load = Load(session, stage.doors, asks, report.tally)
        began = time.monotonic()
        async with beside(stage, session):
            load.start(setting.streams)
            await until(lambda: sum(reader.live for reader in load.readers) == setting.streams)
            for faults in rounds:
                report.rounds.append(await one_round(stage, load, faults))
                say(line(report.rounds[-1]))
                await asyncio.sleep(rng.uniform(*setting.between_s))
            await load.finish()
        report.seconds = time.monotonic() - began
        await fleet_until(
            stage.redis.url,
            "quire",
            lambda fleet: len(fleet.engines) == setting.machines and at_rest(fleet),
            LIMIT_S,
        )
        report.restarts = [start for machine in stage.machines for start in machine.starts()[1:]]
    return report


async def one_round(stage: World, load: Load, faults: list[Fault]) -> Round:
    watched = [reader for reader in load.readers if reader.live]
    for reader in watched:
        reader.watch()
    began = time.monotonic()
    done = await asyncio.gather(*(KINDS[fault.kind](stage, fault) for fault in faults), return_exceptions=True)
    over = time.monotonic()
    for error in done:
        if isinstance(error, BaseException) and not isinstance(error, Missed):
            raise error
    events = {reader: reader.events for reader in watched}
    recovered = await until(lambda: all(reader.events > events[reader] for reader in watched if reader in load.readers))
    pauses = [reader.pause() for reader in watched]
    kind = " + ".join(
        fault.kind + " (missed)" * isinstance(error, Missed) for fault, error in zip(faults, done, strict=True)
    )
    return Round(
        kind,
        [seconds for seconds, _ in pauses],
        [max(0.0, end - over) for _, end in pauses],
        over - began,
        recovered,
    )


class Load:
    """So many clients, each asking again as soon as it was answered."""

    def __init__(self, session: aiohttp.ClientSession, doors: Doors, asks: Iterable[Request], tally: Tally) -> None:
        self._session, self._doors, self._asks, self._tally = session, doors, iter(asks), tally
        self.readers: set[Reader] = set()  # under way
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self._numbers = itertools.count()

    @property
    def with_gateway(self) -> int:
        """Plain streams so far that ended with their gateway."""
        return self._tally.with_gateway

    def start(self, streams: int) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(streams)]

    async def finish(self) -> None:
        """All clients read their current answers to the end."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        while not self._ending:
            number = next(self._numbers)
            reader = Reader(next(self._asks), self._doors, f"client-{number}", number, resumable=number % 4 > 0)
            self.readers.add(reader)
            try:
                add(self._tally, await reader.read(self._session))
            finally:
                self.readers.discard(reader)


def add(total: Tally, one: Tally) -> None:
    for each in dataclasses.fields(Tally):
        setattr(total, each.name, getattr(total, each.name) + getattr(one, each.name))


def body(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "include_ids": True},
        **more,
    }


def scripted(rng: random.Random, tokens: tuple[int, int], n: int = 0) -> Request:
    """What the scripted executor says is a function of seed, choice and position.

    `n`: choices; 0: one in eight requests has three."""
    count, seed = rng.randint(*tokens), rng.randrange(1000)
    n = n or rng.choices((1, 3), (7, 1))[0]
    prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 100))]
    wanted = [[scripted_token(seed, index, at, VOCAB) for at in range(count)] for index in range(n)]
    return Request(body(prompt, count, seed=seed, n=n), wanted)


KNOWN = 32  # different requests of which the tiny checkpoint's answers are known


async def undisturbed(
    session: aiohttp.ClientSession, doors: Doors, rng: random.Random, tokens: tuple[int, int]
) -> list[Request]:
    """Requests, half of them greedy, with the answers that the tiny checkpoint gives while nothing goes wrong."""

    async def ask(number: int) -> Request:
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 100))]
        how = {"temperature": 0} if number % 2 else {"top_k": 4, "seed": number, "n": 1 + number % 3}
        asked = body(prompt, rng.randint(*tokens), **how)
        plain = {key: value for key, value in asked.items() if not key.startswith("stream")}
        async with session.post(f"{doors.near[0]}/v1/completions", json=plain) as response:
            assert response.status == 200, await response.text()
            choices = (await response.json())["choices"]
        return Request(asked, [choice["token_ids"] for choice in choices])

    return await asyncio.gather(*(ask(number) for number in range(KNOWN)))


# -- the table


def percentile(values: list[float], percent: float) -> float:
    """0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def line(one: Round) -> str:
    stuck = "" if one.recovered else "  NOT EVERY STREAM WENT ON"
    return (
        f"{one.kind:<36} {one.took_s:6.2f} s, {len(one.pauses_s)} streams, pause p50 "
        f"{percentile(one.pauses_s, 50):.2f} max {percentile(one.pauses_s, 100):.2f} s{stuck}"
    )


def figures(report: Report) -> dict[str, Any]:
    """Of a report, for JSON."""
    by_kind: dict[str, list[Round]] = {}
    for one in report.rounds:
        by_kind.setdefault(one.kind, []).append(one)
    faults = {}
    for kind, rounds in sorted(by_kind.items()):
        pauses = [pause for one in rounds for pause in one.pauses_s]
        after = [pause for one in rounds for pause in one.after_s]
        faults[kind] = {
            "rounds": len(rounds),
            "streams": len(pauses),
            "pause_p50_s": round(percentile(pauses, 50), 3),
            "pause_p99_s": round(percentile(pauses, 99), 3),
            "fault_p50_s": round(statistics.median(one.took_s for one in rounds), 3),
            "after_fault_p50_s": round(percentile(after, 50), 3),
            "after_fault_p99_s": round(percentile(after, 99), 3),
        }
    parts = {
        part: {"p50": round(percentile(of, 50), 3), "p99": round(percentile(of, 99), 3)}
        for part in dict.fromkeys(part for start in report.restarts for part in start)
        for of in [[start[part] for start in report.restarts if part in start]]
    }
    tally = dataclasses.asdict(report.tally)
    tally["failed"] = len(tally["failures"])
    tally["failures"] = tally["failures"][:20]
    return {
        "setting": dataclasses.asdict(report.setting),
        "seconds": round(report.seconds, 1),
        "tally": tally,
        "faults": faults,
        "engine_starts": len(report.restarts),
        "engine_start_parts_s": parts,
        "clean": report.clean,
    }


def table(found: dict[str, Any]) -> str:
    """Figures, for people."""
    rows = [f"{'':<36} rounds streams  pause p50    p99 s |  fault p50 s  then p50    p99 s"]
    for kind, row in found["faults"].items():
        rows.append(
            f"{kind:<36} {row['rounds']:>6} {row['streams']:>7} {row['pause_p50_s']:>10.2f} {row['pause_p99_s']:>8.2f}"
            f" | {row['fault_p50_s']:>12.2f} {row['after_fault_p50_s']:>9.2f} {row['after_fault_p99_s']:>8.2f}"
        )
    tally = found["tally"]
    rows += [
        "",
        f"streams checked     {tally['streams']:>9}   of them by clients that come back: {tally['resumable']}",
        f"tokens checked      {tally['tokens']:>9}   in {found['seconds']:g} s",
        f"tokens lost         {tally['lost']:>9}",
        f"tokens repeated     {tally['repeated']:>9}",
        f"tokens wrong        {tally['wrong']:>9}",
        f"requests failed     {tally['failed']:>9}",
        f"came back, went on  {tally['resumed']:>9}",
        f"told to come later  {tally['refused']:>9}   (429 or 503 with Retry-After, before anything was said)",
        f"lost with Redis     {tally['with_redis']:>9}   by a failover, and their clients were told",
        f"ended with gateway  {tally['with_gateway']:>9}   plain streams on a gateway that was killed",
    ]
    if found["engine_start_parts_s"]:
        parts = ", ".join(f"{name} {of['p50']:g} ({of['p99']:g})" for name, of in found["engine_start_parts_s"].items())
        rows += ["", f"{found['engine_starts']} engine starts, seconds p50 (p99): {parts}"]
    rows += [json.dumps(failure) for failure in tally["failures"]]
    return "\n".join(rows)
