"""Traces: a `Job` has the lengths of one request; a trace file lists the requests of a run.

A trace file has one JSON object per line.  `read_trace()` lists the fields.  `write_requests()` writes the same jobs
with their token ids, for offline systems that run in another environment (`engine.tools bench`, loadtest/peers).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.loadtest import clients
from quire.loadtest.clients import ClientProfile, ProfileError

TRACES = Path(__file__).resolve().parent / "traces"


class TraceError(ValueError):
    """A trace file cannot be used.  Names the file, the line and the field."""


@dataclass(frozen=True)
class Job:
    """The lengths of one request, and the seeds of its prompt."""

    prompt_len: int  # tokens, shared prefix included
    output_len: int  # tokens
    prompt_seed: int
    prefix_len: int = 0  # tokens at the start that other jobs with the same prefix_seed share
    prefix_seed: int = 0

    def prompt(self, vocab_size: int) -> list[int]:
        """Return the prompt's token ids, equal on every machine and for every system under test."""
        own = _token_ids(self.prompt_seed, self.prompt_len - self.prefix_len, vocab_size)
        return _token_ids(self.prefix_seed, self.prefix_len, vocab_size) + own


def _token_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    """Draw ids one by one, so a longer list of the same seed begins with the shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(10, vocab_size) for _ in range(count)]


def lognormal(count: int, prompt_mean: float, output_mean: float, seed: int) -> list[Job]:
    """Draw `count` jobs with seeded lognormal lengths of these means, at least 4 and at most 8 times the mean.

    The spread is that of ShareGPT-like chat (sigma 1.05 for prompts, 0.89 for outputs): half the prompts are shorter
    than 0.58 of the mean, half the outputs shorter than 0.67."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        return int(min(8 * mean, max(4, rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    return [Job(draw(prompt_mean, 1.05), draw(output_mean, 0.89), seed + i) for i in range(count)]


def read(name: str) -> list[Job]:
    """Return the jobs of a trace in loadtest/traces.

    sharegpt_like: 1,000 lognormal lengths, prompts of mean 161 (half below 93, at most 2,048), outputs of mean 338
    (half below 228, at most 2,017).  The GPU figures of vLLM were measured with it."""
    return [line.job for line in read_trace(TRACES / f"{name}.jsonl")]


def write_requests(jobs: Sequence[Job], vocab_size: int, path: Path, arrivals_s: Sequence[float] = ()) -> None:
    """Write one {"token_ids", "max_new_tokens"} per line, and "at_s" (seconds since the start) with arrivals."""
    with path.open("w", encoding="utf-8") as file:
        for i, job in enumerate(jobs):
            line: dict[str, Any] = {"token_ids": job.prompt(vocab_size), "max_new_tokens": job.output_len}
            if arrivals_s:
                line["at_s"] = arrivals_s[i]
            file.write(json.dumps(line) + "\n")


# ------------------------------------------------------------------------------------------------------- reading a file

# field -> (smallest value, whether every line needs it)
_LENGTHS: dict[str, tuple[int, bool]] = {
    "prompt_len": (1, True),
    "output_len": (1, True),
    "prompt_seed": (0, False),
    "prefix_len": (0, False),
    "prefix_seed": (0, False),
}
_CLIENT_FIELDS = ("tenant", "priority", "timeout_s")
_MAX_LEN = 10_000_000  # tokens; a larger number is a typing error


@dataclass(frozen=True)
class Line:
    """One request of a trace."""

    at_s: float | None  # None: the run chooses the arrival
    job: Job
    client: ClientProfile


def read_trace(path: Path) -> list[Line]:
    """Read JSON lines with `prompt_len` and `output_len` in tokens.

    Optional fields:

    prompt_seed                 default: the number of the line
    prefix_len, prefix_seed     length of a shared beginning; lines with the same seed share it
    at_s                        second of arrival: in every line or in none, never earlier than in the line above
    tenant, priority, timeout_s the client (loadtest/clients.py)
    id                          ignored

    Raises TraceError, which names the line and the field, and OSError."""
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
        most = _MAX_LEN if name.endswith("_len") else 2**63
        if type(value) is not int or not least <= value <= most:
            raise TraceError(f"{where}: {name} is {value!r}; must be a whole number, >= {least}, <= {most}")
        values[name] = value
    prefix = values.get("prefix_len", 0)
    if prefix > values["prompt_len"]:
        raise TraceError(f"{where}: prefix_len is {prefix}; must be <= prompt_len, {values['prompt_len']}")
    return Job(**values)


def _client(fields: dict[str, Any], where: str) -> ClientProfile:
    """Check the JSON types of a line.  The values are checked by the same functions as those of the command line."""
    readers: dict[str, tuple[tuple[type, ...], str, Callable[[str], Any]]] = {
        "tenant": ((str,), "a name", clients.parse_tenant),
        "priority": ((str, int), "a name or a whole number", clients.parse_priority),
        "timeout_s": ((int, float), "a number of seconds > 0", clients.parse_deadline),
    }
    found = {}
    for name, (types, kind, read_value) in readers.items():
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, types):
            raise TraceError(f"{where}: {name} is {value!r}; must be {kind}")
        try:
            found[name] = read_value(str(value))
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
