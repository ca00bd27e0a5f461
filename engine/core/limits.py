"""What the scheduler is told, and what it has to tell: its limits, its outputs, its counts."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.core.swapping import Preempt
from engine.wire.messages import Delta, FinishReason, Generate

Admission = Literal["forecast", "threshold", "watermark", "reserve", "none"]
Allocation = Literal["paged", "static"]


class Limits(msgspec.Struct, frozen=True):
    """What bounds the scheduler; derived from EngineConfig and the loaded model."""

    max_seqs: int  # rows of the executor
    step_tokens: int  # token budget of a step, decodes included
    chunk_tokens: int  # most prompt tokens of one sequence in a step
    max_model_len: int  # tokens
    vocab_size: int
    admit_threshold: float  # fraction of the pool
    eos_ids: frozenset[int]
    fingerprint: str
    admission: Admission = "forecast"  # when a sequence that is not alone may start:
    # forecast: the peak predicted for all that run, and it, fits the pool
    # threshold: the pool's utilisation stays at or below `admit_threshold`
    # watermark: WATERMARK of the pool stays free
    # reserve: all that run, and it, fit at their greatest length
    # none: what it knows fits
    allocation: Allocation = "paged"  # how a sequence comes by its blocks:
    # paged: as it grows
    # static: all at its start, a contiguous run for its greatest length, shared with nobody; `admission` has no say
    preempt: Preempt = "auto"  # what becomes of what a preempted sequence has computed; see engine/core/swapping.py
    block_bytes: int = 0  # keys and values of a block, all layers; prices a swap in mode "auto"
    itl_stretch: float = 0.0  # prompts may make a step so many times as long as those who decode alone; 0: any
    step_target_s: float = 0.0  # seconds that a step with prompts should take at most; 0: any


Milestone = Literal["started", "resumed", "first", "paused", "continued", "preempted", "requeued", "ended"]


class Event(msgspec.Struct, frozen=True):
    """A milestone of one continuation, for whoever clocks or records it: the core knows no time."""

    kind: Milestone
    request: Generate
    index: int  # which of the request's n continuations; for those that have not forked yet, their leader's
    tokens: int = 0  # started: prompt tokens found in the cache; resumed: to compute again; ended: of its output
    reason: FinishReason | None = None  # ended: why; None: it is another engine's now
    step: int = 0  # the plan it belongs to; first, ended: the last plan made
    digests: list[bytes] = []  # of its full blocks: started: of those found; ended: as far as the prefix cache asked


class Outputs(msgspec.Struct):
    """What a commit has for the world outside."""

    deltas: dict[str, list[Delta]]  # by gateway
    finished: list[str]  # ids of requests all of whose continuations have ended
    events: list[Event] = []  # in the order they happened


class Totals(msgspec.Struct):
    """Counts since start; the loop exports them."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after a preemption
    preemptions: int = 0
    yields: int = 0  # of these, those that made room for a tenant that held less than its share
    pauses: int = 0  # times a row waited in place, with its blocks, because the pool was full
    swap_preemptions: int = 0  # of these, with what was computed kept in the host's memory
    swapped_out_blocks: int = 0  # copied to the host's memory
    swapped_in_blocks: int = 0  # and back: fewer, where the prefix cache still had them or the sequence ended
    copied_blocks: int = 0
    released_blocks: int = 0  # by sequences that finished
    audits: int = 0  # of the books, whole or sampled
    leaks: int = 0  # of these, those that found blocks which nobody has and nobody will get
    double_frees: int = 0  # those that found a block given back under somebody who has it
    other_alarms: int = 0  # those that found something else wrong
