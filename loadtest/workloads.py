"""What is asked and when: lengths, arrivals, and traces that somebody wrote down.  Everything is seeded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from loadtest import clients, trace
from loadtest.clients import ANONYMOUS, ClientProfile, ProfileError
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
    client: ClientProfile = ANONYMOUS


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


@dataclass(frozen=True)
class Shared:
    """Prompts that begin alike: one of `groups` beginnings of `prefix` tokens, then a prompt and an answer of its own
    with these mean lengths."""

    prefix: int
    groups: int
    prompt: int
    output: int


# chat: one system prompt.  rag: a few long documents, short questions and answers.  translation: five examples, as in
# the PagedAttention paper (section 6.4), then a sentence and its translation.
SHARED = {
    "shared-prefix": Shared(512, 4, *MEANS["sharegpt"]),
    "chat": Shared(300, 1, *MEANS["sharegpt"]),
    "rag": Shared(2000, 8, 20, 80),
    "translation": Shared(341, 1, 30, 30),
}
# agents: TALKS conversations at a time under one system prompt; a turn's prompt is the turn before and what was said
# since, so it grows by TURN tokens, of which the answer is ANSWER.
SYSTEM, TALKS, TURNS, TURN, ANSWER = 300, 8, 6, 140, 80
WORKLOADS = (*MEANS, "uniform-50", *SHARED, "agents")


def jobs(workload: str, count: int, seed: int, scale: float = 1.0) -> list[Job]:
    """`count` requests of one of WORKLOADS; `scale` multiplies the lengths, for servers that are small.

    sharegpt, alpaca: lognormal lengths around their means.  uniform-50: 50 tokens in, 50 out.  Those of SHARED: as said
    there, the groups in turn.  agents: conversations that grow; what an answer said is made up (the replay is open, a
    turn does not wait for the one before), so a prefix cache finds the prompt of the turn before, not its answer."""

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * scale))

    if workload in MEANS:
        prompt_mean, output_mean = MEANS[workload]
        return trace.lognormal(count, prompt_mean * scale, output_mean * scale, seed)
    if workload == "uniform-50":
        return [Job(scaled(UNIFORM), scaled(UNIFORM), seed + i) for i in range(count)]
    if shared := SHARED.get(workload):
        prefix = scaled(shared.prefix)
        own = trace.lognormal(count, shared.prompt * scale, shared.output * scale, seed)
        return [
            SharedJob(prefix + job.prompt_len, job.output_len, job.prompt_seed, prefix, seed - 1 - i % shared.groups)
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
            made.append(SharedJob(system + max(1, own_tokens), answer, talk, system, seed - 1))
        return made
    raise ValueError(f"workload is {workload!r}; must be one of {', '.join(WORKLOADS)}")


# ------------------------------------------------------------------------------------------------------------ arrivals


def gaps(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Seconds between arrivals, for ever: gamma-distributed with mean 1 / rate and shape `burstiness`.  1 is a Poisson
    process, less comes in clumps, much more is a metronome; the squared coefficient of variation is 1 / burstiness."""
    while True:
        yield rng.gammavariate(burstiness, 1.0 / (rate * burstiness))


def phases(
    rate: float, seconds: float, peak: float | None, peak_seconds: float, after_seconds: float | None = None
) -> list[Phase]:
    """One steady phase, or with a peak three: base, burst, after.  The last takes as long as the first unless told."""
    if peak is None:
        return [Phase("steady", rate, seconds)]
    after = Phase("after", rate, seconds if after_seconds is None else after_seconds)
    return [Phase("base", rate, seconds), Phase("burst", peak, peak_seconds), after]


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
_LENGTHS: dict[str, tuple[int, bool]] = {
    "prompt_len": (1, True),
    "output_len": (1, True),
    "prompt_seed": (0, False),
    "prefix_len": (0, False),
    "prefix_seed": (0, False),
}
_CLIENT_FIELDS = ("tenant", "priority", "timeout_s")
_MOST = 10_000_000  # tokens; more is a slip of the pen


@dataclass(frozen=True)
class Line:
    """One request of a trace."""

    at_s: float | None  # None: the trace leaves arrivals to the run
    job: Job
    client: ClientProfile


def read_trace(path: Path) -> list[Line]:
    """JSON lines with `prompt_len` and `output_len` in tokens and, as they like:

    prompt_seed                 else the number of the line
    prefix_len, prefix_seed     of a beginning that lines with the same seed share
    at_s                        second of arrival: in every line or in none, never before the line above
    tenant, priority, timeout_s who asks (loadtest/profiles.py)

    Raises TraceError naming the line and the field, OSError."""
    lines: list[Line] = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                lines.append(_parse(text, f"{path.name}, line {number}", number, lines[-1] if lines else None))
    if not lines:
        raise TraceError(f"{path.name}: no requests in it")
    return lines


def _parse(text: str, where: str, number: int, before: Line | None) -> Line:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: must be an object with prompt_len and output_len")
    known = (*_LENGTHS, "at_s", *_CLIENT_FIELDS, "id")
    if strange := sorted(fields.keys() - set(known)):
        raise TraceError(f"{where}: {strange[0]} is not a field; there are {', '.join(known)}")
    return Line(_time(fields, where, before), _job(fields, where, number), _client(fields, where))


def _job(fields: dict[str, Any], where: str, number: int) -> Job:
    values = {"prompt_seed": number}
    for name, (least, needed) in _LENGTHS.items():
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
    return SharedJob(**values) if prefix else Job(*(values[n] for n in ("prompt_len", "output_len", "prompt_seed")))


def _client(fields: dict[str, Any], where: str) -> ClientProfile:
    """JSON's own types; the values are checked as those of the command line are."""
    readers: dict[str, tuple[tuple[type, ...], str, Callable[[str], Any]]] = {
        "tenant": ((str,), "a name", clients.parse_tenant),
        "priority": ((str, int), "a name or a whole number", clients.parse_priority),
        "timeout_s": ((int, float), "a number of seconds > 0", clients.parse_deadline),
    }
    found = {}
    for name, (types, kind, read) in readers.items():
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, types):
            raise TraceError(f"{where}: {name} is {value!r}; must be {kind}")
        try:
            found[name] = read(str(value))
        except ProfileError as error:
            raise TraceError(f"{where}: {name} is {error}") from None
    return ClientProfile(**found)


def _time(fields: dict[str, Any], where: str, before: Line | None) -> float | None:
    at = fields.get("at_s")
    if before is not None and (at is None) != (before.at_s is None):
        raise TraceError(f"{where}: at_s is {'missing' if at is None else 'there'}, but the lines above differ")
    if at is None:
        return None
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
        raise TraceError(f"{where}: at_s is {at!r}; must be a number of seconds, >= 0")
    if before is not None and before.at_s is not None and at < before.at_s:
        raise TraceError(f"{where}: at_s is {at:g}; must not be before the line above, {before.at_s:g}")
    return float(at)


def from_trace(path: Path, plan: list[Phase], burstiness: float, seed: int) -> list[Arrival]:
    """A trace as it was written down; one without times arrives as `plan` says, for as long as either lasts.
    Raises TraceError, OSError."""
    lines = read_trace(path)
    if lines[0].at_s is not None:
        return [Arrival(line.at_s or 0.0, "trace", line.job, line.client) for line in lines]
    times = islice(arrival_times(plan, burstiness, seed), len(lines))
    return [Arrival(at, phase, line.job, line.client) for (at, phase), line in zip(times, lines, strict=False)]


def assign_clients(arrivals: list[Arrival], mix: clients.Mix, seed: int, only: str = "") -> list[Arrival]:
    """The same work, asked by whom `mix` draws.  `only` keeps one tenant's requests and leaves their times and lengths
    as they are beside the others: what that tenant's life is like alone."""
    drawn = mix.draw([arrival.client for arrival in arrivals], seed)
    asked = [replace(arrival, client=client) for arrival, client in zip(arrivals, drawn, strict=True)]
    return [arrival for arrival in asked if not only or arrival.client.tenant == only]
