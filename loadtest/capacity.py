"""How many people at once: the same memory and the same promise, with one more idea each time.

    python -m loadtest capacity DIR [--kv-blocks 512] [--sla-ttft 1] [--sla-itl 0.05] [--sla-stall 1]

    static             every sequence takes, from its start, one contiguous run for prompt and max_tokens
    paged              blocks as it grows; a sequence starts as soon as its prompt fits
    paged, admission   it starts when the predicted peak of all fits
    ... prefix cache   and the system prompt that everybody shares is kept once

DIR holds the model; where there is none, the 42M model is made there.  Users ask for up to --ask-tokens and get fewer,
as people do; each asks again as soon as it has its answer.  A number of users is served if --percent of the requests
they send hold every bound of the SLA and none fails; the highest such number is found by doubling, then bisecting.

A noisy machine only ever makes the numbers smaller: one run that misses counts as a miss.  Each allocator's figures are
written as they come, to capacity.json, and taken from there when the command is started again for the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest import machine
from loadtest.checkpoint import prepare
from loadtest.replay import Options, Session, body, record_of
from loadtest.server import MODEL_NAME, ServerError, serve
from loadtest.stats import Record, Sample, prefix_hits
from loadtest.trace import lognormal
from loadtest.workloads import Arrival, SharedJob

SYSTEMS: dict[str, tuple[str, ...]] = {
    "static": ("--allocation", "static"),
    "paged": ("--admission", "none", "--no-prefix-cache"),
    "paged, admission": ("--admission", "forecast", "--no-prefix-cache"),
    "paged, admission, prefix cache": ("--admission", "forecast"),
}
FIRST = 4  # users to begin with
PATIENCE_S = 30.0  # an answer that has not ended so long after the trial has missed the SLA
FINE = 0.04  # of the result: how close bisecting gets


@dataclass(frozen=True)
class Work:
    """What users ask: tokens, means of lognormal lengths but for the system prompt."""

    system: int
    question: int
    answer: int
    ask: int  # max_tokens
    vocab: int
    eos: int
    seed: int

    def asked(self, user: int) -> Iterator[SharedJob]:
        """One user's requests, without end; prompts of one user and of all differ."""
        for round_ in range(1 << 20):
            seed = self.seed + (round_ << 40) + (user << 20)
            own = lognormal(1, self.question, self.answer, seed)[0]
            output = max(2, min(own.output_len, self.ask - 1))
            yield SharedJob(self.system + own.prompt_len, output, seed, self.system, self.seed)


@dataclass(frozen=True)
class Sla:
    ttft_s: float
    itl_s: float  # mean of a request, per token
    stall_s: float  # the longest gap of a request: what a preemption looks like to a reader
    percent: float  # of requests that must hold all three

    def held(self, record: Record) -> bool:
        return (
            record.outcome == "ok"
            and record.ttft_s is not None
            and record.ttft_s <= self.ttft_s
            and record.mean_itl_s <= self.itl_s
            and max(record.gaps_s, default=0.0) <= self.stall_s
        )


@dataclass(frozen=True)
class Trial:
    """What a number of users met."""

    users: int
    requests: int
    held: float  # fraction of them within the SLA
    failed: int
    refused: int  # at least once
    ttft_p95_s: float | None
    itl_p95_s: float | None  # of the requests' means
    stall_p95_s: float | None
    requests_per_s: float
    tokens_per_s: float
    running_mean: float | None  # sequences in the batch
    kv_mean: float | None
    preemptions: float | None
    hit_rate: float | None

    def passed(self, sla: Sla) -> bool:
        return self.requests > 0 and self.failed == 0 and self.held * 100 >= sla.percent


def highest(passed: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number up to `most` that passes, to FINE of it, when all below it pass; 0 when 1 does not.
    Doubles from `first`, then halves the interval."""
    low, high, users = 0, most + 1, min(first, most)
    while low < users < high:
        if passed(users):
            low, users = users, min(users * 2, most)
        else:
            high = users
    while high - low > max(1, round(low * FINE)):
        middle = (low + high) // 2
        low, high = (middle, high) if passed(middle) else (low, middle)
    return low


async def trial(options: Options, work: Work, users: int, warm_s: float, seconds: float, sla: Sla) -> Trial:
    """`users` come one after the other during `warm_s`, stay for `seconds`, and finish what they have begun.  What is
    asked before all of them are there does not count."""
    records: list[Record] = []

    async def user(number: int, session: Session) -> None:
        await asyncio.sleep(warm_s * number / users)
        for job in work.asked(number):
            data = body(Arrival(0.0, "capacity", job), options)
            if (due := session.now_s) >= warm_s + seconds:
                return
            records.append(record_of(Arrival(due, "capacity", job)))
            await session.send(records[-1], data)

    async with Session(options) as session:
        tasks = [asyncio.create_task(user(number, session)) for number in range(users)]
        _, late = await asyncio.wait(tasks, timeout=warm_s + seconds + PATIENCE_S)
        for task in late:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        samples = await session.samples()
    counted = [record for record in records if record.due_s >= warm_s]
    return _figures(counted, [s for s in samples if warm_s <= s.at_s < warm_s + seconds], users, sla)


def _figures(records: list[Record], samples: list[Sample], users: int, sla: Sla) -> Trial:
    def p95(values: list[float]) -> float | None:
        return round(statistics.quantiles(values, n=20, method="inclusive")[-1], 4) if len(values) > 1 else None

    def mean(values: list[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return round(statistics.fmean(there), 3) if there else None

    took = max((r.end_s for r in records), default=0.0) - min((r.due_s for r in records), default=0.0) or 1.0
    counters = [sample.preemptions for sample in samples if sample.preemptions is not None]
    hits = prefix_hits(records)
    return Trial(
        users=users,
        requests=len(records),
        held=round(sum(map(sla.held, records)) / len(records), 4) if records else 0.0,
        failed=sum(record.outcome == "error" for record in records),
        refused=sum(len(record.attempts) > 1 for record in records),
        ttft_p95_s=p95([t for r in records if (t := r.ttft_s) is not None]),
        itl_p95_s=p95([record.mean_itl_s for record in records]),
        stall_p95_s=p95([max(record.gaps_s, default=0.0) for record in records]),
        requests_per_s=round(len(records) / took, 3),
        tokens_per_s=round(sum(record.tokens for record in records) / took, 1),
        running_mean=mean([sample.running for sample in samples]),
        kv_mean=mean([sample.kv for sample in samples]),
        preemptions=counters[-1] - counters[0] if counters else None,
        hit_rate=hits["rate"] if hits else None,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="semicolons between them")
    parser.add_argument("--kv-blocks", type=int, default=512, help="of 16 tokens: the memory that all of them get")
    parser.add_argument("--server", default="--max-seqs 256 --max-model-len 2048", help="further options of all")
    parser.add_argument("--system-tokens", type=int, default=256, help="the prompt that all users share")
    parser.add_argument("--question-tokens", type=int, default=40, help="mean")
    parser.add_argument("--answer-tokens", type=int, default=120, help="mean")
    parser.add_argument("--ask-tokens", type=int, default=384, help="max_tokens: what a client asks for to be safe")
    parser.add_argument("--sla-ttft", type=float, default=1.0, help="seconds")
    parser.add_argument("--sla-itl", type=float, default=0.05, help="seconds a token, mean of a request")
    parser.add_argument("--sla-stall", type=float, default=1.0, help="seconds, longest gap of a request")
    parser.add_argument("--percent", type=float, default=95.0, help="of requests that must hold the SLA")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds in which the users of a trial arrive")
    parser.add_argument("--seconds", type=float, default=9.0, help="of a trial, once all are there")
    parser.add_argument("--most", type=int, default=160, help="users to try")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="no model, short trials, few users: does the command work?"
    )
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "capacity.json")


def measure(name: str, args: argparse.Namespace, work: Work, sla: Sla, first: int) -> dict[str, Any]:
    """One allocator: its capacity, what one user alone meets, and every trial.  Raises ServerError."""
    flags = ["--kv-blocks", str(args.kv_blocks), *args.server.split(), *SYSTEMS[name]]
    trials: dict[int, Trial] = {}
    with serve(str(args.model), *flags) as server:
        options = Options(
            url=server.url,
            model=MODEL_NAME,
            metrics_url=f"{server.url}/metrics",
            vocab_size=work.vocab,
            ask_tokens=work.ask,
            eos_id=work.eos,
            seed=work.seed,
        )

        def run(users: int) -> Trial:
            return asyncio.run(trial(options, work, users, args.warm, args.seconds, sla))

        def passed(users: int) -> bool:
            trials[users] = run(users)
            told(name, trials[users], sla)
            return trials[users].passed(sla)

        alone = run(1)  # a warm-up, too: the first request of all pays for what every server does once
        found = highest(passed, first, args.most)
    return {
        "server": " ".join(["quire serve DIR", *flags]),
        "users": found,
        "at_most": found == args.most,
        "alone": asdict(alone),
        "there": asdict(trials[found]) if found in trials else None,
        "trials": [asdict(trials[users]) for users in sorted(trials)],
    }


def told(name: str, seen: Trial, sla: Sla) -> None:
    print(
        f"{name}: {seen.users} users, {seen.held:.1%} of {seen.requests} requests within the SLA, "
        f"{seen.failed} failed: {'served' if seen.passed(sla) else 'too many'}",
        file=sys.stderr,
        flush=True,
    )


def table(figures: dict[str, Any]) -> str:
    """A line for each allocator."""
    heads = ("users", "ratio", "req/s", "tok/s", "batch", "KV", "hits", "preempted", "alone, ms/token")
    lines = [f"{'the same memory, the same SLA':32}" + "".join(f"{head:>16}" for head in heads)]
    base = next((each["users"] for each in figures.values()), 0)
    for name, each in figures.items():
        there, alone = each["there"] or {}, each["alone"]
        values = (
            (each["users"], ".0f", 1.0),
            (each["users"] / base if base else None, ".2f", 1.0),
            (there.get("requests_per_s"), ".2f", 1.0),
            (there.get("tokens_per_s"), ".0f", 1.0),
            (there.get("running_mean"), ".1f", 1.0),
            (there.get("kv_mean"), ".0%", 1.0),
            (there.get("hit_rate"), ".0%", 1.0),
            (there.get("preemptions"), ".0f", 1.0),
            (alone["itl_p95_s"], ".2f", 1000.0),
        )
        cells = ("-" if value is None else format(value * scale, form) for value, form, scale in values)
        lines.append(f"{name:32}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main(args: argparse.Namespace, command: str) -> int:
    if args.quick:
        args.server += " --executor scripted --scripted-step-ms 2"
        args.kv_blocks, args.ask_tokens, args.answer_tokens, args.most = 192, 96, 16, 16
        args.warm, args.seconds = 0.2, 1.0
    names = args.systems.split(";")
    if unknown := set(names) - SYSTEMS.keys():
        raise SystemExit(f"--systems: {min(unknown)!r} is none; there are {'; '.join(SYSTEMS)}")
    vocab, eos = prepare(args.model)
    work = Work(args.system_tokens, args.question_tokens, args.answer_tokens, args.ask_tokens, vocab, eos, args.seed)
    sla = Sla(args.sla_ttft, args.sla_itl, args.sla_stall, args.percent)
    config = {
        "kv_blocks": args.kv_blocks, "server": args.server, "work": asdict(work), "sla": asdict(sla),
        "warm_s": args.warm, "seconds": args.seconds, "most": args.most,
    }  # fmt: skip
    figures = known(args.out, config)
    first, status, began = FIRST, 0, time.monotonic()
    for name in names:
        if name not in figures:
            try:
                figures[name] = measure(name, args, work, sla, first)
            except ServerError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                status = 1
                continue
            page = {"command": command, **machine.describe(), "config": config, "figures": figures}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
        first = max(FIRST, figures[name]["users"])  # each idea is expected to serve at least as many
    print(f"{table(figures)}\n{time.monotonic() - began:.0f} s, written to {args.out}")
    return status


def known(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What was measured before with this configuration and commit, by allocator."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        page = json.loads(path.read_text(encoding="utf-8"))
        same = page["commit"].removesuffix("-dirty") == machine.commit().removesuffix("-dirty")
        if same and page["config"] == config:
            return dict(page["figures"])
    return {}
