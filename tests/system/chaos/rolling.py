"""A rolling update: every engine and every gateway is replaced under load, one after the other.

    python -m tests.system.chaos rolling [--streams 200] [--tokens 4000] [--step-ms 20] [--seed 1] [--result NAME]

Redis, two scripted engines and two gateways as processes.  Streams of --tokens tokens are live all the time: each
client asks again when it was answered.  One in four is plain and cannot resume; the others resume with their
Last-Event-ID.

    engine    the new one starts and is ready; the old one gets SIGTERM, hands its requests over and exits
    gateway   the new one starts and is ready; new connections go to it; the old one gets SIGTERM and exits
      plain      has only plain clients: their streams have its --drain-s (30 s) to end, then end in an error
      resuming   its clients resume at the new one: it waits GRACE_S and then closes their streams

Every token is compared with what the scripted engine must say (readers.py).  A gap is the longest silence of a stream
that was live at the SIGTERM, until every such stream has continued; it is printed next to the same without a restart.
Exit status 1 where a token was lost, repeated or wrong, a request failed, a process did not exit with 0 or a gateway
took longer than its --drain-s.  Plain streams that a gateway cuts off at the end of its --drain-s are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.records import Fleet
from quire.loadtest import machine
from tests.checkpoints import make_checkpoint
from tests.pace import paced_ms, patience
from tests.ports import free_port
from tests.system.chaos.readers import Doors, Reader, Tally
from tests.system.chaos.run import Load, percentile, scripted
from tests.system.processes import Process, at_rest, ending, fleet_until, until, wait_until_ready

NAMESPACE = "rolling"
GRACE_S = 3.0  # --drain-s of the gateway whose clients resume
DRAIN_S = 30.0  # --drain-s of the gateway with plain clients; the product's default
EXIT_S = 2.0  # for a process to exit after that
PATIENT_S = 600.0  # for anything else
ENGINE = [
    "--executor=scripted",
    "--max-seqs=512",
    "--max-model-len=8192",
    "--kv-blocks=140000",
    f"--lease-ms={paced_ms(2000)}",
]


@dataclass
class Update:
    """One process replaced, or none: a window of the same kind with nothing happening."""

    what: str
    live: int  # streams at the SIGTERM
    exit_s: float = 0.0  # from SIGTERM to the exit
    cut: int = 0  # plain streams that ended in an error, because the drain was over
    status: int = 0
    gaps_s: list[float] = field(default_factory=list)  # gaps of the streams that were live


@dataclass
class Rollout:
    """Parameters of a run."""

    updates: list[Update] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    drain_s: float = DRAIN_S  # --drain-s of the gateway with plain clients

    @property
    def clean(self) -> bool:
        """Whether each process ended as it must, and only streams that outlasted a drain saw an error.

        An update that met no stream proves nothing."""
        tally = self.tally
        wrong = tally.lost or tally.repeated or tally.wrong or tally.failures
        wrong = wrong or tally.with_gateway != sum(update.cut for update in self.updates)
        return not wrong and all(update.live and update.status == 0 and self.in_time(update) for update in self.updates)

    def in_time(self, update: Update) -> bool:
        """Whether a gateway exited within its drain.  Streams may be cut off only where the drain was over."""
        if update.what != "plain":
            return not update.cut
        return update.exit_s <= self.drain_s + patience(EXIT_S)


class Site:
    """Two engines and two gateways on one Redis, each of which can be replaced."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        checkpoint: Path,
        step_ms: float,
        drains_s: dict[str, float],
        running: list[Process],
    ) -> None:
        """`drains_s`: --drain-s of each gateway.  `running`: every process that is started; the owner ends those that
        are left."""
        self._drains_s = drains_s
        self.redis_url = redis_url
        self.doors = Doors(near=[""], far=[""])
        self.processes: dict[str, Process] = {}
        self._folder, self._running, self._numbers = folder, running, itertools.count()
        self._shared = (str(checkpoint), f"--redis-url={redis_url}", f"--namespace={NAMESPACE}", "--served-name=tiny")
        self._step = f"--scripted-step-ms={step_ms}"

    async def engine(self, name: str) -> Process:
        """Start an engine as `name` and return it once gateways can see it."""
        own = f"{name}-{next(self._numbers)}"
        process = self._start(own, "engine", f"--engine-id={own}", self._step, *ENGINE)

        def claims(fleet: Fleet) -> bool:
            assert process.popen.poll() is None, process.said()
            return any(load.engine == own for load in fleet.engines)

        await fleet_until(self.redis_url, NAMESPACE, claims)
        self.processes[name] = process
        return process

    async def gateway(self, name: str) -> Process:
        """Start a gateway as `name`, and return it once new connections of its clients lead to it."""
        own, port, plain = f"{name}-{next(self._numbers)}", free_port(), name == "plain"
        drain = f"--drain-s={self._drains_s[name]}"
        process = self._start(own, "gateway", f"--gateway-id={own}", f"--port={port}", "--late-wait-s=1000", drain)
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(wait_until_ready, url)
        (self.doors.near if plain else self.doors.far)[0] = url
        self.processes[name] = process
        return process

    def _start(self, name: str, command: str, *words: str) -> Process:
        process = Process(self._folder / f"{name}.log", command, *self._shared, *words)
        self._running.append(process)
        return process


@contextlib.asynccontextmanager
async def site(folder: Path, step_ms: float, drains_s: dict[str, float]) -> AsyncIterator[Site]:
    """Everything up and ready."""
    checkpoint = make_checkpoint(folder / "llama", "llama")
    with EmbeddedRedis(folder / "redis") as redis, ending([]) as running:
        made = Site(folder, redis.url, checkpoint, step_ms, drains_s, running)
        for name in ("engine 1", "engine 2"):
            await made.engine(name)
        for name in ("plain", "resuming"):
            await made.gateway(name)
        yield made


async def replace(stage: Site, load: Load, name: str) -> Update:
    """Replace one process, and return once every stream that was live has gone on."""
    old = stage.processes[name]
    await (stage.engine(name) if name.startswith("engine") else stage.gateway(name))
    watched = watch(load)
    update, cut = Update(name.split()[0], len(watched)), load.with_gateway
    began = time.monotonic()
    stage.doors.gateways_ending += name == "plain"
    old.popen.send_signal(signal.SIGTERM)
    update.status = await asyncio.to_thread(old.popen.wait, patience(PATIENT_S))
    update.exit_s = time.monotonic() - began
    update.gaps_s = await gaps(watched, load)
    stage.doors.gateways_ending -= name == "plain"
    update.cut = load.with_gateway - cut
    return update


async def nothing(load: Load, seconds: float) -> Update:
    """Return the gaps of the live streams in so many seconds in which nothing happens."""
    watched = watch(load)
    await asyncio.sleep(seconds)
    return Update("nothing", len(watched), gaps_s=await gaps(watched, load))


def watch(load: Load) -> list[Reader]:
    watched = [reader for reader in load.readers if reader.live]
    for reader in watched:
        reader.watch()
    return watched


async def gaps(watched: list[Reader], load: Load) -> list[float]:
    """Wait until every stream has gone on or ended; return the longest silence of each since it is watched."""
    events = {reader: reader.events for reader in watched}
    await until(lambda: all(reader.events > events[reader] or reader not in load.readers for reader in watched))
    return [reader.pause()[0] for reader in watched]


async def rolling(
    folder: Path,
    streams: int,
    tokens: int,
    step_ms: float,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
    *,
    grace_s: float = GRACE_S,
    drain_s: float = DRAIN_S,
) -> Rollout:
    """Replace both engines and both gateways under load."""
    found = Rollout(drain_s=drain_s)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=patience(PATIENT_S))
    async with (
        site(folder, step_ms, {"plain": drain_s, "resuming": grace_s}) as stage,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        rng = random.Random(seed)
        asks = (scripted(rng, (tokens, tokens), n=1) for _ in itertools.count())
        load = Load(session, stage.doors, asks, found.tally)
        began = time.monotonic()
        load.start(streams)
        await until(lambda: sum(reader.live for reader in load.readers) == streams)
        found.updates.append(await nothing(load, 5.0))
        say(line(found.updates[-1]))
        for name in ("engine 1", "engine 2", "resuming", "plain"):
            found.updates.append(await replace(stage, load, name))
            say(line(found.updates[-1]))
        await load.finish()
        found.seconds = time.monotonic() - began
        await fleet_until(stage.redis_url, NAMESPACE, lambda fleet: len(fleet.engines) == 2 and at_rest(fleet))
    return found


def line(update: Update) -> str:
    return (
        f"{update.what:<9} {update.live} streams, gap p50 {percentile(update.gaps_s, 50):.3f} "
        f"p99 {percentile(update.gaps_s, 99):.3f} max {percentile(update.gaps_s, 100):.3f} s"
        + ("" if update.what == "nothing" else f", exit after {update.exit_s:.2f} s with status {update.status}")
        + (f", {update.cut} streams cut off" if update.cut else "")
    )


def figures(found: Rollout) -> dict[str, Any]:
    """Return what a result file has."""
    tally = dataclasses.asdict(found.tally)
    return {
        "clean": found.clean,
        "seconds": round(found.seconds, 1),
        "updates": [
            {
                "what": update.what,
                "streams": update.live,
                "exit_s": round(update.exit_s, 3),
                "status": update.status,
                "cut": update.cut,
                **{f"gap_p{p}_s": round(percentile(update.gaps_s, p), 4) for p in (50, 99, 100)},
            }
            for update in found.updates
        ],
        "tally": {**tally, "failures": tally["failures"][:20]},
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="live at any time")
    parser.add_argument("--tokens", type=int, default=4000, help="of an answer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the scripted engines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", help="write the figures to loadtest/results/NAME.json")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        work = rolling(Path(folder), options.streams, options.tokens, options.step_ms, options.seed, print)
        found = figures(asyncio.run(work))
    tally = found["tally"]
    print(
        f"{tally['streams']} streams, {tally['tokens']} tokens: {tally['lost']} lost, {tally['repeated']} repeated, "
        f"{tally['wrong']} wrong, {len(tally['failures'])} requests failed, {tally['resumed']} came back"
    )
    print(*tally["failures"], sep="\n")
    if options.result:
        machine.write(options.result, shlex.join(["python", "-m", "tests.system.chaos", "rolling", *words]), found)
    return 0 if found["clean"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
