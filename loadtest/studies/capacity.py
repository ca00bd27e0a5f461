"""The number of users that a server serves within an SLA, with equal memory and four allocators.

    python -m quire.loadtest.studies capacity DIR [--kv-blocks 512] [--sla-ttft 1] [--sla-itl 0.05] [--sla-stall 1]

    static             a sequence reserves one contiguous run for its prompt and max_tokens when it starts
    paged              a sequence takes blocks as it grows, and starts as soon as its prompt fits
    paged, admission   a sequence starts when the predicted peak of all sequences fits
    ... prefix cache   as above, and the shared system prompt is stored once

DIR holds the model; the 42M model is made there if it holds none.  Users request up to --ask-tokens and receive fewer,
as in practice.  Each sends its next request as soon as its answer is complete.  A number of users passes if
--percent of their requests meet every limit of the SLA and none fails.  Doubling, then bisecting, finds the highest
such number.

Noise on the machine can only lower the result: a trial that fails once counts as failed.  Each allocator's results
are written to capacity.json when they are complete, and reused when the command is started again for the same work.
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

from quire.loadtest import machine
from quire.loadtest.checkpoint import prepare
from quire.loadtest.replay import Options, Session, body, record_of
from quire.loadtest.server import MODEL_NAME, ServerError
from quire.loadtest.stats import Record, Sample, percentile, prefix_hits
from quire.loadtest.studies.burst_modes import serve_baseline
from quire.loadtest.trace import Job, lognormal
from quire.loadtest.workloads import Arrival

SYSTEMS: dict[str, tuple[str, ...]] = {
    "static": ("--admission", "static", "--no-prefix-cache"),
    "paged": ("--admission", "none", "--no-prefix-cache"),
    "paged, admission": ("--admission", "forecast", "--no-prefix-cache"),
    "paged, admission, prefix cache": ("--admission", "forecast"),
}
FIRST = 4  # users of the first trial
DRAIN_S = 30.0  # an answer that is not complete this long after the trial has missed the SLA
FINE = 0.04  # bisection stops when the interval is this fraction of the result


@dataclass(frozen=True)
class Work:
    """The users' requests, in tokens: means of lognormal lengths, except for the system prompt."""

    system: int
    question: int
    answer: int
    ask: int  # max_tokens of every request
    vocab: int
    eos: int
    seed: int

    def requests_of(self, user: int) -> Iterator[Job]:
        """Generate one user's requests endlessly; all prompts differ after the system prompt."""
        for round_ in range(1 << 20):
            seed = self.seed + (round_ << 40) + (user << 20)
            own = lognormal(1, self.question, self.answer, seed)[0]
            output = max(2, min(own.output_len, self.ask - 1))
            yield Job(self.system + own.prompt_len, output, seed, self.system, self.seed)


@dataclass(frozen=True)
class Sla:
    """Limits for every request, and the percentage of requests that must meet all three."""

    ttft_s: float
    itl_s: float  # maximum of a request's mean seconds per token
    stall_s: float  # maximum gap between tokens of a request, as caused by a preemption
    percent: float

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
    """The results of one number of users."""

    users: int
    requests: int
    held: float  # fraction of the requests within the SLA
    failed: int
    refused: int  # requests refused at least once
    ttft_p95_s: float | None
    itl_p95_s: float | None  # p95 over the requests' means
    stall_p95_s: float | None
    requests_per_s: float
    tokens_per_s: float
    running_mean: float | None  # mean number of sequences in the batch
    kv_mean: float | None
    preemptions: float | None
    hit_rate: float | None

    def passed(self, sla: Sla) -> bool:
        return self.requests > 0 and self.failed == 0 and self.held * 100 >= sla.percent


def highest(passed: Callable[[int], bool], first: int, most: int) -> int:
    """Return the largest number up to `most` that passes, accurate to FINE; 0 if 1 does not pass.

    Assumes that all smaller numbers pass too.  Doubles from `first`, then halves the interval."""
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
    """Run `users` users: they start one by one during `warm_s`, stay for `seconds`, and finish their last requests.

    Requests that were due before all users had started do not count."""
    records: list[Record] = []

    async def user(number: int, session: Session) -> None:
        await asyncio.sleep(warm_s * number / users)
        for job in work.requests_of(number):
            data = body(Arrival(0.0, "capacity", job), options)
            if (due := session.now_s) >= warm_s + seconds:
                return
            records.append(record_of(Arrival(due, "capacity", job)))
            await session.send(records[-1], data)

    async with Session(options) as session:
        tasks = [asyncio.create_task(user(number, session)) for number in range(users)]
        _, late = await asyncio.wait(tasks, timeout=warm_s + seconds + DRAIN_S)
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
        return round(percentile(sorted(values), 95), 4) if len(values) > 1 else None

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
    parser.add_argument("model", type=Path, metavar="DIR", help="directory of the model; made there if empty")
    parser.add_argument(
        "--systems", default=";".join(SYSTEMS), help="allocators, semicolons between them; default: all"
    )
    parser.add_argument("--kv-blocks", type=int, default=512, help="KV blocks of 16 tokens of each server; default 512")
    parser.add_argument(
        "--server", default="--max-seqs 256 --max-model-len 2048", help="further options of each server, in one string"
    )
    parser.add_argument("--system-tokens", type=int, default=256, help="shared system prompt, tokens; default 256")
    parser.add_argument("--question-tokens", type=int, default=40, help="mean question, tokens; default 40")
    parser.add_argument("--answer-tokens", type=int, default=120, help="mean answer, tokens; default 120")
    parser.add_argument("--ask-tokens", type=int, default=384, help="max_tokens of every request; default 384")
    parser.add_argument("--sla-ttft", type=float, default=1.0, help="maximum time to first token, seconds; default 1")
    parser.add_argument(
        "--sla-itl", type=float, default=0.05, help="maximum mean time per token, seconds; default 0.05"
    )
    parser.add_argument(
        "--sla-stall", type=float, default=1.0, help="maximum gap between tokens of a request, seconds; default 1"
    )
    parser.add_argument("--percent", type=float, default=95.0, help="requests that must meet the SLA, %%; default 95")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds in which a trial's users start; default 3")
    parser.add_argument("--seconds", type=float, default=9.0, help="seconds of a trial after that; default 9")
    parser.add_argument("--most", type=int, default=160, help="highest number of users to try; default 160")
    parser.add_argument("--seed", type=int, default=1, help="seed of lengths and prompts; default 1")
    parser.add_argument(
        "--quick", action="store_true", help="check the command only: no model, short trials, few users"
    )
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "capacity.json", help="file of the result")


def measure(name: str, args: argparse.Namespace, work: Work, sla: Sla, first: int) -> dict[str, Any]:
    """Measure one allocator: its capacity, the results of a single user, and every trial.  Raises ServerError."""
    flags = ["--kv-blocks", str(args.kv_blocks), *args.server.split(), *SYSTEMS[name]]
    trials: dict[int, Trial] = {}
    with serve_baseline(str(args.model), *flags) as server:
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
            print_trial(name, trials[users], sla)
            return trials[users].passed(sla)

        alone = run(1)  # also the warm-up: the first request includes one-time work of the server
        found = highest(passed, first, args.most)
    return {
        "server": " ".join(["quire serve DIR", *flags]),
        "users": found,
        "at_most": found == args.most,
        "alone": asdict(alone),
        "there": asdict(trials[found]) if found in trials else None,
        "trials": [asdict(trials[users]) for users in sorted(trials)],
    }


def print_trial(name: str, done: Trial, sla: Sla) -> None:
    print(
        f"{name}: {done.users} users, {done.held:.1%} of {done.requests} requests within the SLA, "
        f"{done.failed} failed: {'served' if done.passed(sla) else 'too many'}",
        file=sys.stderr,
        flush=True,
    )


def table(figures: dict[str, Any]) -> str:
    """Return a table with a line for each allocator."""
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
        raise SystemExit(f"--systems: {min(unknown)!r} is unknown; valid: {'; '.join(SYSTEMS)}")
    vocab, eos = prepare(args.model)
    work = Work(args.system_tokens, args.question_tokens, args.answer_tokens, args.ask_tokens, vocab, eos, args.seed)
    sla = Sla(args.sla_ttft, args.sla_itl, args.sla_stall, args.percent)
    config = {
        "kv_blocks": args.kv_blocks, "server": args.server, "work": asdict(work), "sla": asdict(sla),
        "warm_s": args.warm, "seconds": args.seconds, "most": args.most,
    }  # fmt: skip
    figures = earlier_figures(args.out, config)
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
        first = max(FIRST, figures[name]["users"])  # each allocator is expected to serve at least as many users
    print(f"{table(figures)}\n{time.monotonic() - began:.0f} s, written to {args.out}")
    return status


def earlier_figures(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the results in `path`, by allocator, if they are of this configuration and commit."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        page = json.loads(path.read_text(encoding="utf-8"))
        same = page["commit"].removesuffix("-dirty") == machine.commit().removesuffix("-dirty")
        if same and page["config"] == config:
            return dict(page["figures"])
    return {}
