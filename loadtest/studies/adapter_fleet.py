"""`python -m quire.loadtest.studies adapter-fleet`: LoRA adapters on several engines, on a virtual clock.

It measures the gain of engines that prefer requests for adapters in their memory, and the wait for rarely used
adapters. The simulation is that of `fleet`: Redis, the scripts, both sides of the bus and the schedulers are real.
The model, the step times and the adapter loads are simulated: an engine loads one adapter at a time, in --load-s, and
keeps --kept of them; the default is what the default of --lora-memory-gib holds for an 8B model and rank 16.  Requests
arrive at --rate (Poisson), each for an adapter drawn by Zipf's law.  If a fleet cannot load fast enough, its queue
grows, and `served_per_s` is its capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections import deque
from typing import Any

import msgspec

from quire.engine.adapters.kept import KeptAdapters
from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.limits import Outputs
from quire.engine.core.scheduler import Scheduler
from quire.engine.observers.prefix_reports import HeldPrefixes
from quire.engine.tools.simulate import engine_limits
from quire.engine.tools.step_time import StepTime
from quire.engine.tools.trace import VOCAB
from quire.engine.wire.messages import Delta, Generate
from quire.engine.wire.prefixes import adapter_digest
from quire.loadtest.studies.fleet import BLOCK, STEP, Run, Sessions, Turn, _Engine, use_virtual_clock

BLOCKS = 12_288  # KV blocks per engine


class AdapterEngine(_Engine):
    """An engine with adapters: requests wait for the load of theirs, as in AdapterGate and AdapterStore."""

    def __init__(self, run: AdapterRun, name: str, blocks: int, step: StepTime, *, locality: bool) -> None:
        super().__init__(name, run.url, blocks, step, locality=locality)
        limits = msgspec.structs.replace(engine_limits("forecast", step_tokens=8192), adapter_slots=run.slots)
        self.core = Scheduler(BlockPool(blocks, BLOCK), limits, HostPool())
        self.held = HeldPrefixes(self.core.pool, self)
        self._run = run
        self._loaded: set[str] = set()
        self._kept = KeptAdapters()  # loaded adapters that no sequence uses
        self._holders: dict[str, set[str]] = {}
        self._adapter_of: dict[str, str] = {}
        self._gated: dict[str, list[Generate]] = {}  # adapter -> requests that wait for its load
        self._queue: deque[str] = deque()
        self._loading = ""
        self.loads = 0

    def loads_waiting(self) -> tuple[float, int]:
        waiting = len(self._queue) + bool(self._loading)
        return (self._run.load_s * (1 + waiting) if self.loads else 0.0), waiting

    def accept(self, request: Generate) -> None:
        adapter = request.adapter
        self._holders.setdefault(adapter, set()).add(request.id)
        self._adapter_of[request.id] = adapter
        self._kept.note_use(adapter)
        self._kept.remove(adapter)
        if adapter in self._loaded:
            self.core.accept(request)
            return
        if adapter not in self._gated:
            self._queue.append(adapter)
        self._gated.setdefault(adapter, []).append(request)
        self.next_load()

    def next_load(self) -> None:
        """Begin the next load if the memory has space for it."""
        if self._loading or not self._queue:
            return
        if len(self._loaded) >= self._run.kept:
            if not self._kept:
                return
            self._loaded.remove(victim := self._kept.pop())
            self.put_prefixes([], [adapter_digest(victim)])
        self._loading = self._queue.popleft()
        self._run.at(self._run.now + self._run.load_s, self.end_load)

    def end_load(self) -> Any:
        adapter, self._loading = self._loading, ""
        self.loads += 1
        self._loaded.add(adapter)
        self.put_prefixes([adapter_digest(adapter)], [])
        for request in self._gated.pop(adapter):
            self.core.accept(request)
        self.next_load()
        return self._run.talk(self)

    def take(self, outputs: Outputs) -> list[Delta]:
        found = super().take(outputs)
        for request_id in outputs.finished:
            adapter = self._adapter_of.pop(request_id)
            self._holders[adapter].discard(request_id)
            if not self._holders[adapter]:
                self._kept.add(adapter)
        self.next_load()
        return found


class AdapterRun(Run):
    """A fleet with adapters."""

    def __init__(self, server: EmbeddedRedis, *, locality: bool, given: Any) -> None:
        self.slots, self.kept, self.load_s = given.slots, given.kept, given.load_s
        sizes = {"output": given.output, "exchange_s": 0.0, "seed": given.seed}
        super().__init__(server, given.engines, BLOCKS, STEP, locality=locality, **sizes)

    def engine(self, name: str, blocks: int, step: StepTime, *, locality: bool) -> AdapterEngine:
        return AdapterEngine(self, name, blocks, step, locality=locality)


def requests(rng: random.Random, given: Any) -> Sessions:
    """Sessions of one request."""
    names = [f"a{rank}@d" for rank in range(given.adapters)]
    weights = [1 / (rank + 1) for rank in range(given.adapters)]
    while True:
        adapter = rng.choices(names, weights)[0]
        yield Turn(rng.choices(range(2, VOCAB), k=given.prompt), adapter=adapter)


async def measure(server: EmbeddedRedis, given: Any, *, locality: bool) -> dict[str, float]:
    run = AdapterRun(server, locality=locality, given=given)
    figures = await run.serve([(requests(run.rng, given), given.rate)], given.warm, given.requests)
    waits = sorted(one for each in run.ttft.values() for one in each)
    median = statistics.median(waits)
    engines = [engine for engine in run.engines if isinstance(engine, AdapterEngine)]
    return {
        "requests": figures.requests,
        "served_per_s": round(figures.served_per_s, 2),
        "loads_per_request": round(sum(engine.loads for engine in engines) / run.arrived, 3),
        "ttft_median_s": round(median, 3),
        "ttft_p99_s": round(waits[int(0.99 * len(waits))], 3),
        "ttft_most_s": round(waits[-1], 3),
        "most_over_median_in_loads": round((waits[-1] - median) / given.load_s, 2),
        "busiest": round(figures.busiest, 2),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, default=4, help="engines (default: 4)")
    parser.add_argument("--slots", type=int, default=8, help="adapters whose sequences run at once (default: 8)")
    parser.add_argument("--kept", type=int, default=51, help="adapters in the memory of each engine (default: 51)")
    parser.add_argument("--warm", type=int, default=200, help="warm-up requests, which are not counted (default: 200)")
    parser.add_argument(
        "--adapters", type=int, default=200, help="number of adapters, requested by Zipf's law (default: 200)"
    )
    parser.add_argument("--load-s", type=float, default=1.0, help="seconds that a load takes (default: 1)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second (default: 8)")
    parser.add_argument("--requests", type=int, default=1000, help="requests after the warm-up (default: 1000)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt (default: 200)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default: 64)")
    parser.add_argument("--seed", type=int, default=0)


def main(given: argparse.Namespace, command: str) -> int:
    use_virtual_clock()
    found: dict[str, Any] = {"command": command}
    with EmbeddedRedis() as server:
        for name, locality in (("order", False), ("locality", True)):
            found[name] = asyncio.run(measure(server, given, locality=locality))
    found["gain"] = round(found["locality"]["served_per_s"] / found["order"]["served_per_s"], 2)
    print(json.dumps(found, indent=2))
    return 0
