"""A quiet tenant's time to first token while a loud tenant fills the pool, compared with the quiet tenant alone.

    python -m quire.loadtest.studies fairness DIR [--seeds 1,2,3] [--gateways 2 --engines 2 --rate 44]

Each seed gives one set of arrivals, which is replayed twice on a new server: all of them, and the quiet tenant's alone.
The loud tenant sends more than the server can serve in time, so both lanes of the gateway are in use: on-time requests,
whose estimated wait meets the TTFT target, and late ones.
The executor is scripted: steps take a fixed time and compute nothing, so only the waiting differs.
DIR holds a model's tokenizer and config; the 42M model is made there if it holds none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.gateway_side import GatewaySide
from quire.loadtest import machine, replay
from quire.loadtest.checkpoint import prepare
from quire.loadtest.server import MODEL_NAME, READY_S, serve
from quire.loadtest.stats import Record, spread

TENANTS = ("loud", "quiet")
GOAL = 1.2  # target: the quiet tenant's TTFT p99 with the loud tenant / alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="DIR", help="directory of the model; made there if empty")
    parser.add_argument("--seeds", default="1,2,3", help="one pair of runs per seed; default 1,2,3")
    parser.add_argument(
        "--shares", default="10,1", help="weights of the loud and the quiet tenant's requests; default 10,1"
    )
    parser.add_argument("--rate", type=float, default=22.0, help="requests per second of both tenants; default 22")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a run; default 20")
    parser.add_argument(
        "--scale", type=float, default=0.48, help="factor on ShareGPT-like lengths; default 0.48: 77 tokens in, 162 out"
    )
    parser.add_argument("--ask-tokens", type=int, default=0, help="as in replay: max_tokens that hides output lengths")
    parser.add_argument("--drain", type=float, default=90.0, help="seconds to wait for the last answers; default 90")
    parser.add_argument("--step-ms", type=float, default=30.0, help="milliseconds of an engine step; default 30")
    parser.add_argument("--kv-blocks", type=int, default=512, help="pool in blocks of 16 tokens; default 512")
    parser.add_argument("--engines", type=int, default=1, help="engines; --kv-blocks is of each; default 1")
    parser.add_argument("--gateways", type=int, default=1, help="gateway processes; default 1")
    parser.add_argument("--name", type=machine.result_name, default="fairness", help="name of the result file")
    parser.add_argument("--server", default="", help="further options of `quire serve`, in one string")


def of_tenant(records: list[Record], tenant: str) -> dict[str, Any]:
    """Return one tenant's outcomes; times are seconds from when each request was due."""
    own = [record for record in records if record.client.tenant == tenant]
    first = [record.ttft_s for record in own if record.ttft_s is not None]
    return {
        "requests": len(own),
        "completed": sum(record.outcome == "ok" for record in own),
        "refused_at_first": sum(len(record.attempts) > 1 or record.outcome == "refused" for record in own),
        "late": sum(record.lane == "late" for record in own),
        "ttft_s": spread(first),
        "longest_gap_s": round(max((max(record.gaps_s, default=0.0) for record in own), default=0.0), 3),
    }


@contextlib.contextmanager
def further_engines(model: str, engines: int, redis_url: str, flags: list[str]) -> Iterator[None]:
    """Run `engines` - 1 engines on the Redis of `quire serve`, which runs one itself."""
    command = [sys.executable, "-m", "quire.service.cli", "engine", model, "--served-name", MODEL_NAME]
    command += [*flags, "--redis-url", redis_url, "--metrics-port", "0"]
    with contextlib.ExitStack() as stack:
        further = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            for _ in range(engines - 1)
        ]
        for engine in further:
            stack.callback(engine.terminate)
        yield


async def wait_for_engines(redis_url: str, count: int) -> None:
    """Return when `count` engines have reported to Redis.  Raises SystemExit after READY_S seconds."""
    bus = GatewaySide(redis_url, "observer")
    end = time.monotonic() + READY_S
    try:
        while len((await bus.fleet()).engines) < count:
            if time.monotonic() > end:
                raise SystemExit(f"fewer than {count} engines have reported after {READY_S:g} s")
            await asyncio.sleep(0.1)
    finally:
        await bus.close()


def run(args: argparse.Namespace, seed: int, only: str) -> dict[str, Any]:
    """Replay one seed on a new server; return the measurements of each tenant that sends requests, and of the engine.

    `only`: a tenant whose requests are sent alone; "" for all."""
    vocab, eos = prepare(args.model)
    flags = ["--executor", "scripted", "--scripted-step-ms", f"{args.step_ms:g}", "--kv-blocks", str(args.kv_blocks)]
    flags += ["--max-seqs", "256", "--max-model-len", "2048", *args.server.split()]
    words = ["--context", "2048", "--vocab-size", str(vocab), "--eos-id", str(eos), "--retry", "obey"]
    for name in ("scale", "rate", "seconds", "drain", "ask-tokens"):
        words += [f"--{name}", f"{getattr(args, name.replace('-', '_')):g}"]
    shares = ",".join(f"{name}={share}" for name, share in zip(TENANTS, args.shares.split(","), strict=True))
    words += ["--tenants", shares, "--seed", str(seed), *(["--only", only] if only else [])]
    keys = {name: f"key of {name}" for name in TENANTS}
    with tempfile.TemporaryDirectory() as directory:
        tables = (
            f'[{name}]\nweight = 1.0\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'
            for name, key in keys.items()
        )
        path = Path(directory) / "tenants.toml"
        path.write_text("".join(tables), encoding="utf-8")
        own = ["--no-spare", "--tenants", str(path), "--gateways", str(args.gateways)]
        with (
            EmbeddedRedis() as redis,
            further_engines(str(args.model), args.engines, redis.url, flags),
            serve(str(args.model), *flags, *own, "--redis-url", redis.url) as server,
        ):
            asyncio.run(wait_for_engines(redis.url, args.engines))
            result, records = replay.run([server.url, "--model", MODEL_NAME, *words], keys, "")
    names = [only] if only else list(TENANTS)
    return {name: of_tenant(records, name) for name in names} | {"server": result["figures"]["server"]}


def main(args: argparse.Namespace, command: str) -> int:
    figures: dict[str, Any] = {}
    for seed in map(int, args.seeds.split(",")):
        beside, alone = run(args, seed, ""), run(args, seed, TENANTS[1])
        p99s = [each[TENANTS[1]]["ttft_s"]["p99"] for each in (beside, alone)]
        figures[f"seed {seed}"] = {"beside": beside, "alone": alone, "ttft_p99_ratio": round(p99s[0] / p99s[1], 3)}
        for name, each in (("with the loud tenant", beside), ("alone", alone)):
            quiet = each[TENANTS[1]]
            cells = "  ".join(f"{p} {quiet['ttft_s'][p] * 1000:.0f}" for p in ("p50", "p90", "p99", "max"))
            print(f"seed {seed}, quiet tenant {name}: TTFT ms  {cells}  late {quiet['late']}, refused "
                  f"{quiet['refused_at_first']} of {quiet['requests']}", flush=True)  # fmt: skip
        loud = beside[TENANTS[0]]
        print(
            f"seed {seed}: p99 {figures[f'seed {seed}']['ttft_p99_ratio']} times that alone (target {GOAL}); "
            f"of the loud tenant's {loud['requests']} requests {loud['late']} were late, {loud['completed']} completed",
            flush=True,
        )
    ratios = [each["ttft_p99_ratio"] for each in figures.values()]
    figures["median_ratio"] = statistics.median(ratios)
    print(f"median {figures['median_ratio']} times that alone (target {GOAL})", flush=True)
    path = machine.write(args.name, command.replace(str(args.model), "DIR"), figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
