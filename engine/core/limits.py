"""The limits of the scheduler, and the types of what it reports: milestones, outputs, counts."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.core.plan import DRAFT_SOURCES
from quire.engine.core.state_pool import StateCounts
from quire.engine.core.swapping import Preempt
from quire.engine.wire.messages import Delta, FinishReason, Generate


class Limits(msgspec.Struct, frozen=True):
    """Bounds of the scheduler, derived from EngineConfig and the loaded model."""

    max_seqs: int  # slots of the executor's batch
    step_tokens: int  # token budget of a step, decodes included
    chunk_tokens: int  # maximum prompt tokens of one sequence per step
    max_model_len: int  # tokens
    vocab_size: int
    admit_threshold: float  # fraction of the pool
    eos_ids: frozenset[int]
    fingerprint: str
    admission: str = "forecast"  # admission mode (policy/admission.py); also selects policy/allocation.py's policy
    preempt: Preempt = "auto"  # whether preemption drops a sequence's KV cache or copies it to the host: swapping.py
    block_bytes: int = 0  # bytes of keys and values per block, all layers; mode "auto" estimates swap times with it
    itl_stretch: float = 0.0  # maximum time of a step with prompts, relative to a decode-only step; 0: no bound
    step_target_s: float = 0.0  # maximum time of a step with prompts, seconds; 0: no bound
    grammars: bool = False  # whether the executor supports Sampling.grammar
    beams: bool = False  # whether the executor supports Slice.candidates, which beam search needs
    adapter_slots: int = 0  # LoRA adapters whose sequences may run at once; 0: the executor has no LoRA support
    tile_tokens: int = 1  # tile size of the linear layers' GEMMs, in tokens (ModelInfo.tile_tokens)
    recurrent: bool = False  # the model has recurrent layers, which keep a state per slot


Milestone = Literal["started", "resumed", "first", "paused", "continued", "preempted", "requeued", "ended"]


class Event(msgspec.Struct, frozen=True):
    """A milestone of one sequence, for metrics and the request log, which add the time: the core has no clock."""

    kind: Milestone
    request: Generate
    index: int  # index among the request's n choices; before the siblings fork: the leader's index
    tokens: int = 0  # started: cached prompt tokens; resumed: tokens to compute; ended: output tokens
    reason: FinishReason | None = None  # ended: finish reason; None: another engine answers the request now
    step: int = 0  # step of the plan that caused the milestone; first, ended: step of the last plan issued
    # Digests of full blocks.  started: the cached blocks; ended: all blocks whose digest was computed.
    digests: list[bytes] = []


class Outputs(msgspec.Struct):
    """Everything that the engine loop takes from the scheduler after a step."""

    deltas: dict[str, list[Delta]]  # deltas by gateway
    finished: list[str]  # ids of requests all of whose sequences have ended
    events: list[Event] = []  # in chronological order
    # Requests that return to the queue, because this machine lacks their LoRA adapter: id -> error line.
    returned: dict[str, str] = {}


def _per_source() -> dict[str, int]:
    return dict.fromkeys(DRAFT_SOURCES, 0)


class Totals(msgspec.Struct):
    """Counts since the engine started, exported as metrics and in EngineLoad."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    blocks_cached_prompt_tokens: int = 0  # prompt tokens in cached blocks, including those without a checkpoint
    states: StateCounts = msgspec.field(default_factory=StateCounts)  # counts for models with recurrent state
    generated_tokens: int = 0
    forced_tokens: int = 0  # output tokens known before a step sampled them, because a grammar allowed no other token
    jumped_tokens: int = 0  # output tokens computed in a jump's slice instead of a decode step of their own
    drafted_tokens: dict[str, int] = msgspec.field(default_factory=_per_source)  # verified draft tokens by source
    accepted_drafts: dict[str, int] = msgspec.field(default_factory=_per_source)  # accepted draft tokens by source
    refused_drafts: int = 0  # draft tokens found but not verified, because the predicted speed-up was too small
    recomputed_tokens: int = 0  # tokens computed again after a preemption
    preemptions: int = 0
    yields: int = 0  # preemptions for fairness between tenants
    pauses: int = 0  # times that a sequence paused with its blocks because the pool was full
    swap_preemptions: int = 0  # preemptions that kept the computed KV in host memory
    swapped_out_blocks: int = 0  # blocks copied to host memory
    swapped_in_blocks: int = 0  # blocks copied back; blocks still in the prefix cache are not copied
    copied_blocks: int = 0  # copy-on-write copies of shared blocks
    released_blocks: int = 0  # blocks released by sequences that finished
    audits: int = 0  # full checks of the block accounting
    leaks: int = 0  # checks that found blocks which are neither held nor available
    double_frees: int = 0  # checks that found a held block released
    other_alarms: int = 0  # checks that found another accounting error
