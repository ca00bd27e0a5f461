"""Find the request rate with a given KV-cache utilisation, by a closed loop with a fixed number of clients.

    mean blocks of a running sequence ──> clients that fill `use` of the pool ──> their tokens/s ──> requests/s

An open loop at a guessed rate would need minutes, because the number of running sequences, and with it the utilisation,
fluctuates.  With a fixed number of clients only the sizes of sequences vary.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.loadtest.replay import Options, Session, body, record_of
from quire.loadtest.stats import Record
from quire.loadtest.trace import Job
from quire.loadtest.workloads import Arrival

RAMP_S, MEASURE_S = 12.0, 20.0


@dataclass(frozen=True)
class Calibration:
    rate: float  # requests per second
    clients: int
    kv: float | None  # measured mean utilisation of the KV cache, 0 to 1
    tokens_per_s: float

    def describe(self) -> dict[str, Any]:
        return {"rate": self.rate, "clients": self.clients, "kv": self.kv, "tokens_per_s": self.tokens_per_s}


def blocks_held(jobs: Sequence[Job], block_size: int) -> float:
    """Return the mean blocks of a running sequence, over time.

    A sequence runs for one step per output token.  So a job's weight is its output length, and its mean size is its
    prompt and half of its output, plus half a block for the block that is not full."""
    steps = sum(job.output_len for job in jobs)
    return sum(j.output_len * ((j.prompt_len + j.output_len / 2) / block_size + 0.5) for j in jobs) / steps


def clients_for(jobs: Sequence[Job], blocks: int, block_size: int, use: float) -> int:
    """Return how many concurrent requests fill the fraction `use` of the KV cache on average, at least 1."""
    return max(1, round(use * blocks / blocks_held(jobs, block_size)))


def tokens_between(records: Sequence[Record], begin: float, end: float) -> float:
    """Return the output tokens received from `begin` to `end`, in seconds of the run."""
    total = 0.0
    for record in records:
        inside = sum(begin <= at < end for at in record.times)
        total += inside * record.tokens / len(record.times) if inside else 0.0
    return total


async def closed_loop(
    options: Options, jobs: Sequence[Job], clients: int, ramp_s: float, measure_s: float
) -> tuple[float, float | None]:
    """Keep `clients` requests open for `ramp_s` + `measure_s`; return tokens/s and mean utilisation in `measure_s`.

    Raises RuntimeError with the first error if a request fails."""
    end = ramp_s + measure_s
    work = itertools.cycle(jobs)
    records: list[Record] = []
    async with Session(options) as session:

        async def client() -> None:
            while session.now_s < end:
                arrival = Arrival(session.now_s, "calibration", next(work))
                record = record_of(arrival)
                records.append(record)
                await session.send(record, body(arrival, options))
                if record.outcome != "ok":
                    raise RuntimeError(f"calibration: {record.error or record.outcome}")

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        done, _ = await asyncio.wait(tasks, timeout=end, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        samples = await session.samples()
    kv = [sample.kv for sample in samples if sample.kv is not None and ramp_s <= sample.at_s < end]
    return tokens_between(records, ramp_s, end) / measure_s, sum(kv) / len(kv) if kv else None


def calibrate(options: Options, jobs: Sequence[Job], blocks: int, block_size: int, use: float) -> Calibration:
    """Return the request rate at which requests like `jobs` have the mean KV-cache utilisation `use`.

    The rate is corrected in proportion to the measured utilisation."""
    clients = clients_for(jobs, blocks, block_size, use)
    tokens_per_s, kv = asyncio.run(closed_loop(options, jobs, clients, RAMP_S, MEASURE_S))
    rate = tokens_per_s * len(jobs) / sum(job.output_len for job in jobs)
    if kv:
        rate *= use / kv
    return Calibration(round(rate, 3), clients, kv and round(kv, 4), round(tokens_per_s, 1))
