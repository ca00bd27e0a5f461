"""Open-loop replay: every request is sent when it is due, even if earlier requests are still waiting.

    python -m quire.loadtest replay URL [--workload sharegpt] [--rate 5] [--seconds 60] [--peak 15] [--out RESULT.json]

    due ──lag──> sent ──> 429, pause, sent again ... ──> first text ── gap ── gap ──> end
     └────────────────────────── TTFT ────────────────────────┘
     └──────────────────────────────────── end to end ──────────────────────────────────┘

Uses /v1/completions with server-sent events, so it measures any OpenAI-compatible server, and reads the server's
/metrics during the run.  Writes one JSON file: command, commit, machine, configuration, figures, and a series for
`report`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import aiohttp
from tqdm import tqdm

from quire.loadtest import clients, machine, overload, scrape, workloads
from quire.loadtest.answers import Answer, announced_pause, pause
from quire.loadtest.checkpoint import COUNTDOWN, read_countdown
from quire.loadtest.clients import Mix, ProfileError
from quire.loadtest.stats import REFUSED, Attempt, Record, Sample, Slo, series, summarise
from quire.loadtest.trace import TraceError
from quire.loadtest.workloads import Arrival, Phase

SAMPLE_S = 0.25
DEADLINE_CODE = "deadline_exceeded"
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
END_BIAS = 100.0  # the largest logit_bias that servers accept: end-of-sequence wins against any logit


@dataclass(frozen=True)
class Options:
    """How requests are sent, and to which server."""

    url: str
    model: str
    metrics_url: str
    text: bool = False  # prompts are words, about a token each, for servers that take no token ids
    vocab_size: int = 500  # exclusive maximum of the prompts' token ids; small enough for any model
    ignore_eos: bool = True
    ask_tokens: int = 0  # max_tokens of every request; 0: the actual length of its answer, which the server then knows
    eos_id: int = 0  # ends an answer that is shorter than ask_tokens
    # ids[n] as the last token of a prompt makes an answer of n tokens (loadtest/checkpoint.py); (): logit_bias ends it.
    countdown: tuple[int, ...] = ()
    api_key: str = ""
    keys: dict[str, str] = field(default_factory=dict)  # tenant -> key
    timeout_s: float = 600.0  # maximum silence of a stream, seconds
    drain_s: float = math.inf  # a request fails if it is not complete this long after the last one was due
    seed: int = 0


def body(arrival: Arrival, options: Options) -> bytes:
    """Return a request's body.  Built before the run, because a client that encodes during it would lag."""
    ids = arrival.job.prompt(options.vocab_size)
    length = arrival.job.output_len
    if options.countdown:
        ids[-1] = options.countdown[length]
    request: dict[str, Any] = {
        "model": options.model,
        "prompt": " ".join(WORDS[token % len(WORDS)] for token in ids) if options.text else ids,
        "max_tokens": length,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ask_tokens and options.countdown:
        request["max_tokens"] = max(options.ask_tokens, length)
    elif options.ask_tokens > length:
        # The end of sequence is forbidden before the workload's length, and certain at it.
        request |= {"max_tokens": options.ask_tokens, "logit_bias": {str(options.eos_id): END_BIAS}}
        request["min_tokens"] = length - 1
    elif options.ignore_eos:
        request["ignore_eos"] = True
    if arrival.client.priority is not None:
        request["priority"] = arrival.client.priority
    return json.dumps(request, separators=(",", ":")).encode()


class Session:
    """The connections of one run, its clock, and samples of the server's metrics.

    `async with` opens the connections, reads the metrics once and starts the clock."""

    def __init__(self, options: Options, tick: Callable[[str], None] = lambda event: None) -> None:
        """`tick` is called with "sent", "ended" or "refused" at each such event."""
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
        # Counters are measured from the first sample.  A server without metrics must not delay the run.
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
        """Return the run's samples and one more: metrics show the last requests a moment after they end."""
        await asyncio.sleep(2 * SAMPLE_S)
        return [replace(sample, at_s=sample.at_s - self._begin) for sample in self._samples]

    async def send(self, record: Record, data: bytes) -> None:
        """Send one request, retry its refusals, read its answer, and fill `record`.

        A server's errors go into the record and are not raised.  After a cancellation the record holds what was
        received until then."""
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
        profile = record.client
        deadline = math.inf if profile.timeout_s is None else record.due_s + profile.timeout_s
        while True:
            sent = self.now_s
            if deadline < math.inf:
                headers["X-Request-Timeout"] = f"{max(deadline - sent, 0.001):.3f}"  # seconds left
            try:
                async with self._session.post(
                    f"{self.options.url}/v1/completions", data=data, headers=headers
                ) as response:
                    announced = announced_pause(response.headers, time.time()) if response.status in REFUSED else None
                    record.attempts.append(Attempt(sent, response.status, announced))
                    if response.status == 200:
                        record.lane = response.headers.get("x-queue-lane", "")
                        await self._read(response, record)
                        return
                    text = reason(await response.read())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if not record.attempts or record.attempts[-1].sent_s != sent:
                    record.attempts.append(Attempt(sent, 0))
                record.outcome, record.error = "error", type(error).__name__
                return
            if record.attempts[-1].status not in REFUSED:
                _fail(record, f"{record.attempts[-1].status} {text}")
                return
            self._tick("refused")
            wait = pause(profile.retry, len(record.attempts) - 1, announced, self._rng)
            if wait is None or self.now_s + wait >= deadline:  # a retry after the deadline would be useless
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


def _fail(record: Record, error: str) -> None:
    """Set the outcome: expired if the request's own deadline ended it, else error."""
    expired = record.client.timeout_s is not None and DEADLINE_CODE in error
    record.outcome, record.error = "expired" if expired else "error", error


def record_of(arrival: Arrival) -> Record:
    """Return the record of a request that has not been sent."""
    job = arrival.job
    return Record(arrival.at_s, arrival.phase, job.prompt_len, job.output_len, client=arrival.client)


async def replay(
    arrivals: list[Arrival], options: Options, tick: Callable[[str], None] = lambda event: None
) -> tuple[list[Record], list[Sample]]:
    """Send every request when it is due; wait for all answers, at most `drain_s` after the last was due."""
    bodies = [body(arrival, options) for arrival in arrivals]
    records = [record_of(arrival) for arrival in arrivals]
    with _young_collections():
        return await _send_all(records, bodies, options, tick)


@contextlib.contextmanager
def _young_collections() -> Iterator[None]:
    """A context without full garbage collections, which would visit all records of the replay.

    3,000 requests have a million arrival times.  A collection takes 0.2 s, which would be measured as a gap."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _send_all(
    records: list[Record], bodies: list[bytes], options: Options, tick: Callable[[str], None]
) -> tuple[list[Record], list[Sample]]:
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
            if isinstance(result, Exception):  # a bug of this program: servers' errors are in the records
                raise result
        for record, task in zip(records, tasks, strict=True):
            if task in late:
                record.outcome, record.error = "error", f"unfinished {options.drain_s:g} s after the last was due"
        return records, await session.samples()


def reason(answer: bytes) -> str:
    """Return the code and message of an error in OpenAI's format, else the first 200 bytes of the answer."""
    try:
        error = json.loads(answer)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, LookupError, TypeError):
        return answer[:200].decode(errors="replace")


async def _watch(session: aiohttp.ClientSession, url: str, samples: list[Sample], started: asyncio.Event) -> None:
    """Read the metrics every SAMPLE_S until cancelled.  Failed reads are skipped: a server may have no metrics."""
    limit = aiohttp.ClientTimeout(total=5)
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with session.get(url, timeout=limit) as response:
                if response.status == 200:
                    samples.append(scrape.sample(await response.text(), time.monotonic()))
        started.set()
        await asyncio.sleep(SAMPLE_S)


async def first_model(url: str, api_key: str) -> str:
    """Return the first model in the server's list.  Raises SystemExit with one line if the request fails."""
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
    """Return the begin and end of each phase, in seconds of the run."""
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
    parser.add_argument("url", help="URL of the server, without /v1")
    parser.add_argument("--model", help="model to request; default: the first that the server lists")
    parser.add_argument("--metrics-url", help="page with the server's metrics; default: URL/metrics")
    _add_work_arguments(parser)
    _add_client_arguments(parser)
    parser.add_argument("--text", action="store_true", help="send prompts of words instead of token ids")
    parser.add_argument("--vocab-size", type=int, default=500, help="prompts use token ids below this; default 500")
    parser.add_argument("--respect-eos", action="store_true", help="let answers end early: send no ignore_eos")
    parser.add_argument("--api-key-env", help="environment variable with the server's API key")
    parser.add_argument("--timeout", type=_positive, default=600.0, help="maximum silence of a stream, s; default 600")
    parser.add_argument(
        "--drain", type=_positive, default=math.inf, help="seconds to wait for the last answers; default: for all"
    )
    parser.add_argument(
        "--slo-ttft", type=_positive, default=2.0, help="target for the time to first token, s; default 2"
    )
    parser.add_argument(
        "--slo-itl", type=_positive, default=0.2, help="target for the mean time per token, s; default 0.2"
    )
    parser.add_argument("--note", default="", help="text for the result, such as how the server was started")
    parser.add_argument("--out", type=Path, default=Path("replay.json"), help="file of the result; default replay.json")
    parser.add_argument("--raw", type=Path, help="file for every request with all its times, as JSON lines")


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Which requests arrive, and when."""
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default="sharegpt", help="lengths; default sharegpt")
    parser.add_argument("--trace", type=Path, help="file of JSON lines that replaces the workload")
    parser.add_argument("--scale", type=_positive, default=1.0, help="factor on the workload's lengths; default 1")
    parser.add_argument("--context", type=int, help="context of the model in tokens: longer requests are shortened")
    parser.add_argument("--rate", type=_positive, default=5.0, help="requests per second; default 5")
    parser.add_argument(
        "--seconds", type=_positive, default=60.0, help="length of the run, or of the phase before a burst; default 60"
    )
    parser.add_argument("--peak", type=_positive, help="requests per second of a burst between two phases at --rate")
    parser.add_argument("--peak-seconds", type=_positive, default=30.0, help="length of the burst; default 30")
    parser.add_argument("--after-seconds", type=_positive, help="length of the phase after it; default: --seconds")
    parser.add_argument("--burstiness", type=_positive, default=1.0, help="shape of gamma arrivals; default 1: Poisson")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals, lengths, prompts and clients; default 0")
    parser.add_argument(
        "--ask-tokens",
        type=int,
        default=0,
        help="max_tokens of every request, which hides output lengths from the server; default 0: the true length",
    )
    parser.add_argument("--eos-id", type=int, default=0, help="end-of-sequence id that then ends answers; default 0")
    parser.add_argument(
        "--countdown",
        type=Path,
        metavar="DIR",
        help="directory of the served model, if its prompts decide how long greedy answers are: "
        "--ask-tokens then needs no min_tokens and no logit_bias, which would reveal the length",
    )


def _add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clients send the requests.  Shares are weights, such as loud=10,quiet=1."""
    parser.add_argument(
        "--retry", default="obey", help="reaction to 429 and 503: obey, ignore, never, or shares of them; default obey"
    )
    parser.add_argument("--tenants", help="shares of tenants: loud=10,quiet=1; default: one tenant without a name")
    parser.add_argument("--only", default="", help="send one tenant's requests and leave out all others")
    parser.add_argument("--keys", type=Path, help='TOML file of the tenants\' API keys: quiet = "..."')
    parser.add_argument("--priorities", help="shares of priorities: high=1,normal=8,low=1, or whole numbers")
    parser.add_argument("--deadlines", help="shares of deadlines in seconds: 5=1,30=1,none=2")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a replay command, for commands that replay against servers of their own."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def run(words: Sequence[str], keys: dict[str, str], command: str) -> tuple[dict[str, Any], list[Record]]:
    """Replay as the command line `words` says.  Return the result and its requests."""
    args = parse(words)
    plan, arrivals = arrivals_of(args)
    return measure(args, plan, arrivals, options_of(args, args.url, args.model, keys), command)


def arrivals_of(args: argparse.Namespace) -> tuple[list[Phase], list[Arrival]]:
    """Return the phases and arrivals that the command line describes.  Raises SystemExit with one line."""
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
    except (OSError, TraceError) as error:
        raise SystemExit(str(error)) from None
    arrivals = workloads.assign_clients(arrivals, _mix(args), args.seed, args.only)
    if not arrivals:
        whose = f" for tenant {args.only}" if args.only else ""
        raise SystemExit(f"no request arrives{whose} in {sum(p.seconds for p in plan):g} s at {args.rate:g} per second")
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
    """Return the options of a run.  `model` None: the first of the server; raises SystemExit if that fails."""
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
        countdown=_countdown(args.countdown),
        api_key=api_key,
        keys=keys,
        timeout_s=args.timeout,
        drain_s=args.drain,
        seed=args.seed,
    )


def _countdown(directory: Path | None) -> tuple[int, ...]:
    """Return the countdown of the model in `directory`.  Raises SystemExit if it has none."""
    if directory is None:
        return ()
    if not (ids := read_countdown(directory)):
        raise SystemExit(f"--countdown: {directory} has no {COUNTDOWN}")
    return tuple(ids)


def measure(
    args: argparse.Namespace, plan: list[Phase], arrivals: list[Arrival], options: Options, command: str
) -> tuple[dict[str, Any], list[Record]]:
    """Replay with a progress bar.  Return the result that `report` reads, and the requests."""
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
        "figures": summarise(records, samples, slo, spans)
        | {"overload": overload.figures(records, samples, slo, spans)},
        "series": series(records, samples, slo),
    }
    return result, records


def work(args: argparse.Namespace, plan: list[Phase], arrivals: list[Arrival]) -> dict[str, Any]:
    """Return the description of the requests: `report` compares two results only if it is equal."""
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
        "ends": "countdown" if args.countdown else "logit_bias" if args.ask_tokens else "max_tokens",
        "clients": clients.count_profiles([arrival.client for arrival in arrivals]),
        "only": args.only,
        "seed": args.seed,
    }


def raw(record: Record) -> dict[str, Any]:
    """Return a line of --raw; times in seconds, rounded to a tenth of a millisecond."""
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
        "lane": record.lane,
        "tenant": record.client.tenant,
        "priority": record.client.priority,
        "timeout_s": record.client.timeout_s,
        "retry": record.client.retry,
        "outcome": record.outcome,
        "error": record.error,
    }


def show(figures: dict[str, Any]) -> None:
    """Print the most important figures."""
    for name in ("ttft_s", "itl_s", "e2e_s", "send_lag_s"):
        if spread := figures[name]:
            cells = "  ".join(f"{key} {spread[key] * 1000:,.1f}" for key in ("p50", "p90", "p99", "max"))
            print(f"{name.removesuffix('_s'):10} ms  {cells}")
    good, refusals, server = figures["goodput"], figures["refusals"], figures["server"]
    print(
        f"{figures['completed']} of {figures['requests']} completed, {figures['failed']} failed, "
        f"{good['fraction']:.1%} within {good['slo_ttft_s']:g} s and {good['slo_mean_itl_s']:g} s per token"
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
    retried = refusals["first_retry_success"]
    print(f"refusals {refusals['by_status']}, first retry admitted {retried}, server {server}")
    if (lag := figures["send_lag_s"]) and lag["p99"] > 0.02:
        print(f"this client sent late: p99 {lag['p99'] * 1000:.0f} ms, included in latencies", file=sys.stderr)
