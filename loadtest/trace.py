"""Traces: what arrives, as lengths in tokens and a seed for the prompt's ids."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).resolve().parent / "traces"


@dataclass(frozen=True)
class Job:
    prompt_len: int  # tokens
    output_len: int  # tokens
    prompt_seed: int

    def prompt(self, vocab_size: int) -> list[int]:
        """Its token ids: the same on every machine and for every system under test."""
        rng = random.Random(self.prompt_seed)
        return [rng.randrange(10, vocab_size) for _ in range(self.prompt_len)]


def lognormal(count: int, prompt_mean: float, output_mean: float, seed: int) -> list[Job]:
    """Seeded lognormal lengths with these means, clipped to 4..8x the mean.  Spread as ShareGPT-like chat has it: half
    the prompts are shorter than 0.58 of the mean, half the outputs shorter than 0.67 (sigma 1.05 and 0.89)."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        return int(min(8 * mean, max(4, rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    return [Job(draw(prompt_mean, 1.05), draw(output_mean, 0.89), seed + i) for i in range(count)]


def read(name: str) -> list[Job]:
    """A trace kept in loadtest/traces.

    sharegpt_like: 1,000 lognormal lengths, prompts of mean 161 (half below 93, at most 2,048), outputs of mean 338
    (half below 228, at most 2,017): what the peers' GPU figures were measured with."""
    lines = (TRACES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Job(**json.loads(line)) for line in lines]


def write_requests(jobs: list[Job], vocab_size: int, path: Path) -> None:
    """The same work for every offline system: {"token_ids", "max_new_tokens"} a line."""
    with path.open("w", encoding="utf-8") as file:
        for job in jobs:
            line = {"token_ids": job.prompt(vocab_size), "max_new_tokens": job.output_len}
            file.write(json.dumps(line) + "\n")
