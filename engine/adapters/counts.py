"""Counts of a store of LoRA adapters, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """What a store has now, and what it did since the start."""

    held: int = 0
    held_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    waiting: int = 0  # held ones that are not loaded
    loads: int = 0  # loads since start; the next counts likewise
    load_s: float = 0.0  # seconds of these loads
    faults: int = 0
    evicted: int = 0
