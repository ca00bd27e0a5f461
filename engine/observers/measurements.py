"""Measurements of an engine, as plain values that the metrics read (metrics.py).

Observing a turn takes a few additions.  Metrics are built on the scraper's thread, when Prometheus scrapes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from quire.engine.common import histograms, log_queue
from quire.engine.common.histograms import Tally
from quire.engine.common.tracing import Tracing
from quire.engine.config import EngineConfig
from quire.engine.core.limits import Totals
from quire.engine.executor.base import ModelInfo
from quire.engine.executor.grammar_store import GrammarCounts
from quire.engine.observers.adapter_use import LoraFigures
from quire.engine.observers.canary import CanaryCounts
from quire.engine.observers.iteration_tokens import IterationTokens
from quire.engine.observers.request_times import RequestTimes
from quire.engine.observers.turn_record import PHASES, TurnRecord
from quire.engine.wire.messages import EngineLoad

WASTE_S = 1.0  # minimum seconds between two counts of wasted KV positions, which visit every sequence
STALLED_S = 60.0  # the loop counts as dead after this many seconds without a turn; CPU steps take seconds at most
NO_LOAD = EngineLoad("", "", "", 0, 0, 0, 1, 1, 0, 0, 0, 0, 0)  # load before the first turn


class WarmUp(NamedTuple):
    """Counts of the prefix warm-up at start."""

    prefixes: int = 0
    tokens: int = 0
    seconds: float = 0.0


class KVUse(NamedTuple):
    """Usage of the KV cache."""

    shared_fraction: float  # fraction of the entries of all block tables that need no block of their own
    held: dict[str, int]  # bytes of blocks that sequences hold, by layer group
    cached: dict[str, int]  # bytes of cached, unreferenced blocks, by layer group


class StepTimes:
    """Histograms of step times: "decode" for steps without slices, "mixed" for steps with slices."""

    def __init__(self) -> None:
        self._kinds: deque[str] = deque()  # kinds of the steps in flight
        self._last_result = 0.0  # monotonic seconds of the last result; 0 after a pause or failure: measure no time
        self.seconds = {"decode": Tally(histograms.STEP_S), "mixed": Tally(histograms.STEP_S)}
        self.tokens = Tally(histograms.TOKENS)
        self.failures = 0
        self.device_s = 0.0

    def observe(self, record: TurnRecord) -> None:
        if record.plan is not None:
            slices = record.plan.slices
            self._kinds.append("mixed" if slices else "decode")
            tokens = sum(len(piece.token_ids) for piece in slices)
            others = record.running - len(slices) - len(record.plan.forks)  # a fork samples from its leader's logits
            self.tokens.add(others + tokens)
        if record.failed:
            self._kinds.clear()
            self.failures += 1
            self._last_result = 0.0
        if record.result is not None:
            kind, now = self._kinds.popleft(), record.marks[PHASES.index("execute") + 1]
            if self._last_result:
                self.seconds[kind].add(now - self._last_result)
            self._last_result = now
            self.device_s += record.result.device_s
        if record.idle:
            self._last_result = 0.0


class Measurements:
    """All measurements of one engine.  The loop's thread and the bus thread write them; any thread reads them."""

    def __init__(self, engine: str, tracing: Tracing) -> None:
        self.engine, self.model = engine, ""
        self.info: dict[str, str] = {}  # labels that describe the model
        self.requests = RequestTimes(engine, tracing)
        self.steps = StepTimes()
        self.iterations = IterationTokens()
        self.gated = 0  # sequences that wait for a grammar or an adapter
        self.lora = LoraFigures()
        self.load = NO_LOAD
        self.totals = Totals()
        self.canary = CanaryCounts()
        self.grammars: Callable[[], GrammarCounts] = GrammarCounts
        self.wasted_slots, self._wasted_at = 0, 0.0
        self.kv_use = KVUse(0.0, {}, {})
        self.warming = False  # set by the warm-up: the engine computes hot prefixes and serves no request yet
        self.warm = WarmUp()
        self.start_s: dict[str, float] = {}  # seconds of this start, by part
        self.takeover = False  # whether this engine was an activated spare
        self.memory: dict[str, int] = {}  # device memory in bytes, by part
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        self.sync_s = Tally(histograms.ROUND_TRIP_S)
        self.queue_share = 0.0
        self.idle_pool_s, self._synced = 0.0, time.monotonic()
        self.resumes = 0
        self.claims = dict.fromkeys(("held", "waited", "none"), 0)  # claims by Claim.reason
        self.clock_skew_s = 0.0  # set by the thread that syncs with Redis
        self._turned = time.monotonic()
        self.dropped_lines: dict[str, Callable[[], int]] = {"stderr": log_queue.dropped_lines}  # counters by log

    def describe_model(self, info: ModelInfo, config: EngineConfig) -> None:
        """Record the labels of the loaded model.  `alive` expects turns of the loop from now on."""
        self._turned = time.monotonic()
        self.model, self.lora.slots = info.name, config.lora_slots if info.adapters else 0
        self.info = {
            "fingerprint": info.fingerprint[:16],
            "dtype": config.dtype,
            "kv_dtype": config.kv_dtype,
            "block_size": str(config.block_size),
            "max_model_len": str(info.max_model_len),
        }

    def warmed(self, prefixes: int, tokens: int, seconds: float) -> None:
        """Record the counts of the prefix warm-up."""
        self.warm = WarmUp(prefixes, tokens, seconds)

    def started(self, parts: Mapping[str, float], *, takeover: bool, memory: Mapping[str, int]) -> None:
        """Record the start: seconds per part, whether the engine was a spare, and device memory in bytes per part."""
        self._turned = time.monotonic()
        self.start_s, self.takeover, self.memory = dict(parts), takeover, dict(memory)

    def observe(self, record: TurnRecord) -> None:
        self.requests.observe(record)
        self.steps.observe(record)
        assert record.load is not None
        self.load, self.totals, self.canary = record.load, record.totals, record.canary
        self.iterations.observe(self.requests.prefilled_tokens, record.totals.generated_tokens)
        self.gated = record.gated
        self.lora.observe(record)
        self.grammars = record.grammar_counts
        marks, phases = record.marks, self.phases_s
        for i, phase in enumerate(PHASES):
            phases[phase] += marks[i + 1] - marks[i]
        self._turned = now = marks[-1]
        if now - self._wasted_at >= WASTE_S:
            self.wasted_slots, self._wasted_at = record.count_wasted_slots(), now
            self.kv_use = KVUse(record.measure_sharing(), *record.group_bytes())
        if record.resumed_s and self.takeover:
            self.start_s.setdefault("recompute", record.resumed_s)

    def synced(self, seconds: float, queue_share: float, resumed: int) -> None:
        """Record one sync with Redis, on the bus thread.

        `queue_share`: requests in the shared queue divided by the engines.  `resumed`: number of claimed requests that
        an earlier engine began."""
        now = time.monotonic()
        if self.queue_share or self.load.waiting:  # requests have waited since the last sync
            self.idle_pool_s += (now - self._synced) * self.load.free_blocks / self.load.total_blocks
        self._synced = now
        self.sync_s.add(seconds)
        self.resumes += resumed
        self.queue_share = queue_share

    def claimed(self, reasons: Iterable[str]) -> None:
        """Count claimed requests by reason (Claim.reason), on the bus thread."""
        for reason in reasons:
            self.claims[reason] += 1

    @property
    def used_blocks(self) -> int:
        """Number of KV blocks that sequences hold."""
        return self.load.total_blocks - self.load.free_blocks

    @property
    def alive(self) -> bool:
        """Whether the loop has run a turn within STALLED_S."""
        return time.monotonic() - self._turned < STALLED_S
