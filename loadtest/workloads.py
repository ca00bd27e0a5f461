"""What is asked and when: lengths, arrivals, and traces that somebody wrote down.  Everything is seeded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from loadtest import trace
from loadtest.trace import Job

Shape = Literal["steady", "ramp", "burst", "soak"]


@dataclass(frozen=True)
class SharedJob(Job):
    """A job whose prompt starts with `prefix_len` tokens (of its `prompt_len`) that others start with, too."""

    prefix_len: int = 0
    prefix_seed: int = 0

    def prompt(self, vocab_size: int) -> list[int]:
        prefix = Job(self.prefix_len, 0, self.prefix_seed).prompt(vocab_size)
        return prefix + Job(self.prompt_len - self.prefix_len, 0, self.prompt_seed).prompt(vocab_size)


@dataclass(frozen=True)
class Arrival:
    at_s: float  # since the run began
    phase: str
    job: Job


@dataclass(frozen=True)
class Phase:
    """A stretch of time with one rate of arrivals."""

    name: str
    rate: float  # requests a second
    seconds: float


# ------------------------------------------------------------------------------------------------------------- lengths

# Mean tokens in and out.  ShareGPT's and Alpaca's are those of the PagedAttention paper (SOSP 2023, section 6.1).
MEANS = {"sharegpt": (161, 338), "alpaca": (19, 58)}
UNIFORM = 50
SHARED_PREFIX, SHARED_GROUPS = 512, 4
WORKLOADS = (*MEANS, "uniform-50", "shared-prefix")


def jobs(workload: str, count: int, seed: int, scale: float = 1.0) -> list[Job]:
    """`count` requests of one of WORKLOADS; `scale` multiplies the lengths, for servers that are small.

    sharegpt, alpaca: lognormal lengths around their means.  uniform-50: 50 tokens in, 50 out.  shared-prefix: one of
    four prefixes of 512 tokens, then ShareGPT-like questions and answers."""
    if workload in MEANS:
        prompt_mean, output_mean = MEANS[workload]
        return trace.lognormal(count, prompt_mean * scale, output_mean * scale, seed)
    if workload == "uniform-50":
        length = max(1, round(UNIFORM * scale))
        return [Job(length, length, seed + i) for i in range(count)]
    if workload == "shared-prefix":
        prefix = max(1, round(SHARED_PREFIX * scale))
        own = jobs("sharegpt", count, seed, scale)
        return [
            SharedJob(prefix + job.prompt_len, job.output_len, job.prompt_seed, prefix, seed - 1 - i % SHARED_GROUPS)
            for i, job in enumerate(own)
        ]
    raise ValueError(f"workload is {workload!r}; must be one of {', '.join(WORKLOADS)}")


# ------------------------------------------------------------------------------------------------------------ arrivals


def gaps(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Seconds between arrivals, for ever: gamma-distributed with mean 1 / rate and shape `burstiness`.  1 is a Poisson
    process, less comes in clumps, much more is a metronome; the squared coefficient of variation is 1 / burstiness."""
    while True:
        yield rng.gammavariate(burstiness, 1.0 / (rate * burstiness))


def phases(rate: float, seconds: float, peak: float | None, peak_seconds: float) -> list[Phase]:
    """One steady phase, or with a peak three: base, burst, after.  `seconds` is the length of all but the burst."""
    if peak is None:
        return [Phase("steady", rate, seconds)]
    return [Phase("base", rate, seconds), Phase("burst", peak, peak_seconds), Phase("after", rate, seconds)]


def arrival_times(plan: list[Phase], burstiness: float, seed: int) -> list[tuple[float, str]]:
    """When requests arrive, in seconds, and the phase they arrive in.  Each phase starts its own process: a Poisson
    process has no memory, and any other is cut where the rate changes."""
    rng = random.Random(seed)
    times, start = [], 0.0
    for phase in plan:
        now, end = start, start + phase.seconds
        for gap in gaps(phase.rate, burstiness, rng):
            now += gap
            if now >= end:
                break
            times.append((now, phase.name))
        start = end
    return times


def synthetic(workload: str, plan: list[Phase], burstiness: float, seed: int, scale: float = 1.0) -> list[Arrival]:
    """All of a run.  Lengths don't depend on arrivals: the n-th request is the same at every rate."""
    times = arrival_times(plan, burstiness, seed)
    work = jobs(workload, len(times), seed, scale)
    return [Arrival(at, phase, job) for (at, phase), job in zip(times, work, strict=True)]


def clip(arrivals: list[Arrival], context: int) -> list[Arrival]:
    """For a model of so many tokens: prompts get at most half of them, outputs what is left.  `context` >= 2."""
    clipped = []
    for arrival in arrivals:
        prompt = min(arrival.job.prompt_len, context // 2)
        changes = {"prompt_len": prompt, "output_len": min(arrival.job.output_len, context - prompt)}
        if isinstance(arrival.job, SharedJob):
            changes["prefix_len"] = min(arrival.job.prefix_len, prompt)
        clipped.append(replace(arrival, job=replace(arrival.job, **changes)))
    return clipped


def users_at(shape: Shape, now_s: float, users: int, base_s: float) -> int:
    """Users of a closed loop at a time.  steady and soak: `users`; a soak only lasts longer.  ramp: from 1 to `users`
    over `base_s`, then `users`.  burst: `users` for `base_s`, three times as many for 30 s, then `users` again."""
    if shape == "ramp" and now_s < base_s:
        return max(1, math.ceil(users * now_s / base_s))
    if shape == "burst" and base_s <= now_s < base_s + 30:
        return 3 * users
    return users


# --------------------------------------------------------------------------------------------------------------- files


class TraceError(ValueError):
    """Names the file, the line and the field."""


# field -> (smallest, whether a line must have it)
_FIELDS: dict[str, tuple[int, bool]] = {
    "prompt_len": (1, True),
    "output_len": (1, True),
    "prompt_seed": (0, False),
    "prefix_len": (0, False),
    "prefix_seed": (0, False),
}
_MOST = 10_000_000  # tokens; more is a slip of the pen


def read_trace(path: Path) -> list[tuple[float | None, Job]]:
    """JSON lines with `prompt_len` and `output_len` in tokens and, as they like, `prompt_seed` (else the number of the
    line), `prefix_len` and `prefix_seed` of a shared beginning, and `at_s`, the second of arrival: in every line or in
    none, and never before the line above.  Raises TraceError naming the line and the field, OSError."""
    work: list[tuple[float | None, Job]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                work.append(
                    _parse(line, f"{path.name}, line {number}", number, work[-1][0] if work else None, not work)
                )
    if not work:
        raise TraceError(f"{path.name}: no requests in it")
    return work


def _parse(line: str, where: str, number: int, before: float | None, first: bool) -> tuple[float | None, Job]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: must be an object with prompt_len and output_len")
    if strange := sorted(fields.keys() - _FIELDS.keys() - {"at_s", "id"}):
        raise TraceError(f"{where}: {strange[0]} is not a field; there are {', '.join(_FIELDS)}, at_s, id")
    values = {"prompt_seed": number}
    for name, (least, needed) in _FIELDS.items():
        if name not in fields:
            if needed:
                raise TraceError(f"{where}: {name} is missing")
            continue
        value = fields[name]
        most = _MOST if name.endswith("_len") else 2**63
        if type(value) is not int or not least <= value <= most:
            raise TraceError(f"{where}: {name} is {value!r}; must be a whole number, >= {least}, <= {most}")
        values[name] = value
    prefix = values.get("prefix_len", 0)
    if prefix > values["prompt_len"]:
        raise TraceError(f"{where}: prefix_len is {prefix}; must be <= prompt_len, {values['prompt_len']}")
    at = _time(fields, where, before, first)
    return at, SharedJob(**values) if prefix else Job(*(values[n] for n in ("prompt_len", "output_len", "prompt_seed")))


def _time(fields: dict[str, Any], where: str, before: float | None, first: bool) -> float | None:
    at = fields.get("at_s")
    if not first and (at is None) != (before is None):
        raise TraceError(f"{where}: at_s is {'missing' if at is None else 'there'}, but the lines above differ")
    if at is None:
        return None
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
        raise TraceError(f"{where}: at_s is {at!r}; must be a number of seconds, >= 0")
    if before is not None and at < before:
        raise TraceError(f"{where}: at_s is {at:g}; must not be before the line above, {before:g}")
    return float(at)


def from_trace(path: Path, plan: list[Phase], burstiness: float, seed: int) -> list[Arrival]:
    """A trace as it was written down; one without times arrives as `plan` says, for as long as either lasts.
    Raises TraceError, OSError."""
    work = read_trace(path)
    if work[0][0] is not None:
        return [Arrival(at or 0.0, "trace", job) for at, job in work]
    times = islice(arrival_times(plan, burstiness, seed), len(work))
    return [Arrival(at, phase, job) for (at, phase), (_, job) in zip(times, work, strict=False)]
