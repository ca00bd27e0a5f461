"""From what was seen to what is said about it: percentiles, goodput, how true Retry-After was.  Pure.

All times are seconds since the run began.  Latencies count from the moment a request was due, not from when it was
sent or let in: neither a client that lags nor one that was told to wait makes a server look better (the coordinated
omission that closed loops suffer from; Tene, "How NOT to Measure Latency").
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

from loadtest.clients import ANONYMOUS, ClientProfile

MIN_PAUSE_S = 1.0  # the smallest Retry-After there is
REFUSED = (429, 503)


def gaps(times: Sequence[float]) -> list[float]:
    """Seconds between events, one fewer than there are."""
    return [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True)
class Attempt:
    sent_s: float
    status: int  # HTTP; 0 when there was no answer
    announced_s: float | None = None  # what the refusal asked to wait


@dataclass
class Record:
    """What became of one request."""

    due_s: float
    phase: str
    prompt_len: int  # tokens
    output_len: int  # tokens asked for
    lag_s: float = 0.0  # from due to sent: the client's own fault
    attempts: list[Attempt] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of the events with text
    end_s: float = 0.0
    tokens: int = 0  # out
    outcome: str = "lost"  # ok, refused (429 or 503 to the end), expired (its own deadline passed), error
    error: str = ""
    cached: int | None = None  # prompt tokens that the server had in its prefix cache; None where it does not say
    client: ClientProfile = ANONYMOUS

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] - self.due_s if self.times else None

    @property
    def gaps_s(self) -> list[float]:
        return gaps(self.times)

    @property
    def mean_itl_s(self) -> float:
        """Per token, over all but the first; 0 for a single one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.times and self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Sample:
    """The server's own gauges at one moment; None where it has no such metric."""

    at_s: float
    kv: float | None = None  # fraction of the KV pool in use
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None  # since the server started
    recomputed: float | None = None  # tokens, since the server started


@dataclass(frozen=True)
class Slo:
    ttft_s: float = 2.0
    itl_s: float = 0.2  # mean of a request

    def met(self, record: Record) -> bool:
        ttft = record.ttft_s
        return record.outcome == "ok" and ttft is not None and ttft <= self.ttft_s and record.mean_itl_s <= self.itl_s


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, at least one, interpolated linearly between neighbours (numpy's default)."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p90, p99, mean, max; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    figures = {f"p{p}": percentile(ordered, p) for p in (50, 90, 99)}
    figures |= {"mean": statistics.fmean(ordered), "max": ordered[-1]}
    return {name: round(value, 6) for name, value in figures.items()}


def summarise(records: list[Record], samples: list[Sample], slo: Slo, windows: dict[str, tuple[float, float]]) -> Any:
    """Every figure of a run, and of each phase; `windows` are the phases' beginnings and ends."""
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
    """Requests by when they were due, gaps between tokens by when the later one came, gauges by when they were read."""
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
    """Seconds from the burst's end until requests are served as before it: until the first five in a row that were due
    afterwards and whose median TTFT is at most the base's 90th percentile, give or take a ms.
    None when that does not happen."""
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
    """Prompt tokens that needed no computing, of all prompts for which the server says so; None where it never does."""
    told = [record for record in records if record.cached is not None]
    if not told:
        return None
    prompts, cached = sum(record.prompt_len for record in told), sum(record.cached or 0 for record in told)
    return {"prompt_tokens": prompts, "cached_tokens": cached, "rate": round(cached / max(prompts, 1), 4)}


def groups(records: list[Record], slo: Slo) -> dict[str, dict[str, Any]]:
    """Figures of each tenant, priority, deadline and kind of client, for the fields in which requests differ."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("tenant", "priority", "timeout_s", "retry"):
        members: dict[str, list[Record]] = {}
        for record in records:
            value = getattr(record.client, name)
            members.setdefault("none" if value in ("", None) else str(value), []).append(record)
        if len(members) > 1:
            found[name] = {value: _group(members[value], slo) for value in sorted(members)}
    return found


def _group(records: list[Record], slo: Slo) -> dict[str, Any]:
    outcomes = Counter(_outcome(record) for record in records)
    turned = refusals(records, ())
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
        **{key: turned[key] for key in ("attempts_per_success", "requests_refused", "first_retry_success")},
    }


def needed_pauses(records: Sequence[Record], samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    """(index of the record, of the attempt that was refused) -> seconds after which it would have been let in.

    Nobody can observe this: had the client come back earlier, it might have met room, but room that somebody else then
    took instead.  What can be observed is how fast the server let in *anyone*.  So clients turned away are taken to
    stand in a line in the order in which they first asked, and the needed pause ends

    * when, since the refusal, as many attempts had been let in as stood in line before it, and one more.  This is the
      pause by which all of them together would have got in, one after the other, no sooner than room came up; or
    * when the server was next seen, twice running, without anybody waiting, if that was earlier: then nobody had to
      be kept away, and a pause beyond it was idle, however few came.  (Without this a server that tells everyone to
      come in a minute would be right: nobody is let in until then.)

    Who is never let in holds no place.  A refusal after which neither happens is left out."""
    entered = sorted(r.attempts[-1].sent_s for r in records if r.attempts and r.attempts[-1].status == 200)
    idle = [b.at_s for a, b in itertools.pairwise(samples) if a.waiting == b.waiting == 0]
    line = sorted(  # (first refusal, let in) of those that were turned away at first and got in later
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
            before = sum(asked < first and let_in > at for asked, let_in in line)
            turn = bisect.bisect_right(entered, at) + before
            room = bisect.bisect_right(idle, at)
            ends = [*entered[turn : turn + 1], *idle[room : room + 1]]
            if ends:
                pauses[i, j] = min(ends) - at
    return pauses


def refusals(records: Sequence[Record], samples: Sequence[Sample]) -> dict[str, Any]:
    """How many attempts were turned away, and what it cost to heed the answer.

    first_retry_success: of the requests whose first attempt was refused with a pause and whose client then waited that
    long, how many got in at the second attempt.  Clients that don't listen say nothing about what the pause was worth.
    retry_after_error: |announced - needed| / needed, over refusals of such clients; `needed` as needed_pauses() has it,
    and at least 1 s, the smallest pause that Retry-After can say."""
    statuses = Counter(attempt.status for record in records for attempt in record.attempts)
    turned_away = {status: count for status, count in sorted(statuses.items()) if status in REFUSED}
    needed = needed_pauses(records, samples)
    retried = got_in = 0
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
            got_in += record.attempts[1].status == 200
    attempts = sum(map(len, (record.attempts for record in records)))
    completed = sum(record.outcome == "ok" for record in records)
    return {
        "attempts": attempts,
        "attempts_per_success": round(attempts / completed, 3) if completed else None,
        "by_status": {str(status): count for status, count in turned_away.items()},
        "requests_refused": sum(any(a.status in REFUSED for a in r.attempts) for r in records),
        "retried": retried,
        "first_retry_success": round(got_in / retried, 4) if retried else None,
        "retry_after_s": spread(announced),
        "retry_after_error": spread(errors),
    }


def server(samples: list[Sample], earlier: Sequence[Sample] = ()) -> dict[str, Any]:
    """What its own metrics said.  Counters are what they grew by since the last of `earlier`, else the first sample."""

    def seen(get: Callable[[Sample], float | None], among: Iterable[Sample] = samples) -> list[float]:
        return [value for sample in among if (value := get(sample)) is not None]

    def grown(get: Callable[[Sample], float | None]) -> float | None:
        values = seen(get, [*earlier[-1:], *samples])
        # A counter that fell belongs to a server that started anew.
        return sum(max(0.0, b - a) for a, b in itertools.pairwise(values)) if values else None

    kv, queueing = seen(lambda s: s.kv), seen(lambda s: s.kv, (s for s in samples if s.waiting))
    running, waiting = seen(lambda s: s.running), seen(lambda s: s.waiting)
    return {
        "kv_mean": round(statistics.fmean(kv), 4) if kv else None,
        "kv_max": round(max(kv), 4) if kv else None,
        "kv_mean_while_queueing": round(statistics.fmean(queueing), 4) if queueing else None,
        "running_max": max(running, default=None),
        "waiting_max": max(waiting, default=None),
        "preemptions": grown(lambda s: s.preemptions),
        "recomputed_tokens": grown(lambda s: s.recomputed),
    }


def series(records: list[Record], samples: list[Sample], slo: Slo) -> dict[str, Any]:
    """The same over time, for plots: at most 240 buckets, each a whole number of seconds or half of one.  TTFT and
    outcomes go by when a request was due, gaps by when the later token came."""
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
            "running": [sample.running for sample in samples],
            "waiting": [sample.waiting for sample in samples],
            "preemptions": [sample.preemptions for sample in samples],
        },
    }
