"""Counts of a store of LoRA adapters, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """Adapters in a store now, and counts since the start."""

    held: int = 0  # adapters held by requests
    held_bytes: int = 0
    kept: int = 0  # adapters cached without a request
    kept_bytes: int = 0
    waiting: int = 0  # held adapters that are not loaded yet
    loads: int = 0  # loads since start
    load_s: float = 0.0  # total seconds of these loads
    faults: int = 0  # failed loads since start
    evicted: int = 0  # evictions since start
