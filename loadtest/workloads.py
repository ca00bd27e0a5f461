"""Workloads: lengths, arrival times and clients of requests.  All random draws are seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from quire.loadtest import clients
from quire.loadtest.clients import ANONYMOUS, ClientProfile
from quire.loadtest.trace import Job, lognormal, read_trace

Shape = Literal["steady", "ramp", "burst", "soak"]


@dataclass(frozen=True)
class Arrival:
    """One request of a run."""

    at_s: float  # arrival time in seconds since the run began
    phase: str
    job: Job
    client: ClientProfile = ANONYMOUS


@dataclass(frozen=True)
class Phase:
    """A period with a constant request rate."""

    name: str
    rate: float  # requests per second
    seconds: float


# ------------------------------------------------------------------------------------------------------------- lengths

# Mean tokens in and out.  ShareGPT's and Alpaca's are those of the PagedAttention paper (SOSP 2023, section 6.1).
MEANS = {"sharegpt": (161, 338), "alpaca": (19, 58)}
UNIFORM = 50


@dataclass(frozen=True)
class Shared:
    """Prompts with shared prefixes: one of `groups` prefixes of `prefix` tokens, then tokens of the request's own.

    `prompt` and `output` are the mean lengths of the request's own prompt and of its output, in tokens."""

    prefix: int
    groups: int
    prompt: int
    output: int


# chat: one system prompt. rag: a few long documents, short questions and answers. translation: five examples, then a
# sentence and its translation, as in section 6.4 of the PagedAttention paper.
SHARED = {
    "shared-prefix": Shared(512, 4, *MEANS["sharegpt"]),
    "chat": Shared(300, 1, *MEANS["sharegpt"]),
    "rag": Shared(2000, 8, 20, 80),
    "translation": Shared(341, 1, 30, 30),
}
# agents: TALKS concurrent conversations with one system prompt.  A turn's prompt repeats the previous turn, so it grows
# by TURN tokens per turn, of which ANSWER are the answer.
SYSTEM, TALKS, TURNS, TURN, ANSWER = 300, 8, 6, 140, 80
WORKLOADS = (*MEANS, "uniform-50", *SHARED, "agents")


def jobs(workload: str, count: int, seed: int, scale: float = 1.0) -> list[Job]:
    """Return `count` jobs of one of WORKLOADS; `scale` multiplies all lengths, for small servers.

    sharegpt, alpaca: lognormal lengths around their means.  uniform-50: 50 tokens in, 50 out.
    Workloads of SHARED: successive requests use the workload's shared prefixes round-robin.
    agents: growing conversations.  The replay is open-loop, so a turn does not wait for the previous turn, and earlier
    answers are random tokens.  A prefix cache therefore finds the previous turn's prompt, but not its answer."""

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * scale))

    if workload in MEANS:
        prompt_mean, output_mean = MEANS[workload]
        return lognormal(count, prompt_mean * scale, output_mean * scale, seed)
    if workload == "uniform-50":
        return [Job(scaled(UNIFORM), scaled(UNIFORM), seed + i) for i in range(count)]
    if shared := SHARED.get(workload):
        prefix = scaled(shared.prefix)
        own = lognormal(count, shared.prompt * scale, shared.output * scale, seed)
        return [
            Job(prefix + job.prompt_len, job.output_len, job.prompt_seed, prefix, seed - 1 - i % shared.groups)
            for i, job in enumerate(own)
        ]
    if workload == "agents":
        system, turn, answer = scaled(SYSTEM), scaled(TURN), scaled(ANSWER)
        made = []
        for i in range(count):
            generation, place = divmod(i, TALKS * TURNS)
            talk = seed + generation * TALKS + place % TALKS
            # Ids are drawn one by one, so a longer prompt of the same seed begins with the shorter one.
            own_tokens = turn * (place // TALKS + 1) - answer
            made.append(Job(system + max(1, own_tokens), answer, talk, system, seed - 1))
        return made
    raise ValueError(f"workload is {workload!r}; must be one of {', '.join(WORKLOADS)}")


# ------------------------------------------------------------------------------------------------------------ arrivals


def gaps(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Generate seconds between arrivals, endlessly: gamma-distributed with mean 1 / rate and shape `burstiness`.

    1 gives a Poisson process; with smaller values arrivals come in clumps, with larger values evenly.  The
    squared coefficient of variation is 1 / burstiness."""
    while True:
        yield rng.gammavariate(burstiness, 1.0 / (rate * burstiness))


def phases(
    rate: float, seconds: float, peak: float | None, peak_seconds: float, after_seconds: float | None = None
) -> list[Phase]:
    """Return one steady phase, or base, burst and after where `peak` is given.

    `after_seconds` defaults to `seconds`, the length of the base."""
    if peak is None:
        return [Phase("steady", rate, seconds)]
    after = Phase("after", rate, seconds if after_seconds is None else after_seconds)
    return [Phase("base", rate, seconds), Phase("burst", peak, peak_seconds), after]


def arrival_times(plan: list[Phase], burstiness: float, seed: int) -> list[tuple[float, str]]:
    """Return (second of arrival, name of its phase) of every request of a run.

    Each phase starts a new arrival process.  A Poisson process has no memory, so this has no effect; any other process
    is cut where the rate changes."""
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
    """Return all arrivals of a run.  Lengths do not depend on times: the n-th request is the same at every rate."""
    times = arrival_times(plan, burstiness, seed)
    work = jobs(workload, len(times), seed, scale)
    return [Arrival(at, phase, job) for (at, phase), job in zip(times, work, strict=True)]


def clip(arrivals: list[Arrival], context: int) -> list[Arrival]:
    """Shorten requests for a model with `context` >= 2 tokens: prompts to at most half of it, outputs to the rest."""
    clipped = []
    for arrival in arrivals:
        prompt = min(arrival.job.prompt_len, context // 2)
        output, prefix = min(arrival.job.output_len, context - prompt), min(arrival.job.prefix_len, prompt)
        job = replace(arrival.job, prompt_len=prompt, output_len=output, prefix_len=prefix)
        clipped.append(replace(arrival, job=job))
    return clipped


def users_at(shape: Shape, now_s: float, users: int, base_s: float) -> int:
    """Return the number of users of a closed loop at second `now_s`.

    steady, soak: `users` (a soak only lasts longer).  ramp: from 1 to `users` over `base_s`, then `users`.
    burst: `users` for `base_s`, three times as many for 30 s, then `users` again."""
    if shape == "ramp" and now_s < base_s:
        return max(1, math.ceil(users * now_s / base_s))
    if shape == "burst" and base_s <= now_s < base_s + 30:
        return 3 * users
    return users


# ------------------------------------------------------------------------------------------- traces and clients


def from_trace(path: Path, plan: list[Phase], burstiness: float, seed: int) -> list[Arrival]:
    """Return a trace's arrivals: at its own times, or at those of `plan` where the file has none.

    Without times the run ends with the shorter of trace and plan.  Raises TraceError, OSError."""
    lines = read_trace(path)
    if lines[0].at_s is not None:
        return [Arrival(line.at_s or 0.0, "trace", line.job, line.client) for line in lines]
    times = islice(arrival_times(plan, burstiness, seed), len(lines))
    return [Arrival(at, phase, line.job, line.client) for (at, phase), line in zip(times, lines, strict=False)]


def assign_clients(arrivals: list[Arrival], mix: clients.Mix, seed: int, only: str = "") -> list[Arrival]:
    """Return the same arrivals with clients drawn from `mix`.

    `only` keeps one tenant's requests, with the times and lengths they have among all others.  Replays with and
    without `only` therefore compare a tenant alone with the same tenant under load."""
    drawn = mix.draw([arrival.client for arrival in arrivals], seed)
    asked = [replace(arrival, client=client) for arrival, client in zip(arrivals, drawn, strict=True)]
    return [arrival for arrival in asked if not only or arrival.client.tenant == only]
