"""Messages between gateway and engine, in msgspec's MessagePack.

Rules that let two releases run at the same time during a rolling upgrade:
  * fields are only ever appended, each with a default; they are never renamed, reordered or retyped;
  * an unknown map key (or a longer array) from a newer process is ignored;
  * golden bytes in tests/wire pin every message, so a change that breaks these rules fails the tests.
Units are in the names or next to the field.  This module imports msgspec only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Raise it when a process of the earlier version would misread a message.  Appended fields leave it as it is.
WIRE_VERSION = 2

PRIORITIES = (-100, 100)  # first and last class; the lower class goes first
# Of a length penalty.  Within them length ** length_penalty is a finite float32 above 0 for every length up to 10**7.
LENGTH_PENALTIES = (-5.0, 5.0)

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request's tokens are sampled.  `service/api/api.py` has validated it."""

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches this
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    min_p: float = 0.0  # keep tokens with at least this fraction of the maximum probability
    seed: int = 0  # 0..2**63-1; the gateway always sets it, so that a replay samples the same tokens
    min_tokens: int = 0  # outputs before end-of-sequence and stop tokens may be sampled
    presence_penalty: float = 0.0  # -2..2, once per token already in the output
    frequency_penalty: float = 0.0  # -2..2, times its count in the output
    repetition_penalty: float = 1.0  # > 0, divides (multiplies) positive (negative) logits of prompt and output tokens
    logit_bias: list[tuple[int, float]] = []  # (token id, added to its logit); -inf: it is never drawn
    allowed_token_ids: list[int] = []  # empty: all
    stop_token_ids: list[int] = []  # end the request, reason "stop"
    ignore_eos: bool = False
    logprobs: int = -1  # -1: none; k >= 0: the sampled token and the top k
    prompt_logprobs: int = -1  # the same for every prompt token except the first; switches prefix reuse off
    # What the output must match, as llguidance reads it: its JSON form or a Lark grammar.  "": anything.  The gateway
    # has checked it.  Only engines with EngineLoad.grammars may get it: an older engine would ignore the field.
    grammar: str = ""
    # Of LATER_FIELDS.  Token sequences, each of one token at least, that no answer completes: if all tokens of one
    # but the last were just generated, the last is not drawn.
    bad_words: list[list[int]] = []
    # Of LATER_FIELDS.  If `logprobs` >= 0, positions report these tokens, in this order, instead of the top k.
    logprob_token_ids: list[int] = []

    @property
    def alternatives(self) -> int:
        """Log probabilities of each generated position besides that of its own token; -1: not even that one."""
        return len(self.logprob_token_ids) if self.logprobs >= 0 and self.logprob_token_ids else self.logprobs


# Fields of Sampling that engines of earlier releases ignore.  An engine names those that it honours in its reports, and
# only then gets them.
LATER_FIELDS = ("bad_words", "logprob_token_ids")
PREDICTIONS = "predicted"  # name in EngineLoad.honours if the engine takes drafts from Generate.predicted
ADAPTERS = "adapter"  # name in EngineLoad.honours if the engine honours Generate.adapter


class Beams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request searches its answers instead of sampling them (engine/core/beams.py)."""

    width: int  # >= 1: choices that run side by side
    length_penalty: float = 1.0  # an answer's score is the sum of its log-probabilities / length ** length_penalty
    # True: end with `width` answers.  False: end when no beam of this length beats them.  "never": of any length.
    early_stopping: bool | Literal["never"] = False

    def most_blocks(self, prompt: int, longest: int, block_size: int) -> int:
        """Return the blocks that a search holds at most.

        `prompt`: tokens of the prompt, whose full blocks all beams share.  `longest`: most tokens of a beam, the prompt
        included.  `block_size` is in tokens."""
        shared = prompt // block_size
        return shared + self.width * (-(-longest // block_size) - shared)

    def longest(self, prompt: int, blocks: int, block_size: int) -> int:
        """Return the maximum tokens of a beam, prompt included, for which a search stays within `blocks`."""
        shared = prompt // block_size
        return block_size * (shared + max(0, blocks - shared) // self.width)


FOREVER_MS = 2**60  # a deadline that never comes


class Generate(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """One prompt to continue.  `n` choices share one prefill and fork after it.

    Choice i samples by (sampling.seed, i).  So the first equals that of n = 1, and a larger n changes no earlier
    choice."""

    id: str  # unique; every Delta of this request carries it
    gateway: str  # it gets the answer
    token_ids: list[int]  # never empty
    max_new_tokens: int  # >= 1, for each choice
    sampling: Sampling
    deadline_ms: int  # unix time on Redis' clock; past it the engine finishes the request with "deadline"
    cache_salt: str = ""  # requests share a prefix only under an equal salt
    traceparent: str = ""
    n: int = 1
    priority: int = 0  # lower goes first, see PRIORITIES
    tenant: str = ""  # its tokens are charged to this tenant: fairness is between tenants
    weight: float = 1.0  # > 0: the tenant's share relative to other tenants
    queued_ms: int = 0  # unix time on Redis' clock when it was queued; 0: not known
    tracestate: str = ""  # W3C trace state of other systems, next to `traceparent`
    # Beam search: the n best answers, each sent complete, in one delta.  None: answers are sampled.
    beams: Beams | None = None
    prefixes: bytes = b""  # digests of the prompt's prefixes (engine/wire/prefixes.py); empty: none is looked for
    anchors: list[int] = []  # positions at which later prompts may leave this one, ascending: ends of turns
    retain_s: float = 0.0  # seconds for which its cached blocks are evicted last, once it has ended
    adapter: str = ""  # LoRA adapter, as `name@digest`; "": the base model.  Only engines that name it may get it
    predicted: list[int] = []  # tokens that the client expects in the answer: drafts are taken from them
    adapter_path: str = ""  # folder of the adapter's files, which each engine that honours adapters can read

    @property
    def width(self) -> int:
        """Sequences that are computed: beams, of which `n` are returned, or `n`."""
        return self.beams.width if self.beams is not None else self.n


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True):
    """Stop every choice of a request, or one.  An unknown or finished one is ignored."""

    id: str
    # Another engine has the request now: drop it without a Delta.
    reassigned: bool = msgspec.field(default=False, name="lost")
    index: int = -1  # index among the n choices; -1: all of them


# Drafts from Generate.predicted that one engine computed for a choice so far: (accepted and in the answer, others).
Predictions = tuple[int, int]


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of one choice; no Delta follows it."""

    reason: FinishReason
    stop_token: int = -1  # the token that ended it, when reason is "stop"; it is the last of the delta's token_ids
    message: str = ""  # only for "error": one line a client may see
    score: float = 0.0  # score of a beam-search answer, as defined by Beams
    # Tokens that a beam search computed besides those of its answers; on one Finish of each of its requests.
    searched: int = 0
    # 1 - blocks / entries of the block tables of all beams of the request, over the search: what their sharing saved.
    shared: float = 0.0
    # For "error": CONSTRAINT, or "": the engine is at fault.
    code: str = ""
    predictions: Predictions | None = None  # drafts of the choice; None: none came from `predicted`


# The request is at fault: its grammar or other constraints cannot be followed, or leave no token, or the engine's
# settings do not allow what it asks for, such as more choices than `max_seqs`.
CONSTRAINT = "constraint"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one position, from the raw logits (before temperature, penalties and bias)."""

    logprob: float  # log-probability of the sampled or prompt token
    top: list[tuple[int, float]] = []  # (token id, logprob), most probable first


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one choice.  `first`, the output position of token_ids[0], shows replays and gaps."""

    id: str
    first: int
    token_ids: list[int]
    finish: Finish | None = None
    index: int = 0  # index among the n choices
    logprobs: list[TokenLogprob] | None = None  # one for each token id
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the delta with first == 0
    prompt_logprobs: list[TokenLogprob] | None = None  # log probabilities of the prompt; set if first == 0
    predictions: Predictions | None = None  # set on deltas of steps that computed drafts from Generate.predicted


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """What an engine reports of itself in each sync, for every gateway's readings of the fleet."""

    engine: str
    model: str
    fingerprint: str  # digest of weights, dtype and config: the prefix-cache namespace
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    block_size: int  # tokens
    total_blocks: int
    free_blocks: int  # never used, or cached and idle: available to new requests
    cached_blocks: int  # the idle part of free_blocks that still holds a reusable prefix
    running: int  # sequences
    waiting: int  # sequences inside the engine that are preempted or not yet started
    waiting_tokens: int  # their prompt (and regenerated) tokens
    time_ms: int  # unix time of this reading on the engine's own clock: other processes may only see that it changes
    tokens_per_s: float = 0.0  # output tokens, moving average over the time in which requests wait
    blocks_per_s: float = 0.0  # drain rate: blocks given back by finished sequences, average over the same time
    preemptions: int = 0  # preemptions since start; all counts below likewise
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    draining: bool = False  # claims no new requests
    predicted_peak_blocks: int = 0  # predicted peak KV usage of the running sequences, blocks
    step_s: float = 0.0  # seconds from one step's results to the next one's, moving average over steps; 0: not known
    swapped: int = 0  # waiting sequences whose KV blocks are in host memory
    swap_preemptions: int = 0  # preemptions since start that copied KV blocks to host memory
    swapped_out_bytes: int = 0  # bytes copied to host memory since start
    swapped_in_bytes: int = 0  # bytes copied back to the device since start
    paused: int = 0  # sequences that keep their blocks and wait because the pool is full; not in `running`
    pauses: int = 0  # how often a sequence began to wait like that
    # Forecast accuracy: (q, outputs judged, those of them no longer than quantile q as predicted at their start).  If
    # the forecast is right, their share is q.
    length_calibration: list[tuple[float, int, int]] = []
    peaks_judged: int = 0  # bounds on the blocks of all running sequences, compared with the blocks they held
    peaks_passed: int = 0  # those bounds that were exceeded
    peaks_bound_blocks: int = 0  # sum of the bounds
    peaks_blocks: int = 0  # sum of the blocks held
    audits: int = 0  # checks of the block accounting since start
    alarms: int = 0  # the checks that found an accounting error
    yields: int = 0  # preemptions for fairness since start: they freed blocks for a tenant below its share
    crowd: list[str] = []  # tenants that hold their share of its KV cache or more
    # Prompt tokens of other tenants that could start at once, if the newest sequences of tenants over their share
    # were preempted.
    yield_tokens: int = 0
    eos_ids: list[int] = []  # tokens that end an answer unless the request ignores them
    grammars: bool = False  # it honours Sampling.grammar
    beams: int = 0  # maximum Beams.width that it honours; 0: it has no beam search
    # Blocks that static allocation would hold for the sequences in the batch, each at its maximum length.
    static_blocks: int = 0
    slots_filled: float = 0.0  # share of token slots in held blocks that hold a token, 0 to 1; updated once per second
    honours: list[str] = []  # those of LATER_FIELDS that it knows
    adapters: list[str] = []  # LoRA adapters in its device slots, as in Generate.adapter
    drafts: dict[str, tuple[int, int]] = {}  # (computed, accepted) since start, by source; empty: nothing drafts
    refused_drafts: int = 0  # drafts found since start that steps did not compute, because they would not have paid
    jumped_tokens: int = 0  # output tokens since start that a grammar forced and that took no step of their own


class TokenBatch(msgspec.Struct, frozen=True):
    """Everything that one step of one engine sends to one gateway: its part of a token message."""

    engine: str
    deltas: list[Delta]

    def split(self, count: int) -> list[TokenBatch]:
        """Return at least one batch, each of at most `count` deltas, in the same order."""
        if len(self.deltas) <= count:
            return [self]
        return [TokenBatch(self.engine, self.deltas[at : at + count]) for at in range(0, len(self.deltas), count)]


class HotPrefix(msgspec.Struct, frozen=True, array_like=True):
    """Tokens with which requests begin, kept so that an engine can compute their keys and values before it serves."""

    tokens: bytes  # token ids, 4 bytes each, little endian
    cache_salt: str = ""


class SequenceBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The block table of one sequence, as runs of neighbouring blocks."""

    id: str  # request id
    index: int  # index among the request's n choices
    runs: bytes  # first block and count of each run, 4 bytes each, little endian


class PoolState(msgspec.Struct, frozen=True):
    """What every block of an engine's pool holds, for clients that watch it.  Its size is bounded."""

    engine: str
    blocks: int
    per_cell: int  # blocks per cell; the cell has the maximum of their values
    cells: bytes  # a byte each: 0 free, 1 cached without an owner, else 1 + tables that contain the block, 255 at most
    sequences: list[SequenceBlocks] = []
    left_out: int = 0  # sequences with blocks that are not among `sequences`
    host_blocks: int = 0  # blocks in host memory for swapped-out sequences
    host_used: int = 0
