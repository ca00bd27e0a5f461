"""Open-loop replay: requests go out when they are due, whatever has become of those before.

    python -m loadtest replay URL [--workload sharegpt] [--rate 5] [--seconds 60] [--peak 15] [--out RESULT.json]

    due ──lag──> sent ──> 429, pause, sent again ... ──> first text ── gap ── gap ──> end
     └────────────────────────── TTFT ────────────────────────┘
     └──────────────────────────────────── end to end ──────────────────────────────────┘

Speaks /v1/completions with server-sent events, so any OpenAI-compatible server can be measured, and reads its /metrics
meanwhile.  Writes one JSON: command, commit, machine, configuration, figures and a series over time for the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from loadtest import machine, scrape, workloads
from loadtest.client import Answer, Retry, announced_pause, pause
from loadtest.figures import Attempt, Record, Sample, Slo, series, summarise
from loadtest.workloads import Arrival, Phase

SAMPLE_S = 0.25
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
REFUSED = (429, 503)


@dataclass(frozen=True)
class Options:
    url: str
    model: str
    metrics_url: str
    retry: Retry = "obey"
    text: bool = False  # prompts of words, for servers without token ids: about a token each
    vocab_size: int = 500  # token ids are below; small enough for any model
    ignore_eos: bool = True
    api_key: str = ""
    timeout_s: float = 600.0
    seed: int = 0


def body(arrival: Arrival, options: Options) -> bytes:
    """Built before the run: a client that encodes while it measures lags."""
    ids = arrival.job.prompt(options.vocab_size)
    request: dict[str, Any] = {
        "model": options.model,
        "prompt": " ".join(WORDS[token % len(WORDS)] for token in ids) if options.text else ids,
        "max_tokens": arrival.job.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        request["ignore_eos"] = True
    return json.dumps(request, separators=(",", ":")).encode()


async def replay(
    arrivals: list[Arrival], options: Options, tick: Callable[[str], None] = lambda event: None
) -> tuple[list[Record], list[Sample]]:
    """Send all, wait for all.  `tick` hears "sent", "ended" and "refused" as they happen.  Never raises for what a
    server does: that is in the records."""
    bodies = [body(arrival, options) for arrival in arrivals]
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    rng = random.Random(options.seed)
    samples: list[Sample] = []
    limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=options.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=limits) as session:
        started = asyncio.Event()
        watch = asyncio.create_task(_watch(session, options.metrics_url, samples, started))
        # The first sample is what counters are measured from; a server without metrics must not hold the run up.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(started.wait(), 5)
        begin = time.monotonic()
        tasks = []
        for arrival, data in zip(arrivals, bodies, strict=True):
            if (ahead := begin + arrival.at_s - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
            tasks.append(asyncio.create_task(_request(session, arrival, data, options, begin, rng, tick)))
        records = list(await asyncio.gather(*tasks))
        await asyncio.sleep(2 * SAMPLE_S)  # what the last ones did shows in the metrics a moment later
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    shifted = [Sample(s.at_s - begin, s.kv, s.running, s.waiting, s.preemptions, s.recomputed) for s in samples]
    return records, shifted


async def _request(
    session: aiohttp.ClientSession,
    arrival: Arrival,
    data: bytes,
    options: Options,
    begin: float,
    rng: random.Random,
    tick: Callable[[str], None],
) -> Record:
    """One request to its end, refusals included."""
    job = arrival.job
    record = Record(arrival.at_s, arrival.phase, job.prompt_len, job.output_len)
    record.lag_s = time.monotonic() - begin - arrival.at_s
    tick("sent")
    while True:
        sent = time.monotonic() - begin
        try:
            async with session.post(f"{options.url}/v1/completions", data=data) as response:
                announced = announced_pause(response.headers, time.time()) if response.status in REFUSED else None
                record.attempts.append(Attempt(sent, response.status, announced))
                if response.status == 200:
                    await _read(response, record, begin)
                    break
                said = reason(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not record.attempts or record.attempts[-1].sent_s != sent:
                record.attempts.append(Attempt(sent, 0))
            record.outcome, record.error = "error", type(error).__name__
            break
        if record.attempts[-1].status not in REFUSED:
            record.outcome, record.error = "error", f"{record.attempts[-1].status} {said}"
            break
        tick("refused")
        wait = pause(options.retry, len(record.attempts) - 1, announced, rng)
        if wait is None:
            record.outcome = "refused"
            break
        await asyncio.sleep(wait)
    record.end_s = time.monotonic() - begin
    tick("ended")
    return record


def reason(answer: bytes) -> str:
    """An error's code and message, as OpenAI's shape has them; else the answer's beginning."""
    try:
        error = json.loads(answer)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, LookupError, TypeError):
        return answer[:200].decode(errors="replace")


async def _read(response: aiohttp.ClientResponse, record: Record, begin: float) -> None:
    answer = Answer()
    try:
        while block := await response.content.readany():
            answer.feed(block, time.monotonic() - begin)
    finally:
        record.times, record.tokens = answer.times, answer.count
    if answer.complete:
        record.outcome = "ok"
    else:
        record.outcome, record.error = "error", answer.error or "the stream ended without [DONE]"


async def _watch(session: aiohttp.ClientSession, url: str, samples: list[Sample], started: asyncio.Event) -> None:
    """Read the metrics until cancelled; a server that has none, or fails now and then, is left alone."""
    limit = aiohttp.ClientTimeout(total=5)
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with session.get(url, timeout=limit) as response:
                if response.status == 200:
                    samples.append(scrape.sample(await response.text(), time.monotonic()))
        started.set()
        await asyncio.sleep(SAMPLE_S)


async def first_model(url: str, api_key: str) -> str:
    """The first model the server lists.  Raises SystemExit with one line when it can't be asked."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10), headers=headers) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, LookupError, TypeError, ValueError) as error:
        raise SystemExit(f"{url}/v1/models: {error or type(error).__name__}") from None


def windows(plan: list[Phase], arrivals: list[Arrival]) -> dict[str, tuple[float, float]]:
    """When each phase begins and ends, in seconds of the run."""
    if arrivals and arrivals[0].phase == "trace":
        return {"trace": (0.0, arrivals[-1].at_s + 1e-9)}
    found, start = {}, 0.0
    for phase in plan:
        found[phase.name] = (start, start + phase.seconds)
        start += phase.seconds
    return found


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number > 0")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--metrics-url", help="default: URL/metrics")
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default="sharegpt")
    parser.add_argument("--trace", type=Path, help="JSON lines, instead of a workload")
    parser.add_argument("--scale", type=_positive, default=1.0, help="multiplies the workload's lengths")
    parser.add_argument("--context", type=int, help="tokens of the model: what is longer gets clipped")
    parser.add_argument("--rate", type=_positive, default=5.0, help="requests a second")
    parser.add_argument("--seconds", type=_positive, default=60.0, help="with --peak, before the burst and again after")
    parser.add_argument("--peak", type=_positive, help="requests a second in a burst between two phases at --rate")
    parser.add_argument("--peak-seconds", type=_positive, default=30.0)
    parser.add_argument("--burstiness", type=_positive, default=1.0, help="shape of gamma arrivals; 1: Poisson")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--retry", choices=("obey", "ignore", "never"), default="obey", help="what 429 and 503 lead to")
    parser.add_argument("--text", action="store_true", help="prompts of words instead of token ids")
    parser.add_argument("--vocab-size", type=int, default=500, help="token ids of prompts are below")
    parser.add_argument("--respect-eos", action="store_true", help="answers may end early (no ignore_eos in requests)")
    parser.add_argument("--api-key-env", help="environment variable that holds the server's key")
    parser.add_argument("--timeout", type=_positive, default=600.0, help="seconds a stream may be silent")
    parser.add_argument("--slo-ttft", type=_positive, default=2.0, help="seconds")
    parser.add_argument("--slo-itl", type=_positive, default=0.2, help="seconds, mean of a request")
    parser.add_argument("--note", default="", help="goes into the result: what the server is, and how it was started")
    parser.add_argument("--out", type=Path, default=Path("replay.json"))
    parser.add_argument("--raw", type=Path, help="every request too: JSON lines with all times")


def main(args: argparse.Namespace, command: str) -> int:
    if args.vocab_size <= 10:
        raise SystemExit(f"--vocab-size is {args.vocab_size}; must be > 10")
    if args.context is not None and args.context < 2:
        raise SystemExit(f"--context is {args.context}; must be >= 2")
    plan = workloads.phases(args.rate, args.seconds, args.peak, args.peak_seconds)
    try:
        if args.trace:
            arrivals = workloads.from_trace(args.trace, plan, args.burstiness, args.seed)
        else:
            arrivals = workloads.synthetic(args.workload, plan, args.burstiness, args.seed, args.scale)
    except (OSError, workloads.TraceError) as error:
        raise SystemExit(str(error)) from None
    if not arrivals:
        raise SystemExit(f"no request arrives in {sum(p.seconds for p in plan):g} s at {args.rate:g} a second")
    if args.context:
        arrivals = workloads.clip(arrivals, args.context)
    url = args.url.rstrip("/").removesuffix("/v1")
    api_key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    slo = Slo(args.slo_ttft, args.slo_itl)
    options = Options(
        url=url,
        model=args.model or asyncio.run(first_model(url, api_key)),
        metrics_url=args.metrics_url or f"{url}/metrics",
        retry=args.retry,
        text=args.text,
        vocab_size=args.vocab_size,
        ignore_eos=not args.respect_eos,
        api_key=api_key,
        timeout_s=args.timeout,
        seed=args.seed,
    )
    with tqdm(total=len(arrivals), unit="req", disable=None) as bar:
        counts = {"sent": 0, "ended": 0, "refused": 0}

        def tick(event: str) -> None:
            counts[event] += 1
            if event == "ended":
                bar.update()
            bar.set_postfix(open=counts["sent"] - counts["ended"], refused=counts["refused"], refresh=False)

        records, samples = asyncio.run(replay(arrivals, options, tick))
    spans = windows(plan, arrivals)
    result = {
        "kind": "replay",
        "command": command,
        **machine.describe(),
        "note": args.note,
        "config": {
            "url": url,
            "model": options.model,
            # What was asked for: two results with equal work can be compared.
            "work": {
                "workload": str(args.trace) if args.trace else args.workload,
                "requests": len(arrivals),
                "prompt_tokens": sum(arrival.job.prompt_len for arrival in arrivals),
                "output_tokens": sum(arrival.job.output_len for arrival in arrivals),
                "phases": [[phase.name, phase.rate, phase.seconds] for phase in plan],
                "burstiness": args.burstiness,
                "scale": args.scale,
                "context": args.context,
                "seed": args.seed,
            },
            "retry": args.retry,
            "prompts": "text" if args.text else "token ids",
            "ignore_eos": options.ignore_eos,
        },
        "windows": spans,
        "figures": summarise(records, samples, slo, spans),
        "series": series(records, samples, slo),
    }
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if args.raw:
        with args.raw.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(raw(record), separators=(",", ":")) + "\n")
    show(result["figures"])
    print(f"written to {args.out}")
    return 0


def raw(record: Record) -> dict[str, Any]:
    """A line of --raw; times in seconds to a tenth of a millisecond."""
    return {
        "due_s": round(record.due_s, 4),
        "phase": record.phase,
        "prompt_len": record.prompt_len,
        "output_len": record.output_len,
        "lag_s": round(record.lag_s, 4),
        "attempts": [[round(a.sent_s, 4), a.status, a.announced_s] for a in record.attempts],
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 4),
        "itl_s": [round(gap, 4) for gap in record.gaps_s],
        "end_s": round(record.end_s, 4),
        "tokens": record.tokens,
        "outcome": record.outcome,
        "error": record.error,
    }


def show(figures: dict[str, Any]) -> None:
    """The figures one looks at first, on the terminal."""
    for name in ("ttft_s", "itl_s", "e2e_s", "send_lag_s"):
        if spread := figures[name]:
            cells = "  ".join(f"{key} {spread[key] * 1000:,.1f}" for key in ("p50", "p90", "p99", "max"))
            print(f"{name.removesuffix('_s'):10} ms  {cells}")
    good, away, server = figures["goodput"], figures["refusals"], figures["server"]
    print(
        f"{figures['completed']} of {figures['requests']} completed, {figures['failed']} failed, "
        f"{good['fraction']:.1%} within {good['slo_ttft_s']:g} s and {good['slo_mean_itl_s']:g} s a token"
    )
    print(f"refusals {away['by_status']}, first retry got in {away['first_retry_success']}, server {server}")
    if (lag := figures["send_lag_s"]) and lag["p99"] > 0.02:
        print(f"this client lagged: p99 {lag['p99'] * 1000:.0f} ms; latencies include it", file=sys.stderr)
