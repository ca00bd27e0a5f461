"""The Executor protocol: what the loop needs from whoever turns a StepPlan into tokens."""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.core.plan import StepPlan, StepResult


class ModelInfo(msgspec.Struct, frozen=True):
    """What the rest of the engine may know about the loaded model."""

    name: str
    fingerprint: str  # digest of weights, dtype and config
    vocab_size: int
    max_model_len: int  # tokens
    eos_ids: list[int]
    kv_bytes_per_token: int  # 2 x layers x KV heads x head size x bytes, all ranks together


class StepError(Exception):
    """A step failed.  Every row it touched is lost; the executor has freed all rows and forgotten all tables."""


class Executor(Protocol):
    """Runs plans strictly in order.  Not thread-safe: one loop owns it."""

    info: ModelInfo
    blocks: int  # KV blocks in the pool, fixed at start
    depth: int  # how many plans may be in flight (1: collect before the next submit)

    def submit(self, plan: StepPlan) -> None:
        """Queue one step.  Returns before it has run when `depth` > 1."""

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight.  Raises StepError if it failed; every step in flight is then void."""

    def close(self) -> None:
        """Free everything; harmless when called twice."""
