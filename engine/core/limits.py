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
    chunk_tokens: int  # most prompt tokens of one sequence in a step
    max_model_len: int  # tokens
    vocab_size: int
    admit_threshold: float  # fraction of the pool
    eos_ids: frozenset[int]
    fingerprint: str
    admission: str = "forecast"  # name of the mode: policy/admission.py, and policy/allocation.py
    preempt: Preempt = "auto"  # what a preempted sequence has computed is dropped, or copied to the host: swapping.py
    block_bytes: int = 0  # keys and values of a block, all layers; prices a swap in mode "auto"
    itl_stretch: float = 0.0  # longest step with prompts, relative to a decode-only step; 0: no bound
    step_target_s: float = 0.0  # longest step with prompts, seconds; 0: no bound
    grammars: bool = False  # the executor honours Sampling.grammar
    beams: bool = False  # the executor reports the candidates of a slice
    adapter_slots: int = 0  # LoRA adapters whose sequences may run at once; 0: the executor takes none
    recurrent: bool = False  # layers keep a state per slot, of which a sequence needs a copy to leave the slot


Milestone = Literal["started", "resumed", "first", "paused", "continued", "preempted", "requeued", "ended"]


class Event(msgspec.Struct, frozen=True):
    """A milestone of one sequence, for metrics and the request log, which add the time: the core has no clock."""

    kind: Milestone
    request: Generate
    index: int  # index among the request's n choices; before the fork: the leader's
    tokens: int = 0  # started: prompt tokens found in the cache; resumed: to compute again; ended: of its output
    reason: FinishReason | None = None  # ended: why; None: another engine answers the request now
    step: int = 0  # the plan it belongs to; first, ended: the last plan made
    # Digests of full blocks.  At start: of the blocks found.  At the end: of all that the prefix cache was asked for.
    digests: list[bytes] = []


class Outputs(msgspec.Struct):
    """Everything that the engine loop takes from the scheduler after a step."""

    deltas: dict[str, list[Delta]]  # deltas by gateway
    finished: list[str]  # ids of requests all of whose sequences have ended
    events: list[Event] = []  # in the order they happened
    # Requests that go back to the queue, because this machine lacks their LoRA adapter: id -> one line that says so.
    returned: dict[str, str] = {}


def _per_source() -> dict[str, int]:
    return dict.fromkeys(DRAFT_SOURCES, 0)


class Totals(msgspec.Struct):
    """Counts since the engine started, exported as metrics and in EngineLoad."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    blocks_cached_prompt_tokens: int = 0  # prompt tokens in cached blocks, with or without a checkpoint behind them
    states: StateCounts = msgspec.field(default_factory=StateCounts)  # counts for models with recurrent state
    generated_tokens: int = 0
    forced_tokens: int = 0  # output tokens known before a step sampled them, because a grammar allowed no other
    jumped_tokens: int = 0  # output tokens computed together with the token before them, not in a step of their own
    drafted_tokens: dict[str, int] = msgspec.field(default_factory=_per_source)  # drafts computed
    accepted_drafts: dict[str, int] = msgspec.field(default_factory=_per_source)  # those that equal what was sampled
    refused_drafts: int = 0  # drafts found that steps did not compute, because they would not have paid
    recomputed_tokens: int = 0  # computed again after a preemption
    preemptions: int = 0
    yields: int = 0  # preemptions for fairness between tenants
    pauses: int = 0  # times a sequence paused with its blocks because the pool was full
    swap_preemptions: int = 0  # preemptions that kept the computed KV in host memory
    swapped_out_blocks: int = 0  # copied to the host's memory
    swapped_in_blocks: int = 0  # blocks copied back; fewer if the prefix cache still had them
    copied_blocks: int = 0
    released_blocks: int = 0  # by sequences that finished
    audits: int = 0  # full checks of the block accounting
    leaks: int = 0  # checks that found blocks which are neither held nor available
    double_frees: int = 0  # those that found a held block released
    other_alarms: int = 0  # those that found something else wrong
