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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import aiohttp
from tqdm import tqdm

from loadtest import clients, machine, scrape, workloads
from loadtest.answers import Answer, announced_pause, pause
from loadtest.clients import Mix, ProfileError
from loadtest.stats import REFUSED, Attempt, Record, Sample, Slo, series, summarise
from loadtest.workloads import Arrival, Phase

SAMPLE_S = 0.25
DEADLINE_CODE = "deadline_exceeded"
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
END_BIAS = 100.0  # the largest that servers take: end-of-sequence wins against any logit


@dataclass(frozen=True)
class Options:
    url: str
    model: str
    metrics_url: str
    text: bool = False  # prompts of words, for servers without token ids: about a token each
    vocab_size: int = 500  # token ids are below; small enough for any model
    ignore_eos: bool = True
    ask_tokens: int = 0  # max_tokens of every request; 0: what the answer will have, so that the server knows, too
    eos_id: int = 0  # ends an answer that is shorter than what was asked for
    api_key: str = ""
    keys: dict[str, str] = field(default_factory=dict)  # tenant -> key
    timeout_s: float = 600.0  # of silence in a stream
    drain_s: float = math.inf  # what has not ended so long after the last request was due has failed
    seed: int = 0


def body(arrival: Arrival, options: Options) -> bytes:
    """Built before the run: a client that encodes while it measures lags."""
    ids = arrival.job.prompt(options.vocab_size)
    length = arrival.job.output_len
    request: dict[str, Any] = {
        "model": options.model,
        "prompt": " ".join(WORDS[token % len(WORDS)] for token in ids) if options.text else ids,
        "max_tokens": length,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ask_tokens > length:
        # The answer ends by itself, after as many tokens as the workload says: forbidden before, certain then.
        request |= {"max_tokens": options.ask_tokens, "logit_bias": {str(options.eos_id): END_BIAS}}
        request["min_tokens"] = length - 1
    elif options.ignore_eos:
        request["ignore_eos"] = True
    if arrival.client.priority is not None:
        request["priority"] = arrival.client.priority
    return json.dumps(request, separators=(",", ":")).encode()


class Session:
    """Connections to one server, a clock that starts with the run, and samples of the server's metrics.

    `async with` opens them, reads the metrics once and starts the clock."""

    def __init__(self, options: Options, tick: Callable[[str], None] = lambda event: None) -> None:
        """`tick` hears "sent", "ended" and "refused" as they happen."""
        self.options = options
        self._tick = tick
        self._rng = random.Random(options.seed)
        self._samples: list[Sample] = []
        self._begin = 0.0
        limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=options.timeout_s)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits)
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        started = asyncio.Event()
        self._watch = asyncio.create_task(_watch(self._session, self.options.metrics_url, self._samples, started))
        # The first sample is what counters are measured from; a server without metrics must not hold the run up.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(started.wait(), 5)
        self._begin = time.monotonic()
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._session.close()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    async def samples(self) -> list[Sample]:
        """Those of the run, and a last one: what the last requests did shows in the metrics a moment later."""
        await asyncio.sleep(2 * SAMPLE_S)
        return [replace(sample, at_s=sample.at_s - self._begin) for sample in self._samples]

    async def send(self, record: Record, data: bytes) -> None:
        """One request to its end, refusals included: all that becomes of it goes into `record`.  Never raises for what
        a server does.  Cancelled, it leaves the record as far as it came."""
        options = self.options
        record.lag_s = self.now_s - record.due_s
        key = options.keys.get(record.client.tenant, options.api_key)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._tick("sent")
        try:
            await self._attempts(record, data, headers)
        finally:
            record.end_s = self.now_s
            self._tick("ended")

    async def _attempts(self, record: Record, data: bytes, headers: dict[str, str]) -> None:
        client = record.client
        deadline = math.inf if client.timeout_s is None else record.due_s + client.timeout_s
        while True:
            sent = self.now_s
            if deadline < math.inf:
                headers["X-Request-Timeout"] = f"{max(deadline - sent, 0.001):.3f}"  # what is left of it
            try:
                async with self._session.post(
                    f"{self.options.url}/v1/completions", data=data, headers=headers
                ) as response:
                    announced = announced_pause(response.headers, time.time()) if response.status in REFUSED else None
                    record.attempts.append(Attempt(sent, response.status, announced))
                    if response.status == 200:
                        await self._read(response, record)
                        return
                    said = reason(await response.read())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if not record.attempts or record.attempts[-1].sent_s != sent:
                    record.attempts.append(Attempt(sent, 0))
                record.outcome, record.error = "error", type(error).__name__
                return
            if record.attempts[-1].status not in REFUSED:
                _fail(record, f"{record.attempts[-1].status} {said}")
                return
            self._tick("refused")
            wait = pause(client.retry, len(record.attempts) - 1, announced, self._rng)
            if wait is None or self.now_s + wait >= deadline:  # nobody comes back for an answer that is too late
                record.outcome = "refused"
                return
            await asyncio.sleep(wait)

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        answer = Answer()
        try:
            while block := await response.content.readany():
                answer.feed(block, self.now_s)
        finally:
            record.times, record.tokens, record.cached = answer.times, answer.count, answer.cached
        if answer.complete:
            record.outcome = "ok"
        else:
            _fail(record, answer.error or "the stream ended without [DONE]")


def _fail(record: Record, said: str) -> None:
    """An answer that its own deadline ended is the client's doing, any other that is cut short the server's."""
    expired = record.client.timeout_s is not None and DEADLINE_CODE in said
    record.outcome, record.error = "expired" if expired else "error", said


def record_of(arrival: Arrival) -> Record:
    job = arrival.job
    return Record(arrival.at_s, arrival.phase, job.prompt_len, job.output_len, client=arrival.client)


async def replay(
    arrivals: list[Arrival], options: Options, tick: Callable[[str], None] = lambda event: None
) -> tuple[list[Record], list[Sample]]:
    """Send all, wait for all, but no longer than `drain_s` after the last was due."""
    bodies = [body(arrival, options) for arrival in arrivals]
    records = [record_of(arrival) for arrival in arrivals]
    async with Session(options, tick) as session:
        tasks = []
        for record, data in zip(records, bodies, strict=True):
            if (ahead := record.due_s - session.now_s) > 0:
                await asyncio.sleep(ahead)
            tasks.append(asyncio.create_task(session.send(record, data)))
        limit = None if options.drain_s == math.inf else options.drain_s
        _, late = await asyncio.wait(tasks, timeout=limit) if tasks else (set(), set())
        for task in late:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):  # ours, not the server's; a cancelled one is none
                raise result
        for record, task in zip(records, tasks, strict=True):
            if task in late:
                record.outcome, record.error = "error", f"unfinished {options.drain_s:g} s after the last was due"
        return records, await session.samples()


def reason(answer: bytes) -> str:
    """An error's code and message, as OpenAI's shape has them; else the answer's beginning."""
    try:
        error = json.loads(answer)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, LookupError, TypeError):
        return answer[:200].decode(errors="replace")


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
    parser.add_argument("--after-seconds", type=_positive, help="after the burst; default: --seconds")
    parser.add_argument("--burstiness", type=_positive, default=1.0, help="shape of gamma arrivals; 1: Poisson")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--retry", default="obey", help="what 429 and 503 lead to: obey, ignore, never, or shares")
    parser.add_argument("--tenants", help="who asks, in shares: loud=10,quiet=1")
    parser.add_argument("--only", default="", help="one of them: the others' requests are left out, its own stay")
    parser.add_argument("--keys", type=Path, help='TOML file of their keys: quiet = "..."')
    parser.add_argument("--priorities", help="shares: high=1,normal=8,low=1, or whole numbers")
    parser.add_argument("--deadlines", help="seconds, in shares: 5=1,30=1,none=2")
    parser.add_argument(
        "--ask-tokens", type=int, default=0, help="max_tokens of all: how long answers get, servers then do not know"
    )
    parser.add_argument("--eos-id", type=int, default=0, help="the model's end of sequence, which then ends them")
    parser.add_argument("--text", action="store_true", help="prompts of words instead of token ids")
    parser.add_argument("--vocab-size", type=int, default=500, help="token ids of prompts are below")
    parser.add_argument("--respect-eos", action="store_true", help="answers may end early (no ignore_eos in requests)")
    parser.add_argument("--api-key-env", help="environment variable that holds the server's key")
    parser.add_argument("--timeout", type=_positive, default=600.0, help="seconds a stream may be silent")
    parser.add_argument("--drain", type=_positive, default=math.inf, help="seconds to wait for the last; default: all")
    parser.add_argument("--slo-ttft", type=_positive, default=2.0, help="seconds")
    parser.add_argument("--slo-itl", type=_positive, default=0.2, help="seconds, mean of a request")
    parser.add_argument("--note", default="", help="goes into the result: what the server is, and how it was started")
    parser.add_argument("--out", type=Path, default=Path("replay.json"))
    parser.add_argument("--raw", type=Path, help="every request too: JSON lines with all times")


def arrivals_of(args: argparse.Namespace) -> tuple[list[Phase], list[Arrival]]:
    """What the command line asks for.  Raises SystemExit with one line."""
    if args.vocab_size <= 10:
        raise SystemExit(f"--vocab-size is {args.vocab_size}; must be > 10")
    if args.context is not None and args.context < 2:
        raise SystemExit(f"--context is {args.context}; must be >= 2")
    plan = workloads.phases(args.rate, args.seconds, args.peak, args.peak_seconds, args.after_seconds)
    try:
        if args.trace:
            arrivals = workloads.from_trace(args.trace, plan, args.burstiness, args.seed)
        else:
            arrivals = workloads.synthetic(args.workload, plan, args.burstiness, args.seed, args.scale)
    except (OSError, workloads.TraceError) as error:
        raise SystemExit(str(error)) from None
    arrivals = workloads.assign_clients(arrivals, _mix(args), args.seed, args.only)
    if not arrivals:
        whose = f" for tenant {args.only}" if args.only else ""
        raise SystemExit(f"no request arrives{whose} in {sum(p.seconds for p in plan):g} s at {args.rate:g} a second")
    return plan, workloads.clip(arrivals, args.context) if args.context else arrivals


def _mix(args: argparse.Namespace) -> Mix:
    def shares(name: str, value: Callable[[str], Any]) -> dict[Any, float]:
        given = getattr(args, name)
        try:
            return clients.parse_shares(given, value) if given else {}
        except ProfileError as error:
            raise SystemExit(f"--{name}: {error}") from None

    return Mix(
        shares("tenants", clients.parse_tenant),
        shares("priorities", clients.parse_priority),
        shares("deadlines", clients.parse_deadline),
        shares("retry", clients.parse_retry),
    )


def main(args: argparse.Namespace, command: str) -> int:
    plan, arrivals = arrivals_of(args)
    try:
        keys = clients.read_keys(args.keys) if args.keys else {}
    except (OSError, ProfileError) as error:
        raise SystemExit(str(error)) from None
    url = args.url.rstrip("/").removesuffix("/v1")
    options = options_of(args, url, args.model, keys)
    result, records = measure(args, plan, arrivals, options, command)
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if args.raw:
        with args.raw.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(raw(record), separators=(",", ":")) + "\n")
    show(result["figures"])
    print(f"written to {args.out}")
    return 0


def options_of(args: argparse.Namespace, url: str, model: str | None, keys: dict[str, str]) -> Options:
    """`model`: None asks the server.  Raises SystemExit with one line when it can't be asked."""
    api_key = os.environ.get(args.api_key_env, "") if args.api_key_env else next(iter(keys.values()), "")
    return Options(
        url=url,
        model=model or asyncio.run(first_model(url, api_key)),
        metrics_url=args.metrics_url or f"{url}/metrics",
        text=args.text,
        vocab_size=args.vocab_size,
        ignore_eos=not args.respect_eos,
        ask_tokens=args.ask_tokens,
        eos_id=args.eos_id,
        api_key=api_key,
        keys=keys,
        timeout_s=args.timeout,
        drain_s=args.drain,
        seed=args.seed,
    )


def measure(
    args: argparse.Namespace, plan: list[Phase], arrivals: list[Arrival], options: Options, command: str
) -> tuple[dict[str, Any], list[Record]]:
    """Replay with a progress bar; the result that `report` reads, and its requests."""
    with tqdm(total=len(arrivals), unit="req", disable=None) as bar:
        counts = {"sent": 0, "ended": 0, "refused": 0}

        def tick(event: str) -> None:
            counts[event] += 1
            if event == "ended":
                bar.update()
            bar.set_postfix(open=counts["sent"] - counts["ended"], refused=counts["refused"], refresh=False)

        records, samples = asyncio.run(replay(arrivals, options, tick))
    slo, spans = Slo(args.slo_ttft, args.slo_itl), windows(plan, arrivals)
    result = {
        "kind": "replay",
        "command": command,
        **machine.describe(),
        "note": args.note,
        "config": {
            "url": options.url,
            "model": options.model,
            "work": work(args, plan, arrivals),
            "retry": args.retry,
            "prompts": "text" if args.text else "token ids",
            "ignore_eos": options.ignore_eos,
        },
        "windows": spans,
        "figures": summarise(records, samples, slo, spans),
        "series": series(records, samples, slo),
    }
    return result, records


def work(args: argparse.Namespace, plan: list[Phase], arrivals: list[Arrival]) -> dict[str, Any]:
    """What is asked for: two results with equal work can be compared."""
    return {
        "workload": str(args.trace) if args.trace else args.workload,
        "requests": len(arrivals),
        "prompt_tokens": sum(arrival.job.prompt_len for arrival in arrivals),
        "output_tokens": sum(arrival.job.output_len for arrival in arrivals),
        "phases": [[phase.name, phase.rate, phase.seconds] for phase in plan],
        "burstiness": args.burstiness,
        "scale": args.scale,
        "context": args.context,
        "ask_tokens": args.ask_tokens,
        "clients": clients.count_profiles([arrival.client for arrival in arrivals]),
        "only": args.only,
        "seed": args.seed,
    }


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
        "cached": record.cached,
        "tenant": record.client.tenant,
        "priority": record.client.priority,
        "timeout_s": record.client.timeout_s,
        "retry": record.client.retry,
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
    if hits := figures["prefix_hits"]:
        print(f"prefix hits {hits['rate']:.1%} of {hits['prompt_tokens']:,} prompt tokens")
    for name, members in figures["groups"].items():
        for value, group in members.items():
            ttft = f"{group['ttft_s']['p50']:.3f} / {group['ttft_s']['p99']:.3f} s" if group["ttft_s"] else "none"
            print(
                f"{name} {value}: {group['completed']} of {group['requests']} completed, {group['expired']} expired, "
                f"TTFT p50 / p99 {ttft}, {group['goodput_fraction']:.1%} good"
            )
    print(f"refusals {away['by_status']}, first retry got in {away['first_retry_success']}, server {server}")
    if (lag := figures["send_lag_s"]) and lag["p99"] > 0.02:
        print(f"this client lagged: p99 {lag['p99'] * 1000:.0f} ms; latencies include it", file=sys.stderr)
