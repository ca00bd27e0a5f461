"""Statistics of a run: percentiles, goodput, the accuracy of Retry-After.  Pure.

All times are seconds since the run began.  Latencies count from when a request was due, not from when it was sent or
admitted.  So neither a late client nor a refusal makes a server look better (the coordinated omission of closed loops;
Tene, "How NOT to Measure Latency").

The module is not called `statistics`: Locust puts this directory on the import path, where that name is the standard
library's.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.loadtest.clients import ANONYMOUS, FIELDS, ClientProfile

MIN_PAUSE_S = 1.0  # the smallest value of Retry-After
REFUSED = (429, 503)


def gaps(times: Sequence[float]) -> list[float]:
    """Return the seconds between successive events."""
    return [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True)
class Attempt:
    """One attempt to send a request."""

    sent_s: float
    status: int  # HTTP; 0 without an answer
    announced_s: float | None = None  # seconds to wait that the refusal announces


@dataclass
class Record:
    """One request and its outcome."""

    due_s: float
    phase: str
    prompt_len: int  # tokens
    output_len: int  # tokens requested
    lag_s: float = 0.0  # seconds by which this client sent the request too late
    attempts: list[Attempt] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # arrival times of the events with text
    end_s: float = 0.0
    tokens: int = 0  # output tokens received
    outcome: str = "lost"  # ok, refused (every attempt got 429 or 503), expired (its own deadline passed), error
    error: str = ""
    cached: int | None = None  # prompt tokens from the server's prefix cache; None if the server does not report them
    client: ClientProfile = ANONYMOUS
    lane: str = ""  # on_time or late, from the server's header x-queue-lane; "" without the header

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] - self.due_s if self.times else None

    @property
    def gaps_s(self) -> list[float]:
        return gaps(self.times)

    @property
    def mean_itl_s(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.times and self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Sample:
    """The server's own metrics at one moment; None where the server has no such metric."""

    at_s: float
    kv: float | None = None  # KV-cache utilisation, 0 to 1
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None  # preemptions since the server started
    recomputed: float | None = None  # tokens, since the server started
    filled: float | None = None  # token slots with a token, of those in held blocks, 0 to 1; None if none is held
    eta: float | None = None  # held blocks over those of static allocation; None where no sequence runs


@dataclass(frozen=True)
class Slo:
    """The latency targets of goodput."""

    ttft_s: float = 2.0
    itl_s: float = 0.2  # target for a request's mean ITL

    def met(self, record: Record) -> bool:
        ttft = record.ttft_s
        return record.outcome == "ok" and ttft is not None and ttft <= self.ttft_s and record.mean_itl_s <= self.itl_s


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values (one at least), interpolated linearly between neighbours as numpy does."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Return p50, p90, p99, mean and max; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    figures = {f"p{p}": percentile(ordered, p) for p in (50, 90, 99)}
    figures |= {"mean": statistics.fmean(ordered), "max": ordered[-1]}
    return {name: round(value, 6) for name, value in figures.items()}


def summarise(records: list[Record], samples: list[Sample], slo: Slo, windows: dict[str, tuple[float, float]]) -> Any:
    """Return all results of a run and of each phase.  `windows`: phase -> (begin, end)."""
    end = max((record.end_s for record in records), default=0.0)
    ok = [record for record in records if record.outcome == "ok"]
    good = [record for record in records if slo.met(record)]
    span = max(end, 1e-9)
    outcomes = Counter(_outcome(record) for record in records)
    figures: dict[str, Any] = {
        "requests": len(records),
        "completed": outcomes["ok"],
        "refused_for_good": outcomes["refused"],
        "expired": outcomes["expired"],
        "failed": outcomes["failed"],
        "errors": dict(Counter(r.error.partition(":")[0] for r in records if _outcome(r) == "failed").most_common(5)),
        "seconds": round(end, 3),
        "output_tokens": sum(record.tokens for record in records),
        "output_tokens_per_s": round(sum(record.tokens for record in records) / span, 2),
        "ttft_s": spread(t for record in records if (t := record.ttft_s) is not None),
        "itl_s": spread(gap for record in records for gap in record.gaps_s),
        "e2e_s": spread(record.end_s - record.due_s for record in ok),
        "send_lag_s": spread(record.lag_s for record in records),
        "goodput": {
            "slo_ttft_s": slo.ttft_s,
            "slo_mean_itl_s": slo.itl_s,
            "good": len(good),
            "fraction": round(len(good) / len(records), 4) if records else 0.0,
            "requests_per_s": round(len(good) / span, 3),
        },
        "refusals": refusals(records, samples),
        "prefix_hits": prefix_hits(records),
        "server": server(samples),
        "groups": groups(records, slo),
        "phases": {name: _phase(records, samples, slo, window) for name, window in windows.items()},
    }
    if {"base", "burst", "after"} <= windows.keys():
        figures["recovery_s"] = recovery(records, windows["base"], windows["after"])
    return figures


def _phase(records: list[Record], samples: list[Sample], slo: Slo, window: tuple[float, float]) -> dict[str, Any]:
    """Assign requests to the phase by their due time, token gaps by their end, samples by when they were read."""
    begin, end = window
    due = [record for record in records if begin <= record.due_s < end]
    between = [
        later - earlier
        for record in records
        for earlier, later in itertools.pairwise(record.times)
        if begin <= later < end
    ]
    return {
        "requests": len(due),
        "ttft_s": spread(t for record in due if (t := record.ttft_s) is not None),
        "itl_s": spread(between),
        "e2e_s": spread(record.end_s - record.due_s for record in due if record.outcome == "ok"),
        "goodput_fraction": round(sum(map(slo.met, due)) / len(due), 4) if due else None,
        "server": server(
            [sample for sample in samples if begin <= sample.at_s < end],
            [sample for sample in samples if sample.at_s < begin],
        ),
    }


def recovery(records: list[Record], base: tuple[float, float], after: tuple[float, float]) -> float | None:
    """Return the seconds from the burst's end until TTFT is back at the base's level; None if it never is.

    TTFT is back at the first five successive requests, due after the burst, whose median TTFT is at most the 90th
    percentile of the base phase plus 1 ms."""
    before = spread(t for r in records if base[0] <= r.due_s < base[1] and (t := r.ttft_s) is not None)
    later = sorted((r for r in records if after[0] <= r.due_s < after[1]), key=lambda record: record.due_s)
    if before is None:
        return None
    for i in range(len(later) - 4):
        five = [math.inf if r.ttft_s is None else r.ttft_s for r in later[i : i + 5]]
        if statistics.median(five) <= before["p90"] + 0.001:
            return round(later[i].due_s - after[0], 3)
    return None


def _outcome(record: Record) -> str:
    return record.outcome if record.outcome in ("ok", "refused", "expired") else "failed"


def prefix_hits(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the share of prompt tokens from the prefix cache, over requests that report it; None if none does."""
    reported = [record for record in records if record.cached is not None]
    if not reported:
        return None
    prompts, cached = sum(record.prompt_len for record in reported), sum(record.cached or 0 for record in reported)
    return {"prompt_tokens": prompts, "cached_tokens": cached, "rate": round(cached / max(prompts, 1), 4)}


def groups(records: list[Record], slo: Slo) -> dict[str, dict[str, Any]]:
    """Return results for each value of each client field in which requests differ."""
    found: dict[str, dict[str, Any]] = {}
    for name in FIELDS:
        members: dict[str, list[Record]] = {}
        for record in records:
            value = getattr(record.client, name)
            members.setdefault("none" if value in ("", None) else str(value), []).append(record)
        if len(members) > 1:
            found[name] = {value: _group(members[value], slo) for value in sorted(members)}
    return found


def _group(records: list[Record], slo: Slo) -> dict[str, Any]:
    outcomes = Counter(_outcome(record) for record in records)
    refused = refusals(records, ())
    return {
        "requests": len(records),
        "completed": outcomes["ok"],
        "refused_for_good": outcomes["refused"],
        "expired": outcomes["expired"],
        "failed": outcomes["failed"],
        "output_tokens": sum(record.tokens for record in records),
        "ttft_s": spread(t for record in records if (t := record.ttft_s) is not None),
        "itl_s": spread(gap for record in records for gap in record.gaps_s),
        "e2e_s": spread(record.end_s - record.due_s for record in records if record.outcome == "ok"),
        "goodput_fraction": round(sum(map(slo.met, records)) / len(records), 4),
        "prefix_hits": prefix_hits(records),
        **{key: refused[key] for key in ("attempts_per_success", "requests_refused", "first_retry_success")},
    }


def needed_pauses(records: Sequence[Record], samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    """Return (index of the record, index of its refused attempt) -> seconds after which it would have been admitted.

    This time cannot be observed: an earlier retry might have been admitted, but only in place of another request.
    The rate at which the server admitted *any* request can be observed.  So the refused requests are treated as a queue
    in the order of their first attempts, and the needed pause ends

    * when the server has admitted, since the refusal, one request more than were ahead in that queue.  With these
      pauses all refused requests would have been admitted one after the other, as capacity became free.  A request that
      starts in time at once does not count: a server with two lanes serves it before waiting requests; or, if earlier,
    * when two successive samples of the server first show no waiting request.  No refusal was needed then, and a longer
      pause was idle.  (Without this rule a server that asks everyone to wait a minute would be right, because it admits
      no request before that.)

    A request that is never admitted has no place in the queue.  A refusal that neither event follows is omitted."""
    admitted = sorted(
        r.attempts[-1].sent_s
        for r in records
        if r.attempts and r.attempts[-1].status == 200 and (len(r.attempts) > 1 or r.lane != "on_time")
    )
    idle = [b.at_s for a, b in itertools.pairwise(samples) if a.waiting == b.waiting == 0]
    queue = sorted(  # (first refusal, admission) of requests that were refused first and admitted later
        (r.attempts[0].sent_s, r.attempts[-1].sent_s)
        for r in records
        if len(r.attempts) > 1 and r.attempts[0].status in REFUSED and r.attempts[-1].status == 200
    )
    pauses = {}
    for i, record in enumerate(records):
        for j, attempt in enumerate(record.attempts):
            if attempt.status not in REFUSED:
                continue
            at, first = attempt.sent_s, record.attempts[0].sent_s
            ahead = sum(refused < first and admission > at for refused, admission in queue)
            own = bisect.bisect_right(admitted, at) + ahead
            room = bisect.bisect_right(idle, at)
            ends = [*admitted[own : own + 1], *idle[room : room + 1]]
            if ends:
                pauses[i, j] = min(ends) - at
    return pauses


def refusals(records: Sequence[Record], samples: Sequence[Sample]) -> dict[str, Any]:
    """Count refused attempts, and compare announced pauses with those that were needed.

    first_retry_success: the share of second attempts that were admitted, over requests that were refused with a pause
    and whose client waited for it.  Clients that ignore the pause show nothing about its accuracy.
    retry_after_error: |announced - needed| / needed, over refusals of clients that obey.  `needed` is the result of
    needed_pauses(), but at least 1 s, the smallest value of Retry-After."""
    statuses = Counter(attempt.status for record in records for attempt in record.attempts)
    by_status = {str(status): count for status, count in sorted(statuses.items()) if status in REFUSED}
    needed = needed_pauses(records, samples)
    retried = admitted = 0
    errors, announced = [], []
    for i, record in enumerate(records):
        for j, attempt in enumerate(record.attempts):
            if attempt.announced_s is None or attempt.status not in REFUSED:
                continue
            announced.append(attempt.announced_s)
            if record.client.retry == "obey" and (i, j) in needed:
                truth = max(MIN_PAUSE_S, needed[i, j])
                errors.append(abs(attempt.announced_s - truth) / truth)
        if len(record.attempts) > 1 and record.attempts[0].announced_s is not None and record.client.retry == "obey":
            retried += 1
            admitted += record.attempts[1].status == 200
    attempts = sum(map(len, (record.attempts for record in records)))
    completed = sum(record.outcome == "ok" for record in records)
    return {
        "attempts": attempts,
        "attempts_per_success": round(attempts / completed, 3) if completed else None,
        "by_status": by_status,
        "requests_refused": sum(any(a.status in REFUSED for a in r.attempts) for r in records),
        "retried": retried,
        "first_retry_success": round(admitted / retried, 4) if retried else None,
        "retry_after_s": spread(announced),
        "retry_after_error": spread(errors),
    }


def server(samples: list[Sample], earlier: Sequence[Sample] = ()) -> dict[str, Any]:
    """Summarise the server's metrics.  Counters give their growth since the last of `earlier`, else `samples[0]`."""

    def seen(get: Callable[[Sample], float | None], among: Iterable[Sample] = samples) -> list[float]:
        return [value for sample in among if (value := get(sample)) is not None]

    def grown(get: Callable[[Sample], float | None]) -> float | None:
        values = seen(get, [*earlier[-1:], *samples])
        # A counter that fell belongs to a server that restarted.
        return sum(max(0.0, b - a) for a, b in itertools.pairwise(values)) if values else None

    kv, queueing = seen(lambda s: s.kv), seen(lambda s: s.kv, (s for s in samples if s.waiting))
    running, waiting = seen(lambda s: s.running), seen(lambda s: s.waiting)
    filled, eta = seen(lambda s: s.filled), seen(lambda s: s.eta)
    return {
        "kv_mean": round(statistics.fmean(kv), 4) if kv else None,
        "kv_max": round(max(kv), 4) if kv else None,
        "kv_mean_while_queueing": round(statistics.fmean(queueing), 4) if queueing else None,
        "slots_filled_mean": round(statistics.fmean(filled), 4) if filled else None,
        "eta_mean": round(statistics.fmean(eta), 4) if eta else None,
        "running_max": max(running, default=None),
        "waiting_max": max(waiting, default=None),
        "preemptions": grown(lambda s: s.preemptions),
        "recomputed_tokens": grown(lambda s: s.recomputed),
    }


def series(records: list[Record], samples: list[Sample], slo: Slo) -> dict[str, Any]:
    """Return series over time for plots: at most 240 buckets of half a second or of whole seconds.

    TTFT and outcomes belong to the bucket in which a request was due, gaps to the bucket in which they ended."""
    end = max([record.end_s for record in records] + [sample.at_s for sample in samples], default=0.0)
    width = max(0.5, math.ceil(end / 240))
    count = int(end / width) + 1
    ttft: list[list[float]] = [[] for _ in range(count)]
    itl: list[list[float]] = [[] for _ in range(count)]
    outcomes = {name: [0] * count for name in ("good", "late", "refused", "failed")}
    for record in records:
        at = int(record.due_s / width)
        if record.ttft_s is not None:
            ttft[at].append(record.ttft_s)
        if record.outcome in ("ok", "expired"):
            outcomes["good" if slo.met(record) else "late"][at] += 1
        else:
            outcomes["refused" if record.outcome == "refused" else "failed"][at] += 1
        for before, after in itertools.pairwise(record.times):
            itl[int(after / width)].append(after - before)

    def cut(buckets: list[list[float]], percent: float) -> list[float | None]:
        return [round(percentile(sorted(bucket), percent), 5) if bucket else None for bucket in buckets]

    return {
        "bucket_s": width,
        "t": [round(i * width, 3) for i in range(count)],
        **{f"ttft_p{p}": cut(ttft, p) for p in (50, 99)},
        **{f"itl_p{p}": cut(itl, p) for p in (50, 99)},
        **outcomes,
        "samples": {
            "t": [round(sample.at_s, 2) for sample in samples],
            "kv": [None if sample.kv is None else round(sample.kv, 4) for sample in samples],
            "filled": [None if sample.filled is None else round(sample.filled, 4) for sample in samples],
            "eta": [None if sample.eta is None else round(sample.eta, 4) for sample in samples],
            "running": [sample.running for sample in samples],
            "waiting": [sample.waiting for sample in samples],
            "preemptions": [sample.preemptions for sample in samples],
        },
    }
