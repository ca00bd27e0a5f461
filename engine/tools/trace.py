"""Traces: requests for the simulator, generated, read from a file, or taken from an engine's request log."""

from __future__ import annotations

import random
from math import log
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.common.errors import OperatorError
from quire.engine.observers.request_log import RequestLine

EOS = 0
VOCAB = 1 << 30


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace."""

    prompt_len: int  # tokens
    output_len: int  # tokens of its output
    at_s: float = 0.0  # arrival time in seconds
    max_tokens: int = 0  # maximum output tokens; 0: read_trace() sets a maximum
    prompt_seed: int = 0  # seed of its token ids; 0: the job's index in the trace
    prefix_len: int = 0  # number of first prompt tokens that are equal in all jobs
    tenant: str = ""
    weight: float = 1.0  # weight of the tenant
    salt: str = ""  # jobs share prefixes only if their salts are equal; "": the tenant's name is the salt
    priority: int = 0
    ends_known: bool = False  # the scheduler knows that the output ends at max_tokens (ignore_eos)
    leaves_s: float = 0.0  # seconds after its arrival at which the client cancels; 0: never
    claimed_s: float = 0.0  # seconds after its arrival at which the engine gets it
    n: int = 1  # choices, each of output_len tokens


def burst(
    seed: int,
    *,
    base: float = 5.0,
    peak: float = 15.0,
    peak_s: float = 30.0,
    rest_s: float = 30.0,
    max_tokens: int = 1024,
    ends_known: bool = False,
) -> list[Job]:
    """Generate Poisson arrivals: `base` requests/s for `rest_s`, `peak` requests/s for `peak_s`, `base` for `rest_s`.

    Lengths are lognormal with means of 77 prompt and 165 output tokens, clipped to 4 tokens .. 8 times the mean."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        return int(min(8 * mean, max(4, rng.lognormvariate(log(mean) - sigma * sigma / 2, sigma))))

    jobs, now = [], 0.0
    for rate, end in ((base, rest_s), (peak, rest_s + peak_s), (base, 2 * rest_s + peak_s)):
        while (now := now + rng.expovariate(rate)) < end:
            prompt, output = draw(77, 1.05), min(draw(165, 0.89), max_tokens)
            jobs.append(Job(prompt, output, now, output if ends_known else max_tokens, ends_known=ends_known))
        now = end
    return jobs


class TraceError(OperatorError):
    """A line of a trace is invalid; the text names the line and the field."""

    exit_status = 2


def read_lines(path: Path) -> list[Job | RequestLine]:
    """Read a trace or a request log.  Raises TraceError."""
    found: list[Job | RequestLine] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if "unix_s" in fields:
                found.append(msgspec.convert(fields, RequestLine))
            else:
                found.append(msgspec.convert(fields, Job))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    return found


def read_trace(path: Path, *, max_tokens: int = 0, rate: float = 0.0, seed: int = 0) -> list[Job]:
    """Read jobs from lines of JSON, which have the fields of Job or are lines of a request log.

    A line without max_tokens gets `max_tokens`, which also limits its output.  With a `rate`, jobs arrive as a Poisson
    process with `rate` jobs/s instead of their own times.  Raises TraceError."""
    jobs: list[Job] = []
    rng, now = random.Random(seed), 0.0
    for number, line in enumerate(read_lines(path), 1):
        job = logged(line) if isinstance(line, RequestLine) else line
        if job is None:
            continue
        if job.max_tokens == 0 and max_tokens:
            job = msgspec.structs.replace(job, max_tokens=max_tokens, output_len=min(job.output_len, max_tokens))
        if rate:
            job = msgspec.structs.replace(job, claimed_s=0.0, at_s=(now := now + rng.expovariate(rate)))
        for field, least in (("prompt_len", 1), ("output_len", 1), ("max_tokens", job.output_len), ("at_s", 0)):
            if (value := getattr(job, field)) < least:
                raise TraceError(f"{path}, line {number}: {field} is {value}; it must be at least {least}")
        if not 0 <= job.prefix_len <= job.prompt_len:
            raise TraceError(f"{path}, line {number}: prefix_len is {job.prefix_len}; prompt_len is {job.prompt_len}")
        jobs.append(job)
    return jobs


def logged(line: RequestLine) -> Job | None:
    """Return the job for a line of a request log; None: the request had no output.

    For a cancelled request, or one past its deadline, the job's client cancels after the same time.  Cached tokens
    become a prefix of all jobs of its tenant: the log does not identify prompts."""
    left = line.outcome in ("cancelled", "deadline")
    if not line.output_len and not left:
        return None
    return Job(
        line.prompt_len,
        line.max_tokens if left else line.output_len,
        at_s=max(0.0, line.at_s),
        max_tokens=line.max_tokens,
        prefix_len=min(line.cached_tokens, line.prompt_len),
        tenant=line.tenant,
        priority=line.priority,
        ends_known=line.ends_known,
        leaves_s=max(1e-6, line.e2e_s) if left else 0.0,
        claimed_s=line.claimed_s,
        n=line.n,
    )
